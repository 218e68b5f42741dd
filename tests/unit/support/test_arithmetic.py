"""Whole numbers rounded up."""

from __future__ import annotations

from fractions import Fraction
from math import ceil

from hypothesis import given
from hypothesis import strategies as st

from tvm_ext.support.arithmetic import ceil_div


@given(dividend=st.integers(-(2**70), 2**70), divisor=st.integers(1, 2**40))
def test_the_quotient_is_rounded_up_exactly(dividend: int, divisor: int) -> None:
    """Beyond 2**53 too, where a division of floats is not exact."""
    assert ceil_div(dividend, divisor) == ceil(Fraction(dividend, divisor))
