"""A cost model that is taught by the analytical one and corrected by measurements (ALCOP §4.3).

Boosting starts from what the analytical model predicts of each candidate (XGBoost's base margin): an ensemble that had
learnt these predictions first would know them only nearly. Measurements do not replace them: a small ensemble learns by
how much they differ, anew from all of them each time, with analytical pairs among them. So a region without a
measurement has the analytical model's order.

Scores are logarithms of throughput, higher is better; only differences mean anything. One thread and fixed seeds: the
same measurements give the same scores.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import TypeAlias

import numpy as np
import xgboost

from tvm_ext.support.quantities import Floats, Integers

from .batches import standardised
from .spaces import KernelSpace, SpaceCandidate

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
