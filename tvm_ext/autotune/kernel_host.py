"""Kernels in the process that runs them: loaded, checked against what is right, timed in turns.

On a CPU times are taken by Python's monotonic clock around many calls; on other devices by TVM's evaluator, which uses
the device's own events, and on devices behind RPC by the evaluator over there. That one's clock for CPUs may be set
back or forth while it measures: what does not fit into the time that has passed here is measured again.

GPUs' kernels run with TVM's runtime and NumPy alone (`job_folder.py`).
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import tvm
import tvm_ffi

from tvm_ext.records.choice import ConstantPack
from tvm_ext.records.kernel_job import JobArgument, KernelJob
from tvm_ext.records.measurement import TrialOutcome
from tvm_ext.support.arrays import Array, DType, pack
from tvm_ext.support.roundoff import UNIT_ROUNDOFF, allowed_error, relative_error
from tvm_ext.support.shared_library import load_library

if TYPE_CHECKING:
    from tvm_ext._tvm import Device, Module
    from tvm_ext._tvm import Tensor as DeviceTensor

KERNEL_ERRORS = (
    RuntimeError,
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    OSError,
    MemoryError,
    ArithmeticError,
)
"""What TVM raises where a library cannot be loaded or a kernel refuses its arguments."""

LONG_RUN_S = 0.3
"""A run this long warms itself up."""

CONFIGURE_POOL, BIG_CORES = "runtime.config_threadpool", 1
"""TVM's function, and ThreadGroup::AffinityMode::kBig, what a pool starts with."""

MOST_RUNS = 100_000  # a choice: bounds the runs of a sample whose kernel is faster than the clock tells
CLOCK_TRIES = 3  # a choice: a clock that is wrong so often is not trusted
CLOCK_SLACK_S = 0.001  # a choice: what the host's clock may lag behind the device's sum


class KernelError(Exception):
    """A kernel has no time: ``outcome`` says in which way."""

    def __init__(self, outcome: TrialOutcome, reason: str) -> None:
        super().__init__(reason)
        self.outcome: TrialOutcome = outcome


class KernelDevice(Protocol):
    """Where kernels run. ``own_clock``: times are taken by this process' clock, around the calls."""

    device: Device
    own_clock: bool
    name: str

    def open(self, library: Path) -> Module:
        """The library as a module that can be called there."""

    def is_there(self) -> bool:
        """Whether it still answers, after a kernel has failed."""

    def use_threads(self, count: int) -> int:
        """Have kernels run with ``count`` threads; with how many they do, which may be fewer."""


@dataclass(slots=True)
class LocalDevice:
    """A device of this machine: ``kind`` is TVM's, "cpu" or "cuda". ``name`` is a GPU's own.

    Raises LookupError where there is none.
    """

    kind: str = "cpu"
    device: Device = field(init=False)
    own_clock: bool = field(init=False)
    name: str = field(init=False)

    def __post_init__(self) -> None:
        self.device, self.own_clock = tvm.runtime.device(self.kind, 0), self.kind == "cpu"
        if not self.device.exist:
            raise LookupError("TVM's runtime finds no such device")
        self.name = "" if self.kind == "cpu" else str(self.device.device_name)

    def open(self, library: Path) -> Module:
        return load_library(library, own_threads=self.kind == "cpu")

    def is_there(self) -> bool:
        return True

    def use_threads(self, count: int) -> int:
        """Of TVM's pool and of our own teams, which follow from the first library on that `open` has loaded."""
        tvm_ffi.get_global_func(CONFIGURE_POOL)(BIG_CORES, count)
        return self.thread_count

    @property
    def thread_count(self) -> int:
        """With how many threads kernels run now."""
        return int(tvm.runtime.num_threads())


@dataclass(slots=True)
class _Loaded:
    module: Module
    function: str
    arguments: list[DeviceTensor]
    threads: int  # 0: the device's are no matter
    run_s: float


class KernelHost:
    """Kernels on one device, known by number. Arguments of one workload are shared, as they are in the caches."""

    def __init__(self, device: KernelDevice) -> None:
        self.device = device
        self._kernels: dict[int, _Loaded] = {}
        self._threads = 0
        self._workload = ""
        self._drawn: list[Array] = []
        self._plain: dict[int, DeviceTensor] = {}  # by the parameter's index
        self._packed: dict[tuple[int, ConstantPack], DeviceTensor] = {}

    def load(self, number: int, library: Path, job: KernelJob, expected: Path | None) -> None:
        """Make a kernel ready, and compare what it computes with the arrays of ``expected``; raises KernelError."""
        with self._blamed():
            module = self.device.open(library)
            arguments = self._arguments(job)
            loaded = _Loaded(module, job.function, arguments, job.workload.threads, 0.0)
            self._use_threads(loaded)
            start = time.perf_counter()
            module[job.function](*arguments)
            self.device.device.sync()
            loaded.run_s = time.perf_counter() - start
            results = [argument.numpy() for argument in arguments[len(job.inputs) :]]
        if expected is not None:
            compare(results, expected, job)
        if loaded.run_s < LONG_RUN_S:  # the first was cold
            with self._blamed():
                loaded.run_s = min(self._run_s(loaded, 1) for _ in range(3))
        self._kernels[number] = loaded

    def time(self, number: int, samples: int, sample_s: float) -> list[float]:
        """Microseconds per run, ``samples`` times; raises KernelError."""
        loaded = self._kernels[number]
        repeats = min(MOST_RUNS, max(1, math.ceil(sample_s / max(loaded.run_s, 1e-7))))
        with self._blamed():
            self._use_threads(loaded)
            if loaded.run_s < LONG_RUN_S:
                loaded.run_s = self._run_s(loaded, 1)
            return [1e6 * self._run_s(loaded, repeats) for _ in range(samples)]

    def unload(self, number: int) -> None:
        """Forget a kernel, and the constants that were packed for it alone: each configuration may want its own."""
        self._kernels.pop(number, None)
        used = {id(argument) for kernel in self._kernels.values() for argument in kernel.arguments}
        self._packed = {key: item for key, item in self._packed.items() if id(item) in used}

    @contextlib.contextmanager
    def _blamed(self) -> Iterator[None]:
        """What TVM raises within it is the kernel's failure."""
        try:
            yield
        except KERNEL_ERRORS as error:
            outcome: TrialOutcome = "launch_failed" if self.device.is_there() else "crashed"
            raise KernelError(outcome, first_line(error)) from error

    def _use_threads(self, loaded: _Loaded) -> None:
        """A time is of as many threads as its workload says, or there is none; raises KernelError."""
        if not loaded.threads or loaded.threads == self._threads:
            return
        self._threads = self.device.use_threads(loaded.threads)
        if self._threads != loaded.threads:
            raise KernelError("lost", f"kernels run with {self._threads} threads here, not with {loaded.threads}")

    def _run_s(self, loaded: _Loaded, repeats: int) -> float:
        """Seconds of one run, the mean of ``repeats``."""
        if not self.device.own_clock:
            return self._evaluated_s(loaded, repeats)
        function, arguments = loaded.module[loaded.function], loaded.arguments
        start = time.perf_counter()
        for _ in range(repeats):
            function(*arguments)
        return max(time.perf_counter() - start, 1e-9) / repeats

    def _evaluated_s(self, loaded: _Loaded, repeats: int) -> float:
        evaluate = loaded.module.time_evaluator(loaded.function, self.device.device, number=repeats, repeat=1)
        for _ in range(CLOCK_TRIES):
            start = time.perf_counter()
            taken = float(evaluate(*loaded.arguments).results[0])
            if 0 < taken * repeats <= time.perf_counter() - start + CLOCK_SLACK_S:
                return taken
        raise KernelError("timed_out", "the device's clock was set while it measured")

    def _arguments(self, job: KernelJob) -> list[DeviceTensor]:
        workload = str((job.seed, [(argument.shape, argument.dtype) for argument in job.arguments]))
        if self._workload != workload:
            self._plain, self._packed, self._drawn = {}, {}, draw_inputs(job)
            self._workload = workload
        found = [self._input(index, item) for index, item in enumerate(job.inputs)]
        return found + [self._poisoned(len(found) + index, result) for index, result in enumerate(job.results)]

    def _input(self, index: int, argument: JobArgument) -> DeviceTensor:
        how = argument.pack
        if how is None:
            if index not in self._plain:
                self._plain[index] = tvm.runtime.tensor(self._drawn[index], self.device.device)
            return self._plain[index]
        if (index, how) not in self._packed:
            self._packed[index, how] = tvm.runtime.tensor(pack(self._drawn[index], how), self.device.device)
        return self._packed[index, how]

    def _poisoned(self, index: int, result: JobArgument) -> DeviceTensor:
        """The tensor for a result, full of what no kernel leaves there by chance."""
        array = np.full(result.shape, np.nan if result.dtype in UNIT_ROUNDOFF else 99, dtype=_numpy_type(result.dtype))
        if index not in self._plain:
            self._plain[index] = tvm.runtime.tensor(array, self.device.device)
        else:
            self._plain[index].copyfrom(array)
        return self._plain[index]


def draw_inputs(job: KernelJob) -> list[Array]:
    """The job's inputs as the operator has them, the same for every configuration."""
    rng = np.random.default_rng(job.seed)
    return [_drawn(item, rng) for item in job.inputs]


def _drawn(argument: JobArgument, rng: np.random.Generator) -> Array:
    if argument.dtype in UNIT_ROUNDOFF:
        return rng.standard_normal(argument.shape, dtype=np.float32).astype(_numpy_type(argument.dtype))
    if argument.dtype == "bool":
        return rng.integers(0, 2, argument.shape).astype(np.bool_)
    low = 0 if argument.dtype.startswith("uint") else -8
    return rng.integers(low, 9, argument.shape).astype(argument.dtype)


def _numpy_type(dtype: str) -> DType:
    if dtype == "bfloat16":
        import ml_dtypes

        dtype = ml_dtypes.bfloat16
    return np.dtype(dtype)


def compare(results: list[Array], expected: Path, job: KernelJob) -> None:
    """Raise KernelError where ``results`` are farther from the arrays in the file than their types allow."""
    inputs = [item.dtype for item in job.inputs]
    with np.load(expected, allow_pickle=False) as file:
        right = [file[name] for name in file.files]
    for position, (found, wanted) in enumerate(zip(results, right, strict=True)):
        form = job.results[position]
        allowed = allowed_error(inputs, form.dtype, job.depth)
        error = relative_error(found.reshape(form.shape), wanted.reshape(form.shape))
        if error > allowed:
            raise KernelError("wrong", f"result {position} errs by {error:.2g}, allowed are {allowed:.2g}")


def first_line(error: BaseException) -> str:
    """What an error says last, which is where TVM puts the reason, without its traceback."""
    text = str(getattr(error, "problem", error))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__)[:500]
