"""Graphs of convolutions for tests of blocked layouts, what is in them afterwards, and whether they mean the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tvm
from tvm import relax

from tests.support.quick_target import UNOPTIMISED
from tests.support.small_modules import inputs_of
from tvm_ext import relay
from tvm_ext._tvm import CALL_TIR, structural_walk
from tvm_ext.records.padding import LAYOUT, LayoutRecord
from tvm_ext.records.serialise import from_json

op = relax.op
Shape = tuple[int, ...]
Graph = Callable[[relax.BlockBuilder, Sequence[Any]], Any]


def weight(*shape: int) -> Any:
    fan_in = float(np.prod(shape[1:]))
    values = np.random.default_rng(sum(shape)).standard_normal(shape) / np.sqrt(fan_in)
    return relax.const(values.astype("float32"))


def module(graph: Graph, *shapes: Shape, dtype: str = "float32") -> tvm.IRModule:
    """A module whose main(x0, x1, ...) returns what ``graph`` emits (one result, or a tuple of several)."""
    builder = relax.BlockBuilder()
    inputs = inputs_of(*shapes, dtype=dtype)
    with builder.function("main", inputs):
        with builder.dataflow():
            made = graph(builder, inputs)
            results = [builder.emit_output(item) for item in (made if isinstance(made, tuple) else (made,))]
        builder.emit_func_output(results[0] if len(results) == 1 else relax.Tuple(results))
    return builder.get()


def conv(
    builder: relax.BlockBuilder,
    data: Any,
    features: int,
    taps: int = 3,
    *,
    groups: int = 1,
    relu: bool = True,
    **how: Any,
) -> Any:
    """convolution + bias + ReLU, padded to keep its size"""
    depth = int(data.ty.shape[1]) // groups
    how = {"padding": taps // 2, "groups": groups, **how}
    value = builder.emit(op.nn.conv2d(data, weight(features, depth, taps, taps), **how))
    value = builder.emit(op.add(value, weight(1, features, 1, 1)))
    return builder.emit(op.nn.relu(value)) if relu else value


def calls(mod: tvm.IRModule) -> list[str]:
    """Operators and called functions of main, in order."""
    names: list[str] = []

    def visit(call: Any) -> None:
        if call.op == CALL_TIR:
            names.append(str(call.args[0].name_hint).rstrip("0123456789"))
        elif isinstance(call.op, tvm.ir.Op):
            names.append(str(call.op.name).removeprefix("relax."))

    for block in mod["main"].body.blocks:
        for binding in block.bindings:
            structural_walk(binding.value, (tvm.ir.Call, visit), order="pre")
    return names


def transforms(mod: tvm.IRModule) -> int:
    return sum(name.startswith(("to_NCHW", "from_NCHW")) for name in calls(mod))


def record(mod: tvm.IRModule) -> LayoutRecord:
    return from_json(LayoutRecord, str(mod.attrs[LAYOUT]))


def run(mod: tvm.IRModule, inputs: Sequence[np.ndarray[Any, Any]], layout: str) -> list[np.ndarray[Any, Any]]:
    result = relay.build(mod, "llvm", layout=layout).vm(tvm.cpu())["main"](*inputs)
    return [item.numpy() for item in (result if isinstance(result, (list, tuple, tvm.ir.Array)) else [result])]


def stock(mod: tvm.IRModule, inputs: Sequence[np.ndarray[Any, Any]]) -> list[np.ndarray[Any, Any]]:
    executable = tvm.compile(mod, UNOPTIMISED)
    result = relax.VirtualMachine(executable, tvm.cpu())["main"](*(tvm.runtime.tensor(item) for item in inputs))
    return [item.numpy() for item in (result if isinstance(result, (list, tuple, tvm.ir.Array)) else [result])]


def same_meaning(mod: tvm.IRModule, *shapes: Shape, layout: str = "NCHWc") -> None:
    rng = np.random.default_rng(3)
    inputs = [rng.standard_normal(shape).astype("float32") for shape in shapes]
    for expected, actual in zip(stock(mod, inputs), run(mod, inputs, layout), strict=True):
        assert expected.shape == actual.shape
        assert np.linalg.norm(actual - expected) <= 1e-5 * np.linalg.norm(expected)
