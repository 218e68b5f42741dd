"""ALCOP's analytical model against arithmetic by hand on a device with round numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.alcop.printed import pipeline_latency, predict_bottleneck, predict_printed
from tvm_ext.cost.pipeline_model import predict
from tvm_ext.cost.pipeline_workload import PipelineWorkload, blocks_per_unit, expected_registers, workset_of
from tvm_ext.devices import device_db
from tvm_ext.devices.hal import DeviceSpec, MemoryLayer
from tvm_ext.errors import IllegalRewrite

US = 1e-6

ROUND = DeviceSpec(
    name="round",
    kind="cuda",
    description="10 units of 4 TEUs: 1 TFLOP/s, 100 GB/s of shared memory and 4 of the cache a unit, memory 20 GB/s",
    unit_count=10,
    teus_per_unit=4,
    teu_lanes=32,
    clock_ghz=1.0,
    register_limit=96,
    register_bytes=4,
    max_threads_per_unit=2048,
    max_blocks_per_unit=4,
    max_registers_per_thread=255,
    registers_per_unit=65536,
    register_granule=256,
    layers=(
        MemoryLayer(
            name="L0", description="", scope="teu", capacity_bytes=384, bandwidth_gb_per_s=None, transaction_bytes=4
        ),
        MemoryLayer(
            name="L1", description="", scope="unit", capacity_bytes=48_000, opt_in_capacity_bytes=96_000,
            unit_capacity_bytes=100_000, block_reserved_bytes=1000, bandwidth_gb_per_s=1000.0, transaction_bytes=128,
            latency_ns=100.0,
        ),
        MemoryLayer(
            name="L2", description="", scope="device", capacity_bytes=None, bandwidth_gb_per_s=20.0,
            transaction_bytes=32, latency_ns=1000.0, cache_latency_ns=500.0, cache_bandwidth_gb_per_s=40.0,
        ),
    ),
    peak_gflops=(("float32", 10_000.0),),
)  # fmt: skip

# A unit computes 0.5 MFLOP in 0.5 us and reads 20 KB of shared memory in 0.2 us; one warp of the four has its own TEU.
ONE = PipelineWorkload(
    blocks=10, warps_per_block=4, other_shared_bytes=0, stage_bytes=20_000, registers_per_thread=64,
    register_stage_registers=16, shared_trips=8, register_trips=4, flops_per_register_trip=0.5e6,
    bytes_per_shared_trip=4_000.0, shared_bytes_per_register_trip=20_000.0, output_bytes_per_block=2_000.0,
    workset_bytes=10_000.0, workset_blocks=10, throughput="float32",
)  # fmt: skip


def test_the_terms_of_table_1() -> None:
    latency = predict(ONE, ROUND, 1, 1)
    assert latency.llc_load_s == pytest.approx(0.5 * US + 4_000 * 10 / 40e9)
    assert latency.dram_load_s == pytest.approx(1.0 * US + 10_000 / 20e9)
    assert latency.smem_load_s == max(latency.llc_load_s, latency.dram_load_s)
    assert latency.reg_load_s == pytest.approx(0.1 * US + 0.2 * US)
    assert latency.compute_s == pytest.approx(0.5 * US)
    assert latency.epilogue_s == pytest.approx(1.0 * US + 2_000 * 10 / 20e9)
    assert latency.init_s == pytest.approx(latency.smem_load_s + latency.reg_load_s)
    assert latency.threadblock_s == latency.init_s + latency.main_loop_s + latency.epilogue_s
    assert (latency.blocks_per_unit, latency.blocks_per_batch, latency.batches) == (1, 10, 1)
    assert latency.time_s == latency.threadblock_s
    fenced = predict(ONE, replace(ROUND, barrier_ns=100.0), 1, 1)  # a slot is loaded behind the barrier that frees it
    assert fenced.smem_load_s == pytest.approx(latency.smem_load_s + 0.1 * US)


def test_without_pipelining_loads_and_uses_follow_each_other() -> None:
    latency = predict(ONE, ROUND, 1, 1)
    use = 4 * (0.3 + 0.5) * US
    assert latency.smem_use_s == pytest.approx(use)
    assert latency.iteration_s == pytest.approx(1.5 * US + use)
    assert latency.init_s + latency.main_loop_s == pytest.approx(0.3 * US + 8 * (1.5 * US + use))
    assert latency.bound == "load latency"


def test_fragments_ahead_hide_their_latency_behind_the_arithmetic() -> None:
    latency = predict(ONE, ROUND, 1, 2)
    assert latency.smem_use_s == pytest.approx(4 * 0.5 * US)
    assert latency.registers == 64 + 16


@pytest.mark.parametrize(
    ("stages", "iteration_us", "bound"), [(2, 5.0, "load latency"), (3, 2.5, "load latency"), (4, 2.0, "compute")]
)
def test_a_load_has_one_iteration_less_than_there_are_stages(stages: int, iteration_us: float, bound: str) -> None:
    """T_load is 5 us, T_use 2 us."""
    far = replace(ROUND, layers=(*ROUND.layers[:2], replace(ROUND.layers[2], latency_ns=4500.0)))
    fused = replace(ONE, register_trips=1, flops_per_register_trip=2e6, shared_bytes_per_register_trip=0.0)
    no_latency = replace(far, layers=(*far.layers[:1], replace(far.layers[1], latency_ns=0.0), far.layers[2]))
    latency = predict(fused, no_latency, stages, 1)
    assert latency.iteration_s == pytest.approx(iteration_us * US)
    assert latency.bound == bound
    assert latency.main_loop_s == pytest.approx(7 * iteration_us * US + 2 * US)


def test_registers_that_look_ahead_need_the_next_tile_earlier() -> None:
    far = replace(ROUND, layers=(*ROUND.layers[:2], replace(ROUND.layers[2], latency_ns=4500.0)))
    latency = predict(ONE, far, 2, 2)  # one of four steps ahead of T_use = 2 us
    assert latency.iteration_s == pytest.approx(5.0 * US + 2.0 * US / 4)


def test_loads_in_flight_share_the_bandwidth() -> None:
    heavy = replace(ONE, bytes_per_shared_trip=400_000.0)  # 100 us of the cache for ten blocks
    assert predict(heavy, ROUND, 4, 2).iteration_s == pytest.approx(100 * US)
    assert predict(heavy, ROUND, 4, 2).bound == "L2 cache"
    printed = predict_printed(heavy, ROUND, 4, 2)
    assert printed.iteration_s < 30 * US  # less than its bytes take: why the print is not followed


def test_blocks_of_a_unit_hide_each_others_loads() -> None:
    one, two = predict(ONE, ROUND, 1, 2), predict(replace(ONE, blocks=20), ROUND, 1, 2)
    assert two.blocks_per_unit == 2
    assert two.compute_s == pytest.approx(2 * one.compute_s)
    assert one.time_s < two.time_s < 2 * one.time_s


def test_the_last_batch_takes_what_its_own_blocks_take() -> None:
    many = replace(ONE, blocks=4 * 10 * 2 + 10)  # 4 blocks a unit: two full batches, one with a block for each unit
    latency = predict(many, ROUND, 1, 1)
    assert (latency.blocks_per_unit, latency.batches) == (4, 3)
    alone = predict(ONE, ROUND, 1, 1)
    assert latency.time_s == pytest.approx(2 * latency.threadblock_s + alone.time_s)
    assert predict_printed(many, ROUND, 1, 1).batches == 3


@pytest.mark.parametrize(
    ("load", "use", "pipe", "mplx", "expected"),
    [
        (2.0, 1.0, 3, 1, 10.0),
        (2.0, 1.0, 1, 3, 10.0),
        (5.0, 1.0, 3, 1, 20.0),
        (5.0, 1.0, 1, 1, 60.0),
        (0.0, 1.0, 1, 1, 10.0),
    ],
)
def test_the_pipeline_latency_as_printed(load: float, use: float, pipe: int, mplx: int, expected: float) -> None:
    assert pipeline_latency(load, use, 10, pipe, mplx) == expected


def test_the_printed_model_is_the_printed_one() -> None:
    latency = predict_printed(ONE, ROUND, 2, 2)
    use = pipeline_latency(0.3 * US, 0.5 * US, 4, 2, 4)
    assert latency.smem_use_s == pytest.approx(use)
    assert latency.main_loop_s == pytest.approx(pipeline_latency(1.5 * US, use, 8, 2, 1))


@pytest.mark.parametrize(
    ("size", "registers", "warps", "expected"),
    [
        (0, 32, 4, 4),  # blocks of a unit
        (49_000, 32, 4, 2),  # shared memory, 1000 bytes of each block reserved
        (49_001, 32, 4, 1),
        (1_000, 150, 4, 3),  # 65536 registers / (128 threads * 168): 150, a tenth more, in eights
        (1_000, 160, 4, 2),  # 176 registers
        (1_000, 29, 32, 2),  # threads; 32 registers
    ],
)
def test_occupancy(size: int, registers: int, warps: int, expected: int) -> None:
    assert blocks_per_unit(replace(ONE, warps_per_block=warps), ROUND, size, registers) == expected


@pytest.mark.parametrize(("planned", "expected"), [(0, 2), (10, 11), (76, 84), (80, 88), (160, 176), (200, 220)])
def test_expected_registers_are_a_tenth_more_and_no_more(planned: int, expected: int) -> None:
    assert expected_registers(planned) == expected


def test_what_does_not_fit_is_refused_with_the_numbers() -> None:
    with pytest.raises(IllegalRewrite, match=r"100000 bytes of shared memory exceed round's 96000"):
        predict(ONE, ROUND, 5, 1)
    with pytest.raises(IllegalRewrite, match=r"262 registers exceed round's 255"):
        predict(replace(ONE, registers_per_thread=246), ROUND, 1, 2)
    with pytest.raises(IllegalRewrite, match=r"1024 threads of 200 registers exceed one unit of round"):
        predict(replace(ONE, warps_per_block=32, registers_per_thread=200), ROUND, 1, 1)


def test_loads_through_registers_need_some() -> None:
    assert predict(ONE, ROUND, 2, 1, asynchronous=False).registers == 64 + 40  # 20000 bytes / 128 threads / 4
    assert predict(ONE, ROUND, 1, 1, asynchronous=False).registers == 64


def test_a_larger_batch_shares_more() -> None:
    assert workset_of(ONE, 40) == 20_000
    assert workset_of(ONE, 10) == 10_000
    assert workset_of(replace(ONE, bytes_per_shared_trip=600.0), 10) == 6_000


def test_unknown_latencies_count_as_nothing() -> None:
    k80 = device_db.lookup("k80")
    latency = predict(ONE, k80, 1, 1)
    assert latency.llc_load_s > 0
    assert latency.dram_load_s == pytest.approx(workset_of(ONE, 10) / (k80.layer("L2").bandwidth_gb_per_s or 0) / 1e9)


def test_the_bottleneck_is_one_resource_at_full_rate() -> None:
    slowest = predict_bottleneck(ONE, ROUND)
    assert slowest.compute_s == pytest.approx(8 * 4 * 0.5 * US)
    assert slowest.shared_memory_s == pytest.approx(8 * (4 * 0.2 + 0.04) * US)  # 20 KB read four times, 4 KB written
    assert slowest.memory_s == pytest.approx((8 * 10_000 + 10 * 2_000) / 20e9)
    assert slowest.time_s == slowest.compute_s


def test_tiles_are_written_to_shared_memory_as_well() -> None:
    """100 KB at 100 GB/s of a unit are 1 us of an iteration beside the 4 x 0.2 us in which fragments are read."""
    heavy = replace(ONE, bytes_per_shared_trip=100_000.0, flops_per_register_trip=1.0, workset_bytes=0.0)
    light = replace(heavy, bytes_per_shared_trip=0.0)
    assert predict(light, ROUND, 3, 4).smem_use_s == pytest.approx(4 * 0.2 * US)
    assert predict(heavy, ROUND, 3, 4).smem_use_s == pytest.approx((4 * 0.2 + 1.0) * US)


WORKLOADS = st.builds(
    replace,
    st.just(ONE),
    blocks=st.integers(1, 300),
    warps_per_block=st.integers(1, 16),
    stage_bytes=st.integers(128, 12_000),
    shared_trips=st.integers(1, 40),
    register_trips=st.integers(1, 8),
    flops_per_register_trip=st.floats(1e3, 1e7),
    bytes_per_shared_trip=st.floats(1e2, 1e5),
    shared_bytes_per_register_trip=st.floats(1e2, 1e5),
)


@given(WORKLOADS, st.integers(1, 7), st.integers(1, 3))
def test_no_prediction_beats_the_resources(workload: PipelineWorkload, shared: int, register: int) -> None:
    """Whatever the stages: never faster than arithmetic and shared memory at full rate, all blocks on all units."""
    latency = predict(workload, ROUND, shared, register)
    slowest = predict_bottleneck(workload, ROUND)
    assert latency.time_s * (1 + 1e-9) >= max(slowest.compute_s, slowest.shared_memory_s)


@given(WORKLOADS, st.integers(1, 6), st.integers(1, 3))
def test_a_stage_that_costs_no_block_never_hurts(workload: PipelineWorkload, shared: int, register: int) -> None:
    fewer, more = predict(workload, ROUND, shared, 1), predict(workload, ROUND, shared + 1, 1)
    if fewer.blocks_per_unit == more.blocks_per_unit and fewer.batches == more.batches:
        assert more.time_s <= fewer.time_s * (1 + 1e-9)


def test_real_devices_know_what_the_model_asks() -> None:
    for name in ("nvidia-v100", "nvidia-a100", "nvidia-h100", "nvidia-h200"):
        shared, memory = device_db.lookup(name).layers[1:]
        assert 0 < (shared.latency_ns or 0) < (memory.cache_latency_ns or 0) < (memory.latency_ns or 0)
        assert (memory.cache_bandwidth_gb_per_s or 0) > (memory.bandwidth_gb_per_s or 0)
        assert (shared.unit_capacity_bytes or 0) >= (shared.opt_in_capacity_bytes or 0)
