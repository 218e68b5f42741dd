"""Where values of a schedule lie: those that may live at the same time share no byte."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest

from tvm_ext.relay_passes.rtask_memory import ALIGNMENT, _Lives, _SingleLives, in_order_of_data, place_values, spans_of


def ancestors(predecessors: list[list[int]]) -> list[set[int]]:
    found: list[set[int]] = []
    for before in predecessors:
        found.append(set(before).union(*(found[item] for item in before)))
    return found


@pytest.mark.parametrize("seed", range(8))
def test_in_an_order_of_data_only_what_data_orders_shares_bytes(seed: int) -> None:
    generator = np.random.default_rng(seed)
    count = 40
    predecessors = [
        sorted({int(item) for item in generator.integers(0, number, 2)}) if number else [] for number in range(count)
    ]
    touched = [
        [writer, *(reader for reader in range(count) if writer in predecessors[reader])] for writer in range(count)
    ]
    sizes = [int(size) for size in generator.integers(1, 500, count)]
    offsets, total = place_values(sizes, touched, spans_of(in_order_of_data(predecessors), count))
    earlier = ancestors(predecessors)

    def is_before(one: int, other: int) -> bool:
        return all(set(touched[one]) <= earlier[operator] for operator in touched[other])

    together = [pair for pair in combinations(range(count), 2) if not is_before(*pair) and not is_before(*pair[::-1])]
    for one, other in together:
        assert offsets[one] + sizes[one] <= offsets[other] or offsets[other] + sizes[other] <= offsets[one]
    assert total < sum(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes), "some do share"
    assert total >= max(offset + size for offset, size in zip(offsets, sizes, strict=True))


def test_values_of_a_long_chain_lie_in_three_places() -> None:
    """Each operator reads what the one before has written, and writes beside it."""
    count = 300
    spans = spans_of(in_order_of_data([[number - 1] if number else [] for number in range(count)]), count)
    touched = [[number, number + 1] for number in range(count - 1)]
    offsets, total = place_values([64] * (count - 1), touched, spans)
    assert total <= 3 * ALIGNMENT
    assert all(one != other for one, other in pairwise(offsets))


@pytest.mark.parametrize("seed", range(4))
def test_lives_of_one_entry_each_are_those_of_any_number(seed: int) -> None:
    generator = np.random.default_rng(seed)
    starts, ends = generator.integers(0, 2, (30, 21)), generator.integers(0, 20, (30, 21)) < 2
    ends[:, 20] |= ~ends.any(axis=1)
    found, plain = _SingleLives(starts, ends.astype(np.int64)), _Lives(starts, ends.astype(np.int64))
    others = np.arange(0, 30, 2)
    lives = [found.beside(value, others).tolist() for value in range(30)]
    assert lives == [plain.beside(value, others).tolist() for value in range(30)]
    assert any(0 < len(item) < len(others) for item in lives)
