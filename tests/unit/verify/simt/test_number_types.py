"""Rounding and conversion against exact rational arithmetic."""

from __future__ import annotations

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tvm_ext.errors import InputError
from tvm_ext.verify.simt.number_types import is_float, storage_dtype, to_dtype

# (bits of the fraction, smallest exponent, largest finite value)
FORMATS = {
    "float16": (10, -14, Fraction(65504)),
    "bfloat16": (7, -126, (2 - Fraction(1, 128)) * 2**127),
    "float32": (23, -126, (2 - Fraction(1, 2**23)) * 2**127),
}


def _nearest(value: Fraction, name: str) -> float:
    """``value`` rounded to nearest, ties to even, in a binary format, by rational arithmetic."""
    fraction_bits, smallest, largest = FORMATS[name]
    if value == 0:
        return 0.0
    magnitude, exponent = abs(value), smallest
    while magnitude >= Fraction(2) ** (exponent + 1):
        exponent += 1
    unit = Fraction(2) ** (exponent - fraction_bits)
    rounded = round(magnitude / unit) * unit  # Python rounds a Fraction half to even
    if rounded > largest:
        return float("inf") if value > 0 else float("-inf")
    return float(rounded if value > 0 else -rounded)


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "int8", "uint8", "int32", "bool", "float8_e4m3fn"])
def test_every_stored_type_has_a_numpy_type(name: str) -> None:
    assert np.zeros(2, storage_dtype(name)).dtype.name == name


def test_an_unknown_type_is_refused_by_name() -> None:
    with pytest.raises(InputError, match="elements of type int4"):
        storage_dtype("int4")


def test_half_precision_types_are_floats() -> None:
    assert all(is_float(storage_dtype(name)) for name in ("float16", "bfloat16", "float8_e5m2", "float64"))
    assert not any(is_float(storage_dtype(name)) for name in ("int8", "bool", "uint32"))


@given(st.floats(-1e5, 1e5, allow_nan=False) | st.floats(allow_nan=False, allow_infinity=False))
def test_conversion_to_floats_rounds_once(value: float) -> None:
    for name in FORMATS:
        assert float(to_dtype(np.float64(value), name)) == _nearest(Fraction(value), name)


@pytest.mark.parametrize("value", [1 + 2**-8 + 2**-40, 1 + 2**-8 - 2**-40, -(1 + 2**-8 + 2**-50), 3 * 2**-9 + 2**-60])
def test_conversion_to_bfloat16_does_not_round_twice(value: float) -> None:
    assert float(to_dtype(np.float64(value), "bfloat16")) == _nearest(Fraction(value), "bfloat16")


@given(st.integers(-(2**31), 2**31 - 1))
def test_integers_become_floats_in_one_rounding(value: int) -> None:
    for name in FORMATS:
        assert float(to_dtype(np.int32(value), name)) == _nearest(Fraction(value), name)


@pytest.mark.parametrize(
    ("value", "name", "expected"),
    [
        (2.9, "int32", 2), (-2.9, "int32", -2), (3e9, "int32", 2**31 - 1), (-3e9, "int32", -(2**31)),
        (float("nan"), "int32", 0), (float("inf"), "int64", 2**63 - 1), (1e30, "int64", 2**63 - 1),
        (300.7, "int8", 44), (-1.0, "uint8", 255), (2147483647.0, "int32", 2147483647),
    ],
)  # fmt: skip
def test_floats_become_integers_towards_zero(value: float, name: str, expected: int) -> None:
    assert int(to_dtype(np.float64(value), name)) == expected


def test_integers_wrap_and_truth_is_not_zero() -> None:
    assert to_dtype(np.array([300, -129]), "int8").tolist() == [44, 127]
    assert to_dtype(np.array([0.0, -0.0, 0.5, np.nan]), "bool").tolist() == [False, False, True, True]
    assert to_dtype(np.array([0, 256]), "bool").tolist() == [False, True]
    assert to_dtype(np.array([0, 2], ml_dtypes.bfloat16), "bool").tolist() == [False, True]


def test_special_values_stay() -> None:
    values = np.array([np.nan, np.inf, -np.inf, -0.0])
    for name in FORMATS:
        got = to_dtype(values, name).astype(np.float64)
        assert np.isnan(got[0])
        assert got[1:3].tolist() == [np.inf, -np.inf]
        assert np.signbit(got[3])
