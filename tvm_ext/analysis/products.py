"""Which operators are products (GEMMs, convolutions), and which of their parameters are the factors."""

from __future__ import annotations

from tvm_ext._tvm import Buffer, PrimFunc
from tvm_ext.errors import IllegalRewrite

from .computations import Computation, OperatorBody, read_operator
from .predicates import is_in


def factors_of(func: PrimFunc) -> tuple[int, ...]:
    """Positions of the parameters that the function's only sum of products reads, through padding and the like.

    () where the function is no product: it has no such sum, or several, or another reduction beside it.
    """
    try:
        operator = read_operator(func, "operator")
    except IllegalRewrite:
        return ()
    reductions = [computation for computation in operator.computations if computation.is_reduction]
    if len(reductions) != 1 or reductions[0].combiner != "sum" or len(reductions[0].loads()) < 2:
        return ()
    read = _sources(reductions[0], operator)
    return tuple(i for i, param in enumerate(operator.params) if is_in(param, read))


def _sources(computation: Computation, operator: OperatorBody) -> list[Buffer]:
    """Everything that ``computation`` reads, directly or through other computations."""
    found: list[Buffer] = []
    pending = [computation]
    while pending:
        for buffer in pending.pop().sources():
            if not is_in(buffer, found):
                found.append(buffer)
                pending += [other for other in operator.computations if other.target.same_as(buffer)]
    return found
