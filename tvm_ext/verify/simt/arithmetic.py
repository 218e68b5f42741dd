"""What binary operators compute, and sums of multiples of variables as one closure each."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tvm_ext._tvm import Expr

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
