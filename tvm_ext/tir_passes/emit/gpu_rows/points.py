"""Emits a computation without reduction on a flat grid: a thread takes a vector of neighbours, or a few scalars."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm_ext._tvm import Buffer, Expr, Stmt, Var, tirx
from tvm_ext.analysis.computations import Computation, dtype_of, substitute
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.ir.build_ir import (
    SERIAL,
    UNROLLED,
    allocate,
    bind,
    if_all,
    index,
    load,
    loop,
    sequence,
    split_index,
    store,
)
from tvm_ext.ir.simt_ir import SimtKernel, gpu_buffer, launch
from tvm_ext.support.arithmetic import ceil_div

from .form import RowForm, table_of
from .lanes import MAX_LANES, VectorLanes, distinct, evaluate, find_lanes
from .plan import BLOCK_THREADS, BLOCKS_PER_UNIT, OTHER_REGISTERS
from .turn import emit_turned

THREAD_ELEMENTS = 4
"""A thread's elements where they cannot be vectors: as many loads in flight as one vector has lanes."""


def emit_points(form: RowForm, device: DeviceSpec) -> SimtKernel:
    """The launch of a form of one computation without row axes."""
    return emit_turned(form, device) or _plan_points(form, device).kernel()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Points:
    """``items`` vectors a thread, ``threads`` apart; the last ``tail`` elements of a single axis are scalars."""

    form: RowForm
    lanes: VectorLanes
    chunks: int
    threads: int
    items: int
    tail: int

    @property
    def computation(self) -> Computation:
        return self.form.computations[0]

    @property
    def blocks(self) -> int:
        return ceil_div(self.chunks + (self.tail > 0), self.threads * self.items)

    def kernel(self) -> SimtKernel:
        width = self.lanes.width
        fetched = self._registers()
        result = gpu_buffer((width,), dtype_of(self.computation.target), "y", "local")

        def thread(block: Expr, number: Expr) -> Stmt:
            first = block * index(self.threads * self.items) + number
            buffers = [*(buffer for _, buffer in fetched), *([result] if width > 1 else [])]
            phases = [self._each_item(first, lambda item, chunk: self._load(fetched, item, chunk))] if fetched else []
            phases.append(self._each_item(first, lambda item, chunk: self._store(fetched, result, item, chunk)))
            return sequence(*map(allocate, buffers), *phases)

        tail = f", the last {self.tail} one by one" if self.tail else ""
        return SimtKernel(
            statements=(launch(self.blocks, self.threads, thread),),
            threads=self.threads,
            blocks=self.blocks,
            shared_bytes=0,
            register_count=OTHER_REGISTERS + width * (1 + self.items * len(fetched)),
            notes=(f"{self.blocks} blocks of {self.threads} threads, {self.items} x {width} elements a thread{tail}",),
        )

    def _registers(self) -> list[tuple[Expr, Buffer]]:
        """The inputs that differ between a thread's elements, and registers for all its vectors of them."""
        count = self.lanes.width * self.items
        if count == 1:
            return []  # one element: nothing to collect
        units = distinct(self.lanes.units(self.computation, self.form))
        return [(unit, gpu_buffer((count,), dtype_of(unit), "x", "local")) for unit in units]

    def _each_item(self, first: Expr, body: Callable[[Expr, Expr], Stmt]) -> Stmt:
        """``body(item, chunk)`` for the thread's vectors that there are."""
        return loop(self.items, UNROLLED, "item", lambda item: body(item, first + item * index(self.threads)))

    def _table(self, chunk: Expr, lane: Expr) -> list[tuple[Var, Expr]]:
        grid = self.form.grid
        if not grid:
            return []
        extents = [*(axis.extent for axis in grid[:-1]), max(1, grid[-1].extent // self.lanes.width)]
        return table_of(grid, split_index(chunk, extents) if len(grid) > 1 else [chunk], self.lanes.width, lane)

    def _if_exists(self, chunk: Expr, body: Stmt, tail: Stmt | None = None) -> Stmt:
        covers = self.blocks * self.threads * self.items == self.chunks
        return if_all([None if covers else chunk < index(self.chunks)], body, tail)

    def _load(self, fetched: list[tuple[Expr, Buffer]], number: Expr, chunk: Expr) -> Stmt:
        offset = number * index(self.lanes.width)
        loads = [
            self.lanes.fetch(unit, self.computation, buffer, offset, lambda lane: self._table(chunk, lane))
            for unit, buffer in fetched
        ]
        return self._if_exists(chunk, sequence(*loads))

    def _store(self, fetched: list[tuple[Expr, Buffer]], result: Buffer, number: Expr, chunk: Expr) -> Stmt:
        computation, offset = self.computation, number * index(self.lanes.width)

        def value(lane: Expr) -> Expr:
            registers = [(unit, load(buffer, [offset + lane])) for unit, buffer in fetched]
            return evaluate(computation.value, registers, lambda _: None, self._table(chunk, lane))

        stored = self.lanes.store(computation, value, lambda lane: self._table(chunk, lane), result)
        tail = None if not self.tail else if_all([tirx.EQ(chunk, index(self.chunks))], self._tail())
        return self._if_exists(chunk, sequence(*stored), tail)

    def _tail(self) -> Stmt:
        """The elements of the single axis after the last whole vector, by the thread after the last one."""
        computation, axis = self.computation, self.form.grid[0]

        def element(k: Expr) -> Stmt:
            at = bind([axis.variable], [index(self.chunks * self.lanes.width) + k])
            value = tirx.Cast(dtype_of(computation.target), substitute(computation.value, at))
            return store(computation.target, value, [substitute(item, at) for item in computation.indices])

        return loop(self.tail, SERIAL, "k", element)


def _plan_points(form: RowForm, device: DeviceSpec) -> _Points:
    total = form.row_count
    last = form.grid[-1] if form.grid else None
    tail = 0
    if last is None:
        lanes = VectorLanes(variable=None, extent=1, width=1)
    elif len(form.grid) == 1:
        lanes = find_lanes(form, last.variable, max(1, last.extent - last.extent % MAX_LANES))
        tail = last.extent % lanes.width
    else:
        lanes = find_lanes(form, last.variable, last.extent)
    chunks = total // lanes.width
    threads, wanted = BLOCK_THREADS, BLOCKS_PER_UNIT * device.unit_count
    while threads > 2 * device.teu_lanes and chunks < wanted * threads:
        threads //= 2
    items = THREAD_ELEMENTS if lanes.width == 1 and chunks >= wanted * threads * THREAD_ELEMENTS else 1
    return _Points(form=form, lanes=lanes, chunks=chunks, threads=threads, items=items, tail=tail)
