"""Keeps stock TVM's simplifier from treating floating-point numbers as reals, and lets NaN through max and min.

Lowering simplifies every expression of a kernel, and some of the rules hold for real numbers only. With several
operators of a model in one expression they fire between operators: ``(x + 12582912) - 12582912``, which rounds x to an
integer, becomes ``x``. What the rules look for is taken out of their sight here, by forms that cost no instruction:

==========================================  ==============================================  =========================
rule of stock TVM                           wrong for                                       hidden by
==========================================  ==============================================  =========================
``(x + y) - y = x``, ``x - (x + y) = -y``   every rounding                                  a Let, or a factor of 1
``x - x = 0``, ``x * 0 = 0``, ``0 / x = 0`` infinities and NaN                              a factor of 1; hidden 0
``x + 0 = x``                               -0                                              a hidden zero
``x / 0``, which stops the build            -                                               a hidden zero
``x == x``                                  NaN                                             ``x <= inf``
``not (x < y) = (y <= x)``                  NaN                                             a Cast of the comparison
``x < y or y <= x = true``                  NaN                                             a Cast of the comparison
the same between a choice and its branches  NaN                                             a Cast of the condition
==========================================  ==============================================  =========================

A hidden constant is ``fabs`` of it, which stock TVM does not compute and compilers do. docs/numerics.md says what may
change a value all the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm_ext._tvm import (
    IF_THEN_ELSE,
    Buffer,
    BufferStore,
    Call,
    Expr,
    Node,
    SBlock,
    Stmt,
    nodes_in,
    structural_equal,
    structural_map,
    structural_mutate,
    tirx,
)
from tvm_ext.analysis.computations import dtype_of, reads
from tvm_ext.analysis.predicates import is_in
from tvm_ext.ir.float_ir import bound, copy_of, hidden, is_float, is_number, nan_passing, uses_bfloat16

_ORDERINGS = (tirx.LT, tirx.LE, tirx.GT, tirx.GE)
_COMPARISONS = (*_ORDERINGS, tirx.EQ, tirx.NE)


def keep_floats(node: Node, *, by_product: bool = False) -> Node:
    """``node``, a statement or an expression, in a form whose floats stock TVM's simplifier leaves alone.

    ``by_product`` hides sums by a factor of 1, not by a Let: stock TVM's code generator for CPUs looks through a Let
    within a Let, which is what functions written as arithmetic consist of. So are sums in what loads bfloat16.
    """
    by_product = by_product or uses_bfloat16(node)
    rules: list[tuple[type[Node], Callable[[Any], Node]]] = [
        (tirx.Sub, lambda node: _subtraction(node, by_product)),
        (tirx.Add, _with_hidden_zeros),
        (tirx.Mul, _with_hidden_zeros),
        (tirx.Div, _with_hidden_zeros),
        (tirx.EQ, _equality),
        (tirx.NE, _equality),
        (tirx.Not, lambda node: tirx.Not(_hidden_ordering(node.a))),
        (tirx.And, lambda node: tirx.And(_hidden_ordering(node.a), _hidden_ordering(node.b))),
        (tirx.Or, lambda node: tirx.Or(_hidden_ordering(node.a), _hidden_ordering(node.b))),
        (tirx.Select, _choice),
        (Call, _conditional),
        (tirx.IfThenElse, _branch),
    ]
    return structural_map(node, rules)


def keep_floats_outside_reductions(node: Node) -> Node:
    """`keep_floats` for what stock TVM still has to schedule: it knows a reduction by the form of its combiner."""
    return structural_mutate(
        node,
        [
            (SBlock, lambda block, mutator: block if block.init is not None else mutator.default_mutate(block)),
            (BufferStore, lambda store, _: keep_floats(store)),
        ],
    )


def pass_nan_on(node: Node) -> Node:
    """``node`` with each floating-point Max and Min in a form whose result is NaN where an operand is.

    The machine's instruction (x86's ``maxps a, b`` is ``a > b ? a : b``) keeps a NaN in its second operand only. Beside
    a constant that is enough: ``max(x, 0)`` is ``0 > x ? 0 : x``, still one instruction. Otherwise the first operand is
    looked at as well, which is one more comparison and a masked maximum.
    """
    known = _accumulators(node)

    def passing(better: Callable[[Expr, Expr], Expr]) -> Callable[[Expr], Expr]:
        return lambda extreme: nan_passing(extreme.a, extreme.b, better, known) if is_float(extreme) else extreme

    return structural_map(node, [(tirx.Max, passing(tirx.GT)), (tirx.Min, passing(tirx.LT))])


def _accumulators(node: Node) -> list[Buffer]:
    """What a maximum or minimum is stored into that is one of its operands."""
    found: list[Buffer] = []
    for store in nodes_in(node, BufferStore):
        value = store.value
        if isinstance(value, tirx.Max | tirx.Min) and reads(value, store.buffer) and not is_in(store.buffer, found):
            found.append(store.buffer)
    return found


def _is_zero(value: Expr) -> bool:
    return isinstance(value, tirx.FloatImm) and value.value == 0


def _with_hidden_zeros(expr: Expr) -> Expr:
    if not is_float(expr) or not (_is_zero(expr.a) or _is_zero(expr.b)):
        return expr
    a, b = (hidden(side.value, dtype_of(side)) if _is_zero(side) else side for side in (expr.a, expr.b))
    return type(expr)(a, b)


def _subtraction(expr: Expr, by_product: bool) -> Expr:
    """A sum that is subtracted from, or subtracted, gets a name of its own; so does x in x - x."""
    if not is_float(expr):
        return expr
    if by_product and isinstance(expr.a, tirx.Add):
        return tirx.Sub(copy_of(expr.a), expr.b)
    if by_product and isinstance(expr.b, tirx.Add):
        return tirx.Sub(expr.a, copy_of(expr.b))
    if isinstance(expr.a, tirx.Add):
        return bound(expr.a, lambda total: tirx.Sub(total, expr.b))
    if isinstance(expr.b, tirx.Add):
        return bound(expr.b, lambda total: tirx.Sub(expr.a, total))
    if structural_equal(expr.a, expr.b):
        return tirx.Sub(copy_of(expr.a), expr.b)
    return expr


def _equality(expr: Expr) -> Expr:
    """x == x is whether x is a number, and x != x the contrary."""
    if not is_float(expr.a) or not structural_equal(expr.a, expr.b):
        return expr
    return is_number(expr.a) if isinstance(expr, tirx.EQ) else tirx.Not(_hidden_ordering(is_number(expr.a)))


def _is_float_ordering(value: Expr) -> bool:
    return isinstance(value, _ORDERINGS) and is_float(value.a)


def _hidden_ordering(value: Expr) -> Expr:
    """A comparison of floats whose contrary the simplifier does not know: not (x < y) is no y <= x where one is NaN."""
    if not _is_float_ordering(value):
        return value
    return tirx.NE(tirx.Cast("int32", value), tirx.IntImm("int32", 0))


def _compares_floats(node: Node) -> bool:
    return any(is_float(comparison.a) for comparison in nodes_in(node, tuple(_COMPARISONS)))


def _choice(expr: Expr) -> Expr:
    """Where a condition is false, the simplifier takes its contrary for granted."""
    if not _is_float_ordering(expr.condition) or not _compares_floats(expr.false_value):
        return expr
    return tirx.Select(_hidden_ordering(expr.condition), expr.true_value, expr.false_value)


def _conditional(expr: Expr) -> Expr:
    if not expr.op.same_as(IF_THEN_ELSE) or not _is_float_ordering(expr.args[0]):
        return expr
    if not _compares_floats(expr.args[2]):
        return expr
    return tirx.if_then_else(_hidden_ordering(expr.args[0]), expr.args[1], expr.args[2])


def _branch(statement: Stmt) -> Stmt:
    if (
        statement.else_case is None
        or not _is_float_ordering(statement.condition)
        or not _compares_floats(statement.else_case)
    ):
        return statement
    return tirx.IfThenElse(_hidden_ordering(statement.condition), statement.then_case, statement.else_case)
