"""Interleaved timing: contenders take turns in one process, so that a slow minute of the machine hits all of them."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

SETTLE_STEP_S = 0.01  # a choice: a tenth of it is the least processor time that counts as working
SETTLE_LIMIT_S = 2.0
"""Between turns the process is left alone until it uses no processor time, at most this long. Worker threads spin for
a while after the last parallel region, waiting for the next: TVM's for about 160 ms of processor time, ONNX Runtime's
for about 40 ms. On a machine whose cores are all in use they would take a core from the contender that runs next.
"""

MINIMUM_SAMPLE_S = 0.002
"""Faster functions are called several times per sample, so that the clock's and Python's own cost do not show."""

TRIAL_S, TRIAL_RUNS = 0.01, 20
"""A runner's fastest run is known after so many seconds and runs, or after `LONG_RUN_S`."""

LONG_RUN_S = 0.3
"""A run this long warms itself up: the cold first milliseconds do not show in it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Runner:
    """Something to time. ``budget_s`` ends its turns early; one sample is always taken.

    ``estimate_s`` is what an earlier run took, where one is known: it spares a long run its trial.
    """

    name: str
    run: Callable[[], object]
    budget_s: float = math.inf
    estimate_s: float | None = None


def time_once(run: Callable[[], object]) -> float:
    """Seconds of one run."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def median(samples_s: Sequence[float]) -> float:
    return statistics.median(samples_s)


def interleave(
    runners: Sequence[Runner], *, rounds: int = 10, samples_per_turn: int = 3, clock: Callable[[], float] | None = None
) -> dict[str, tuple[float, ...]]:
    """Seconds per run of each runner, by name: up to ``rounds * samples_per_turn`` samples.

    Each round gives every runner one turn: a pause until the process is idle, an untimed run, then the samples. A
    runner whose samples have cost its budget sits out the remaining rounds. ``clock`` answers seconds, of wall time
    unless given: with one thread, one of processor time tells what a run costs however busy the machine is.
    """
    samples: dict[str, list[float]] = {runner.name: [] for runner in runners}
    spent = dict.fromkeys(samples, 0.0)
    repeats: dict[str, int] = {}
    for _ in range(rounds):
        for runner in runners:
            if spent[runner.name] >= runner.budget_s:
                continue
            start = time.perf_counter()
            left_s = runner.budget_s - spent[runner.name]
            if runner.name not in repeats:
                repeats[runner.name] = _repeats(runner)
            taken = _take_turn(runner, repeats[runner.name], samples_per_turn, left_s, clock or time.perf_counter)
            samples[runner.name] += taken
            spent[runner.name] += time.perf_counter() - start
    return {name: tuple(values) for name, values in samples.items()}


def _repeats(runner: Runner) -> int:
    """Runs per sample: a 0.1 ms function is called 20 times to fill 2 ms.

    By the fastest run of a trial: the first three take up to 4 ms where the threads of a 15 us function sleep. Samples
    of a single run, which 2 ms would mean, would measure their waking up in each turn.
    """
    estimate = runner.estimate_s
    if estimate is None or estimate < LONG_RUN_S:
        runner.run()
        estimate, spent_s, runs = math.inf, 0.0, 0
        while (spent_s < TRIAL_S or runs < TRIAL_RUNS) and spent_s < LONG_RUN_S:
            taken = max(time_once(runner.run), 1e-7)
            estimate, spent_s, runs = min(estimate, taken), spent_s + taken, runs + 1
    return max(1, math.ceil(MINIMUM_SAMPLE_S / max(estimate, 1e-7)))


def _take_turn(runner: Runner, repeats: int, count: int, budget_s: float, clock: Callable[[], float]) -> list[float]:
    settle()
    taken = [_sample(runner, repeats, clock)]
    if taken[0] < LONG_RUN_S:
        taken = [_sample(runner, repeats, clock)]  # the first was the warm-up
    while len(taken) < count and (sum(taken) + taken[-1]) * repeats <= budget_s:
        taken.append(_sample(runner, repeats, clock))
    return taken


def settle() -> None:
    """Wait until no thread of this process is busy: a step in which it used less than a tenth of one core."""
    for _ in range(round(SETTLE_LIMIT_S / SETTLE_STEP_S)):
        used = time.process_time()
        time.sleep(SETTLE_STEP_S)
        if time.process_time() - used < SETTLE_STEP_S / 10:
            return


def _sample(runner: Runner, repeats: int, clock: Callable[[], float]) -> float:
    start = clock()
    for _ in range(repeats):
        runner.run()
    return (clock() - start) / repeats
