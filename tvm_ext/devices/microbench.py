"""Micro-benchmarks of the CPU at hand, as TensorIR kernels built by stock TVM (paper §4: what no document says).

Interference only ever slows a kernel down, so every figure is the best of many short runs, in rounds that are repeated
until two agree: a machine that was busy throughout one round must not shape kernels for ever.
"""

from __future__ import annotations

import contextlib
import os
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tvm_ext import _tvm, forks
from tvm_ext._tvm import Module, Tensor

from .cpu_measurement import CpuMeasurement

REPEATS = 20
MOST_ROUNDS = 6
TARGET_SECONDS = 3e-3  # of one run: long against the timer, short against the scheduler's patience with a second thread


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamSize:
    """One bandwidth measurement: ``bytes_per_core`` are read again and again by each core, out of ``layer``."""

    layer: str
    bytes_per_core: int


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchPlan:
    """What to measure: the target, one core's vector registers, the cores, and a buffer size per memory layer."""

    target: tuple[tuple[str, str | int | tuple[str, ...]], ...]
    register_count: int
    register_bytes: int
    core_count: int
    clock_ghz: float  # a guess, for the lengths of the runs
    streams: tuple[StreamSize, ...]

    @property
    def chains(self) -> int:
        """Independent FMA chains that fit the registers beside two operands: 14 of 16, and 16 of 32.

        A latency of 4 cycles on 2 pipes needs 8, on 4 pipes 16.
        """
        return min(16, self.register_count - 2)


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredTime:
    """Seconds of one run: the best of the runs, and their median."""

    best_s: float
    median_s: float


def measure(plan: BenchPlan) -> CpuMeasurement:
    """Run all micro-benchmarks of ``plan`` in rounds until two agree; with `plan.core_count` threads of TVM's pool.

    A round takes about two seconds. On a quiet machine two are enough; on a busy one `MOST_ROUNDS` are run, and
    `CpuMeasurement.disagreement` says how far apart the figures still were.
    """
    rounds: list[CpuMeasurement] = []
    while len(rounds) < MOST_ROUNDS:
        rounds.append(measure_once(plan))
        found = best_of(rounds)
        if len(rounds) > 1 and found.agrees:
            break
    return found


def measure_once(plan: BenchPlan) -> CpuMeasurement:
    """One round of all micro-benchmarks."""
    with _main_thread_on_first_core():
        one_core = _fma_gflops(plan, "float32", cores=1)
        all_cores = _fma_gflops(plan, "float32", cores=plan.core_count)
        float64 = _fma_gflops(plan, "float64", cores=plan.core_count)
        streams = [(stream.layer, *_stream_gb_per_s(plan, stream)) for stream in plan.streams]
        return CpuMeasurement(
            clock_ghz=_clock_ghz(plan),
            float32_gflops_one_core=one_core[0],
            float32_gflops=all_cores[0],
            float64_gflops=float64[0],
            streams_gb_per_s=tuple((layer, rate) for layer, rate, _ in streams),
            launch_overhead_us=_launch_overhead_us(plan),
            spread=max(all_cores[1], float64[1], *(spread for _, _, spread in streams)),
        )


def best_of(rounds: Sequence[CpuMeasurement]) -> CpuMeasurement:
    """The best of each figure over ``rounds``, and how far the two best of one lay apart at most.

    Worked example: rounds of 312, 345 and 340 GB/s give 345 and a disagreement of 345 / 340 - 1 = 1.5 %. The launch
    overhead, half a microsecond of waiting for another core, is left out of that: it differs by half between rounds.
    """
    streams = [dict(item.streams_gb_per_s) for item in rounds]
    rates = {
        "clock_ghz": [item.clock_ghz for item in rounds],
        "float32_gflops_one_core": [item.float32_gflops_one_core for item in rounds],
        "float32_gflops": [item.float32_gflops for item in rounds],
        "float64_gflops": [item.float64_gflops for item in rounds],
    }
    layers = {layer: [item[layer] for item in streams] for layer in streams[0]}
    return CpuMeasurement(
        clock_ghz=max(rates["clock_ghz"]),
        float32_gflops_one_core=max(rates["float32_gflops_one_core"]),
        float32_gflops=max(rates["float32_gflops"]),
        float64_gflops=max(rates["float64_gflops"]),
        streams_gb_per_s=tuple((layer, max(found)) for layer, found in layers.items()),
        launch_overhead_us=min(item.launch_overhead_us for item in rounds),
        spread=min(item.spread for item in rounds),
        rounds=len(rounds),
        disagreement=max(map(_gap_of_best, (*rates.values(), *layers.values()))),
    )


def _gap_of_best(rates: Sequence[float]) -> float:
    """By how much the best of ``rates`` is above the second best; 0 for a single one."""
    best, second = ([*sorted(rates, reverse=True), rates[0]])[:2]
    return best / second - 1 if len(rates) > 1 else 0.0


@contextlib.contextmanager
def _main_thread_on_first_core() -> Iterator[None]:
    """Keep the calling thread, which works as the pool's first, off the cores that TVM binds its other threads to.

    Where the kernel packs threads on few cores, the two would else share one core for many milliseconds.
    """
    if not hasattr(os, "sched_getaffinity"):
        yield
        return
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        yield
    finally:
        os.sched_setaffinity(0, allowed)


def _fma_gflops(plan: BenchPlan, dtype: str, *, cores: int) -> tuple[float, float]:
    """GFLOP/s and spread of independent FMA chains in registers: 2 x lanes x chains flops per step and core."""
    kernels = _kernels()
    lanes = plan.register_bytes // np.dtype(dtype).itemsize
    steps = _count(TARGET_SECONDS * plan.clock_ghz * 1e9 / (plan.chains / 2))
    # x -> x / 2 + 1 / 2 has the fixed point 1: no overflow, no denormals, whatever the number of steps.
    operands = np.full((2, lanes), 0.5, dtype)
    sums = np.zeros((cores, plan.chains * lanes), dtype)
    timing = _time(plan, kernels.fma_kernel(dtype, lanes, plan.chains, cores, steps), operands, sums)
    flops = 2.0 * lanes * plan.chains * steps * cores
    return flops / timing.best_s / 1e9, timing.median_s / timing.best_s - 1


def _stream_gb_per_s(plan: BenchPlan, stream: StreamSize) -> tuple[float, float]:
    """GB/s over all cores, and spread, of vector loads from a buffer of each core's own."""
    kernels = _kernels()
    lanes = plan.register_bytes // 4
    width = kernels.LOAD_CHAINS * lanes
    blocks = max(1, stream.bytes_per_core // (4 * width))
    passes = _count(TARGET_SECONDS * plan.clock_ghz * 1e9 * 8 / (blocks * width * 4))
    data = np.zeros((plan.core_count, blocks * width), "float32")
    sums = np.zeros((plan.core_count, width), "float32")
    timing = _time(plan, kernels.load_kernel(lanes, plan.core_count, blocks, passes), data, sums)
    moved = 4.0 * width * blocks * passes * plan.core_count
    return moved / timing.best_s / 1e9, timing.median_s / timing.best_s - 1


def _clock_ghz(plan: BenchPlan) -> float:
    """The clock of one busy core: a round of xorshift is six dependent operations of one cycle each."""
    steps = _count(TARGET_SECONDS * plan.clock_ghz * 1e9 / 6)
    seed, result = np.array([88172645463325252], "uint64"), np.zeros(1, "uint64")
    timing = _time(plan, _kernels().clock_kernel(steps), seed, result)
    return 6.0 * steps / timing.best_s / 1e9


def _launch_overhead_us(plan: BenchPlan) -> float:
    """Microseconds that an empty parallel region takes, beyond the same kernel run serially."""
    times = []
    for cores in (1, plan.core_count):
        result = np.zeros((cores, 64), "float32")
        times.append(_time(plan, _kernels().launch_kernel(cores), result, number=500).best_s)
    return max(times[1] - times[0], 1e-9) * 1e6


def _kernels() -> Module:
    from . import microbench_kernels

    return microbench_kernels


def _count(number: float) -> int:
    return max(1, int(number))


def _time(plan: BenchPlan, kernel: Module, *arrays: Tensor, number: int = 1) -> MeasuredTime:
    config = {key: list(value) if isinstance(value, tuple) else value for key, value in plan.target}
    forks.require_pool()
    with _tvm.PassContext(opt_level=3):  # not the caller's, whose instruments would time our passes
        built = _tvm.tvm.compile(_tvm.IRModule({"main": kernel}), target=_tvm.Target(config))
    evaluator = built.mod.time_evaluator("main", _tvm.tvm.cpu(), number=number, repeat=REPEATS)
    seconds: Sequence[float] = [float(item) for item in evaluator(*map(_tvm.tensor, arrays)).results]
    return MeasuredTime(best_s=min(seconds), median_s=statistics.median(seconds))
