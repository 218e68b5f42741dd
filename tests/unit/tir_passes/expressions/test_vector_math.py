"""The arithmetic forms of exp, erf, tanh, sigmoid and powers, compiled and compared with float64."""

from __future__ import annotations

import ctypes
import ctypes.util
import dataclasses
import math
import platform

import numpy as np
import pytest
import tvm
from tvm import te

from tests.unit.kernels import cpu, from_te
from tvm_ext._tvm import tirx
from tvm_ext.devices import device_db
from tvm_ext.tir_passes.expressions.vector_math import FUNCTIONS, by_c_library, exp_below_one, expand_math, has_scale

TARGET = device_db.device_for_target("llvm")[1]
NAMES = sorted(FUNCTIONS)
NARROW = dataclasses.replace(cpu(), register_bytes=32)  # has no instruction that scales by powers of two
SPECIAL = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-38, -1e-38, 1e-20, 88.5, 88.8, -87.0, -100.0, -104.0], "f4")


def evaluate(function, values, device=None):
    """``function`` of ``values`` on this machine, or as a kernel for ``device`` has it, run on this machine."""
    device = device or cpu()
    x = te.placeholder(values.shape, "float32", "x")
    func = from_te(x, te.compute(values.shape, lambda i: function(x[i]), "y"))
    body = expand_math(func.body, scales_by_instruction=has_scale(device))
    func = func.with_body(body).with_attr("global_symbol", "main")
    assert [name for name in NAMES if name in func.script()] == []
    result = tvm.runtime.tensor(np.full_like(values, np.nan))
    tvm.compile(func, target=TARGET)(tvm.runtime.tensor(values), result)
    return result.numpy()


CASES = {
    "exp": (tirx.exp, np.exp, (-103, 88.7)),
    "erf": (tirx.erf, np.vectorize(math.erf), (-6, 6)),
    "tanh": (tirx.tanh, np.tanh, (-20, 20)),
    "sigmoid": (tirx.sigmoid, lambda v: 1 / (1 + np.exp(-v)), (-80, 80)),
    "log": (tirx.log, np.log, (1e-30, 100)),
    "sin": (tirx.sin, np.sin, (-100, 100)),
    "cos": (tirx.cos, np.cos, (-100, 100)),
    "tan": (tirx.tan, np.tan, (-100, 100)),
    "asin": (tirx.asin, np.arcsin, (-1, 1)),
    "acos": (tirx.acos, np.arccos, (-1, 1)),
    "atan": (tirx.atan, np.arctan, (-20, 20)),
    "sinh": (tirx.sinh, np.sinh, (-89.4, 89.4)),
    "cosh": (tirx.cosh, np.cosh, (-89.4, 89.4)),
}
ULPS = {"erf": 6, "tanh": 6}


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("device", [cpu(), NARROW], ids=["here", "narrow"])
@pytest.mark.parametrize("name", CASES)
def test_every_value_is_within_a_few_units_in_the_last_place(name, device, rng):
    function, reference, (low, high) = CASES[name]
    dense = rng.uniform(low, high, 20000)
    near_zero = np.concatenate([np.geomspace(1e-30, 1, 500), -np.geomspace(1e-30, 1, 500)])
    values = np.concatenate([dense, near_zero]).astype("f4")
    values = values[values >= np.float32(low)]
    actual = evaluate(function, values, device).astype("f8")
    with np.errstate(over="ignore"):
        expected = reference(values.astype("f8"))
    spacing = np.spacing(np.abs(expected).astype("f4")).astype("f8")
    assert np.max(np.abs(actual - expected) / spacing) <= ULPS.get(name, 4)


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("device", [cpu(), NARROW], ids=["here", "narrow"])
@pytest.mark.parametrize("name", CASES)
def test_infinities_zeros_and_nan(name, device):
    function, reference, _ = CASES[name]
    with np.errstate(all="ignore"):
        expected = reference(SPECIAL.astype("f8")).astype("f4")
    # 1 / (1 + e^-x) in float32 is 0 from -88.8 on, where e^-x is infinite; the C library's is too.
    atol = 1e-38 if name == "sigmoid" else 1e-44
    np.testing.assert_allclose(evaluate(function, SPECIAL, device), expected, rtol=1e-6, atol=atol)


@pytest.mark.parametrize("device", [cpu(), NARROW], ids=["here", "narrow"])
def test_exp_up_to_0_is_never_subnormal(device, rng):
    values = np.concatenate([rng.uniform(-110, 0, 20000), [-87.34, -87.3, -100, -1e30, -np.inf, 0.0]]).astype("f4")
    function = lambda x: exp_below_one(x * 1.0, device)  # noqa: E731 - an element alone is no expression yet
    actual, expected = evaluate(function, values, device), np.exp(values.astype("f8"))
    normal = expected >= 1.1765e-38
    np.testing.assert_allclose(actual[normal], expected[normal], rtol=3e-7)
    assert (actual[expected < 1.175e-38] == 0).all()
    assert not ((actual > 0) & (actual < np.finfo("f4").tiny)).any()
    assert np.isnan(evaluate(function, np.array([np.nan], "f4"), device)).all()


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("name", ["sin", "cos", "tan"])
def test_angles_of_any_size_are_turned_exactly(name, rng):
    """16367173 * 2^72 is the float32 nearest to a multiple of pi / 2 (Muller, Elementary Functions)."""
    sizes = rng.uniform(2**23, 2**24, 4000) * 2.0 ** rng.integers(-30, 104, 4000)
    multiples = np.arange(1, 2000) * (np.pi / 2)
    values = np.concatenate([sizes, -sizes, multiples, [16367173 * 2.0**72, np.finfo("f4").max]]).astype("f4")
    actual, expected = evaluate(getattr(tirx, name), values), getattr(np, name)(values.astype("f8"))
    assert np.max(np.abs(actual - expected) / np.spacing(np.abs(expected).astype("f4"))) <= 4


@pytest.mark.parametrize("exponent", [0.5, 0.25, 0.75, 1.0, 2.0, 3.0])
def test_powers_with_roots(exponent, rng):
    values = rng.uniform(0, 10, 1000).astype("f4")
    actual = evaluate(lambda v: tirx.power(v, tirx.const(exponent, "float32")), values)
    np.testing.assert_allclose(actual, values.astype("f8") ** exponent, rtol=4e-7)


def test_other_powers_stay_calls():
    x = te.placeholder((4,), "float32", "x")
    func = from_te(x, te.compute((4,), lambda i: tirx.power(x[i], tirx.const(0.3, "float32")), "y"))
    assert "pow" in func.with_body(expand_math(func.body)).script()


@pytest.mark.parametrize("device", [cpu(), NARROW], ids=["here", "narrow"])
def test_subnormal_numbers_are_not_flushed(device):
    values = np.array([-87.5, -95.0, -100.0, -103.2], "f4")
    expected = np.exp(values.astype("f8"))
    assert np.all(np.abs(evaluate(tirx.exp, values, device) - expected) <= 2.0**-149)
    tiny = np.array([2.0**-149, 3e-42, 1.1e-38], "f4")
    np.testing.assert_allclose(evaluate(tirx.log, tiny, device), np.log(tiny.astype("f8")), rtol=2e-7)


@pytest.mark.parametrize("device", [cpu(), NARROW], ids=["here", "narrow"])
@pytest.mark.parametrize(("values", "underflows"), [((-104.5, -1e4, -3.4e38, -np.inf), False), ((-100.0,) * 4, True)])
def test_what_is_masked_costs_no_subnormal_arithmetic(device, values, underflows):
    """Which processors take step by step, at some 150 cycles a vector, and which their underflow flag betrays."""
    libm = ctypes.CDLL(ctypes.util.find_library("m"))
    underflow = {"x86_64": 0x10, "aarch64": 0x08}[platform.machine()]  # FE_UNDERFLOW
    masked = np.tile(np.asarray(values, "f4"), 16)
    x = te.placeholder(masked.shape, "float32", "x")
    func = from_te(x, te.compute(masked.shape, lambda i: tirx.exp(x[i]), "y"))
    body = expand_math(func.body, scales_by_instruction=has_scale(device))
    kernel = tvm.compile(func.with_body(body).with_attr("global_symbol", "main"), target=TARGET)
    given, result = tvm.runtime.tensor(masked), tvm.runtime.tensor(masked)
    libm.feclearexcept(underflow)
    kernel(given, result)
    assert bool(libm.fetestexcept(underflow)) == underflows
    np.testing.assert_allclose(result.numpy(), np.exp(masked.astype("f8")), atol=2.0**-149)


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["tanh", "sinh", "cosh"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_functions_that_stay_calls_are_the_c_librarys_in_vector_loops_too(name, dtype):
    """Stock TVM has no sinh of a vector, and its tanh of 1e-9 is 0 in float64 to half of the digits."""
    values = np.array([1e-3, -2e-3, 0.5, -0.25, 1.0, 3.0, -4.0, 0.125], dtype)
    function = getattr(tirx, name)
    x = te.placeholder(values.shape, dtype, "x")
    schedule = tvm.s_tir.Schedule(from_te(x, te.compute(values.shape, lambda i: function(x[i]), "y")))
    schedule.vectorize(schedule.get_loops("y")[0])
    func = schedule.mod["main"]
    func = func.with_body(by_c_library(func.body)).with_attr("global_symbol", "main")
    result = tvm.runtime.tensor(np.full_like(values, np.nan))
    tvm.compile(func, target=TARGET)(tvm.runtime.tensor(values), result)
    expected = getattr(np, name)(values.astype(np.longdouble))
    np.testing.assert_allclose(result.numpy(), expected, rtol=2 * np.finfo(dtype).eps)


def test_no_function_of_the_c_library_is_called():
    """Each would be a call per element in the innermost loop."""
    x = te.placeholder((64,), "float32", "x")
    y = te.compute(
        (64,), lambda i: tirx.exp(x[i]) + tirx.log(x[i]) + tirx.erf(x[i]) + tirx.sinh(x[i]) + tirx.sin(x[i]), "y"
    )
    func = from_te(x, y)
    body = expand_math(func.body, scales_by_instruction=has_scale(cpu()))
    built = tvm.compile(func.with_body(body).with_attr("global_symbol", "main"), target=TARGET)
    text = built.mod.inspect_source("asm")
    assert [name for name in ("expf", "logf", "erff", "sinhf", "sinf", "floor", "ldexpf") if name in text] == []
