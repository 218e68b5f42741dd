"""The end of a register tile: accumulators pass through the fused epilogue and are stored (paper Figure 6)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from tvm_ext._tvm import Buffer, Expr, ForKind, Stmt
from tvm_ext.ir.build_ir import (
    SERIAL,
    UNROLLED,
    allocate,
    flat,
    index,
    load,
    loop,
    nest,
    new_buffer,
    sequence,
    vector_kind,
    vector_loops,
)
from tvm_ext.ir.stores import store_element
from tvm_ext.ir.transpose_registers import transpose_registers

from .layout import TileLayout


def store_tile(layout: TileLayout, sums: Buffer, at: dict[int, Expr], sizes: dict[int, int]) -> list[Stmt]:
    """Statements that store the ``sums`` of the tile of ``sizes`` at tile coordinates ``at``, through the epilogue."""
    if sizes[layout.vector] == 1 or layout.expr.output.stride(layout.names[layout.vector]) == 1:
        return [_store_along_vector(layout, sums, at, sizes)]
    return _store_transposed(layout, sums, at, sizes)


def _store_along_vector(layout: TileLayout, sums: Buffer, at: dict[int, Expr], sizes: dict[int, int]) -> Stmt:
    """The output is contiguous along the vector axis: one vector store per register of sums."""
    rows = [sizes[p] for p in layout.rows]

    def row(offsets: tuple[Expr, ...]) -> Stmt:
        def one(lane: Expr) -> Stmt:
            return _store_element(layout, load(sums, [flat(offsets, rows), lane]), at, offsets, lane)

        return vector_loops(sizes[layout.vector], layout.lanes, _store_kind(layout), one)

    return nest(rows, UNROLLED, layout.row_names, row)


def _store_kind(layout: TileLayout) -> ForKind:
    """The kind of a loop over elements that are stored."""
    return vector_kind(*(consumer.value for consumer in layout.epilogue))


def _store_element(layout: TileLayout, element: Expr, at: dict[int, Expr], offsets: Sequence[Expr], lane: Expr) -> Stmt:
    return store_element(layout.computation, layout.epilogue, element, layout.element(at, offsets, lane))


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


def _store_transposed(layout: TileLayout, sums: Buffer, at: dict[int, Expr], sizes: dict[int, int]) -> list[Stmt]:
    """The output is contiguous along another axis: transpose the tile in registers, then write it along that axis."""
    rows = tuple(sizes[p] for p in layout.rows)
    strides = [layout.expr.output.stride(layout.names[p]) for p in layout.rows]
    along = next((i for i, stride in enumerate(strides) if stride == 1 and rows[i] > 1), None)
    length = 1 if along is None else rows[along]
    blocks = _blocks(length, layout.lanes)
    size = prod(rows) // length * sum(registers for _, _, registers in blocks) * int(sums.ty.shape[1])
    buffer = new_buffer((size,), layout.accumulator_dtype, "spill", "local")
    spill = _Spill(buffer=buffer, rows=rows, along=along, blocks=blocks)
    statements: list[Stmt] = [allocate(buffer)]
    for first, width in layout.pieces(sizes[layout.vector]):
        statements += _transpose(spill, sums, first, width)
        written = min(width, sizes[layout.vector] - first)
        if written > 0:
            statements.append(_write_lanes(layout, spill, at, first, width, written))
    return statements


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


def _write_lanes(layout: TileLayout, spill: _Spill, at: dict[int, Expr], first: int, width: int, written: int) -> Stmt:
    """Write the lanes of one piece, each along the rows that are contiguous in the output."""

    def block(lane: Expr, offsets: tuple[Expr, ...], start: int, length: int, registers: int) -> Stmt:
        begin = spill.start(first, width, flat(offsets, spill.outer), start)

        def one(v: Expr) -> Stmt:
            element = load(spill.buffer, [begin + lane * index(registers) + v])
            return _store_element(layout, element, at, spill.row(offsets, index(start) + v), index(first) + lane)

        return vector_loops(length, layout.lanes, _store_kind(layout), one)

    def write(lane: Expr) -> Stmt:
        def blocks(offsets: tuple[Expr, ...]) -> Stmt:
            return sequence(*(block(lane, offsets, *item) for item in spill.blocks))

        return nest(spill.outer, SERIAL, layout.row_names, blocks)

    return loop(written, SERIAL, "lane", write)
