"""Average pooling's division, made a multiplication: the number of elements in a window is a product over its axes.

``pool_avg`` divides by ``max(rows(y) * columns(x), 1)``, written with minima and maxima of int64, which cost more than
the sum itself. Both factors are known when the kernel is made, so their reciprocals go into two short tables. Worked
example, 3x3 with stride 1 over 5 columns padded by 1: columns(x) = 2 3 3 3 2, table 1/2 1/3 1/3 1/3 1/2. The quotient
may differ by two units in the last place.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from operator import mul

from tvm_ext._tvm import Buffer, Expr, Stmt, TensorLoad, Var, nodes_in, structural_map, tirx
from tvm_ext.analysis.computations import Computation, dtype_of
from tvm_ext.analysis.predicates import is_in
from tvm_ext.analysis.window import Window
from tvm_ext.ir.build_ir import SERIAL, allocate, index, load, loop, new_buffer, store

OPERATIONS: Mapping[str, Callable[[int, int], int]] = {
    "Add": lambda a, b: a + b,
    "Sub": lambda a, b: a - b,
    "Mul": lambda a, b: a * b,
    "Min": min,
    "Max": max,
    "FloorDiv": lambda a, b: a // b,
    "Div": lambda a, b: int(a / b),  # truncates
}


def multiply_by_reciprocals(
    window: Window, epilogue: Sequence[Computation]
) -> tuple[tuple[Computation, ...], tuple[Stmt, ...]]:
    """``epilogue`` with the division of the window's sum replaced wherever its divisor is understood, and the
    statements that fill the tables which it reads.
    """
    tables: list[Stmt] = []

    def multiply(computation: Computation) -> Computation:
        def divide(node: Expr) -> Expr:
            if not isinstance(node.a, TensorLoad) or not node.a.source.same_as(window.anchor.target):
                return node
            factors = _reciprocal(window, computation, node.b, tables)
            return node if factors is None else reduce(mul, factors, node.a)

        return dataclasses.replace(computation, value=structural_map(computation.value, (tirx.Div, divide)))

    return tuple(map(multiply, epilogue)), tuple(tables)


def _reciprocal(window: Window, computation: Computation, divisor: Expr, tables: list[Stmt]) -> list[Expr] | None:
    """The factors whose product is 1 / ``divisor``; None where it is no product of one function per axis."""
    dtype = window.dtype
    if type(divisor).__name__ == "FloatImm":
        return [tirx.const(1.0 / float(divisor.value), dtype)]
    if type(divisor).__name__ != "Cast" or dtype_of(divisor) != dtype:
        return None
    constant, factors = 1.0, []
    for factor in _factors(divisor.value):
        values = _values(computation, factor)
        if values is None or min(values[1]) < 1:
            return None
        variable, numbers = values
        if len(set(numbers)) == 1:
            constant /= numbers[0]
            continue
        table, fill = _table([1.0 / n for n in numbers], dtype)
        tables += fill
        factors.append(load(table, [variable]))
    return factors if constant == 1.0 and factors else [*factors, tirx.const(constant, dtype)]


def _factors(divisor: Expr) -> list[Expr]:
    """``max(a * b, 1)`` is a * b where both are at least 1, which `_reciprocal` checks."""
    kind = type(divisor).__name__
    if kind == "Max" and getattr(divisor.b, "value", None) == 1:
        return _factors(divisor.a)
    if kind == "Mul":
        return [*_factors(divisor.a), *_factors(divisor.b)]
    return [divisor]


def _values(computation: Computation, factor: Expr) -> tuple[Expr, list[int]] | None:
    """The one axis variable of ``computation`` in ``factor`` and the values over its points; None where there are
    others.
    """
    used: list[Var] = []
    for found in nodes_in(factor, Var):
        if not is_in(found, used):
            used.append(found)
    if len(used) > 1 or not all(any(v.same_as(own) for own in computation.spatial) for v in used):
        return None
    variable = used[0] if used else computation.spatial[-1]
    points = range(computation.extent(variable) if used else 1)
    values = [_evaluate(factor, variable, point) for point in points]
    known = [value for value in values if value is not None]
    return (variable, known) if len(known) == len(values) else None


def _evaluate(node: Expr, variable: Var, point: int) -> int | None:
    if node.same_as(variable):
        return point
    kind = type(node).__name__
    if kind == "IntImm":
        return int(node.value)
    if kind == "Cast":
        return _evaluate(node.value, variable, point)
    if kind not in OPERATIONS:
        return None
    a, b = _evaluate(node.a, variable, point), _evaluate(node.b, variable, point)
    return None if a is None or b is None else OPERATIONS[kind](a, b)


def _table(values: Sequence[float], dtype: str) -> tuple[Buffer, list[Stmt]]:
    """A table of ``values`` and its filling: the most frequent one everywhere, then the others one by one.

    It is twice as long as they are, so that a vector may begin at any of them (`may_overrun`).
    """
    usual = Counter(values).most_common(1)[0][0]
    table = new_buffer([2 * len(values)], dtype, "reciprocals")
    fill = loop(2 * len(values), SERIAL, "i", lambda i: store(table, tirx.const(usual, dtype), [i]))
    others = [store(table, tirx.const(value, dtype), [index(i)]) for i, value in enumerate(values) if value != usual]
    return table, [allocate(table), fill, *others]
