"""Each function errs by no more than docs/numerics.md says, at special values not at all; the table names them all."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.support.numerics import FUNCTIONS, HALF_ULPS, errors_ulp, half_error_ulp, measure

PAGE = Path(__file__).resolve().parents[3] / "docs" / "numerics.md"
# float64's formula has no value there: 0 * inf, inf / inf.
UNDEFINED = {"Mish", "Gelu", "Gelu tanh", "HardSwish", "Softsign"}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_errors_and_special_values(name: str) -> None:
    found = measure(name, count=2000)
    assert found.largest_ulp <= FUNCTIONS[name].ulps
    assert np.isnan(found.special[-1]) or name == "Pow 0"
    for actual, expected in zip(found.special, found.expected_special, strict=True):
        if not (np.isnan(expected) and name in UNDEFINED):
            np.testing.assert_allclose(actual, expected, rtol=1e-6)


@pytest.mark.parametrize("name", ["Exp", "Tanh", "Mish", "Sin", "Atan", "HardSigmoid", "Pow 0.5"])
def test_errors_of_every_half(name: str) -> None:
    assert half_error_ulp(name) <= HALF_ULPS


def test_the_page_has_every_function_with_an_error_within_its_bound() -> None:
    rows = [line.split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    written = {row[0].removeprefix("| "): (float(row[2]), float(row[3])) for row in rows if row[0][2:] in FUNCTIONS}
    assert written.keys() == FUNCTIONS.keys()
    for name, (largest, allowed) in written.items():
        assert allowed == FUNCTIONS[name].ulps
        assert largest <= allowed


def test_an_ulp_is_the_distance_to_the_next_number() -> None:
    one = np.array([1.0], np.float32)
    assert errors_ulp(one + np.spacing(one), one.astype("f8"))[0] == 1
