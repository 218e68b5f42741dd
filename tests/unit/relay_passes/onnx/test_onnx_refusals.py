"""Nodes that ONNX does not allow, or that nothing here can compute: refused, by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from tests.unit.relay_passes.onnx.single_nodes import bare_model_of, built, floats, model_of
from tvm_ext import relay
from tvm_ext.errors import ModelError
from tvm_ext.relay_passes.onnx.import_model import checked_graph, clean_graph

IMAGE = {"x": floats(1, 4, 6, 6)}
CONVOLVED = {**IMAGE, "w": floats(8, 4, 3, 3)}
ROW = {"x": floats(2, 5)}


@pytest.mark.parametrize(
    ("operator", "inputs", "attributes", "constants", "match"),
    [
        ("Conv", CONVOLVED, {"kernel_shape": [5, 5]}, {}, "kernel_shape"),
        ("Conv", CONVOLVED, {"dilations": [0, 1]}, {}, "dilations"),
        ("Conv", CONVOLVED, {"strides": [1, 0]}, {}, "strides"),
        ("Conv", CONVOLVED, {"pads": [0, -1, 0, 0]}, {}, "pads"),
        ("Conv", CONVOLVED, {"group": 3}, {}, "channels"),
        ("Conv", {**CONVOLVED, "b": floats(7)}, {}, {}, "bias"),
        ("ConvTranspose", {**IMAGE, "w": floats(3, 4, 3, 3)}, {}, {}, "channels"),
        ("ConvTranspose", {**IMAGE, "w": floats(4, 4, 3, 3)}, {"output_padding": [0, 1]}, {}, "output_padding"),
        ("MaxPool", IMAGE, {"kernel_shape": [0, 2]}, {}, "kernel"),
        ("MaxPool", IMAGE, {"kernel_shape": [2, 2], "dilations": [0, 1]}, {}, "dilations"),
        ("MaxPool", IMAGE, {"kernel_shape": [2, 2], "pads": [2, 0, 0, 0]}, {}, "pads"),
        ("AveragePool", IMAGE, {"kernel_shape": [9, 1]}, {}, "window"),
        ("TopK", ROW, {}, {"k": np.asarray([9])}, "between 1"),
        ("Split", ROW, {"axis": 1}, {"s": np.asarray([2, 2])}, "add up"),
        ("SpaceToDepth", IMAGE, {"blocksize": 4}, {}, "block"),
        ("DepthToSpace", {"x": floats(1, 6, 4, 4)}, {"blocksize": 2}, {}, "block"),
        ("ReduceSum", ROW, {}, {"axes": np.asarray([0, -2])}, "each once"),
        (
            "MaxUnpool",
            {**IMAGE, "i": np.zeros((1, 1, 6, 6), np.int64)},
            {"kernel_shape": [2, 2]},
            {},
            "indices of shape",
        ),
        ("NonMaxSuppression", {"x": floats(1, 3, 4), "s": floats(1, 1, 2)}, {}, {"n": np.asarray([3])}, "scores of"),
        ("Mod", {"x": np.asarray([3])}, {}, {"z": np.asarray([0])}, "zero"),
    ],
)
def test_refused_by_name(
    operator: str, inputs: Mapping[str, Any], attributes: Mapping[str, Any], constants: Mapping[str, Any], match: str
) -> None:
    outputs = ["y", "z"] if operator in ("Split", "TopK") else ["y"]
    node = helper.make_node(operator, [*inputs, *constants], outputs, "culprit", **attributes)
    model = bare_model_of(node, inputs, constants)
    with pytest.raises(ModelError, match=match) as raised:
        clean_graph(checked_graph(_typed(model)))
    assert "culprit" in str(raised.value) or "shapes contradict" in str(raised.value)


@pytest.mark.parametrize("code", [TensorProto.FLOAT8E5M2, TensorProto.INT4])
def test_narrow_types_are_refused(code: int) -> None:
    node = helper.make_node("Cast", ["x"], ["y"], "culprit", to=code)
    model = model_of(node, ROW, opset=21)
    model.graph.output[0].type.tensor_type.elem_type = code
    with pytest.raises(ModelError, match=r"culprit.*element type"):
        relay.frontend.from_onnx(model)


def _typed(model: onnx.ModelProto) -> onnx.ModelProto:
    """Outputs get the element type of the first input, which the checker wants declared."""
    code = model.graph.input[0].type.tensor_type.elem_type
    for index, value in enumerate(model.graph.output):
        value.type.tensor_type.elem_type = (
            TensorProto.INT64 if index and model.graph.node[0].op_type == "TopK" else code
        )
    return model


def test_operators_of_foreign_domains_are_not_taken_for_onnxs() -> None:
    node = helper.make_node("Add", ["x", "x"], ["y"], "culprit", domain="my.domain")
    graph = helper.make_graph(
        [node],
        "test",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2])],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("my.domain", 1)]
    with pytest.raises(ModelError, match=r"my\.domain\.Add"):
        relay.frontend.from_onnx(helper.make_model(graph, opset_imports=opsets, ir_version=10))


def test_more_indices_than_elements_are_refused() -> None:
    inputs = {"x": floats(2, 3), "indices": np.zeros((2, 4), np.int64), "updates": floats(2, 4)}
    model = model_of(helper.make_node("ScatterElements", list(inputs), ["y"], axis=0), inputs)
    with pytest.raises(ModelError, match=r"ScatterElements node .* has indices of shape \[2, 4\] for data of \[2, 3\]"):
        built(model, inputs)
