"""Numbering of candidates by levels."""

from __future__ import annotations

import numpy as np

from tvm_ext.autotune.gpu_space import LevelGrid

GRID = LevelGrid((3, 4, 5), np.array([0, 7, 21, 33, 59]))


def test_a_legal_combination_has_its_place_and_another_none() -> None:
    assert GRID.place((0, 0, 0)) == 0
    assert GRID.place((1, 2, 3)) == 3  # 1 * 20 + 2 * 5 + 3 = 33
    assert GRID.place((2, 3, 4)) == 4
    assert GRID.place((2, 3, 3)) is None  # 58: between two that are legal
    assert GRID.place((0, 0, 1)) is None


def test_neighbours_are_places_of_this_grid_and_repeat_with_the_seed() -> None:
    start = np.arange(5).repeat(200)
    moved = GRID.neighbours(start, np.random.default_rng(1))
    assert np.array_equal(moved, GRID.neighbours(start, np.random.default_rng(1)))
    assert set(moved.tolist()) == set(range(5))
    levels = np.stack(np.unravel_index(GRID.codes, GRID.sizes), axis=1)
    assert ((levels[start] != levels[moved]).sum(axis=1) <= 2).all()
    assert (start != moved).any()
