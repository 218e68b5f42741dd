"""Each function errs by no more than docs/numerics.md says, at special values not at all; the tables name them all."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.support.numeric_kernels import KERNELS, kernel_errors
from tests.support.numerics import FUNCTIONS, HALF_ULPS, HALVES, TYPES, errors_ulp, measure

pytestmark = pytest.mark.optimised  # the errors of what users run

PAGE = Path(__file__).resolve().parents[3] / "docs" / "numerics.md"
# The formula has no value there: 0 * inf, inf / inf.
UNDEFINED = {"Mish", "Gelu", "Gelu tanh", "HardSwish", "Softsign"}


# An everyday run takes the first.
IN_TURN = ("float32", "float64", "float16", "bfloat16")
TOLERANCE = {"float64": 1e-15, "float32": 1e-6, "float16": 1e-3, "bfloat16": 8e-3}


def _allowed(name: str, dtype: str) -> float:
    if dtype in HALVES:
        return HALF_ULPS
    return FUNCTIONS[name].double_ulps if dtype == "float64" else FUNCTIONS[name].ulps


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("dtype", IN_TURN)
def test_errors_and_special_values(dtype: str) -> None:
    found = measure(count=2000, dtype=dtype)
    assert [(item.name, item.largest_ulp) for item in found if not item.largest_ulp <= _allowed(item.name, dtype)] == []
    for item in found:
        assert np.isnan(item.special[-1]) or item.name == "Pow 0"
        for actual, expected in zip(item.special, item.expected_special, strict=True):
            if not (np.isnan(expected) and item.name in UNDEFINED):
                np.testing.assert_allclose(actual, expected, rtol=TOLERANCE[dtype], err_msg=item.name)


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("dtype", IN_TURN)
def test_errors_of_kernels(dtype: str) -> None:
    position = [*TYPES].index(dtype)
    errors = kernel_errors(dtype)
    assert {name: error for name, error in errors.items() if not error <= KERNELS[name].ulps[position]} == {}


def _rows(count: int) -> dict[str, list[str]]:
    """The tables' rows of so many columns, by their first cell."""
    rows = [line.strip("| ").split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    return {row[0]: row[1:] for row in rows if len(row) == count and row[0] in {**FUNCTIONS, **KERNELS}}


def test_the_page_has_every_function_with_an_error_within_its_bound() -> None:
    singles, others = _rows(9), _rows(7)
    assert singles.keys() == FUNCTIONS.keys()
    assert others.keys() == {**FUNCTIONS, **KERNELS}.keys()
    for name, function in FUNCTIONS.items():
        assert float(singles[name][1]) <= float(singles[name][2]) == function.ulps
        _, wide, bound, *halves, half_bound = map(str, others[name])
        assert float(wide) <= float(bound) == function.double_ulps
        assert max(map(float, halves)) <= float(half_bound) == HALF_ULPS
    for name, kernel in KERNELS.items():
        assert tuple(map(float, others[name][-1].split(","))) == kernel.ulps
        assert all(float(error) <= bound for error, bound in zip(others[name][1:-1], kernel.ulps, strict=True))


def test_no_type_is_left_out() -> None:
    assert sorted(IN_TURN) == sorted(TYPES)


def test_an_ulp_is_the_distance_to_the_next_number() -> None:
    one = np.array([1.0], np.float32)
    assert errors_ulp(one + np.spacing(one), one.astype(np.longdouble))[0] == 1
