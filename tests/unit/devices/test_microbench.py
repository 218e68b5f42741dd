"""The micro-benchmarks of a CPU: what they compute, how often, and which of their figures count."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from tests.unit.devices.measured_cpu import cpu_info_of, plan_of
from tvm_ext._tvm import IRModule, Target, tensor, tvm
from tvm_ext.cli.devices import with_functions
from tvm_ext.devices import device_db, microbench, microbench_kernels, probe
from tvm_ext.devices.cpu_info import CacheInfo
from tvm_ext.devices.microbench import BenchPlan, StreamSize
from tvm_ext.errors import MeasurementError

FUNCTION_VALUES: dict[str, Callable[[float], float]] = {
    "exp": lambda x: math.exp(0.5 - 0.5 * x),
    "log": lambda x: math.log(x * x + 1.5),
    "tanh": lambda x: math.tanh(0.5 - 0.5 * x),
    "erf": lambda x: math.erf(0.5 - 0.5 * x),
    "sigmoid": lambda x: 1 / (1 + math.exp(0.5 * x - 0.5)),
    "divide": lambda x: 0.5 / (x + 0.5),
    "sqrt": lambda x: math.sqrt(0.5 * x + 0.5),
}


def times_of(plan: BenchPlan, **seconds: float) -> dict[str, list[float]]:
    """A round in which each benchmark took 1 ms but those of ``seconds``."""
    return {item.name: [seconds.get(item.name, 1e-3)] for item in microbench.benchmarks_of(plan)}


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[dict[str, list[float]]]], None]:
    """Replaces the runs of the benchmarks by the given rounds."""

    def replace(times: list[dict[str, list[float]]]) -> None:
        left = iter(times)
        monkeypatch.setattr(microbench, "_built", lambda *_: {})
        monkeypatch.setattr(microbench, "_round", lambda *_args, **_words: next(left))

    return replace


def test_rounds_are_repeated_until_two_agree(rounds: Callable[..., None]) -> None:
    """A neighbour takes half of the first two rounds; the third and fourth agree, so there is no fifth."""
    plan = plan_of()
    rounds([times_of(plan, float32=time) for time in (2e-3, 1.5e-3, 1e-3, 1.04e-3, 5e-4)])
    found = microbench.measure(plan)
    (work,) = (item.work for item in microbench.benchmarks_of(plan) if item.name == microbench.FLOAT32)
    assert (found.float32_gflops, found.rounds) == (pytest.approx(work / 1e-3 / 1e9), 4)
    assert found.disagreement == pytest.approx(0.04)


def test_a_machine_that_never_agrees_with_itself_is_said_to(rounds: Callable[..., None]) -> None:
    plan = plan_of()
    rounds([times_of(plan, clock=time) for time in (9e-3, 7e-3, 5e-3, 4e-3, 3e-3, 2e-3, 1e-3)])
    found = microbench.measure(plan)
    assert found.rounds == microbench.MOST_ROUNDS
    assert found.disagreement == pytest.approx(0.5)
    assert not found.agrees


def test_the_best_of_each_figure_counts() -> None:
    plan = plan_of()
    first, last = plan.streams[0].layer, plan.streams[-1].layer
    times = [times_of(plan, parallel=3e-3, **{first: 2e-3}), times_of(plan, parallel=2e-3, **{last: 2e-3})]
    benchmarks = microbench.benchmarks_of(plan)
    found = microbench.measurement_of(plan, benchmarks, times)
    work = {item.name: item.work for item in benchmarks}
    assert dict(found.streams_gb_per_s)[first] == pytest.approx(work[first] / 1e-3 / 1e9)
    assert dict(found.streams_gb_per_s)[last] == pytest.approx(work[last] / 1e-3 / 1e9)
    assert found.launch_overhead_us == pytest.approx(1e-3 / microbench.LAUNCHES * 1e6)


def test_the_wall_time_of_a_measurement_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine so busy that each run takes a second of its clock, every benchmark has its runs and then it ends."""
    now = [0.0]
    monkeypatch.setattr(microbench.time, "monotonic", lambda: now[0])

    def run() -> float:
        now[0] += 1.0
        return 1e-3

    plan = plan_of()
    names = [item.name for item in microbench.benchmarks_of(plan)]
    monkeypatch.setattr(microbench, "_built", lambda *_: dict.fromkeys(names, run))
    limit = 2.0 * len(names)
    assert microbench.measure(plan, limit_s=limit).rounds == 1
    assert now[0] <= limit + 1
    with pytest.raises(MeasurementError, match="too busy") as caught:
        microbench.measure(plan, limit_s=3.0)
    assert "row of the tables" in caught.value.remedy


def test_micro_benchmarks_are_plausible(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real thing, once: measured rates against what arithmetic with the measured clock allows.

    Of a few runs each, for the bounds are wide.
    """
    monkeypatch.setattr(microbench, "MOST_ROUNDS", 1)
    monkeypatch.setattr(microbench, "REPEATS", 5)
    plan = plan_of()
    found = microbench.measure(plan, limit_s=120.0, lower=partial(with_functions, device=probe.probe_cpu()))
    # What else runs may take most of any figure; the upper bounds are those of 8 GHz with four pipes and loads.
    most = 8 * 4 * plan.register_bytes * plan.core_count
    assert 0.05 < found.clock_ghz < 8
    assert 0.1 < found.float32_gflops_one_core < most / 2
    assert 0.1 < found.float32_gflops < most / 2
    assert 0.05 < found.float64_gflops < most / 4
    for rate in dict(found.streams_gb_per_s).values():
        assert 0.1 < rate < 1.5 * most
    assert dict(found.function_cycles).keys() == microbench_kernels.FUNCTIONS.keys()
    for cycles in dict(found.function_cycles).values():  # none is one operation, none a call of the C library a lane
        assert 0.5 < cycles < 2e3


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
    np.testing.assert_allclose(run(microbench_kernels.chain_kernel("float32", 4, 2, 2, 3), operands, poison), x)
    halves = np.full((2, 4), 0.5, "float32")
    for name, value in FUNCTION_VALUES.items():
        x = 0.5
        for _ in range(3):
            x = value(x)
        kernel = microbench_kernels.chain_kernel("float32", 4, 2, 2, 3, microbench_kernels.FUNCTIONS[name])
        lowered = with_functions(kernel, device_db.lookup("cpu-sse2"))
        np.testing.assert_allclose(run(lowered, halves, poison), x, rtol=1e-5, err_msg=name)
    width = microbench_kernels.LOAD_CHAINS * 4
    data = np.random.default_rng(0).random((2, 3 * width), "float32")
    expected = 2 * data.reshape(2, 3, width).sum(axis=1, dtype="float64")
    rows = np.full((1, 24, 20), np.nan, "float32")  # 24 rows of two vectors, three vectors' room between them
    rows[..., :8] = data[0].reshape(24, 8)
    apart = run(
        microbench_kernels.load_kernel(4, 1, 3, 2, 2, 20), rows.reshape(1, 480), np.full((1, width), np.nan, "float32")
    )
    np.testing.assert_allclose(apart, expected[:1], rtol=1e-5)
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
    spec = probe.probe_cpu(info=info)
    plan = probe.bench_plan(spec, info)
    sizes = {stream.name: stream.bytes_per_core for stream in plan.streams}
    assert sizes["L1"] == 24 * 1024
    assert sizes["L2"] == 512 * 1024
    assert 1024 * 1024 < sizes["L3"] <= 32 * 1024 * 1024
    assert sizes["L4"] * spec.unit_count >= 4 * 32 * 1024 * 1024
    assert StreamSize(layer="L1", bytes_per_core=24 * 1024) in plan.streams
    assert [sizes[f"{layer}.64"] for layer in ("L2", "L3")] == [
        4 * 48 * 1024,
        4 * 1024 * 1024,
    ]  # beyond the layer above
    assert plan.chains + 2 <= plan.register_count
