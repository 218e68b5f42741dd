"""Pools: where their windows lie, by ONNX's text, and what the graph is rewritten to."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from onnx import helper

from tests.support.onnx_evaluator import by_onnx_runtime
from tests.support.operator_types.definitions import pool as definition
from tests.support.operator_types.draw_windows import pool as drawn_pool
from tests.unit.relay_passes.onnx.single_nodes import assert_same, built, cleaned, floats, model_of

WITHOUT_ELEMENTS = {"kernel_shape": [2], "dilations": [3], "pads": [2, 3]}
"""Over one pixel: of three windows the first and the last one reach padding alone."""


def _node(operator: str, attributes: dict[str, Any], outputs: int) -> Any:
    return helper.make_node(operator, ["x"], ["y", "places"][:outputs], **attributes)


@pytest.mark.parametrize("seed", range(60))
def test_windows_lie_where_onnx_says(seed: int) -> None:
    """The cleaned graph has plain pads, of which every implementation has one opinion."""
    operator, _, recipe = drawn_pool(random.Random(f"pools {seed}"))
    (operand,) = recipe.operands
    assert operand is not None
    attributes = dict(recipe.attributes)
    x = floats(*operand.shape, seed=seed)
    model = cleaned(model_of(_node(operator, attributes, recipe.outputs), {"x": x}, opset=22))
    pools = [node for node in model.graph.node if node.op_type == operator]
    for node in pools:
        given = {item.name: helper.get_attribute_value(item) for item in node.attribute}
        assert not given.get("ceil_mode", 0) and given.get("auto_pad", b"NOTSET") == b"NOTSET"
        pads = given.get("pads", [])
        if any(pad >= extent for pad, extent in zip(pads, given["kernel_shape"] * 2, strict=False)):
            return  # ONNX Runtime refuses it
    assert_same(by_onnx_runtime(model.SerializeToString(), {"x": x}), _wanted(operator, attributes, x), rtol=1e-4)


def _wanted(operator: str, attributes: dict[str, Any], x: Any) -> list[Any]:
    return [
        value.astype(x.dtype if value.dtype.kind == "f" else value.dtype)
        for value in definition(operator, attributes, [x])
    ]


@pytest.mark.parametrize("include", [0, 1])
@pytest.mark.parametrize("rank", [1, 3])
def test_averages_of_windows_without_elements_are_zero(rank: int, include: int) -> None:
    attributes = {
        **{name: value * rank for name, value in WITHOUT_ELEMENTS.items() if name != "pads"},
        "pads": [2] * rank + [3] * rank,
        "count_include_pad": include,
    }
    x = floats(1, 2, *[1] * rank)
    got = built(model_of(_node("AveragePool", attributes, 1), {"x": x}, opset=22), {"x": x})
    assert_same(got, _wanted("AveragePool", attributes, x))
    assert (got[0] == 0).any() and (got[0] != 0).any()


def test_what_ceil_mode_adds_counts_in_no_average() -> None:
    """Windows of 3 in steps of 2 over 4 pixels and one of padding on either side: the last one has one pixel more."""
    attributes = {"kernel_shape": [3], "strides": [2], "pads": [1, 1], "ceil_mode": 1, "count_include_pad": 1}
    x = np.asarray([[[3, 6, 9, 12]]], np.float32)
    got = built(model_of(_node("AveragePool", attributes, 1), {"x": x}, opset=22), {"x": x})
    np.testing.assert_allclose(got[0], [[[3, 9, 6]]])
