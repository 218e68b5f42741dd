"""Quotients by a number of the row as products with its reciprocal, within a unit in the last place."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tvm_ext._tvm import Call, Expr, TensorLoad, ir, nodes_in, structural_map, tirx
from tvm_ext.analysis.computations import Computation, dtype_of, mentions

SMALLEST_ADDEND = 1e-30  # sqrt(x + 1e-30) is 1e-15 at least, whose reciprocal float32 holds with room to spare


def with_reciprocals(computations: Sequence[Computation]) -> list[Computation]:
    """``a / b`` as ``a * (1 / b)`` where ``b`` is the same for the whole row and cannot be so small that 1 / b is inf.

    A vector division takes as long as eight products; LLVM takes ``1 / b`` out of the loop. Two divisors qualify: a
    softmax's sum, which holds e^0, and the square root of something plus a constant, as all normalisations have it.
    """
    return [
        computation
        if computation.is_reduction
        else dataclasses.replace(computation, value=_multiply(computation, computations))
        for computation in computations
    ]


def _multiply(computation: Computation, computations: Sequence[Computation]) -> Expr:
    def rewrite(quotient: Expr) -> Expr:
        if dtype_of(quotient) != "float32" or mentions(quotient.b, *computation.spatial[-1:]):
            return quotient
        if not mentions(quotient.a, *computation.spatial[-1:]) or not _is_bounded_below(quotient.b, computations):
            return quotient
        return quotient.a * (tirx.const(1.0, "float32") / quotient.b)

    return structural_map(computation.value, (tirx.Div, rewrite))


def _is_bounded_below(value: Expr, computations: Sequence[Computation]) -> bool:
    if isinstance(value, TensorLoad):
        total = _writer(value, computations)
        return total is not None and total.combiner == "sum" and _is_exp_below_maximum(total.value, computations)
    if _is_call(value, "tirx.sqrt"):
        addend = getattr(getattr(value.args[0], "b", None), "value", None)
        return isinstance(value.args[0], tirx.Add) and isinstance(addend, float) and addend >= SMALLEST_ADDEND
    return False


def _is_exp_below_maximum(value: Expr, computations: Sequence[Computation]) -> bool:
    """Whether ``value`` reads ``exp(x - m)`` with m a maximum of this row: one of the exponentials is then 1."""
    writer = _writer(value, computations) if isinstance(value, TensorLoad) else None
    exponential = value if writer is None else writer.value
    if not _is_call(exponential, "tirx.exp") or not isinstance(exponential.args[0], tirx.Sub):
        return False
    number, highest = exponential.args[0].a, exponential.args[0].b
    maximum = _writer(highest, computations) if isinstance(highest, TensorLoad) else None
    if maximum is None or maximum.combiner != "max":
        return False
    return type(number) is type(maximum.value) and _same_tensors(number, maximum.value)


def _same_tensors(a: Expr, b: Expr) -> bool:
    """Whether two values read the same tensors; their index variables differ, as those of two computations do."""
    found = [[load.source for load in nodes_in(value, TensorLoad)] for value in (a, b)]
    return len(found[0]) == len(found[1]) and all(x.same_as(y) for x, y in zip(*found, strict=True))


def _writer(load: TensorLoad, computations: Sequence[Computation]) -> Computation | None:
    return next((computation for computation in computations if computation.target.same_as(load.source)), None)


def _is_call(value: Expr, name: str) -> bool:
    return isinstance(value, Call) and isinstance(value.op, ir.Op) and str(value.op.name) == name
