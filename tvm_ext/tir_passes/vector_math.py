"""exp, erf, tanh, sigmoid and simple powers as arithmetic, so that loops which hold them run in SIMD registers.

LLVM has no vector form of these functions: each would be one call to the C library per element (about 20 ns). The
polynomials below are our own fits, made in float64 by Chebyshev interpolation and by iteratively reweighted rational
least squares; tests/unit/tir_passes/test_vector_math.py holds erf within 6 units in the last
place of float32 and the others within 4.

Only float32 is rewritten; half precision is computed in float32 and rounded, as the C library is used too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .._tvm import Call, Var, ir, structural_map, tirx
from ..stages import dtype_of

Expr = Any

LN2_HIGH, LN2_LOW = 0.693359375, -2.12194440e-4  # their sum is ln 2; the first has 9 bits, so n * LN2_HIGH is exact
EXP_OVERFLOW, EXP_UNDERFLOW = 88.72284, -103.9723  # exp is inf above, and below half of the smallest subnormal

EXP_TAIL = (0.500000001, 0.166666667, 0.0416664649, 0.00833331093, 0.001393365, 0.000198909908)
"""(e^r - 1 - r) / r^2 over |r| <= ln(2) / 2, relative error of e^r 2e-10."""
# erf(x) / x as a fraction in x^2 over |x| <= 3.9, relative error 2e-8.
ERF_NUMERATOR = (
    1.128379150109673,
    0.1892172856047747,
    0.052609477811148324,
    0.0037195256794456963,
    0.00028472087151227844,
    2.0708634045254583e-06,
)
ERF_DENOMINATOR = (
    1.0,
    0.5010222939066193,
    0.113633982834763,
    0.0148762256321531,
    0.0011529830969705984,
    3.8297954562849964e-05,
)
ERF_ONE = 3.9  # erf is 1 in float32 from here on
TANH_SMALL = 0.625  # below: x + x^3 p(x^2), for 1 - 2 / (e^2x + 1) would cancel
TANH_TAIL = (
    -0.3333333317213911,
    0.13333303556865234,
    -0.053959259571154806,
    0.02176891862014658,
    -0.008343945444895428,
    0.002292744755729167,
)


def expand_math(node: Any) -> Any:
    """``node`` (a statement or expression) with every float32 call of these functions replaced by arithmetic."""
    return structural_map(node, (Call, _expand))


def _expand(call: Any) -> Any:
    maker = _FUNCTIONS.get(_name(call))
    if maker is None or dtype_of(call) not in ("float32", "float16"):
        return call
    if dtype_of(call) == "float16":
        wide = maker([tirx.Cast("float32", argument) for argument in call.args])
        return call if wide is None else tirx.Cast("float16", wide)
    expanded = maker(list(call.args))
    return call if expanded is None else expanded


def _name(call: Any) -> str:
    return str(call.op.name) if isinstance(call.op, ir.Op) else ""


def _f32(value: float) -> Expr:
    return tirx.const(value, "float32")


def _bind(value: Expr, body: Callable[[Expr], Expr]) -> Expr:
    """``body`` of a value that is computed once."""
    variable = Var("t", dtype_of(value))
    return tirx.Let(variable, value, body(variable))


def _polynomial(x: Expr, coefficients: Sequence[float]) -> Expr:
    """Horner's scheme; ``coefficients[i]`` belongs to ``x**i``."""
    total: Expr = _f32(coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        total = total * x + _f32(coefficient)
    return total


def _power_of_two(exponent: Expr) -> Expr:
    """2**exponent for an int32 from -126 to 127, by writing the exponent's bits."""
    return tirx.reinterpret("float32", (exponent + tirx.const(127, "int32")) * tirx.const(1 << 23, "int32"))


def _exp(arguments: Sequence[Expr]) -> Expr:
    """e^x = 2^n e^r with n the nearest integer to x / ln 2; 2^n in two factors, for n reaches from -150 to 128."""

    def scaled(x: Expr, n: Expr, r: Expr) -> Expr:
        half = tirx.Cast("int32", tirx.floor(n * _f32(0.5)))
        rest = tirx.Cast("int32", n) - half
        value = (r * r * _polynomial(r, EXP_TAIL) + r + _f32(1.0)) * _power_of_two(half) * _power_of_two(rest)
        value = tirx.Select(x > _f32(EXP_OVERFLOW), tirx.const(float("inf"), "float32"), value)
        value = tirx.Select(x < _f32(EXP_UNDERFLOW), _f32(0.0), value)
        return tirx.Select(tirx.isnan(x), x, value)  # NaN stays NaN

    def reduced(x: Expr) -> Expr:
        inside = tirx.max(tirx.min(x, _f32(EXP_OVERFLOW)), _f32(EXP_UNDERFLOW))
        n = tirx.floor(inside * _f32(1.4426950408889634) + _f32(0.5))
        return _bind(
            inside,
            lambda y: _bind(n, lambda m: _bind(y - m * _f32(LN2_HIGH) - m * _f32(LN2_LOW), lambda r: scaled(x, m, r))),
        )

    return _bind(arguments[0], reduced)


def _erf(arguments: Sequence[Expr]) -> Expr:
    """An odd fraction in x; 1 beyond 3.9, where float32 has nothing between."""

    def fraction(x: Expr) -> Expr:
        inside = tirx.max(tirx.min(x, _f32(ERF_ONE)), _f32(-ERF_ONE))
        value = _bind(
            inside,
            lambda y: _bind(y * y, lambda t: y * _polynomial(t, ERF_NUMERATOR) / _polynomial(t, ERF_DENOMINATOR)),
        )
        value = tirx.max(tirx.min(value, _f32(1.0)), _f32(-1.0))  # rounding may not lift it past its limits
        return tirx.Select(tirx.isnan(x), x, value)

    return _bind(arguments[0], fraction)


def _tanh(arguments: Sequence[Expr]) -> Expr:
    """x + x^3 p(x^2) near 0, else 1 - 2 / (e^(2|x|) + 1) with the sign of x."""

    def value(x: Expr) -> Expr:
        size = tirx.Select(x < _f32(0.0), _f32(0.0) - x, x)
        small = _bind(x * x, lambda t: x + x * t * _polynomial(t, TANH_TAIL))
        large = _f32(1.0) - _f32(2.0) / (_exp([size * _f32(2.0)]) + _f32(1.0))
        signed = _bind(large, lambda y: tirx.Select(x < _f32(0.0), _f32(0.0) - y, y))
        return tirx.Select(size < _f32(TANH_SMALL), small, signed)

    return _bind(arguments[0], value)


def _sigmoid(arguments: Sequence[Expr]) -> Expr:
    return _f32(1.0) / (_f32(1.0) + _exp([_f32(0.0) - arguments[0]]))


def _power(arguments: Sequence[Expr]) -> Expr | None:
    """x**c for the exponents that roots and products give exactly enough; None for any other."""
    x, exponent = arguments
    constant = getattr(exponent, "value", None)
    roots = {0.5: 1, 0.25: 2, 0.75: 2, 2.0: 0, 1.0: 0, 3.0: 0}
    if constant not in roots:
        return None
    root = x
    for _ in range(roots[constant]):
        root = tirx.sqrt(root)
    repeat = {0.75: 3, 2.0: 2, 3.0: 3}.get(constant, 1)

    def product(y: Expr) -> Expr:
        result = y
        for _ in range(repeat - 1):
            result = result * y
        return result

    return _bind(root, product)


_FUNCTIONS: dict[str, Callable[[Sequence[Expr]], Expr | None]] = {
    "tirx.exp": _exp,
    "tirx.erf": _erf,
    "tirx.tanh": _tanh,
    "tirx.sigmoid": _sigmoid,
    "tirx.pow": _power,
}
