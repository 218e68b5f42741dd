"""Tables over one kernel, and what their runs should compute."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import tvm
from tvm.script import tirx as T  # noqa: N812

from tvm_ext.rammer_runtime import native
from tvm_ext.rammer_runtime.table import Argument, Buffer, Call, Entry, ExecutionTable, Kernel, Parameter

LANES = 16  # floats that one rTask computes
needs_runtime = pytest.mark.skipif(
    not native.is_available(), reason="the native runtime of rTasks is not installed: python3 dev.py test installs it"
)


@functools.cache
def kernels() -> tvm.runtime.Module:
    """``axpy``: rTask t adds 2 times the first operand's t-th 16 floats to the second's; ``picky`` refuses rTask 3."""

    @T.prim_func(private=True)
    def axpy(a: T.handle, b: T.handle, c: T.handle, begin: T.int32, end: T.int32):
        A = T.decl_buffer((1024,), "float32", data=a)
        B = T.decl_buffer((1024,), "float32", data=b)
        C = T.decl_buffer((1024,), "float32", data=c)
        for t, i in T.grid(end - begin, 16):
            C[(t + begin) * 16 + i] = A[(t + begin) * 16 + i] * T.float32(2.0) + B[(t + begin) * 16 + i]

    @T.prim_func(private=True)
    def picky(a: T.handle, begin: T.int32, end: T.int32):
        A = T.decl_buffer((1024,), "float32", data=a)
        assert begin != 3, "rTask 3 is refused"
        A[begin] = T.float32(end)

    functions = {"axpy": axpy, "picky": picky}
    named = {name: function.with_attr("global_symbol", name) for name, function in functions.items()}
    return tvm.tirx.build(tvm.IRModule(named), target=tvm.target.Target("llvm"))


def chain(length: int, units: int, tasks: int = 4, name: str = "chain") -> ExecutionTable:
    """x_{n+1} = 2 x_n + x_{n-1} over ``tasks`` rTasks, rTask t of step n on vEU (t + n) % units, from 2 arguments.

    Every step waits for the whole one before, whose rTasks lie on other vEUs; the last one writes argument 2.
    """
    size = tasks * LANES * 4
    arena = (size + 63) // 64 * 64
    buffers = [Buffer(argument=0, bytes=size), Buffer(argument=1, bytes=size)]
    buffers += [Buffer(offset=arena * n, bytes=size) for n in range(length - 1)]
    buffers += [Buffer(argument=2, bytes=size)]
    calls = tuple(Call(name=f"step {n}", kernel=0, buffers=(n + 1, n, n + 2)) for n in range(length))
    streams: list[list[Entry]] = [[] for _ in range(units)]
    for n in range(length):
        before = tuple((unit, len(stream)) for unit, stream in enumerate(streams) if stream)
        for t in range(tasks):
            unit = (t + n) % units
            waits = tuple(wait for wait in before if wait[0] != unit)
            streams[unit].append(Entry(call=n, begin=t, end=t + 1, waits=waits))
    return ExecutionTable(
        name=name,
        arena_bytes=arena * (length - 1),
        arguments=(Argument(bytes=size),) * 3,
        kernels=(Kernel(symbol="axpy", tasks=tasks, parameters=(Parameter(bytes=size, alignment=64),) * 3),),
        buffers=tuple(buffers),
        calls=calls,
        streams=tuple(map(tuple, streams)),
    )


def refused(begin: int) -> ExecutionTable:
    """Two vEUs; the second runs the kernel that refuses rTask 3 from rTask ``begin`` on, and the first waits for it."""
    return ExecutionTable(
        name="refused",
        arena_bytes=0,
        arguments=(Argument(bytes=4096),),
        kernels=(Kernel(symbol="picky", tasks=8, parameters=(Parameter(bytes=4096, alignment=64),)),),
        buffers=(Buffer(argument=0, bytes=4096),),
        calls=(Call(name="picked", kernel=0, buffers=(0,)),),
        streams=(
            (Entry(call=0, begin=0, end=1), Entry(call=0, begin=1, end=2, waits=((1, 1),))),
            (Entry(call=0, begin=begin, end=begin + 1),),
        ),
    )


def expected(first: np.ndarray[Any, Any], second: np.ndarray[Any, Any], length: int) -> np.ndarray[Any, Any]:
    for _ in range(length):
        first, second = second, second * np.float32(2) + first
    return second


def run(module: tvm.runtime.Module, name: str, inputs: Sequence[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """What the run leaves in one more argument, which starts as NaN."""
    result = tvm.runtime.tensor(np.full_like(inputs[0], np.nan))
    module[name](*map(tvm.runtime.tensor, inputs), result)
    return result.numpy()
