"""Activations are known by their values, not by how they are spelt.

Exporters and importers write GELU in five operators and Softplus in fifteen, in any order: as
`0.5 * (x * (1 + erf(x / c)))`, or as `x * (0.5 + 0.5 * erf(c * x))`. A part of the graph that depends on one value and
on numbers is a function of one variable; it is evaluated in float64 at about 1,700 points, and the nearest function
that an epilogue has is taken if it is within the tolerance. Constants rounded to float16 (the square root of 2 is
1.4141 there, a sixth 0.16663) move GELU by up to 3e-5 and Hardswish by 3.7e-4, the exact and the tanh form of GELU are
4.7e-4 apart. A part that agrees at every point and is another function between them would have to bend twice within
1/64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from tvm_ext._tvm import Expr, Var
from tvm_ext.analysis.value_functions import BINARY, FUNCTIONS
from tvm_ext.support.arrays import Array

from .graph_values import GraphValues

TOLERANCE = 4e-4
"""Largest distance (see `_distance`) from the function of the name."""

SURELY_FINITE = 12.0
"""Within these bounds every spelling is finite: exp(12) does not overflow."""

MOST_OPERATORS = 24
"""Operators looked at together; the importer's Softplus has 15."""


def _points() -> Array:
    near = np.arange(-12 * 64, 12 * 64 + 1) / 64 + 1e-3  # off the kinks, on both sides of each
    far = np.geomspace(12.5, 6.0e4, 60)
    return np.concatenate([-far[::-1], near, far])


POINTS = _points()


def _gelu(x: Array) -> Array:
    return np.asarray(0.5 * x * (1 + FUNCTIONS["erf"](x / math.sqrt(2))))


def _gelu_tanh(x: Array) -> Array:
    return np.asarray(0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))))


def _sigmoid(x: Array) -> Array:
    return np.asarray(np.exp(-np.logaddexp(0, -x)))


def _mish(x: Array) -> Array:
    return np.asarray(x * np.tanh(np.logaddexp(0, x)))


def _hardswish(x: Array) -> Array:
    return np.asarray(x * np.clip(x / 6 + 0.5, 0, 1))


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "relu": lambda x: np.maximum(x, 0),
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "silu": lambda x: x * _sigmoid(x),
    "hardswish": _hardswish,
    "softplus": lambda x: np.logaddexp(0, x),
    "mish": _mish,
    "sigmoid": _sigmoid,
    "tanh": np.tanh,
}
"""Those that epilogues have functors for, ours (Softplus) among them, or expressions of these (Mish)."""

_OPERATORS: dict[str, Callable[..., Array]] = {
    "add": BINARY["Add"],
    "subtract": BINARY["Sub"],
    "multiply": BINARY["Mul"],
    "divide": BINARY["Div"],
    "maximum": BINARY["Max"],
    "minimum": BINARY["Min"],
    "equal": BINARY["EQ"],
    "not_equal": BINARY["NE"],
    "less": BINARY["LT"],
    "less_equal": BINARY["LE"],
    "greater": BINARY["GT"],
    "greater_equal": BINARY["GE"],
    "power": np.power,
    "where": np.where,
    "astype": lambda x: x,
    "negative": np.negative,
    "abs": np.abs,
    "square": np.square,
    "clip": np.clip,
    "nn.relu": ACTIVATIONS["relu"],
    "nn.gelu": _gelu,
    "nn.gelu_tanh": _gelu_tanh,
    "nn.silu": ACTIVATIONS["silu"],
    "sigmoid": _sigmoid,
    "tanh": np.tanh,
    "erf": FUNCTIONS["erf"],
    "exp": np.exp,
    "log": np.log,
    "sqrt": np.sqrt,
}
"""What activations are spelt in, on float64."""

KNOWN_REFERENCES: Mapping[str, Array] = {name: function(POINTS) for name, function in ACTIVATIONS.items()}


def is_spelling(operator: str) -> bool:
    """Whether an operator may be a part of an activation that is written out."""
    return operator in _OPERATORS


def number_of(operator: str, operands: Sequence[float]) -> float:
    """What an operator of `is_spelling` makes of these numbers; infinite or NaN where they are none of its own."""
    with np.errstate(all="ignore"):
        return float(_OPERATORS[operator](*map(np.float64, operands)))


def recognise(values: GraphValues, start: Var, steps: Sequence[Var]) -> str | None:
    """The activation that the last of ``steps`` is of ``start``; None for another function, or of more values."""
    if len(steps) > MOST_OPERATORS:
        return None
    known: dict[Expr, Array] = {start: POINTS}
    for variable in steps:
        value = _value_of(values, variable, known)
        if value is None:
            return None
        known[variable] = value
    return _nearest(known[steps[-1]])


def _value_of(values: GraphValues, variable: Var, known: Mapping[Expr, Array]) -> Array | None:
    operator = values.operator_of(values.bindings[variable])
    if operator is None or operator[0] not in _OPERATORS:
        return None
    operands = [known[operand] if operand in known else _number(values, operand) for operand in operator[1]]
    if any(operand is None for operand in operands):
        return None
    with np.errstate(all="ignore"):
        return np.asarray(_OPERATORS[operator[0]](*operands))


def constant_number(values: GraphValues, operand: Expr) -> float | None:
    """A constant of one element, or a number among the operator's own arguments (the bounds of a clip)."""
    plain = getattr(operand, "value", None)
    return float(plain) if isinstance(plain, int | float) else values.scalar_of(operand)


def _number(values: GraphValues, operand: Expr) -> Array | None:
    scalar = constant_number(values, operand)
    return None if scalar is None else np.asarray(scalar)


def _nearest(result: Array) -> str | None:
    """By its values where they are finite: `log(1 + exp(x))` overflows for large x, which a functor need not."""
    if result.shape != POINTS.shape or result.dtype != np.float64:
        return None
    finite = np.isfinite(result)
    if not finite[np.abs(POINTS) <= SURELY_FINITE].all():
        return None
    distances = {name: _distance(result[finite], wanted[finite]) for name, wanted in KNOWN_REFERENCES.items()}
    nearest = min(distances, key=lambda name: distances[name])
    return nearest if distances[nearest] <= TOLERANCE else None


def _distance(result: Array, wanted: Array) -> float:
    """The largest difference, absolute where ``wanted`` is below 1 and relative above."""
    return float((np.abs(result - wanted) / np.maximum(1, np.abs(wanted))).max())
