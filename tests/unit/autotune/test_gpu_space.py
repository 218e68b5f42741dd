"""Many tiles at once against the model of one kernel, and the space that they come from."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.alcop.printed import bottleneck_terms, predict_bottleneck
from benchmarks.alcop.products import product_of_convolution, product_of_matmul
from tvm_ext.autotune.gpu_space import MatrixTileSpace
from tvm_ext.cost.gpu_columns import TunedProduct, predict_tiles
from tvm_ext.cost.pipeline_model import predict
from tvm_ext.devices import device_db
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.errors import IllegalRewrite
from tvm_ext.records.serialise import from_json
from tvm_ext.records.tuning import GpuTile

A100, H200 = device_db.lookup("nvidia-a100"), device_db.lookup("nvidia-h200")
PRODUCTS = [
    product_of_matmul(1024, 64, 2048),
    product_of_matmul(4096, 4096, 4096),
    product_of_matmul(100, 1000, 33),
    product_of_matmul(512, 512, 64, batch=12),
    product_of_matmul(256, 512, 1024, dtype="int8", itemsize=1),
    product_of_convolution((64, 56, 56, 64), (3, 3), 64, padding=1),
]


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("device", [A100, H200], ids=lambda device: device.name)
@pytest.mark.parametrize("product", PRODUCTS, ids=lambda item: f"{item.batch}x{item.rows}x{item.columns}x{item.depth}")
def test_the_model_of_many_is_that_of_one(product: TunedProduct, device: DeviceSpec) -> None:
    space = MatrixTileSpace(product, device)
    found = space.predictions
    bottleneck = np.max(bottleneck_terms(found.loops, device), axis=0)
    for place in range(0, len(space), max(1, len(space) // 60)):
        tile, workload = space[place], found.loops.workload(place)
        one = predict(workload, device, tile.shared_stages, tile.register_stages)
        assert tile.splits > 1 or found.time_s[place] == one.time_s
        assert tile.splits == 1 or found.time_s[place] > one.time_s
        assert bottleneck[place] == predict_bottleneck(workload, device).time_s
        assert one.blocks_per_unit <= found.loops.resident[place]


def test_counts_by_hand() -> None:
    """128 x 128 x 64 in halves by eight warps of 64 x 32, 4096 cubed.

    128 registers planned are 141 expected, 144 in granules: 12 warps of a unit, one block. 108 tiles of a grid of
    32 x 32 in groups of 8 rows span 8 + 14 panels of 16 KiB.
    """
    space = MatrixTileSpace(PRODUCTS[1], A100)
    tile = GpuTile(matrix=True, block=(128, 128, 64), inner=(64, 32), shared_stages=2, register_stages=1)
    place = space.index(tile.configuration)
    assert place is not None
    loops = space.predictions.loops
    workload = loops.workload(place)
    assert (workload.blocks, workload.shared_trips, workload.register_trips) == (1024, 64, 4)
    assert (workload.stage_bytes, workload.shared_bytes_per_register_trip) == (32 * 1024, 24 * 1024)
    assert (loops.resident[place], workload.workset_blocks) == (1, 108)
    assert workload.workset_bytes == 22 * 16 * 1024


def test_tiles_and_stages_are_ranked_together() -> None:
    """The best pair is not the best tile of one stage with stages added, where stages cost residence."""
    space = MatrixTileSpace(PRODUCTS[0], A100)
    times, tiles = space.predictions.time_s, space.tiles
    plain = np.flatnonzero((tiles.shared_stages == 1) & (tiles.register_stages == 1))
    fixed = tiles[int(plain[times[plain].argmin()])]
    sizes = (*fixed.block, *fixed.inner, fixed.splits)
    columns = tiles.rows, tiles.columns, tiles.depth, tiles.warp_rows, tiles.warp_columns, tiles.splits
    same = np.all([column == size for column, size in zip(columns, sizes, strict=True)], axis=0)
    assert times.min() < times[same].min()


def test_a_space_holds_what_fits_and_nothing_else() -> None:
    space = MatrixTileSpace(PRODUCTS[0], A100)
    assert len(space) > 1500
    assert len(np.unique(space.codes)) == len(space)
    for place in range(0, len(space), 101):
        assert space.index(space[place].configuration) == place
        assert from_json(GpuTile, space[place].configuration) == space[place]
    assert all(space.tiles.columns - space.tiles.warp_columns < 64)
    tile = space[0]
    for block, inner in (((24, 16, 64), (16, 16)), ((1024, 1024, 64), (16, 16)), ((16, 256, 64), (16, 128))):
        assert space.index(replace(tile, block=block, inner=inner).configuration) is None


def test_what_does_not_fit_takes_forever() -> None:
    space = MatrixTileSpace(PRODUCTS[1], A100)
    deep = replace(space.tiles, shared_stages=space.tiles.shared_stages * 1000)
    assert np.isinf(predict_tiles(PRODUCTS[1], deep, A100).time_s).all()
    assert len(space.predictions.ranking) == len(space)


def test_neighbours_are_legal_and_differ_in_two_fields_at_most() -> None:
    space = MatrixTileSpace(PRODUCTS[1], A100)
    start = np.arange(0, len(space), 7)
    moved = space.neighbours(start, np.random.default_rng(3))
    assert np.array_equal(moved, space.neighbours(start, np.random.default_rng(3)))
    levels = [np.stack(np.unravel_index(space.codes[places], space.sizes)) for places in (start, moved)]
    changed = np.sum(levels[0] != levels[1], axis=0)
    assert np.mean(changed > 0) > 0
    assert np.max(changed) <= 2


def test_devices_without_mma_sync_are_refused() -> None:
    with pytest.raises(IllegalRewrite, match=r"no mma\.sync"):
        MatrixTileSpace(PRODUCTS[0], device_db.lookup("nvidia-v100"))


def test_a_product_without_elements_is_refused() -> None:
    with pytest.raises(ValueError, match="no elements"):
        product_of_matmul(0, 1, 1)
