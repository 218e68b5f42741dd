"""Which candidates to try together: the most promising ones, as far as they do not say the same.

A model is off by about as much for candidates that resemble each other, so that a batch of the highest scores is one
guess five times over. Each candidate is therefore worth its score and a share of what is still unknown of it: the
posterior deviation of a Gaussian process over standardised features (batched upper confidence bounds; Desautels et al.,
JMLR 2014). What a batch takes counts as known for the rest of it, before anything is measured.
"""

from __future__ import annotations

import numpy as np

from tvm_ext.support.quantities import Floats

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
