"""What of the graph behind a product may be its epilogue: a part with one result, grown operator by operator.

Not by patterns of stock TVM's language: they are trees to be listed one by one, and an activation that is written
out uses its input several times. Here every operator that an epilogue can compute joins; wherever all values but the
last are used inside alone, the part is *closed* and may end. Worked example: matmul m, b = m + bias,
e = erf(b / 1.41) + 1, y = b * e * 0.5 is closed at m and b, and again at b * e and y; b * e is no function that
epilogues have, y is GELU of b. If something else uses b, nothing behind b joins.

A part is written as one Python expression, which `epilogue.Epilogue` takes: behind the product m,
y = maximum(m + bias, 0) is ``maximum((accum + operand2), 0.0)``, where A and B are operands 0 and 1. Intermediate
values stay in float32; only a cast to a narrower type rounds them.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from tvm_ext._tvm import Expr, Var
from tvm_ext.analysis.relax_values import described, dtype_of, is_tensor, operator_name, static_shape
from tvm_ext.records.partition import (
    ACCUMULATOR,
    REDUCTION_STEPS,
    Broadcast,
    EpilogueOperand,
    EpilogueStep,
    OperandRole,
    operand_name,
)

from .activations import MOST_OPERATORS, constant_number, is_spelling, recognise
from .elements import ELEMENTS
from .epilogue import ARITY
from .graph_values import RESULT, GraphValues
from .support import ANCHORS

FUNCTORS: Mapping[str, str] = {
    "add": "add",
    "subtract": "subtract",
    "multiply": "multiply",
    "divide": "divide",
    "maximum": "maximum",
    "minimum": "minimum",
    "clip": "clip",
    "exp": "exp",
    "astype": "cast",
    "sigmoid": "sigmoid",
    "tanh": "tanh",
    "nn.relu": "relu",
    "nn.leakyrelu": "leaky_relu",
    "nn.gelu": "gelu",
    "nn.gelu_tanh": "gelu_tanh",
    "nn.silu": "silu",
}
"""Operators that are one step of an epilogue; others have to be parts of an activation."""

REDUCTIONS = frozenset({"sum", "max"})
FLOATS = frozenset({"float16", "bfloat16", "float32"})
MOST_VALUES = 64
"""Values of one region: more are no epilogue that a kernel has registers for."""


MOST_CHARACTERS = 1000
"""A value that is used twice is written twice: what a chain of squares comes to is no epilogue any more."""

_WIDEST_BITS = 32  # of float32, which epilogues compute in: a cast to it rounds nothing
_INFIX = {"add": "+", "subtract": "-", "multiply": "*", "divide": "/"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """A closed part: it may end with ``value``. ``members`` are in program order, the product first.

    ``expression`` is the epilogue's (empty: it has none), ``tensors`` what the part reads, A and B first.
    """

    value: Var
    members: tuple[Var, ...]
    steps: tuple[EpilogueStep, ...]
    expression: str = ACCUMULATOR
    operands: tuple[EpilogueOperand, ...] = ()
    tensors: tuple[Expr, ...]


class EpilogueGrowth:
    """All cuts behind the product bound to ``anchor``, shortest first; the first is the product alone.

    ``factors`` are the tensors that the product reads as A and B, ``taken`` the values that other regions have.
    """

    def __init__(
        self, anchor: Var, factors: Sequence[Expr], values: GraphValues, taken: Mapping[Var, object], *, batched: bool
    ) -> None:
        self.values, self.taken, self.batched = values, taken, batched
        self.shape = static_shape(anchor) or ()
        self.members: list[Var] = [anchor]
        self.refused: dict[Var, str] = {}
        self.expressions = EpilogueExpressions(anchor, factors, values, self._place_of)
        self.cuts = [Cut(value=anchor, members=(anchor,), steps=(), tensors=tuple(self.expressions.tensors))]
        self._grow()

    def _grow(self) -> None:
        """Users join in program order; one that may not keeps all behind its operands from being closed."""
        pending = dict(self.values.followers_of(self.members[0]))
        while pending and len(self.members) < MOST_VALUES:
            variable = pending.pop(min(pending))
            operator = self.values.operator_of(self.values.bindings.get(variable))
            reason = self._obstacle(variable, operator)
            if reason:
                self.refused[variable] = reason
                return
            self.members.append(variable)
            if self._is_closed():
                self._cut(variable)
            if operator is not None and operator[0] in REDUCTIONS:
                return  # what has no rows any more is no epilogue
            pending.update(self.values.followers_of(variable))

    def _is_closed(self) -> bool:
        inside = set(self.members)
        return all(set(self.values.users_of(member)) <= inside for member in self.members[:-1])

    # ---- which operators may join --------------------------------------------------------------------------------

    def _obstacle(self, variable: Var, operator: tuple[str, list[Expr]] | None) -> str:
        """Why this user of the part cannot join it; empty where it can."""
        name, function = variable.name, operator_name(self.values.bindings.get(variable))
        if variable in self.taken:
            return f"{name} is in the epilogue of another product"
        if function in ANCHORS:
            return f"{name} is a product itself"
        if operator is None or not (operator[0] in FUNCTORS or is_spelling(operator[0]) or operator[0] in REDUCTIONS):
            return f"{name}: {function or 'what computes it'} is no function of epilogues"
        if operator[0] in REDUCTIONS:
            return self._no_reduction(variable)
        if static_shape(variable) != self.shape:
            return f"{name} has another shape, {described(variable)}"
        return self._no_arithmetic(variable, operator[0]) or self._no_operands(variable, operator[1])

    def _no_arithmetic(self, variable: Var, operator: str) -> str:
        dtype = dtype_of(variable)
        if dtype in FLOATS or (dtype == "bool" and operator not in FUNCTORS):
            return ""
        return f"{variable.name} is {dtype}, and epilogues compute in float32"

    def _no_operands(self, variable: Var, operands: Sequence[Expr]) -> str:
        for operand in operands:
            if not is_tensor(operand) or operand in self.members:
                continue
            if self._broadcast_of(operand) is None:
                return f"{variable.name}: its operand {described(operand)} is repeated along a part of the rows"
            if self._broadcast_of(operand) == "scalar" and self._place_of(operand)[1]:
                return f"{variable.name}: its operand {described(operand)} is another number for each product"
            if self.values.scalar_of(operand) is None and dtype_of(operand) not in ELEMENTS:
                return f"{variable.name}: epilogues read no {dtype_of(operand)}, as {described(operand)} is"
        return ""

    def _no_reduction(self, variable: Var) -> str:
        name, function = variable.name, operator_name(self.values.bindings[variable])
        if dtype_of(variable) != "float32":
            return f"{name}: {function} of {dtype_of(variable)} would be added up by atomics, which want float32"
        if self._reduced(variable) is None:
            return f"{name}: {function} runs over neither all rows nor all columns"
        return ""

    def _reduced(self, variable: Var) -> str | None:
        """`rows` where all rows become one, "columns" where all columns do; axes of one element do not count."""
        given = self.values.bindings[variable].attrs.axis
        rank = len(self.shape)
        axes = set(range(rank)) if given is None else {int(axis) % rank for axis in given}
        real = {axis for axis in axes if self.shape[axis] > 1}
        rows = {axis for axis in range(rank - 1) if self.shape[axis] > 1}
        if real == rows and rows:
            return "rows"
        return "columns" if real == {rank - 1} else None

    def _broadcast_of(self, operand: Expr) -> Broadcast | None:
        """How the operand lies over the product; None where templates have no distances for it."""
        given = static_shape(operand)
        if given is None or len(given) > len(self.shape):
            return None
        full = (1,) * (len(self.shape) - len(given)) + given
        rows = [mine for mine, own in zip(full[:-1], self.shape[:-1], strict=True) if own > 1]
        repeated = full[-1] != self.shape[-1] or self.shape[-1] == 1
        if all(extent == 1 for extent in rows) and rows:
            return "scalar" if full[-1] == 1 else "row"
        if all(extent > 1 for extent in rows):
            return ("column" if repeated else "matrix") if rows else ("scalar" if full[-1] == 1 else "row")
        return self._batch_broadcast(full)

    def _batch_broadcast(self, full: tuple[int, ...]) -> Broadcast | None:
        """Of a batch: a part of its own for each matrix or one for all, with its rows repeated or not."""
        if not self.batched or len(self.shape) < 3:
            return None
        pairs = [(mine, own) for mine, own in zip(full[:-2], self.shape[:-2], strict=True) if own > 1]
        if len({mine == own for mine, own in pairs}) > 1:
            return None
        by_row = full[-2] == self.shape[-2] and self.shape[-2] > 1
        by_column = full[-1] == self.shape[-1] and self.shape[-1] > 1
        return ("matrix" if by_column else "column") if by_row else ("row" if by_column else "scalar")

    # ---- what a closed part is -----------------------------------------------------------------------------------

    def _cut(self, value: Var) -> None:
        steps = self._activation(value) or self._single_steps()
        if steps is None:
            return
        expression = self._expression(value, steps[-1].function)
        if expression is None:
            return
        self.cuts.append(
            Cut(
                value=value,
                members=tuple(self.members),
                steps=steps,
                expression=expression,
                operands=self.expressions.operands_of(expression),
                tensors=tuple(self.expressions.tensors),
            )
        )

    def _expression(self, value: Var, last: str) -> str | None:
        """Of what is stored; None where it would be too long."""
        if last not in REDUCTION_STEPS:
            return self.expressions.of(value)
        inner = self.expressions.before(value)
        return None if inner is None else f"{last}({inner})"

    def _place_of(self, operand: Expr) -> tuple[OperandRole, int]:
        """Role of an operand, and elements between those of neighbouring products: 0 where all read the same."""
        spread = self._broadcast_of(operand)
        assert spread is not None and spread != "self", "`_no_operands` lets no other operand through"
        given = static_shape(operand) or ()
        own = prod(given[-2:]) if prod(given[:-2]) > 1 and self.batched else 0
        return spread, own

    def _activation(self, value: Var) -> tuple[EpilogueStep, ...] | None:
        """The longest end of the part that is an activation of an earlier cut's value."""
        for cut in self.cuts:
            spelling = self.members[len(cut.members) :]
            if len(spelling) > MOST_OPERATORS:
                continue
            name = recognise(self.values, cut.value, spelling)
            if name is not None:
                step = EpilogueStep(function=name, dtype=dtype_of(value), operators=len(spelling))
                self.expressions.apply(name, cut.value, value)
                return (*cut.steps, step)
        return None

    def _single_steps(self) -> tuple[EpilogueStep, ...] | None:
        last = self.cuts[-1]
        added = self.members[len(last.members) :]
        steps = [self._single_step(variable) for variable in added]
        if None in steps:
            return None
        for variable, step in zip(added, steps, strict=True):
            if step is not None and step.function not in REDUCTION_STEPS:
                self.expressions.add(variable)
        return (*last.steps, *(step for step in steps if step is not None))

    def _single_step(self, variable: Var) -> EpilogueStep | None:
        operator = self.values.operator_of(self.values.bindings[variable])
        assert operator is not None
        name, operands = operator
        if name in REDUCTIONS:
            return EpilogueStep(function=f"{name}_{self._reduced(variable)}", dtype=dtype_of(variable))
        if name not in FUNCTORS:
            return None
        tensors = [operand for operand in operands if is_tensor(operand)]
        others = [self._broadcast_of(operand) for operand in tensors if operand not in self.members]
        spread = (others[0] if others else "self") if len(tensors) > 1 else None
        return EpilogueStep(function=FUNCTORS[name], dtype=dtype_of(variable), operand=spread)

    def reason_of_end(self, cut: Cut) -> str:
        """Why nothing behind ``cut`` is in its region, the model apart."""
        users = self.values.users_of(cut.value)
        if len(users) > 1:
            names = [user if isinstance(user, str) else user.name for user in users]
            return f"{cut.value.name} is used by {', '.join(names[:-1])} and {names[-1]}"
        if not users or isinstance(users[0], str):
            return f"{cut.value.name} is {RESULT}"
        if self.refused:
            return next(iter(self.refused.values()))
        return f"{cut.value.name} goes on to no function that epilogues have"


# --- the expression --------------------------------------------------------------------------------------------------
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
        text = self.known.get(value)
        operator = self.values.operator_of(self.values.bindings[value])
        if text is not None and operator is not None and operator[0] == "astype":
            text = self.known.get(operator[1][0])
        return self._if_short(text)

    def before(self, value: Var) -> str | None:
        """Of what the operator that makes ``value``, which is no expression, reads."""
        operator = self.values.operator_of(self.values.bindings[value])
        assert operator is not None
        return self._if_short(self.known.get(operator[1][0]))

    @staticmethod
    def _if_short(text: str | None) -> str | None:
        return text if text is not None and len(text) <= MOST_CHARACTERS else None

    def operands_of(self, expression: str) -> tuple[EpilogueOperand, ...]:
        """Those that ``expression`` reads."""
        names = {node.id for node in ast.walk(ast.parse(expression, mode="eval")) if isinstance(node, ast.Name)}
        return tuple(operand for name, operand in self.read.items() if name in names)

    def apply(self, function: str, argument: Var, result: Var) -> None:
        """``result`` is ``function`` of ``argument``, however it is spelt."""
        inner = self.known.get(argument)
        self._keep(result, None if inner is None else _application(function, inner))

    def add(self, value: Var) -> None:
        """``value`` by its own operator."""
        operator = self.values.operator_of(self.values.bindings[value])
        assert operator is not None
        name, operands = operator
        written = [self._text_of(operand) for operand in operands]
        self._keep(value, None if None in written else self._call(name, [text or "" for text in written], value))

    def _keep(self, value: Var, text: str | None) -> None:
        self.known[value] = text if text is not None and len(text) <= 2 * MOST_CHARACTERS else None

    def _call(self, name: str, written: Sequence[str], value: Var) -> str | None:
        if name in _INFIX:
            return f"({written[0]} {_INFIX[name]} {written[1]})"
        if FUNCTORS.get(name) in ARITY:
            return f"{FUNCTORS[name]}({', '.join(written)})"
        if name == "astype":
            dtype = dtype_of(value)
            return written[0] if ELEMENTS[dtype].bits >= _WIDEST_BITS else f"cast({written[0]}, '{dtype}')"
        if name == "nn.leakyrelu":
            slope = float(self.values.bindings[value].attrs.alpha)
            return f"(maximum({written[0]}, 0.0) + {slope!r} * minimum({written[0]}, 0.0))"
        if name == "clip":
            return _clip(*written)
        return None

    def _text_of(self, operand: Expr) -> str | None:
        if operand in self.known:
            return self.known[operand]
        number = constant_number(self.values, operand)
        if number is not None:
            return repr(float(number))
        return self._name_of(operand) if is_tensor(operand) else None

    def _name_of(self, tensor: Expr) -> str:
        self.tensors.setdefault(tensor)
        name = operand_name(list(self.tensors).index(tensor))
        role, distance = self.role_of(tensor)
        self.read[name] = EpilogueOperand(name=name, role=role, dtype=dtype_of(tensor), batch_stride=distance)
        return name


def _application(function: str, value: str) -> str:
    """Mish is a product of its argument and functions that epilogues have."""
    return f"({value} * tanh(softplus({value})))" if function == "mish" else f"{function}({value})"


def _clip(value: str, low: str, high: str) -> str:
    """A bound that is infinite bounds nothing."""
    above = value if float(low) == -math.inf else f"maximum({value}, {low})"
    return above if float(high) == math.inf else f"minimum({above}, {high})"
