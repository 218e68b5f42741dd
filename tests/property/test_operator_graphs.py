"""Small graphs in which tensors, constants and kernels are shared, or have no elements or axes, against float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from tvm import relax

from tests.support.small_modules import inputs_of
from tvm_ext import relay
from tvm_ext._tvm import tensor
from tvm_ext.runtime.graph_module import flatten_outputs

Array = np.ndarray[Any, Any]
Shape = tuple[int, ...]
SQUARE = (48, 48)
matmul, add, multiply = relax.op.matmul, relax.op.add, relax.op.multiply
TOLERANCE = 1e-6


@dataclass(frozen=True, kw_only=True)
class Graph:
    """``build(emit, *variables)`` gives the outputs, ``reference(*arrays)`` their values; ``constants`` by position."""

    name: str
    shapes: tuple[Shape, ...]
    build: Callable[..., Sequence[Any]]
    reference: Callable[..., Sequence[Any]]
    constants: tuple[int, ...] = ()
    packs: int | None = None


def _softmax(x: Array) -> Array:
    powers = np.exp(x - x.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


GRAPHS = (
    Graph(
        name="one kernel called with two constants",
        shapes=(SQUARE,) * 3,
        constants=(1, 2),
        build=lambda emit, x, a, b: [matmul(emit(matmul(x, a)), b)],
        reference=lambda x, a, b: [x @ a @ b],
        packs=1,
    ),
    Graph(
        name="one kernel called with a constant, then with a variable",
        shapes=(SQUARE,) * 3,
        constants=(1,),
        build=lambda emit, x, a, b: [matmul(emit(matmul(x, a)), b)],
        reference=lambda x, a, b: [x @ a @ b],
    ),
    Graph(
        name="one kernel called with a variable, then with a constant",
        shapes=(SQUARE,) * 3,
        constants=(2,),
        build=lambda emit, x, a, b: [matmul(emit(matmul(x, a)), b)],
        reference=lambda x, a, b: [x @ a @ b],
    ),
    Graph(
        name="a constant on the left",
        shapes=(SQUARE,) * 3,
        constants=(0,),
        build=lambda emit, x, a, b: [matmul(x, emit(matmul(a, b)))],
        reference=lambda x, a, b: [x @ (a @ b)],
    ),
    Graph(
        name="one constant in two calls",
        shapes=(SQUARE,) * 3,
        constants=(1,),
        build=lambda emit, x, a, b: [emit(matmul(x, a)), emit(matmul(b, a))],
        reference=lambda x, a, b: [x @ a, b @ a],
        packs=1,
    ),
    Graph(
        name="a weight that the epilogue reads as well",
        shapes=(SQUARE,) * 2,
        constants=(1,),
        build=lambda emit, x, a: [add(emit(matmul(x, a)), a)],
        reference=lambda x, a: [x @ a + a],
        packs=0,
    ),
    Graph(
        name="a left operand that the epilogue reads as well",
        shapes=(SQUARE,) * 2,
        build=lambda emit, x, a: [multiply(emit(matmul(x, a)), x)],
        reference=lambda x, a: [(x @ a) * x],
    ),
    Graph(
        name="a tensor times itself",
        shapes=(SQUARE,),
        build=lambda emit, x: [matmul(x, x)],
        reference=lambda x: [x @ x],
    ),
    Graph(
        name="constants alone",
        shapes=(SQUARE,) * 2,
        constants=(0, 1),
        build=lambda emit, a, b: [matmul(a, b)],
        reference=lambda a, b: [a @ b],
    ),
    Graph(
        name="a constant that is packed and returned",
        shapes=(SQUARE,) * 2,
        constants=(1,),
        build=lambda emit, x, a: [emit(matmul(x, a)), emit(add(a, a))],
        reference=lambda x, a: [x @ a, a + a],
    ),
    Graph(
        name="an input that is returned",
        shapes=(SQUARE,) * 2,
        constants=(1,),
        build=lambda emit, x, a: [x, emit(matmul(x, a))],
        reference=lambda x, a: [x, x @ a],
    ),
    Graph(
        name="a transposed weight",
        shapes=((7, 48), (31, 48)),
        constants=(1,),
        build=lambda emit, x, a: [matmul(x, emit(relax.op.permute_dims(a)))],
        reference=lambda x, a: [x @ a.T],
        packs=1,
    ),
    Graph(
        name="reshape, product, transpose",
        shapes=((4, 6, 48), (48, 31)),
        constants=(1,),
        build=lambda emit, x, a: [relax.op.permute_dims(emit(matmul(emit(relax.op.reshape(x, (24, 48))), a)))],
        reference=lambda x, a: [(x.reshape(24, 48) @ a).T],
    ),
    Graph(
        name="concatenation, product, softmax",
        shapes=((4, 48), (5, 48), (48, 31)),
        constants=(2,),
        build=lambda emit, x, y, a: [relax.op.nn.softmax(emit(matmul(emit(relax.op.concat([x, y], 0)), a)))],
        reference=lambda x, y, a: [_softmax(np.concatenate([x, y]) @ a)],
    ),
    Graph(
        name="vector times matrix",
        shapes=((48,), (48, 31)),
        constants=(1,),
        build=lambda emit, x, a: [matmul(x, a)],
        reference=lambda x, a: [x @ a],
    ),
    Graph(
        name="matrix times vector",
        shapes=((31, 48), (48,)),
        constants=(1,),
        build=lambda emit, x, a: [matmul(x, a)],
        reference=lambda x, a: [x @ a],
    ),
    Graph(
        name="vector times vector",
        shapes=((48,), (48,)),
        build=lambda emit, x, y: [matmul(x, y)],
        reference=lambda x, y: [x @ y],
    ),
    Graph(
        name="outer product",
        shapes=((48, 1), (1, 31)),
        constants=(1,),
        build=lambda emit, x, y: [matmul(x, y)],
        reference=lambda x, y: [x @ y],
    ),
    Graph(
        name="scalars",
        shapes=((), ()),
        build=lambda emit, x, y: [add(emit(relax.op.exp(x)), y)],
        reference=lambda x, y: [np.exp(x) + y],
    ),
    Graph(
        name="no rows",
        shapes=((0, 48), (48, 31)),
        constants=(1,),
        build=lambda emit, x, a: [matmul(x, a)],
        reference=lambda x, a: [x @ a],
    ),
    Graph(
        name="no elements to sum",
        shapes=((3, 0), (0, 31)),
        build=lambda emit, x, a: [matmul(x, a)],
        reference=lambda x, a: [x @ a],
    ),
    Graph(
        name="eight axes",
        shapes=((2, 1, 3, 1, 2, 5, 1, 4),),
        build=lambda emit, x: [relax.op.sum(x, axis=[1, 3, 5])],
        reference=lambda x: [x.sum((1, 3, 5))],
    ),
    Graph(
        name="a contraction over two axes",
        shapes=((4, 5, 6), (6, 7, 5)),
        constants=(1,),
        build=lambda emit, x, a: [relax.op.einsum((x, a), "ijk,klj->il")],
        reference=lambda x, a: [np.einsum("ijk,klj->il", x, a)],
    ),
)


def _module(graph: Graph) -> Any:
    builder = relax.BlockBuilder()
    variables = inputs_of(*graph.shapes)
    with builder.function("main", variables):
        with builder.dataflow():
            outputs = [builder.emit_output(expr) for expr in graph.build(builder.emit, *variables)]
        builder.emit_func_output(relax.Tuple(outputs) if len(outputs) > 1 else outputs[0])
    return builder.get()


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("graph", GRAPHS, ids=lambda graph: graph.name)
def test_agrees_with_numpy(graph: Graph, rng: np.random.Generator) -> None:
    data = [np.asarray(rng.standard_normal(shape), np.float32) for shape in graph.shapes]
    params = {f"x{i}": data[i] for i in graph.constants}
    apart = graph.packs is not None  # in a kernel of several products each has a pack of its own
    library = relay.build(_module(graph), "llvm", params=params, enable_persistent_fusion=False if apart else "auto")
    inputs = [tensor(value) for i, value in enumerate(data) if i not in graph.constants]
    outputs = [value.numpy() for value in flatten_outputs(library.vm()["main"](*inputs))]
    expected = [np.asarray(value) for value in graph.reference(*(value.astype(np.float64) for value in data))]
    assert [value.shape for value in outputs] == [value.shape for value in expected]
    for actual, wanted in zip(outputs, expected, strict=True):
        assert np.linalg.norm(np.asarray(actual - wanted).ravel()) <= TOLERANCE * np.linalg.norm(wanted.ravel())
    if graph.packs is not None:
        assert sum(len(item.choice.packs) for item in library.report.operators) == graph.packs
