"""The epilogue of a part of the graph as one Python expression, which `epilogue.Epilogue` takes.

Worked example: behind the product m, y = maximum(m + bias, 0) is ``maximum((accum + operand2), 0.0)``, where A and B
are operands 0 and 1. Intermediate values stay in float32; only a cast to a narrower type rounds them.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Sequence

from tvm_ext._tvm import Expr, Var
from tvm_ext.analysis.relax_values import dtype_of, is_tensor
from tvm_ext.records.partition import ACCUMULATOR, EpilogueOperand, OperandRole, operand_name

from .activations import constant_number
from .elements import ELEMENTS
from .graph_values import GraphValues

MOST_CHARACTERS = 1000
"""A value that is used twice is written twice: what a chain of squares comes to is no epilogue any more."""

_WIDEST_BITS = 32
_INFIX = {"add": "+", "subtract": "-", "multiply": "*", "divide": "/"}
_FUNCTIONS = {
    "maximum": "maximum", "minimum": "minimum", "exp": "exp", "sigmoid": "sigmoid", "tanh": "tanh", "nn.relu": "relu",
    "nn.gelu": "gelu", "nn.gelu_tanh": "gelu_tanh", "nn.silu": "silu",
}  # fmt: skip

RoleOf = Callable[[Expr], tuple[OperandRole, int]]
"""How an operand lies over the product, and how far apart those of neighbouring products are."""


class EpilogueExpressions:
    """Expressions by value, and the tensors that they read, in the order of the region's parameters."""

    def __init__(self, anchor: Var, factors: Sequence[Expr], values: GraphValues, role_of: RoleOf) -> None:
        self.values, self.role_of = values, role_of
        self.known: dict[Expr, str | None] = {anchor: ACCUMULATOR}  # None: inside, and too long or unknown
        self.tensors: dict[Expr, None] = dict.fromkeys(factors)
        self.read: dict[str, EpilogueOperand] = {}

    def of(self, value: Var) -> str | None:
        """What the region stores for ``value``: without the rounding that storing does. None where it has none."""
        found = self.known.get(value)
        operator = self.values.operator_of(self.values.bindings[value])
        if found is not None and operator is not None and operator[0] == "astype":
            found = self.known.get(operator[1][0])
        return self._kept(found)

    def before(self, value: Var) -> str | None:
        """Of what the operator that makes ``value``, which is no expression, reads."""
        operator = self.values.operator_of(self.values.bindings[value])
        assert operator is not None
        return self._kept(self.known.get(operator[1][0]))

    @staticmethod
    def _kept(text: str | None) -> str | None:
        return text if text is not None and len(text) <= MOST_CHARACTERS else None

    def operands_of(self, expression: str) -> tuple[EpilogueOperand, ...]:
        """Those that ``expression`` reads."""
        names = {node.id for node in ast.walk(ast.parse(expression, mode="eval")) if isinstance(node, ast.Name)}
        return tuple(operand for name, operand in self.read.items() if name in names)

    def apply(self, function: str, argument: Var, result: Var) -> None:
        """``result`` is ``function`` of ``argument``, however it is spelt."""
        inner = self.known.get(argument)
        self._keep(result, None if inner is None else _applied(function, inner))

    def add(self, value: Var) -> None:
        """``value`` by its own operator."""
        operator = self.values.operator_of(self.values.bindings[value])
        assert operator is not None
        name, operands = operator
        written = [self._written(operand) for operand in operands]
        self._keep(value, None if None in written else self._call(name, [item or "" for item in written], value))

    def _keep(self, value: Var, text: str | None) -> None:
        self.known[value] = text if text is not None and len(text) <= 2 * MOST_CHARACTERS else None

    def _call(self, name: str, written: Sequence[str], value: Var) -> str | None:
        if name in _INFIX:
            return f"({written[0]} {_INFIX[name]} {written[1]})"
        if name in _FUNCTIONS:
            return f"{_FUNCTIONS[name]}({', '.join(written)})"
        if name == "astype":
            dtype = dtype_of(value)
            return written[0] if ELEMENTS[dtype].bits >= _WIDEST_BITS else f"cast({written[0]}, '{dtype}')"
        if name == "nn.leakyrelu":
            slope = float(self.values.bindings[value].attrs.alpha)
            return f"(maximum({written[0]}, 0.0) + {slope!r} * minimum({written[0]}, 0.0))"
        if name == "clip":
            return _clipped(*written)
        return None

    def _written(self, operand: Expr) -> str | None:
        if operand in self.known:
            return self.known[operand]
        number = constant_number(self.values, operand)
        if number is not None:
            return repr(float(number))
        return self._named(operand) if is_tensor(operand) else None

    def _named(self, tensor: Expr) -> str:
        self.tensors.setdefault(tensor)
        name = operand_name(list(self.tensors).index(tensor))
        role, distance = self.role_of(tensor)
        self.read[name] = EpilogueOperand(name=name, role=role, dtype=dtype_of(tensor), batch_stride=distance)
        return name


def _applied(function: str, value: str) -> str:
    """Mish is a product of its argument and functions that epilogues have."""
    return f"({value} * tanh(softplus({value})))" if function == "mish" else f"{function}({value})"


def _clipped(value: str, low: str, high: str) -> str:
    """A bound that is infinite bounds nothing."""
    above = value if float(low) == -math.inf else f"maximum({value}, {low})"
    return above if float(high) == math.inf else f"minimum({above}, {high})"
