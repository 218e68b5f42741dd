"""Keeps indices right where stock TVM simplifies the indices of a tensor together: its FlattenBuffer does.

IterMapSimplify puts one offset of a variable into all of its quotients and remainders. Worked example: of ``a[row //
24, (row % 24 + 6) % 8]`` it makes ``a[(row + 6) // 24 - 1, (row + 6) % 8]``, wrong for rows 0 to 17. Quotients and
remainders that round towards zero it leaves alone, and these are the same where the dividend is not negative.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from tvm_ext._tvm import (
    Analyzer,
    BufferStore,
    Expr,
    For,
    PrimFunc,
    TensorLoad,
    Var,
    ir,
    nodes_in,
    structural_equal,
    structural_map,
    structural_walk,
    tirx,
)


def guarded(func: PrimFunc) -> PrimFunc:
    """``func`` whose indices stock TVM may simplify; itself where they all are such."""
    accesses = nodes_in(func.body, (TensorLoad, BufferStore))
    if not any(_is_at_risk(access.indices) for access in accesses):
        return func
    analyzer = Analyzer()
    binders = [(For, partial(_bind, analyzer)), (tirx.AttrStmt, partial(_bind_thread, analyzer))]
    structural_walk(func.body, binders)

    def load(access: TensorLoad) -> TensorLoad:
        if not _is_at_risk(access.indices):
            return access
        return tirx.BufferLoad(access.source, _rewritten(access.indices, analyzer))

    def store(access: BufferStore) -> BufferStore:
        if not _is_at_risk(access.indices):
            return access
        return BufferStore(access.buffer, access.value, _rewritten(access.indices, analyzer))

    return func.with_body(structural_map(func.body, [(TensorLoad, load), (BufferStore, store)]))


def _bind(analyzer: Analyzer, loop: For) -> None:
    analyzer.bind(loop.loop_var, ir.Range.from_min_extent(loop.min, loop.extent))


def _bind_thread(analyzer: Analyzer, statement: tirx.AttrStmt) -> None:
    if statement.attr_key == "thread_extent":
        extent = statement.value
        analyzer.bind(statement.node.var, ir.Range.from_min_extent(tirx.const(0, extent.ty.dtype), extent))


def _is_at_risk(indices: Sequence[Expr]) -> bool:
    """Whether two quotients or remainders are of the same variables, and one of a value with an offset.

    ``v // 7`` and ``v % 7`` are of the same value by the same divisor: stock TVM puts them together again, which is
    right. It does nothing where any index has a minimum or maximum.
    """
    divisions = nodes_in(list(indices), (tirx.FloorDiv, tirx.FloorMod))
    if len(divisions) < 2 or nodes_in(list(indices), (tirx.Min, tirx.Max)):
        return False
    return any(
        set(nodes_in(one.a, Var)) == set(nodes_in(other.a, Var))
        and not (structural_equal(one.a, other.a) and structural_equal(one.b, other.b))
        for one in divisions
        if _has_offset(one.a)
        for other in divisions
    )


def _has_offset(value: Expr) -> bool:
    """Whether a number is added to ``value`` or to a part of it."""
    sums = nodes_in(value, (tirx.Add, tirx.Sub))
    return any(isinstance(operand, tirx.IntImm) for node in sums for operand in (node.a, node.b))


def _rewritten(indices: Sequence[Expr], analyzer: Analyzer) -> list[Expr]:
    def quotient(node: tirx.FloorDiv) -> Expr:
        if not _has_offset(node.a):
            return node
        whole = _multiples(node, analyzer)
        if whole is None:
            return tirx.truncdiv(node.a - _remainder(node), node.b)
        return tirx.truncdiv(node.a + whole * node.b, node.b) - whole

    def remainder(node: tirx.FloorMod) -> Expr:
        if not _has_offset(node.a):
            return node
        whole = _multiples(node, analyzer)
        return _remainder(node) if whole is None else tirx.truncmod(node.a + whole * node.b, node.b)

    return [structural_map(index, [(tirx.FloorDiv, quotient), (tirx.FloorMod, remainder)]) for index in indices]


def _multiples(node: tirx.FloorDiv | tirx.FloorMod, analyzer: Analyzer) -> int | None:
    """How many divisors make the dividend positive or 0; None where that is not known."""
    if not isinstance(node.b, tirx.IntImm) or int(node.b) <= 0:
        return None
    least = int(analyzer.const_int_bound(node.a).min_value)
    if least < -_FARTHEST:
        return None
    return max(0, -(least // int(node.b)))


_FARTHEST = 2**31  # beyond, a bound says that there is none


def _remainder(node: tirx.FloorDiv | tirx.FloorMod) -> Expr:
    """That of floor division, for dividends of any sign."""
    return tirx.truncmod(tirx.truncmod(node.a, node.b) + node.b, node.b)
