"""Expressions of floats that stock TVM's simplifier would change, what they are in NumPy, and telling values."""

from __future__ import annotations

import ml_dtypes  # noqa: F401 - gives NumPy bfloat16
import numpy as np
from tvm import te

from tests.unit.kernels import from_te
from tvm_ext._tvm import BufferStore, structural_map, tirx

VALUES = [1, -1, 0.0, -0.0, np.inf, -np.inf, np.nan, 1e30, 2.5, -3.5, 1e-40, 16777217, 1e8, np.nan, 2.5, -2]
OTHERS = [2, -3, np.nan, 1, np.inf, np.nan, np.nan, 1, 2.5, -np.inf, 0, 1, 1, 5, 2.5, -3e38]


def _truth(condition, x):
    """A condition as 0 or 1 of x's type, by way of an integer."""
    return tirx.Cast(str(x.ty.dtype), tirx.Cast("int32", condition))


def _constant(value):
    return lambda x: tirx.FloatImm(str(x.ty.dtype), value)


ROUNDERS = {"float16": 1536.0, "bfloat16": 192.0, "float32": 12582912.0, "float64": 6755399441055744.0}
"""1.5 times the first number that has no neighbour less than 1 away: x + C - C rounds x to an integer."""


def _rounder(x):
    return tirx.FloatImm(str(x.ty.dtype), ROUNDERS[str(x.ty.dtype)])


def _as_is(value, x):
    return np.asarray(value, x.dtype)


ZERO = _constant(0.0)
ONE, TWO, THREE = _constant(1.0), _constant(2.0), _constant(3.0)

# name: (expression of x and y, the same in NumPy)
EXPRESSIONS = {
    "x + C - C": (
        lambda x, y: tirx.Sub(tirx.Add(x, _rounder(x)), _rounder(x)),
        lambda x, y: (x + _as_is(ROUNDERS[str(x.dtype)], x)) - _as_is(ROUNDERS[str(x.dtype)], x),
    ),
    "x + y - x": (lambda x, y: tirx.Sub(tirx.Add(x, y), x), lambda x, y: (x + y) - x),
    "x + y - y": (lambda x, y: tirx.Sub(tirx.Add(x, y), y), lambda x, y: (x + y) - y),
    "y + x - y": (lambda x, y: tirx.Sub(tirx.Add(y, x), y), lambda x, y: (y + x) - y),
    "x - (x + y)": (lambda x, y: tirx.Sub(x, tirx.Add(x, y)), lambda x, y: x - (x + y)),
    "x - (y + x)": (lambda x, y: tirx.Sub(x, tirx.Add(y, x)), lambda x, y: x - (y + x)),
    "x - x": (lambda x, y: tirx.Sub(x, x), lambda x, y: x - x),
    "x * 0": (lambda x, y: tirx.Mul(x, ZERO(x)), lambda x, y: x * 0),
    "x + 0": (lambda x, y: tirx.Add(x, ZERO(x)), lambda x, y: x + 0),
    "0 / x": (lambda x, y: tirx.Div(ZERO(x), x), lambda x, y: 0 / x),
    "x / 0": (lambda x, y: tirx.Div(x, ZERO(x)), lambda x, y: x / 0),
    "x == x": (lambda x, y: _truth(tirx.EQ(x, x), x), lambda x, y: x == x),
    "x != x": (lambda x, y: _truth(tirx.NE(x, x), x), lambda x, y: x != x),
    "not x == x": (lambda x, y: _truth(tirx.Not(tirx.EQ(x, x)), x), lambda x, y: x != x),
    "not x < y": (lambda x, y: _truth(tirx.Not(tirx.LT(x, y)), x), lambda x, y: ~(x < y)),
    "not x >= y": (lambda x, y: _truth(tirx.Not(tirx.GE(x, y)), x), lambda x, y: ~(x >= y)),
    "not (x < y and y > 1)": (
        lambda x, y: _truth(tirx.Not(tirx.And(tirx.LT(x, y), tirx.GT(y, ONE(x)))), x),
        lambda x, y: ~((x < y) & (y > 1)),
    ),
    "x < y or y <= x": (lambda x, y: _truth(tirx.Or(tirx.LT(x, y), tirx.LE(y, x)), x), lambda x, y: (x < y) | (y <= x)),
    "choice in a choice": (
        lambda x, y: tirx.Select(tirx.LT(x, y), ONE(x), tirx.Select(tirx.LE(y, x), TWO(x), THREE(x))),
        lambda x, y: np.where(x < y, 1, np.where(y <= x, 2, 3)),
    ),
    "condition in a condition": (
        lambda x, y: tirx.if_then_else(tirx.LT(x, y), ONE(x), tirx.if_then_else(tirx.LE(y, x), TWO(x), THREE(x))),
        lambda x, y: np.where(x < y, 1, np.where(y <= x, 2, 3)),
    ),
    "where(x == x, x, 0)": (lambda x, y: tirx.Select(tirx.EQ(x, x), x, ZERO(x)), lambda x, y: np.where(x == x, x, 0)),
    "max(x, y)": (lambda x, y: tirx.Max(x, y), np.maximum),
    "min(x, y)": (lambda x, y: tirx.Min(x, y), np.minimum),
    "max(x, 0)": (lambda x, y: tirx.Max(x, ZERO(x)), lambda x, y: np.maximum(x, 0)),
    "max(0, x)": (lambda x, y: tirx.Max(ZERO(x), x), lambda x, y: np.maximum(x, 0)),
    "min(max(x, 0), 3)": (lambda x, y: tirx.Min(tirx.Max(x, ZERO(x)), THREE(x)), lambda x, y: np.clip(x, 0, 3)),
    "max(x + y, x * y)": (lambda x, y: tirx.Max(tirx.Add(x, y), tirx.Mul(x, y)), lambda x, y: np.maximum(x + y, x * y)),
}
SIGN_OF_ZERO_IS_FREE = ("max", "min")


def function_of(expression, dtype, count):
    """``expression`` as an operator of x and y, put in as it is: operators of TE would compute with constants."""
    x, y = (te.placeholder((count,), dtype, name) for name in "xy")
    func = from_te(x, y, te.compute((count,), lambda i: x[i] + y[i], "z"))

    def put(store):
        return BufferStore(store.buffer, expression(store.value.a, store.value.b), list(store.indices))

    return func.with_body(structural_map(func.body, (BufferStore, put)))


def operands(dtype):
    """Values of x and y: vectors on any machine, and a remainder."""
    with np.errstate(all="ignore"):
        x, y = (np.array(values * 3, dtype) for values in (VALUES, OTHERS))
    return x[:-3], y[:-3]


def assert_same(name, actual, expected):
    """Equal values, NaN where NaN is, and equal signs of zeros where they are not free."""
    actual, expected = actual.astype("f8"), expected.astype("f8")  # NumPy does not know bfloat16's NaN
    np.testing.assert_array_equal(actual, expected)
    if not name.startswith(SIGN_OF_ZERO_IS_FREE):
        numbers = ~np.isnan(expected)
        np.testing.assert_array_equal(np.signbit(actual[numbers]), np.signbit(expected[numbers]))
