"""An operator on many tiles with memories of their own: what each holds, sends and computes, superstep by superstep.

The machine is bulk-synchronous (Graphcore's IPU; Roller §4). A superstep is an *exchange*, in which tiles' memories
send regions to each other, and a *compute set*, in which each tile runs vertices on what it holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import prod


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorBox:
    """The elements of ``tensor`` from ``begin`` on, ``size`` along each dimension; stored row by row."""

    tensor: str
    begin: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def elements(self) -> int:
        return prod(self.size)


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorHome:
    """Where ``tensor`` is kept: blocks of ``block`` elements, numbered row by row, one after the other on the tiles.

    Block ``b`` is on tile ``(first_tile + b) % tiles``. The last block along a dimension is cut to what is left.
    Worked example: (130, 93) in blocks of (16, 32) has 9 x 3 blocks, the last of 2 x 29.
    """

    tensor: str
    shape: tuple[int, ...]
    dtype: str
    itemsize_bytes: int
    block: tuple[int, ...]
    first_tile: int

    @property
    def grid(self) -> tuple[int, ...]:
        return tuple(-(-size // step) for size, step in zip(self.shape, self.block, strict=True))

    def tile_of(self, place: tuple[int, ...], tiles: int) -> int:
        """The tile that keeps the block at ``place`` of the grid."""
        number = 0
        for position, count in zip(place, self.grid, strict=True):
            number = number * count + position
        return (self.first_tile + number) % tiles

    def box(self, place: tuple[int, ...]) -> TensorBox:
        begin = tuple(position * step for position, step in zip(place, self.block, strict=True))
        size = tuple(min(step, end - at) for step, end, at in zip(self.block, self.shape, begin, strict=True))
        return TensorBox(tensor=self.tensor, begin=begin, size=size)

    def parts(self, wanted: TensorBox, tiles: int) -> list[tuple[int, TensorBox]]:
        """(tile, box) of what each block holds of ``wanted``."""
        if not wanted.elements:
            return []
        reached = [
            range(at // step, -(-(at + size) // step))
            for at, size, step in zip(wanted.begin, wanted.size, self.block, strict=True)
        ]
        found = []
        for place in product(*reached):
            own = self.box(place)
            begin = tuple(map(max, own.begin, wanted.begin))
            ends = (
                min(a + s, b + t) for a, s, b, t in zip(own.begin, own.size, wanted.begin, wanted.size, strict=True)
            )
            size = tuple(end - at for end, at in zip(ends, begin, strict=True))
            found.append((self.tile_of(place, tiles), TensorBox(tensor=self.tensor, begin=begin, size=size)))
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Transfer:
    """``box`` goes from ``source``, which keeps all of it in one block, to the buffers of all ``targets`` at once."""

    box: TensorBox
    source: int
    targets: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class VertexClass:
    """A class of ``vertices.cpp``: its input vectors, its output vector, and its whole numbers, all in order."""

    name: str
    inputs: tuple[str, ...]
    output: str
    fields: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class VertexRun:
    """One vertex of a compute set: its tile, what its inputs hold, the block of the output, values of its fields."""

    vertex: str
    tile: int
    inputs: tuple[TensorBox, ...]
    output: TensorBox
    fields: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Superstep:
    """Transfers fill the inputs of the runs behind them; inputs are freed, outputs stay in the memory of their tile."""

    transfers: tuple[Transfer, ...]
    runs: tuple[VertexRun, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class SuperstepTimes:
    """Predicted seconds, of the busiest tile in each superstep; ``sources`` say where each rate comes from."""

    compute_s: float
    exchange_s: float
    synchronise_s: float
    sources: tuple[str, ...]

    @property
    def time_s(self) -> float:
        return self.compute_s + self.exchange_s + self.synchronise_s


@dataclass(frozen=True, kw_only=True, slots=True)
class ExchangePlan:
    """All of an operator; ``inputs`` and ``outputs`` are its parameters in order. ``peak_bytes``: of the fullest tile,
    without code.
    """

    operator: str
    device: str
    tiles: int
    tile_bytes: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    homes: tuple[TensorHome, ...]
    vertices: tuple[VertexClass, ...]
    supersteps: tuple[Superstep, ...]
    peak_bytes: int
    exchanged_bytes: int
    times: SuperstepTimes
