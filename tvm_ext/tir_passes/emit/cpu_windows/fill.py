"""Fills the scratch memory of a window kernel: source rows, de-interleaved by the stride, and padding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm_ext._tvm import Buffer, Expr, Stmt, Var, tirx
from tvm_ext.analysis.computations import substitute
from tvm_ext.analysis.window import padding_of
from tvm_ext.cost.window_layouts import WindowLayout
from tvm_ext.ir.build_ir import (
    SERIAL,
    VECTORIZED,
    allocate,
    bind,
    if_all,
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


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Staging:
    """What fills ``data`` with source rows of the plane that ``outer`` gives, padding included."""

    layout: WindowLayout
    data: Buffer
    outer: Table

    def band(self, start: Expr, count: int | Expr) -> list[Stmt]:
        """Statements that bring the rows of ``count`` output rows from ``start`` on."""
        layout, y = self.layout, self.layout.window.y
        below = layout.phase_rows - layout.band

        def pad(base: Expr, offset: int, remainder: int) -> list[Stmt]:
            return self._pad(base + index(offset + self._first(remainder)), layout.pitch)

        def phase(slot: int, remainder: int, number: Expr) -> Stmt:
            base = index(slot * len(layout.window.x.phases) * layout.phase_size) + number * index(layout.pitch)
            position = (start + number) * index(y.stride) + index(remainder - y.before)
            copy = self._copy_row(base, position + index(y.first))
            highest = (y.extent - 1 + below) * y.stride + remainder - y.before
            if y.before <= remainder and highest < y.size:
                return copy
            inside = tirx.And(index(0) <= position, position < index(y.size))
            return if_all([inside], copy, sequence(*self._phases(lambda to, rest: pad(base, to, rest))))

        def row(number: Expr) -> Stmt:
            return sequence(*(phase(slot, remainder, number) for slot, remainder in enumerate(y.phases)))

        return [self._left_edge(), loop(count + below, SERIAL, "row", row)]

    def _phases(self, body: Callable[[int, int], list[Stmt]]) -> list[Stmt]:
        """``body(offset of the phase in its group of rows, remainder)`` for each phase along x."""
        phases = enumerate(self.layout.window.x.phases)
        return [s for slot, remainder in phases for s in body(slot * self.layout.phase_size, remainder)]

    def _first(self, remainder: int) -> int:
        """The place of a row's first element in the phase of ``remainder``; what is before is padding."""
        return self.layout.column(remainder, 0)[1]

    def _left_edge(self) -> Stmt:
        """The padding before the first row of each phase, and what vectors may read behind the last one."""
        window = self.layout.window
        group = len(window.x.phases) * self.layout.phase_size

        def fill(offset: int, remainder: int) -> list[Stmt]:
            bases = [index(slot * group + offset) for slot in range(len(window.y.phases))]
            return [s for base in bases for s in self._pad(base, self._first(remainder))]

        statements = self._phases(fill)
        return sequence(*statements) if statements else tirx.Evaluate(index(0))

    def _pad(self, base: Expr, size: int) -> list[Stmt]:
        """Pads at least ``size`` elements from ``base`` on; what is too much is written over afterwards."""
        if size <= 0:
            return []
        width = min(self.layout.lanes, 1 << (size - 1).bit_length())
        value = self.layout.window.pad_value

        def one(number: Expr) -> Stmt:
            to = base + number * index(width)
            return loop(width, VECTORIZED, "lane", lambda lane: store(self.data, value, [to + lane]))

        return [loop(ceil_div(size, width), SERIAL, "fill", one)]

    def _copy_row(self, base: Expr, row: Expr) -> Stmt:
        """A source row to its places, then the padding up to the next row: per phase, places e ... b + pitch."""
        layout, stride = self.layout, self.layout.window.x.stride
        used = layout.used_columns()
        width = min(layout.lanes, 1 << ((used // stride).bit_length() - 1))
        step = width * stride
        whole = used // step

        def group(number: Expr) -> Stmt:
            return self._copy_group(base + number * index(width), row, number * index(step), 0, width)

        def gap(offset: int, remainder: int) -> list[Stmt]:
            _, end = layout.column(remainder, used)
            return self._pad(base + index(offset + end), layout.pitch + self._first(remainder) - end)

        copies = [group(index(g)) for g in range(whole)] if whole <= FEW else [loop(whole, SERIAL, "group", group)]
        if used % step:
            copies.append(self._copy_group(base, row, index(used - step), used - step, width))
        return sequence(*copies, *self._phases(gap))

    def _copy_group(self, base: Expr, row: Expr, column: Expr, first: int, width: int) -> Stmt:
        """``stride * width`` source elements from ``column`` on, ``width`` to each phase.

        ``first`` is the part of ``column`` that decides which element belongs to which phase. Worked example, stride 2
        and one column of padding, from element 0 on: elements 0, 2, 4, ... are positions 1, 3, 5, ..., phase 1.
        """
        layout, x = self.layout, self.layout.window.x

        def copied(first: Expr, target: Buffer, to: Expr) -> Stmt:
            """``width`` source elements from ``first`` of the group on."""

            def lane(v: Expr) -> Stmt:
                return store(target, self._source(row, column + (first + v) + index(x.first)), [to + v])

            return loop(width, VECTORIZED, "lane", lane)

        if x.stride == 1:
            return copied(index(0), self.data, base + index(layout.column(0, first)[1]))
        wide = new_buffer([x.stride * width], layout.window.dtype, "wide", "local")
        starts = [index(part * width) for part in range(x.stride)]

        def scatter(offset: int, remainder: int) -> list[Stmt]:
            k, place = layout.column(remainder, first)
            to = base + index(offset + place)
            if width == 1:
                return [store(self.data, load(wide, [index(k)]), [to])]
            vectors = [load(wide, [tirx.Ramp(start, index(1), width)]) for start in starts]
            picked = tirx.Shuffle(vectors, [index(k + x.stride * lane) for lane in range(width)])
            return [store(self.data, picked, [tirx.Ramp(to, index(1), width)])]

        return sequence(allocate(wide), *(copied(start, wide, start) for start in starts), *self._phases(scatter))

    def _source(self, row: Expr, column: Expr) -> Expr:
        """The element of the source at ``row`` and ``column`` of its dimensions."""
        window = self.layout.window
        lead = [substitute(i, self.outer) for i in window.read.indices]
        if window.y.variable is not None:
            lead[-2] = row
        lead[-1] = column
        if window.pad is None:
            return load(window.read.source, lead)
        inside = padding_of(window.pad)
        assert inside is not None
        return substitute(inside[0], bind(window.pad.spatial, lead))
