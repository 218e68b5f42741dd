"""What compiles jobs: worker processes of our own, or any `concurrent.futures.Executor`.

`LocalBuilder` is the default. Its workers import TVM once, are told what to compile line by line, need no guarded
`__main__`, and are replaced where LLVM crashes or a job takes too long, which costs that job alone. `ExecutorBuilder`
hands jobs to an executor: a Dask cluster's `Client.get_executor()` serves a rack. A library comes back as bytes, so
that builders and measurers share no folder.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import BrokenExecutor, Executor, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np

from tvm_ext._tvm import CPU_PIPELINE, IRModule, PassContext, Target, load_json, tensor, tvm
from tvm_ext.core_count import usable_core_count
from tvm_ext.errors import MeasurementError, TvmExtError
from tvm_ext.records.kernel_job import Failure, KernelJob
from tvm_ext.records.measurement import TrialOutcome
from tvm_ext.records.serialise import to_json
from tvm_ext.support.files import temporary_folder

from .kernel_host import KERNEL_ERRORS, KernelError, draw_inputs, first_line
from .worker_process import WorkerDied, WorkerProcess

# --- From a job to a shared library, and to what its kernel should compute: what builders do, in whichever process ----
HOST = "llvm"


def compile_job(job: KernelJob) -> bytes:
    """The shared library of a job for a CPU; raises KernelError.

    A builder is given this or another function of the same form, which must be a module's, so that it can be pickled:
    `tuning.compile_gpu.compile_gpu_job` for GPUs.
    """
    try:
        return _library(job.module, job.target)
    except (*KERNEL_ERRORS, TvmExtError) as error:
        raise KernelError("compile_failed", first_line(error)) from error


def reference_results(job: KernelJob) -> bytes:
    """What the job's kernel should compute, as the bytes of a file for `kernel_host.compare`; raises KernelError."""
    import io

    try:
        with temporary_folder("reference") as folder:
            path = folder / "reference.so"
            path.write_bytes(_library(job.reference, HOST))
            module = tvm.runtime.load_module(str(path))
            inputs = [tensor(array) for array in draw_inputs(job)]
            results = [tvm.runtime.empty(result.shape, result.dtype) for result in job.results]
            module[job.function](*inputs, *results)
            arrays = [result.numpy() for result in results]
    except (*KERNEL_ERRORS, TvmExtError) as error:
        raise KernelError("compile_failed", f"the reference: {first_line(error)}") from error
    wide = [array.astype(np.float64) if array.dtype.kind not in "iub" else array for array in arrays]
    file = io.BytesIO()
    np.savez(file, *wide)
    return file.getvalue()


def _library(module: str, target: str) -> bytes:
    loaded = load_json(module)
    if not isinstance(loaded, IRModule):
        raise KernelError("compile_failed", "the job's module is no IRModule")
    with PassContext(), Target(target) as known:
        if str(known.kind.name) != "llvm":
            raise KernelError("compile_failed", f"{known.kind.name} is no CPU: give the builder compile_gpu_job")
        built = tvm.tirx.build(loaded, target=known, pipeline=CPU_PIPELINE)
    with temporary_folder("build") as folder:
        path: Path = folder / "kernel.so"
        built.export_library(str(path))
        return path.read_bytes()


CompileJob = Callable[[KernelJob], bytes]
Built = bytes | Failure

BUILD_LIMIT_S = 60.0  # a choice: a kernel takes seconds to compile; what takes a minute hangs


class KernelBuilder(Protocol):
    """Compiles jobs in the background. What cannot be compiled is an answer, not an error."""

    workers: int

    def library(self, job: KernelJob) -> Future[Built]:
        """The job's shared library."""

    def reference(self, job: KernelJob) -> Future[Built]:
        """What the job's kernel should compute, as the bytes of a file of arrays."""

    def end(self) -> None:
        """Stop at once; nothing that was started is left. By whichever thread, and more than once."""


class ExecutorBuilder:
    """Jobs by an executor of the caller's, which is not ended with this; ``workers`` is how many jobs it takes at once.

    Of what was built last ``most_kept`` answers are kept: what is measured again is not compiled again.
    Processes have to be spawned, not forked: TVM's threads do not survive a fork.
    """

    def __init__(
        self, executor: Executor, workers: int, *, compiler: CompileJob = compile_job, most_kept: int = 0
    ) -> None:
        if workers < 1:
            raise ValueError(f"{workers} workers")
        self.workers, self.most_kept = workers, most_kept
        self._executor, self._compiler = executor, compiler
        self._kept: dict[tuple[str, ...], Future[Built]] = {}  # the one that was not used for longest first
        self._given: set[Future[Built]] = set()

    def library(self, job: KernelJob) -> Future[Built]:
        # What is compiled needs neither the reference nor its text a second time.
        wanted = replace(job, reference="")
        return self._made((job.workload.key, job.configuration), self._compiler, wanted)

    def reference(self, job: KernelJob) -> Future[Built]:
        return self._made((job.reference_key,), reference_results, replace(job, module=""))

    def prepare(self, jobs: Sequence[KernelJob]) -> None:
        """Have all of ``jobs`` built, and what they are compared with, as far as it is kept."""
        if self.most_kept:
            made = [self.library(job) for job in jobs]
            wait([*made, *(self.reference(job) for job in jobs if job.reference)])

    def _made(self, key: tuple[str, ...], make: CompileJob, job: KernelJob) -> Future[Built]:
        made = self._kept.pop(key, None) or self._submit(make, job)
        self._kept[key] = made
        while len(self._kept) > self.most_kept:
            del self._kept[next(iter(self._kept))]
        return made

    def _submit(self, make: CompileJob, job: KernelJob) -> Future[Built]:
        try:
            given: Future[Built] = self._executor.submit(_answered, self._maker(make), job)
        except RuntimeError as error:  # BrokenExecutor among them
            raise MeasurementError(f"the executor takes no jobs any more: {error}.", "make a new one") from error
        self._given.add(given)
        given.add_done_callback(self._given.discard)
        return given

    def _maker(self, make: CompileJob) -> Callable[[KernelJob], Built]:
        """What the executor calls; it is pickled where that has processes."""
        return make

    def end(self) -> None:
        for future in tuple(self._given):
            future.cancel()


class LocalBuilder(ExecutorBuilder):
    """``workers`` processes of this machine, started when they are needed, one job each at a time."""

    def __init__(
        self,
        workers: int = 0,
        *,
        compiler: CompileJob = compile_job,
        limit_s: float = BUILD_LIMIT_S,
        memory_bytes: int = 0,
        most_kept: int = 0,
    ) -> None:
        workers = workers or max(1, usable_core_count() - 1)
        self._pool = ThreadPoolExecutor(workers, "tvm_ext-build")
        super().__init__(self._pool, workers, compiler=compiler, most_kept=most_kept)
        self.limit_s, self.memory_bytes = limit_s, memory_bytes
        self._own = threading.local()
        self._processes: set[WorkerProcess] = set()
        self._changing = threading.Lock()
        self._ending = threading.Event()

    @property
    def pids(self) -> list[int]:
        """Of the processes that run now."""
        with self._changing:
            return [process.pid for process in self._processes]

    def _maker(self, make: CompileJob) -> Callable[[KernelJob], Built]:
        return partial(self._make, make)

    def _make(self, make: CompileJob, job: KernelJob) -> Built:
        name = f"{make.__module__}:{make.__qualname__}"
        with temporary_folder("made") as folder:
            output = folder / "output"
            asked = {"do": "build", "make": name, "job": to_json(job), "output": str(output)}
            died = self._ask(asked)
            if died is not None and died.outcome == "crashed" and not self._ending.is_set():
                died = self._ask(asked)  # somebody may have killed it
            if isinstance(died, WorkerDied):
                return Failure(outcome="compile_failed", reason=f"the compiler: {died}")
            return output.read_bytes()

    def _ask(self, request: Mapping[str, object]) -> WorkerDied | None:
        """Have this thread's process do it; how that died, if it did. Raises KernelError with its refusal."""
        worker = self._worker()
        try:
            worker.ask(request, self.limit_s)
        except WorkerDied as died:
            worker.end()
            with self._changing:
                self._processes.discard(worker)
            return died
        return None

    def _worker(self) -> WorkerProcess:
        """This thread's process, made anew where it has ended."""
        worker: WorkerProcess | None = getattr(self._own, "worker", None)
        if worker is None or not worker.is_alive:
            worker = self._own.worker = WorkerProcess("build", memory_bytes=self.memory_bytes)
            with self._changing:
                self._processes.add(worker)
            if self._ending.is_set():
                worker.end()
        return worker

    def end(self) -> None:
        self._ending.set()
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._end_processes()
        self._pool.shutdown(wait=True)
        self._end_processes()

    def _end_processes(self) -> None:
        with self._changing:
            processes, self._processes = tuple(self._processes), set()
        for process in processes:
            process.end()


def _answered(make: Callable[..., Built], *arguments: object) -> Built:
    """``make(*arguments)`` in whichever process, its refusal as an answer."""
    try:
        return make(*arguments)
    except KernelError as error:
        return Failure(outcome=error.outcome, reason=str(error))


def outcome_of(future: Future[Built]) -> Built:
    """What came of a job: a worker that died in an executor of the caller's took the job with it."""
    if future.cancelled():  # an executor that lost its workers may do that
        return Failure(outcome="lost", reason="the builder's executor has cancelled the job")
    error = future.exception()
    if error is None:
        return future.result()
    outcome: TrialOutcome = "lost" if isinstance(error, BrokenExecutor) else "compile_failed"
    return Failure(outcome=outcome, reason=f"the builder failed: {type(error).__name__}: {error}"[:500])


def written(content: bytes, path: Path) -> Path:
    """The file with ``content``."""
    path.write_bytes(content)
    return path
