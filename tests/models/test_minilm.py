"""The MiniLM sentence encoder with its real weights, on real sentences."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from benchmarks.networks import bert
from tvm_ext.bench.compare import relative_error

TOLERANCE = 1e-4

SENTENCES = (
    "A man is playing a guitar on the street.",
    "Someone performs music outside with a guitar.",
    "The central bank raised interest rates by half a percent.",
    "Monetary policy was tightened again this month.",
)

# The first 8 of 384 components, printed by minilm_reference.py with torch 2.13.0+cpu and transformers 5.23.0. All
# components of our graph in ONNX Runtime 1.31.1 were within 1.5e-7 of it, all token embeddings within 4.6e-6.
TRANSFORMERS = np.array(
    (
        (0.0772182, -0.0377375, 0.0399663, -0.0356587, -0.1374448, -0.0123002, 0.0986597, -0.0086943),
        (0.0166389, 0.0330897, 0.0140504, -0.0523027, -0.0868418, 0.0202934, 0.0804411, 0.0116194),
        (0.0709244, -0.0238305, -0.0297538, 0.0234552, 0.0458447, -0.1148617, -0.1144434, 0.1067281),
        (0.0351672, -0.0113726, 0.0103218, 0.0692652, 0.0203353, -0.0326971, -0.0523940, -0.0536141),
    )
)


def test_graph_is_the_published_model(build_model: Any, reference: Any) -> None:
    model = build_model("minilm", batch=4, sequence=32)
    embeddings, _ = reference(model, bert.tokenize(SENTENCES, 32))
    np.testing.assert_allclose(embeddings[:, :8], TRANSFORMERS, atol=2e-6)


@pytest.mark.slow  # a whole encoder; bert_base_layer of test_models.py is everyday
def test_similar_sentences_score_closer(build_model: Any, compiled: Any, reference: Any) -> None:
    model = build_model("minilm", batch=4, sequence=32)
    inputs = bert.tokenize(SENTENCES, 32)
    embeddings, tokens = compiled(model)(inputs)
    np.testing.assert_allclose(embeddings[:, :8], TRANSFORMERS, atol=2e-6)
    assert relative_error([embeddings, tokens], reference(model, inputs)) <= TOLERANCE
    similarity = embeddings @ embeddings.T
    np.testing.assert_allclose(np.diag(similarity), 1.0, rtol=1e-5)
    # Music with music (0.70) and money with money (0.38); the nearest pair across has -0.07.
    assert min(similarity[0, 1], similarity[2, 3]) > similarity[:2, 2:].max() + 0.3


@pytest.mark.slow  # what the mask leaves out is compared above
def test_padding_does_not_change_a_sentence(build_model: Any, compiled: Any) -> None:
    padded, _ = compiled(build_model("minilm", batch=2, sequence=48))(bert.tokenize(SENTENCES[:2], 48))
    tight, _ = compiled(build_model("minilm", batch=2, sequence=16))(bert.tokenize(SENTENCES[:2], 16))
    assert relative_error([padded], [tight]) <= TOLERANCE
