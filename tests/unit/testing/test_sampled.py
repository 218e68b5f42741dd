"""What an everyday run takes of the cases of a test, and that pytest is told."""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from dataclasses import dataclass, field

import pytest

from tests.support import sampled


def test_each_value_of_each_parameter_is_taken() -> None:
    cases = [{"size": size, "stride": stride, "flag": flag} for size in range(5) for stride in (1, 2) for flag in "ab"]
    taken = [cases[number] for number in sampled.covering(cases)]
    assert {pair for case in taken for pair in case.items()} == {pair for case in cases for pair in case.items()}
    assert len(taken) == 5


@pytest.mark.sampled
@pytest.mark.parametrize("first", [1, 2, 3])
@pytest.mark.parametrize("second", [[4], [5]])
def test_values(first: int, second: list[int]) -> None:
    assert first in (1, 2, 3) and second in ([4], [5])


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("number", [*range(7), pytest.param(7, marks=pytest.mark.slow)])
def test_thirds(number: int) -> None:
    assert number < 8


@dataclass
class Module:
    """What is collected of a file, and which of it has the marker."""

    slow: list[str] = field(default_factory=list)
    count: int = 0

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        self.count = len(items)
        self.slow = [item.name for item in items if item.get_closest_marker("slow")]


@pytest.mark.parametrize(("name", "left_out", "of"), [("test_values", 3, 6), ("test_thirds", 5, 8)])
def test_others_are_marked_slow(name: str, left_out: int, of: int) -> None:
    """Asked of this file itself, as pytest collects it with the tests' hooks."""
    seen = Module()
    with redirect_stdout(io.StringIO()):
        pytest.main([f"{__file__}::{name}", "--collect-only", "-q", "-p", "no:xdist"], plugins=[seen])
    assert (len(seen.slow), seen.count) == (left_out, of)
