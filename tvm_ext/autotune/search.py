"""Searches over a space of kernels by one interface: ask for candidates, tell what came of them (ALCOP §4.3, §5.4).

| proposer | is |
|---|---|
| `InOrder` | exhaustive search, and rankings: by the analytical model, by the bottleneck-only model |
| `AtRandom` | random search |
| `Annealed` | simulated annealing guided by a cost model: plain XGB, or pre-trained by the analytical model |
| `Drafted` | draft-then-verify: the analytical model drafts, the cost model picks among the drafts |
| `LikelihoodFree` | a classifier of "among the best", XGBoost's random forest; a failure is a label |

What is proposed depends on the seed and on what is known, never on when or in which order it became known. So a search
that was killed goes on from a store of measurements where it stood, and tries nothing twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Generic, Protocol

import numpy as np
import xgboost

from tvm_ext.records.measurement import MeasuredWorkload, Measurement, Trial, TrialStore, Verdict

from .batches import spread
from .cost_model import TileCostModel
from .spaces import CandidateType, Floats, Integers, KernelSpace, SpaceCandidate

CHAINS = 128
STEPS = 150
HOT = 0.3
"""Temperature at the start, in logarithms of throughput: a step to a candidate 26 % slower is taken in one of e."""
EXPLORED = 0.1
"""Share of a batch that is drawn at random where a model proposes the rest."""

FOREST: dict[str, float | int | str] = {
    "objective": "binary:logistic",
    "num_parallel_tree": 100,
    "eta": 1.0,
    "max_depth": 5,
    "min_child_weight": 0.1,
    "subsample": 0.8,
    "colsample_bynode": 0.5,
    "tree_method": "hist",
}

AnySpace = KernelSpace[SpaceCandidate]
TimesByPlace = Mapping[int, "float | None"]
"""Microseconds by candidate, None for one that failed."""


class Proposer(Protocol):
    """A method of search: which candidates to try next."""

    def propose(self, space: AnySpace, known: TimesByPlace, count: int, rng: np.random.Generator) -> Sequence[int]:
        """Up to ``count`` candidates that are not in ``known``, the most promising first."""


class InOrder:
    """Candidates as a ranking lists them."""

    def __init__(self, order: Integers) -> None:
        self.order = order

    def propose(self, space: AnySpace, known: TimesByPlace, count: int, rng: np.random.Generator) -> Sequence[int]:
        return _first_new(self.order, known, count)


class AtRandom:
    """Candidates drawn without repetition."""

    def propose(self, space: AnySpace, known: TimesByPlace, count: int, rng: np.random.Generator) -> Sequence[int]:
        return _first_new(rng.permutation(len(space)), known, count)


class Annealed:
    """Chains of candidates that drift to where the model promises most; the best new ones that they met are tried.

    With a pre-trained model a batch is spread over candidates that differ, by how far the model has been off.
    A model that has learnt nothing yet (plain XGB before its first measurement) proposes at random.
    """

    def __init__(self, model: TileCostModel, *, chains: int = CHAINS, steps: int = STEPS) -> None:
        self.model, self.chains, self.steps = model, chains, steps

    def propose(self, space: AnySpace, known: TimesByPlace, count: int, rng: np.random.Generator) -> Sequence[int]:
        if known:
            self.model.update(known)
        scores = self.model.scores
        if not np.ptp(scores):
            return AtRandom().propose(space, known, count, rng)
        met = self._met(space, scores, known, rng)
        if self.model.pretrained:
            return self._spread(met, scores, known, count)
        explored = int(rng.binomial(count, EXPLORED)) if known else 0
        best = _first_new(met[np.argsort(-scores[met], kind="stable")], known, count - explored)
        taken = {**known, **dict.fromkeys(best)}
        return [*best, *AtRandom().propose(space, taken, count - len(best), rng)]

    def _spread(self, met: Integers, scores: Floats, known: TimesByPlace, count: int) -> Sequence[int]:
        """The most promising of those that were met and of all, as far as they do not say the same (`batches.py`)."""
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


class Drafted:
    """Draft, then verify: the cost model's best among ``drafts`` new candidates, the analytical model's first."""

    def __init__(self, model: TileCostModel, *, drafts: int = 256) -> None:
        self.model, self.drafts = model, drafts

    def propose(self, space: AnySpace, known: TimesByPlace, count: int, rng: np.random.Generator) -> Sequence[int]:
        if known:
            self.model.update(known)
        drafted = _first_new(space.predictions.ranking, known, self.drafts)
        return sorted(drafted, key=lambda place: (-self.model.scores[place], place))[:count]


class LikelihoodFree:
    """Likelihood-free optimisation: a random forest that tells the fastest share of the trials from the rest.

    Each fast one weighs as much as it is faster than the share's limit, so that the class's probability is an expected
    improvement; failures are labels like any other. The first ``warm_up`` come from the analytical ranking.
    """

    def __init__(self, model: TileCostModel, *, share: float = 0.25, warm_up: int = 8, seed: int = 0) -> None:
        self.features, self.share, self.warm_up, self.seed = model.features, share, warm_up, seed

    def propose(self, space: AnySpace, known: TimesByPlace, count: int, rng: np.random.Generator) -> Sequence[int]:
        ranking = space.predictions.ranking
        if len(known) < self.warm_up or sum(time is not None for time in known.values()) < 2:
            return _first_new(ranking, known, count)
        chance = self._chances(known)
        rank = np.empty(len(space))
        rank[ranking] = np.arange(len(ranking))
        return _first_new(np.lexsort((rank, -chance)), known, count)

    def _chances(self, known: TimesByPlace) -> Floats:
        places = np.array(sorted(known))
        times = np.array([np.inf if (time := known[int(place)]) is None else time for place in places])
        limit = np.quantile(times[np.isfinite(times)], self.share)
        fast = times <= limit
        weights = np.ones(len(times))
        weights[fast] += np.log(limit / times[fast])
        data = xgboost.DMatrix(self.features[places], label=fast.astype(np.float64), weight=weights, nthread=1)
        forest = xgboost.train({**FOREST, "seed": self.seed, "nthread": 1}, data, num_boost_round=1)
        return np.asarray(forest.predict(xgboost.DMatrix(self.features, nthread=1)), dtype=np.float64)


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


def tune(
    search: SpaceSearch[CandidateType],
    measure: Callable[[Sequence[CandidateType]], Sequence[Trial]],
    workload: MeasuredWorkload,
    store: TrialStore,
    *,
    trials: int,
    batch: int = 5,
) -> int:
    """Try candidates until ``trials`` of the space are known, those in ``store`` included; how many were tried now.

    Each batch is in the store before the search goes on: a kill costs the batch that is being measured.
    """
    search.recall(store.verdicts(workload))
    tried = 0
    while len(search.known) < trials:
        asked = search.ask(min(batch, trials - len(search.known)))
        if not asked:
            break
        found = measure(asked)
        store.add(Measurement(workload=workload, trial=trial) for trial in found)
        search.tell(found)
        tried += len(asked)
    return tried


def _first_new(order: Integers, known: TimesByPlace, count: int) -> list[int]:
    found: list[int] = []
    for place in order:
        if len(found) == count:
            break
        if int(place) not in known:
            found.append(int(place))
    return found
