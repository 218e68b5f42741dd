"""An axis along which conditions change at known places, as that of a concatenation: a loop for each section.

Worked example: ``if_then_else(v < 12, a[v], b[v - 12])`` for v below 48 is a loop over a and another one over b. LLVM
makes vectors of both, and none of the one loop. A padding, of which one section alone reads, gains nothing by it.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm_ext._tvm import IF_THEN_ELSE, Call, Expr, Var, nodes_in, structural_equal, structural_map, tirx
from tvm_ext.analysis.predicates import reads_memory

MOST_SECTIONS = 16
"""A choice: each is a loop of its own in the kernel's code."""

_ORDERINGS = {tirx.LT: operator.lt, tirx.LE: operator.le, tirx.GT: operator.gt, tirx.GE: operator.ge}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Section:
    """``value`` holds for ``size`` places of the axis from ``first`` on."""

    first: int
    size: int
    value: Expr


def sections(value: Expr, variable: Var, extent: int) -> list[Section]:
    """``value`` for parts of ``variable``'s axis where no comparison of it changes.

    The whole where they are many, or where only one of them reads a tensor.
    """
    whole = Section(first=0, size=extent, value=value)
    parts = _cut(whole, variable)
    reading = sum(reads_memory(part.value) for part in parts)
    return parts if len(parts) <= MOST_SECTIONS and reading > 1 else [whole]


def _cut(part: Section, variable: Var) -> list[Section]:
    """``part`` in sections. Too many are not looked into.

    A decided choice can leave a comparison that was none of the variable, and is cut at in its turn: ``2 <=
    if_then_else(7 <= v, 12 - v, v)`` is ``2 <= v`` below 7.
    """
    end = part.first + part.size
    starts = [part.first, *(place for place in _changes(part.value, variable) if part.first < place < end)]
    ranges = zip(starts, [*starts[1:], end], strict=True)
    parts = [Section(first=first, size=stop - first, value=part.value) for first, stop in ranges]
    if len(parts) > MOST_SECTIONS:
        return parts
    decided = [dataclasses.replace(own, value=_decided(own, variable)) for own in parts]
    return [
        cut
        for before, own in zip(parts, decided, strict=True)
        for cut in ([own] if structural_equal(before.value, own.value) else _cut(own, variable))
    ]


def _changes(value: Expr, variable: Var) -> list[int]:
    """The places from which on a comparison of ``variable`` holds, or no longer holds; in order."""
    found = [_compared(node, variable) for node in nodes_in(value, tuple(_ORDERINGS))]
    compared = [item for item in found if item is not None]
    return sorted({place for own in compared for place in range(own.bound - 1, own.bound + 2) if own.changes(place)})


@dataclass(frozen=True, slots=True)
class _Compared:
    """A comparison of the variable with the number ``bound``."""

    holds: Callable[[int], bool]
    bound: int

    def changes(self, place: int) -> bool:
        return self.holds(place - 1) != self.holds(place)


def _compared(node: Expr, variable: Var) -> _Compared | None:
    compare = next(function for kind, function in _ORDERINGS.items() if isinstance(node, kind))
    if variable.same_as(node.a) and isinstance(node.b, tirx.IntImm):
        bound = int(node.b)
        return _Compared(lambda place: bool(compare(place, bound)), bound)
    if variable.same_as(node.b) and isinstance(node.a, tirx.IntImm):
        bound = int(node.a)
        return _Compared(lambda place: bool(compare(bound, place)), bound)
    return None


def _decided(part: Section, variable: Var) -> Expr:
    """The value, with the comparisons of ``variable`` decided that are the same all over ``part``."""

    def comparison(node: Expr) -> Expr:
        compared = _compared(node, variable)
        holds = {compared.holds(place) for place in (part.first, part.first + part.size - 1)} if compared else set()
        return tirx.const(holds.pop(), "bool") if len(holds) == 1 else node

    def both(node: Expr) -> Expr:
        return _joined(node, absorbing=False)

    def either(node: Expr) -> Expr:
        return _joined(node, absorbing=True)

    def negation(node: Expr) -> Expr:
        known = _truth(node.a)
        return node if known is None else tirx.const(not known, "bool")

    def selection(node: Expr) -> Expr:
        known = _truth(node.condition)
        return node if known is None else node.true_value if known else node.false_value

    def choice(call: Call) -> Expr:
        known = _truth(call.args[0]) if call.op.same_as(IF_THEN_ELSE) else None
        return call if known is None else call.args[1 if known else 2]

    rules: Sequence[tuple[type, Callable[[Expr], Expr]]] = [
        *((kind, comparison) for kind in _ORDERINGS),
        (tirx.And, both), (tirx.Or, either), (tirx.Not, negation), (tirx.Select, selection), (Call, choice),
    ]  # fmt: skip
    return structural_map(part.value, list(rules))


def _joined(node: Expr, absorbing: bool) -> Expr:
    """A conjunction or disjunction of which an operand may be known."""
    for known, other in ((_truth(node.a), node.b), (_truth(node.b), node.a)):
        if known is not None:
            return tirx.const(absorbing, "bool") if known == absorbing else other
    return node


def _truth(value: Expr) -> bool | None:
    return bool(int(value)) if isinstance(value, tirx.IntImm) else None
