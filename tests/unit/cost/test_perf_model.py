"""The micro-performance model against numbers worked out by hand (paper §3.3, Figures 1, 4 and 9)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest

import tvm_ext
from tests.support.tensor_exprs import conv2d, elementwise, matmul, pool2d, reduce_sum
from tvm_ext.analysis.tensor_expr import TensorExpr
from tvm_ext.cost.access_table import access_table, rows_thrash, vector_lanes, vector_use
from tvm_ext.cost.perf_model import PerfModel
from tvm_ext.devices import device_db
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.records.rprogram import Prediction, RTile

V100 = device_db.lookup("nvidia-v100")
AVX512 = device_db.lookup("cpu-avx512")


def predict(expr: TensorExpr, tiles: Mapping[str, RTile], device: DeviceSpec) -> Prediction:
    """Predicted time of ``expr`` under ``tiles`` (layer name -> rTile over all of the expression's axes)."""
    model = PerfModel(expr, device)
    sizes = [tiles[layer.name].sizes for layer in device.layers[:-1]]
    return model.predict([tuple(size[name] for name in model.names) for size in sizes])


def test_register_count_of_a_cpu_tile_is_accumulators_plus_one_operand_plus_a_stream():
    model = PerfModel(matmul(1024, 1024, 1024), AVX512, "j")
    assert model.core.accumulators((14, 32, 1)) == 28
    assert model.core.registers((14, 32, 1)) == 31
    assert model.core.operand_loads((14, 32, 1)) == (14, 2)
    assert model.footprint_bytes(0, (14, 32, 1)) <= model.capacity_bytes(0)
    assert model.footprint_bytes(0, (15, 32, 1)) > model.capacity_bytes(0)  # 33 of 32


def test_cpu_tile_cycles_are_bound_by_pipes_loads_or_latency():
    model = PerfModel(matmul(1024, 1024, 1024), AVX512, "j")
    steps = 1000
    wide = model.core.cycles((14, 32, 1), steps)
    assert wide == pytest.approx(14 * steps + 28 + 4, rel=0.04)  # 28 FMAs on 2 pipes; then 28 stores and a latency
    assert wide > 14 * steps
    narrow = model.core.cycles((1, 16, 1), steps)
    assert narrow == pytest.approx(4 * steps + 1 + 4, rel=0.01)  # a single accumulator waits for itself


def test_a_tile_across_the_outputs_rows_is_transposed_before_its_store():
    expr = conv2d(1, 64, 56, 56, 64, (3, 3), constant=True)
    by_channel, by_column = PerfModel(expr, AVX512, "f").core, PerfModel(expr, AVX512, "w").core
    names = [axis.name for axis in expr.axes]

    def tile(**sizes: int) -> tuple[int, ...]:
        return tuple(sizes.get(name, 1) for name in names)

    assert by_column.store_cycles(tile(f=4, w=16)) == 4
    assert by_channel.store_cycles(tile(f=16)) == 1 + 16  # spilled, then written lane by lane
    assert by_channel.store_cycles(tile(f=16, w=6)) == 3 * 8 + 8 + 2 * 16  # shuffles, spill, 4 + 2 elements a lane
    assert by_channel.store_cycles(tile(f=32, w=6, h=2)) == 4 * by_channel.store_cycles(tile(f=16, w=6))


def test_columns_that_the_next_tap_uses_again_stay_in_registers():
    core = PerfModel(conv2d(1, 64, 56, 56, 64, (3, 3), constant=True), AVX512, "f").core
    names = [axis.name for axis in core.expr.axes]

    def registers(**sizes: int) -> int:
        return core.registers(tuple(sizes.get(name, 1) for name in names))

    assert registers(f=64, h=6) == 24 + 4 + 1
    assert registers(f=64, w=6) == 24 + 4 + 1 + 5  # measured: spilled, 28 % slower than six rows
    assert registers(f=32, h=2, w=4) == 16 + 2 + 1 + 2 * 3


def test_elements_that_several_taps_use():
    """Row 2*x + r of a tile x = 4: r = 0 uses 0, 2, 4, 6 and r = 2 three of them again, r = 1 and 3 alike."""
    strided = PerfModel(conv2d(1, 64, 57, 57, 64, (7, 7), stride=2, constant=True), AVX512, "f")
    names = strided.names
    tile = tuple(4 if name == "w" else 1 for name in names)
    table, taps = strided.inputs[0], names.index("s")
    assert table.carried(tile, taps, 7) == 6
    assert table.carried(tile, taps, 3) == 3
    assert table.carried(tile, taps, 2) == 0
    assert table.carried((1,) * len(names), taps, 7) == 0


def test_the_last_tile_of_an_axis_is_cut_on_a_cpu():
    model = PerfModel(matmul(83, 32, 64), AVX512, "j")
    whole = 5 * model.core.cycles((14, 32, 1), 64) + model.core.cycles((13, 32, 1), 64)
    assert model.core.total_cycles((14, 32, 1)) == pytest.approx(1.04 * whole)  # two sizes of tiles in one kernel
    odd = PerfModel(matmul(84, 37, 64), AVX512, "j").core
    assert odd.total_cycles((14, 32, 1)) == pytest.approx(
        1.04 * 6 * (odd.cycles((14, 32, 1), 64) + odd.cycles((14, 5, 1), 64))
    )


def test_traffic_of_square_tiles_is_figure_1s():
    """mnk multiply-adds in 4x4 tiles read 0.5 mnk elements, in single points 2 mnk."""
    free = replace(V100, layers=tuple(replace(layer, transaction_bytes=4) for layer in V100.layers))
    model = PerfModel(matmul(64, 64, 64), free)
    mnk, output = 64**3, 64 * 64
    assert model.traffic_bytes(1, (1, 1, 1)) == 4 * (2 * mnk + output)
    assert model.traffic_bytes(1, (4, 4, 1)) == 4 * (mnk / 2 + output)
    assert model.traffic_bytes(1, (1, 4, 1)) == 4 * (1.25 * mnk + output)


def test_short_rows_are_loaded_as_whole_transactions():
    table = access_table(matmul(64, 64, 64), matmul(64, 64, 64).inputs[0], None, V100)
    assert table.loaded_bytes((4, 1, 1), 32) == 4 * 32
    assert table.loaded_bytes((4, 1, 8), 32) == 4 * 32
    assert table.loaded_bytes((4, 1, 64), 32) == 4 * 256


def test_rows_that_begin_anywhere_touch_more_transactions():
    """By counting: 5 floats of each of 4 rows, 64 tiles of them, in sectors of 8 floats."""
    expr = matmul(64, 64, 325)  # A has rows of 325 floats
    table = access_table(expr, expr.inputs[0], None, V100)
    touched = 0
    for first in range(0, 64, 4):
        for column in range(0, 325, 5):
            for row in range(first, first + 4):
                begin = row * 325 + column
                touched += (begin + 4) // 8 - begin // 8 + 1
    assert 16 * 65 * table.loaded_bytes((4, 1, 5), 32) == pytest.approx(32 * touched, rel=0.01)
    on_cpu = access_table(expr, expr.inputs[0], None, AVX512)
    assert on_cpu.loaded_bytes((4, 1, 5), 32) == 4 * 32  # its caches keep what neighbours share


def test_short_rows_far_apart_take_longer_where_that_was_measured():
    """Rows of 16 and 48 floats of x, by tiles of a 1x1 convolution; the weights are packed, and wait for nothing."""
    expr = conv2d(1, 64, 56, 56, 64, (1, 1), constant=True)
    slow = replace(AVX512, row_shares=(("L3.64", 0.4), ("L3.256", 0.8)))
    plain, model = PerfModel(expr, AVX512, "f"), PerfModel(expr, slow, "f")
    names = model.names

    def tile(width: int) -> tuple[int, ...]:
        return tuple({"f": 64, "w": width, "c": 64}.get(name, 1) for name in names)

    loaded = {width: model.inputs[0].loaded_bytes(tile(width), 64) for width in (16, 48)}
    tiles = {width: model._tile_ratios(tile(width))[0] for width in (16, 48)}
    assert plain.waited_bytes(2, tile(16)) == 0
    assert model.waited_bytes(1, tile(16)) == 0  # L2 has no share of its own
    assert model.waited_bytes(2, tile(16)) == pytest.approx(tiles[16] * loaded[16] * (1 / 0.4 - 1))
    assert model.waited_bytes(2, tile(48)) == pytest.approx(tiles[48] * loaded[48] * (1 / 0.8 - 1))
    assert model.inputs[0].row_bytes(tile(56), 64) == 4 * 56


def test_shared_memory_holds_the_padded_inputs_and_no_output():
    model = PerfModel(matmul(1024, 1024, 1024), V100)
    assert model.footprint_bytes(1, (128, 64, 8)) == 4 * (128 * 8 + 8 * 64)
    assert model.footprint_bytes(1, (128, 64, 8), (25, 0)) == 4 * (128 * 33 + 8 * 64)


def test_thread_registers_count_accumulators_and_one_step():
    model = PerfModel(matmul(1024, 1024, 1024), V100)
    assert model.footprint_bytes(0, (8, 8, 1)) == 4 * (64 + 8 + 8)
    assert model.capacity_bytes(0) == 384


@pytest.mark.parametrize(("partitions", "used"), [(80, 1.0), (81, 81 / 160), (40, 0.5), (160, 1.0)])
def test_waves_quantise_the_use_of_units(partitions: int, used: float):
    assert PerfModel(matmul(64, 64, 64), V100).balance(partitions) == pytest.approx(used)


def test_prediction_is_the_slowest_resource_and_names_it():
    tiles = {"L0": RTile(axes=("i", "j", "k"), shape=(8, 8, 1)), "L1": RTile(axes=("i", "j", "k"), shape=(128, 128, 8))}
    large = predict(matmul(8192, 8192, 8192), tiles, V100)
    assert large.bound == "compute"
    assert large.time_s >= 2 * 8192**3 / (V100.peak_gflops_of("float32") * 1e9)
    thin = predict(matmul(8192, 8192, 2), {**tiles, "L1": tiles["L1"].replace("k", 2)}, V100)
    assert thin.bound == "L2"
    assert thin.time_s == pytest.approx(max(c.time_s for c in thin.layers) + (V100.launch_overhead_us or 0) * 1e-6)


def test_launch_binds_a_tiny_operator():
    device = replace(AVX512, launch_overhead_us=5.0)
    model = PerfModel(elementwise(16), device, "d0")
    prediction = model.predict([(16,)] * (len(device.layers) - 1))
    assert prediction.bound == "launch"
    assert prediction.time_s >= 5e-6


def test_unknown_facts_are_not_charged():
    blind = replace(AVX512, fma_latency_cycles=None, loads_per_cycle=None, stores_per_cycle=None)
    model = PerfModel(matmul(1024, 1024, 1024), blind, "j")
    assert model.core.cycles((1, 16, 1), 1000) == pytest.approx(500)
    assert model.saturates_teu((1, 16, 1))


def test_unknown_rates_are_said_in_one_place():
    """Whoever divides by a rate asks the device for it, which says once what stands for one that its table lacks."""
    guess = re.compile(r"\.(?:loads_per_cycle|stores_per_cycle|fma_pipes) or\b")
    sources = Path(tvm_ext.__file__).parent.rglob("*.py")
    assert {path.name: len(guess.findall(path.read_text())) for path in sources if guess.search(path.read_text())} == {
        "hal.py": 3
    }
    blind = replace(AVX512, loads_per_cycle=None, stores_per_cycle=None, fma_pipes=None)
    assert (blind.load_rate, blind.store_rate, blind.fma_rate) == (inf, inf, 1)
    assert (AVX512.load_rate, AVX512.store_rate, AVX512.fma_rate) == (2, 1, 2)


def test_vector_use():
    a, b = matmul(8, 8, 8).inputs
    assert (vector_use(a, "j"), vector_use(b, "j"), vector_use(a, "i")) == ("broadcast", "vector", "gather")
    weights = conv2d(1, 8, 8, 8, 8, (3, 3), constant=True).inputs[1]
    assert vector_use(weights, "f") == "vector"
    assert vector_use(replace(weights, is_constant=False), "f") == "gather"


def test_a_strided_input_with_reuse_is_copied_once():
    model = PerfModel(matmul(64, 64, 64, transpose_b=True), AVX512, "j")
    assert model.inputs[1].vector_use == "vector"
    assert model.inputs[1].packed_elements == 64 * 64
    single_use = PerfModel(reduce_sum(64, 64), AVX512, "i")
    assert single_use.inputs[0].vector_use == "gather"


def test_lanes_follow_the_output_type():
    assert vector_lanes(matmul(8, 8, 8), AVX512) == 16
    assert vector_lanes(matmul(8, 8, 8, "float16"), AVX512) == 16
    assert vector_lanes(matmul(8, 8, 8, "float64"), AVX512) == 8


def test_tensor_cores_have_their_own_peak():
    model = PerfModel(matmul(1024, 1024, 1024, "float16"), V100)
    vector_rate = model.max_compute_gflops()
    model.tensor_core = True
    assert model.max_compute_gflops() > 2 * vector_rate


@pytest.mark.parametrize(("combiner", "kind"), [("sum", "add"), ("max", "max"), ("min", "max")])
def test_pools_compute_at_the_measured_rate_of_their_instruction(combiner: str, kind: str) -> None:
    expr = replace(pool2d(1, 64, 56, 56, (3, 3)), combiner=combiner)
    peak = V100.peak_gflops_of("float32") or 0.0
    measured = replace(V100, instruction_gops=((f"float32.{kind}", peak / 8),))
    assert PerfModel(expr, V100).max_compute_gflops() == peak / 2
    assert PerfModel(expr, measured).max_compute_gflops() == peak / 8
    assert PerfModel(expr, measured).roofline_s() >= PerfModel(expr, V100).roofline_s()
    assert PerfModel(matmul(64, 64, 64), measured).max_compute_gflops() == peak


def test_a_last_vector_is_made_of_powers_of_two_unless_its_panel_is_padded():
    own = PerfModel(matmul(64, 57, 64), AVX512, "j").core
    assert own.pieces(64) == 5  # 57 = 16 + 16 + 16 + 8 + 1
    assert own.accumulators((6, 64, 1)) == 30
    padded = PerfModel(matmul(64, 57, 64, constant=True), AVX512, "j").core
    assert padded.pieces(64) == 4


def test_a_tile_of_too_many_registers_keeps_its_accumulators_in_memory():
    core = PerfModel(matmul(1024, 1024, 1024), AVX512, "j").core
    assert core.registers((6, 64, 1)) == 29
    assert core.step_cycles((6, 64, 1)) == pytest.approx(12, rel=0.01)
    assert core.registers((7, 64, 1)) == 33
    assert core.step_cycles((7, 64, 1)) == pytest.approx(14 + 28, rel=0.01)


def test_vectors_from_rows_of_odd_length_take_two_load_slots():
    even, odd = (PerfModel(matmul(64, n, 64), AVX512, "j").core for n in (64, 60))
    assert (even.slots, odd.slots) == ((1, 1), (1, 2))
    assert even.step_cycles((2, 32, 1)) < odd.step_cycles((2, 32, 1))
    assert PerfModel(matmul(64, 60, 64, constant=True), AVX512, "j").core.slots == (1, 1)  # panels are aligned


def test_tiles_run_along_the_axis_that_keeps_most_loaded_bytes():
    """4 x 64 of K = 512: along i the 128 KiB panel of B stays, along j the 8 KiB of A."""
    model = PerfModel(matmul(512, 512, 512, constant=True), AVX512, "j")
    assert model.loop_order((4, 64, 1)) == (1, 0)
    assert model.loop_order((128, 16, 1)) == (0, 1)


def test_a_cache_keeps_what_the_tiles_before_left_in_it():
    model = PerfModel(matmul(512, 512, 512, constant=True), AVX512, "j")
    register, deep = (4, 64, 1), (4, 64, 512)
    resident = model.resident_tile(2, (register, deep, deep, (512, 512, 512)))
    assert resident[0] > 4  # along i first
    assert model.footprint_bytes(2, resident) <= model.capacity_bytes(2)
    assert model.footprint_bytes(2, (resident[0] + 4, *resident[1:])) > model.capacity_bytes(2) or resident[0] >= 512
    assert model.resident_tile(1, (register, deep, deep, deep)) == deep  # more than L1 holds: nothing stays
    assert model.resident_tile(0, (register, deep, deep, deep)) == register


def test_small_tiles_that_share_a_cache_are_loaded_once():
    model = PerfModel(matmul(128, 128, 128, constant=True), AVX512, "j")
    deep, whole = (4, 64, 128), (128, 128, 128)
    small, large = (model.predict(((4, 64, 1), deep, tile, whole)) for tile in (deep, whole))
    assert small.layers[2].traffic_bytes == large.layers[2].traffic_bytes == model.traffic_bytes(2, whole)


@pytest.mark.parametrize(
    ("k", "n", "thrashes"),
    [
        (1024, 1024, True),  # rows of 4096 bytes: 16 places of 16 ways
        (256, 1024, True),  # as many rows as there are ways, if pages lay in order
        (128, 1024, False),
        (2048, 1000, False),  # rows of 4000 bytes lie in 2048 places
        (4032, 1000, True),  # but 4032 of them need more pages than the TLB covers
        (512, 512, True),
        (256, 512, False),
    ],
)
def test_rows_that_push_each_other_out(k: int, n: int, thrashes: bool):
    device = replace(AVX512, l2_ways=16, tlb_pages=3072, page_bytes=4096)
    expr = matmul(512, n, k)
    reduction = [axis.name for axis in expr.reduction]
    assert device.layer("L2").capacity_bytes == 1 << 20
    assert rows_thrash(expr.inputs[1], expr.extents, reduction, device) == thrashes
    assert not rows_thrash(expr.inputs[1], expr.extents, reduction, replace(device, l2_ways=None))


@pytest.mark.parametrize(
    ("row", "m", "k", "copied"),
    [
        ("cpu-cascade-lake", 64, 1024, True),
        ("cpu-cascade-lake", 16, 1024, False),
        ("cpu-epyc-zen5", 512, 1024, True),
        ("cpu-epyc-zen5", 64, 1024, False),  # its L3 serves five times as many bytes
        ("cpu-epyc-zen5", 64, 30522, True),  # 125 MB come from memory for every tile that reads them anew
        ("cpu-epyc-zen5", 16, 30522, False),
    ],
)
def test_panels_are_copied_where_their_reuse_pays(row: str, m: int, k: int, copied: bool):
    device = device_db.lookup(row)
    expr = matmul(m, 1024, k)
    elements = access_table(expr, expr.inputs[1], expr.axes[1].name, device).packed_elements
    assert elements == (k * 1024 if copied else 0)
