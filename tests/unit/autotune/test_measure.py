"""Every job has its trial, whatever becomes of builders and devices; all of it with simulated ones."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path

import pytest

from tvm_ext.autotune.builders import Built
from tvm_ext.autotune.measure import Measurer
from tvm_ext.autotune.runners import KernelRunner
from tvm_ext.autotune.turns import BatchEntry, DeviceLost
from tvm_ext.errors import MeasurementError
from tvm_ext.records.kernel_job import Failure, JobArgument, KernelJob, TimingPlan
from tvm_ext.records.measurement import MeasuredWorkload, Trial

FORM = JobArgument(shape=(4,), dtype="float32")


def job(name: str, workload: str = "w", reference: str = "") -> KernelJob:
    of = MeasuredWorkload(kind="k", structure=workload, layout="", dtype="float32", device="d", instructions="")
    return KernelJob(
        workload=of, configuration=name, module="m", function="f", target="llvm", arguments=(FORM, FORM),
        reference=reference,
    )  # fmt: skip


class Builder:
    """Answers at once."""

    workers = 2

    def __init__(self, answers: dict[str, Built] | None = None, reference: Built = b"right") -> None:
        self.answers, self.right = answers or {}, reference
        self.asked: list[str] = []
        self.ended = False

    def library(self, job: KernelJob) -> Future[Built]:
        self.asked.append(job.configuration)
        return _done(self.answers.get(job.configuration, b"code"))

    def reference(self, job: KernelJob) -> Future[Built]:
        return _done(self.right)

    def end(self) -> None:
        self.ended = True


def _done(answer: Built) -> Future[Built]:
    future: Future[Built] = Future()
    future.set_result(answer)
    return future


Act = Callable[[BatchEntry], "float | Failure"]


class Runner:
    """Gives every kernel the time that ``act`` says, or lets the device go away."""

    def __init__(self, act: Act, name: str = "device") -> None:
        self.act, self.name = act, name
        self.batches: list[list[str]] = []
        self.ended = False

    @property
    def device(self) -> str:
        return self.name

    def run(self, entries: Sequence[BatchEntry], plan: TimingPlan) -> None:
        self.batches.append([entry.artifact.job.configuration for entry in entries])
        for entry in entries:
            assert entry.artifact.library.exists()
            try:
                found = self.act(entry)
            except DeviceLost as lost:
                lost.at = entry
                raise
            if isinstance(found, Failure):
                entry.failure = found
            else:
                entry.times_us, entry.rounds = [found] * 9, plan.least_rounds

    def end(self) -> None:
        self.ended = True


class Fleet:
    def __init__(self, present: Callable[[], Sequence[KernelRunner]]) -> None:
        self.present = present

    def current(self) -> Sequence[KernelRunner]:
        return self.present()

    def end(self) -> None:
        """Nothing to end."""


def by_name(entry: BatchEntry) -> float:
    return float(entry.artifact.job.configuration.rpartition("-")[2])


def outcomes(found: Sequence[tuple[KernelJob, Trial]]) -> dict[str, str]:
    assert len({job.configuration for job, _ in found}) == len(found)
    return {job.configuration: trial.outcome for job, trial in found}


def test_every_job_has_one_trial_and_batches_are_of_one_workload() -> None:
    runner = Runner(by_name)
    jobs = [job(f"{name}-{time_us}", name) for time_us in range(1, 12) for name in ("a", "b")]
    with Measurer(Builder(), [runner], batch=4) as measurer:
        found = list(measurer.measure(jobs))
    assert outcomes(found) == {item.configuration: "ok" for item in jobs}
    assert {trial.time_us for _, trial in found} == set(range(1, 12))
    assert all(len({name[0] for name in batch}) == 1 for batch in runner.batches)
    assert max(map(len, runner.batches)) <= 5  # four, and the kernel that ran first
    assert measurer.report.trials == {"ok": 22}
    assert runner.ended


def test_jobs_are_taken_a_few_batches_ahead_and_no_further() -> None:
    taken = []

    def jobs() -> Iterator[KernelJob]:
        for number in range(1, 200):
            taken.append(number)
            yield job(f"n-{number}")

    with Measurer(Builder(), [Runner(by_name)], batch=4) as measurer:
        found = measurer.measure(jobs())
        next(found)
        assert len(taken) <= 4 * (2 * 4 + Builder.workers)
        found.close()
    assert measurer.closed
    with pytest.raises(MeasurementError, match="broken off"):
        next(measurer.measure([job("n-1")]))


def test_what_cannot_be_built_or_compared_is_a_trial_too() -> None:
    broken = Failure(outcome="compile_failed", reason="LLVM says no")
    with Measurer(Builder({"b-2": broken}), [Runner(by_name)]) as measurer:
        assert outcomes(list(measurer.measure([job("a-1"), job("b-2")]))) == {"a-1": "ok", "b-2": "compile_failed"}
    with Measurer(Builder(reference=broken), [Runner(by_name)]) as measurer:
        ((_, trial),) = measurer.measure([job("a-1", reference="r")])
    assert trial.outcome == "lost"
    assert "nothing to compare with: LLVM says no" in trial.reason


def test_a_device_that_goes_away_costs_no_candidate_its_trial() -> None:
    lost_once = {"a-3", "a-7"}

    def act(entry: BatchEntry) -> float:
        name = entry.artifact.job.configuration
        if name in lost_once:
            lost_once.remove(name)
            raise DeviceLost("gone")
        return by_name(entry)

    jobs = [job(f"a-{number}") for number in range(1, 12)]
    with Measurer(Builder(), [Runner(act, "first"), Runner(act, "second")], batch=4) as measurer:
        found = list(measurer.measure(jobs))
    assert outcomes(found) == {item.configuration: "ok" for item in jobs}
    assert measurer.report.losses == 2


def test_a_candidate_that_takes_every_device_with_it_is_lost_alone() -> None:
    def act(entry: BatchEntry) -> float:
        if entry.artifact.job.configuration == "killer-0":
            raise DeviceLost("the server ended")
        return by_name(entry)

    jobs = [job("killer-0"), *(job(f"a-{number}") for number in range(1, 6))]
    with Measurer(Builder(), [Runner(act)]) as measurer:
        found = list(measurer.measure(jobs))
    assert outcomes(found) == {"killer-0": "lost", **{f"a-{number}": "ok" for number in range(1, 6)}}
    reason = next(trial.reason for _, trial in found if trial.outcome == "lost")
    assert reason == "3 times the device was lost, at last: the server ended"


def test_devices_join_and_leave_and_a_run_without_any_ends() -> None:
    runners = [Runner(by_name, "first"), Runner(by_name, "second")]
    asked = iter(range(1000))
    shown = Fleet(lambda: runners[:1] if next(asked) < 3 else runners)
    jobs = [job(f"a-{number}") for number in range(1, 40)]
    with Measurer(Builder(), shown, batch=2) as measurer:
        assert len(list(measurer.measure(jobs))) == len(jobs)
    assert measurer.report.devices == {"first", "second"}

    looks = iter(range(1000))  # at the second one there are kernels to measure
    gone = Fleet(lambda: runners[:1] if next(looks) < 2 else ())
    with Measurer(Builder(), gone, batch=2, patience_s=0.2) as measurer:
        with pytest.raises(MeasurementError, match=r"no device .* 0.2 s; \d+ kernels were not measured"):
            list(measurer.measure(jobs))
        assert measurer.report.trials["ok"] == 2
        assert measurer.report.trials["lost"] == len(measurer.builder.asked) - 2  # type: ignore[attr-defined]


def test_no_run_takes_the_file_of_a_library_that_is_kept() -> None:
    """Runs one after another may have the same address, and so the same id: an incumbent outlives its run."""
    files: dict[Path, set[str]] = {}

    def noted(entry: BatchEntry) -> float:
        files.setdefault(entry.artifact.library, set()).add(entry.artifact.job.configuration)
        return 1.0

    with Measurer(Builder(), [Runner(noted)]) as measurer:
        for number in range(8):
            list(measurer.measure([job(f"a-{number}")], incumbent=job("old-10")))
    assert all(len(names) == 1 for names in files.values())
    assert len(files) == 9


def test_an_incumbent_is_built_once_and_runs_in_every_batch() -> None:
    old = job("old-10")
    runner = Runner(by_name)
    with Measurer(Builder(), [runner], batch=3) as measurer:
        found = list(measurer.measure([job("a-9"), job("b-8")], incumbent=old))
        assert {item.configuration for item, _ in found} == {"old-10", "a-9", "b-8"}
        list(measurer.measure([job(f"c-{number}") for number in range(1, 10)], incumbent=old))
        assert measurer.builder.asked.count("old-10") == 1  # type: ignore[attr-defined]
    assert all("old-10" in batch for batch in runner.batches)


def test_a_machine_that_becomes_slower_is_noted_by_the_first_kernel() -> None:
    slower = iter([1.0] * 2 + [1.5] * 100)
    with Measurer(Builder(), [Runner(lambda entry: by_name(entry) * next(slower))], batch=2) as measurer:
        list(measurer.measure([job("a-1"), job("b-2")]))
        ((_, trial),) = measurer.measure([job("c-3")])
    assert trial.reason == "the reference kernel took 1.50 times as long as at first"
    assert measurer.report.drifts == [1.0, 1.5]
    assert "drift 1.00 to 1.50" in str(measurer.report)


def test_breaking_off_ends_builder_runners_and_threads() -> None:
    builder = Builder()
    threads = threading.active_count()
    release = threading.Event()

    class Slow(Runner):
        def end(self) -> None:
            release.set()

    slow = Slow(lambda entry: float(release.wait(20)))
    measurer = Measurer(builder, [slow], batch=1)

    def jobs() -> Iterator[KernelJob]:
        yield job("a-1")
        while not slow.batches:
            time.sleep(0.01)
            yield job("b-2")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(measurer.measure(jobs()))
    assert builder.ended
    assert threading.active_count() == threads
    assert not measurer.folder.exists()
