"""The tiles and pipeline stages that a GPU's product or convolution can have: what a search moves in (ALCOP, Table 2).

`MatrixTileSpace` has tensor cores' as a grid of levels, all predicted at once by `cost/gpu_columns.py`. Tiles of vector
units have as many axes as the operator: `vector_space` lists those around the constructed ones, with their stages.
Each is a kernel by the emitters that builds use (`tir_passes/kinds/gpu_tiles.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import cached_property
from math import prod

import numpy as np
from numpy.typing import NDArray

from tvm_ext.analysis.gemm_form import FRAGMENT, GemmForm, gemm_expr, gemm_form
from tvm_ext.analysis.tensor_expr import TensorExpr
from tvm_ext.cost.gpu_columns import TileColumns, TilePredictions, TunedProduct, fragment_step, predict_tiles
from tvm_ext.cost.mma_model import shape_of
from tvm_ext.cost.pipeline_model import predict
from tvm_ext.cost.vector_tiles import VectorTiles
from tvm_ext.devices.capabilities import ASYNC_COPIES_SINCE, has
from tvm_ext.devices.gpu import VECTOR_BYTES
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.devices.occupancy import max_block_threads
from tvm_ext.errors import IllegalRewrite
from tvm_ext.records.serialise import from_json
from tvm_ext.records.tuning import GpuTile
from tvm_ext.support.quantities import Floats, Integers

from .spaces import ListedSpace

WARP_SIDES = (16, 32, 48, 64, 80, 96, 128)  # a choice: whole fragments; what construction takes is added
WARPS = (1, 2, 3, 4, 8)  # a choice: of a threadblock along its rows, and along its columns
DEPTH_BYTES = (32, 64, 128, 256)  # of one line of a step: one to eight transactions
SPLITS = (1, 2, 4, 8, 16)  # a choice of those that construction has
SHARED_STAGES, REGISTER_STAGES = tuple(range(1, 9)), (1, 2, 4)  # those of `pipelining/choose_stages.py`
MIN_SPLIT_STEPS = 4  # as construction has it: steps that a block keeps where blocks share a reduction

Levels = tuple[tuple[str, tuple[int, ...]], ...]


def product_of(expr: TensorExpr) -> TunedProduct:
    """The product on matrix units that ``expr`` is; raises IllegalRewrite where it is none."""
    form = gemm_form(expr)
    if not isinstance(form, GemmForm):
        raise IllegalRewrite(form)
    shape = shape_of(gemm_expr(expr, form))
    return TunedProduct(
        batch=shape.batch,
        rows=shape.rows,
        columns=shape.columns,
        depth=shape.depth,
        dtype=expr.inputs[0].dtype,
        itemsize=shape.itemsize,
        output_itemsize=shape.output_bytes,
        input_bytes=int(sum(prod(access.shape) * access.itemsize_bytes for access in expr.inputs)),
    )


class MatrixTileSpace:
    """The legal tiles of ``product`` on the tensor cores of ``device``, numbered, with their predictions.

    Legal are whole warps, whole instructions, stages that the loops' trips allow (those of registers divide the inner
    loop's), at least 16 bytes to copy for each thread, no warp that is all padding, what shared memory, registers and
    threads hold, and splits of reductions where there are fewer tiles than units. ``also`` are tiles that the space has
    in any case, construction's say. Raises IllegalRewrite where there is none.
    """

    def __init__(self, product: TunedProduct, device: DeviceSpec, also: Sequence[GpuTile] = ()) -> None:
        self.product, self.device = product, device
        own = [self._values(tile) for tile in also]
        self.axes: Levels = tuple(
            (name, tuple(sorted({*values, *(item[place] for item in own)})))
            for place, (name, values) in enumerate(_axes(product, device))
        )
        self.sizes = tuple(len(values) for _, values in self.axes)
        codes = np.flatnonzero(_is_well_formed(self._columns(np.arange(prod(self.sizes))), product, device))
        listed = [self._code(values) for values in own]
        codes = np.union1d(codes, np.asarray(listed, dtype=np.int64))
        fits = np.isfinite(predict_tiles(product, self._columns(codes), device).time_s)
        self.codes: Integers = codes[fits]
        if not len(self.codes):
            raise IllegalRewrite(f"no tile of {product} fits {device.name}")
        self.tiles = self._columns(self.codes)
        self.predictions: TilePredictions = predict_tiles(product, self.tiles, device)
        self._grid = LevelGrid(self.sizes, self.codes)

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, index: int) -> GpuTile:
        return self.tiles[index]

    def index(self, configuration: str) -> int | None:
        """The place of a candidate by its text; None where it is not of this space."""
        try:
            tile = from_json(GpuTile, configuration)
            return self._grid.place(self._levels(self._values(tile))) if tile.matrix else None
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
        sizes: list[Integers | Floats] = [tiles.rows, tiles.columns, tiles.depth, tiles.warp_rows, tiles.warp_columns]
        sizes += [tiles.splits, tiles.shared_stages, tiles.register_stages]
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
        computed = loops.blocks / tiles.splits * tiles.rows * tiles.columns
        return np.asarray(computed / (product.batch * product.rows * product.columns), dtype=np.float64)

    def _columns(self, codes: Integers) -> TileColumns:
        levels = np.unravel_index(codes, self.sizes)
        found = {name: np.asarray(all_of)[level] for (name, all_of), level in zip(self.axes, levels, strict=True)}
        down, across = found.pop("down"), found.pop("across")
        return TileColumns(rows=down * found["warp_rows"], columns=across * found["warp_columns"], **found)

    def _values(self, tile: GpuTile) -> tuple[int, ...]:
        """Of a tile in the order of the axes; raises ValueError where it is no whole warps."""
        (rows, columns, depth), (warp_rows, warp_columns) = tile.block, tile.inner
        if rows % warp_rows or columns % warp_columns:
            raise ValueError(f"{tile} is no whole warps")
        grid = rows // warp_rows, columns // warp_columns
        return (*grid, warp_rows, warp_columns, depth, tile.splits, tile.shared_stages, tile.register_stages)

    def _levels(self, values: Sequence[int]) -> list[int]:
        return [all_of.index(value) for (_, all_of), value in zip(self.axes, values, strict=True)]

    def _code(self, values: Sequence[int]) -> int:
        return int(np.ravel_multi_index(tuple(self._levels(values)), self.sizes))


def _axes(product: TunedProduct, device: DeviceSpec) -> Levels:
    """The values of each field of a candidate; a space has the combinations that are legal."""
    step = fragment_step(product, device)
    depths = tuple(sorted({max(step, size // product.itemsize) for size in DEPTH_BYTES}))
    smallest = product.batch * -(-product.rows // 64) * -(-product.columns // 64)
    splits = SPLITS if smallest < 2 * device.unit_count else (1,)
    return (
        ("down", WARPS), ("across", WARPS), ("warp_rows", WARP_SIDES), ("warp_columns", WARP_SIDES), ("depth", depths),
        ("splits", splits), ("shared_stages", SHARED_STAGES), ("register_stages", REGISTER_STAGES),
    )  # fmt: skip


def _is_well_formed(tiles: TileColumns, product: TunedProduct, device: DeviceSpec) -> NDArray[np.bool_]:
    """What does not depend on memories' sizes."""
    step = fragment_step(product, device)
    all_trips, steps = -(-product.depth // tiles.depth), tiles.depth // step
    trips = -(-product.depth // (tiles.depth * tiles.splits))
    threads = tiles.warps * device.teu_lanes
    legal = (tiles.depth % step == 0) & (tiles.shared_stages <= trips)
    legal &= (tiles.register_stages <= steps) & (steps % tiles.register_stages == 0)
    legal &= (tiles.shared_stages > 1) | (tiles.register_stages == 1)
    legal &= threads <= (max_block_threads(device) or threads.max())
    legal &= (tiles.rows + tiles.columns) * tiles.depth * product.itemsize >= threads * VECTOR_BYTES
    sides = (tiles.rows, tiles.warp_rows, product.rows), (tiles.columns, tiles.warp_columns, product.columns)
    for size, warp, extent in sides:
        legal &= (warp < extent + FRAGMENT) & (size - warp < extent)
    legal &= (tiles.depth < 2 * product.depth) | (tiles.depth == tiles.depth.min())
    high, wide = -(-product.rows // tiles.rows), -(-product.columns // tiles.columns)
    scarce = (product.batch * high * wide < device.unit_count) & (all_trips // tiles.splits >= MIN_SPLIT_STEPS)
    return np.asarray(legal & ((tiles.splits == 1) | scarce), dtype=np.bool_)


MOST_VECTOR_TILES = 160
"""Tiles of vector units that are looked at, the constructed ones and those around them; each with its stages."""


def vector_space(expr: TensorExpr, device: DeviceSpec, constructed: Sequence[GpuTile]) -> ListedSpace[GpuTile]:
    """Tiles of vector units around the ``constructed`` ones, with all stages that fit; the first is the first of them.

    Raises IllegalRewrite where there is no choice.
    """
    tiles = VectorTiles(expr, device)
    plain = list(dict.fromkeys((tile.inner, tile.block) for tile in constructed))
    for inner, block in plain:  # which grows
        more = (item for item in tiles.around(inner, block) if item not in plain)
        plain += itertools.islice(dict.fromkeys(more), max(0, MOST_VECTOR_TILES - len(plain)))
    known = dict.fromkeys(constructed)
    found = {tile: seconds for inner, block in plain for tile, seconds in _staged(tiles, inner, block, device)}
    worst = max(found.values(), default=1.0)
    times = {tile: found.get(tile, worst) for tile in (*known, *found)}
    levels = [(*t.inner, *t.block, t.shared_stages, t.register_stages) for t in times]
    return ListedSpace(list(times), list(times.values()), levels)


def _staged(
    tiles: VectorTiles, inner: tuple[int, ...], block: tuple[int, ...], device: DeviceSpec
) -> Iterator[tuple[GpuTile, float]]:
    """The tile with each pair of stages that fits, and the seconds that the model expects."""
    try:
        workload = tiles.workload(inner, block)
    except IllegalRewrite:
        return
    ahead, most = has(device, ASYNC_COPIES_SINCE), tiles.most_stages(inner, block)
    for shared, register in itertools.product(SHARED_STAGES, REGISTER_STAGES):
        if shared > most[0] or (shared == 1 and register > 1) or register > most[1] or most[1] % register:
            continue
        try:
            seconds = predict(workload, device, shared, register, asynchronous=ahead).time_s
        except IllegalRewrite:
            continue
        yield GpuTile(matrix=False, inner=inner, block=block, shared_stages=shared, register_stages=register), seconds


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
