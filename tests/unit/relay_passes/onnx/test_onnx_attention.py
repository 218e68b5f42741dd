"""Attention: the rewritten graph against ONNX's reference, in random forms."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper
from onnx.reference import ReferenceEvaluator

from tests.unit.relay_passes.onnx.single_nodes import assert_same, built, cleaned, floats, model_of
from tvm_ext.errors import ModelError


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("seed", range(10))
def test_random_attention(seed: int) -> None:
    rng = random.Random(seed)
    groups, key_heads, features, queries, keys = rng.choice((1, 3)), 2, 4, rng.choice((1, 3)), rng.choice((3, 5))
    inputs = {
        "q": floats(2, groups * key_heads, queries, features, seed=seed),
        "k": floats(2, key_heads, keys, features, seed=seed + 50),
        "v": floats(2, key_heads, keys, features + 1, seed=seed + 90),
    }
    names = ["q", "k", "v", ""]
    past = rng.choice((0, 2))
    if rng.random() < 0.6:
        mask = np.random.default_rng(seed).random((queries, keys + past)) < 0.5
        mask[0] = False
        inputs["mask"] = mask if rng.random() < 0.5 else np.where(mask, floats(*mask.shape), -np.inf)
        inputs["mask"] = inputs["mask"].astype(np.bool_ if inputs["mask"].dtype == np.bool_ else np.float32)
        names[3] = "mask"
    if past:
        inputs["pk"], inputs["pv"] = floats(2, key_heads, past, features), floats(2, key_heads, past, features + 1)
        names += ["pk", "pv"]
    attributes: dict[str, Any] = {"is_causal": rng.choice((0, 1)), "qk_matmul_output_mode": rng.choice((2, 3))}
    if rng.random() < 0.3:
        attributes["softcap"] = 2.0
    if rng.random() < 0.3:
        attributes["scale"] = 0.3
    outputs = ["y", "present_key", "present_value", "scores"] if past else ["y", "", "", "scores"]
    node = helper.make_node("Attention", names, outputs, **attributes)
    model = model_of(node, inputs, opset=24)
    wanted = [value for value, name in zip(_reference(model, inputs), outputs, strict=True) if name]
    with np.errstate(all="ignore"):
        got = ReferenceEvaluator(cleaned(model)).run(None, inputs)
    assert_same(got, wanted)
    if seed < 2:
        assert_same(built(model, inputs), wanted, rtol=1e-4)


def _reference(model: onnx.ModelProto, inputs: Mapping[str, Any]) -> list[Any]:
    """All four outputs, for the evaluator cannot leave one out."""
    whole = onnx.ModelProto()
    whole.CopyFrom(model)
    names = ["y", "present_key", "present_value", "scores"]
    whole.graph.node[0].output[:] = names
    del whole.graph.output[:]
    whole.graph.output.extend(helper.make_empty_tensor_value_info(name) for name in names)
    return list(ReferenceEvaluator(whole).run(None, dict(inputs)))


def test_keys_without_values_are_refused() -> None:
    inputs = {"q": floats(1, 2, 3, 4), "k": floats(1, 2, 5, 4), "v": floats(1, 2, 6, 4)}
    node = helper.make_node("Attention", ["q", "k", "v"], ["y"], "attend")
    with pytest.raises(ModelError, match=r"\[1, 2, 5, 4\] and \[1, 2, 6, 4\]"):
        cleaned(model_of(node, inputs, opset=23))


def test_queries_without_features_attend_alike() -> None:
    inputs = {"q": floats(1, 2, 3, 0), "k": floats(1, 2, 5, 0), "v": floats(1, 2, 5, 4)}
    model = model_of(helper.make_node("Attention", ["q", "k", "v"], ["y"], "attend"), inputs, opset=23)
    expected = np.broadcast_to(inputs["v"].mean(axis=2, keepdims=True), (1, 2, 3, 4))
    np.testing.assert_allclose(built(model, inputs)[0], expected, rtol=1e-5)
