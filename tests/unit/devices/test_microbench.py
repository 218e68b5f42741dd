"""The micro-benchmarks of a CPU: what they compute, how often, and which of their figures count."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from tests.unit.devices.measured_cpu import FIGURES, cpu_info_of, plan_of
from tvm_ext._tvm import IRModule, Target, tensor, tvm
from tvm_ext.devices import microbench, microbench_kernels, probe
from tvm_ext.devices.cpu_info import CacheInfo
from tvm_ext.devices.cpu_measurement import CpuMeasurement, with_measurement
from tvm_ext.devices.microbench import StreamSize


def _round(**figures: float) -> CpuMeasurement:
    return dataclasses.replace(FIGURES, **figures)


def test_rounds_are_repeated_until_two_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """A neighbour takes half of the first two rounds; the third and fourth agree, so there is no fifth."""
    peaks = iter([100.0, 180.0, 250.0, 240.0, 999.0])
    monkeypatch.setattr(microbench, "measure_once", lambda plan: _round(float32_gflops=next(peaks)))
    found = microbench.measure(plan_of())
    assert (found.float32_gflops, found.rounds) == (250.0, 4)
    assert found.disagreement == pytest.approx(250 / 240 - 1)


def test_a_machine_that_never_agrees_with_itself_is_said_to(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = iter([1.0, 1.2, 1.5, 1.9, 2.4, 3.0, 4.0])
    monkeypatch.setattr(microbench, "measure_once", lambda plan: _round(clock_ghz=next(clocks)))
    found = microbench.measure(plan_of())
    assert (found.clock_ghz, found.rounds) == (3.0, microbench.MOST_ROUNDS)
    assert found.disagreement == pytest.approx(3.0 / 2.4 - 1)


def test_the_best_of_each_figure_counts() -> None:
    slow = _round(float64_gflops=120.0, streams_gb_per_s=(("L1", 510.0), ("L2", 190.0), ("L3", 90.0)))
    found = microbench.best_of([FIGURES, dataclasses.replace(slow, launch_overhead_us=1.0)])
    assert found.float64_gflops == 125.0
    assert found.streams_gb_per_s == (("L1", 510.0), ("L2", 200.0), ("L3", 100.0))
    assert found.launch_overhead_us == 1.0
    assert found.disagreement == pytest.approx(100 / 90 - 1)


def test_of_a_busy_machine_only_what_is_better_counts() -> None:
    """Rates that were halved by a neighbour do not overrule arithmetic, where two rounds did not agree on them."""
    spec = probe.probe_cpu(measure=False)
    rates = {layer.name: layer.bandwidth_gb_per_s or 0.0 for layer in spec.layers[1:]}
    slow, fast = spec.layers[1].name, spec.layers[2].name
    figures = dataclasses.replace(
        FIGURES,
        streams_gb_per_s=((slow, rates[slow] / 2), (fast, rates[fast] * 2)),
        launch_overhead_us=2 * (spec.launch_overhead_us or 0.0),
    )
    busy = with_measurement(spec, dataclasses.replace(figures, rounds=6, disagreement=5.0), "in a test")
    quiet = with_measurement(spec, dataclasses.replace(figures, rounds=2, disagreement=0.05), "in a test")
    assert busy.layer(slow).bandwidth_gb_per_s == rates[slow]
    assert quiet.layer(slow).bandwidth_gb_per_s == rates[slow] / 2
    assert busy.layer(fast).bandwidth_gb_per_s == quiet.layer(fast).bandwidth_gb_per_s == rates[fast] * 2
    assert busy.launch_overhead_us == spec.launch_overhead_us
    assert quiet.launch_overhead_us == figures.launch_overhead_us


def test_micro_benchmarks_are_plausible(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The real thing, once: measured rates against what arithmetic with the measured clock allows.

    Of a few runs each, for the bounds are wide; what came of it is no measurement that other tests should find.
    """
    monkeypatch.setattr(microbench, "MOST_ROUNDS", 1)
    monkeypatch.setattr(microbench, "REPEATS", 5)
    monkeypatch.setenv("TVM_EXT_CACHE_DIR", str(tmp_path))
    spec = probe.probe_cpu()
    assert spec.clock_ghz is not None
    assert spec.fma_pipes is not None
    assert 0.5 < spec.clock_ghz < 8
    assert 1 <= spec.fma_pipes <= 4
    arithmetic = spec.clock_ghz * spec.teu_lanes * 2 * spec.fma_pipes * spec.unit_count
    assert 0.1 * arithmetic < (spec.peak_gflops_of("float32") or 0) < 1.5 * arithmetic
    assert (spec.peak_gflops_of("float64") or 0) < (spec.peak_gflops_of("float32") or 0)
    first, last = spec.layer("L1").bandwidth_gb_per_s, spec.lowest_layer.bandwidth_gb_per_s
    assert first is not None
    assert last is not None
    # At most four loads of a register per cycle and core; DRAM is the slowest of all.
    assert last < first < spec.clock_ghz * spec.register_bytes * 4 * spec.unit_count * 1.5


def test_the_benchmarks_compute_what_they_say() -> None:
    """A kernel whose work the compiler removed would report a rate that means nothing."""
    target = Target({"kind": "llvm"})

    def run(kernel: object, *arrays: np.ndarray) -> np.ndarray:
        tensors = [tensor(array) for array in arrays]
        tvm.compile(IRModule({"main": kernel}), target=target)["main"](*tensors)
        return np.asarray(tensors[-1].numpy())

    operands = np.array([[0.5] * 4, [3.0] * 4], "float32")
    poison = np.full((2, 8), np.nan, "float32")
    x = 0.5
    for _ in range(3):
        x = x * 0.5 + 3.0
    np.testing.assert_allclose(run(microbench_kernels.fma_kernel("float32", 4, 2, 2, 3), operands, poison), x)
    width = microbench_kernels.LOAD_CHAINS * 4
    data = np.random.default_rng(0).random((2, 3 * width), "float32")
    expected = 2 * data.reshape(2, 3, width).sum(axis=1, dtype="float64")
    sums = run(microbench_kernels.load_kernel(4, 2, 3, 2), data, np.full((2, width), np.nan, "float32"))
    np.testing.assert_allclose(sums, expected, rtol=1e-5)
    state = 88172645463325252
    for _ in range(5):
        state ^= state << 13 & (1 << 64) - 1
        state ^= state >> 7
        state ^= state << 17 & (1 << 64) - 1
    seed, result = np.array([88172645463325252], "uint64"), np.zeros(1, "uint64")
    assert run(microbench_kernels.clock_kernel(5), seed, result)[0] == state


def test_the_plan_fits_each_layer() -> None:
    caches = (*cpu_info_of().caches, CacheInfo(level=3, size_bytes=32 * 1024 * 1024, line_bytes=64, sharer_count=2))
    info = cpu_info_of(caches=tuple(dataclasses.replace(cache, sharer_count=1) for cache in caches))
    spec = probe.probe_cpu(measure=False, info=info)
    plan = probe.bench_plan(spec, info)
    sizes = {stream.layer: stream.bytes_per_core for stream in plan.streams}
    assert sizes["L1"] == 24 * 1024
    assert sizes["L2"] == 512 * 1024
    assert 1024 * 1024 < sizes["L3"] <= 32 * 1024 * 1024
    assert sizes["L4"] * spec.unit_count >= 4 * 32 * 1024 * 1024
    assert StreamSize(layer="L1", bytes_per_core=24 * 1024) in plan.streams
    assert plan.chains + 2 <= plan.register_count
