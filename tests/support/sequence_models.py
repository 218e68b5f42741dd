"""Models in which sequences pass between operators that are compiled and a Loop that only ONNX Runtime runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

WIDTH = 6
KINDS = ("appended", "split before", "given", "result", "split result")


def model(kind: str, rows: int | str = 1) -> onnx.ModelProto:
    """A layer, a Loop that appends a row each step, and another layer on all rows, or what ``kind`` has of these.

    The sequence starts "appended" to nothing, "split before" the loop or "given" by an input; a "result" ends there.
    """
    layer = helper.make_node("MatMul", ["x", "w"], ["first"])
    rest = [
        helper.make_node("ConcatFromSequence", ["rows"], ["joined"], axis=0),
        helper.make_node("MatMul", ["joined", "w"], ["y"]),
    ]
    start = {
        "split before": [layer, helper.make_node("SplitToSequence", ["first"], ["none"], axis=0)],
        "given": [layer],
    }.get(kind, [layer, helper.make_node("SequenceEmpty", [], ["none"], dtype=TensorProto.FLOAT)])
    nodes = [*start, _loop(), *rest]
    inputs, outputs = [_tensor("x", [rows, WIDTH])], [_tensor("y", ["all", WIDTH])]
    if kind == "given":
        inputs.append(_sequence("none"))
    elif kind == "result":
        nodes, outputs = nodes[:-2], [_sequence("rows")]
    elif kind == "split result":
        nodes = [layer, helper.make_node("SplitToSequence", ["first"], ["parts"], axis=1)]
        outputs = [_sequence("parts")]
    constants = [numpy_helper.from_array(np.eye(WIDTH, dtype="float32") * 2, "w")]
    constants.append(numpy_helper.from_array(np.array(3, "int64"), "steps"))
    graph = helper.make_graph(nodes, "rows", inputs, outputs, constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def feed(kind: str) -> dict[str, Any]:
    """Values of the inputs, a row."""
    row = np.arange(WIDTH, dtype="float32")[None]
    return {"x": row, **({"none": [row - 1, row + 1]} if kind == "given" else {})}


def assert_same(got: Any, wanted: Any) -> None:
    """Equal tensors, or sequences of as many."""
    assert isinstance(got, list) == isinstance(wanted, list)
    for one, other in zip(got, wanted, strict=True) if isinstance(got, list) else [(got, wanted)]:
        np.testing.assert_allclose(one, other, rtol=1e-6)


def _loop() -> onnx.NodeProto:
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["go"], ["on"]),
            helper.make_node("Add", ["row", "row"], ["next"]),
            helper.make_node("SequenceInsert", ["before", "next"], ["after"]),
        ],
        "append",
        [
            _scalar("step", TensorProto.INT64),
            _scalar("go", TensorProto.BOOL),
            _tensor("row", [1, WIDTH]),
            _sequence("before"),
        ],
        [_scalar("on", TensorProto.BOOL), _tensor("next", [1, WIDTH]), _sequence("after")],
    )
    return helper.make_node("Loop", ["steps", "", "first", "none"], ["end", "rows"], body=body)


def _scalar(name: str, kind: int) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, [])


def _tensor(name: str, shape: Sequence[int | str]) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)


def _sequence(name: str) -> onnx.ValueInfoProto:
    return helper.make_tensor_sequence_value_info(name, TensorProto.FLOAT, ["rows", "columns"])
