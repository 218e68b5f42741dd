"""A cost model that is taught by the analytical one and corrected by measurements (ALCOP §4.3).

Boosting starts from what the analytical model predicts of each candidate (XGBoost's base margin): an ensemble that had
learnt these predictions first would know them only nearly. Measurements do not replace them: a small ensemble learns by
how much they differ, anew from all of them each time, with analytical pairs among them. So a region without a
measurement has the analytical model's order.

Scores are logarithms of throughput, higher is better; only differences mean anything. One thread and fixed seeds: the
same measurements give the same scores.

`spread` chooses what to try together: the most promising candidates, as far as they do not say the same. A model is off
by about as much for candidates that resemble each other, so that a batch of the highest scores is one guess five times
over. Each candidate is therefore worth its score and a share of what is still unknown of it: the posterior deviation of
a Gaussian process over standardised features (batched upper confidence bounds; Desautels et al., JMLR 2014). What a
batch takes counts as known for the rest of it, before anything is measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import TypeAlias

import numpy as np
import xgboost

from tvm_ext.support.quantities import Floats, Integers

from .spaces import KernelSpace, SpaceCandidate

LENGTH = 0.55
"""Over which candidates resemble each other: root mean square of the differences of their standardised features."""

CONFIDENCE = 2.0
"""Deviations that are added to a score. On ten products drawn at random for the simulated GPU the best of 10 trials has
84 % of the exhaustive best with one, 85 % with 1.5, 90 % with two; it had 77 % without."""

NUGGET = 0.05
"""Share of the variance that a trial leaves, of its noise and of what features do not say."""


def standardised(features: Floats) -> Floats:
    """Columns of mean 0 and deviation 1; those that are the same for all are 0."""
    deviation = features.std(axis=0)
    return np.asarray((features - features.mean(axis=0)) / np.where(deviation > 0, deviation, 1.0), dtype=np.float64)


class Unknown:
    """How much is unknown of each of ``points`` (rows of standardised features): 1 at first, 0 where all is known."""

    def __init__(self, points: Floats) -> None:
        self.points = points
        self.variance: Floats = np.ones(len(points))
        self._columns: list[Floats] = []

    @property
    def deviation(self) -> Floats:
        return np.sqrt(self.variance)

    def learn(self, row: int) -> None:
        """The point of this row was tried: one more column of a pivoted Cholesky decomposition."""
        distance = ((self.points - self.points[row]) ** 2).mean(axis=1)
        column = np.exp(-distance / (2 * LENGTH**2))
        for earlier in self._columns:
            column = column - earlier * earlier[row]
        column = column / np.sqrt(max(float(column[row]), 0.0) + NUGGET)
        self._columns.append(column)
        self.variance = np.maximum(self.variance - column * column, 0.0)


def spread(points: Floats, tried: int, scores: Floats, doubt: float, count: int) -> list[int]:
    """Up to ``count`` of the rows after the first ``tried``, which have ``scores``.

    ``doubt`` is the deviation, in units of the scores, of a candidate of which nothing is known.
    """
    unknown = Unknown(points)
    for row in range(tried):
        unknown.learn(row)
    worth, taken = np.concatenate([np.full(tried, -np.inf), scores]), list[int]()
    while len(taken) < min(count, len(scores)):
        row = int(np.argmax(worth + CONFIDENCE * doubt * unknown.deviation))
        taken.append(row)
        worth[row] = -np.inf
        unknown.learn(row)
    return taken


TreeSettings: TypeAlias = "dict[str, float | int | str]"

# A choice: shallow trees and shrinkage, for a few dozen trials have to teach them.
CORRECTION: TreeSettings = {
    "max_depth": 3,
    "eta": 0.15,
    "lambda": 1.0,
    "min_child_weight": 1,
    "subsample": 0.8,
    "colsample_bytree": 0.5,
    "tree_method": "exact",
}
CORRECTION_ROUNDS = 60  # a choice: at eta 0.15 later trees correct less than a ten-thousandth of the error (0.85**60)

ANCHORS, ANCHOR_WEIGHT = 256, 0.02
"""Candidates at which the correction is told to be none, each weighing so much of a trial: the analytical pairs stay in
the training set, and what trials teach of one region does not change the order of all others."""

DOUBT, DOUBT_WEIGHT = 0.1, 4.0
"""How far the analytical model is off, in logarithms, before anything is measured: CPU tiles that are measured differ
by 0.08 from it. It counts as so many trials beside those that say how far it is off here."""

FAILURE_FACTOR = 4.0
"""A candidate that fails counts as so many times slower than the slowest that ran."""


class TileCostModel:
    """Scores of the candidates of one space."""

    def __init__(self, space: KernelSpace[SpaceCandidate], *, seed: int = 0) -> None:
        self.features = space.features
        self.seed = seed
        self.base: Floats = -np.log(space.predictions.time_s)
        self.doubt = DOUBT
        self.correction: Floats = np.zeros(len(space))
        chosen = np.random.default_rng(seed).permutation(len(space))
        self.anchors: Integers = chosen[:ANCHORS]

    def update(self, times_us: Mapping[int, float | None]) -> None:
        """Learn from all that was tried so far: microseconds by candidate, None for those that failed."""
        places = np.array(sorted(times_us), dtype=np.int64)
        tried = [times_us[int(place)] for place in places]
        ran = [time for time in tried if time is not None]
        slowest = FAILURE_FACTOR * max(ran) if ran else 0.0
        if ran:
            off = -np.log([1e-6 * (slowest if time is None else time) for time in tried]) - self.base[places]
            known = off[[time is not None for time in tried]]
            middle = float(np.median(known))
            squares = DOUBT_WEIGHT * DOUBT**2 + float(((known - middle) ** 2).sum())
            self.doubt = float(np.sqrt(squares / (DOUBT_WEIGHT + len(known))))
        else:
            off, middle = np.full(len(places), -np.log(FAILURE_FACTOR)), 0.0
        labels = np.concatenate([off - middle, np.zeros(len(self.anchors))])
        weights = np.concatenate([np.ones(len(places)), np.full(len(self.anchors), ANCHOR_WEIGHT)])
        self.correction = self._fitted(labels, np.concatenate([places, self.anchors]), weights) + middle

    @property
    def scores(self) -> Floats:
        """Of every candidate of the space."""
        return self.base + self.correction

    @cached_property
    def points(self) -> Floats:
        """Features on one scale, by which candidates resemble each other."""
        return standardised(self.features)

    def _fitted(self, labels: Floats, places: Integers, weights: Floats) -> Floats:
        """What an ensemble that has learnt ``labels`` at ``places`` says of the whole space."""
        fixed = {**CORRECTION, "seed": self.seed, "nthread": 1, "base_score": 0.0, "objective": "reg:squarederror"}
        data = xgboost.DMatrix(self.features[places], label=labels, weight=weights, nthread=1)
        booster = xgboost.train(fixed, data, num_boost_round=CORRECTION_ROUNDS)
        said = booster.predict(xgboost.DMatrix(self.features, nthread=1))
        return np.asarray(said, dtype=np.float64)
