"""Real models, built through the front door, against ONNX Runtime on random inputs (relative error by norm)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from benchmarks.networks import models
from tvm_ext.bench.compare import relative_error

# Observed errors are around 1e-6. Deep random networks answer within 2 % of each other on white noise, so 1e-4 of the
# whole output still is 0.5 % of the part that depends on the input.
TOLERANCE = 1e-4

EVERYDAY = {1: ("mlp", "mobilenet_block", "bert_base_layer"), 8: ("mlp", "mobilenet_block")}
"""SqueezeNet is tried with its softmax below, MiniLM in `test_minilm.py`; the others where marked slow."""
CASES = [
    pytest.param(name, batch, id=f"{name}-{batch}", marks=[] if name in EVERYDAY[batch] else pytest.mark.slow)
    for batch in (1, 8)
    for name in models.names()
]


@pytest.mark.parametrize(("name", "batch"), CASES)
def test_agrees_with_onnx_runtime(name: str, batch: int, build_model: Any, compiled: Any, reference: Any) -> None:
    model = build_model(name, batch)
    run = compiled(model)
    for seed in (0, 1):
        inputs = models.random_inputs(model, seed)
        assert relative_error(run(inputs), reference(model, inputs)) <= TOLERANCE


def test_closing_softmax_agrees_with_onnx_runtime(build_model: Any, compiled: Any, reference: Any) -> None:
    model = build_model("squeezenet", logits=False)
    inputs = models.random_inputs(model)
    (shares,) = compiled(model)(inputs)
    np.testing.assert_allclose(shares.sum(), 1.0, rtol=1e-5)
    assert relative_error([shares], reference(model, inputs)) <= TOLERANCE
