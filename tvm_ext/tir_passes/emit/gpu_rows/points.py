"""Emits a computation without reduction on a flat grid: a thread takes a vector of neighbours, or a few scalars."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm_ext._tvm import Buffer, Expr, Stmt, Var, tirx
from tvm_ext.analysis.computations import Computation, dtype_of, substitute
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.ir.build_ir import SERIAL, UNROLLED, allocate, as_index, index, load, loop, sequence, split_index, store
from tvm_ext.ir.simt_ir import SimtKernel, gpu_buffer, launch
from tvm_ext.support.arithmetic import ceil_div

from .form import RowForm
from .lanes import MAX_LANES, VectorLanes, distinct, evaluate, fetch, find_lanes, is_vector, store_values, vector_units
from .plan import BLOCK_THREADS, BLOCKS_PER_UNIT, OTHER_REGISTERS
from .turn import emit_turned

THREAD_ELEMENTS = 4
"""A thread's elements where they cannot be vectors: as many loads in flight as one vector has lanes."""


def emit_points(form: RowForm, device: DeviceSpec) -> SimtKernel:
    """The launch of a form of one computation without row axes."""
    return emit_turned(form, device) or _emit_vectors(form, device)


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

    @property
    def covers(self) -> bool:
        return self.blocks * self.threads * self.items == self.chunks

    def table(self, chunk: Expr, lane: Expr) -> list[tuple[Var, Expr]]:
        grid = self.form.grid
        if not grid:
            return []
        extents = [axis.extent for axis in grid]
        extents[-1] = max(1, extents[-1] // self.lanes.width)
        at = list(split_index(chunk, extents)) if len(grid) > 1 else [chunk]
        if self.lanes.width > 1:
            at[-1] = at[-1] * index(self.lanes.width) + lane
        return [(axis.variable, as_index(x, axis.variable)) for axis, x in zip(grid, at, strict=True)]


def _emit_vectors(form: RowForm, device: DeviceSpec) -> SimtKernel:
    points = _plan_points(form, device)
    fetched = _registers(points)
    result = gpu_buffer((points.lanes.width,), dtype_of(points.computation.target), "y", "local")

    def thread(block: Expr, number: Expr) -> Stmt:
        first = block * index(points.threads * points.items) + number
        allocations = [allocate(buffer) for _, buffer in fetched]
        if points.lanes.width > 1:
            allocations.append(allocate(result))
        phases = []
        if fetched:
            phases.append(loop(points.items, UNROLLED, "item", lambda item: _load_item(points, fetched, first, item)))
        phases.append(
            loop(points.items, UNROLLED, "item", lambda item: _store_item(points, fetched, result, first, item))
        )
        return sequence(*allocations, *phases)

    width = points.lanes.width
    registers = OTHER_REGISTERS + width * (1 + points.items * len(fetched))
    tail = f", the last {points.tail} one by one" if points.tail else ""
    note = f"{points.blocks} blocks of {points.threads} threads, {points.items} x {width} elements a thread{tail}"
    return SimtKernel(
        statements=(launch(points.blocks, points.threads, thread),),
        threads=points.threads,
        blocks=points.blocks,
        shared_bytes=0,
        register_count=registers,
        notes=(note,),
    )


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


def _registers(points: _Points) -> list[tuple[Expr, Buffer]]:
    """The inputs that differ between a thread's elements, and registers for all its vectors of them."""
    if points.lanes.width == 1 and points.items == 1:
        return []  # one element: nothing to collect
    units = distinct(vector_units(points.computation, points.form, points.lanes))
    count = points.lanes.width * points.items
    return [(unit, gpu_buffer((count,), dtype_of(unit), "x", "local")) for unit in units]


def _chunk(points: _Points, first: Expr, item: Expr) -> Expr:
    return first + item * index(points.threads)


def _load_item(points: _Points, fetched: Sequence[tuple[Expr, Buffer]], first: Expr, item: Expr) -> Stmt:
    chunk, width = _chunk(points, first, item), points.lanes.width
    loads = [
        fetch(
            unit,
            buffer,
            item * index(width),
            width,
            is_vector=is_vector(unit, points.computation, points.lanes),
            at=lambda lane: points.table(chunk, lane),
        )
        for unit, buffer in fetched
    ]
    return _guarded(points, chunk, sequence(*loads))


def _store_item(
    points: _Points, fetched: Sequence[tuple[Expr, Buffer]], result: Buffer, first: Expr, item: Expr
) -> Stmt:
    chunk, width, computation = _chunk(points, first, item), points.lanes.width, points.computation

    def value(lane: Expr) -> Expr:
        registers = [(unit, load(buffer, [item * index(width) + lane])) for unit, buffer in fetched]
        return evaluate(computation.value, registers, lambda _: None, points.table(chunk, lane))

    body = sequence(*store_values(computation, points.lanes, value, lambda lane: points.table(chunk, lane), result))
    return _guarded(points, chunk, body, _tail(points) if points.tail else None)


def _guarded(points: _Points, chunk: Expr, body: Stmt, tail: Stmt | None = None) -> Stmt:
    if tail is not None:
        tail = tirx.IfThenElse(tirx.EQ(chunk, index(points.chunks)), tail, None)
    return body if points.covers else tirx.IfThenElse(chunk < index(points.chunks), body, tail)


def _tail(points: _Points) -> Stmt:
    """The elements of the single axis after the last whole vector, by the thread after the last one."""
    computation, axis = points.computation, points.form.grid[0]

    def element(k: Expr) -> Stmt:
        at = [(axis.variable, as_index(index(points.chunks * points.lanes.width) + k, axis.variable))]
        value = tirx.Cast(dtype_of(computation.target), substitute(computation.value, at))
        return store(computation.target, value, [substitute(item, at) for item in computation.indices])

    return loop(points.tail, SERIAL, "k", element)
