"""Which operators treat each element of a batch by itself: what is proven holds, and what mixes is refused."""

from __future__ import annotations

import ast
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from tests.support.small_models import onnx_model
from tvm_ext import relay
from tvm_ext.records.batching import BatchAxes, BatchAxis, cheapest
from tvm_ext.relay_passes.batching.prove import MixedBatch, ModelAt, batch_axes
from tvm_ext.support.arrays import Array

DRAW = np.random.default_rng(3)
SHAPE = ("n", 4, 6)


def _draw(*shape: int) -> Array:
    return DRAW.integers(-3, 4, shape).astype("float32")


def _int(*values: int) -> Array:
    return np.array(values, "int64")


CONSTANTS: dict[str, Any] = {
    "w": _draw(6, 5), "left": _draw(3, 4), "row": _draw(6), "gain": _draw(6), "kernel": _draw(4, 4, 3),
    "zero": _int(0), "one": _int(1), "two": _int(2), "scalar": np.array(1), "all": _int(-1, 24),
    "flat": _int(-1, 6), "heads": _int(0, 4, 2, 3), "pads": _int(0, 1, 0, 0, 0, 2),
    "own": _int(1, 0, 0, 0, 0, 0), "twice": _int(1, 2, 1), "again": _int(2, 1, 1), "table": _draw(9, 2),
    "half": np.array([0.5], "float32"), "places": _int(2, 0), "most": np.array(1.0, "float32"), "k": _int(2),
    "tail": _int(-1, 4, 6), "spots": np.array([[0], [2], [1]]), "first": np.array([[0]]), "last": _int(1),
}  # fmt: skip


def _nodes(*calls: str) -> list[onnx.NodeProto]:
    """``"y=Softmax(x) axis=1"`` and so on."""
    nodes = []
    for call in calls:
        left, _, rest = call.partition("=")
        name, _, tail = rest.partition("(")
        inputs, _, attributes = tail.partition(")")
        options = {key: ast.literal_eval(value) for key, value in (item.split("=") for item in attributes.split())}
        nodes.append(helper.make_node(name, inputs.replace(" ", "").split(","), left.split(","), **options))
    return nodes


# Of each element of a batch its own number ``i``, and the number 2.
_OWN_PLACES = (
    "s=Shape(x)", "n=Gather(s,nothing)", "r=Range(nothing,n,scalar)", "i=Unsqueeze(r,one)", "z0=Mul(i,nothing)",
    "c=Add(z0,two)",
)  # fmt: skip

KEEPS = [
    ("y=Relu(x)",),
    ("y=Add(x,row)",),
    ("a=Mul(x,x)", "y=Sub(a,x)"),
    ("y=MatMul(x,w)",),
    ("y=MatMul(left,x)",),
    ("a=Transpose(x) perm=[0,2,1]", "y=MatMul(x,a)"),
    ("a=Reshape(x,flat)", "b=MatMul(a,w)", "c=Relu(b)", "y=MatMul(c,wide)"),
    ("a=Reshape(x,flat)", "b=Softmax(a) axis=1", "y=Reshape(b,back0)"),
    ("y=Softmax(x) axis=2",),
    ("y=LayerNormalization(x,gain,gain) axis=-1",),
    ("y=ReduceMean(x) axes=[1,2] keepdims=0",),
    ("a=ArgMax(x) axis=2 keepdims=0", "y=Gather(table,a)"),
    ("y=Conv(x,kernel) pads=[1,1]",),
    ("y=MaxPool(x) kernel_shape=[2]",),
    ("y=GlobalAveragePool(x)",),
    ("y=Concat(x,x) axis=1",),
    ("a,b=Split(x) axis=2", "y=Add(a,b)"),
    ("y=Slice(x,zero,two,one)",),
    ("y=Gather(x,places) axis=1",),
    ("a=ArgMax(x) axis=2 keepdims=1", "y=GatherND(x,a) batch_dims=2", "z=GatherND(table,a)"),
    ("a=Transpose(x) perm=[1,2,0]", "y=GatherND(a,spots)"),
    (*_OWN_PLACES, "p=Concat(i,c) axis=1", "y=GatherND(x,p)"),
    ("a=Transpose(x) perm=[1,0,2]", "b=Reshape(a,flat)", "c=MatMul(b,w)", "y=Relu(c)", "z=ReduceMax(x) axes=[2]"),
    ("a=Transpose(x) perm=[1,0,2]", "b=Softmax(a) axis=2", "y=Transpose(b) perm=[1,0,2]"),
    ("a=Unsqueeze(x,zero)", "y=Squeeze(a,zero)"),
    ("y=Flatten(x)",),
    ("y=Pad(x,pads)",),
    ("y=Tile(x,twice)",),
    ("y=CumSum(x,one)",),
    ("y,i=TopK(x,k) axis=1",),
    ("y=Clip(x,most)",),
    ("a=Relu(x)", "y=Einsum(a,x) equation='bij,bkj->bik'"),
    ("s=Shape(x)", "a=Gather(s,scalar)", "b=Cast(a) to=1", "y=Mul(x,b)"),  # the extent of axis 1
    ("s=Shape(x)", "a=Expand(row,s)", "y=Add(a,x)"),
    ("s=Shape(x)", "a=ConstantOfShape(s)", "y=Concat(a,x) axis=2"),
    ("a=Reshape(x,heads)", "b=Transpose(a) perm=[0,2,1,3]", "c=Softmax(b) axis=3", "y=Reshape(c,tail)"),
]  # fmt: skip

MIXES = [
    (("y=Softmax(x) axis=0",), "across the batch"),
    (("y=ReduceSum(x) keepdims=0",), "loses the batch"),
    (("a=ReduceMax(x) axes=[0]", "y=Sub(x,a)"), "loses the batch"),
    (("y=CumSum(x,zero)",), "across the batch|axis"),
    (("y=ArgMax(x) axis=0",), "loses the batch"),
    (("a=Reshape(x,all)", "b=Transpose(a) perm=[1,0]", "y=MatMul(a,b)"), "more than one axis"),
    (("a=Reshape(x,all)", "b=Transpose(a) perm=[1,0]", "y=MatMul(b,a)"), "loses the batch"),
    (("a=Transpose(x) perm=[1,0,2]", "y=Reshape(a,flat)"), "scattered"),
    (("s=Shape(x)", "a=Gather(s,zero)", "b=Cast(a) to=1", "y=Mul(x,b)"), "depends on the batch size"),
    (("s=Shape(x)", "a=Gather(s,zero)", "b=Cast(a) to=1", "c=Div(half,b)", "y=Pow(x,c)"), "batch size"),
    (("y=Slice(x,zero,one,zero)",), "loses|across"),
    (("y=Gather(x,zero) axis=0",), "loses|across"),
    (("y=GatherND(x,first)",), "loses|across"),
    (("a=ArgMax(x) axis=2 keepdims=1", "y=GatherND(x,a)"), "batch"),
    ((*_OWN_PLACES, "d=Sub(last,i)", "p=Concat(d,c) axis=1", "y=GatherND(x,p)"), "another place"),
    ((*_OWN_PLACES, "d=Min(i,two)", "p=Concat(i,d) axis=1", "y=GatherND(x,p)"), "another place"),
    (("y=Pad(x,own)",), "multiple|batch"),
    (("y=Tile(x,again)",), "across its batch|place|batch"),
    (("y=Concat(x,big0) axis=0",), "multiple|batch"),
    (("a=Concat(x,x) axis=0", "y=Relu(a)"), "across the batch|joins"),
    (("y,i=TopK(x,k) axis=0",), "loses|across"),
    (
        ("s=Shape(x)", "n=Gather(s,nothing)", "r=Range(nothing,n,scalar)", "c=Cast(r) to=1", "d=Reshape(c,column)",
         "y=Add(x,d)"), "batch size",
    ),
    (("y=ScatterND(x,at,update)",), "no rule|batch"),
    (("y=ReverseSequence(x,lengths) batch_axis=1 time_axis=0",), "no rule|batch|needs"),
]  # fmt: skip

EXTRA = {
    "wide": _draw(5, 6), "back0": _int(-1, 4, 6), "big0": _draw(1, 4, 6), "nothing": np.array(0),
    "column": _int(-1, 1, 1),
    "at": np.array([[0]]), "update": _draw(1, 4, 6), "lengths": np.array([1, 1, 1, 1]),
}  # fmt: skip


def _model(calls: tuple[str, ...]) -> onnx.ModelProto:
    nodes = _nodes(*calls)
    read = {name for node in nodes for name in node.input}
    constants = {name: value for name, value in (CONSTANTS | EXTRA).items() if name in read}
    outputs = ["y", *(["z"] if any("z" in node.output for node in nodes) else [])]
    return onnx_model(nodes, {"x": SHAPE}, outputs, constants, opset=17)


def _at(model: onnx.ModelProto, size: int) -> ModelAt:
    return ModelAt.of(size, *relay.frontend.from_onnx(model, shape={"x": (size, *SHAPE[1:])}))


def _axes(model: onnx.ModelProto, sizes: tuple[int, ...] = (1, 2, 3)) -> BatchAxes:
    whole = _at(model, 6)
    found = {batch_axes(whole, _at(model, size)) for size in sizes}
    assert len(found) == 1
    return found.pop()


def _run(model: onnx.ModelProto, x: Array) -> list[Array]:
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    results: list[Array] = session.run(None, {"x": x})
    return results


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("calls", KEEPS, ids=lambda calls: calls[0])
def test_what_is_proven_holds(calls: tuple[str, ...]) -> None:
    """ONNX Runtime gives single elements what it gives them in a batch, where the proof says so."""
    model = _model(calls)
    if calls[0].startswith("a=Transpose") and "Reshape" in calls[1]:
        with pytest.raises(MixedBatch, match="scattered"):  # (4 n, 6) with the batch inside
            _axes(model)
        return
    axes = _axes(model)
    x = _draw(6, *SHAPE[1:])  # type: ignore[arg-type]
    whole, single = _run(model, x), [_run(model, x[i : i + 1]) for i in range(6)]
    for place, batch in enumerate(axes.outputs):
        assert batch is not None
        np.testing.assert_array_equal(whole[place], np.concatenate([own[place] for own in single], batch.axis))


@pytest.mark.parametrize(("calls", "reason"), MIXES, ids=lambda value: value[0] if isinstance(value, tuple) else "")
def test_what_mixes_is_refused(calls: tuple[str, ...], reason: str) -> None:
    with pytest.raises(MixedBatch, match=reason):
        _axes(_model(calls), (3, 2))


def test_scattered_elements_may_come_together_again() -> None:
    """Attention of some exporters: (4, n, 6) as (4 n, 6), through a product, and back."""
    calls = ("a=Transpose(x) perm=[1,0,2]", "b=Reshape(a,flat)", "c=MatMul(b,w)", "d=Reshape(c,back1)")
    nodes = _nodes(*calls, "y=Transpose(d) perm=[1,0,2]")
    constants = {name: CONSTANTS[name] for name in ("flat", "w")} | {"back1": _int(4, -1, 5)}
    model = onnx_model(nodes, {"x": SHAPE}, ["y"], constants)
    assert _axes(model).outputs == (BatchAxis(axis=0),)


def test_places_of_a_batch_laid_out_in_a_row() -> None:
    """A mask (n * 6, 1) read at 6 i + c is each element's own; read at 6 (i + 1) + c it is not."""
    for shift, fits in ((0, True), (6, False)):
        calls = ["s=Shape(x)", "n=Gather(s,nothing)", "r=Range(nothing,n,scalar)", "i=Mul(r,six)", "j=Add(i,shift)"]
        calls += ["k=Reshape(j,column)", "p=Add(k,within)", "f=Reshape(x,long)", "y=Gather(f,p)"]
        constants = {name: EXTRA[name] for name in ("nothing", "column")} | {
            "scalar": np.array(1), "six": np.array(24), "shift": np.array(-shift), "within": np.array([[[0, 3]]]),
            "long": _int(-1, 1),
        }  # fmt: skip
        model = onnx_model(_nodes(*calls), {"x": SHAPE}, ["y"], constants)
        if fits:
            assert _axes(model).outputs == (BatchAxis(axis=0),)
        else:
            with pytest.raises(MixedBatch, match="another place"):
                _axes(model)


def test_integer_inputs_and_inputs_without_a_batch() -> None:
    nodes = _nodes("a=Gather(table,x)", "y=Add(a,z)")
    model = onnx_model(nodes, {"x": ("n",), "z": (2,)}, ["y"], {"table": CONSTANTS["table"]})
    model.graph.input[0].type.tensor_type.elem_type = TensorProto.INT64
    at = [ModelAt.of(n, *relay.frontend.from_onnx(model, shape={"x": (n,)})) for n in (4, 1)]
    assert batch_axes(*at) == BatchAxes(inputs=(BatchAxis(axis=0), None), outputs=(BatchAxis(axis=0),))


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 64), st.dictionaries(st.integers(1, 64), st.integers(1, 50), min_size=1, max_size=5))
def test_buckets_that_cost_least(size: int, costs: dict[int, int]) -> None:
    parts = cheapest(size, costs)
    assert sum(parts[:-1]) < size <= sum(parts)
    assert list(parts) == sorted(parts, reverse=True)
    single = min((cost * -(-size // bucket) for bucket, cost in costs.items()))
    assert sum(costs[part] for part in parts) <= single


def test_padding_costs_or_parts_do() -> None:
    linear = {1: 1.0, 2: 2.0, 4: 4.0, 8: 8.0, 16: 16.0}
    assert cheapest(13, linear) == (8, 4, 1)
    assert cheapest(15, {own: 1 + cost for own, cost in linear.items()}) == (16,)
    assert cheapest(9, {own: 1 + cost for own, cost in linear.items()}) == (8, 1)
