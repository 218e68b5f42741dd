"""Jobs in, trials out: built ahead while others are measured, in batches, on whatever runners there are at the moment.

`Measurer.measure` is a generator. What it answers for is every job that it took: a trial with times, or one that says
what is wrong with the candidate ("wrong", "crashed", ...), or that the machine went away under it ("lost"). A batch is
of one workload, and its kernels take turns (`turns.py`); with them run the incumbent, where one is given, and the
kernel that ran first of this workload, by whose times a machine's drift shows. Only monotonic clocks decide anything.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from tvm_ext.errors import MeasurementError
from tvm_ext.records.kernel_job import Failure, KernelJob, TimingPlan
from tvm_ext.records.measurement import MOST_REASON, MOST_SAMPLES, Trial
from tvm_ext.support.files import temporary_folder

from .builders import Built, KernelBuilder, LocalBuilder, outcome_of, written
from .runners import FixedFleet, Fleet, IsolatedRunner, KernelRunner
from .turns import Artifact, BatchEntry, DeviceLost

BATCH = 8  # a choice, that of `session.BATCH`
PATIENCE_S = 30.0
"""So long a run goes on without any device before it gives up."""

MOST_LOSSES = 3
"""So often a kernel may lose its device before it is given up: it may be why they go away."""

NOTED_DRIFT = 0.05  # a choice: what a report says of the reference's time from batch to batch
MOST_RUNNERS = 256  # a choice: threads that may wait for devices at once; bounds a process's threads
_TICK_S = 0.5  # a choice: how late a lost device or an interrupt may be noticed

Measured = tuple[KernelJob, Trial]


@dataclass(slots=True)
class MeasureReport:
    """What a measurer has done so far. Times are in seconds; ``available_s`` sums over the runners that were there."""

    trials: dict[str, int] = field(default_factory=dict)  # by outcome
    busy_s: float = 0.0
    available_s: float = 0.0
    drifts: list[float] = field(default_factory=list)  # the reference kernel's time in each batch by its first one
    devices: set[str] = field(default_factory=set)
    losses: int = 0

    @property
    def busy_share(self) -> float:
        """Of the time from the first kernel that could be measured, the share in which runners were at a batch."""
        return self.busy_s / self.available_s if self.available_s else 0.0

    def __str__(self) -> str:
        counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(self.trials.items()))
        drift = f"; drift {min(self.drifts):.2f} to {max(self.drifts):.2f}" if self.drifts else ""
        return f"{counts or 'no trials'}; devices busy {self.busy_share:.0%} of the time{drift}"


class Measurer:
    """Builds by ``builder``, measures on ``runners``; both are ended with it, also where `measure` is broken off."""

    def __init__(
        self,
        builder: KernelBuilder | None = None,
        runners: Fleet | Sequence[KernelRunner] | None = None,
        *,
        plan: TimingPlan | None = None,
        batch: int = BATCH,
        patience_s: float = PATIENCE_S,
    ) -> None:
        if batch < 1:
            raise ValueError(f"batches of {batch}")
        self.builder: KernelBuilder = builder or LocalBuilder()
        self.fleet = _fleet(runners)
        self.plan, self.batch, self.patience_s = plan or TimingPlan(), batch, patience_s
        self.report = MeasureReport()
        self.references: dict[str, Path | Failure] = {}
        self.anchors: dict[str, Artifact] = {}  # by workload
        self.incumbents: dict[KernelJob, Artifact] = {}  # which come again and again
        self.numbers = itertools.count()  # of libraries: an incumbent's outlives the run that built it
        self.first_us: dict[tuple[str, str], float] = {}  # of the anchor, by device and workload
        self._stack = contextlib.ExitStack()
        self.folder = self._stack.enter_context(temporary_folder("measure"))
        self.threads = ThreadPoolExecutor(MOST_RUNNERS, "tvm_ext-measure")
        self.closed = False

    def measure(self, jobs: Iterable[KernelJob], *, incumbent: KernelJob | None = None) -> Iterator[Measured]:
        """Every job with its trial, in the order in which they are done; ``incumbent`` anew with every batch.

        ``jobs`` are taken as they can be built, a few batches ahead. Raises MeasurementError where no device has been
        there for ``patience_s``, the trials of what was taken being answered first.
        """
        if self.closed:
            raise MeasurementError("this measurer has been closed, or a run of it was broken off.", "make a new one")
        run = _Run(self, iter(jobs), incumbent)
        done = False
        try:
            yield from run.trials()
            done = True
        finally:
            if not done:  # Ctrl-C, the caller's end of the generator: nothing of it goes on
                self.close()

    def close(self) -> None:
        """End builder, runners and all that they started."""
        if self.closed:
            return
        self.closed = True
        self.fleet.end()
        self.builder.end()
        self.threads.shutdown(wait=True, cancel_futures=True)
        self._stack.close()

    def __enter__(self) -> Measurer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class _Run:
    """One call of `Measurer.measure`: jobs -> building -> ready -> at a runner -> trials."""

    def __init__(self, owner: Measurer, jobs: Iterator[KernelJob], incumbent: KernelJob | None) -> None:
        self.owner, self.jobs, self.incumbent = owner, jobs, incumbent
        self.more = True
        self.building: dict[Future[Built], KernelJob] = {}
        self.checking: dict[Future[Built], str] = {}  # references being made, their keys
        self.built: list[tuple[KernelJob, Path]] = []  # those that wait for a reference
        self.ready: deque[BatchEntry] = deque()
        self.suspects: deque[BatchEntry] = deque()  # each runs alone
        self.running: dict[KernelRunner, tuple[Future[str], list[BatchEntry], float]] = {}
        self.incumbent_artifact: Artifact | None = None
        self.seen_s: float | None = None  # when a device was there last
        self.ticked_s: float | None = None

    def trials(self) -> Iterator[Measured]:
        if self.incumbent is not None:
            yield from self._build_incumbent(self.incumbent)
        while True:
            yield from self._collect_built()
            runners = self._present()
            self._submit(len(runners))
            self._dispatch(runners)
            yield from self._collect_measured()
            if not (self.more or self.building or self.built or self.ready or self.suspects or self.running):
                return
            if self._is_deserted(runners):
                yield from self._give_up()
            self._wait()

    # --- building -------------------------------------------------------------------------------------------------
    def _submit(self, runners: int) -> None:
        ahead = 2 * self.owner.batch * max(1, runners) + self.owner.builder.workers
        while self.more and len(self.building) + len(self.built) + len(self.ready) < ahead:
            job = next(self.jobs, None)
            if job is None:
                self.more = False
            else:
                self._start(job)

    def _start(self, job: KernelJob) -> None:
        key = job.reference_key
        if job.reference and key not in self.owner.references and key not in self.checking.values():
            self.checking[self.owner.builder.reference(job)] = key
        self.building[self.owner.builder.library(job)] = job

    def _build_incumbent(self, job: KernelJob) -> Iterator[Measured]:
        self.incumbent_artifact = self.owner.incumbents.get(job)
        if self.incumbent_artifact is not None:
            return
        self._start(job)
        while self.incumbent_artifact is None and (self.building or self.built):
            yield from self._collect_built()
            if self.ready:
                self.incumbent_artifact = self.owner.incumbents[job] = self.ready.popleft().artifact
            else:
                self._wait()

    def _collect_built(self) -> Iterator[Measured]:
        for future in [item for item in self.checking if item.done()]:
            key, made = self.checking.pop(future), outcome_of(future)
            path = self.owner.folder / f"{key}.npz"
            self.owner.references[key] = made if isinstance(made, Failure) else written(made, path)
        for future in [item for item in self.building if item.done()]:
            job, made = self.building.pop(future), outcome_of(future)
            if isinstance(made, Failure):
                yield self._failed(job, made)
            else:
                self.built.append((job, written(made, self.owner.folder / f"kernel_{next(self.owner.numbers)}.so")))
        yield from self._join_references()

    def _join_references(self) -> Iterator[Measured]:
        waiting, self.built = self.built, []
        for job, library in waiting:
            expected = self.owner.references.get(job.reference_key) if job.reference else None
            if isinstance(expected, Failure):
                library.unlink(missing_ok=True)
                yield self._failed(job, Failure(outcome="lost", reason=f"nothing to compare with: {expected.reason}"))
            elif job.reference and expected is None:
                self.built.append((job, library))
            else:
                self.ready.append(BatchEntry(Artifact(job, library, expected)))

    # --- measuring ------------------------------------------------------------------------------------------------
    def _present(self) -> Sequence[KernelRunner]:
        """The runners that are there: none where that cannot be known now, which at the start is an error."""
        now = time.monotonic()
        try:
            runners = self.owner.fleet.current()
        except MeasurementError:
            if self.seen_s is None:
                raise
            runners = ()
        if self.ticked_s is not None:
            self.owner.report.available_s += (now - self.ticked_s) * max(len(runners), len(self.running))
        if self.ticked_s is not None or self.ready:
            self.ticked_s = now
        if runners or self.seen_s is None:
            self.seen_s = now
        return runners

    def _dispatch(self, runners: Sequence[KernelRunner]) -> None:
        for runner in runners:
            if runner in self.running or not (self.ready or self.suspects):
                continue
            entries = self._next_batch()
            future = self.owner.threads.submit(self._measure, runner, entries)
            self.running[runner] = future, entries, time.monotonic()
            self.ticked_s = self.ticked_s or time.monotonic()

    def _next_batch(self) -> list[BatchEntry]:
        """A suspect alone, or entries of the workload that waits longest; with what they are compared with."""
        if self.suspects:
            chosen = [self.suspects.popleft()]
        else:
            workload = self.ready[0].artifact.job.workload
            same = [item for item in self.ready if item.artifact.job.workload == workload]
            chosen = same[: self.owner.batch]
            self.ready = deque(item for item in self.ready if item not in chosen)
        workload = chosen[0].artifact.job.workload
        beside = []
        if self.incumbent_artifact is not None and self.incumbent_artifact.job.workload == workload:
            beside.append(self.incumbent_artifact)
        anchor = self.owner.anchors.get(workload.key)
        if anchor is not None and anchor not in beside:
            beside.append(anchor)
        return [*(BatchEntry(item, companion=True) for item in beside), *chosen]

    def _measure(self, runner: KernelRunner, entries: list[BatchEntry]) -> str:
        """Run by a thread: why the device was lost, "" where it was not."""
        try:
            runner.run(entries, self.owner.plan)
        except DeviceLost as lost:
            if lost.at is None or lost.at.companion:
                for entry in entries:
                    entry.losses += 1
            else:
                lost.at.losses += 1
            return str(lost) or "it went away"
        return ""

    def _collect_measured(self) -> Iterator[Measured]:
        for runner in [item for item, (future, _, _) in self.running.items() if future.done()]:
            future, entries, started = self.running.pop(runner)
            self.owner.report.busy_s += time.monotonic() - started
            self.owner.report.devices.add(runner.device)
            lost = future.result()
            self.owner.report.losses += bool(lost)
            drift = self._drift(runner.device, entries)
            for entry in entries:
                yield from self._settled(entry, lost, drift)

    def _settled(self, entry: BatchEntry, lost: str, drift: float | None) -> Iterator[Measured]:
        """The entry's trial; none where it has to run again, elsewhere."""
        job = entry.artifact.job
        if lost and entry.failure is None and entry.rounds < self.owner.plan.least_rounds and not entry.companion:
            if entry.losses < MOST_LOSSES:
                entry.times_us, entry.rounds = [], 0
                (self.suspects if entry.losses else self.ready).appendleft(entry)
                return
            entry.failure = Failure(outcome="lost", reason=f"{entry.losses} times the device was lost, at last: {lost}")
        if entry.companion and (entry.failure is not None or not entry.times_us or job != self.incumbent):
            return
        if entry.failure is not None:
            yield self._failed(job, entry.failure)
        else:
            noted = drift is not None and abs(drift - 1) > NOTED_DRIFT
            reason = f"the reference kernel took {drift:.2f} times as long as at first" if noted else ""
            times = tuple(entry.times_us[:MOST_SAMPLES])
            yield self._counted(
                job, Trial(configuration=job.configuration, outcome="ok", times_us=times, reason=reason)
            )
        kept = (*self.owner.anchors.values(), *self.owner.incumbents.values())
        if entry.artifact not in kept:
            entry.artifact.library.unlink(missing_ok=True)

    def _drift(self, device: str, entries: Sequence[BatchEntry]) -> float | None:
        """The anchor's time in this batch by its first one on this device; the first kernel that runs becomes it."""
        ran = [entry for entry in entries if entry.times_us and entry.failure is None]
        if not ran:
            return None
        key = ran[0].artifact.job.workload.key
        anchor = self.owner.anchors.setdefault(key, ran[0].artifact)
        times = [entry.median_us for entry in ran if entry.artifact == anchor]
        if not times:
            return None
        drift = times[0] / self.owner.first_us.setdefault((device, key), times[0])
        self.owner.report.drifts.append(drift)
        return drift

    # --- the end --------------------------------------------------------------------------------------------------
    def _is_deserted(self, runners: Sequence[KernelRunner]) -> bool:
        assert self.seen_s is not None
        return not (runners or self.running) and time.monotonic() - self.seen_s > self.owner.patience_s

    def _give_up(self) -> Iterator[Measured]:
        reason = f"no device has been there for {self.owner.patience_s:g} s"
        left = [entry.artifact.job for entry in (*self.ready, *self.suspects)]
        left += [*self.building.values(), *(job for job, _ in self.built)]
        for job in left:
            yield self._failed(job, Failure(outcome="lost", reason=reason))
        raise MeasurementError(f"{reason}; {len(left)} kernels were not measured.", "start servers, and go on")

    def _failed(self, job: KernelJob, failure: Failure) -> Measured:
        reason = failure.reason.replace("\0", "")[:MOST_REASON]
        return self._counted(job, Trial(configuration=job.configuration, outcome=failure.outcome, reason=reason))

    def _counted(self, job: KernelJob, trial: Trial) -> Measured:
        counts = self.owner.report.trials
        counts[trial.outcome] = counts.get(trial.outcome, 0) + 1
        return job, trial

    def _wait(self) -> None:
        at_runners = [future for future, _, _ in self.running.values()]
        futures: list[Future[Any]] = [*self.building, *self.checking, *at_runners]
        if futures:
            wait(futures, timeout=_TICK_S, return_when=FIRST_COMPLETED)
        else:
            time.sleep(_TICK_S / 5)


def _fleet(runners: Fleet | Sequence[KernelRunner] | None) -> Fleet:
    if runners is None:
        return FixedFleet([IsolatedRunner()])
    return FixedFleet(runners) if isinstance(runners, Sequence) else runners
