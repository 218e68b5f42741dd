"""Micro-benchmarks of the CPU at hand, as TensorIR kernels built by stock TVM (paper §4: what no document says).

Interference only ever slows a kernel down, so every figure is the best of many short runs, in rounds that are repeated
until two agree, and no longer than a limit of wall time. No build runs them: `tvm-ext devices cpu --measure` does.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tvm_ext import _tvm, forks
from tvm_ext._tvm import Module, PrimFunc
from tvm_ext.errors import MeasurementError
from tvm_ext.support.files import temporary_folder
from tvm_ext.support.shared_library import load_library

from .cpu_measurement import CpuMeasurement
from .machine import ROW_BYTES

REPEATS = 20  # a choice: runs of one benchmark; the fastest counts
MOST_ROUNDS = 6  # a choice: two rounds agree on a quiet machine; a busy one is given up after so many
LAUNCHES = 100  # in one run of empty regions
TARGET_SECONDS = 3e-3  # of one run: long against the timer, short against the scheduler's patience with a second thread
LIMIT_SECONDS = 15.0
"""Of wall time for everything. A round takes two seconds on an idle machine; on a busy one it may be the only one."""

ONE_CORE, FLOAT32, FLOAT64, CLOCK, ALONE, REGION = "float32_one", "float32", "float64", "clock", "serial", "parallel"
FUNCTION = "function_"  # prefix of the names of functions' benchmarks
ROW_GAP_BYTES = 1024
"""Between short rows: a choice. Rows of 64 bytes come from an Ice Lake's L3 at 0.75 of the rate of long ones with gaps
of 64 to 512 bytes, at 0.4 with 1 KiB, and at 0.1 with a page, where each also misses the TLB."""
FUNCTION_CHAINS = 4  # a choice: an exp of four registers still has room for its constants


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamSize:
    """One bandwidth measurement: ``bytes_per_core`` are read again and again by each core, out of ``layer``.

    With ``row_bytes`` by one core, in rows so long that lie `ROW_GAP_BYTES` apart.
    """

    layer: str
    bytes_per_core: int
    row_bytes: int | None = None

    @property
    def name(self) -> str:
        return self.layer if self.row_bytes is None else f"{self.layer}.{self.row_bytes}"


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

    def steps(self, cycles: float) -> int:
        """How often a step of so many cycles is done in a run of `TARGET_SECONDS`."""
        return max(1, int(TARGET_SECONDS * self.clock_ghz * 1e9 / cycles))


@dataclass(frozen=True, kw_only=True, slots=True)
class Benchmark:
    """One kernel with its arrays; ``work`` of one run: flops, bytes, cycles or launches."""

    name: str
    kernel: PrimFunc
    arrays: tuple[npt.NDArray[np.generic], ...]
    work: float
    runs: int = 1


Lower = Callable[[PrimFunc], PrimFunc]

RunBenchmark = Callable[[], float]
"""Runs one benchmark once; answers the seconds that it took."""


def measure(
    plan: BenchPlan,
    *,
    limit_s: float = LIMIT_SECONDS,
    watch: Callable[[str], None] = lambda _: None,
    lower: Lower | None = None,
) -> CpuMeasurement:
    """Run all micro-benchmarks of ``plan`` in rounds until two agree, ``limit_s`` seconds have passed or `MOST_ROUNDS`.

    `CpuMeasurement.disagreement` says how far apart the figures still were; ``watch`` hears what is being run.
    ``lower`` writes functions as kernels have them; without it they are not measured.
    Raises MeasurementError where the machine is too busy to run each of them once in that time.
    """
    deadline = time.monotonic() + limit_s
    benchmarks = (*benchmarks_of(plan), *(functions_of(plan, lower) if lower else ()))
    with temporary_folder("measure") as folder:
        watch("compiling the micro-benchmarks")
        runners = _built(plan, benchmarks, folder)
        rounds: list[dict[str, list[float]]] = []
        found = None
        while len(rounds) < MOST_ROUNDS and (found is None or time.monotonic() < deadline):
            watch(f"round {len(rounds) + 1}")
            times = _round(runners, deadline, whole=not rounds)
            if times is None:
                break
            rounds.append(times)
            found = measurement_of(plan, benchmarks, rounds)
            if len(rounds) > 1 and found.agrees:
                break
    if found is None:
        raise MeasurementError(
            f"this machine is too busy: its micro-benchmarks did not run once each in {limit_s:g} s.",
            "measure it when less runs beside; builds take the row of the tables meanwhile",
        )
    return found


def _round(runners: dict[str, RunBenchmark], deadline: float, *, whole: bool) -> dict[str, list[float]] | None:
    """Seconds of up to `REPEATS` runs of each benchmark; None where the deadline passed before each had one.

    The first round shares what is left of the time evenly, so that no benchmark takes it from those behind.
    """
    times: dict[str, list[float]] = {}
    for index, (name, run) in enumerate(runners.items()):
        now = time.monotonic()
        until = now + (deadline - now) / (len(runners) - index) if whole else deadline
        if now >= deadline:
            return None
        samples = [run()]
        while len(samples) < REPEATS and time.monotonic() < until:
            samples.append(run())
        times[name] = samples
    return times


def measurement_of(
    plan: BenchPlan, benchmarks: Sequence[Benchmark], rounds: Sequence[dict[str, list[float]]]
) -> CpuMeasurement:
    """The best of each figure over ``rounds``, and how far the two best of one lay apart at most.

    Worked example: rounds of 312, 345 and 340 GB/s give 345 and a disagreement of 345 / 340 - 1 = 1.5 %. The launch
    overhead, half a microsecond of waiting for another core, is left out of that: it differs by half between rounds.
    """
    best = {benchmark.name: sorted(min(times[benchmark.name]) for times in rounds) for benchmark in benchmarks}
    rates = {benchmark.name: benchmark.work / best[benchmark.name][0] / 1e9 for benchmark in benchmarks}
    steady = [name for name in best if name not in (ALONE, REGION)]
    overhead_s = max(best[REGION][0] - best[ALONE][0], 1e-9) / LAUNCHES
    return CpuMeasurement(
        clock_ghz=rates[CLOCK],
        float32_gflops_one_core=rates[ONE_CORE],
        float32_gflops=rates[FLOAT32],
        float64_gflops=rates[FLOAT64],
        streams_gb_per_s=tuple((stream.name, rates[stream.name]) for stream in plan.streams),
        launch_overhead_us=overhead_s * 1e6,
        function_cycles=tuple(
            (name, rates[CLOCK] / rates[FUNCTION + name]) for name in _kernels().FUNCTIONS if FUNCTION + name in rates
        ),
        spread=min(max(statistics.median(times[name]) / min(times[name]) - 1 for name in steady) for times in rounds),
        rounds=len(rounds),
        disagreement=max(best[name][1] / best[name][0] - 1 for name in steady) if len(rounds) > 1 else 0.0,
    )


def benchmarks_of(plan: BenchPlan) -> tuple[Benchmark, ...]:
    """All that `measure` runs, in its order."""
    cores = plan.core_count
    return (
        _fma(plan, ONE_CORE, "float32", 1),
        _fma(plan, FLOAT32, "float32", cores),
        _fma(plan, FLOAT64, "float64", cores),
        *(_stream(plan, stream) for stream in plan.streams),
        _clock(plan),
        *(_launch(name, count) for name, count in ((ALONE, 1), (REGION, cores))),
    )


def functions_of(plan: BenchPlan, lower: Lower) -> tuple[Benchmark, ...]:
    """Registers of results of each function by one core, in a few chains: their code has its own parallelism."""
    lanes, steps = plan.register_bytes // 4, plan.steps(FUNCTION_CHAINS * 16)
    kernels = {
        name: lower(_kernels().chain_kernel("float32", lanes, FUNCTION_CHAINS, 1, steps, value))
        for name, value in _kernels().FUNCTIONS.items()
    }
    halves, sums = np.full((2, lanes), 0.5, "float32"), np.zeros((1, FUNCTION_CHAINS * lanes), "float32")
    return tuple(
        Benchmark(name=FUNCTION + name, kernel=kernel, arrays=(halves, sums), work=float(FUNCTION_CHAINS * steps))
        for name, kernel in kernels.items()
    )


def _fma(plan: BenchPlan, name: str, dtype: str, cores: int) -> Benchmark:
    """Independent FMA chains in registers: 2 x lanes x chains flops per step and core."""
    lanes = plan.register_bytes // np.dtype(dtype).itemsize
    steps = plan.steps(plan.chains / 2)
    # x -> x / 2 + 1 / 2 has the fixed point 1: no overflow, no denormals, whatever the number of steps.
    arrays = (np.full((2, lanes), 0.5, dtype), np.zeros((cores, plan.chains * lanes), dtype))
    kernel = _kernels().chain_kernel(dtype, lanes, plan.chains, cores, steps)
    return Benchmark(name=name, kernel=kernel, arrays=arrays, work=2.0 * lanes * plan.chains * steps * cores)


def _stream(plan: BenchPlan, stream: StreamSize) -> Benchmark:
    """Vector loads from a buffer of each core's own; rows apart lie an odd number of lines apart, in all sets."""
    lanes = plan.register_bytes // 4
    width = _kernels().LOAD_CHAINS * lanes
    blocks = max(1, stream.bytes_per_core // (4 * width))
    passes = plan.steps(blocks * width * 4 / 8)
    cores, row, pitch = plan.core_count, 1, lanes
    if stream.row_bytes is not None:
        cores, row = 1, stream.row_bytes // plan.register_bytes
        pitch = ((stream.row_bytes + ROW_GAP_BYTES) // ROW_BYTES[0] | 1) * ROW_BYTES[0] // 4
    data = np.zeros((cores, blocks * _kernels().LOAD_CHAINS // row * pitch), "float32")
    return Benchmark(
        name=stream.name,
        kernel=_kernels().load_kernel(lanes, cores, blocks, passes, row, pitch),
        arrays=(data, np.zeros((cores, width), "float32")),
        work=4.0 * width * blocks * passes * cores,
    )


def _clock(plan: BenchPlan) -> Benchmark:
    """The clock of one busy core: a round of xorshift is six dependent operations of one cycle each."""
    steps = plan.steps(6)
    arrays = (np.array([88172645463325252], "uint64"), np.zeros(1, "uint64"))
    return Benchmark(name=CLOCK, kernel=_kernels().clock_kernel(steps), arrays=arrays, work=6.0 * steps)


def _launch(name: str, cores: int) -> Benchmark:
    """Empty parallel regions; the same on one core is what else a call takes."""
    arrays = (np.zeros((cores, 64), "float32"),)
    return Benchmark(name=name, kernel=_kernels().launch_kernel(cores), arrays=arrays, work=LAUNCHES, runs=LAUNCHES)


def _kernels() -> Module:
    from . import microbench_kernels

    return microbench_kernels


def _built(plan: BenchPlan, benchmarks: Sequence[Benchmark], folder: Path) -> dict[str, RunBenchmark]:
    """A runner for each benchmark, from one library whose parallel loops run on the threads that kernels have."""
    config = {key: list(value) if isinstance(value, tuple) else value for key, value in plan.target}
    functions = {
        benchmark.name: benchmark.kernel.with_attr("global_symbol", benchmark.name) for benchmark in benchmarks
    }
    forks.require_pool()
    path = folder / "micro_benchmarks.so"
    with _tvm.PassContext(opt_level=3):  # not the caller's, whose instruments would time our passes
        _tvm.tvm.compile(_tvm.IRModule(functions), target=_tvm.Target(config)).export_library(str(path))
    library = load_library(path)
    return {benchmark.name: _runner(library, benchmark) for benchmark in benchmarks}


def _runner(library: Module, benchmark: Benchmark) -> RunBenchmark:
    tensors = [_tvm.tensor(array) for array in benchmark.arrays]
    evaluator = library.time_evaluator(benchmark.name, _tvm.tvm.cpu(), number=benchmark.runs, repeat=1)

    def run() -> float:
        return float(evaluator(*tensors).results[0]) * benchmark.runs

    return run
