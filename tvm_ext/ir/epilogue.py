"""One element of a result, or what a fused epilogue makes of it, on its way to memory."""

from __future__ import annotations

from collections.abc import Sequence

from tvm_ext._tvm import Expr, Stmt, Var
from tvm_ext.analysis.computations import Computation, dtype_of, replace_loads, substitute

from .build_ir import bind, cast_to, sequence, store


def store_element(
    computation: Computation, epilogue: Sequence[Computation], element: Expr, table: Sequence[tuple[Var, Expr]]
) -> Stmt:
    """Store one accumulated element, or what each epilogue computation makes of it; ``table`` has the axes."""
    result = cast_to(element, dtype_of(computation.target))
    position = [substitute(i, table) for i in computation.indices]
    if not epilogue:
        return store(computation.target, result, position)
    writes = []
    for consumer in epilogue:
        value, moved = consumed(consumer, computation, result, position)
        writes.append(store(consumer.target, value, [substitute(i, moved) for i in consumer.indices]))
    return sequence(*writes)


def consumed(
    consumer: Computation, anchor: Computation, result: Expr, position: Sequence[Expr]
) -> tuple[Expr, list[tuple[Var, Expr]]]:
    """The consumer's value at ``position`` of the anchor, and its variables there."""
    value = replace_loads(consumer.value, lambda item: result if item.source.same_as(anchor.target) else item)
    moved = bind(consumer.spatial, position)
    return substitute(value, moved), moved
