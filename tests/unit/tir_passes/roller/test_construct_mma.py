"""Construction of tensor-core rPrograms: alignment, capacity, ranking."""

from __future__ import annotations

import cProfile
import csv
import pstats
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.tensor_exprs import conv2d, matmul
from tvm_ext.analysis.gemm_form import TileSplit, reduction_step, split_of
from tvm_ext.analysis.tensor_expr import TensorExpr
from tvm_ext.cost.mma_model import fragment_registers, predict_mma, resident_blocks, shape_of, tile_bytes
from tvm_ext.devices import device_db
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.records.rprogram import Prediction, RProgram
from tvm_ext.records.serialise import from_json, to_json
from tvm_ext.tir_passes.roller.construct_mma import _tiles, construct_mma

DEVICES = ("nvidia-v100", "nvidia-t4", "nvidia-a100", "nvidia-h100", "nvidia-h200")
WORKLOAD = Path(__file__).resolve().parents[4] / "benchmarks" / "workloads" / "roller_ops.csv"


def half(expr: TensorExpr, dtype: str = "float16") -> TensorExpr:
    inputs = tuple(replace(access, dtype=dtype, itemsize_bytes=2.0) for access in expr.inputs)
    return replace(expr, inputs=inputs, output=replace(expr.output, dtype=dtype, itemsize_bytes=2.0))


SHAPES = [(4096, 4096, 4096), (1024, 768, 768), (128, 1000, 2048), (127, 61, 37), (65536, 1024, 2), (16, 4096, 4096)]


@pytest.mark.sampled
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_programs_are_aligned_and_fit(device: str, shape: tuple[int, int, int]) -> None:
    spec = device_db.lookup(device)
    programs = construct_mma(half(matmul(*shape)), spec, k=10).programs
    assert programs
    for program in programs:
        split = split_of(program)
        assert split.warp_rows % 16 == split.warp_columns % 16 == 0
        assert split.rows % split.warp_rows == split.columns % split.warp_columns == 0
        assert split.depth % reduction_step("float16", spec) == 0
        assert split.depth * 2 in (32, 64, 128)
        assert 1 <= split.warps <= 8
        assert fragment_registers(split, "float16", spec) <= (spec.matrix_register_limit or spec.register_limit)
        assert tile_bytes(split, "float16", spec) <= (spec.layer("L1").capacity_bytes or 0)
        assert split.rows < shape[0] + split.warp_rows  # no warp without work
        assert split.columns < shape[1] + split.warp_columns


def test_programs_are_ranked_and_survive_json() -> None:
    found = construct_mma(half(matmul(1024, 1024, 1024)), device_db.lookup("a100"), k=10)
    times = [program.prediction.time_s for program in found.programs]
    assert times == sorted(times)
    assert len({split_of(p) for p in found.programs}) == 10
    assert from_json(RProgram, to_json(found.programs[0])) == found.programs[0]
    assert all(loser.reason for loser in found.rejected)


def test_large_products_take_large_tiles() -> None:
    for device in ("a100", "h200"):
        split = split_of(construct_mma(half(matmul(8192, 8192, 8192)), device_db.lookup(device), k=1).programs[0])
        assert split.rows * split.columns >= 128 * 128
        assert split.warps >= 4


def test_small_grids_split_the_reduction() -> None:
    """64 x 256 outputs are one to four tiles for 108 units: 4096 products each are shared out among blocks."""
    spec = device_db.lookup("a100")
    program = construct_mma(half(matmul(64, 256, 4096)), spec, k=1).programs[0]
    split = split_of(program)
    tiles = -(-64 // split.rows) * -(-256 // split.columns)
    splits = program.partition_count // tiles
    assert splits > 1
    assert program.partition_count % tiles == 0
    alone = predict_mma(shape_of(matmul_product(64, 256, 4096)), split, 1, "float16", spec)
    assert program.prediction.time_s < 0.85 * alone.time_s


def matmul_product(m: int, n: int, k: int) -> TensorExpr:
    return half(matmul(m, n, k, transpose_b=True))


@pytest.mark.parametrize("shape", [(4096, 4096, 64), (100, 3000, 64), (16, 5000, 64)], ids=str)
def test_tiles_grow_by_whole_fragments_along_the_better_axis(shape: tuple[int, int, int]) -> None:
    """Every tile has a smaller neighbour by one warp or is a warp; none of a square product is a line of warps only."""
    spec = device_db.lookup("a100")
    tiles = _tiles(shape_of(half(matmul(*shape))), "float16", spec, 16)
    assert len(set(tiles)) == len(tiles)
    known = {(tile.warp_rows, tile.warp_columns, tile.rows, tile.columns) for tile in tiles}
    for down, across, rows, columns in known:
        smaller = {(down, across, rows - down, columns), (down, across, rows, columns - across)}
        assert (rows, columns) == (down, across) or smaller & known
    warps = {(down, across) for down, across, *_ in known}
    assert all(down % 16 == across % 16 == 0 for down, across in warps)
    # 8 warps of 32 x 32 as 2 x 4 read 24 fragments a step; as 1 x 8 they read 36, which no growth by score reaches
    assert (shape[0] < 4096) or ((32, 32, 64, 128) in known and (32, 32, 32, 256) not in known)


def test_enough_tiles_are_not_split() -> None:
    for shape in ((4096, 4096, 4096), (1024, 4096, 1024)):
        program = construct_mma(half(matmul(*shape)), device_db.lookup("a100"), k=1).programs[0]
        split = split_of(program)
        assert program.partition_count == -(-shape[0] // split.rows) * -(-shape[1] // split.columns)


def test_reduction_steps_do_not_pad_much() -> None:
    """147 products: one step of 64 more than needed would be a fifth of waste, 16 pad to 160."""
    program = construct_mma(half(matmul(1024, 1024, 147)), device_db.lookup("a100"), k=1).programs[0]
    assert split_of(program).depth in (16, 32)
    program = construct_mma(half(matmul(1024, 1024, 576)), device_db.lookup("a100"), k=1).programs[0]
    assert split_of(program).depth == 64


def test_convolution_tiles_name_the_fused_axes() -> None:
    found = construct_mma(half(conv2d(8, 64, 28, 28, 128, (3, 3))), device_db.lookup("a100"), k=1)
    assert found.programs[0].tile("L1").axes == ("f", "n*h*w", "c*r*s")
    assert dict(found.canonical.groups)["n*h*w"] == ("n", "h", "w")


def test_model_counts_what_the_tile_loads() -> None:
    """128 x 128 tiles of a 256 x 256 x 64 product: 4 blocks; 8 warps of 32 x 64 read (32 + 64) * 64 halves each."""
    spec = device_db.lookup("a100")
    split = TileSplit(rows=128, columns=128, depth=64, warp_rows=32, warp_columns=64)
    prediction = predict_mma(shape_of(matmul_product(256, 256, 64)), split, 1, "float16", spec)
    shared = next(cost for cost in prediction.layers if cost.layer == "L1")
    assert shared.traffic_bytes == 4 * (8 * (32 + 64) + 128 + 128) * 64 * 2
    memory = next(cost for cost in prediction.layers if cost.layer == "L2")
    assert memory.traffic_bytes == (256 + 256) * 64 * 2 + 256 * 256 * 2
    assert fragment_registers(split, "float16", spec) == 64 + (32 + 64) * 16 * 2 // 128
    assert resident_blocks(split, "float16", spec) == 65536 // (256 * (88 + 40))


def test_more_work_takes_longer_and_padding_counts() -> None:
    spec = device_db.lookup("v100")
    split = TileSplit(rows=128, columns=128, depth=32, warp_rows=64, warp_columns=32)
    times = [
        predict_mma(shape_of(matmul_product(m, 4096, 4096)), split, 1, "float16", spec).compute_s
        for m in (4096, 4097, 8192)
    ]
    assert times[0] < times[1] <= times[2]


def test_nothing_for_what_is_no_product() -> None:
    from tests.support.tensor_exprs import depthwise_conv2d

    found = construct_mma(half(depthwise_conv2d(1, 32, 28, 28, (3, 3))), device_db.lookup("a100"))
    assert found.programs == ()


def test_construction_takes_milliseconds() -> None:
    """Counted in calls, the same on every machine: a median of 176,000, which take a Xeon at 2.5 GHz 27 ms."""
    spec, calls = device_db.lookup("h200"), []
    with WORKLOAD.open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["op"] == "MatMul"]
    for row in rows:
        expr = half(matmul(int(row["M"]), int(row["N_mm"]), int(row["K"])))
        profile = cProfile.Profile()
        assert profile.runcall(construct_mma, expr, spec, k=10).programs
        calls.append(pstats.Stats(profile).total_calls)
    assert statistics.median(calls) < 300_000


@pytest.mark.parametrize("device", ["nvidia-a100", "nvidia-h200"])
def test_large_products_use_the_matrix_units_own_registers(device: str) -> None:
    """Tiles of 64 x 64 take 160 registers, which wmma's devices, with Roller's 96, leave out."""
    spec, product = device_db.lookup(device), half(matmul(4096, 4096, 1024))
    found = construct_mma(product, spec)
    assert (64, 64) in {(split_of(p).warp_rows, split_of(p).warp_columns) for p in found.programs}
    assert 96 < fragment_registers(split_of(found.programs[0]), "float16", spec) <= 164
    volta = device_db.lookup("nvidia-v100")
    assert volta.matrix_register_limit is None
    split = split_of(construct_mma(product, volta).programs[0])
    assert fragment_registers(split, "float16", volta) <= 96


def _predicted(spec: DeviceSpec, *sizes: int) -> Prediction:
    product = half(matmul(*sizes))
    split = TileSplit(rows=128, columns=128, depth=64, warp_rows=64, warp_columns=32)
    return predict_mma(shape_of(product), split, 1, "float16", spec)


def test_hoppers_matrix_units_are_as_fast_as_mma_sync() -> None:
    spec = device_db.lookup("nvidia-h200")
    assert spec.emitted_gflops_of("float16_tensor") == pytest.approx(0.629 * 989400.0)
    assert spec.emitted_gflops_of("float32") == spec.peak_gflops_of("float32")
    ratio = (
        _predicted(spec, 4096, 4096, 4096).compute_s
        / _predicted(replace(spec, mma_sync_share=None), 4096, 4096, 4096).compute_s
    )
    assert ratio == pytest.approx(1 / 0.629)


def test_what_all_blocks_load_is_bound_by_the_caches_bandwidth() -> None:
    """Panels that fit the cache come from it once for each block: half the bandwidth, twice the time."""
    spec = device_db.lookup("nvidia-a100")

    def with_cache(rate: float | None) -> DeviceSpec:
        layers = tuple(
            replace(layer, cache_bandwidth_gb_per_s=rate) if layer.name == "L2" else layer for layer in spec.layers
        )
        return replace(spec, layers=layers)

    def time_of(rate: float | None) -> float:
        return _predicted(with_cache(rate), 8192, 8192, 64).layers[1].time_s

    assert time_of(500.0) == pytest.approx(2 * time_of(1000.0))
    assert time_of(None) == pytest.approx(time_of(spec.layer("L2").bandwidth_gb_per_s))


def test_a_second_launch_has_its_price() -> None:
    spec = device_db.lookup("nvidia-a100")
    free = replace(spec, launch_overhead_us=None)
    shape = shape_of(half(matmul(64, 64, 4096)))
    split = TileSplit(rows=64, columns=64, depth=64, warp_rows=32, warp_columns=32)
    for splits, launches in ((1, 1), (4, 2)):
        cost = predict_mma(shape, split, splits, "float16", spec).time_s
        cost -= predict_mma(shape, split, splits, "float16", free).time_s
        assert cost == pytest.approx(launches * (spec.launch_overhead_us or 0.0) * 1e-6)
