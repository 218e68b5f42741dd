"""The end of a register tile: accumulators pass through the fused epilogue and are stored (paper Figure 6)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from tvm_ext._tvm import Buffer, Expr, Stmt
from tvm_ext.analysis.computations import Computation
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
from tvm_ext.ir.epilogue import store_element
from tvm_ext.ir.transpose_registers import transpose_registers

from .register_tile import TileLayout


def store_tile(
    layout: TileLayout,
    epilogue: Sequence[Computation],
    accumulators: Buffer,
    at: dict[int, Expr],
    sizes: dict[int, int],
) -> list[Stmt]:
    """Statements that store the tile of ``sizes`` at tile coordinates ``at``, through ``epilogue``."""
    if sizes[layout.vector] == 1 or layout.expr.output.stride(layout.names[layout.vector]) == 1:
        return [_store_along_vector(layout, epilogue, accumulators, at, sizes)]
    return _store_transposed(layout, epilogue, accumulators, at, sizes)


def _store_along_vector(
    layout: TileLayout,
    epilogue: Sequence[Computation],
    accumulators: Buffer,
    at: dict[int, Expr],
    sizes: dict[int, int],
) -> Stmt:
    """The output is contiguous along the vector axis: one vector store per accumulator register."""
    rows = [sizes[p] for p in layout.rows]
    kind = vector_kind(*(consumer.value for consumer in epilogue))

    def one(offsets: tuple[Expr, ...], lane: Expr) -> Stmt:
        element = load(accumulators, [flat(offsets, rows), lane])
        return store_element(layout.computation, epilogue, element, layout.element(at, offsets, lane))

    def row(offsets: tuple[Expr, ...]) -> Stmt:
        return vector_loops(sizes[layout.vector], layout.lanes, kind, lambda lane: one(offsets, lane))

    return nest(rows, UNROLLED, _row_names(layout), row)


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


def _store_transposed(
    layout: TileLayout,
    epilogue: Sequence[Computation],
    accumulators: Buffer,
    at: dict[int, Expr],
    sizes: dict[int, int],
) -> list[Stmt]:
    """The output is contiguous along another axis: transpose the tile in registers, then write it along that axis."""
    rows = tuple(sizes[p] for p in layout.rows)
    strides = [layout.expr.output.stride(layout.names[p]) for p in layout.rows]
    along = next((i for i, stride in enumerate(strides) if stride == 1 and rows[i] > 1), None)
    blocks = _blocks(1 if along is None else rows[along], layout.lanes)
    size = prod(rows) // (1 if along is None else rows[along]) * sum(registers for _, _, registers in blocks)
    width = int(accumulators.ty.shape[1])
    buffer = new_buffer((size * width,), layout.accumulator_dtype, "spill", "local")
    spill = _Spill(buffer=buffer, rows=rows, along=along, blocks=blocks)
    statements: list[Stmt] = [allocate(buffer)]
    for first, length in layout.pieces(sizes[layout.vector]):
        statements += _transpose(spill, accumulators, first, length)
        written = min(length, sizes[layout.vector] - first)
        if written > 0:
            statements.append(_write_lanes(layout, epilogue, spill, at, first, length, written))
    return statements


def _blocks(rows: int, lanes: int) -> tuple[tuple[int, int, int], ...]:
    """(first row, rows, registers) of the blocks in which ``rows`` are transposed: 14 are one block of 16 registers."""
    sizes = [(first, min(lanes, rows - first)) for first in range(0, rows, lanes)]
    return tuple((first, own, 1 << (own - 1).bit_length()) for first, own in sizes)


def _transpose(spill: _Spill, accumulators: Buffer, first: int, width: int) -> list[Stmt]:
    """One piece of lanes of the whole tile. Every index is constant, else LLVM would hold the accumulators in memory.

    The registers beyond a block's rows repeat its last one and are not stored.
    """

    def row(offsets: Sequence[int]) -> int:
        return sum(offset * prod(spill.rows[i + 1 :]) for i, offset in enumerate(offsets))

    statements = []
    for outer, offsets in enumerate(itertools.product(*(range(size) for size in spill.outer))):
        for start, length, registers in spill.blocks:
            numbers = [row(spill.row(offsets, start + min(r, length - 1))) for r in range(registers)]
            to = spill.start(first, width, outer, start)
            statements += transpose_registers(accumulators, numbers, first, width, spill.buffer, to)
    return statements


def _write_lanes(
    layout: TileLayout,
    epilogue: Sequence[Computation],
    spill: _Spill,
    at: dict[int, Expr],
    first: int,
    width: int,
    written: int,
) -> Stmt:
    """Write the lanes of one piece, each along the rows that are contiguous in the output."""
    kind = vector_kind(*(consumer.value for consumer in epilogue))

    def block(lane: Expr, offsets: tuple[Expr, ...], start: int, length: int, registers: int) -> Stmt:
        begin = spill.start(first, width, flat(offsets, spill.outer), start)

        def one(v: Expr) -> Stmt:
            element = load(spill.buffer, [begin + lane * index(registers) + v])
            row = spill.row(offsets, index(start) + v)
            return store_element(
                layout.computation,
                epilogue,
                element,
                layout.element(at, row, index(first) + lane),
            )

        return vector_loops(length, layout.lanes, kind, one)

    def write(lane: Expr) -> Stmt:
        def blocks(offsets: tuple[Expr, ...]) -> Stmt:
            return sequence(*(block(lane, offsets, *item) for item in spill.blocks))

        return nest(spill.outer, SERIAL, _row_names(layout), blocks)

    return loop(written, SERIAL, "lane", write)


def _row_names(layout: TileLayout) -> list[str]:
    return [f"{layout.computation.variables[p].name}_r" for p in layout.rows]
