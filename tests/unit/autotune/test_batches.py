"""Batches of candidates that are promising and do not say the same."""

from __future__ import annotations

import numpy as np

from tvm_ext.autotune.cost_model import LENGTH, NUGGET, Unknown, spread, standardised


def test_what_was_tried_and_its_neighbours_are_known() -> None:
    """The deviations are those of a Gaussian process, by its own equations."""
    points = np.random.default_rng(0).normal(size=(40, 3))
    unknown = Unknown(points)
    tried = [3, 17, 4, 20]
    for row in tried:
        unknown.learn(row)
    alike = np.exp(-((points[:, None] - points[None]) ** 2).mean(axis=2) / (2 * LENGTH**2))
    seen = alike[tried]
    expected = 1 - np.einsum("ij,ij->j", seen, np.linalg.solve(alike[np.ix_(tried, tried)] + NUGGET * np.eye(4), seen))
    assert np.allclose(unknown.variance, expected, atol=1e-9)
    assert unknown.variance[tried].max() < NUGGET
    assert unknown.deviation.max() <= 1


def test_a_batch_without_doubt_is_that_of_the_highest_scores() -> None:
    points, scores = np.zeros((6, 2)), np.array([0.1, 0.5, 0.3, 0.2, 0.4, 0.0])
    assert spread(points, 0, scores, 0.0, 3) == [1, 4, 2]


def test_a_batch_with_doubt_goes_elsewhere_after_the_first() -> None:
    """Four twins of the best and one that is nearly as good, far away."""
    points = np.array([[0.0], [0.01], [0.02], [0.03], [4.0]])
    scores = np.array([1.0, 0.99, 0.98, 0.97, 0.9])
    assert spread(points, 0, scores, 0.2, 2) == [0, 4]
    assert spread(points, 0, scores, 0.01, 2) == [0, 1]


def test_what_was_tried_before_is_not_taken_again() -> None:
    points = np.array([[0.0], [0.0], [3.0], [6.0]])
    assert spread(points, 1, np.array([1.0, 0.9, 0.8]), 0.5, 2) == [2, 3]
    assert spread(points, 1, np.array([1.0, 0.9, 0.8]), 0.5, 9) == [2, 3, 1]
    assert spread(points, 4, np.array([]), 0.5, 2) == []


def test_features_that_are_the_same_for_all_say_nothing() -> None:
    scaled = standardised(np.array([[1.0, 5.0], [3.0, 5.0]]))
    assert scaled.tolist() == [[-1.0, 0.0], [1.0, 0.0]]
