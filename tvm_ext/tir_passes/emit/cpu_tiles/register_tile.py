"""One register tile: its sums, the loops over registers, the reduction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

from tvm_ext._tvm import Expr, Stmt
from tvm_ext.analysis.computations import substitute
from tvm_ext.analysis.tensor_expr import Access
from tvm_ext.ir.build_ir import (
    SERIAL,
    UNROLLED,
    RegisterArray,
    allocate,
    flat,
    if_all,
    in_dtype,
    index,
    loop,
    nest,
    new_buffer,
    sequence,
    vector_kind,
)
from tvm_ext.support.arithmetic import ceil_div

from .epilogue import store_tile
from .layout import TileLayout


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RegisterTile:
    """The tile of ``sizes`` at tile coordinates ``at``; points of its ``sums`` are (offsets of the rows, row, lane)."""

    layout: TileLayout
    at: dict[int, Expr]
    sizes: dict[int, int]
    sums: RegisterArray

    @classmethod
    def of(cls, layout: TileLayout, at: dict[int, Expr], sizes: dict[int, int]) -> RegisterTile:
        pieces, rows = layout.pieces(sizes[layout.vector]), [sizes[p] for p in layout.rows]
        kind = vector_kind(layout.update)
        # Rows start on whole registers, whatever the pieces: an aligned row is one aligned spill.
        width = ceil_div(sum(length for _, length in pieces), layout.lanes) * layout.lanes

        def walk(body: Callable[[tuple[Expr, ...], Expr, Expr], Stmt]) -> Stmt:
            def register(piece: tuple[int, int], offsets: tuple[Expr, ...]) -> Stmt:
                first, length = piece
                return loop(length, kind, "v", lambda v: body(offsets, flat(offsets, rows), index(first) + v))

            return _over_registers(layout, rows, pieces, register)

        buffer = new_buffer((prod(rows), width), layout.accumulator_dtype, "acc", "local")
        sums = RegisterArray(buffer, walk, lambda _offsets, row, lane: (row, lane))
        return cls(layout=layout, at=at, sizes=sizes, sums=sums)

    @property
    def initial(self) -> Expr:
        return in_dtype(self.layout.computation.init, self.layout.accumulator_dtype)

    def whole(self) -> Stmt:
        """From the initial values of its sums to its stores."""
        begin = self.sums.fill(lambda *_point: self.initial)
        return sequence(allocate(self.sums.buffer), begin, self.reduce(), *self.stores())

    def stores(self) -> list[Stmt]:
        """Statements that store the tile through the epilogue."""
        return store_tile(self.layout, self.sums.buffer, self.at, self.sizes)

    def reduce(self, first: Expr | None = None, count: int | Expr | None = None) -> Stmt:
        """The reduction; with ``first``, ``count`` steps of its outermost axis from there on."""
        layout, computation = self.layout, self.layout.computation
        extents: list[int | Expr] = [computation.extents[p] for p in layout.reduction]
        names = [computation.variables[p].name for p in layout.reduction]
        if first is None or count is None:
            return nest(extents, SERIAL, names, self._step)
        return nest([count, *extents[1:]], SERIAL, names, lambda ks: self._step((first + ks[0], *ks[1:])))

    def _step(self, ks: tuple[Expr, ...]) -> Stmt:
        layout = self.layout

        def term(offsets: tuple[Expr, ...], _row: Expr, lane: Expr) -> Expr:
            return substitute(layout.update, layout.element(self.at, offsets, lane, ks))

        added = self.sums.accumulate(term, layout.computation.combiner)
        if layout.ahead is None:
            return added
        row = flat([self.at[p] for p in layout.rows], [layout.counts[p] for p in layout.rows])
        return sequence(layout.ahead.ask(self.at[layout.vector], row, ks), added)


def _over_registers(
    layout: TileLayout,
    rows: Sequence[int],
    pieces: Sequence[tuple[int, int]],
    body: Callable[[tuple[int, int], tuple[Expr, ...]], Stmt],
) -> Stmt:
    """``body`` for every SIMD register of a tile, those innermost that the smallest operand changes with.

    LLVM keeps in registers what the inner loops load and the outer ones reuse. Worked example, 2 filter blocks of one
    register by 14 columns: with the filters inside, 2 registers of weights stay while the columns stream; with the
    columns inside, 14 broadcasts stay, and with 28 accumulators no longer fit.
    """

    def loads(access: Access) -> int:
        used = [size for p, size in zip(layout.rows, rows, strict=True) if access.uses(layout.names[p])]
        return prod(used) * (len(pieces) if access.uses(layout.names[layout.vector]) else 1)

    inputs = [access for access in layout.expr.inputs if all(item is not None for item in access.indices)]
    kept = min(inputs, key=loads, default=None)
    axes = [*layout.rows, layout.vector]
    order = sorted(range(len(axes)), key=lambda i: kept is not None and kept.uses(layout.names[axes[i]]))

    def inner(position: int, offsets: dict[int, Expr], piece: tuple[int, int] | None) -> Stmt:
        if position == len(order):
            assert piece is not None
            return body(piece, tuple(offsets[i] for i in range(len(rows))))
        i = order[position]
        if i == len(rows):
            return sequence(*(inner(position + 1, offsets, each) for each in pieces))
        return loop(rows[i], UNROLLED, layout.row_names[i], lambda v: inner(position + 1, {**offsets, i: v}, piece))

    return inner(0, {}, None)


def choose_tile(layout: TileLayout, tiles: tuple[Expr, ...], body: Callable[[RegisterTile], Stmt]) -> Stmt:
    """``body`` of the L0 tile at ``tiles``; where an axis has a smaller last tile, of both, chosen between."""
    at = dict(zip(layout.order, tiles, strict=True))

    def choose(remaining: tuple[int, ...], sizes: dict[int, int]) -> Stmt:
        if not remaining:
            return body(RegisterTile.of(layout, at, sizes))
        (p, *_), rest = remaining, remaining[1:]
        tail = layout.tail(p)
        if tail == 0 or layout.full[p] == 0:
            return choose(rest, {**sizes, p: tail or layout.tile[p]})
        whole, last = (choose(rest, {**sizes, p: size}) for size in (layout.tile[p], tail))
        return if_all([at[p] < index(layout.full[p])], whole, last)

    return choose(layout.spatial, {})
