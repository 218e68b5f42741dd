"""Floats are no reals: kernels of expressions that stock TVM's simplifier would change, against NumPy, bit by bit."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import te

from tests.unit.kernels import constructed, from_te, run
from tvm_ext._tvm import BufferStore, structural_map, tirx
from tvm_ext.tir_passes.exact_floats import keep_floats, pass_nan_on

VALUES = [1, -1, 0.0, -0.0, np.inf, -np.inf, np.nan, 1e30, 2.5, -3.5, 1e-40, 16777217, 1e8, np.nan, 2.5, -2]
OTHERS = [2, -3, np.nan, 1, np.inf, np.nan, np.nan, 1, 2.5, -np.inf, 0, 1, 1, 5, 2.5, -3e38]
DTYPES = ["float16", "float32", "float64"]


def _truth(condition, x):
    """A condition as 0 or 1 of x's type, by way of an integer."""
    return tirx.Cast(str(x.ty.dtype), tirx.Cast("int32", condition))


def _constant(value):
    return lambda x: tirx.FloatImm(str(x.ty.dtype), value)


BIG = _constant(3072.0)  # beside it half precision holds integers only
ZERO = _constant(0.0)
ONE, TWO, THREE = _constant(1.0), _constant(2.0), _constant(3.0)

# name: (expression of x and y, the same in NumPy)
EXPRESSIONS = {
    "x + C - C": (lambda x, y: tirx.Sub(tirx.Add(x, BIG(x)), BIG(x)), lambda x, y: (x + 3072) - 3072),
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
    "x < y or y <= x": (
        lambda x, y: _truth(tirx.Or(tirx.LT(x, y), tirx.LE(y, x)), x),
        lambda x, y: (x < y) | (y <= x),
    ),
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
    "max(x + y, x * y)": (
        lambda x, y: tirx.Max(tirx.Add(x, y), tirx.Mul(x, y)),
        lambda x, y: np.maximum(x + y, x * y),
    ),
}
SIGN_OF_ZERO_IS_FREE = ("max", "min")


def kernel_of(expression, dtype, count):
    """The constructed kernel of ``expression``, put in as it is: operators of TE would compute with constants."""
    x, y = (te.placeholder((count,), dtype, name) for name in "xy")
    func = from_te(x, y, te.compute((count,), lambda i: x[i] + y[i], "z"))

    def put(store):
        return BufferStore(store.buffer, expression(store.value.a, store.value.b), list(store.indices))

    return constructed(func.with_body(structural_map(func.body, (BufferStore, put))))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", EXPRESSIONS)
def test_expressions_mean_what_they_say(name, dtype):
    expression, reference = EXPRESSIONS[name]
    with np.errstate(all="ignore"):
        x, y = (np.array(values * 3, dtype) for values in (VALUES, OTHERS))  # vectors, and a remainder on any machine
        x, y = x[:-3], y[:-3]
        expected = np.asarray(reference(x, y)).astype(dtype)
    kernel, choice = kernel_of(expression, dtype, len(x))
    assert choice.path in ("rtile", "rows")  # made here, not stock TVM's
    actual = run(kernel, choice, [x, y], x.shape, dtype)
    np.testing.assert_array_equal(actual, expected)
    if not name.startswith(SIGN_OF_ZERO_IS_FREE):
        numbers = ~np.isnan(expected)
        np.testing.assert_array_equal(np.signbit(actual[numbers]), np.signbit(expected[numbers]))


def test_relu_is_one_instruction_and_a_maximum_of_two_is_masked():
    """What NaN costs: nothing beside a constant."""
    target = tvm.target.Target({"kind": "llvm", "mcpu": "skylake-avx512"})
    texts = {}
    for name in ("max(x, 0)", "max(x, y)"):
        kernel, _ = kernel_of(EXPRESSIONS[name][0], "float32", 1024)
        texts[name] = tvm.compile(kernel.with_attr("global_symbol", "main"), target=target).mod.inspect_source("asm")
    assert "vmaxps" in texts["max(x, 0)"]
    assert "vcmp" not in texts["max(x, 0)"]
    assert "vmaxps" in texts["max(x, y)"]


def test_integers_are_left_alone():
    x = te.placeholder((8,), "int32", "x")
    func = from_te(x, te.compute((8,), lambda i: tirx.Max(x[i], tirx.Sub(x[i] + 1, x[i])), "y"))
    tvm.ir.assert_structural_equal(pass_nan_on(keep_floats(func.body)), func.body)
