"""Spaces whose candidates are listed: places, texts, neighbours, and searches that move in them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import pytest

from tvm_ext.autotune.cost_model import TileCostModel
from tvm_ext.autotune.search import Annealed, SpaceSearch
from tvm_ext.autotune.spaces import ListedSpace
from tvm_ext.errors import IllegalRewrite
from tvm_ext.records.measurement import Trial
from tvm_ext.records.serialise import to_json


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    size: int
    word: str
    truth: bool

    @property
    def configuration(self) -> str:
        return to_json(self)


CANDIDATES = [
    Candidate(size=size, word=word, truth=truth) for size, word, truth in product(range(1, 30), "abc", (True, False))
]
SPACE = ListedSpace(CANDIDATES, [1.0 + abs(item.size - 12) + (item.word == "b") for item in CANDIDATES])


def test_places_and_texts() -> None:
    assert [SPACE.index(item.configuration) for item in CANDIDATES] == list(range(len(SPACE)))
    other = replace(CANDIDATES[0], size=99)
    wrong = ("", "{}", "[1]", other.configuration, '{"size":1.0,"word":"a","truth":true}')
    assert [SPACE.index(text) for text in wrong] == [None] * 5
    assert SPACE[int(SPACE.predictions.ranking[0])].size == 12
    with pytest.raises(IllegalRewrite, match="one tile alone"):
        ListedSpace(CANDIDATES[:1], [1.0])


def test_features_tell_all_candidates_apart() -> None:
    assert SPACE.features.shape == (len(SPACE), 4)  # a size, two of three words, a truth
    assert len(np.unique(SPACE.features, axis=0)) == len(SPACE)
    assert np.isfinite(SPACE.features).all()


def test_levels_of_different_lengths_stand_for_the_fields() -> None:
    space = ListedSpace(CANDIDATES[:4], [1.0] * 4, [(1, 2), (1, 3), (1, 2, 5), (1, 3, 5)])
    assert space.features.shape == (4, 2)  # what all have in common is no feature
    moved = space.neighbours(np.zeros(200, dtype=np.int64), np.random.default_rng(0))
    assert set(moved.tolist()) == {0, 1, 2}


def test_neighbours_differ_in_one_field_or_share_one() -> None:
    start = np.arange(len(SPACE)).repeat(5)
    moved = SPACE.neighbours(start, np.random.default_rng(3))
    assert np.array_equal(moved, SPACE.neighbours(start, np.random.default_rng(3)))
    assert len(np.unique(moved)) > len(SPACE) / 2
    for one, other in zip(start, moved, strict=True):
        a, b = SPACE[int(one)], SPACE[int(other)]
        same = [a.size == b.size, a.word == b.word, a.truth == b.truth]
        assert sum(same) >= 1


def test_searches_move_in_it() -> None:
    """Times of another machine than the predicted ones."""
    times = SPACE.predictions.time_s * np.array([1.3 if item.size % 4 == 0 else 1.0 for item in CANDIDATES])
    search = SpaceSearch(SPACE, Annealed(TileCostModel(SPACE)), seed=1)
    for _ in range(5):
        asked = search.ask(4)
        places = [SPACE.index(item.configuration) for item in asked]
        search.tell(
            Trial(configuration=item.configuration, outcome="ok", times_us=(1e6 * float(times[place or 0]),))
            for item, place in zip(asked, places, strict=True)
        )
    assert len(search.known) == 20
    assert search.best is not None
    assert 1e6 * times.min() / search.best[1] > 0.9
