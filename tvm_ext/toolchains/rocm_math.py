"""Functions that LLVM's AMDGPU back end has not, as arithmetic in float32, so that no kernel needs ROCm's library.

Stock TVM has no rule of target "rocm" for these, so that its rule for C applies: kernels would call ``tanf``, which no
device library has. Arcs, sinh and cosh are those of CPUs (`circular_math`); the others follow from exp, log, sin and
cos, which are instructions. Half precision is computed in float32; in float64 they stay calls, which the linker names.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

from tvm_ext._tvm import Call, Expr, call_pure_extern, register_intrin_lowering, tirx
from tvm_ext.ir.build_ir import HALF_TYPES
from tvm_ext.ir.float_ir import bound
from tvm_ext.tir_passes.expressions import circular_math

_LEVEL = 99  # wins over the default rules of C, which have level 10
_LARGE = 1e7  # x + 1 is x in float32
_HUGE = 1e18  # x * x is still finite


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


def _half_exp(x: Expr) -> Expr:
    """e^x / 2 by e^(x / 2), which is finite wherever the result is."""
    half = tirx.const(0.5, "float32")
    return bound(tirx.exp(x * half), lambda root: half * root * root)


def _log1p(x: Expr) -> Expr:
    """log(u) x / (u - 1) with u = 1 + x rounded: the quotient takes out what rounding put in."""

    def of_sum(u: Expr) -> Expr:
        small = tirx.Select(tirx.EQ(u, tirx.const(1, "float32")), x, tirx.log(u) * (x / (u - 1)))
        return tirx.Select(x > _LARGE, tirx.log(u), small)

    return bound(x + 1, of_sum)


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
    "sinh": lambda x: circular_math.sinh(x, _half_exp),
    "cosh": lambda x: circular_math.cosh(x, _half_exp),
    "atan": lambda x: circular_math.atan([x]),
    "asin": lambda x: circular_math.asin([x]),
    "acos": lambda x: circular_math.acos([x]),
    "asinh": _odd(_asinh),
    "acosh": lambda x: bound(x, _acosh),
    "atanh": _odd(_atanh),
}
