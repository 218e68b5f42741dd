"""Numbers that may be arrays with one entry a candidate, so that one equation serves one kernel and thousands of them.

Plain numbers are handled by Python: an array of one would make a model that is asked for one kernel ten times slower.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from math import sqrt
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Integers: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float64]
Quantity: TypeAlias = float | NDArray[Any]


def larger(one: Quantity, other: Quantity) -> Quantity:
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return np.maximum(one, other)
    return max(one, other)


def smaller(one: Quantity, other: Quantity) -> Quantity:
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return np.minimum(one, other)
    return min(one, other)


def largest(*values: Quantity) -> Quantity:
    return reduce(larger, values)


def chosen(condition: bool | NDArray[Any], one: Quantity, other: Quantity) -> Quantity:
    """``one`` where the condition holds, else ``other``; both have been computed."""
    if isinstance(condition, np.ndarray):
        return np.where(condition, one, other)
    return one if condition else other


def anywhere(condition: bool | NDArray[Any]) -> bool:
    """Whether the condition holds for one of them."""
    return bool(condition.any()) if isinstance(condition, np.ndarray) else condition


def whole_quotient(dividend: Quantity, divisor: Quantity) -> Quantity:
    """`arithmetic.ceil_div` of quantities: 7 rows in tiles of 3 are 3 tiles."""
    return -(-dividend // divisor)


def most_that(holds: Callable[[Any], Any], too_many: Any) -> Any:
    """By halving, the largest whole number below ``too_many`` for which ``holds``; 1 is taken to, whatever it says."""
    fits: Any = 1
    if not isinstance(too_many, np.ndarray):
        while too_many - fits > 1:
            count = (fits + too_many) // 2
            fits, too_many = (count, too_many) if holds(count) else (fits, count)
        return fits
    while (too_many - fits > 1).any():
        count = (fits + too_many) // 2
        enough = holds(count)
        fits, too_many = np.where(enough, count, fits), np.where(enough, too_many, count)
    return fits


def square_root(value: Quantity) -> Quantity:
    """The same bits of an array's entry as of a plain number, which ``** 0.5`` does not promise."""
    return np.sqrt(value) if isinstance(value, np.ndarray) else sqrt(value)
