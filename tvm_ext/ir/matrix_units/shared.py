"""Tiles of an implicit GEMM in shared memory: copied by whole threadblocks, laid out so that no bank is used twice.

Memory is thought of in chunks of 16 bytes: eight chunks are all 32 banks. ldmatrix reads eight chunks at a time, one
of each of eight consecutive rows; a copy writes eight that follow each other. Both must meet all banks (PTX ISA,
ldmatrix; paper §3.1, memory bank).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from tvm_ext._tvm import Buffer, Expr, Stmt, tirx
from tvm_ext.analysis.computation_exprs import itemsize_bytes
from tvm_ext.analysis.gemm_form import CHUNKS_OF_ALL_BANKS, FRAGMENT, padded_chunks
from tvm_ext.devices.gpu import VECTOR_BYTES
from tvm_ext.ir.build_ir import SERIAL, UNROLLED, VECTORIZED, below, if_all, index, loop, store
from tvm_ext.ir.simt_ir import gpu_buffer
from tvm_ext.support.arithmetic import ceil_div

from .operand import Factor, guarded, within

ZEROED_BYTES = 4
"""Bytes that may be zero by a condition as one vector: of 16, stock TVM prints 16 arguments for an int4's four."""

SECTOR_CHUNKS = 2
"""Chunks of 16 bytes in one sector, the least that global memory moves."""

MAX_UNROLLED_COPIES = 8
"""Copies of one thread and step that are unrolled; more (scalar copies) stay a loop."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SharedTile:
    """``line_count`` x ``depth_count`` elements of an operand, as rows of ``row`` elements ``pitch`` elements apart.

    With ``swizzled``, chunks of a row change places with each other (`swizzle`), so that nothing is padded. Depths and
    chunks along the depth are counted from fragment ``first`` on.
    """

    operand: Factor
    buffer: Buffer
    line_count: int
    depth_count: int
    pitch: int
    swizzled: bool
    first: Expr | None = None

    @property
    def row(self) -> int:
        return self.depth_count if self.operand.along_depth else self.line_count

    @property
    def row_count(self) -> int:
        return self.line_count if self.operand.along_depth else self.depth_count

    @property
    def chunk(self) -> int:
        """Elements of 16 bytes."""
        return VECTOR_BYTES // int(itemsize_bytes(self.operand.dtype))

    @property
    def bytes(self) -> int:
        return int(self.row_count * self.pitch * itemsize_bytes(self.operand.dtype))

    def element_position(self, line: Expr, depth: Expr) -> Expr:
        """Where an element is in a tile that is not swizzled."""
        depth = depth if self.first is None else depth + self.first * index(FRAGMENT)
        row, column = (line, depth) if self.operand.along_depth else (depth, line)
        return row * index(self.pitch) + column

    def chunk_position(self, row: Expr, chunk: Expr) -> Expr:
        """Where the ``chunk``-th 16 bytes of ``row`` start, in elements."""
        if self.first is not None:
            chunk = chunk + self.first * index(FRAGMENT // self.chunk)
        if self.swizzled:
            chunk = swizzle(row, chunk, self.row // self.chunk)
        return row * index(self.pitch) + chunk * index(self.chunk)


def shared_tile(
    operand: Factor, line_count: int, depth_count: int, scope: str, pitches: tuple[int, int] | None
) -> SharedTile:
    """A tile of ``operand`` in ``scope``: swizzled, or its rows padded to one of ``pitches`` (`wmma_pitches`)."""
    row = depth_count if operand.along_depth else line_count
    chunk = VECTOR_BYTES // int(itemsize_bytes(operand.dtype))
    pitch = row if pitches is None else padded_chunks(row // chunk, pitches) * chunk
    count = line_count * depth_count // row * pitch
    return SharedTile(
        operand=operand,
        buffer=gpu_buffer([count], operand.dtype, f"{operand.name}_shared", scope),
        line_count=line_count,
        depth_count=depth_count,
        pitch=pitch,
        swizzled=pitches is None,
    )


def copy_order(unit: Expr, chunks: int, pitch: int, rows: int, units_per_chunk: int = 1) -> tuple[Expr, Expr]:
    """(row, unit of the row) that the ``unit``-th thread copies, where rows of ``chunks`` chunks are ``pitch`` apart.

    A wavefront writes eight chunks, which must meet all banks. Neighbours do in rows of a multiple of 8, or where the
    distance is the length modulo 8. Of 1, 2 or 4 chunks it writes whole rows, of any other rows two chunks, a memory
    sector, of rows `rows_apart`. Worked example, rows of 12 chunks 13 apart: chunks 0 and 1 of rows 0, 2, 4, 6, which
    start 0, 26, 52, 78 chunks on: 0, 2, 4, 6 modulo 8; then chunks 2 and 3 of these rows.
    """
    span = chunks if chunks in (1, 2, 4) else SECTOR_CHUNKS
    together = CHUNKS_OF_ALL_BANKS // span
    apart = rows_apart(span, pitch)
    linear = chunks % CHUNKS_OF_ALL_BANKS == 0 or (pitch - chunks) % CHUNKS_OF_ALL_BANKS == 0
    if linear or apart is None or chunks % span or rows % CHUNKS_OF_ALL_BANKS:
        return _split(unit, chunks * units_per_chunk)
    piece, within = _split(unit, span * units_per_chunk)
    wavefront, which = _split(piece, together)
    eights, of_eight = _split(wavefront, chunks)  # 8 x chunks / 8 wavefronts write eight rows
    nth, part = _split(of_eight, chunks // span)
    group, first = _split(nth, apart)
    row = eights * index(CHUNKS_OF_ALL_BANKS) + group * index(apart * together) + which * index(apart) + first
    return row, part * index(span * units_per_chunk) + within


def rows_apart(span: int, pitch: int) -> int | None:
    """How far apart rows lie that meet all banks together, ``span`` chunks of each; None where none do.

    Two chunks of four rows, rows 13 chunks apart: every second row. 10 apart: neighbours, at 0, 10, 20, 30.
    """
    together = CHUNKS_OF_ALL_BANKS // span
    for apart in (1, 2, 4):
        banks = {(i * apart * pitch + j) % CHUNKS_OF_ALL_BANKS for i in range(together) for j in range(span)}
        if len(banks) == CHUNKS_OF_ALL_BANKS and apart * together <= CHUNKS_OF_ALL_BANKS:
            return apart
    return None


def swizzle_terms(chunks: int) -> tuple[int, int]:
    """(rows, phases) of the swizzle of rows of ``chunks`` chunks: c moves on by (row // rows) % phases.

    With P the largest power of two that divides ``chunks``, at most 8, 8 / P consecutive rows start at different
    multiples of P among the eight chunks of all banks, and the swizzle shifts within P from one such group of rows to
    the next. Worked example, rows of 4 chunks (32 halves): rows 0 and 1 fill the banks, so that rows 2 and 3 must
    start one further: (c + row // 2) % 4.
    """
    phases = gcd(chunks, CHUNKS_OF_ALL_BANKS)
    return CHUNKS_OF_ALL_BANKS // phases, phases


def swizzle(row: Expr, chunk: Expr, chunks: int) -> Expr:
    """The place of ``chunk`` in ``row``, whose chunks are so rotated that no two of eight rows share a bank.

    Rotated, where others use an exclusive or: it is as good for banks, and TVM's index arithmetic knows its bounds.
    """
    rows, phases = swizzle_terms(chunks)
    if phases == 1:
        return chunk
    turn = tirx.floordiv(row, index(rows))
    turned = tirx.floormod(chunk + turn, index(phases))
    if phases == chunks:
        return turned
    return tirx.floordiv(chunk, index(phases)) * index(phases) + turned


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TileOrigin:
    """The first element of a tile; ``None`` for a bound means that no tile crosses the tensor's end there."""

    batch: Expr
    line: Expr
    depth: Expr
    line_bound: int | None
    depth_bound: int | None


def copy_tile(tile: SharedTile, origin: TileOrigin, thread: Expr, threads: int) -> Stmt:
    """All ``threads`` copy the tile from global memory; what lies beyond the tensor is 0.

    Neighbouring threads copy neighbouring vectors: with 32 halves a row, threads 0-3 copy the first row's 64 bytes.
    """
    operand = tile.operand
    inner = tile.depth_count if operand.lanes_along_depth else tile.line_count
    vector = gcd(operand.vector, inner)
    if operand.dtype == "int8" and (not operand.plain or origin.line_bound or origin.depth_bound):
        vector = gcd(vector, ZEROED_BYTES)
    units = tile.line_count * tile.depth_count // vector
    count = ceil_div(units, threads)
    padded = not tile.swizzled and operand.along_depth == operand.lanes_along_depth

    def one(i: Expr) -> Stmt:
        unit = i * index(threads) + thread
        if padded:
            pitch = tile.pitch // tile.chunk
            outer, within_row = copy_order(unit, inner // tile.chunk, pitch, tile.row_count, tile.chunk // vector)
        else:
            outer, within_row = _split(unit, inner // vector)
        copied = _copy_vector(tile, origin, outer, within_row * index(vector), vector)
        return if_all([below(unit, units, threads)], copied)

    return loop(count, UNROLLED if count <= MAX_UNROLLED_COPIES else SERIAL, f"{operand.name}_copy", one)


def _split(unit: Expr, inner: int) -> tuple[Expr, Expr]:
    if inner == 1:
        return unit, index(0)
    return tirx.floordiv(unit, index(inner)), tirx.floormod(unit, index(inner))


def _copy_vector(tile: SharedTile, origin: TileOrigin, outer: Expr, first: Expr, vector: int) -> Stmt:
    """Copy ``vector`` elements from ``first`` on of the ``outer``-th line (or step of the depth)."""
    operand = tile.operand
    line, depth = (outer, first) if operand.lanes_along_depth else (first, outer)
    row, column = (line, depth) if operand.along_depth else (depth, line)
    at_line, at_depth = origin.line + line, origin.depth + depth
    inside = [within(at_line, origin.line_bound), within(at_depth, origin.depth_bound)]
    start = tile.chunk_position(row, tirx.floordiv(column, index(tile.chunk)))
    rest = tirx.floormod(column, index(tile.chunk))

    def element(v: Expr | None) -> Expr:
        return guarded(inside, operand.element(origin.batch, at_line, at_depth, v), operand.dtype)

    if vector == 1:
        return store(tile.buffer, element(None), [start + rest])
    base = start if vector == tile.chunk else start + rest
    return loop(vector, VECTORIZED, "v", lambda v: store(tile.buffer, element(v), [base + v]))
