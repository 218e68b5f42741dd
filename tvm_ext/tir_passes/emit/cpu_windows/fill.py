"""Fills the scratch memory of a window kernel: source rows, de-interleaved by the stride, and padding."""

from __future__ import annotations

from collections.abc import Callable

from tvm_ext._tvm import Buffer, Expr, Stmt, Var, tirx
from tvm_ext.analysis.computations import substitute
from tvm_ext.analysis.window import Window, padding_of
from tvm_ext.cost.window_layouts import WindowLayout
from tvm_ext.ir.build_ir import (
    SERIAL,
    VECTORIZED,
    allocate,
    bind,
    index,
    load,
    loop,
    new_buffer,
    sequence,
    store,
)
from tvm_ext.support.arithmetic import ceil_div

Table = list[tuple[Var, Expr]]
FEW = 4  # groups of vectors written out one by one


def stage_band(layout: WindowLayout, data: Buffer, outer: Table, start: Expr, count: int | Expr) -> list[Stmt]:
    """Statements that bring the rows of ``count`` output rows from ``start`` on into ``data``, padding included."""
    y = layout.window.y
    rows = count + (layout.phase_rows - layout.band)

    def row(number: Expr) -> Stmt:
        return sequence(*(phase(slot, remainder, number) for slot, remainder in enumerate(y.phases)))

    def phase(slot: int, remainder: int, number: Expr) -> Stmt:
        base = index(slot * len(layout.window.x.phases) * layout.phase_size) + number * index(layout.pitch)
        position = (start + number) * index(y.stride) + index(remainder - y.before)
        highest = (y.extent - 1 + layout.phase_rows - layout.band) * y.stride + remainder - y.before
        copy = _copy_row(layout, data, outer, base, position + index(y.first))
        if y.before <= remainder and highest < y.size:
            return copy
        inside = tirx.And(index(0) <= position, position < index(y.size))
        return tirx.IfThenElse(inside, copy, _pad_row(layout, data, base))

    return [_left_edge(layout, data), loop(rows, SERIAL, "row", row)]


def _phases(layout: WindowLayout, body: Callable[[int, int], list[Stmt]]) -> list[Stmt]:
    """``body(offset of the phase in its group of rows, remainder)`` for each phase along x."""
    return [s for slot, p in enumerate(layout.window.x.phases) for s in body(slot * layout.phase_size, p)]


def _left_edge(layout: WindowLayout, data: Buffer) -> Stmt:
    """The padding before the first row of each phase, and what vectors may read behind the last one."""
    phase_count = len(layout.window.y.phases)
    group = len(layout.window.x.phases) * layout.phase_size

    def fill(offset: int, remainder: int) -> list[Stmt]:
        _, first = layout.column(remainder, 0)
        statements = []
        for slot in range(phase_count):
            base = index(slot * group + offset)
            statements += _fill(layout, data, base, first)
        return statements

    statements = _phases(layout, fill)
    return sequence(*statements) if statements else tirx.Evaluate(index(0))


def _fill(layout: WindowLayout, data: Buffer, base: Expr, size: int) -> list[Stmt]:
    """At least ``size`` elements of padding from ``base`` on; what is overwritten too much is written afterwards."""
    if size <= 0:
        return []
    width = min(layout.lanes, 1 << (size - 1).bit_length())

    def one(number: Expr) -> Stmt:
        to = base + number * index(width)
        return loop(width, VECTORIZED, "lane", lambda lane: store(data, layout.window.pad_value, [to + lane]))

    return [loop(ceil_div(size, width), SERIAL, "fill", one)]


def _pad_row(layout: WindowLayout, data: Buffer, base: Expr) -> Stmt:
    def fill(offset: int, remainder: int) -> list[Stmt]:
        _, first = layout.column(remainder, 0)
        return _fill(layout, data, base + index(offset + first), layout.pitch)

    return sequence(*_phases(layout, fill))


def _copy_row(layout: WindowLayout, data: Buffer, outer: Table, base: Expr, row: Expr) -> Stmt:
    """A source row to its places, then the padding up to the next row."""
    used, stride = layout.used_columns(), layout.window.x.stride
    width = min(layout.lanes, 1 << ((used // stride).bit_length() - 1))
    groups = ceil_div(used, width * stride)
    copies: list[Stmt] = []

    def group(number: Expr) -> Stmt:
        return _copy_group(
            layout, data, outer, base + number * index(width), row, number * index(width * stride), 0, width
        )

    whole = groups if used % (width * stride) == 0 else groups - 1
    if whole:
        copies.append(
            sequence(*(group(index(g)) for g in range(whole))) if whole <= FEW else loop(whole, SERIAL, "group", group)
        )
    if whole < groups:
        first = used - width * stride
        copies.append(_copy_group(layout, data, outer, base, row, index(first), first, width))
    return sequence(*copies, *_gaps(layout, data, base, used))


def _gaps(layout: WindowLayout, data: Buffer, base: Expr, used: int) -> list[Stmt]:
    """Padding from the end of a row to the next one: per phase, places e ... b + pitch."""

    def fill(offset: int, remainder: int) -> list[Stmt]:
        _, first = layout.column(remainder, 0)
        _, end = layout.column(remainder, used)
        return _fill(layout, data, base + index(offset + end), layout.pitch + first - end)

    return _phases(layout, fill)


def _copy_group(
    layout: WindowLayout, data: Buffer, outer: Table, base: Expr, row: Expr, column: Expr, first: int, width: int
) -> Stmt:
    """``stride * width`` source elements from ``column`` on, ``width`` to each phase.

    ``first`` is the part of ``column`` that decides which element belongs to which phase. Worked example, stride 2 and
    one column of padding, from element 0 on: elements 0, 2, 4, ... are positions 1, 3, 5, ..., phase 1.
    """
    window = layout.window
    stride = window.x.stride

    def element(at: Expr) -> Expr:
        return _source(window, outer, row, column + at + index(window.x.first))

    if stride == 1:
        _, place = layout.column(0, first)
        return loop(width, VECTORIZED, "lane", lambda lane: store(data, element(lane), [base + index(place) + lane]))
    wide = new_buffer([stride * width], window.dtype, "wide", "local")
    loads = [
        loop(
            width,
            VECTORIZED,
            "lane",
            lambda lane, part=part: store(wide, element(index(part * width) + lane), [index(part * width) + lane]),  # type: ignore[misc]
        )
        for part in range(stride)
    ]

    def scatter(offset: int, remainder: int) -> list[Stmt]:
        k, place = layout.column(remainder, first)
        to = base + index(offset + place)
        if width == 1:
            return [store(data, load(wide, [index(k)]), [to])]
        vectors = [load(wide, [tirx.Ramp(index(part * width), index(1), width)]) for part in range(stride)]
        picked = tirx.Shuffle(vectors, [index(k + stride * lane) for lane in range(width)])
        return [store(data, picked, [tirx.Ramp(to, index(1), width)])]

    return sequence(allocate(wide), *loads, *_phases(layout, scatter))


def _source(window: Window, outer: Table, row: Expr, column: Expr) -> Expr:
    """The element of the source at ``row`` and ``column`` of its dimensions, in the plane that ``outer`` gives."""
    lead = [substitute(i, outer) for i in window.read.indices]
    if window.y.variable is not None:
        lead[-2] = row
    lead[-1] = column
    if window.pad is None:
        return tirx.BufferLoad(window.read.source, lead)
    inside = padding_of(window.pad)
    assert inside is not None
    return substitute(inside[0], bind(window.pad.spatial, lead))
