"""Mathematical functions that lowered kernels call, by TVM's name and by the name of CUDA's or C's library.

Exact functions, not CUDA's fast approximations (``__expf``, ``tanh.approx``): those are for tolerances to allow.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from tvm_ext.errors import InputError
from tvm_ext.verify.simt.values import Value

MathFunction = Callable[..., Any]


def _elementwise(function: Callable[[float], float]) -> MathFunction:
    each = np.frompyfunc(function, 1, 1)

    def run(x: Value) -> Value:
        return np.asarray(each(np.asarray(x, np.float64))).astype(np.asarray(x).dtype)[()]

    return run


def _fma(a: Value, b: Value, c: Value) -> Value:
    return (np.asarray(a, np.float64) * np.asarray(b, np.float64) + np.asarray(c, np.float64)).astype(
        np.asarray(a).dtype
    )


def _absolute(x: Value) -> Value:
    return np.abs(x)


CALLS: dict[str, MathFunction] = {
    "exp": np.exp, "exp2": np.exp2, "exp10": lambda x: np.power(np.asarray(10, np.asarray(x).dtype), x),
    "expm1": np.expm1, "log": np.log, "log2": np.log2, "log10": np.log10, "log1p": np.log1p,
    "sqrt": np.sqrt, "rsqrt": lambda x: np.reciprocal(np.sqrt(x)), "pow": np.power, "powi": np.power,
    "sin": np.sin, "cos": np.cos, "tan": np.tan, "asin": np.arcsin, "acos": np.arccos, "atan": np.arctan,
    "atan2": np.arctan2, "sinh": np.sinh, "cosh": np.cosh, "tanh": np.tanh,
    "asinh": np.arcsinh, "acosh": np.arccosh, "atanh": np.arctanh, "erf": _elementwise(math.erf),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "floor": np.floor, "ceil": np.ceil, "trunc": np.trunc, "round": np.rint, "rint": np.rint, "nearbyint": np.rint,
    "fabs": _absolute, "abs": _absolute, "fmod": np.fmod, "hypot": np.hypot, "copysign": np.copysign,
    "isnan": np.isnan, "isinf": np.isinf, "isfinite": np.isfinite, "fma": _fma, "fmaf": _fma, "fmuladd": _fma,
    "fmax": np.fmax, "fmin": np.fmin, "max": np.fmax, "min": np.fmin, "maxnum": np.fmax, "minnum": np.fmin,
    "clz": _elementwise(lambda x: 32 - int(x).bit_length()),
}  # fmt: skip
"""By the last part of the operator's name; computed in the argument's own dtype."""


def EXTERNS(name: str) -> MathFunction:
    """The function that a device library calls ``name``: ``expf``, ``__expf``, ``hexp``, ``__ocml_exp_f32``.

    Raises InputError for a name that is none of them.
    """
    plain = name.removeprefix("__").removeprefix("ocml_").removeprefix("llvm.")
    for suffix in ("_f16", "_f32", "_f64", ".f16", ".f32", ".f64"):
        plain = plain.removesuffix(suffix)
    for candidate in (plain, plain.removesuffix("f"), plain.removeprefix("h"), plain.removeprefix("native_")):
        if candidate in CALLS:
            return CALLS[candidate]
    raise InputError(
        f"the interpreter does not know the function {name}", "add it to tvm_ext/verify/simt/math_calls.py"
    )
