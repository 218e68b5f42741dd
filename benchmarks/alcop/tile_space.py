"""All tiles and stages of a product that a device can run: what a search moves in."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from math import prod

import numpy as np
from numpy.typing import NDArray

from tvm_ext.devices.gpu import VECTOR_BYTES
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.devices.occupancy import max_block_threads
from tvm_ext.errors import IllegalRewrite
from tvm_ext.records.serialise import from_json
from tvm_ext.support.quantities import Floats, Integers

from .analytical import TileColumns, TilePredictions, predict_tiles, reduction_step_of
from .products import TileCandidate, TunedProduct

SIDES = (16, 32, 64, 128, 256)
AXES: tuple[tuple[str, tuple[int, ...]], ...] = (
    ("rows", SIDES),
    ("columns", SIDES),
    ("depth", (16, 32, 64, 128)),
    ("warp_rows", (16, 32, 64, 128)),
    ("warp_columns", (16, 32, 64, 128)),
    ("shared_stages", tuple(range(1, 9))),
    ("register_stages", (1, 2, 4)),
)
"""The values of each field of a candidate; a space has the combinations that are legal."""

SIZES = tuple(len(values) for _, values in AXES)


class TileSpace:
    """The legal candidates of ``product`` on ``device``, numbered, with their predictions.

    Legal are whole warps, whole instructions, stages that the loops' trips allow (those of registers divide the inner
    loop's), at least 16 bytes to copy for each thread, tiles of which half is more than padding, and what shared
    memory, registers and threads hold. Raises IllegalRewrite where there is none.
    """

    def __init__(self, product: TunedProduct, device: DeviceSpec) -> None:
        self.product, self.device = product, device
        codes = np.flatnonzero(_is_well_formed(_columns(np.arange(prod(SIZES))), product, device))
        fits = np.isfinite(predict_tiles(product, _columns(codes), device).time_s)
        self.codes: Integers = codes[fits]
        if not len(self.codes):
            raise IllegalRewrite(f"no tile of {product} fits {device.name}")
        self.tiles = _columns(self.codes)
        self.predictions: TilePredictions = predict_tiles(product, self.tiles, device)
        self._grid = LevelGrid(SIZES, self.codes)

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, index: int) -> TileCandidate:
        return self.tiles[index]

    def index(self, configuration: str) -> int | None:
        """The place of a candidate by its text; None where it is not of this space."""
        try:
            candidate = from_json(TileCandidate, configuration)
            return self._grid.place([values.index(getattr(candidate, name)) for name, values in AXES])
        except ValueError:
            return None

    def neighbours(self, places: Integers, rng: np.random.Generator) -> Integers:
        """For each place a legal one that differs in one or two fields; itself where the change is not legal."""
        return self._grid.neighbours(places, rng)

    @cached_property
    def features(self) -> Floats:
        """What a model is told of each candidate: of the workload, the tile and the plan, sizes by their logarithms.

        No prediction of time is among them: what the analytical model says comes in by training alone.
        """
        loops, tiles = self.predictions.loops, self.tiles
        concurrent = loops.resident * self.device.unit_count
        batches = loops.blocks / concurrent
        sizes = [getattr(tiles, name) for name, _ in AXES]
        sizes += [loops.blocks, loops.warps_per_block, loops.shared_trips, loops.register_trips, loops.resident]
        sizes += [loops.stage_bytes * tiles.shared_stages, loops.resident * loops.warps_per_block]
        sizes += [tiles.rows * tiles.columns / (tiles.rows + tiles.columns), loops.workset_bytes]
        sizes += [tiles.warp_rows * tiles.warp_columns / (tiles.warp_rows + tiles.warp_columns)]
        registers = loops.registers_per_thread + (tiles.register_stages - 1) * loops.register_stage_registers
        columns = [*(np.log2(size) for size in sizes), registers, batches, np.ceil(batches) / batches, self._padding()]
        return np.stack([np.asarray(column, dtype=np.float64) for column in columns], axis=1)

    def _padding(self) -> Floats:
        """Elements computed for each that is asked for."""
        product, tiles, loops = self.product, self.tiles, self.predictions.loops
        computed = loops.blocks * tiles.rows * tiles.columns
        return np.asarray(computed / (product.batch * product.rows * product.columns), dtype=np.float64)


def _columns(codes: Integers) -> TileColumns:
    levels = np.unravel_index(codes, SIZES)
    values = {name: np.asarray(all_of)[level] for (name, all_of), level in zip(AXES, levels, strict=True)}
    return TileColumns(**values)


def _is_well_formed(tiles: TileColumns, product: TunedProduct, device: DeviceSpec) -> NDArray[np.bool_]:
    """What does not depend on memories' sizes."""
    step = reduction_step_of(product, device)
    trips, steps = -(-product.depth // tiles.depth), tiles.depth // step
    threads = tiles.warps * device.teu_lanes
    legal = (tiles.rows % tiles.warp_rows == 0) & (tiles.columns % tiles.warp_columns == 0)
    legal &= (tiles.depth % step == 0) & (tiles.shared_stages <= trips)
    legal &= (tiles.register_stages <= steps) & (steps % tiles.register_stages == 0)
    legal &= (threads >= 1) & (threads <= (max_block_threads(device) or threads.max()))
    legal &= (tiles.rows + tiles.columns) * tiles.depth * product.itemsize >= threads * VECTOR_BYTES
    extents = (tiles.rows, product.rows), (tiles.columns, product.columns), (tiles.depth, product.depth)
    for size, extent in extents:
        legal &= (size < 2 * extent) | (size == size.min())
    return np.asarray(legal, dtype=np.bool_)


class LevelGrid:
    """Candidates as combinations of levels, one of each field, of which those of ``codes`` are legal.

    A code is the row-major number of its levels in a grid of ``sizes``; ``codes`` ascend, places count along them.
    """

    def __init__(self, sizes: Sequence[int], codes: Integers) -> None:
        assert prod(sizes) < 1 << 62, "codes are 64-bit numbers"
        self.sizes, self.codes = tuple(sizes), codes

    def place(self, levels: Sequence[int]) -> int | None:
        """The place of one combination; None where it is not legal."""
        found = int(self._places(np.ravel_multi_index(tuple(levels), self.sizes)))
        return None if found < 0 else found

    def neighbours(self, places: Integers, rng: np.random.Generator) -> Integers:
        """Others that differ in one field or, half of them, in up to two; the place itself where that is not legal."""
        levels = np.stack(np.unravel_index(self.codes[places], self.sizes), axis=1)
        every = np.arange(len(places))
        for again in (np.ones(len(places), dtype=bool), rng.random(len(places)) < 0.5):
            axis = rng.integers(len(self.sizes), size=len(places))
            level = rng.integers(np.asarray(self.sizes)[axis])
            levels[every, axis] = np.where(again, level, levels[every, axis])
        found = self._places(np.ravel_multi_index(tuple(levels.T), self.sizes))
        return np.where(found >= 0, found, places)

    def _places(self, codes: NDArray[np.int64] | np.int64) -> Integers:
        near = np.minimum(np.searchsorted(self.codes, codes), len(self.codes) - 1)
        return np.where(self.codes[near] == codes, near, -1)
