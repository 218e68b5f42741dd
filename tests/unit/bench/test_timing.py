"""The timing core, on functions that count their calls instead of taking time."""

from __future__ import annotations

import pytest

from tvm_ext.bench import timing
from tvm_ext.bench.timing import Runner, interleave


class FakeClock:
    """A clock that moves only when a task runs or somebody sleeps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.log: list[str] = []
        self.spinning_s = 0.0  # processor time that worker threads still burn after a task
        monkeypatch.setattr(timing.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(timing.time, "process_time", lambda: self.used_s)
        monkeypatch.setattr(timing.time, "sleep", self.sleep)
        self.used_s = 0.0
        self.slept_s: list[float] = []

    def advance(self, seconds: float) -> None:
        self.now += seconds

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.slept_s.append(seconds)
        burnt = min(seconds, self.spinning_s)
        self.used_s, self.spinning_s = self.used_s + burnt, self.spinning_s - burnt

    def task(self, name: str, seconds: float, **options: float) -> Runner:
        def run() -> None:
            self.log.append(name)
            self.advance(seconds)

        return Runner(name=name, run=run, **options)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    return FakeClock(monkeypatch)


def test_contenders_take_turns(clock: FakeClock) -> None:
    samples = interleave([clock.task("a", 0.01), clock.task("b", 0.02)], rounds=3, samples_per_turn=2)
    assert samples["a"] == pytest.approx([0.01] * 6)
    assert samples["b"] == pytest.approx([0.02] * 6)
    turns = [name for index, name in enumerate(clock.log) if index == 0 or clock.log[index - 1] != name]
    assert turns == ["a", "b"] * 3


def test_short_runs_are_repeated_within_a_sample(clock: FakeClock) -> None:
    samples = interleave([clock.task("short", 1e-4)], rounds=1, samples_per_turn=3)
    assert samples["short"] == pytest.approx([1e-4] * 3)
    # A first run, a trial of 10 ms / 0.1 ms = 100 runs, a warm-up and three samples of 20; by rounding one more each.
    assert 101 + 4 * 20 <= len(clock.log) <= 102 + 4 * 21


def test_the_first_runs_do_not_decide_how_often_one_is_repeated(clock: FakeClock) -> None:
    """A run of 0.1 ms takes 4 ms and more until its threads are awake."""
    seconds = iter([5e-3, 5e-3, 4e-3])
    task = clock.task("short", 1e-4)
    waking = Runner(name="short", run=lambda: clock.advance(next(seconds, 1e-4)))
    repeated = interleave([waking], rounds=1)["short"]
    assert repeated == pytest.approx(interleave([task], rounds=1)["short"])
    assert len(clock.log) > 4 * 20


def test_budget_ends_the_turns_of_a_slow_contender(clock: FakeClock) -> None:
    slow = clock.task("slow", 2.0, budget_s=5.0, estimate_s=2.0)
    samples = interleave([clock.task("a", 0.01), slow], rounds=10, samples_per_turn=3)
    assert len(samples["a"]) == 30
    assert samples["slow"] == pytest.approx([2.0, 2.0, 2.0])  # 2 in the first turn, 1 that begins within the budget
    assert clock.log.count("slow") == 3


def test_one_sample_is_taken_whatever_the_budget(clock: FakeClock) -> None:
    samples = interleave([clock.task("slow", 25.0, budget_s=1.0, estimate_s=25.0)], rounds=4)
    assert samples["slow"] == pytest.approx([25.0])


def test_a_turn_waits_until_worker_threads_stop_spinning(clock: FakeClock) -> None:
    clock.spinning_s = 0.16
    interleave([clock.task("a", 0.01)], rounds=1)
    # 16 steps of 10 ms in which a core was busy, and one in which none was.
    assert clock.slept_s == [0.01] * 17


def test_a_process_that_never_rests_is_timed_all_the_same(clock: FakeClock) -> None:
    clock.spinning_s = 1e9
    samples = interleave([clock.task("a", 0.01)], rounds=1)
    assert sum(clock.slept_s) == pytest.approx(timing.SETTLE_LIMIT_S)
    assert samples["a"] == pytest.approx([0.01] * 3)
