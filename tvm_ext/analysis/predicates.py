"""Questions about computations that planners and emitters ask alike, answered from the computations alone."""

from __future__ import annotations

from collections.abc import Sequence

from tvm_ext._tvm import (
    IF_THEN_ELSE,
    Buffer,
    Call,
    Expr,
    For,
    ForKind,
    IterVar,
    PrimFunc,
    SBlockRealize,
    Stmt,
    TensorLoad,
    Var,
    nodes_in,
    structural_equal,
    structural_walk,
    tirx,
)

from .computation_exprs import flat_stride
from .computations import Computation, reads, static_shape


def is_in(item: Buffer | Var, items: Sequence[Buffer] | Sequence[Var]) -> bool:
    """Whether a buffer or variable itself, not one like it, is among ``items``."""
    return any(item.same_as(other) for other in items)


def reads_memory(value: Expr | Stmt) -> bool:
    return bool(nodes_in(value, TensorLoad))


def unbounded_reduction(func: PrimFunc) -> str:
    """The block of a scheduled ``func`` whose results stock TVM (0.27) would store beyond their tensor; "" if none.

    LowerCrossThreadReduction forgets a block's condition where it stores what the threads have reduced. Worked example:
    of dlight's GEMV, 5 sums by 16 rows of 32 threads that share one each, where ``v < 5``: 16 rows store.
    """
    bound: list[Var] = []
    blocks: list[SBlockRealize] = []
    of_threads = (For, lambda loop: bound.append(loop.loop_var) if loop.kind == ForKind.THREAD_BINDING else None)
    structural_walk(func.body, [of_threads, (SBlockRealize, blocks.append)])
    for realize in blocks:
        pairs = zip(realize.block.iter_vars, realize.iter_values, strict=True)
        reduced = [var for axis, value in pairs if axis.iter_type == IterVar.CommReduce for var in nodes_in(value, Var)]
        across = realize.block.init is not None and any(is_in(var, bound) for var in reduced)
        if across and not all(is_in(var, reduced) for var in nodes_in(realize.predicate, Var)):
            return str(realize.block.name_hint)
    return ""


def has_call(computation: Computation, *, besides_if_then_else: bool = False) -> bool:
    """Whether the computation's value calls a function, so that computing it twice costs more than storing it."""
    calls = nodes_in(computation.value, Call)
    return any(not (besides_if_then_else and call.op.same_as(IF_THEN_ELSE)) for call in calls)


def is_thread_bound(func: PrimFunc) -> bool:
    """Whether ``func`` has a loop that is bound to threads or blocks of a GPU."""
    if any(loop.kind == ForKind.THREAD_BINDING for loop in nodes_in(func.body, For)):
        return True
    return any(node.attr_key == "thread_extent" for node in nodes_in(func.body, tirx.AttrStmt))


def factors_of(computation: Computation) -> tuple[TensorLoad, TensorLoad] | None:
    """The loads of two tensors that ``computation`` multiplies, in the order of its loads; None where it does not.

    Casts are looked through: products of what is narrow are exact in what it is widened to. Worked example: none of
    ``tanh(x) * w``, which reads two tensors as a product does.
    """
    value = computation.value.value if isinstance(computation.value, tirx.Cast) else computation.value
    if not isinstance(value, tirx.Mul):
        return None
    sides = [_without_casts(side) for side in (value.a, value.b)]
    loads = computation.loads()
    found = [side for load in loads for side in sides if side.same_as(load) or structural_equal(side, load)]
    distinct = len(loads) == 2 and not loads[0].source.same_as(loads[1].source)
    return (found[0], found[1]) if distinct and len(found) == 2 else None


def _without_casts(value: Expr) -> Expr:
    while isinstance(value, tirx.Cast):
        value = value.value
    return value


def reads_only_its_own_element(consumer: Computation, anchor: Computation) -> bool:
    """Whether an epilogue computation reads the anchor's result exactly at the element that it writes itself,
    everywhere.

    The tile stores over the anchor's extents: a consumer of others reads its own element too, but not over the same
    elements. Worked example: ``y[i, j]`` for j < 3 of ``x`` with 8 columns (a slice from 0) would be written past its
    end, ``if j < 8: x[i, j] else: 0`` for j < 10 (padding behind) would keep two columns that nothing writes.
    """
    if consumer.is_reduction or not consumer.writes_at_its_own_axes():
        return False
    shape = static_shape(anchor.target)
    if tuple(consumer.extent(v) for v in consumer.spatial) != shape or static_shape(consumer.target) != shape:
        return False
    loads = [load for load in consumer.loads() if load.source.same_as(anchor.target)]
    return reads(consumer.value, anchor.target) and all(
        all(i.same_as(v) for i, v in zip(load.indices, consumer.spatial, strict=True)) for load in loads
    )


def shared_axes(computations: Sequence[Computation]) -> int:
    """How many leading axes all computations have in common; a lone reduction has all its own.

    Worked example: softmax over (n, h, k) has maxelem[n, h], exp[n, h, k] and sum[n, h]; every read of one of them
    addresses n and h by the reader's own first two axes, and no other axis agrees: 2.
    """
    limit = min(len(computation.spatial) for computation in computations)
    if len(computations) == 1:
        return limit
    count = 0
    while count < limit and _agree(computations, count):
        count += 1
    return count


def _agree(computations: Sequence[Computation], position: int) -> bool:
    extents = {computation.extent(computation.spatial[position]) for computation in computations}
    written = [
        computation.target
        for computation in computations
        if any(reads(other.value, computation.target) for other in computations)
    ]
    if len(extents) != 1:
        return False
    for computation in computations:
        variable = computation.spatial[position]
        if len(computation.indices) <= position or not computation.indices[position].same_as(variable):
            return False
        for load in computation.loads():
            internal = is_in(load.source, written)
            if internal and (len(load.indices) <= position or not load.indices[position].same_as(variable)):
                return False
    return True


def contiguous_in(computation: Computation, variable: Var) -> bool:
    """Whether every load steps by at most one element along ``variable``, and one of them by exactly one."""
    strides = [flat_stride(load, variable, computation) for load in computation.loads()]
    return 1 in strides and all(stride in (0, 1) for stride in strides)
