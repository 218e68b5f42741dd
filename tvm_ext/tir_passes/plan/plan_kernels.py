"""Divides an operator's computations into kernels: register tiles for what has reuse, shared rows for the rest.

First `simplify` inlines what would only copy or is cheap, so that a chain of element-wise computations is one
computation. Then each reduction that has data reuse or a sliding window becomes the anchor of a tile kernel, with the
computations that consume its result element by element as its epilogue; the other computations join into row kernels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

from tvm_ext._tvm import TensorLoad, nodes_in, tirx
from tvm_ext.analysis.computation_exprs import access_of, axis_names, count_flops, count_operations, linear_index
from tvm_ext.analysis.computation_rewrites import inline, split_divided_axes
from tvm_ext.analysis.computations import Computation, OperatorBody, reads
from tvm_ext.analysis.predicates import contiguous_in, has_call, reads_only_its_own_element, shared_axes
from tvm_ext.analysis.window import is_padding
from tvm_ext.support.limits import check_count, check_time, limits

CHEAP_FLOPS = 2  # recomputing this much costs less than storing and loading the element


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TileGroup:
    """A reduction with reuse, kept in tiles, with its fused epilogue.

    A computation of ``prologue`` is computed while the inputs are copied to shared memory: it is injective, writes at
    its own axes, and is read by ``anchor`` alone. CPUs have none. ``border`` is a padding whose inner part ``epilogue``
    stores; what lies outside has to be filled besides. GPUs have none.
    """

    anchor: Computation
    epilogue: tuple[Computation, ...]
    prologue: tuple[Computation, ...] = ()
    border: Computation | None = None

    @property
    def computations(self) -> tuple[Computation, ...]:
        return (self.anchor, *self.prologue, *self.epilogue)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RowGroup:
    """Computations that run row by row together."""

    computations: tuple[Computation, ...]


WorthInlining = Callable[[Computation, Sequence[Computation]], bool]


def simplify(operator: OperatorBody, worth_inlining: WorthInlining | None = None) -> OperatorBody:
    """``operator`` with every computation inlined that is not worth a buffer of its own.

    ``worth_inlining`` answers that for a computation and its consumers; left out: as kernels over whole tensors ask it.
    Raises LimitPassed for one that is too large to look at.
    """
    worth_inlining = worth_inlining or _worth_inlining
    check_size(operator)
    position = 0
    sources = {id(computation): computation.sources() for computation in operator.computations}
    while position < len(operator.computations):
        check_time()
        producer = operator.computations[position]
        consumers = [
            computation
            for computation in operator.computations
            if any(producer.target.same_as(source) for source in sources[id(computation)])
        ]
        if consumers and not operator.is_output(producer.target) and worth_inlining(producer, consumers):
            inlined = {id(computation): inline(producer, computation) for computation in consumers}
            computations = tuple(
                inlined.get(id(computation), computation)
                for computation in operator.computations
                if computation is not producer
            )
            sources |= {id(computation): computation.sources() for computation in inlined.values()}
            operator = dataclasses.replace(operator, computations=computations)
        else:
            position += 1
    return operator


def check_size(operator: OperatorBody) -> None:
    """Raise LimitPassed where the operator has too many computations, or one of them too large a value."""
    check_count("computations", len(operator.computations), "computations")
    for computation in operator.computations:
        check_count("value_operations", count_operations(computation.value), f"operations in {computation.name}")


def _worth_inlining(producer: Computation, consumers: Sequence[Computation]) -> bool:
    if producer.is_reduction or not producer.writes_at_its_own_axes():
        return False
    if any(operations_after_inlining(producer, computation) > limits().inlined_operations for computation in consumers):
        return False
    if any(_choices_after_inlining(producer, computation) > limits().inlined_choices for computation in consumers):
        return False
    if is_affine_copy(producer):
        return True
    for computation in consumers:
        if computation.is_reduction and (computation.point_count > producer.point_count or not _is_affine(producer)):
            return False  # each element is read more than once, or could not be read in vectors: compute it first
        if computation.is_reduction and is_padding(producer):
            return False  # a window's padding is cheaper between its rows than as a condition on each element
    cheap = not has_call(producer) and count_flops(producer.value) <= CHEAP_FLOPS
    once = len(consumers) == 1 and sum(load.source.same_as(producer.target) for load in consumers[0].loads()) == 1
    return once or cheap


def size_notes(operator: OperatorBody) -> list[str]:
    """For the report: the computations of a simplified operator that keep a buffer for a limit alone."""
    return [
        *_kept_for(operator, operations_after_inlining, limits().inlined_operations, "operations"),
        *_kept_for(operator, _choices_after_inlining, limits().inlined_choices, "choices"),
    ]


def _kept_for(
    operator: OperatorBody, count: Callable[[Computation, Computation], int], most: int, what: str
) -> list[str]:
    kept = []
    for producer in operator.computations:
        consumers = operator.consumers(producer.target)
        inlinable = not producer.is_reduction and producer.writes_at_its_own_axes()
        sizes = [count(producer, computation) for computation in consumers]
        if inlinable and not operator.is_output(producer.target) and max(sizes, default=0) > most:
            kept.append(producer.name)
    return [f"{', '.join(kept)} in a buffer: an expression may have {most} {what}"] if kept else []


def operations_after_inlining(producer: Computation, consumer: Computation) -> int:
    """How many loads, sums, calls and so on ``consumer`` has once each load of ``producer``'s result is its value."""
    return count_operations(consumer.value) + _times_read(producer, consumer) * count_operations(producer.value)


def _times_read(producer: Computation, consumer: Computation) -> int:
    return sum(load.source.same_as(producer.target) for load in nodes_in(consumer.value, TensorLoad))


def _choices_after_inlining(producer: Computation, consumer: Computation) -> int:
    """How many Selects ``consumer`` has with ``producer`` inlined, which may bring some; 0 where it brings none."""
    own = _choices(producer)
    return own and _choices(consumer) + _times_read(producer, consumer) * own


def _choices(computation: Computation) -> int:
    return len(nodes_in(computation.value, tirx.Select))


def is_affine_copy(computation: Computation) -> bool:
    """A transpose, slice, flip or broadcast: one load with affine indices and nothing else."""
    loads = computation.loads()
    return len(loads) == 1 and computation.value.same_as(loads[0]) and _is_affine(computation)


def _is_affine(computation: Computation) -> bool:
    """Whether every load is affine in the computation's axes (a reshape's ``//`` and ``%`` are not)."""
    names = axis_names(computation)
    return all(
        linear_index(index, computation.variables, names) is not None
        for load in computation.loads()
        for index in load.indices
    )


def plan(operator: OperatorBody) -> list[TileGroup | RowGroup]:
    """The kernels of a simplified operator, in order of execution."""
    groups: list[TileGroup | RowGroup] = []
    taken: list[Computation] = []
    for position, computation in enumerate(operator.computations):
        if any(computation is other for other in taken):
            continue
        if is_tiled(computation):
            epilogue = epilogue_of(operator, computation, operator.computations[position + 1 :])
            taken += epilogue
            groups.append(TileGroup(anchor=computation, epilogue=epilogue))
        elif groups and isinstance(groups[-1], RowGroup) and _may_join(groups[-1], computation):
            groups[-1] = RowGroup(computations=(*groups[-1].computations, computation))
        else:
            groups.append(RowGroup(computations=(computation,)))
    return groups


def _may_join(group: RowGroup, computation: Computation) -> bool:
    """Joining must keep at least one row axis, and every row reduction must see its whole row.

    Where nothing is reduced, kernels of their own are as good as a single row: slices along the channels of what was
    written for a batch of 1 share no other axis.
    """
    joined = (*group.computations, computation)
    connected = any(reads(computation.value, other.target) for other in group.computations)
    shared = shared_axes(joined)
    points = prod(computation.extent(v) for v in computation.spatial[:shared])
    is_row = points > 1 or any(own.is_reduction for own in joined) or computation.point_count == 1
    return connected and shared >= 1 and is_row


def is_tiled(computation: Computation) -> bool:
    """Whether a reduction has what register tiles exploit: an input used for several outputs, or a sliding window."""
    computation = split_divided_axes(computation)  # a grouped convolution is affine only then
    if not computation.is_reduction or not computation.spatial or not _is_affine(computation):
        return False
    names = dict(zip([v.name for v in computation.variables], axis_names(computation), strict=True))
    wide = [names[v.name] for v in computation.spatial if computation.extent(v) > 1]
    if not wide:
        return False
    for load in computation.loads():
        access = access_of(load.source, load.indices, computation)
        if any(index is not None and len(index.terms) > 1 for index in access.indices):
            return True
        strides = [access.stride(name) for name in wide]
        used_reduction = any(access.stride(names[v.name]) for v in computation.reduction)
        if used_reduction and 0 in strides:
            return True
    return _contiguous_axis_is_spatial(computation)


def _contiguous_axis_is_spatial(computation: Computation) -> bool:
    names = dict(zip([v.name for v in computation.variables], axis_names(computation), strict=True))
    for load in computation.loads():
        access = access_of(load.source, load.indices, computation)
        if any(access.stride(names[v.name]) == 1 and computation.extent(v) > 1 for v in computation.reduction):
            return False
    return any(contiguous_in(computation, v) for v in computation.spatial if computation.extent(v) > 1)


def epilogue_of(operator: OperatorBody, anchor: Computation, later: Sequence[Computation]) -> tuple[Computation, ...]:
    """The consumers of ``anchor``, if all of them can run on its accumulators; () otherwise."""
    consumers = operator.consumers(anchor.target)
    if operator.is_output(anchor.target) or not consumers:
        return ()
    produced_later = [computation.target for computation in later]
    for consumer in consumers:
        if not reads_only_its_own_element(consumer, anchor):
            return ()
        others = [load.source for load in consumer.loads() if not load.source.same_as(anchor.target)]
        if any(source.same_as(buffer) for source in others for buffer in produced_later):
            return ()
    return tuple(consumers)
