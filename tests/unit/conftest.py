"""What all tests of single modules have: in an everyday run, machine code that is made quickly."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.support import quick_code


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Whole models, random operators and attacks, and all tests of ``--slow``, run the code that users get."""
    is_everyday = "not slow" in str(item.config.getoption("markexpr"))
    is_unit = item.path.is_relative_to(Path(__file__).parent)  # pytest asks this hook for every test of the session
    is_quick = is_everyday and is_unit and item.get_closest_marker("optimised") is None
    with quick_code.unoptimised() if is_quick else contextlib.nullcontext():
        return (yield)
