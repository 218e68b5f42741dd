"""A cost model that is taught by the analytical one and corrected by measurements (ALCOP §4.3).

XGBoost learns what `analytical.py` predicts of a whole space, before anything is measured. Measurements do not replace
that: a second, small ensemble learns by how much they differ from the first one's prediction, anew from all of them
each time, with analytical pairs among them. So a region without a measurement has the analytical model's order.

Scores are logarithms of throughput, higher is better; only differences mean anything. One thread and fixed seeds: the
same measurements give the same scores.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import numpy as np
import xgboost

from .spaces import Floats, Integers, KernelSpace, SpaceCandidate

TreeSettings: TypeAlias = "dict[str, float | int | str]"

PRETRAINING: TreeSettings = {"max_depth": 7, "eta": 0.2, "tree_method": "hist", "max_bin": 64}
PRETRAINING_ROUNDS = 120

CORRECTION: TreeSettings = {
    "max_depth": 3,
    "eta": 0.15,
    "lambda": 1.0,
    "min_child_weight": 1,
    "subsample": 0.8,
    "colsample_bytree": 0.5,
    "tree_method": "exact",
}
CORRECTION_ROUNDS = 60

ANCHORS, ANCHOR_WEIGHT = 256, 0.02
"""Candidates at which the correction is told to be none, each weighing so much of a trial: the analytical pairs stay in
the training set, and what trials teach of one region does not change the order of all others."""

FAILURE_FACTOR = 4.0
"""A candidate that fails counts as so many times slower than the slowest that ran."""


class TileCostModel:
    """Scores of the candidates of one space; ``pretrained=False`` starts from nothing, as plain XGB does."""

    def __init__(self, space: KernelSpace[SpaceCandidate], *, pretrained: bool = True, seed: int = 0) -> None:
        self.features = space.features
        self.seed = seed
        self.base: Floats = np.zeros(len(space))
        if pretrained:
            self.base = self._fitted(-np.log(space.predictions.time_s), np.arange(len(space)), PRETRAINING)
        self.correction: Floats = np.zeros(len(space))
        chosen = np.random.default_rng(seed).permutation(len(space))
        self.anchors: Integers = chosen[: ANCHORS if pretrained else 0]

    def update(self, times_us: Mapping[int, float | None]) -> None:
        """Learn from all that was tried so far: microseconds by candidate, None for those that failed."""
        places = np.array(sorted(times_us), dtype=np.int64)
        tried = [times_us[int(place)] for place in places]
        ran = [time for time in tried if time is not None]
        slowest = FAILURE_FACTOR * max(ran) if ran else 0.0
        if ran:
            off = -np.log([1e-6 * (slowest if time is None else time) for time in tried]) - self.base[places]
            middle = float(np.median(off[[time is not None for time in tried]]))
        else:
            off, middle = np.full(len(places), -np.log(FAILURE_FACTOR)), 0.0
        labels = np.concatenate([off - middle, np.zeros(len(self.anchors))])
        weights = np.concatenate([np.ones(len(places)), np.full(len(self.anchors), ANCHOR_WEIGHT)])
        self.correction = self._fitted(labels, np.concatenate([places, self.anchors]), CORRECTION, weights) + middle

    @property
    def scores(self) -> Floats:
        """Of every candidate of the space."""
        return self.base + self.correction

    def _fitted(
        self, labels: Floats, places: Integers, settings: TreeSettings, weights: Floats | None = None
    ) -> Floats:
        """What an ensemble that has learnt ``labels`` at ``places`` says of the whole space."""
        middle = float(labels.mean()) if weights is None else 0.0
        rounds = CORRECTION_ROUNDS if settings is CORRECTION else PRETRAINING_ROUNDS
        fixed = {**settings, "seed": self.seed, "nthread": 1, "base_score": 0.0, "objective": "reg:squarederror"}
        data = xgboost.DMatrix(self.features[places], label=labels - middle, weight=weights, nthread=1)
        booster = xgboost.train(fixed, data, num_boost_round=rounds)
        said = booster.predict(xgboost.DMatrix(self.features, nthread=1))
        return np.asarray(said, dtype=np.float64) + middle
