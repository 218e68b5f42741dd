"""Functions that LLVM's AMDGPU back end has not, as arithmetic in float32, so that no kernel needs ROCm's library.

Stock TVM has no rule of target "rocm" for these, so that its rule for C applies: kernels would call ``tanf``, which no
device library has. The polynomials of atan and asin are those of Cephes (Moshier, single precision); the others follow
from exp, log, sin and cos, which are instructions. Half precision is computed in float32; in float64 they stay calls,
which the linker names.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

from tvm_ext._tvm import Call, Expr, call_pure_extern, register_intrin_lowering, tirx
from tvm_ext.ir.build_ir import HALF_TYPES
from tvm_ext.ir.float_ir import bound

_LEVEL = 99  # wins over the default rules of C, which have level 10
_LARGE = 1e7  # x + 1 is x in float32
_HUGE = 1e18  # x * x is still finite
_ATAN = (8.05374449538e-2, -1.38776856032e-1, 1.99777106478e-1, -3.33329491539e-1)
"""Coefficients in x^2 of (atan(x) - x) / x^3 over |x| <= tan(pi / 8), the highest power first: Cephes, atanf.c."""
_ASIN = (4.2163199048e-2, 2.4181311049e-2, 4.5470025998e-2, 7.4953002686e-2, 1.6666752422e-1)
"""Coefficients in x^2 of (asin(x) - x) / x^3 over |x| <= 1/2, the highest power first: Cephes, asinf.c."""
_SINH = (1 / 362880, 1 / 5040, 1 / 120, 1 / 6)
"""Coefficients in x^2 of (f(x) - x) / x^3, the highest power first."""


@cache
def enable_rocm_math() -> None:
    """Make TVM compute `FUNCTIONS` for AMD GPUs as below, from now on; once per process."""
    for name, function in FUNCTIONS.items():
        register_intrin_lowering(f"tirx.{name}", "rocm", _rule(name, function), _LEVEL)


def _rule(name: str, function: Callable[[Expr], Expr]) -> Callable[[Call], Expr]:
    def lowered(call: Call) -> Expr:
        dtype = str(call.args[0].ty.dtype)
        if dtype in HALF_TYPES:
            return function(call.args[0].astype("float32")).astype(dtype)
        return function(call.args[0]) if dtype == "float32" else call_pure_extern(call.ty, name, *call.args)

    return lowered


def _odd(function: Callable[[Expr], Expr]) -> Callable[[Expr], Expr]:
    """``function`` of |x|, with the sign of x; zeros keep theirs."""
    return lambda x: bound(x, lambda y: tirx.Select(y < 0, -function(-y), tirx.Select(y > 0, function(y), y)))


def _near_zero(x: Expr, coefficients: tuple[float, ...]) -> Expr:
    """x + x^3 P(x^2)."""

    def value(square: Expr) -> Expr:
        total: Expr = tirx.const(coefficients[0], "float32")
        for coefficient in coefficients[1:]:
            total = total * square + tirx.const(coefficient, "float32")
        return total * square * x + x

    return bound(x * x, value)


def _log1p(x: Expr) -> Expr:
    """log(u) x / (u - 1) with u = 1 + x rounded: the quotient takes out what rounding put in."""

    def of_sum(u: Expr) -> Expr:
        small = tirx.Select(tirx.EQ(u, tirx.const(1, "float32")), x, tirx.log(u) * (x / (u - 1)))
        return tirx.Select(x > _LARGE, tirx.log(u), small)

    return bound(x + 1, of_sum)


def _sinh(x: Expr) -> Expr:
    return tirx.Select(x < 1, _near_zero(x, _SINH), _half_powers(x, lambda one, other: one - other))


def _half_powers(x: Expr, join: Callable[[Expr, Expr], Expr]) -> Expr:
    """``join`` of e^x / 2 and e^-x / 2: by e^(x / 2), which is finite wherever the result is."""
    half = tirx.const(0.5, "float32")
    return bound(tirx.exp(x * half), lambda root: join(half * root * root, half / root / root))


def _atan(x: Expr) -> Expr:
    eighth, far = math.tan(math.pi / 8), math.tan(3 * math.pi / 8)
    reduced = tirx.Select(x > far, -1 / x, tirx.Select(x > eighth, (x - 1) / (x + 1), x))
    zero, quarter, half = (tirx.const(part * math.pi / 4, "float32") for part in range(3))
    start = tirx.Select(x > far, half, tirx.Select(x > eighth, quarter, zero))
    return start + bound(reduced, lambda y: _near_zero(y, _ATAN))


def _asin(x: Expr) -> Expr:
    near = bound(x, lambda y: _near_zero(y, _ASIN))
    return tirx.Select(x > 0.5, tirx.const(math.pi / 2, "float32") - _acos_of_large(x), near)


def _acos_of_large(x: Expr) -> Expr:
    """Of x > 1/2, as twice the arcsine of sqrt((1 - x) / 2); NaN beyond 1."""
    return 2 * bound(tirx.sqrt((1 - x) * tirx.const(0.5, "float32")), lambda y: _near_zero(y, _ASIN))


def _acos(x: Expr) -> Expr:
    half, whole = (tirx.const(part * math.pi / 2, "float32") for part in (1, 2))
    middle = half - _near_zero(x, _ASIN)
    return tirx.Select(x > 0.5, _acos_of_large(x), tirx.Select(x < -0.5, whole - _acos_of_large(-x), middle))


def _asinh(x: Expr) -> Expr:
    squared = bound(x * x, lambda square: square / (1 + tirx.sqrt(square + 1)))
    near = bound(x + squared, _log1p)
    return tirx.Select(x > _HUGE, tirx.log(x) + tirx.const(math.log(2), "float32"), near)


def _acosh(x: Expr) -> Expr:
    near = bound(x - 1, lambda y: bound(y + tirx.sqrt(y) * tirx.sqrt(y + 2), _log1p))  # NaN below 1
    return tirx.Select(x > _HUGE, tirx.log(x) + tirx.const(math.log(2), "float32"), near)


def _atanh(x: Expr) -> Expr:
    return bound(2 * x / (1 - x), _log1p) * tirx.const(0.5, "float32")


FUNCTIONS: dict[str, Callable[[Expr], Expr]] = {
    "tan": lambda x: tirx.sin(x) / tirx.cos(x),
    "log1p": lambda x: bound(x, _log1p),
    "sinh": _odd(_sinh),
    "cosh": lambda x: _half_powers(tirx.abs(x), lambda one, other: one + other),
    "atan": _odd(_atan),
    "asin": _odd(_asin),
    "acos": lambda x: bound(x, _acos),
    "asinh": _odd(_asinh),
    "acosh": lambda x: bound(x, _acosh),
    "atanh": _odd(_atanh),
}
