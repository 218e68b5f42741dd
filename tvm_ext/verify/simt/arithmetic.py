"""What binary operators and mathematical functions compute, and sums of multiples of variables as one closure each.

Functions go by TVM's name and by the name of CUDA's or C's library. They are exact functions, not CUDA's fast
approximations (``__expf``, ``tanh.approx``): those are for tolerances to allow.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from tvm_ext._tvm import Expr
from tvm_ext.errors import InputError

from .machine import Closure, Engine
from .scope import Scope
from .values import Value, is_uniform


def _quotient(a: Value, b: Value) -> Value:
    """C's integer division, towards zero; 0 for a division by zero, which only inactive lanes may do."""
    if is_uniform(a) and is_uniform(b):
        return 0 if b == 0 else int(abs(int(a)) // abs(int(b)) * (1 if (a < 0) == (b < 0) else -1))
    rest = np.fmod(a, b)
    return (a - rest) // b


def _remainder(a: Value, b: Value) -> Value:
    if is_uniform(a) and is_uniform(b):
        return 0 if b == 0 else int(abs(int(a)) % abs(int(b))) * (-1 if a < 0 else 1)
    return np.fmod(a, b)


def _floor_divide(a: Value, b: Value) -> Value:
    return 0 if is_uniform(b) and b == 0 else a // b


def _floor_modulo(a: Value, b: Value) -> Value:
    return 0 if is_uniform(b) and b == 0 else a % b


BinaryRow = tuple[Callable[[Value, Value], Value], Callable[[Value, Value], Value], int]
"""For floats, for integers; floating-point operations."""

# By the names of TensorIR's nodes.
BINARY: dict[str, BinaryRow] = {
    "Add": (lambda a, b: a + b, lambda a, b: a + b, 1),
    "Sub": (lambda a, b: a - b, lambda a, b: a - b, 1),
    "Mul": (lambda a, b: a * b, lambda a, b: a * b, 1),
    "Div": (lambda a, b: a / b, _quotient, 1),
    "Mod": (np.fmod, _remainder, 1),
    "FloorDiv": (lambda a, b: np.floor(a / b), _floor_divide, 1),
    "FloorMod": (np.mod, _floor_modulo, 1),
    "Max": (np.fmax, np.maximum, 1),
    "Min": (np.fmin, np.minimum, 1),
    "EQ": (lambda a, b: a == b, lambda a, b: a == b, 0),
    "NE": (lambda a, b: a != b, lambda a, b: a != b, 0),
    "LT": (lambda a, b: a < b, lambda a, b: a < b, 0),
    "LE": (lambda a, b: a <= b, lambda a, b: a <= b, 0),
    "GT": (lambda a, b: a > b, lambda a, b: a > b, 0),
    "GE": (lambda a, b: a >= b, lambda a, b: a >= b, 0),
    "LShift": (lambda a, b: a << b, lambda a, b: a << b, 0),
    "RShift": (lambda a, b: a >> b, lambda a, b: a >> b, 0),
    "BitwiseAnd": (lambda a, b: a & b, lambda a, b: a & b, 0),
    "BitwiseOr": (lambda a, b: a | b, lambda a, b: a | b, 0),
    "BitwiseXor": (lambda a, b: a ^ b, lambda a, b: a ^ b, 0),
}


def linear_form(scope: Scope, expr: Expr) -> tuple[int, dict[int, int]] | None:
    """(constant, slot of variable to coefficient) of an integer sum of multiples of variables; None for all else."""
    kind = type(expr).__name__
    if kind == "IntImm":
        return int(expr.value), {}
    if kind == "Var":
        return 0, {scope.variable(expr): 1}
    if kind not in ("Add", "Sub", "Mul"):
        return None
    a, b = linear_form(scope, expr.a), linear_form(scope, expr.b)
    if a is None or b is None or (kind == "Mul" and a[1] and b[1]):
        return None
    if kind == "Mul":
        factor, (constant, terms) = (a[0], b) if not a[1] else (b[0], a)
        return constant * factor, {slot: coefficient * factor for slot, coefficient in terms.items()}
    sign = -1 if kind == "Sub" else 1
    terms = {slot: a[1].get(slot, 0) + sign * b[1].get(slot, 0) for slot in {**a[1], **b[1]}}
    return a[0] + sign * b[0], terms


def linear_closure(constant: int, terms: dict[int, int]) -> Closure:
    """One closure for what would be many: indices are most of what is computed."""
    if not terms:
        return lambda m: constant
    if len(terms) == 1:
        ((slot, factor),) = terms.items()
        return lambda m: m.env[slot] * factor + constant
    if len(terms) == 2:
        (first, one), (second, two) = terms.items()
        return lambda m: m.env[first] * one + m.env[second] * two + constant
    pairs = tuple(terms.items())

    def run(m: Engine) -> Value:
        total: Value = constant
        for slot, factor in pairs:
            total = m.env[slot] * factor + total
        return total

    return run


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
        f"the interpreter does not know the function {name}", "add it to tvm_ext/verify/simt/arithmetic.py"
    )
