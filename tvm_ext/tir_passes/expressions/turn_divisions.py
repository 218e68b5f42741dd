"""Writes remainders and quotients of what counts downwards as those of what counts upwards.

Stock TVM's FlattenBuffer simplifies ``(3 - j) % 4`` over j < 8 to ``-(j % -4)``, which is 0, 3, 2, 1 instead of 3, 2,
1, 0: its iterator maps lose the constant where the scale is negative. A slice that runs backwards over a tiled tensor
has that form. With x = j and c = 3 it is written as ``(4 - 1) - (x - c - 1) % 4``, here ``3 - j % 4``; and likewise
``(c - x) // m`` as ``-1 - (x - c - 1) // m``. Both hold for every x, and neither has a negative scale inside.
"""

from __future__ import annotations

from tvm_ext._tvm import Expr, PrimFunc, Stmt, structural_map, tirx
from tvm_ext.analysis.computations import dtype_of


def with_turned_divisions(func: PrimFunc) -> PrimFunc:
    """``func`` with `turn_divisions` done to its body."""
    body = turn_divisions(func.body)
    if body.same_as(func.body):
        return func
    return tirx.PrimFunc(list(func.params), body, func.ret_type).with_attrs(dict(func.attrs or {}))


def turn_divisions(body: Stmt) -> Stmt:
    """``body``, a statement or an expression, without ``//`` and ``%`` of constants minus something."""

    def remainder(node: Expr) -> Expr:
        turned = _turned(node)
        if turned is None:
            return node
        last = tirx.IntImm(dtype_of(node), int(node.b.value) - 1)
        return last - tirx.floormod(turned, node.b)

    def quotient(node: Expr) -> Expr:
        turned = _turned(node)
        return node if turned is None else tirx.IntImm(dtype_of(node), -1) - tirx.floordiv(turned, node.b)

    return structural_map(body, [(tirx.FloorMod, remainder), (tirx.FloorDiv, quotient)])


def _turned(node: Expr) -> Expr | None:
    """``x - c - 1`` up to multiples of the divisor for a remainder, where the dividend is ``c - x``; else None."""
    if not isinstance(node.b, tirx.IntImm) or int(node.b.value) < 1:
        return None
    divisor = int(node.b.value)
    constant, terms = _sum(node.a, 1)
    if not terms or any(sign > 0 for sign, _ in terms):
        return None
    first = -constant - 1
    if isinstance(node, tirx.FloorMod):
        first %= divisor
    total: Expr = terms[0][1]
    for _, term in terms[1:]:
        total = total + term
    return total + tirx.IntImm(dtype_of(node), first) if first else total


def _sum(node: Expr, sign: int) -> tuple[int, list[tuple[int, Expr]]]:
    """``node`` as a constant and terms with their signs; a factor below 0 counts as a sign."""
    kind = type(node).__name__
    if kind == "IntImm":
        return sign * int(node.value), []
    if kind in ("Add", "Sub"):
        (left, first), (right, second) = _sum(node.a, sign), _sum(node.b, sign if kind == "Add" else -sign)
        return left + right, [*first, *second]
    if kind == "Mul" and isinstance(node.b, tirx.IntImm) and int(node.b.value) < 0:
        return 0, [(-sign, node.a * tirx.IntImm(dtype_of(node), -int(node.b.value)))]
    return 0, [(sign, node)]
