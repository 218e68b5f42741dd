"""The sums of one register tile: their buffer, the loops over registers, the reduction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

from tvm_ext._tvm import Buffer, Expr, Stmt, TensorLoad, structural_equal, tirx
from tvm_ext.analysis.computations import replace_loads, substitute
from tvm_ext.analysis.tensor_expr import Access
from tvm_ext.ir.build_ir import (
    SERIAL,
    UNROLLED,
    combine,
    flat,
    in_dtype,
    index,
    load,
    loop,
    nest,
    new_buffer,
    sequence,
    store,
    vector_kind,
)
from tvm_ext.support.arithmetic import ceil_div

from .register_tile import TileLayout


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TileSums:
    """The accumulators of the tile of ``sizes`` at tile coordinates ``at``; ``update`` is `update_template`'s."""

    layout: TileLayout
    update: Expr
    at: dict[int, Expr]
    sizes: dict[int, int]
    accumulators: Buffer

    @classmethod
    def of(cls, layout: TileLayout, update: Expr, at: dict[int, Expr], sizes: dict[int, int]) -> TileSums:
        pieces = layout.pieces(sizes[layout.vector])
        count = prod(sizes[p] for p in layout.rows)
        # Rows start on whole registers, whatever the pieces: an aligned row is one aligned spill.
        width = ceil_div(sum(length for _, length in pieces), layout.lanes) * layout.lanes
        accumulators = new_buffer((count, width), layout.accumulator_dtype, "acc", "local")
        return cls(layout=layout, update=update, at=at, sizes=sizes, accumulators=accumulators)

    def set_all(self, value: Callable[[Expr, Expr], Expr]) -> Stmt:
        """Every accumulator becomes ``value(row, lane)``."""
        return self._each(lambda _, row, lane: store(self.accumulators, value(row, lane), [row, lane]))

    def copy_to(self, buffer: Buffer, at: Sequence[Expr]) -> Stmt:
        """``buffer[*at, row, lane]`` becomes every accumulator."""
        return self._each(lambda _, row, lane: store(buffer, load(self.accumulators, [row, lane]), [*at, row, lane]))

    def reduce(self, first: Expr | None = None, count: int | Expr | None = None) -> Stmt:
        """The reduction; with ``first``, ``count`` steps of its outermost axis from there on."""
        layout, computation = self.layout, self.layout.computation
        extents: list[int | Expr] = [computation.extents[p] for p in layout.reduction]
        names = [computation.variables[p].name for p in layout.reduction]
        if first is None or count is None:
            return nest(extents, SERIAL, names, self._step)
        return nest([count, *extents[1:]], SERIAL, names, lambda ks: self._step((first + ks[0], *ks[1:])))

    def _step(self, ks: tuple[Expr, ...]) -> Stmt:
        def one(offsets: tuple[Expr, ...], row: Expr, lane: Expr) -> Stmt:
            value = substitute(self.update, self.layout.element(self.at, offsets, lane, ks))
            sums = load(self.accumulators, [row, lane])
            return store(self.accumulators, combine(self.layout.computation.combiner, sums, value), [row, lane])

        ahead = self.layout.ahead
        if ahead is None:
            return self._each(one)
        layout = self.layout
        row = flat([self.at[p] for p in layout.rows], [layout.counts[p] for p in layout.rows])
        return sequence(ahead.ask(self.at[layout.vector], row, ks), self._each(one))

    def _each(self, body: Callable[[tuple[Expr, ...], Expr, Expr], Stmt]) -> Stmt:
        rows = [self.sizes[p] for p in self.layout.rows]
        kind = vector_kind(self.update)

        def one(piece: tuple[int, int], offsets: tuple[Expr, ...]) -> Stmt:
            first, length = piece
            return loop(length, kind, "v", lambda v: body(offsets, flat(offsets, rows), index(first) + v))

        return _over_registers(self.layout, rows, self.layout.pieces(self.sizes[self.layout.vector]), one)


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
        name = f"{layout.computation.variables[layout.rows[i]].name}_r"
        return loop(rows[i], UNROLLED, name, lambda v: inner(position + 1, {**offsets, i: v}, piece))

    return inner(0, {}, None)


def update_template(layout: TileLayout) -> Expr:
    """The anchor's update over its axis variables, with packed loads addressed through panel and lane."""

    def swap(item: TensorLoad) -> Expr:
        for packed in layout.packed:
            if structural_equal(item, packed.original):
                return load(packed.buffer, packed.indices(layout.computation.variables, layout.panel, layout.lane))
        return item

    return in_dtype(replace_loads(layout.computation.value, swap), layout.accumulator_dtype)


def choose_tile(
    layout: TileLayout, tiles: tuple[Expr, ...], body: Callable[[dict[int, Expr], dict[int, int]], Stmt]
) -> Stmt:
    """``body(coordinates, sizes)`` of one L0 tile; where an axis has a smaller last tile, of both, chosen between."""
    at = dict(zip(layout.order, tiles, strict=True))

    def choose(remaining: tuple[int, ...], sizes: dict[int, int]) -> Stmt:
        if not remaining:
            return body(at, sizes)
        p, rest = remaining[0], remaining[1:]
        tail = layout.tail(p)
        if tail == 0 or layout.full[p] == 0:
            return choose(rest, {**sizes, p: tail or layout.tile[p]})
        return tirx.IfThenElse(
            at[p] < index(layout.full[p]),
            choose(rest, {**sizes, p: layout.tile[p]}),
            choose(rest, {**sizes, p: tail}),
        )

    return choose(layout.spatial, {})
