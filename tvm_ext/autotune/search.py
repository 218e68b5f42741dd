"""Searches over a space of kernels by one interface: ask for candidates, tell what came of them (ALCOP §4.3, §5.4).

What is proposed depends on the seed and on what is known, never on when or in which order it became known. So a search
that was killed goes on from a store of measurements where it stood, and tries nothing twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Generic, Protocol

import numpy as np

from tvm_ext.records.measurement import Trial, Verdict
from tvm_ext.support.quantities import Floats, Integers

from .cost_model import TileCostModel, spread
from .spaces import CandidateType, KernelSpace, SpaceCandidate

CHAINS = 128  # AutoTVM's ``parallel_size`` of simulated annealing, the searcher that ALCOP takes over (§4.3)
STEPS = 150  # a choice: AutoTVM's ``n_iter`` is 500
HOT = 0.3
"""Temperature at the start, in logarithms of throughput: a step to a candidate 26 % slower is taken in one of e."""
AnySpace = KernelSpace[SpaceCandidate]
TimesByPlace = Mapping[int, "float | None"]
"""Microseconds by candidate, None for one that failed."""


class Proposer(Protocol):
    """A method of search: which candidates to try next."""

    def propose(self, space: AnySpace, known: TimesByPlace, count: int, rng: np.random.Generator) -> Sequence[int]:
        """Up to ``count`` candidates that are not in ``known``, the most promising first."""


class AtRandom:
    """Candidates drawn without repetition."""

    def propose(self, space: AnySpace, known: TimesByPlace, count: int, rng: np.random.Generator) -> Sequence[int]:
        return first_new(rng.permutation(len(space)), known, count)


class Annealed:
    """Chains of candidates that drift to where the model promises most; the best new ones that they met are tried.

    A batch is spread over candidates that differ, by how far the model has been off.
    """

    def __init__(self, model: TileCostModel, *, chains: int = CHAINS, steps: int = STEPS) -> None:
        self.model, self.chains, self.steps = model, chains, steps

    def propose(self, space: AnySpace, known: TimesByPlace, count: int, rng: np.random.Generator) -> Sequence[int]:
        if known:
            self.model.update(known)
        scores = self.model.scores
        if not np.ptp(scores):
            return AtRandom().propose(space, known, count, rng)
        return self.chosen(space, self._met(space, scores, known, rng), known, count, rng)

    def chosen(
        self, space: AnySpace, met: Integers, known: TimesByPlace, count: int, rng: np.random.Generator
    ) -> Sequence[int]:
        """The most promising of those that were met and of all, as far as they do not say the same (`spread`)."""
        scores = self.model.scores
        first = np.argsort(-scores, kind="stable")[: self.chains]
        pool = np.setdiff1d(np.union1d(met, first), np.array(list(known), dtype=np.int64))
        rows = np.concatenate([np.array(sorted(known), dtype=np.int64), pool])
        # Until something is measured the model's first choice goes first: all are equally unknown.
        chosen = spread(self.model.points[rows], len(known), scores[pool], self.model.doubt, count)
        return [int(place) for place in rows[chosen]]

    def _met(self, space: AnySpace, scores: Floats, known: TimesByPlace, rng: np.random.Generator) -> Integers:
        """Candidates where the chains have been."""
        places = rng.integers(len(space), size=self.chains)
        fastest = sorted(known, key=lambda place: (np.inf if (time := known[place]) is None else time, place))
        starts = np.asarray(fastest[: self.chains // 4], dtype=np.int64)
        places[: len(starts)] = starts
        met = np.zeros(len(space), dtype=bool)
        for step in range(self.steps):
            met[places] = True
            heat = HOT * (1 - step / self.steps)
            moved = space.neighbours(places, rng)
            gain = scores[moved] - scores[places]
            taken = rng.random(self.chains) < np.exp(np.minimum(gain / heat, 0.0))
            places = np.where(taken, moved, places)
        met[places] = True
        return np.flatnonzero(met)


class SpaceSearch(Generic[CandidateType]):
    """One search: what is known of a space, and what to try next."""

    def __init__(self, space: KernelSpace[CandidateType], proposer: Proposer, *, seed: int = 0) -> None:
        self.space, self.proposer, self.seed = space, proposer, seed
        self.known: dict[int, float | None] = {}

    def ask(self, count: int) -> list[CandidateType]:
        """Up to ``count`` candidates that are worth a trial now; none where all have been tried."""
        rng = np.random.default_rng([self.seed, len(self.known)])
        return [self.space[place] for place in self.proposer.propose(self.space, self.known, count, rng)]

    def tell(self, trials: Iterable[Trial]) -> None:
        """What came of them. A trial of a candidate that this space does not have is left out."""
        for trial in trials:
            self._learn(trial.configuration, trial.time_us)

    def recall(self, verdicts: Mapping[str, Verdict]) -> int:
        """What a store knows of the workload; how many candidates need no trial. Unsettled ones may be tried again."""
        before = len(self.known)
        for verdict in verdicts.values():
            if verdict.is_settled:
                self._learn(verdict.configuration, verdict.time_us)
        return len(self.known) - before

    @property
    def best(self) -> tuple[CandidateType, float] | None:
        """The fastest so far and its microseconds; None where nothing has run."""
        ran = [(time, place) for place, time in self.known.items() if time is not None]
        return (self.space[min(ran)[1]], min(ran)[0]) if ran else None

    def _learn(self, configuration: str, time_us: float | None) -> None:
        place = self.space.index(configuration)
        if place is not None:
            self.known[place] = time_us


def first_new(order: Integers, known: TimesByPlace, count: int) -> list[int]:
    found: list[int] = []
    for place in order:
        if len(found) == count:
            break
        if int(place) not in known:
            found.append(int(place))
    return found
