"""Random quantised operators and chains against ONNX Runtime in float32, to one step of their results."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.dot_rows import use_models_of_missing_instructions
from tests.support.random_cases import WrongResultError
from tests.support.random_quantised import check, dynamic
from tests.support.random_quantised.__main__ import FAMILY
from tests.support.random_quantised.check import DYNAMIC_EVERY, Number
from tests.support.random_quantised.draw import draw_case

EVERYDAY = 8


@pytest.mark.parametrize("index", range(EVERYDAY))
def test_agrees_with_onnx_runtime(index: int, monkeypatch: Any) -> None:
    use_models_of_missing_instructions(monkeypatch)
    result = check.attempt(Number(seed=0, index=index))
    assert result.passed, f"{result.outcome}: {result.problem}"


@pytest.mark.slow
def test_a_thousand_agree_with_onnx_runtime() -> None:
    assert all(result.passed for result in FAMILY.results(Number(seed=1, index=index) for index in range(1000)))


def test_the_same_number_draws_the_same_case() -> None:
    first, second = (draw_case(3, 5) for _ in range(2))
    assert str(first) == str(second)
    assert all((first.data[name] == second.data[name]).all() for name in first.data)


def test_what_is_wrong_is_found() -> None:
    """Two steps off in one place, and a product of floats with one weight forgotten."""
    index = next(index for index in range(60) if not draw_case(0, index).layers[-1][0].exact)
    case = draw_case(0, index)
    made, _ = check.run(case)
    name = case.layers[-1][1].name
    flat = made[name].reshape(-1)
    flat[0] = flat[0] + 9 if flat[0] < 100 else flat[0] - 9
    with pytest.raises(WrongResultError, match="off by more than"):
        check.compare(case, made)
    floats = dynamic.draw(0, DYNAMIC_EVERY - 1)
    with pytest.raises(WrongResultError, match="off by"):
        dynamic.compare(floats, np.asarray(dynamic.expected(floats) * 1.001))
