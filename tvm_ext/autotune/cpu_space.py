"""The tiles that a CPU kernel can have: what a search moves in."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import cached_property
from math import factorial, prod

import numpy as np

from tvm_ext.analysis.tensor_expr import TensorExpr
from tvm_ext.cost.access_table import Shape
from tvm_ext.cost.cpu_columns import CpuPredictions, CpuTileColumns, predict_cpu_tiles
from tvm_ext.cost.cpu_tiles import check_tile, legal_vector_axes
from tvm_ext.cost.perf_model import PerfModel
from tvm_ext.cost.register_choices import register_tiles
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.errors import IllegalRewrite
from tvm_ext.records.serialise import from_json
from tvm_ext.records.tuning import CpuTile
from tvm_ext.support.arithmetic import ceil_div
from tvm_ext.support.quantities import Floats, Integers

from .spaces import SharedGroups

COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96)
"""Register tiles in a block along one axis; all of an axis are one more choice."""

MOST_BLOCKS = 32
"""Of one register tile for one cache, divided by the orders that the loops can have; the largest."""

MUCH_SMALLER = 8
"""A block of fewer register tiles than the largest divided by this is left out, but for a single one."""

TileLoops = tuple[tuple[int, int], ...]
"""How a kernel goes through its register tiles: (axis, step) of each loop with more than one trip, outermost first."""


class CpuTileSpace:
    """The legal tiles of ``expr`` (an anchor in canonical form) on ``device``, numbered, with their predictions.

    Legal are register tiles that fit the registers, with the largest blocks of them that fit the cache which they are
    for (`MemFootprint`) or single ones, in any order of the loops. On one core two that go through the same register
    tiles in the same order are one candidate. ``also`` are tiles that the space has in any case, construction's say.
    Raises IllegalRewrite where there is none.
    """

    def __init__(self, expr: TensorExpr, device: DeviceSpec, also: Sequence[CpuTile] = ()) -> None:
        self.expr, self.device = expr, device
        self._places: dict[tuple[object, ...], int] = {}
        tiles = [tile for tile in (*also, *_legal(expr, device)) if self._number(tile)]
        if not tiles:
            raise IllegalRewrite(f"no register tile of {expr.name} fits {device.name}")
        self.tiles = CpuTileColumns(
            vector=np.array([tile.vector for tile in tiles]),
            register=np.array([tile.register for tile in tiles]),
            inner=np.array([tile.inner for tile in tiles]),
            outer=np.array([tile.outer for tile in tiles]),
            order=np.array([tile.order for tile in tiles]),
        )
        self.predictions: CpuPredictions = predict_cpu_tiles(expr, device, self.tiles)

    def __len__(self) -> int:
        return len(self.tiles)

    def __getitem__(self, index: int) -> CpuTile:
        return self.tiles[index]

    def index(self, configuration: str) -> int | None:
        """The place of the candidate with the same loops as the tile of this text; None where there is none."""
        try:
            tile = from_json(CpuTile, configuration)
            check_tile(tile, self.expr, self.device)
        except (ValueError, IllegalRewrite):
            return None
        return self._places.get(self._identity(tile))

    def neighbours(self, places: Integers, rng: np.random.Generator) -> Integers:
        """For each place one with the same register tile in other loops or, half of them, the other way round."""
        other = rng.random(len(places)) < 0.5
        same_register, same_loops = self._groups
        return np.where(other, same_register.draw(places, rng), same_loops.draw(places, rng))

    @cached_property
    def features(self) -> Floats:
        """Of the register tile, its blocks and their loops, sizes by their logarithms; no predicted time."""
        tiles, said = self.tiles, self.predictions
        counts = -(-np.array([axis.extent for axis in self.expr.spatial]) // tiles.register)
        points = tiles.register.prod(axis=1)
        cut = np.array([axis.extent for axis in self.expr.spatial]) % tiles.register / tiles.register
        sizes = [*tiles.register.T, *tiles.inner.T, *tiles.outer.T, *counts.T, points, said.accumulators, said.tasks]
        sizes += [said.loads, said.accumulators / said.loads, said.block_bytes, said.task_bytes]
        plain = [tiles.vector, said.registers, *tiles.order.T, *cut.T]
        columns = [*(np.log2(np.maximum(size, 1e-9)) for size in sizes), *plain]
        return np.stack([np.asarray(column, dtype=np.float64) for column in columns], axis=1)

    def _number(self, tile: CpuTile) -> bool:
        """Whether the tile is a new candidate, which then has its place."""
        before = len(self._places)
        return self._places.setdefault(self._identity(tile), before) == before

    def _identity(self, tile: CpuTile) -> tuple[object, ...]:
        loops = loops_of(tile, self.expr)
        return tile.vector, tile.register, loops, () if self.device.unit_count == 1 else tile.outer

    @cached_property
    def _groups(self) -> tuple[SharedGroups, SharedGroups]:
        """By the register tile, and by the loops."""
        tiles = self.tiles
        by_register = np.concatenate([tiles.vector[:, None], tiles.register], axis=1)
        by_loops = np.concatenate([tiles.inner, tiles.outer, tiles.order], axis=1)
        return SharedGroups(by_register), SharedGroups(by_loops)


def loops_of(tile: CpuTile, expr: TensorExpr) -> TileLoops:
    """The loops over register tiles; two in a row along the same axis are one.

    Worked example: 26 x 10 register tiles in tasks of 9 x 1 and blocks of 3 x 1, columns outermost, are the loops
    columns by 1, rows by 9, by 3 and by 1: columns by 1, rows by 1.
    """
    counts = [ceil_div(axis.extent, size) for axis, size in zip(expr.spatial, tile.register, strict=True)]
    loops: list[tuple[int, int]] = []
    for within, step in ((counts, tile.outer), (tile.outer, tile.inner), (tile.inner, (1,) * len(counts))):
        for axis in tile.order:
            if ceil_div(within[axis], step[axis]) == 1:
                continue
            if loops and loops[-1][0] == axis:
                loops.pop()
            loops.append((axis, step[axis]))
    return tuple(loops)


# --- what is legal ---------------------------------------------------------------------------------------------------
def _legal(expr: TensorExpr, device: DeviceSpec) -> Iterator[CpuTile]:
    spatial = [axis.name for axis in expr.spatial]
    for name in legal_vector_axes(expr, device):
        if name not in spatial:
            continue
        model = PerfModel(expr, device, name)
        vector = spatial.index(name)
        for shape in register_tiles(model):
            yield from _blocked(model, vector, tuple(shape[axis] for axis in model.spatial))


def _blocked(model: PerfModel, vector: int, register: Shape) -> Iterator[CpuTile]:
    """The blocks of one register tile, in every order of the loops."""
    counts = [ceil_div(model.extents[axis], size) for axis, size in zip(model.spatial, register, strict=True)]
    levels = [(*(count for count in COUNTS if count < most), most) for most in counts]
    for outer in _largest(model, 2, register, levels, model.device.unit_count):
        dividing = [
            tuple(count for count in own if count == size or (count < size and size % count == 0))
            for own, size in zip(levels, outer, strict=True)
        ]
        for inner in _largest(model, 1, register, dividing):
            for order in itertools.permutations(range(len(counts))):
                yield CpuTile(vector=vector, register=register, inner=inner, outer=outer, order=order)


def _largest(
    model: PerfModel, level: int, register: Shape, levels: Sequence[Sequence[int]], least: int = 1
) -> list[Shape]:
    """The largest blocks for the cache of ``level``, the largest with ``least`` of them, and single register tiles.

    A smaller block loads more for the same loops; somewhat smaller ones leave several cores even shares. Worked
    example: 64 x 8 register tiles that fit L2 as one block are 96 ... 512 at a time, which leaves 64 cores 6 tasks at
    most; of 8 they have one each.
    """
    held = [block for block in itertools.product(*levels) if _holds(model, level, register, block)]
    ranked = sorted(held, key=lambda block: (-prod(block), block))
    most = max(2, MOST_BLOCKS // factorial(len(levels)))
    kept = [block for block in ranked if MUCH_SMALLER * prod(block) >= prod(ranked[0])][:most]
    counts = [own[-1] for own in levels]
    shared = [block for block in ranked if prod(map(ceil_div, counts, block)) >= least > 1][: most // 2]
    return list(dict.fromkeys((*kept, *shared, (1,) * len(levels))))


def _holds(model: PerfModel, level: int, register: Shape, counts: Sequence[int]) -> bool:
    """Whether a block of ``counts`` register tiles fits the cache of ``level``, reductions whole; one always may."""
    if max(counts) == 1 or level >= model.last_level:
        return max(counts) == 1
    shape = list(model.extents)
    for axis, size, count in zip(model.spatial, register, counts, strict=True):
        shape[axis] = size * count
    return model.footprint_bytes(level, tuple(shape)) <= model.capacity_bytes(level)
