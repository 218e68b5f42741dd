"""The marker ``sampled``: an everyday run takes some of a test's cases, ``--slow`` takes all.

``@pytest.mark.sampled`` takes as many as show each value of each parameter once, instead of all combinations;
``@pytest.mark.sampled(every=3)`` takes each third case.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import pytest


def mark_left_out(items: Iterable[pytest.Item]) -> None:
    """Give the marker ``slow`` to those cases of sampled tests that an everyday run leaves out."""
    for cases in _cases_of_tests(items):
        for item in left_out(cases, [_values(item) for item in cases]):
            item.add_marker(pytest.mark.slow)


def left_out(cases: Sequence[Any], values: Sequence[dict[str, Hashable]]) -> list[Any]:
    """The cases that are not taken, by the marker of the first."""
    every = cases[0].get_closest_marker("sampled").kwargs.get("every")
    taken = set(range(0, len(cases), every)) if every else covering(values)
    return [case for number, case in enumerate(cases) if number not in taken]


def covering(values: Sequence[dict[str, Hashable]]) -> set[int]:
    """The numbers of cases that together show each value of each parameter; the most unseen ones come first."""
    unseen = {pair for case in values for pair in case.items()}
    taken = set()
    while unseen:
        best = max(range(len(values)), key=lambda number: len(unseen & values[number].items()))
        taken.add(best)
        unseen -= values[best].items()
    return taken


def _cases_of_tests(items: Iterable[pytest.Item]) -> list[list[pytest.Item]]:
    """The cases of each sampled test, without those that are slow by themselves."""
    tests: dict[tuple[str, str], list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sampled") and not item.get_closest_marker("slow"):
            tests.setdefault((str(item.path), item.nodeid.partition("[")[0]), []).append(item)
    return list(tests.values())


def _values(item: Any) -> dict[str, Hashable]:
    """Each parameter's value; of one that cannot be hashed, its identity: combinations share the object."""
    return {name: value if _hashes(value) else id(value) for name, value in item.callspec.params.items()}


def _hashes(value: Any) -> bool:
    """Asked by trying: a tuple or a frozen record looks as if it did, whatever it holds."""
    try:
        hash(value)
    except TypeError:
        return False
    return True
