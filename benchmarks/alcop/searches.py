"""Searches that ALCOP's is compared with, by the interface of `tvm_ext.autotune.search` (paper §5.4).

| proposer | is |
|---|---|
| `InOrder` | exhaustive search, and rankings: by the analytical model, by the bottleneck-only model |
| `PlainAnnealed` | simulated annealing by `PlainModel`, plain XGB: a cost model that is taught nothing beforehand |
| `Drafted` | draft-then-verify: the analytical model drafts, the cost model picks among the drafts |
| `LikelihoodFree` | a classifier of "among the best", XGBoost's random forest; a failure is a label |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import xgboost

from tvm_ext.autotune.cost_model import TileCostModel
from tvm_ext.autotune.search import Annealed, AnySpace, AtRandom, SpaceSearch, TimesByPlace, first_new
from tvm_ext.autotune.spaces import CandidateType
from tvm_ext.records.measurement import MeasuredWorkload, Measurement, Trial, TrialStore
from tvm_ext.support.quantities import Floats, Integers

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


class InOrder:
    """Candidates as a ranking lists them."""

    def __init__(self, order: Integers) -> None:
        self.order = order

    def propose(self, space: AnySpace, known: TimesByPlace, count: int, rng: np.random.Generator) -> Sequence[int]:
        return first_new(self.order, known, count)


class PlainModel(TileCostModel):
    """Scores that start from nothing, and forget it: no analytical pairs are among the trials."""

    def __init__(self, space: AnySpace, *, seed: int = 0) -> None:
        super().__init__(space, seed=seed)
        self.base, self.anchors = np.zeros(len(space)), self.anchors[:0]


class PlainAnnealed(Annealed):
    """Annealing by a model without doubts: its first choices, and some at random."""

    def chosen(
        self, space: AnySpace, met: Integers, known: TimesByPlace, count: int, rng: np.random.Generator
    ) -> Sequence[int]:
        explored = int(rng.binomial(count, EXPLORED)) if known else 0
        best = first_new(met[np.argsort(-self.model.scores[met], kind="stable")], known, count - explored)
        taken = {**known, **dict.fromkeys(best)}
        return [*best, *AtRandom().propose(space, taken, count - len(best), rng)]


class Drafted:
    """Draft, then verify: the cost model's best among ``drafts`` new candidates, the analytical model's first."""

    def __init__(self, model: TileCostModel, *, drafts: int = 256) -> None:
        self.model, self.drafts = model, drafts

    def propose(self, space: AnySpace, known: TimesByPlace, count: int, rng: np.random.Generator) -> Sequence[int]:
        if known:
            self.model.update(known)
        drafted = first_new(space.predictions.ranking, known, self.drafts)
        return sorted(drafted, key=lambda place: (-self.model.scores[place], place))[:count]


class LikelihoodFree:
    """Likelihood-free optimisation: a random forest that tells the fastest share of the trials from the rest.

    Each fast one weighs as much as it is faster than the share's limit, so that the class's probability is an expected
    improvement; failures are labels like any other. The first ``warm_up`` come from the analytical ranking.
    """

    def __init__(self, features: Floats, *, share: float = 0.25, warm_up: int = 8, seed: int = 0) -> None:
        self.features, self.share, self.warm_up, self.seed = features, share, warm_up, seed

    def propose(self, space: AnySpace, known: TimesByPlace, count: int, rng: np.random.Generator) -> Sequence[int]:
        ranking = space.predictions.ranking
        if len(known) < self.warm_up or sum(time is not None for time in known.values()) < 2:
            return first_new(ranking, known, count)
        chance = self._chances(known)
        rank = np.empty(len(space))
        rank[ranking] = np.arange(len(ranking))
        return first_new(np.lexsort((rank, -chance)), known, count)

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
