"""If, Loop and Scan against ONNX Runtime: values, shapes that change, and libraries that were exported."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from tvm_ext import relay
from tvm_ext.errors import ModelError
from tvm_ext.support.arrays import Array

DRAW = np.random.default_rng(261127)
X = DRAW.standard_normal((4, 8)).astype("float32")
W = (DRAW.standard_normal((8, 8)) * 0.4).astype("float32")
FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
DEVICE = "cpu-epyc-zen5"


def _value(name: str, shape: Sequence[int] | None = (4, 8), kind: int = FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def _node(operator: str, inputs: str, outputs: str, **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(operator, inputs.split(" "), outputs.split(" "), **attributes)


def _graph(nodes: list[onnx.NodeProto], inputs: Any = (), outputs: Any = ()) -> onnx.GraphProto:
    return helper.make_graph(nodes, "inner", list(inputs), list(outputs))


def _model(nodes: list[onnx.NodeProto], outputs: Any, inputs: Any = (), **constants: Array) -> onnx.ModelProto:
    known = {"w": W, "zero": np.float32(0), "true": np.bool_(True), "far": np.int64(2**63 - 1), **constants}
    read = {name for node in nodes for name in _reads(node)}
    initializers = [numpy_helper.from_array(np.asarray(v), name) for name, v in known.items() if name in read]
    graph = helper.make_graph(nodes, "model", [_value("x"), *inputs], list(outputs), initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def _reads(node: onnx.NodeProto) -> set[str]:
    inner = [n for attribute in node.attribute for n in attribute.g.node]
    return set(node.input).union(*(_reads(n) for n in inner))


def _built(model: onnx.ModelProto) -> relay.Library:
    mod, params = relay.frontend.from_onnx(model)
    return relay.build(mod, "llvm", params=params, device=DEVICE)


def _check(model: onnx.ModelProto, *inputs: dict[str, Array]) -> None:
    peer = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    library = _built(model)
    for given in inputs:
        module = relay.GraphModule(library)
        module.run(**given)
        for place, wanted in enumerate(peer.run(None, given)):
            own = module.get_output(place).numpy()
            assert own.dtype == wanted.dtype
            np.testing.assert_allclose(own, wanted, rtol=1e-5, atol=1e-5)


POSITIVE = [_node("ReduceSum", "x", "sum", keepdims=0), _node("Greater", "sum zero", "positive")]
BRANCHES = {
    "then_branch": _graph([_node("MatMul", "x w", "m"), _node("Relu", "m", "t")], outputs=[_value("t")]),
    "else_branch": _graph([_node("Neg", "x", "e")], outputs=[_value("e")]),
}


def test_a_branch_is_taken_by_value() -> None:
    choice = _node("If", "positive", "y", **BRANCHES)
    _check(_model([*POSITIVE, choice, _node("Tanh", "y", "z")], [_value("z")]), {"x": X}, {"x": -X})


def test_an_if_in_a_branch_with_two_results() -> None:
    inner = _node("If", "large", "p q", then_branch=_two("Neg"), else_branch=_two("Exp"))
    then = _graph(
        [_node("Abs", "x", "a"), _node("Greater", "sum five", "large"), inner], outputs=[_value("p"), _value("q")]
    )
    choice = _node("If", "positive", "y z", then_branch=then, else_branch=_two("Sin", "x"))
    model = _model([*POSITIVE, choice], [_value("y"), _value("z")], five=np.float32(5))
    _check(model, {"x": np.full((4, 8), 0.1, "float32")}, {"x": np.ones((4, 8), "float32")}, {"x": -np.abs(X)})


def _two(operator: str, read: str = "a") -> onnx.GraphProto:
    nodes = [_node(operator, read, f"{operator}_1"), _node("Identity", read, f"{operator}_2")]
    return _graph(nodes, outputs=[_value(f"{operator}_1"), _value(f"{operator}_2")])


def _body(*, stacked: bool = False, until: bool = False) -> onnx.GraphProto:
    """h becomes tanh(h w) + step, until its sum is above a limit."""
    nodes = [
        _node("MatMul", "h w", "m"),
        _node("Tanh", "m", "tanh"),
        _node("Cast", "i", "step", to=FLOAT),
        _node("Add", "tanh step", "next"),
    ]
    if until:
        nodes += [_node("ReduceSum", "next", "total", keepdims=0), _node("Less", "total limit", "more")]
    else:
        nodes.append(_node("Identity", "go", "more"))
    rows = [_value("row", (8,))] if stacked else []
    if stacked:
        nodes.append(_node("ReduceMax", "next axis", "row", keepdims=0))
    return _graph(
        nodes,
        [_value("i", (), INT64), _value("go", (), BOOL), _value("h")],
        [_value("more", (), BOOL), _value("next"), *rows],
    )


@pytest.mark.parametrize("count", [0, 1, 7])
def test_a_loop_of_known_length_stacks_its_results(count: int) -> None:
    loop = _node("Loop", "count true x", "y all", body=_body(stacked=True))
    constants = {"count": np.int64(count), "axis": np.array([0])}
    _check(_model([loop], [_value("y"), _value("all", (count, 8))], **constants), {"x": X})


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("limit", [-1e9, 40.0, 3000.0])
def test_a_loop_ends_by_its_condition(limit: float) -> None:
    loop = _node("Loop", "far true x", "y", body=_body(until=True))
    _check(_model([loop, _node("Neg", "y", "z")], [_value("z")], limit=np.float32(limit)), {"x": X})


def test_number_of_steps_and_first_condition_are_inputs() -> None:
    loop = _node("Loop", "count start x", "y", body=_body(until=True))
    model = _model(
        [loop], [_value("y")], [_value("count", (), INT64), _value("start", (), BOOL)], limit=np.float32(500)
    )
    runs = [(0, True), (1, True), (5, True), (100, True), (5, False), (-3, True)]
    _check(model, *({"x": X, "count": np.array(n), "start": np.array(go)} for n, go in runs))


def test_a_loop_in_a_branch_in_a_loop() -> None:
    inner = _node("Loop", "three true h", "deep", body=_graph(
        [_node("Sin", "v", "sin"), _node("Add", "sin x", "v2"), _node("Identity", "c", "c2")],
        [_value("k", (), INT64), _value("c", (), BOOL), _value("v")],
        [_value("c2", (), BOOL), _value("v2")],
    ))  # fmt: skip
    branches = {
        "then_branch": _graph([inner], outputs=[_value("deep")]),
        "else_branch": _graph([_node("Neg", "h", "flat")], outputs=[_value("flat")]),
    }
    nodes = [
        _node("Mod", "i two", "odd"),
        _node("Cast", "odd", "is_odd", to=BOOL),
        _node("If", "is_odd", "next", **branches),
        _node("Identity", "go", "more"),
    ]
    body = _graph(
        nodes, [_value("i", (), INT64), _value("go", (), BOOL), _value("h")], [_value("more", (), BOOL), _value("next")]
    )
    constants = {"count": np.int64(5), "two": np.int64(2), "three": np.int64(3)}
    _check(_model([_node("Loop", "count true x", "y", body=body)], [_value("y")], **constants), {"x": X})


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("backward", [0, 1])
def test_a_scan_of_opset_8_has_a_batch(backward: int) -> None:
    body = _graph(
        [_node("Add", "s p", "t"), _node("Mul", "t t", "r")],
        [_value(n, (8,)) for n in "sp"],
        [_value(n, (8,)) for n in "tr"],
    )
    scan = _node("Scan", " first x", "last all", body=body, num_scan_inputs=1, directions=[backward])
    model = _model([scan], [_value("last", (2, 8)), _value("all", (2, 3, 8))], first=X[:2])
    model.graph.input[0].CopyFrom(_value("x", (2, 3, 8)))
    model.opset_import[0].version = 8
    _check(model, {"x": DRAW.standard_normal((2, 3, 8)).astype("float32")})


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("backward", [0, 1])
def test_scans_along_any_axis_either_way(backward: int) -> None:
    body = _graph(
        [_node("Add", "s slice", "s2"), _node("Mul", "s2 slice", "out"), _node("Identity", "s2", "s3")],
        [_value("s", (4,)), _value("slice", (4,))],
        [_value("s3", (4,)), _value("out", (4,))],
    )
    scan = _node(
        "Scan", "first x", "last all", body=body, num_scan_inputs=1, scan_input_axes=[1],
        scan_input_directions=[backward], scan_output_axes=[-1], scan_output_directions=[1 - backward],
    )  # fmt: skip
    _check(_model([scan], [_value("last", (4,)), _value("all", (4, 8))], first=np.ones(4, "float32")), {"x": X})


def test_an_exported_library_runs_its_loop(tmp_path: Path) -> None:
    loop = _node("Loop", "far true x", "y", body=_body(until=True))
    library = _built(_model([loop], [_value("y")], limit=np.float32(400)))
    library.export_library(tmp_path / "loop.so")
    before, after = (relay.GraphModule(own) for own in (library, relay.load(tmp_path / "loop.so")))
    for module in (before, after):
        module.run(x=X)
    np.testing.assert_array_equal(before.get_output(0).numpy(), after.get_output(0).numpy())


def test_results_that_are_too_large_are_refused() -> None:
    loop = _node("Loop", "count true x", "y all", body=_body(stacked=True), name="long")
    constants = {"count": np.int64(2**40), "axis": np.array([0])}
    with pytest.raises(ModelError, match="output 'all' of Loop node 'long' has the shape") as raised:
        _built(_model([loop], [_value("y"), _value("all", None)], **constants))
    assert "tensor_elements" in raised.value.remedy


GROWING = _graph(
    [_node("Concat", "h h", "next", axis=0), _node("Identity", "go", "more")],
    [_value("i", (), INT64), _value("go", (), BOOL), _value("h", None)],
    [_value("more", (), BOOL), _value("next", None)],
)
SHORTER = _graph([_node("ReduceSum", "x", "s")], outputs=[_value("s", None)])


@pytest.mark.parametrize(
    ("nodes", "constants", "problem"),
    [
        ([_node("Loop", "count true x", "y", body=GROWING, name="grow")], {"count": np.int64(3)},
         "Loop node 'grow': carried value 'x' is float32 of 4x8 before a step, float32 of 8x8 after it"),
        ([_node("Loop", "far true x", "h2 y", body=_body(stacked=True, until=True), name="rows")],
         {"limit": np.float32(1), "axis": np.array([0])}, "Loop node 'rows': output 'y' has as many elements"),
        ([*POSITIVE, _node("If", "positive", "y", **{**BRANCHES, "else_branch": SHORTER}, name="either")],
         {}, "If node 'either': output 'y' is float32 of 4x8 in one branch, float32 of 1x1 in the other"),
    ],
)  # fmt: skip
def test_changing_shapes_are_refused_by_name(
    nodes: list[onnx.NodeProto], constants: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ModelError, match="results have known shapes") as raised:
        _built(_model(nodes, [_value("y", None)], **constants))
    assert problem in str(raised.value)
    assert "InferenceSession" in raised.value.remedy
