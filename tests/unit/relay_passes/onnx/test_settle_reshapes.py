"""Targets of Reshape that are known but for one extent."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tvm_ext.relay_passes.onnx.graph import OnnxGraph
from tvm_ext.relay_passes.onnx.import_model import checked_graph
from tvm_ext.relay_passes.onnx.settle_reshapes import settle_reshapes

CONSTANTS: dict[str, Any] = {
    "zero": [0], "one": [1], "two": [2], "three": [3], "last": [-1], "both": [1, 2], "first": 0, "eight": [8]
}  # fmt: skip


def graph_of(*nodes: onnx.NodeProto, shape: tuple[Any, ...] = ("steps", 2, 4)) -> OnnxGraph:
    made = helper.make_graph(
        list(nodes),
        "targets",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.asarray(value, np.int64), name) for name, value in CONSTANTS.items()],
    )
    return checked_graph(helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=8))


def node(operator: str, inputs: str, output: str, **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(operator, inputs.split(), [output], **attributes)


SHAPE, RESHAPE = node("Shape", "x", "s"), node("Reshape", "x target", "y")
TARGETS = {
    "slices, one of them -1": ([
        node("Slice", "s zero one", "t"), node("Slice", "s one three zero one", "rest"),
        node("Concat", "t rest", "target", axis=0),
    ], [-1, 2, 4]),
    "an extent that is gathered": ([
        node("Gather", "s first", "scalar"), node("Unsqueeze", "scalar zero", "t"),
        node("Concat", "t eight", "target", axis=0),
    ], [-1, 8]),
    "columns that are multiplied": ([
        node("Gather", "s both", "rest"), node("Mul", "rest two", "twice"), node("Slice", "s zero one", "t"),
        node("Concat", "t twice", "target", axis=0),
    ], [-1, 4, 8]),
    "the whole shape": ([node("Identity", "s", "target")], [-1, 2, 4]),
    "a part of it, by attributes": ([
        node("Shape", "x", "rest", start=-2), node("Concat", "last rest", "target", axis=0)
    ], None),
    "two open extents": ([
        node("Slice", "s zero one", "t"), node("Concat", "t t eight", "target", axis=0)
    ], None),
    "what depends on values": ([
        node("ReduceSum", "x", "sum", keepdims=0), node("Cast", "sum", "number", to=TensorProto.INT64),
        node("Unsqueeze", "number zero", "t"), node("Concat", "t eight", "target", axis=0),
    ], None),
}  # fmt: skip


@pytest.mark.parametrize("name", TARGETS)
def test_a_target_is_settled_where_one_extent_is_open(name: str) -> None:
    nodes, target = TARGETS[name]
    graph = graph_of(SHAPE, *nodes, RESHAPE)
    settled = settle_reshapes(graph)
    if target is None:
        assert settled is graph
    else:
        assert settled.constants[settled.nodes[-1].input[1]].tolist() == target


def test_what_is_settled_makes_the_next_one_known() -> None:
    """The second target is computed from the first one's result."""
    first = [SHAPE, *TARGETS["an extent that is gathered"][0], node("Reshape", "x target", "z")]
    second = [
        node("Shape", "z", "s2"), node("Slice", "s2 zero one", "t2"), node("Slice", "s2 one two", "columns"),
        node("Concat", "t2 one columns", "target2", axis=0), node("Reshape", "z target2", "y"),
    ]  # fmt: skip
    settled = settle_reshapes(graph_of(*first, *second))
    assert settled.constants[settled.nodes[-1].input[1]].tolist() == [-1, 1, 8]
