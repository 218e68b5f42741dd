"""Kernels in turns: who runs when, when it is enough, and whose fault a crash is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tvm_ext.autotune.kernel_host import KernelError
from tvm_ext.autotune.turns import Artifact, BatchEntry, DeviceLost, median_interval, take_turns
from tvm_ext.records.kernel_job import JobArgument, KernelJob, TimingPlan
from tvm_ext.records.measurement import MeasuredWorkload

PLAN = TimingPlan(samples=3, least_rounds=2, most_rounds=6, interval=0.02, hopeless=1.5)
FORM = JobArgument(shape=(4,), dtype="float32")
WORKLOAD = MeasuredWorkload(kind="k", structure="s", layout="", dtype="float32", device="d", instructions="")


def entry(name: str, *, companion: bool = False) -> BatchEntry:
    job = KernelJob(
        workload=WORKLOAD, configuration=name, module="", function="f", target="llvm", arguments=(FORM, FORM)
    )
    return BatchEntry(Artifact(job, Path(name)), companion)


class Place:
    """A process that loses what it had loaded when a kernel crashes it."""

    def __init__(self, times: Callable[[str, int], list[float]]) -> None:
        self.times = times
        self.loaded: set[str] = set()
        self.log: list[str] = []
        self.turns: dict[str, int] = {}

    def load(self, item: BatchEntry) -> None:
        self.loaded.add(item.artifact.job.configuration)

    def time(self, item: BatchEntry) -> list[float]:
        name = item.artifact.job.configuration
        assert name in self.loaded
        self.log.append(name)
        self.turns[name] = self.turns.get(name, 0) + 1
        try:
            return self.times(name, self.turns[name])
        except KernelError:
            self.loaded.clear()
            raise


def test_kernels_take_turns_and_stop_when_their_medians_are_known() -> None:
    place = Place(lambda name, turn: [10.0, 10.1, 10.0] if name == "calm" else [10.0 + turn, 12.0, 9.0])
    calm, noisy = entry("calm"), entry("noisy")
    take_turns([calm, noisy], place, PLAN)
    assert place.log[:4] == ["calm", "noisy", "calm", "noisy"]
    assert (calm.rounds, noisy.rounds) == (PLAN.least_rounds, PLAN.most_rounds)
    assert len(noisy.times_us) == 3 * PLAN.most_rounds


def test_a_slow_kernel_is_given_up_and_companions_run_beside_whatever_runs() -> None:
    def times(name: str, turn: int) -> list[float]:
        return {"slow": [50.0, 80.0, 60.0], "incumbent": [10.0] * 3, "open": [9.0, 11.0, 8.0 + turn]}[name]

    place = Place(times)
    slow, incumbent, other = entry("slow"), entry("incumbent", companion=True), entry("open")
    take_turns([incumbent, slow, other], place, PLAN)
    assert slow.rounds == PLAN.least_rounds
    assert incumbent.rounds == other.rounds == PLAN.most_rounds


def test_a_crash_costs_the_kernel_that_crashes_twice() -> None:
    def times(name: str, turn: int) -> list[float]:
        if name == "bad" or (name == "victim" and turn == 1):
            raise KernelError("crashed", "signal SIGSEGV")
        return [1.0, 1.0, 1.0]

    entries = [entry("bad"), entry("victim"), entry("good")]
    take_turns(entries, Place(times), PLAN)
    assert entries[0].failure is not None
    assert entries[0].failure.outcome == "crashed"
    assert [item.failure for item in entries[1:]] == [None, None]
    assert [item.rounds for item in entries[1:]] == [PLAN.least_rounds] * 2


def test_a_lost_device_keeps_what_is_known_and_names_the_kernel() -> None:
    def times(name: str, turn: int) -> list[float]:
        if name == "second" and turn == 2:
            raise DeviceLost("gone")
        return [1.0, 1.0, 1.0]

    entries = [entry("first"), entry("second")]
    with pytest.raises(DeviceLost, match="gone") as lost:
        take_turns(entries, Place(times), PLAN)
    assert lost.value.at is entries[1]
    assert [item.rounds for item in entries] == [2, 1]


def test_the_interval_of_a_median_is_between_two_of_the_times() -> None:
    assert median_interval([5.0]) == (5.0, 5.0)
    assert median_interval([float(number) for number in range(1, 31)]) == (10.0, 22.0)
    assert median_interval([1.0] * 8 + [100.0]) == (1.0, 100.0)


@pytest.mark.parametrize(
    "fields", [{"samples": 0}, {"least_rounds": 9, "most_rounds": 3}, {"limit_s": float("nan")}, {"hopeless": 0.5}]
)
def test_a_plan_that_makes_no_sense_is_refused(fields: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"\d|nan|positive"):
        TimingPlan(**fields)  # type: ignore[arg-type]
