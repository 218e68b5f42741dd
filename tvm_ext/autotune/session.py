"""One tuning run of a model: which kernel to search next, when nothing more is to be had, what is adopted.

Batch by batch, the kernel with the largest expected gain is searched: its calls times the difference between its
fastest so far and what the cost model still expects of it. Each batch is measured beside the constructed kernel, and is
in the store before the next begins. All decisions follow from what the store knows and from the seed, never from the
way there, so that a run which was killed goes on where it stood; a kill costs the batch that is being measured.
"""

from __future__ import annotations

import hashlib
import math
import operator
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from tvm_ext.errors import MeasurementError
from tvm_ext.records.measurement import SESSION_KIND, MeasuredWorkload, Measurement, Trial, TrialStore
from tvm_ext.records.tuned import CurvePoint, TunedTask, TuningBudget, TuningRecord, TuningStatus

from .choose import CONFIRMATIONS, TunedChoice, choose_tuned
from .cost_model import TileCostModel
from .search import Annealed, SpaceSearch
from .spaces import TuningTask
from .standings import Standings, in_batches, standings_of

BATCH = 8
"""Candidates that are measured beside the constructed kernel at a time."""

FINALISTS = 2
"""Of a kernel's candidates, so many are measured often enough to be adopted."""

LEAST_GAIN = 0.01
"""The search ends where the model expects less than this share of what the kernels take."""

DOUBT, DOUBT_LASTS = 0.3, 24.0
"""How far, in logarithms of time, a candidate may be faster than predicted before anything is measured, and after how
many candidates it is 0.7 times that: the model is corrected by each, and the luckiest are tried first."""

MOST_BLIND = 2
"""After so many batches without a time of the constructed kernel a search gives up."""

CONFIRMING_SHARE = 0.15
"""Of a budget of seconds, what is kept for measuring the fastest again."""


class TrialHistory(TrialStore, Protocol):
    """A store that also gives each trial: which of them were measured side by side decides what is adopted."""

    def trials(self, workload: MeasuredWorkload) -> Sequence[Trial]:
        """All that is known of ``workload``."""


Measure = Callable[[TuningTask, Sequence[str]], Iterable[Trial]]
"""Measures configurations of a task in turns with the constructed kernel, which is the first.

It gives the trials batch by batch, in each that of the constructed kernel first; what could not be built, anywhere.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Moment:
    """After a batch: of each task its fastest and its limit by the constructed kernel's time.

    Shares, since what a kernel takes is known only once it is measured, and a curve is of one scale.
    """

    trials: int
    seconds: float
    best: tuple[float, ...]
    limit: tuple[float, ...]


class TaskSearch:
    """A task and what is known of it."""

    def __init__(self, task: TuningTask, trials: Sequence[Trial], seed: int) -> None:
        self.task, self.seed = task, seed
        self.trials = list(trials)
        self.tried_now: set[str] = set()
        self.blind = 0
        """Batches of this run, one after another, in which the constructed kernel gave no time to compare with."""
        self.model = TileCostModel(task.space, seed=seed)
        self.search = SpaceSearch(task.space, Annealed(self.model), seed=seed)
        self.standings = self._learnt()

    def take(self, trials: Iterable[Trial]) -> None:
        """Learn from a batch."""
        batch = tuple(trials)
        self.trials += batch
        self.tried_now |= {trial.configuration for trial in batch}
        ran = any(trial.configuration == self.task.constructed and trial.times_us for trial in batch)
        self.blind = 0 if ran else self.blind + 1
        self.standings = self._learnt()

    def _learnt(self) -> Standings:
        standings = standings_of(self.trials, self.task.constructed)
        self.search.known.clear()
        self.search.recall(
            {
                name: replace(standing.verdict, time_us=standings.time_us(name))
                for name, standing in standings.by_configuration.items()
            }
        )
        # What ran into a time limit may be tried again, but not in the same run.
        states = {name: standing.verdict for name, standing in standings.by_configuration.items()}
        again = (trial for trial in self.trials if trial.configuration in self.tried_now)
        self.search.tell(trial for trial in again if not states[trial.configuration].is_settled)
        if self.search.known:
            self.model.update(self.search.known)
        return standings

    def ask(self, count: int) -> list[str]:
        """Candidates that are worth a trial; the constructed kernel takes part in any case."""
        asked = [candidate.configuration for candidate in self.search.ask(count + 1)]
        return [item for item in asked if item != self.task.constructed][:count]

    @property
    def tried(self) -> int:
        """Candidates that something is known of; the constructed kernel is none."""
        return len(self.search.known) - (self.task.space.index(self.task.constructed) in self.search.known)

    @property
    def constructed_us(self) -> float:
        return self.standings.constructed_us or self.task.predicted_us

    @property
    def best_us(self) -> float:
        """Of what runs, the constructed kernel included."""
        known = [item for item in self.search.known.values() if item is not None]
        return min([self.constructed_us, *known])

    @property
    def expected_us(self) -> float:
        """The fastest that the model still expects among what has not been tried; infinite where all has been."""
        untried = np.ones(len(self.task.space), dtype=bool)
        untried[list(self.search.known)] = False
        if not untried.any():
            return math.inf
        doubt = DOUBT / math.sqrt(1.0 + self.tried / DOUBT_LASTS)
        if not self.search.known:
            return self.best_us * math.exp(-doubt)
        return 1e6 * math.exp(-float(self.model.scores[untried].max()) - doubt)

    @property
    def limit_us(self) -> float:
        return min(self.best_us, self.expected_us)

    @property
    def gain_us(self) -> float:
        """What is expected to be had, in one run of the model; nothing where nothing can be measured."""
        if self.blind >= MOST_BLIND:
            return 0.0
        return self.task.calls * (self.best_us - self.limit_us)

    @property
    def choice(self) -> TunedChoice:
        return choose_tuned(self.standings)

    @property
    def unconfirmed(self) -> list[str]:
        """The fastest, as far as they look faster than the constructed kernel and have been measured too seldom."""
        ahead = [item for item in self.standings.by_configuration.values() if item.ratio is not None and item.ratio < 1]
        first = sorted(ahead, key=lambda item: (item.ratio or 0.0, item.configuration))[:FINALISTS]
        return [item.configuration for item in first if len(item.ratios) < CONFIRMATIONS]

    def result(self) -> TunedTask:
        choice, known = self.choice, self.search.known
        best = None if choice.configuration is None else self.standings.time_us(choice.configuration)
        return TunedTask(
            name=self.task.name,
            workload=self.task.workload.key,
            calls=self.task.calls,
            share=self.task.share,
            candidates=len(self.task.space),
            known=len(known),
            failed=sum(item is None for item in known.values()),
            predicted_us=self.task.predicted_us,
            constructed_us=self.standings.constructed_us,
            best_us=best if best is not None else self.standings.constructed_us,
            configuration=choice.configuration,
            reason=choice.reason,
        )


class TuningSession:
    """A tuning run of ``tasks``: measured by ``measure``, kept in ``store``, told to ``progress`` after each batch.

    ``clock`` gives seconds of any origin; at ``start`` the run began, if that was earlier. What ``measure`` raises ends
    the run with what it gave until then in the store, Ctrl-C included.
    """

    def __init__(
        self,
        tasks: Sequence[TuningTask],
        measure: Measure,
        store: TrialHistory,
        budget: TuningBudget,
        *,
        seed: int = 0,
        progress: Callable[[TuningStatus], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        start: float | None = None,
    ) -> None:
        self.measure, self.store, self.budget, self.seed = measure, store, budget, seed
        self.progress, self.clock = progress or (lambda _status: None), clock
        self.searches = [TaskSearch(task, store.trials(task.workload), seed) for task in tasks]
        self.session = session_workload(tasks)
        self.known_before = self.known
        self.trials = 0
        self.start = self.clock() if start is None else start
        self.moments = [self._moment()]

    def run(self) -> TuningRecord:
        """Search until the budget is spent or nothing more is expected, then confirm the fastest.

        Where the devices go away in mid-run, that ends it; raises MeasurementError where there were none to begin with.
        """
        try:
            stopped = self._search()
            self._confirm()
        except MeasurementError as error:
            if len(self.moments) == 1:
                raise
            stopped = error.problem
        return self.record(stopped)

    def record(self, stopped: str) -> TuningRecord:
        """What there is so far."""
        return TuningRecord(
            device=self.session.device,
            budget=str(self.budget),
            seed=self.seed,
            trials=self.trials,
            known=self.known_before,
            seconds=self.clock() - self.start,
            stopped=stopped,
            tasks=tuple(search.result() for search in self.searches),
            curve=tuple(map(self._point, self.moments)),
        )

    def _search(self) -> str:
        while True:
            search = max(self.searches, key=lambda search: (search.gain_us, search.task.workload.key), default=None)
            if search is None:
                return "there is nothing to choose"
            if sum(search.gain_us for search in self.searches) < LEAST_GAIN * self._best_us:
                return f"the model expects less than {100 * LEAST_GAIN:.0f} % more"
            count = self._affordable()
            if count < 1:
                return f"the budget of {self.budget} is spent"
            asked = search.ask(count)
            self._batch(search, [*search.unconfirmed, *asked])

    def _confirm(self) -> None:
        """Measure again what looks faster and was measured too seldom, the largest gain first."""
        for search in sorted(
            self.searches, key=lambda search: -search.task.calls * (search.constructed_us - search.best_us)
        ):
            for _ in range(CONFIRMATIONS):
                spent = (self.budget.seconds or math.inf) <= self.spent_s
                if spent or not search.unconfirmed or search.blind >= MOST_BLIND:
                    break
                self._batch(search, search.unconfirmed)

    def _affordable(self) -> int:
        """Candidates of the next batch, as far as the budget goes."""
        count = BATCH if self.budget.trials is None else min(BATCH, self.budget.trials - self.known)
        limit = math.inf if self.budget.seconds is None else (1 - CONFIRMING_SHARE) * self.budget.seconds
        batches = len(self.moments) - 1
        pace = (self.clock() - self.start) / batches if batches else 0.0
        return count if self.spent_s + pace / 2 < limit else 0

    def _batch(self, search: TaskSearch, configurations: Sequence[str]) -> None:
        """Measure beside the constructed kernel, keep, learn."""
        start, before, constructed = self.clock(), self.known, search.task.constructed
        found: dict[int, Trial] = {}
        wanted = [constructed, *(configuration for configuration in configurations if configuration != constructed)]
        try:
            for trial in self.measure(search.task, wanted):
                found[len(found)] = trial
        finally:
            self._keep(search, in_batches(found.values(), constructed), self.clock() - start)
        self.trials += self.known - before
        self.moments.append(self._moment())
        self.progress(self._status(search))

    def _keep(self, search: TaskSearch, trials: Sequence[Trial], seconds: float) -> None:
        spent = Trial(configuration="batch", outcome="ok", times_us=(max(1.0, 1e6 * seconds),))
        kept = [Measurement(workload=search.task.workload, trial=trial) for trial in trials]
        self.store.add([*kept, Measurement(workload=self.session, trial=spent)])
        search.take(trials)

    # --- where it stands ---------------------------------------------------------------------------------------------
    @property
    def known(self) -> int:
        return sum(search.tried for search in self.searches)

    @property
    def spent_s(self) -> float:
        return self.clock() - self.start

    @property
    def _best_us(self) -> float:
        return sum(search.task.calls * search.best_us for search in self.searches)

    def _moment(self) -> _Moment:
        return _Moment(
            trials=self.trials,
            seconds=self.clock() - self.start,
            best=tuple(search.best_us / search.constructed_us for search in self.searches),
            limit=tuple(search.limit_us / search.constructed_us for search in self.searches),
        )

    def _point(self, moment: _Moment) -> CurvePoint:
        constructed = [search.task.calls * search.constructed_us for search in self.searches]
        return CurvePoint(
            trials=moment.trials,
            seconds=moment.seconds,
            best_us=math.fsum(map(operator.mul, constructed, moment.best)),
            limit_us=math.fsum(map(operator.mul, constructed, moment.limit)),
        )

    def _status(self, search: TaskSearch) -> TuningStatus:
        return TuningStatus(
            task=search.task.name,
            point=self._point(self.moments[-1]),
            constructed_us=sum(search.task.calls * search.constructed_us for search in self.searches),
            known=self.known,
            spent_s=self.spent_s,
            budget=self.budget,
        )


def session_workload(tasks: Sequence[TuningTask]) -> MeasuredWorkload:
    """Under which the time that was spent on ``tasks`` is kept."""
    keys = sorted(task.workload.key for task in tasks)
    first = (
        tasks[0].workload
        if tasks
        else MeasuredWorkload(kind=SESSION_KIND, structure="", layout="", dtype="", device="", instructions="")
    )
    digest = hashlib.sha256("\n".join(keys).encode()).hexdigest()
    return replace(first, kind=SESSION_KIND, structure=digest, layout="", dtype="")
