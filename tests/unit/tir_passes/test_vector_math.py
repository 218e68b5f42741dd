"""The arithmetic forms of exp, erf, tanh, sigmoid and powers, compiled and compared with float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import tvm
from tvm import te

from tests.unit.kernels import from_te
from tvm_ext._tvm import tirx
from tvm_ext.tir_passes.vector_math import expand_math

SPECIAL = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-38, -1e-38, 1e-20, 88.5, 88.8, -87.0, -100.0, -104.0], "f4")


def evaluate(function, values):
    x = te.placeholder(values.shape, "float32", "x")
    func = from_te(x, te.compute(values.shape, lambda i: function(x[i]), "y"))
    func = func.with_body(expand_math(func.body)).with_attr("global_symbol", "main")
    names = [
        name for name in ("tirx.exp", "tirx.erf", "tirx.tanh", "tirx.sigmoid", "tirx.pow") if name in func.script()
    ]
    assert names == []
    result = tvm.runtime.tensor(np.full_like(values, np.nan))
    tvm.compile(func, target="llvm")(tvm.runtime.tensor(values), result)
    return result.numpy()


CASES = {
    "exp": (tirx.exp, np.exp, (-103, 88.7)),
    "erf": (tirx.erf, np.vectorize(math.erf), (-6, 6)),
    "tanh": (tirx.tanh, np.tanh, (-20, 20)),
    "sigmoid": (tirx.sigmoid, lambda v: 1 / (1 + np.exp(-v)), (-80, 80)),
}


@pytest.mark.parametrize("name", CASES)
def test_every_value_is_within_a_few_units_in_the_last_place(name, rng):
    function, reference, (low, high) = CASES[name]
    dense = rng.uniform(low, high, 20000)
    near_zero = np.concatenate([np.geomspace(1e-30, 1, 500), -np.geomspace(1e-30, 1, 500)])
    values = np.concatenate([dense, near_zero]).astype("f4")
    actual = evaluate(function, values).astype("f8")
    with np.errstate(over="ignore"):
        expected = reference(values.astype("f8"))
    spacing = np.spacing(np.abs(expected).astype("f4")).astype("f8")
    assert np.max(np.abs(actual - expected) / spacing) <= (6 if name == "erf" else 4)


@pytest.mark.parametrize("name", CASES)
def test_infinities_zeros_and_nan(name):
    function, reference, _ = CASES[name]
    with np.errstate(over="ignore"):
        expected = reference(SPECIAL.astype("f8")).astype("f4")
    # 1 / (1 + e^-x) in float32 is 0 from -88.8 on, where e^-x is infinite; the C library's is too.
    atol = 1e-38 if name == "sigmoid" else 1e-44
    np.testing.assert_allclose(evaluate(function, SPECIAL), expected, rtol=1e-6, atol=atol)


@pytest.mark.parametrize("exponent", [0.5, 0.25, 0.75, 1.0, 2.0, 3.0])
def test_powers_with_roots(exponent, rng):
    values = rng.uniform(0, 10, 1000).astype("f4")
    actual = evaluate(lambda v: tirx.power(v, tirx.const(exponent, "float32")), values)
    np.testing.assert_allclose(actual, values.astype("f8") ** exponent, rtol=4e-7)


def test_other_powers_stay_calls():
    x = te.placeholder((4,), "float32", "x")
    func = from_te(x, te.compute((4,), lambda i: tirx.power(x[i], tirx.const(0.3, "float32")), "y"))
    assert "pow" in func.with_body(expand_math(func.body)).script()
