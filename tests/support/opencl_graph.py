"""Runs a whole model's GPU kernels on this machine's CPU, through OpenCL by default: executes ``call_tir`` graphs.

It walks the graph as kernel construction leaves it (`pass_pipeline.BuildPlan.construct`) and launches each function's
kernels on device buffers, in program order. Reshapes are views, as for the Relax VM. It is made for tests: every result
is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import tvm

from tvm_ext._tvm import CALL_TIR, Call, Constant, Expr, IRModule, PrimFunc, Type, Var, relax
from tvm_ext.errors import IllegalRewrite, InputError
from tvm_ext.support.arrays import Array
from tvm_ext.verify.threads_as_loops import poison

from .opencl_cpu import OpenClDevice, compile_opencl


@dataclass(frozen=True, slots=True)
class _Tensor:
    buffer: Any
    shape: tuple[int, ...]
    dtype: str


GraphValue = Any  # a _Tensor, or a tuple of values


class GraphDevice(Protocol):
    """What runs the kernels of a graph, on buffers of its own making."""

    def buffer(self, array: Array) -> Any:
        """A buffer that holds a copy of ``array``."""

    def read(self, buffer: Any, shape: Sequence[int], dtype: str) -> Array:
        """The elements of ``buffer``."""

    def call(self, name: str, buffers: Sequence[Any]) -> None:
        """Run the function ``name`` on ``buffers``, its results last."""


def _opencl(functions: IRModule) -> GraphDevice:
    return OpenClDevice(compile_opencl(functions))


def run_graph(
    kernels: IRModule, inputs: Mapping[str, Array], device_of: Callable[[IRModule], GraphDevice] = _opencl
) -> list[Array]:
    """The outputs of function ``main`` of ``kernels`` for ``inputs`` by parameter name.

    ``device_of`` the PrimFuncs, named as they are called, makes what runs them. Raises InputError for an input that is
    missing, IllegalRewrite for a graph with anything but ``call_tir``, ``call_dps_packed``, reshapes, constants and
    tuples in it, UnsupportedEnvironmentError where OpenCL cannot be run.
    """
    functions = {gv: func for gv, func in kernels.functions_items() if isinstance(func, PrimFunc)}
    named = {gv: func.with_attr("global_symbol", gv.name_hint) for gv, func in functions.items()}
    walk = _Walk(device_of(tvm.IRModule(named)))
    main = kernels["main"]
    for param in main.params:
        if param.name not in inputs:
            raise InputError(f"input {param.name} is missing.", f"pass {', '.join(p.name for p in main.params)}")
        walk.values[param] = walk.tensor(np.asarray(inputs[param.name]))
    for block in main.body.blocks:
        for binding in block.bindings:
            walk.values[binding.var] = walk.value(binding.value)
    return [walk.device.read(t.buffer, t.shape, t.dtype) for t in _flat(walk.value(main.body.body))]


def _flat(value: GraphValue) -> list[_Tensor]:
    return [value] if isinstance(value, _Tensor) else [item for part in value for item in _flat(part)]


class _Walk:
    """Evaluates expressions over device buffers; ``values`` holds what each variable was bound to."""

    def __init__(self, device: GraphDevice) -> None:
        self.device = device
        self.values: dict[Expr, GraphValue] = {}

    def tensor(self, array: Array) -> _Tensor:
        return _Tensor(self.device.buffer(array), array.shape, str(array.dtype))

    def value(self, expr: Expr) -> GraphValue:
        if isinstance(expr, Constant):
            if expr not in self.values:
                self.values[expr] = self.tensor(expr.value.numpy())
            return self.values[expr]
        if isinstance(expr, relax.Tuple):
            return tuple(self.value(item) for item in expr.fields)
        if isinstance(expr, relax.TupleGetItem):
            return self.value(expr.tuple_value)[int(expr.index)]
        if isinstance(expr, Call):
            return self._call(expr)
        if isinstance(expr, Var):
            return self.values[expr]
        raise IllegalRewrite(f"a graph with a {type(expr).__name__} cannot be run kernel by kernel")

    def _call(self, call: Call) -> GraphValue:
        if call.op == CALL_TIR:
            return self._launch(call, call.args[0].name_hint)
        if getattr(call.op, "name", "") == "relax.call_dps_packed":
            return self._launch(call, str(call.args[0].global_symbol))
        if getattr(call.op, "name", "") == "relax.reshape":
            source = self.value(call.args[0])
            return _Tensor(source.buffer, _shape(call.ty), source.dtype)
        raise IllegalRewrite(f"a graph with a call of {call.op} cannot be run kernel by kernel")

    def _launch(self, call: Call, name: str) -> GraphValue:
        result = call.ty_args[0]
        types = list(result.fields) if isinstance(result, relax.TupleType) else [result]
        made = tuple(self.tensor(poison(_shape(ty), str(ty.dtype))) for ty in types)
        arguments = [self.value(item) for item in call.args[1].fields]
        self.device.call(name, [tensor.buffer for tensor in (*arguments, *made)])
        return made if isinstance(result, relax.TupleType) else made[0]


def _shape(ty: Type) -> tuple[int, ...]:
    return tuple(int(size) for size in ty.shape)
