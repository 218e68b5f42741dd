"""Tuning runs over simulated spaces: what is searched first, when a run ends, what a kill costs, what is adopted."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from benchmarks.alcop.products import product_of_matmul
from benchmarks.alcop.simulated_gpu import SimulatedGpu
from tvm_ext.autotune.choose import CONFIRMATIONS, choose_tuned
from tvm_ext.autotune.database import MeasurementDatabase
from tvm_ext.autotune.gpu_space import MatrixTileSpace
from tvm_ext.autotune.session import BATCH, TaskSearch, TuningSession, session_workload
from tvm_ext.autotune.spaces import TuningTask, distinct
from tvm_ext.autotune.standings import standings_of
from tvm_ext.cost.gpu_columns import TunedProduct
from tvm_ext.devices.device_db import lookup
from tvm_ext.errors import MeasurementError
from tvm_ext.records.measurement import Trial
from tvm_ext.records.tuned import TuningBudget, TuningRecord, TuningStatus

from .made import workload

A100 = lookup("nvidia-a100")


def task_of(name: str, product: TunedProduct, calls: int = 1) -> TuningTask:
    """A task whose constructed kernel is a middling choice of the analytical model: there is something to be had."""
    space = MatrixTileSpace(product, A100)
    place = int(space.predictions.ranking[len(space) // 3])
    predicted_us = 1e6 * float(space.predictions.time_s[place])
    return TuningTask(
        name=name, workload=workload(name), space=space, constructed=space[place].configuration,
        calls=calls, predicted_us=predicted_us,
    )  # fmt: skip


TASKS = distinct(
    [
        task_of("small", product_of_matmul(64, 32, 64)),
        task_of("large", product_of_matmul(64, 32, 64, batch=64), calls=3),
    ]
)
GPUS = {task.name: SimulatedGpu(task.space, noise=0.01) for task in TASKS}


class KilledError(Exception):
    """In place of a kill -9: nothing after it runs."""


class Machine:
    """Measures on simulated GPUs, each trial with noise of its own, on a machine that grows slower batch by batch."""

    def __init__(self, *, killed_after: int | None = None, drift: float = 0.0) -> None:
        self.batches: list[tuple[str, list[str]]] = []
        self.killed_after, self.drift = killed_after, drift

    def __call__(self, task: TuningTask, configurations: Sequence[str]) -> Iterator[Trial]:
        if len(self.batches) == self.killed_after:
            raise KilledError
        self.batches.append((task.name, list(configurations)))
        gpu, slower = GPUS[task.name], 1.0 + self.drift * len(self.batches)
        for configuration in configurations:
            place = task.space.index(configuration)
            assert place is not None
            if gpu.fails[place] and configuration != task.constructed:
                yield Trial(configuration=configuration, outcome="compile_failed", reason="simulated")
                continue
            noise = np.random.default_rng([place, len(self.batches)]).normal(0.0, 0.005)
            time_us = 1e6 * float(gpu.time_s[place]) * slower * (1 + noise)
            yield Trial(configuration=configuration, outcome="ok", times_us=(time_us,))


def tuned(store: MeasurementDatabase, machine: Machine, budget: TuningBudget, **settings: object) -> TuningRecord:
    return TuningSession(TASKS, machine, store, budget, **settings).run()  # type: ignore[arg-type]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[MeasurementDatabase]:
    with MeasurementDatabase(tmp_path / "one.db") as database:
        yield database


def true_us(task: TuningTask, configuration: str) -> float:
    place = task.space.index(configuration)
    assert place is not None
    return 1e6 * float(GPUS[task.name].time_s[place])


def test_a_run_makes_the_kernels_faster_and_says_by_how_much(store: MeasurementDatabase) -> None:
    machine = Machine(drift=0.02)
    record = tuned(store, machine, TuningBudget(trials=80))
    assert record.trials <= 80
    assert record.known == 0
    large = next(task for task in record.tasks if task.name == "large")
    assert large.configuration is not None
    before, after = true_us(TASKS[0], TASKS[0].constructed), true_us(TASKS[0], large.configuration)
    assert after < 0.95 * before
    assert large.best_us is not None
    assert large.constructed_us is not None
    assert large.best_us / large.constructed_us == pytest.approx(after / before, rel=0.03)
    assert record.tuned_us < record.constructed_us
    assert "kernels by measurement" in str(record)


def test_the_kernel_with_most_to_gain_is_searched_first(store: MeasurementDatabase) -> None:
    machine = Machine()
    tuned(store, machine, TuningBudget(trials=3 * BATCH))
    assert [name for name, _ in machine.batches[:2]] == ["large", "large"]


def test_every_batch_begins_with_the_constructed_kernel(store: MeasurementDatabase) -> None:
    machine = Machine()
    tuned(store, machine, TuningBudget(trials=20))
    constructed = {task.name: task.constructed for task in TASKS}
    assert all(batch[0] == constructed[name] for name, batch in machine.batches)


def test_the_curve_falls_and_stays_above_the_limit(store: MeasurementDatabase) -> None:
    curve = tuned(store, Machine(), TuningBudget(trials=60)).curve
    measured = curve[2:]  # both kernels have been measured: from here on it is no prediction that is compared
    assert all(later.trials >= earlier.trials for earlier, later in itertools.pairwise(curve))
    assert all(later.best_us <= earlier.best_us * 1.02 for earlier, later in itertools.pairwise(measured))
    assert all(point.limit_us <= point.best_us for point in curve)


def test_a_run_ends_where_nothing_more_is_expected(store: MeasurementDatabase) -> None:
    record = tuned(store, Machine(), TuningBudget(trials=100_000))
    assert "the model expects less than" in record.stopped
    assert record.trials < sum(len(task.space) for task in TASKS) / 3
    pairs = list(zip(TASKS, record.tasks, strict=True))
    best = sum(task.calls * GPUS[task.name].best_s * 1e6 for task, _ in pairs)
    assert (
        best / sum(task.calls * true_us(task, found.configuration or task.constructed) for task, found in pairs) > 0.9
    )


def test_a_killed_run_goes_on_where_it_stood_and_repeats_no_candidate(tmp_path: Path) -> None:
    budget = TuningBudget(trials=40)
    with MeasurementDatabase(tmp_path / "killed.db") as store:
        killed = Machine(killed_after=3)
        with pytest.raises(KilledError):
            tuned(store, killed, budget)
        resumed = Machine()
        record = tuned(store, resumed, budget)
        assert (record.known, record.known + record.trials) == (24, 40)
        before, after = (
            {(task, name) for task, batch in machine.batches for name in batch[1:]} for machine in (killed, resumed)
        )
        assert len(before | after) == 40
        ahead = {
            (task.name, name)
            for task in TASKS
            for name, item in standings_of(store.trials(task.workload)).by_configuration.items()
            if item.ratio is not None and item.ratio < 1
        }
        assert before & after <= ahead  # measured again on purpose, before one of them is adopted


def test_a_second_run_with_the_same_budget_needs_no_trial(store: MeasurementDatabase) -> None:
    first = tuned(store, Machine(), TuningBudget(trials=24))
    machine = Machine()
    again = tuned(store, machine, TuningBudget(trials=24))
    assert (again.trials, machine.batches) == (0, [])
    assert [task.configuration for task in again.tasks] == [task.configuration for task in first.tasks]


class Clock:
    """A clock on which every batch takes ten seconds."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def timed(machine: Machine, clock: Clock) -> Callable[[TuningTask, Sequence[str]], Iterator[Trial]]:
    def measure(task: TuningTask, configurations: Sequence[str]) -> Iterator[Trial]:
        yield from machine(task, configurations)
        clock.now += 10.0

    return measure


def test_a_budget_of_seconds_is_each_runs_own(store: MeasurementDatabase) -> None:
    """And the second begins with what the first has measured."""
    clock, machine, budget = Clock(), Machine(), TuningBudget(seconds=40.0)
    seen: list[TuningStatus] = []
    record = TuningSession(TASKS, timed(machine, clock), store, budget, clock=clock, progress=seen.append).run()
    assert 30 <= record.seconds <= 50
    assert "40 s is spent" in record.stopped
    assert seen[0].left_s == 30.0
    assert [status.share_done for status in seen] == sorted(status.share_done for status in seen)
    more = TuningSession(TASKS, timed(machine, clock), store, budget, clock=clock).run()
    assert 30 <= more.seconds <= 50
    assert more.known == record.trials
    assert more.trials > 0
    spent = store.trials(session_workload(TASKS))
    assert sum(trial.time_us or 0.0 for trial in spent) == pytest.approx(1e6 * (record.seconds + more.seconds))


def test_an_interrupted_batch_keeps_what_came_of_it(store: MeasurementDatabase) -> None:
    def measure(task: TuningTask, configurations: Sequence[str]) -> Iterator[Trial]:
        yield from itertools.islice(Machine()(task, configurations), 4)
        raise KeyboardInterrupt

    session = TuningSession(TASKS, measure, store, TuningBudget(trials=10))
    with pytest.raises(KeyboardInterrupt):
        session.run()
    assert len(store.trials(TASKS[0].workload)) == 4
    assert session.record("stopped by Ctrl-C").tasks[0].known == 4


def test_a_machine_that_measures_nothing_ends_the_run(store: MeasurementDatabase) -> None:
    def measure(task: TuningTask, configurations: Sequence[str]) -> Iterator[Trial]:
        for configuration in configurations:
            yield Trial(configuration=configuration, outcome="timed_out")

    record = TuningSession(TASKS, measure, store, TuningBudget(trials=10_000)).run()
    assert all(task.configuration is None for task in record.tasks)
    assert "nothing was measured beside it" in record.tasks[0].reason
    assert TaskSearch(TASKS[0], store.trials(TASKS[0].workload), 0).tried == 0  # another run tries them again


def test_devices_that_go_away_end_the_run_with_what_was_measured(store: MeasurementDatabase) -> None:
    machine = Machine()

    def measure(task: TuningTask, configurations: Sequence[str]) -> Iterator[Trial]:
        if len(machine.batches) == 2:
            raise MeasurementError("no device has been there for 30 s.", "start servers")
        return machine(task, configurations)

    record = TuningSession(TASKS, measure, store, TuningBudget(trials=100)).run()
    assert record.stopped == "no device has been there for 30 s."
    assert record.trials == 2 * BATCH
    with pytest.raises(MeasurementError):  # there were none to begin with
        TuningSession(TASKS, measure, store, TuningBudget(trials=100)).run()


def test_nothing_to_tune_is_said(store: MeasurementDatabase) -> None:
    record = TuningSession((), Machine(), store, TuningBudget(trials=10)).run()
    assert record.stopped == "there is nothing to choose"


# --- what is adopted -------------------------------------------------------------------------------------------------
def batch(name: int, constructed: float, **others: float) -> list[Trial]:
    token = f"{name:024x}"
    times = {"constructed": constructed, **others}
    return [
        Trial(configuration=what, outcome="ok", times_us=(time,), origin=f"{token}.{place}")
        for place, (what, time) in enumerate(times.items())
    ]


def choice_of(*batches: list[Trial]) -> str | None:
    return choose_tuned(standings_of([trial for trials in batches for trial in trials])).configuration


def test_times_of_different_batches_are_not_compared() -> None:
    """The candidate was measured when the machine was fast; beside it the constructed kernel was as fast."""
    slow = [batch(number, 200.0) for number in range(10)]
    assert choice_of(*slow, *(batch(100 + number, 100.0, lucky=101.0) for number in range(3))) is None
    assert choice_of(*slow, *(batch(100 + number, 100.0, better=90.0) for number in range(3))) == "better"


def test_a_candidate_is_adopted_only_after_enough_batches() -> None:
    batches = [batch(number, 100.0 + number, quick=60.0) for number in range(CONFIRMATIONS)]
    assert choice_of(*batches[:-1]) is None
    assert choice_of(*batches) == "quick"


@pytest.mark.parametrize("ratios", [(0.985, 0.985, 0.985), (0.80, 0.95, 1.25), (0.93, 0.95, 1.01), (1.0, 1.0, 1.0)])
def test_less_than_the_noise_is_not_adopted(ratios: tuple[float, ...]) -> None:
    assert choice_of(*(batch(number, 100.0, close=100.0 * item) for number, item in enumerate(ratios))) is None


def test_a_wrong_result_condemns_the_fastest() -> None:
    batches = [batch(number, 100.0, quick=50.0, sound=90.0) for number in range(3)]
    wrong = [Trial(configuration="quick", outcome="wrong", reason="off by 1")]
    assert choice_of(*batches, wrong) == "sound"


def test_batches_beside_another_constructed_kernel_do_not_count() -> None:
    """The device was measured anew, and construction chose another tile: its rivals are not the same."""
    old = [batch(number, 100.0, quick=50.0) for number in range(3)]
    assert standings_of([trial for trials in old for trial in trials], "another").by_configuration["quick"].ratios == ()


def test_merging_in_any_order_comes_to_the_same() -> None:
    batches = [batch(number, 100.0 + number, quick=60.0, other=70.0 + number) for number in range(5)]
    trials = [trial for trials in batches for trial in trials]
    assert choose_tuned(standings_of(trials)) == choose_tuned(standings_of(trials[::-1]))


def test_equal_kernels_are_one_task() -> None:
    tasks = [task_of("small", product_of_matmul(64, 32, 64), calls) for calls in (2, 1)]
    (task,) = distinct(tasks, other_us=7 * tasks[0].predicted_us)
    assert (task.calls, task.share) == (3, pytest.approx(0.3))
