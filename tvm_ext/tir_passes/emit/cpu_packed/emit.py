"""x W for weights (code - zero) * scale: blocks of x are rounded to bytes, and added up as whole numbers.

Of a block b of row r, x is about q * d for signed bytes q, where d is the largest of |x| / 127. Then

    sum(x w) = sum over b of d[r, b] * scale[b, n] * (sum(q code) - zero[b, n] * sum(q))

whose inner sums are exact. So does ONNX Runtime with ``accuracy_level=4``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce

from tvm_ext._tvm import Buffer, Expr, ForKind, Stmt, tirx
from tvm_ext.cost.packed_products import PackedTiles
from tvm_ext.ir.build_ir import (
    SERIAL,
    UNROLLED,
    VECTORIZED,
    allocate,
    if_all,
    index,
    load,
    loop,
    new_buffer,
    parallel_cut,
    sequence,
    store,
    tile_start,
    vector_loops,
)
from tvm_ext.ir.dot_ir import dot_of_codes
from tvm_ext.records.packed import MIDDLE
from tvm_ext.support.arithmetic import ceil_div

FLOAT, WHOLE, CODE = "float32", "int32", "uint8"
ROUNDS = 12582912.0
"""1.5 * 2**23: a float32 near it has a whole number in its lowest bits, so that adding it rounds, halves to even."""
ROUNDS_BITS = 0x4B400000
"""The same in bits."""
WITHOUT_SIGN = 0x7FFFFFFF
"""The bits of a float32 but that of its sign."""
SMALLEST = 1e-30
"""A block whose largest number is below it becomes zeros: 127 divided by it still is a float32."""
LARGEST_BYTE = 127.0
"""Of signed bytes whose negatives are bytes, too, as ONNX Runtime has them."""
MOST_UNROLLED = 16
"""Groups of half a block: those of 128 weights."""
ROW_PADDING = 64
"""Bytes between rows: 13 rows of 4096 bytes one behind the other would share 8 lines of L1."""


def emit_packed_product(
    tiles: PackedTiles, operands: Sequence[Buffer], bias: Buffer | None, out: Buffer, kinds: tuple[ForKind, ForKind]
) -> tuple[Stmt, ...]:
    """The statements of a product, by the rows and panels of a tile, that store it with its ``bias`` if any.

    ``operands`` are x, and codes, scales and zero points as they are packed, the last if any.
    ``kinds`` are those of the loops over rows that are rounded, and over tiles.
    """
    rounded, (x, *packed) = RoundedRows.of(tiles), operands
    tasks = ceil_div(tiles.rows, tiles.height)

    def task(at: tuple[Expr, ...]) -> Stmt:
        first = tile_start(at[1], tiles.height, tiles.rows)
        own = _SumTile(tiles=tiles, rounded=rounded, packed=packed, bias=bias, panel=at[0], first=first)
        return own.statement(out)

    return (*rounded.filled(x, kinds[0]), parallel_cut((tiles.panels, tasks), kinds[1], "tile", task))


def _vector(buffer: Buffer, place: Sequence[Expr], lanes: int) -> Expr:
    """``lanes`` elements from ``place`` on, in memory's order."""
    return load(buffer, [*place[:-1], tirx.Ramp(place[-1], index(1), lanes)])


def _all(value: float, kind: str, lanes: int) -> Expr:
    return tirx.Broadcast(tirx.const(value, kind), lanes)


# --- the left operand -------------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RoundedRows:
    """Bytes, and of each block the factor d and the sum of bytes, negative: (rows, blocks).

    Rows of bytes are apart, in a flat buffer, of which stock TVM does not take out what nobody reads.
    """

    tiles: PackedTiles
    bytes: Buffer
    factors: Buffer
    sums: Buffer

    @classmethod
    def of(cls, tiles: PackedTiles) -> RoundedRows:
        return cls(
            tiles=tiles,
            bytes=new_buffer((tiles.rows * (2 * tiles.half * tiles.blocks + ROW_PADDING),), "int8", "rounded"),
            factors=new_buffer((tiles.rows, tiles.blocks), FLOAT, "factors"),
            sums=new_buffer((tiles.rows, tiles.blocks), WHOLE, "sums"),
        )

    def data(self, row: Expr, start: Expr, lanes: int) -> list[Expr]:
        """Where bytes from number ``start`` of a row on are."""
        first = row * index(2 * self.tiles.half * self.tiles.blocks + ROW_PADDING) + start
        return [tirx.Ramp(first, index(1), lanes)]

    def filled(self, x: Buffer, kind: ForKind) -> tuple[Stmt, ...]:
        """Statements that round ``x``, a row at a time."""

        def row(at: tuple[Expr, ...]) -> Stmt:
            return loop(self.tiles.blocks, SERIAL, "block", lambda block: self._block(x, at[0], block))

        own = (self.bytes, self.factors, self.sums)
        return (*map(allocate, own), parallel_cut((self.tiles.rows,), kind, "row", row))

    def _block(self, x: Buffer, row: Expr, block: Expr) -> Stmt:
        """Numbers are compared by their bits, among which those of NaN are the largest: then d is NaN."""
        lanes, depth = self.tiles.read_lanes, 2 * self.tiles.half
        starts = [block * index(depth) + index(first) for first in range(0, depth, lanes)]
        own = [new_buffer((1,), FLOAT, name) for name in ("magnitude", "inverse")]
        magnitude, inverse = (load(buffer, [index(0)]) for buffer in own)
        values = [_vector(x, [row, start], lanes) for start in starts]
        most = reduce(tirx.max, [_bits(value, lanes) & _all(WITHOUT_SIGN, WHOLE, lanes) for value in values])
        smallest = tirx.const(SMALLEST, FLOAT)
        scaled = [_bits(value * tirx.Broadcast(inverse, lanes) + _all(ROUNDS, FLOAT, lanes), lanes) for value in values]
        total = _over_lanes("add", reduce(operator.add, scaled)) - tirx.const(_signed(ROUNDS_BITS * depth), WHOLE)
        return sequence(
            *map(allocate, own),
            store(own[0], tirx.reinterpret(FLOAT, _over_lanes("smax", most)), [index(0)]),
            store(self.factors, magnitude * tirx.const(1 / LARGEST_BYTE, FLOAT), [row, block]),
            store(
                own[1],
                tirx.const(LARGEST_BYTE, FLOAT) / tirx.Select(magnitude > smallest, magnitude, smallest),
                [index(0)],
            ),
            store(self.sums, total * tirx.const(-1, WHOLE), [row, block]),
            *(
                store(self.bytes, tirx.Cast(f"int8x{lanes}", bits), self.data(row, start, lanes))
                for bits, start in zip(scaled, starts, strict=True)
            ),
        )


def _bits(value: Expr, lanes: int) -> Expr:
    return tirx.reinterpret(f"{WHOLE}x{lanes}", value)


def _over_lanes(operation: str, value: Expr) -> Expr:
    return tirx.call_llvm_pure_intrin(WHOLE, f"llvm.vector.reduce.{operation}", value)


def _signed(number: int) -> int:
    """``number`` modulo 2**32 as 32 bits with a sign."""
    return (number + (1 << 31)) % (1 << 32) - (1 << 31)


# --- tiles ------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _SumTile:
    """The rows from ``first`` on by the columns of ``panel``; ``packed`` are codes, scales and zero points, if any."""

    tiles: PackedTiles
    rounded: RoundedRows
    packed: Sequence[Buffer]
    bias: Buffer | None
    panel: Expr
    first: Expr

    def statement(self, out: Buffer) -> Stmt:
        """All blocks added up, then written to ``out``; the last panel may have fewer columns."""
        tiles = self.tiles
        total, whole = (
            new_buffer((tiles.height, tiles.width), kind, name, "local")
            for kind, name in ((FLOAT, "total"), (WHOLE, "whole"))
        )
        steps = UNROLLED if tiles.groups <= MOST_UNROLLED else SERIAL
        codes = new_buffer((2 * tiles.vectors, tiles.row.register_bytes), CODE, "codes", "local")

        def block(number: Expr) -> Stmt:
            return sequence(
                self._vectors(lambda row, lanes: store(whole, self._begin(number, row, lanes), [row, lanes])),
                loop(tiles.groups, steps, "group", lambda group: self._step(number, group, whole, codes)),
                self._vectors(lambda row, lanes: self._add(number, total, whole, [row, lanes])),
            )

        last = tiles.columns - (tiles.panels - 1) * tiles.width
        stores = self._stores(total, out, tiles.width)
        if last < tiles.width:
            stores = if_all([self.panel < index(tiles.panels - 1)], stores, self._stores(total, out, last))
        zero = _all(0.0, FLOAT, tiles.lanes)
        return sequence(
            *map(allocate, (total, whole, codes)),
            self._vectors(lambda row, lanes: store(total, zero, [row, lanes])),
            loop(tiles.blocks, SERIAL, "block", block),
            stores,
        )

    def _vectors(self, body: Callable[[Expr, Expr], Stmt]) -> Stmt:
        """``body(row, lanes)`` for every vector of sums, row by row."""
        tiles = self.tiles

        def row(number: Expr) -> Stmt:
            starts = range(0, tiles.width, tiles.lanes)
            return sequence(*(body(number, tirx.Ramp(index(first), index(1), tiles.lanes)) for first in starts))

        return loop(tiles.height, UNROLLED, "row", row)

    def _begin(self, block: Expr, row: Expr, lanes: Expr) -> Expr:
        """What the zero points take off the sums of a block: one of all columns where the model gives none."""
        taken = tirx.Broadcast(load(self.rounded.sums, [self.first + row, block]), self.tiles.lanes)
        if len(self.packed) < 3:
            return taken * _all(MIDDLE, WHOLE, self.tiles.lanes)
        zeros = load(self.packed[2], [self.panel, block, lanes])
        return taken * tirx.Cast(f"{WHOLE}x{self.tiles.lanes}", zeros)

    def _step(self, block: Expr, group: Expr, whole: Buffer, codes: Buffer) -> Stmt:
        """A group of either half of the block: codes of lower bits, then of upper ones."""
        tiles, size = self.tiles, self.tiles.row.register_bytes
        byte = tirx.Ramp(index(0), index(1), size)

        def unpacked(number: int) -> Stmt:
            place = [self.panel, block, group, index(number * tiles.lanes), index(0)]
            pairs = _vector(self.packed[0], place, size)
            return sequence(
                store(codes, pairs & _all(15, CODE, size), [index(number), byte]),
                store(codes, pairs >> _all(4, CODE, size), [index(tiles.vectors + number), byte]),
            )

        def added(row: Expr, number: int, half: int) -> Stmt:
            lanes = tirx.Ramp(index(number * tiles.lanes), index(1), tiles.lanes)
            start = block * index(2 * tiles.half) + index(half * tiles.half) + group * index(tiles.row.group)
            data = load(self.rounded.bytes, self.rounded.data(self.first + row, start, tiles.row.group))
            held = load(codes, [index(half * tiles.vectors + number), byte])
            return store(whole, dot_of_codes(tiles.row, load(whole, [row, lanes]), held, data), [row, lanes])

        def row(number: Expr) -> Stmt:
            return sequence(*(added(number, vector, half) for half in range(2) for vector in range(tiles.vectors)))

        return sequence(*map(unpacked, range(tiles.vectors)), loop(tiles.height, UNROLLED, "row", row))

    def _add(self, block: Expr, total: Buffer, whole: Buffer, place: Sequence[Expr]) -> Stmt:
        row, lanes = place
        count = self.tiles.lanes
        factor = tirx.Broadcast(load(self.rounded.factors, [self.first + row, block]), count)
        scale = load(self.packed[1], [self.panel, block, lanes])
        real = tirx.Cast(f"{FLOAT}x{count}", load(whole, place))
        return store(total, load(total, place) + real * (scale * factor), place)

    def _stores(self, total: Buffer, out: Buffer, columns: int) -> Stmt:
        def row(number: Expr) -> Stmt:
            def element(lane: Expr) -> Stmt:
                at, value = (
                    [self.first + number, self.panel * index(self.tiles.width) + lane],
                    load(total, [number, lane]),
                )
                return store(out, value if self.bias is None else value + load(self.bias, at[1:]), at)

            return vector_loops(columns, self.tiles.lanes, VECTORIZED, element)

        return loop(self.tiles.height, UNROLLED, "row", row)
