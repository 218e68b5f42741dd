"""Emits windows over planes of channel blocks (NCHW[b]c): depthwise convolution and pooling without any copy.

    parallel for task in images x bands x blocks:
      for row in rows of the band:
        for tile in row:                            # columns of one row: a register of channels each
          acc[columns] = init
          for ry in the taps that meet a row:       # a range that depends on the row
            for rx, column:                         # unrolled, without those that meet no column
              acc[column] = combine(acc[column], f(in[row + ry, column + rx], w[ry, rx]))
          out[row, columns] = epilogue(acc)

What meets padding is not computed where it adds zeros, or is the value that the reduction begins with
(`Window.ignores_padding`); elsewhere, as of the zero point of quantised data, its value is a number. A register of
channels lies at any column without a shuffle, and every load is aligned; stride and dilation change addresses alone.
Worked example, 3x3 over 56 columns padded by 1, tiles of 8: the first and the last tile leave out one product, and a
loop runs over the 5 between them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

from tvm_ext._tvm import Buffer, Expr, ForKind, Stmt, TensorLoad, tirx
from tvm_ext.analysis.computation_exprs import access_of, axis_names
from tvm_ext.analysis.computations import Computation, dtype_of, mentions, replace_loads, substitute
from tvm_ext.analysis.predicates import is_in
from tvm_ext.analysis.window import Window, WindowAxis, padding_of
from tvm_ext.cost.blocked_window_time import BlockedWindowTile
from tvm_ext.ir.build_ir import (
    SERIAL,
    VECTORIZED,
    accumulate,
    allocate,
    bind,
    index,
    load,
    loop,
    new_buffer,
    parallel_cut,
    sequence,
    store,
    tile_size,
    vector_kind,
)
from tvm_ext.ir.stores import store_element
from tvm_ext.records.choice import ConstantPack
from tvm_ext.support.arithmetic import ceil_div

from .fill import Table

FEW_TILES = 2
"""Equal tiles in a row that are written out one by one."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BlockedKernel:
    """A kernel's statement, and the buffers of repacked weights, with how each is made."""

    statement: Stmt
    packs: tuple[tuple[Buffer, ConstantPack], ...]


def emit_blocked_window(
    window: Window,
    epilogue: Sequence[Computation],
    tile: BlockedWindowTile,
    kind: ForKind,
    params: Sequence[Buffer],
    constants: Sequence[Buffer],
) -> BlockedKernel:
    """The kernel in ``tile`` with its fused ``epilogue``, its tasks in a loop of ``kind``.

    Those of ``constants``, parameters that this load alone reads, are packed for loads of whole registers.
    """
    packs: list[tuple[Buffer, ConstantPack]] = []

    def packed(item: TensorLoad) -> TensorLoad:
        if not is_in(item.source, constants) or not mentions(item, window.lane):
            return item
        buffer, how, indices = _packed(item, window, params)
        packs.append((buffer, how))
        return load(buffer, indices)

    value = replace_loads(window.anchor.value, packed)
    loops = _BlockedLoops(window=window, epilogue=tuple(epilogue), tile=tile, value=value)
    return BlockedKernel(statement=loops.statement(kind), packs=tuple(packs))


def _packed(item: TensorLoad, window: Window, params: Sequence[Buffer]) -> tuple[Buffer, ConstantPack, list[Expr]]:
    """A constant with the axes by which ``item`` reads it in the order of the loops, a block of channels innermost."""
    anchor = window.anchor
    access = access_of(item.source, item.indices, anchor)
    named = zip(anchor.variables, axis_names(anchor), strict=True)
    strides = {v: access.stride(name) or 0 for v, name in named}
    axes = [*window.outer, *(v for v in anchor.reduction if strides[v])]
    axes = [*(v for v in axes if strides[v]), window.lane]
    how = ConstantPack(
        param_index=next(i for i, param in enumerate(params) if param.same_as(item.source)),
        extents=tuple(anchor.extent(v) for v in axes),
        strides=tuple(strides[v] for v in axes),
    )
    return new_buffer(how.extents, dtype_of(item), f"{item.source.name}_blocks"), how, axes


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Columns:
    """A register tile of ``count`` columns; ``first`` is known where some of them lack taps."""

    first: int
    count: int
    is_inner: bool


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _BlockedLoops:
    window: Window
    epilogue: tuple[Computation, ...]
    tile: BlockedWindowTile
    value: Expr

    @property
    def lanes(self) -> int:
        return self.window.anchor.extent(self.window.lane)

    def statement(self, kind: ForKind) -> Stmt:
        window, band = self.window, self.tile.band
        bands, place = ceil_div(window.y.extent, band), max(0, len(window.outer) - 1)

        def task(at: tuple[Expr, ...]) -> Stmt:
            outer, start = bind(window.outer, (*at[:place], *at[place + 1 :])), at[place] * index(band)
            count = tile_size(window.y.extent, band, start)
            return loop(count, SERIAL, "row", lambda row: self._row(outer, start + row))

        extents = [window.anchor.extent(v) for v in window.outer]
        return parallel_cut([*extents[:place], bands, *extents[place:]], kind, "task", task)

    def _row(self, outer: Table, row: Expr) -> Stmt:
        parts: list[Stmt] = []
        for is_inner, run in groupby(self._tiles(), lambda tile: (tile.is_inner, tile.count)):
            tiles = list(run)
            if is_inner[0] and len(tiles) > FEW_TILES:
                first, count = tiles[0].first, tiles[0].count

                def inner(number: Expr, first: int = first, count: int = count) -> Stmt:
                    return self._register_tile(outer, row, index(first) + number * index(count), count, None)

                parts.append(loop(len(tiles), SERIAL, "tile", inner))
            else:
                parts += [self._register_tile(outer, row, index(t.first), t.count, t.first) for t in tiles]
        return sequence(*parts)

    def _tiles(self) -> list[_Columns]:
        """The tiles of a row, the last one smaller."""
        x, size = self.window.x, self.tile.columns
        starts = range(0, x.extent, size)
        whole = [all(column in x.outputs_of(tap) for tap in range(x.taps)) for column in range(x.extent)]
        ends = [min(start + size, x.extent) for start in starts]
        return [_Columns(first=a, count=b - a, is_inner=all(whole[a:b])) for a, b in zip(starts, ends, strict=True)]

    def _register_tile(self, outer: Table, row: Expr, first: Expr, count: int, known: int | None) -> Stmt:
        """``count`` columns of ``row`` from ``first`` on, which is ``known`` where taps are to be left out."""
        window, x = self.window, self.window.x
        sums = new_buffer([count * self.lanes], window.dtype, "acc", "local")
        begin = [self._lanes(column, lambda at: store(sums, window.anchor.init, [at])) for column in range(count)]
        low, high = _taps_inside(window.y, row)
        pads = not window.ignores_padding()

        def taps_of(tap_y: Expr, is_inside: bool = True) -> Stmt:
            position = row * index(window.y.stride) + tap_y * index(window.y.dilation) - index(window.y.before)
            parts = []
            for tap_x in range(x.taps):
                for column in range(count):
                    meets = is_inside and (known is None or known + column in x.outputs_of(tap_x))
                    if not meets and not pads:
                        continue
                    across = first * index(x.stride) + index(column * x.stride + tap_x * x.dilation - x.before)
                    at = (position, across) if meets else None
                    parts.append(self._update(sums, column, outer, at, (tap_y, index(tap_x))))
            return sequence(*parts) if parts else tirx.Evaluate(index(0))

        reduced = loop(high - low, SERIAL, "tap", lambda tap: taps_of(tap + low))
        if pads and (low, high) != (0, window.y.taps):
            above = loop(low, SERIAL, "tap", lambda tap: taps_of(tap, is_inside=False))
            behind = loop(window.y.taps - high, SERIAL, "tap", lambda tap: taps_of(tap + high, is_inside=False))
            reduced = sequence(above, reduced, behind)
        stores = [self._store(sums, column, outer, row, first + index(column)) for column in range(count)]
        return sequence(allocate(sums), *begin, reduced, *stores)

    def _lanes(self, column: int, body: Callable[[Expr], Stmt]) -> Stmt:
        """``body`` of each lane's place in the sums of ``column``, one vector."""
        return loop(self.lanes, VECTORIZED, "lane", lambda lane: body(index(column * self.lanes) + lane))

    def _update(
        self, sums: Buffer, column: int, outer: Table, at: tuple[Expr, Expr] | None, taps: tuple[Expr, Expr]
    ) -> Stmt:
        """The sums of a ``column`` with what tap ``taps`` meets: the element at ``at``, or padding."""
        window = self.window

        def add(lane: Expr) -> Stmt:
            table = [*outer, *self._bind((window.y.tap, taps[0]), (window.x.tap, taps[1]), (window.lane, lane))]
            element = window.pad_value if at is None else self._source(at, table)
            value = replace_loads(self.value, lambda item: element if item.source.same_as(window.read.source) else item)
            return accumulate(
                sums, [index(column * self.lanes) + lane], substitute(value, table), window.anchor.combiner
            )

        return loop(self.lanes, VECTORIZED, "lane", add)

    def _source(self, at: tuple[Expr, Expr], table: Table) -> Expr:
        """The element at positions ``at`` of the source, which exist."""
        window = self.window
        lead = [substitute(i, table) for i in window.read.indices]
        if window.y.variable is not None:
            lead[-3] = at[0] + index(window.y.first)
        lead[-2] = at[1] + index(window.x.first)
        if window.pad is None:
            return load(window.read.source, lead)
        inside = padding_of(window.pad)
        assert inside is not None
        return substitute(inside[0], bind(window.pad.spatial, lead))

    def _store(self, sums: Buffer, column: int, outer: Table, row: Expr, at: Expr) -> Stmt:
        window = self.window
        kind = vector_kind(*(consumer.value for consumer in self.epilogue))

        def one(lane: Expr) -> Stmt:
            table = [*outer, *self._bind((window.x.variable, at), (window.y.variable, row), (window.lane, lane))]
            element = load(sums, [index(column * self.lanes) + lane])
            return store_element(window.anchor, self.epilogue, element, table)

        return loop(self.lanes, kind, "lane", one)

    @staticmethod
    def _bind(*axes: tuple[Expr | None, Expr]) -> Table:
        present = [(variable, value) for variable, value in axes if variable is not None]
        return bind([v for v, _ in present], [value for _, value in present])


def _taps_inside(y: WindowAxis, row: Expr) -> tuple[int | Expr, int | Expr]:
    """The first tap of output ``row`` that meets a row of the source, and the one behind the last.

    Worked example, 3 taps over 7 rows padded by 1: 1 and 3 for row 0, 0 and 2 for row 6, else 0 and 3.
    """
    if all(len(y.outputs_of(tap)) == y.extent for tap in range(y.taps)):
        return 0, y.taps
    first = index(y.before) - row * index(y.stride)
    low, high = (
        position if y.dilation == 1 else tirx.floordiv(position + index(y.dilation - 1), index(y.dilation))
        for position in (first, first + index(y.size))
    )
    low = tirx.max(low, index(0))
    return low, tirx.max(low, tirx.min(high, index(y.taps)))
