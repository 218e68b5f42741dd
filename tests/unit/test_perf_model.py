"""The micro-performance model against numbers worked out by hand (paper §3.3, Figures 1, 4 and 9)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tvm_ext import device_db
from tvm_ext.access_table import access_table, vector_lanes, vector_use
from tvm_ext.perf_model import PerfModel, predict
from tvm_ext.plan import RTile
from tvm_ext.testing.tensor_exprs import conv2d, elementwise, matmul, reduce_sum

V100 = device_db.lookup("nvidia-v100")
AVX512 = device_db.lookup("cpu-avx512")


def test_register_count_of_a_cpu_tile_is_accumulators_plus_one_operand_plus_a_stream():
    model = PerfModel(matmul(1024, 1024, 1024), AVX512, "j")
    assert model.accumulators((14, 32, 1)) == 28
    assert model.registers((14, 32, 1)) == 31
    assert model.operand_loads((14, 32, 1)) == [14, 2]
    assert model.footprint_bytes(0, (13, 32, 1)) <= model.capacity_bytes(0)  # 29 of 32, the compiler needs some
    assert model.footprint_bytes(0, (14, 32, 1)) > model.capacity_bytes(0)


def test_cpu_tile_cycles_are_bound_by_pipes_loads_or_latency():
    model = PerfModel(matmul(1024, 1024, 1024), AVX512, "j")
    steps = 1000
    wide = model._tile_cycles((14, 32, 1), steps)
    assert wide == pytest.approx(14 * steps + 28 + 4, rel=0.04)  # 28 FMAs on 2 pipes; then 28 stores and a latency
    assert wide > 14 * steps
    narrow = model._tile_cycles((1, 16, 1), steps)
    assert narrow == pytest.approx(4 * steps + 1 + 4, rel=0.01)  # a single accumulator waits for itself


def test_strided_stores_are_charged_per_element():
    expr = conv2d(1, 64, 56, 56, 64, (3, 3), constant=True)
    by_channel, by_column = PerfModel(expr, AVX512, "f"), PerfModel(expr, AVX512, "w")
    assert by_channel._store_cycles(4) == 4 * 16
    assert by_column._store_cycles(4) == 4


def test_the_last_tile_of_an_axis_is_cut_on_a_cpu():
    model = PerfModel(matmul(83, 32, 64), AVX512, "j")
    whole = 5 * model._tile_cycles((14, 32, 1), 64) + model._tile_cycles((13, 32, 1), 64)
    assert model._cpu_cycles((14, 32, 1)) == pytest.approx(whole)


def test_traffic_of_square_tiles_is_figure_1s():
    """mnk multiply-adds in 4x4 tiles read 0.5 mnk elements, in single points 2 mnk."""
    free = replace(V100, layers=tuple(replace(layer, transaction_bytes=4) for layer in V100.layers))
    model = PerfModel(matmul(64, 64, 64), free)
    mnk, output = 64**3, 64 * 64
    assert model.traffic_bytes(1, (1, 1, 1)) == 4 * (2 * mnk + output)
    assert model.traffic_bytes(1, (4, 4, 1)) == 4 * (mnk / 2 + output)
    assert model.traffic_bytes(1, (1, 4, 1)) == 4 * (1.25 * mnk + output)


def test_short_rows_are_loaded_as_whole_transactions():
    table = access_table(matmul(64, 64, 64), matmul(64, 64, 64).inputs[0], None, is_cpu=False)
    assert table.loaded_bytes((4, 1, 1), 32) == 4 * 32
    assert table.loaded_bytes((4, 1, 8), 32) == 4 * 32
    assert table.loaded_bytes((4, 1, 64), 32) == 4 * 256


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
    tiles = {
        "L0": RTile(axes=("i", "j", "k"), shape=(8, 8, 1)),
        "L1": RTile(axes=("i", "j", "k"), shape=(128, 128, 8)),
    }
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
    assert model._tile_cycles((1, 16, 1), 1000) == pytest.approx(500)
    assert model.saturates_teu((1, 16, 1))


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
