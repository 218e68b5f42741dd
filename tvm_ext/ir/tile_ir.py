"""Tile instructions (Intel AMX) in TensorIR: statements on a thread's eight tile registers, named by constants.

A thread configures its tiles before it uses them: `configure` says how many rows of how many bytes each has. All other
instructions follow these sizes, and fault where they do not fit each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tvm_ext._tvm import Buffer, Expr, Stmt, tirx
from tvm_ext.analysis.computation_exprs import itemsize_bytes
from tvm_ext.analysis.computations import dtype_of

from .build_ir import allocate, index, new_buffer, sequence, store

_CONFIGURATION_BYTES = 64
"""The memory format of LDTILECFG: Intel's Software Developer's Manual, volume 2, as are the places in it."""

_PALETTE = 1
"""The only one that has tiles: eight of 16 rows of 64 bytes."""

_FIRST_BYTES, _FIRST_ROWS = 16, 48
"""Where a configuration holds each tile's bytes in a row, two bytes each, and its rows, one byte each."""


@dataclass(frozen=True, slots=True)
class TileShapes:
    """(rows, bytes in a row) of each tile register, (0, 0) of those that are not used."""

    shapes: tuple[tuple[int, int], ...]

    def serve(self, used: TileShapes) -> bool:
        """Whether tiles of these shapes are as large as all of ``used``."""
        return all(theirs in (own, (0, 0)) for own, theirs in zip(self.shapes, used.shapes, strict=True))

    @property
    def words(self) -> list[int]:
        """The configuration as eight words of 64 bits, little-endian."""
        data = bytearray(_CONFIGURATION_BYTES)
        data[0] = _PALETTE
        for number, (rows, row_bytes) in enumerate(self.shapes):
            place = _FIRST_BYTES + 2 * number
            data[place : place + 2] = row_bytes.to_bytes(2, "little")
            data[_FIRST_ROWS + number] = rows
        return [int.from_bytes(data[at : at + 8], "little", signed=True) for at in range(0, len(data), 8)]


def configure(tiles: TileShapes) -> Stmt:
    """Set this thread's tiles, and clear them."""
    memory = new_buffer((_CONFIGURATION_BYTES // 8,), "int64", "tile_shapes", "local")
    words = [store(memory, index(word), [index(place)]) for place, word in enumerate(tiles.words)]
    return sequence(allocate(memory), *words, tile_call("ldtilecfg", tirx.address_of(memory[0])))


def release() -> Stmt:
    """Leave the tiles, for the sake of the thread's next switch of context."""
    return tile_call("tilerelease")


def clear_tile(number: int) -> Stmt:
    return tile_call("tilezero", _tile(number))


def load_tile(number: int, first: Expr, stride_bytes: int) -> Stmt:
    """Fill a tile with rows ``stride_bytes`` apart from ``first``, a load of the first element, on."""
    return tile_call("tileloadd64", _tile(number), tirx.address_of(first), index(stride_bytes))


def load_sums(number: int, memory: Buffer, first: Expr, stride_bytes: int) -> Stmt:
    """Fill a tile from ``memory``, as `store_sums` has left it there."""
    return tile_call("tileloadd64", _tile(number), _address(memory, first), index(stride_bytes))


def store_sums(number: int, memory: Buffer, first: Expr, stride_bytes: int) -> Stmt:
    """Store a tile to ``memory`` from element number ``first`` on.

    The address is that of the whole buffer: of one that is only written by tiles, stock TVM's
    CompactBufferAllocation would keep no more than what is read.
    """
    return tile_call("tilestored64", _tile(number), _address(memory, first), index(stride_bytes))


def _address(memory: Buffer, first: Expr) -> Expr:
    return tirx.handle_add_byte_offset(memory.data, first * index(int(itemsize_bytes(dtype_of(memory)))))


def multiply_tiles(instruction: str, sums: int, data: int, weights: int) -> Stmt:
    """``sums`` gain the products of two tiles by ``instruction``."""
    return tile_call(instruction, *map(_tile, (sums, data, weights)))


def tile_call(name: str, *arguments: Expr) -> Stmt:
    return tirx.Evaluate(tirx.call_llvm_intrin("void", f"llvm.x86.{name}", *arguments))


def _tile(number: int) -> Expr:
    return tirx.const(number, "int8")


def tiles_of(shapes: Mapping[int, tuple[int, int]], registers: int) -> TileShapes:
    """The ``shapes`` of numbered tiles among ``registers``."""
    return TileShapes(tuple(shapes.get(number, (0, 0)) for number in range(registers)))
