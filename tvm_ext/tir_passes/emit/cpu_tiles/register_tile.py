"""One register tile: its sums, the loops over registers, the reduction, and the stores through the fused epilogue."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar

from tvm_ext._tvm import Buffer, Expr, ForKind, Stmt, TensorLoad, tirx
from tvm_ext.analysis.computations import substitute
from tvm_ext.analysis.tensor_expr import Access
from tvm_ext.ir.build_ir import (
    SERIAL,
    UNROLLED,
    RegisterArray,
    allocate,
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
    vector_loops,
)
from tvm_ext.ir.dot_ir import dot
from tvm_ext.ir.stores import store_element
from tvm_ext.ir.transpose_registers import transpose_registers
from tvm_ext.support.arithmetic import ceil_div

from .ahead import NextTile
from .layout import DotStep, TileLayout


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RegisterTile:
    """The tile of ``sizes`` at tile coordinates ``at``; points of its ``sums`` are (offsets of the rows, row, lane)."""

    layout: TileLayout
    at: dict[int, Expr]
    sizes: dict[int, int]
    sums: RegisterArray
    row_kind: ClassVar[ForKind] = UNROLLED
    """Of the loops over rows that store sums: unrolled, these are in registers."""

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

            return over_registers(layout, rows, pieces, register)

        buffer = new_buffer((prod(rows), width), layout.accumulator_dtype, "acc", "local")
        sums = RegisterArray(buffer, walk, lambda _offsets, row, lane: (row, lane))
        return cls(layout=layout, at=at, sizes=sizes, sums=sums)

    @property
    def initial(self) -> Expr:
        return in_dtype(self.layout.computation.init, self.layout.accumulator_dtype)

    def whole(self) -> Stmt:
        """From the initial values of its sums to its stores."""
        begin = self.sums.fill(lambda *_point: self.initial)
        return sequence(allocate(self.sums.buffer), *self._ask_for_reads(), begin, self.reduce(), *self.stores())

    def part(self, kept: Buffer, number: Expr, chunk: Expr, first: Expr, count: int | Expr) -> Stmt:
        """``count`` steps of the outermost axis from ``first`` on, the ``chunk`` of these; the sums wait in ``kept``.

        ``kept`` has the dims of the sums behind the tile's ``number``.
        """

        def begin(_offsets: tuple[Expr, ...], row: Expr, lane: Expr) -> Expr:
            return tirx.Select(chunk > 0, load(kept, [number, row, lane]), self.initial)

        written = self.sums.write(lambda _, row, lane, value: store(kept, value, [number, row, lane]))
        return sequence(allocate(self.sums.buffer), self.sums.fill(begin), self.reduce(first, count), written)

    def end(self, kept: Buffer, number: Expr) -> Stmt:
        """The stores of sums that were ``kept``."""
        fetched = self.sums.fill(lambda _, row, lane: load(kept, [number, row, lane]))
        return sequence(allocate(self.sums.buffer), fetched, *self.stores())

    @property
    def rows(self) -> list[int]:
        return [self.sizes[p] for p in self.layout.rows]

    @property
    def width(self) -> int:
        """Elements along the vector axis."""
        return self.sizes[self.layout.vector]

    def reduce(self, first: Expr | None = None, count: int | Expr | None = None) -> Stmt:
        """The reduction; with ``first``, ``count`` steps of its outermost axis from there on."""
        layout, computation = self.layout, self.layout.computation
        spans: dict[int, tuple[Expr, int | Expr]] = {p: (index(0), computation.extents[p]) for p in layout.reduction}
        for taps in layout.live:
            start = self.at[taps.outputs] * index(layout.tile[taps.outputs])
            spans[taps.taps] = taps.span(start, self.sizes[taps.outputs])
        if first is not None and count is not None:
            spans[layout.reduction[0]] = first, count
        names = [computation.variables[p].name for p in layout.reduction]
        begins = [begin for begin, _ in spans.values()]
        counts = [count for _, count in spans.values()]

        def within(done: tuple[Expr, ...]) -> Stmt:
            depth, ks = len(done), tuple(begin + k for begin, k in zip(begins, done, strict=False))
            if depth == len(counts):
                return self._step(ks)
            rest = loop(counts[depth], SERIAL, names[depth], lambda v: within((*done, v)))
            return sequence(*self._ask_for_next(ks), rest)

        return within(())

    def _ask_for_next(self, ks: tuple[Expr, ...]) -> list[Stmt]:
        """The questions for the following tile in the loops of the reduction whose steps are ``ks``."""
        layout = self.layout
        start, rest = [index(0)] * len(layout.rows), [index(0)] * (len(layout.reduction) - len(ks))

        def ask(item: NextTile) -> Stmt:
            place = layout.element(item.following(self.at), start, index(0), [*ks, *rest])
            return item.ask(substitute(item.source, place), self.sizes, ks)

        return [ask(item) for item in layout.next_tiles if item.depth == len(ks)]

    def _ask_for_reads(self) -> list[Stmt]:
        """The questions for what the epilogue reads."""
        layout = self.layout
        if layout.reads is None:
            return []
        place = layout.element(self.at, [index(0)] * len(layout.rows), index(0))
        return layout.reads.ask([substitute(item, place) for item in layout.computation.indices], self.sizes)

    def _step(self, ks: tuple[Expr, ...]) -> Stmt:
        layout = self.layout

        def term(offsets: tuple[Expr, ...], _row: Expr, lane: Expr) -> Expr:
            return substitute(layout.update, layout.element(self.at, offsets, lane, ks))

        if layout.dot is None:
            added = self.sums.accumulate(term, layout.computation.combiner)
        else:
            added = self._by_instruction(layout.dot, ks)
        if layout.next_panel is None:
            return added
        row = flat([self.at[p] for p in layout.rows], [layout.counts[p] for p in layout.rows])
        return sequence(layout.next_panel.ask(self.at[layout.vector], row, ks), added)

    def _by_instruction(self, step: DotStep, ks: tuple[Expr, ...]) -> Stmt:
        """The registers of sums with a group of products each: vectors throughout, which stock TVM leaves alone."""
        layout, row = self.layout, step.product.instruction

        def register(piece: tuple[int, int], offsets: tuple[Expr, ...]) -> Stmt:
            first, length = piece
            table = layout.element(self.at, offsets, index(first), ks)
            data = along_last(substitute(step.data, table), row.group)
            weights = along_last(substitute(step.weights, table), row.group * length)
            place = [flat(offsets, self.rows), tirx.Ramp(index(first), index(1), length)]
            return store(self.sums.buffer, dot(row, load(self.sums.buffer, place), data, weights), place)

        return over_registers(layout, self.rows, layout.pieces(self.width), register)

    # --- the epilogue -----------------------------------------------------------------------------------------------
    def stores(self) -> list[Stmt]:
        """Statements that store the tile through the epilogue (paper Figure 6)."""
        if self.width == 1 or self.layout.expr.output.stride(self.layout.names[self.layout.vector]) == 1:
            return [self._store_along_vector()]
        return self._store_transposed()

    def _store_lanes(self, count: int, element: Callable[[Expr], tuple[Expr, Sequence[Expr], Expr]]) -> Stmt:
        """Store ``count`` elements in vectors: each ``element(number)`` and its offsets along the rows and lanes."""
        layout = self.layout

        def one(number: Expr) -> Stmt:
            value, offsets, lane = element(number)
            return store_element(layout.computation, layout.epilogue, value, layout.element(self.at, offsets, lane))

        kind = vector_kind(*(consumer.value for consumer in layout.epilogue))
        return vector_loops(count, layout.lanes, kind, one)

    def _store_along_vector(self) -> Stmt:
        """The output is contiguous along the vector axis: one vector store per register of sums."""

        def row(offsets: tuple[Expr, ...]) -> Stmt:
            number = flat(offsets, self.rows)
            return self._store_lanes(self.width, lambda lane: (load(self.sums.buffer, [number, lane]), offsets, lane))

        return nest(self.rows, self.row_kind, self.layout.row_names, row)

    def _store_transposed(self) -> list[Stmt]:
        """The output is contiguous along another axis: transpose the tile in registers, then write it along that."""
        layout, sums, rows = self.layout, self.sums.buffer, tuple(self.rows)
        strides = [layout.expr.output.stride(layout.names[p]) for p in layout.rows]
        along = next((i for i, stride in enumerate(strides) if stride == 1 and rows[i] > 1), None)
        length = 1 if along is None else rows[along]
        blocks = _blocks(length, layout.lanes)
        size = prod(rows) // length * sum(registers for _, _, registers in blocks) * int(sums.ty.shape[1])
        buffer = new_buffer((size,), layout.accumulator_dtype, "spill", "local")
        spill = _Spill(buffer=buffer, rows=rows, along=along, blocks=blocks)
        statements: list[Stmt] = [allocate(buffer)]
        for first, width in layout.pieces(self.width):
            statements += _transpose(spill, sums, first, width)
            written = min(width, self.width - first)
            if written > 0:
                statements.append(self._write_lanes(spill, first, width, written))
        return statements

    def _write_lanes(self, spill: _Spill, first: int, width: int, written: int) -> Stmt:
        """Write the lanes of one piece, each along the rows that are contiguous in the output."""

        def block(lane: Expr, offsets: tuple[Expr, ...], start: int, length: int, registers: int) -> Stmt:
            begin = spill.start(first, width, flat(offsets, spill.outer), start)

            def element(v: Expr) -> tuple[Expr, Sequence[Expr], Expr]:
                value = load(spill.buffer, [begin + lane * index(registers) + v])
                return value, spill.row(offsets, index(start) + v), index(first) + lane

            return self._store_lanes(length, element)

        def write(lane: Expr) -> Stmt:
            def blocks(offsets: tuple[Expr, ...]) -> Stmt:
                return sequence(*(block(lane, offsets, *item) for item in spill.blocks))

            return nest(spill.outer, SERIAL, self.layout.row_names, blocks)

        return loop(written, SERIAL, "lane", write)


def over_registers(
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


def along_last(element: TensorLoad, count: int) -> TensorLoad:
    """``count`` elements from ``element`` on, as a vector; they may run across the ends of rows."""
    *outer, last = element.indices
    return tirx.BufferLoad(element.source, [*outer, tirx.Ramp(last, tirx.const(1, last.ty.dtype), count)])


# --- transposing a tile -----------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Spill:
    """Memory for a tile with, per SIMD register of lanes, the elements of each lane contiguous.

    Per piece of lanes and per combination of the outer rows, the rows ``along`` which the output is contiguous are
    transposed in blocks of a power of two.
    """

    buffer: Buffer
    rows: tuple[int, ...]
    along: int | None  # position in ``rows``
    blocks: tuple[tuple[int, int, int], ...]  # (first row, rows, registers: rows rounded up to a power of two)

    @property
    def outer(self) -> list[int]:
        return [1 if i == self.along else size for i, size in enumerate(self.rows)]

    @property
    def padded_rows(self) -> int:
        return sum(registers for _, _, registers in self.blocks)

    def row(self, offsets: Sequence[int], position: Expr | int) -> list[Expr | int]:
        """The rows' offsets with ``position`` along the contiguous one."""
        return [position if i == self.along else offset for i, offset in enumerate(offsets)]

    def start(self, first_lane: int, width: int, outer: int | Expr, first_row: int) -> Expr | int:
        """Where a block's elements begin; ``outer`` numbers the combination of the outer rows."""
        return first_lane * prod(self.outer) * self.padded_rows + (outer * self.padded_rows + first_row) * width


def _blocks(rows: int, lanes: int) -> tuple[tuple[int, int, int], ...]:
    """(first row, rows, registers) of the blocks in which ``rows`` are transposed: 14 are one block of 16 registers."""
    sizes = [(first, min(lanes, rows - first)) for first in range(0, rows, lanes)]
    return tuple((first, own, 1 << (own - 1).bit_length()) for first, own in sizes)


def _transpose(spill: _Spill, sums: Buffer, first: int, width: int) -> list[Stmt]:
    """One piece of lanes of the whole tile. Every index is constant, else LLVM would hold the sums in memory.

    The registers beyond a block's rows repeat its last one and are not stored.
    """

    def row(offsets: Sequence[int]) -> int:
        return sum(offset * prod(spill.rows[i + 1 :]) for i, offset in enumerate(offsets))

    statements = []
    for outer, offsets in enumerate(itertools.product(*(range(size) for size in spill.outer))):
        for start, length, registers in spill.blocks:
            numbers = [row(spill.row(offsets, start + min(r, length - 1))) for r in range(registers)]
            to = spill.start(first, width, outer, start)
            statements += transpose_registers(sums, numbers, first, width, spill.buffer, to)
    return statements
