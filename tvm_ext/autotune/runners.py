"""What runs a batch of kernels: this process, a process that may die of them, servers behind a tracker.

| runner | where | a candidate that crashes, hangs or eats memory |
|---|---|---|
| `InProcessRunner` | here | takes this process with it: for kernels that are known to work |
| `IsolatedRunner` | a worker process with limits | costs itself; the worker is replaced |
| `RpcRunner` | a server behind a tracker | costs itself and a session; a device that goes away is not its fault |
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol, TypeAlias

from tvm_ext.errors import MeasurementError
from tvm_ext.records.kernel_job import TimingPlan
from tvm_ext.records.serialise import to_json

from .kernel_host import KernelError, LocalDevice
from .kernel_worker import KernelWorker
from .turns import BatchEntry, DeviceLost, take_turns
from .worker_process import WorkerDied, WorkerProcess

if TYPE_CHECKING:
    from .tracker import Tracker

SESSION_S = 120.0
"""A session is renewed before it is as old: where a kernel hangs, a stock server waits until it is."""

SERVER_WAIT_S = SESSION_S + 20.0  # a choice: a hanging session has ended by then, and its server has begun anew
RELEASE_LIMIT_S = 10.0  # a choice: closing a session takes milliseconds
OPEN_LIMIT_S = SERVER_WAIT_S + 60.0  # a choice: waiting for a server, and importing TVM on a slow device
POLL_S = 1.0  # a choice: the tracker is asked at most so often


AnyWorker: TypeAlias = "WorkerProcess | KernelWorker"


class KernelRunner(Protocol):
    """Something that runs one batch at a time. ``device`` names where the last one ran."""

    name: str

    @property
    def device(self) -> str: ...

    def run(self, entries: Sequence[BatchEntry], plan: TimingPlan) -> None:
        """Fill in times and failures; raises DeviceLost where the rest must run elsewhere."""

    def end(self) -> None:
        """Stop at once, by whichever thread; nothing of it is left afterwards."""


class Fleet(Protocol):
    """Runners that come and go."""

    def current(self) -> Sequence[KernelRunner]:
        """Those that can take a batch now, or are at one; raises MeasurementError where that cannot be known."""

    def end(self) -> None:
        """End all of them."""


class FixedFleet:
    """Runners that are there as long as the run."""

    def __init__(self, runners: Sequence[KernelRunner]) -> None:
        self.runners = tuple(runners)

    def current(self) -> Sequence[KernelRunner]:
        return self.runners

    def end(self) -> None:
        for runner in self.runners:
            runner.end()


class IsolatedRunner:
    """Kernels in a process of their own on this machine's device ``kind``, which is replaced where they break it.

    The process is kept from batch to batch: importing TVM takes a second.
    ``libraries`` are loaded there first: TVM's part for the device, where TVM does not load it by itself.
    """

    def __init__(self, kind: str = "cpu", *, libraries: Sequence[str] = ()) -> None:
        self.name = f"isolated, {kind}"
        self.started = 0
        self._device: Mapping[str, object] = {"do": "device", "kind": kind, "libraries": list(libraries)}
        self._device_name = ""
        self._is_cpu = kind == "cpu"
        self._worker: AnyWorker | None = None
        self._memory_bytes = 0
        self._ended = self._open = False
        self._changing = threading.Lock()

    def run(self, entries: Sequence[BatchEntry], plan: TimingPlan) -> None:
        memory = plan.memory_bytes if self._is_cpu else 0  # drivers of GPUs reserve all addresses that they may need
        if self._memory_bytes != memory:
            self._memory_bytes = memory
            self._replace(None)
        place = _WorkerPlace(self, plan)
        try:
            take_turns(entries, place, plan)
        finally:
            self._forget(entries, plan)

    @property
    def device(self) -> str:
        """Where the last batch ran: a GPU's own name."""
        return self._device_name or self.name

    def start(self) -> AnyWorker:
        """What answers requests; raises MeasurementError."""
        return WorkerProcess("run", memory_bytes=self._memory_bytes)

    def worker(self) -> AnyWorker:
        """A process with the device open; raises KernelError, WorkerDied or MeasurementError."""
        worker = self._worker
        if worker is not None and worker.is_alive:
            if not self._open:
                self._open_device(worker)
            return worker
        if self._ended:
            raise MeasurementError("the runner has been ended.")
        worker = self.start()
        self._replace(worker)
        self.started += 1
        self._open_device(worker)
        return worker

    def _open_device(self, worker: AnyWorker) -> None:
        self.opened(worker.ask(self.opening(), OPEN_LIMIT_S))
        self._open = True

    def _forget(self, entries: Sequence[BatchEntry], plan: TimingPlan) -> None:
        """Leave nothing of a batch in a worker that lives on."""
        worker = self._worker
        if worker is None or not worker.is_alive:
            return
        with contextlib.suppress(KernelError, WorkerDied):
            for entry in entries:
                worker.ask({"do": "unload", "number": entry.number}, plan.limit_s)

    @property
    def pid(self) -> int | None:
        """Of the process, where there is one."""
        worker = self._worker
        return worker.pid if isinstance(worker, WorkerProcess) else None

    def opening(self) -> Mapping[str, object]:
        """The request that opens the device."""
        return self._device

    def opened(self, name: str) -> None:
        """What the worker answered."""
        self._device_name = name

    def judge(self, error: KernelError | WorkerDied) -> Exception:
        """What an error at a kernel means: KernelError blames the kernel, DeviceLost the device."""
        if error.outcome == "lost":
            return DeviceLost(str(error))
        return error if isinstance(error, KernelError) else KernelError(error.outcome, str(error))

    def end(self) -> None:
        self._ended = True
        self._replace(None)

    def _replace(self, worker: AnyWorker | None) -> None:
        with self._changing:
            old, self._worker = self._worker, worker
            self._open = False
        if old is not None:
            old.end()
        if self._ended and worker is not None:  # while it was started somebody ended us
            worker.end()


class InProcessRunner(IsolatedRunner):
    """Kernels in this process, without a limit of time or memory."""

    def __init__(self, kind: str = "cpu") -> None:
        super().__init__(kind)
        self.name = f"in process, {kind}"

    def run(self, entries: Sequence[BatchEntry], plan: TimingPlan) -> None:
        here = LocalDevice()
        threads = here.thread_count
        try:
            super().run(entries, plan)
        finally:
            self._replace(None)
            here.use_threads(threads)

    def start(self) -> KernelWorker:
        return KernelWorker()


class _WorkerPlace:
    def __init__(self, runner: IsolatedRunner, plan: TimingPlan) -> None:
        self.runner, self.plan = runner, plan
        self._worker: AnyWorker | None = None
        self._loaded: set[int] = set()

    def load(self, entry: BatchEntry) -> None:
        with self._judged():
            worker = self.runner.worker()
            if worker is not self._worker:
                self._worker = worker
                self._loaded.clear()
            if entry.number in self._loaded:
                return
            artifact = entry.artifact
            request = {
                "do": "load",
                "number": entry.number,
                "library": str(artifact.library),
                "job": to_json(replace(artifact.job, module="", reference="")),
                "expected": "" if artifact.expected is None else str(artifact.expected),
            }
            worker.ask(request, self.plan.limit_s)
            self._loaded.add(entry.number)

    def time(self, entry: BatchEntry) -> list[float]:
        with self._judged():
            plan = self.plan
            request = {"do": "time", "number": entry.number, "samples": plan.samples, "sample_s": plan.sample_s}
            assert self._worker is not None
            times: list[float] = self._worker.ask(request, plan.limit_s)
            return times

    @contextlib.contextmanager
    def _judged(self) -> Iterator[None]:
        try:
            yield
        except (KernelError, WorkerDied) as error:
            raise self.runner.judge(error) from error
        except MeasurementError as error:
            raise DeviceLost(str(error)) from error


class RpcRunner(IsolatedRunner):
    """Kernels on whichever server of ``key`` the tracker gives next; a session lasts for a batch.

    A process of its own talks to the server, so that a machine that falls silent costs a time limit and no more.
    """

    def __init__(self, tracker: Tracker, key: str, kind: str = "cpu", *, wait_s: float = SERVER_WAIT_S) -> None:
        super().__init__(kind)
        self.name = f"{key} behind {tracker}"
        self.tracker, self.key, self.wait_s = tracker, key, wait_s
        self.server = ""
        self._opened_s = math.inf

    @property
    def device(self) -> str:
        return self.server or self.name

    def run(self, entries: Sequence[BatchEntry], plan: TimingPlan) -> None:
        try:
            super().run(entries, replace(plan, memory_bytes=0))
        finally:
            self._release()

    def _release(self) -> None:
        """Free the server for others. The process stays: importing TVM takes longer than most batches."""
        worker, self._open, self._opened_s = self._worker, False, math.inf
        try:
            if worker is not None and worker.is_alive:
                worker.ask({"do": "release"}, RELEASE_LIMIT_S)
        except (KernelError, WorkerDied):
            self._replace(None)

    def opening(self) -> Mapping[str, object]:
        remote = {"tracker": str(self.tracker), "key": self.key, "wait_s": self.wait_s, "session_s": SESSION_S}
        return {**super().opening(), **remote}

    def opened(self, name: str) -> None:
        self.server, self._opened_s = name, time.monotonic()

    def worker(self) -> AnyWorker:
        if time.monotonic() - self._opened_s > SESSION_S / 2:
            self._replace(None)
        return super().worker()

    def judge(self, error: KernelError | WorkerDied) -> Exception:
        if error.outcome == "crashed":
            self._replace(None)
            if "expired" in str(error) or not self._is_there():
                return DeviceLost(f"{self.server} went away: {error}")
        if error.outcome == "lost":
            self._replace(None)
        return super().judge(error)

    def _is_there(self) -> bool:
        """Whether the tracker still knows the server, which it forgets with the server's connection."""
        time.sleep(0.1)
        try:
            return self.server in self.tracker.servers(self.key)
        except MeasurementError:
            return False


class TrackerFleet:
    """A runner for each server that the tracker has at the moment."""

    def __init__(self, tracker: Tracker, key: str, kind: str = "cpu", *, wait_s: float = SERVER_WAIT_S) -> None:
        self.tracker, self.key, self.kind, self.wait_s = tracker, key, kind, wait_s
        self._runners: list[RpcRunner] = []
        self._count, self._asked_s = 0, -POLL_S

    def current(self) -> Sequence[KernelRunner]:
        if time.monotonic() - self._asked_s >= POLL_S:
            self._count = len(self.tracker.servers(self.key))
            self._asked_s = time.monotonic()
        while len(self._runners) < self._count:
            self._runners.append(RpcRunner(self.tracker, self.key, self.kind, wait_s=self.wait_s))
        return self._runners[: self._count]

    def end(self) -> None:
        for runner in self._runners:
            runner.end()
