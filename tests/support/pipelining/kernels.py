"""Kernels to be pipelined, none so far: what the pipelining passes are tested on (ALCOP, MLSys 2023, §2-3).

Each is a PrimFunc as a user or one of our emitters may write it: loads into shared memory or registers in the loop that
uses them. Here (and in `pipelining.products`) are the record and what hand-written kernels are built from; these are in

* `pipelining.simt`: products on vector units, all shapes of load-and-use loops
* `pipelining.copies`: unusual copies
* `pipelining.refused`: one for every rule that refuses
* `pipelining.hard`, `pipelining.traps`: easily pipelined wrongly
* `pipelining.tiles`: tiles that are read or allocated in unusual ways
* `pipelining.stock`: stock TVM's own test cases
* `pipelining.schedules`: tensor cores, stock rules
* `pipelining.constructed`: Roller's
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np

from tvm_ext._tvm import Expr, ForKind, Stmt, Var, tirx
from tvm_ext.analysis.computations import dtype_of
from tvm_ext.ir.build_ir import UNROLLED, VECTORIZED, index, load, loop, split_index, store
from tvm_ext.records.pipelines import PipelineRule
from tvm_ext.support.arithmetic import ceil_div
from tvm_ext.support.arrays import Array
from tvm_ext.verify.simt.number_types import storage_dtype

A100, H200, V100, T4 = "nvidia-a100", "nvidia-h200", "nvidia-v100", "nvidia-t4"
OPENCL = "opencl"
ANY_DEVICE = (A100, T4, OPENCL)
"""With cp.async, without it, and with neither cp.async nor shared memory beyond what is declared."""

Reference = Callable[..., Array]


def random_inputs(function: Any, seed: int = 0) -> tuple[Array, ...]:
    """Normal random arrays for all parameters of ``function`` but the last."""
    rng = np.random.default_rng(seed)
    shapes = [([int(size) for size in param.ty.shape], str(param.ty.dtype)) for param in function.params[:-1]]
    return tuple(rng.standard_normal(shape).astype(storage_dtype(dtype)) for shape, dtype in shapes)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PipeliningKernel:
    """A correct kernel without pipelining, and what pipelining it should come to.

    Attributes
    ----------
    make
        A new PrimFunc, thread-bound loops or scheduled, whose last parameter is the output.
    reference
        The output in float64, from arrays for the other parameters.
    inputs
        From the function and a seed to these arrays.
    devices
        Names of our tables, or ``"opencl"``: where the kernel can be lowered.
    shared, registers
        Names of the buffers that must be pipelined at either level on a device with cp.async, all modes on.
    refused
        Buffers that must not be, with ALCOP's rule; a rule of None leaves open which.
    blocks
        Linear numbers of blocks that are enough to look at; None for all.
    """

    name: str
    make: Callable[[], Any]
    reference: Reference
    inputs: Callable[[Any, int], tuple[Array, ...]] = random_inputs
    devices: tuple[str, ...] = ANY_DEVICE
    shared: tuple[str, ...] = ()
    registers: tuple[str, ...] = ()
    refused: Mapping[str, PipelineRule | None] = field(default_factory=lambda: MappingProxyType({}))
    blocks: tuple[int, ...] | None = None

    def __str__(self) -> str:
        return self.name


# --- what hand-written kernels are built from -------------------------------------------------------------------------
THREADS = 64
TILE = 16
"""A block's tile of the output is TILE x TILE, 64 threads with 2x2 elements each."""
DEPTH = 16


def serial_loop(extent: Expr | int, name: str, body: Callable[[Expr], Stmt], *, first: int = 0) -> Stmt:
    """A serial loop from ``first`` on, also where its extent is 1 (which `loop` would leave out)."""
    variable = Var(name, "int64")
    size = index(extent) if isinstance(extent, int) else extent
    return tirx.For(variable, index(first), size, ForKind.SERIAL, body(variable))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Copy:
    """How threads copy a tile: ``vector`` elements at once, ``apply`` on the way, zeros outside where ``guarded``.

    Where ``guard_last``, what lies outside is zero also behind ``apply``.
    """

    vector: int = 4
    guarded: bool = False
    guard_last: bool = False
    transposed: bool = False
    apply: Callable[[Expr], Expr] | None = None
    kind: Any = UNROLLED
    threads: int = THREADS

    def tile(self, target: Any, source: Any, at: Sequence[Expr], thread: Expr, slot: Sequence[Expr] = ()) -> Stmt:
        """``target[*slot, i, j] = source[at[0] + i, at[1] + j]``, or ``source[at[1] + j, at[0] + i]`` transposed.

        Worked example: a 16x16 tile by 64 threads, 4 elements at once: thread 5 copies row 1, columns 4 to 7 of what
        ``source`` holds.
        """
        rows, columns = (int(size) for size in target.ty.shape[-2:])
        rows, columns = (columns, rows) if self.transposed else (rows, columns)
        start = (at[1], at[0]) if self.transposed else (at[0], at[1])
        units = rows * columns // self.vector

        def unit(step: Expr) -> Stmt:
            number = step * index(self.threads) + thread
            row, group = split_index(number, (rows, columns // self.vector))

            def element(lane: Expr) -> Stmt:
                column = group * index(self.vector) + lane
                place = [column, row] if self.transposed else [row, column]
                value = self._value(source, [start[0] + row, start[1] + column])
                return store(target, value, [*slot, *place])

            copied = loop(self.vector, VECTORIZED, "v", element)
            return tirx.IfThenElse(number < index(units), copied, None) if units % self.threads else copied

        return loop(ceil_div(units, self.threads), self.kind, "copy", unit)

    def _value(self, source: Any, place: Sequence[Expr]) -> Expr:
        value = load(source, place)
        inside = [p < size for p, size in zip(place, source.ty.shape, strict=True)]
        if self.guarded and not self.guard_last:
            value = tirx.if_then_else(tirx.all(*inside), value, tirx.const(0, dtype_of(source)))
        if self.apply is not None:
            value = self.apply(value)
        if self.guarded and self.guard_last:
            value = tirx.if_then_else(tirx.all(*inside), value, tirx.const(0, dtype_of(value)))
        return value


def product_reference(a: Array, b: Array) -> Array:
    return a.astype(np.float64) @ b.astype(np.float64)


def unrolled_nest(extents: Sequence[int], body: Callable[[tuple[Expr, ...]], Stmt]) -> Stmt:
    """Small loops over a thread's own elements."""

    def inner(done: tuple[Expr, ...]) -> Stmt:
        if len(done) == len(extents):
            return body(done)
        name = "ij"[len(done)] if len(extents) <= 2 else f"i{len(done)}"
        return loop(extents[len(done)], UNROLLED, name, lambda v: inner((*done, v)))

    return inner(())


def clear(sums: Any) -> Stmt:
    """A thread's sums, all zero."""
    extents = [int(size) for size in sums.ty.shape]
    return unrolled_nest(extents, lambda at: store(sums, tirx.const(0, dtype_of(sums)), at))


def wide(value: Expr) -> Expr:
    """``value`` in float32."""
    return value if dtype_of(value) == "float32" else tirx.Cast("float32", value)
