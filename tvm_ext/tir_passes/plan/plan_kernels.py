"""Divides an operator's stages into kernels: register tiles for what has reuse, shared rows for the rest.

First `simplify` inlines what would only copy or is cheap, so that a chain of element-wise stages is one stage. Then
each reduction that has data reuse or a sliding window becomes the anchor of a tile kernel, with the stages that
consume its result element by element as its epilogue; the other stages join into row kernels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm_ext._tvm import TensorLoad, structural_walk, tirx
from tvm_ext.analysis.stage_exprs import access_of, axis_names, count_flops, count_operations, linear_index
from tvm_ext.analysis.stage_rewrites import inline, split_divided_axes
from tvm_ext.analysis.stages import OperatorBody, Stage, reads
from tvm_ext.support.limits import check_count, check_time, limits

from ..emit.cpu_rows.emit import has_call, shared_axes
from ..emit.cpu_tiles.epilogue import reads_only_its_own_element
from ..emit.cpu_windows.window import is_padding

CHEAP_FLOPS = 2  # recomputing this much costs less than storing and loading the element


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TileGroup:
    """A reduction kept in register tiles, with its fused epilogue."""

    anchor: Stage
    epilogue: tuple[Stage, ...]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RowGroup:
    """Stages that run row by row together."""

    stages: tuple[Stage, ...]


def simplify(operator: OperatorBody) -> OperatorBody:
    """``operator`` with every stage inlined that is not worth a buffer of its own.

    Raises LimitPassed for one that is too large to look at.
    """
    check_size(operator)
    position = 0
    sources = {id(stage): stage.sources() for stage in operator.stages}
    while position < len(operator.stages):
        check_time()
        producer = operator.stages[position]
        consumers = [
            stage for stage in operator.stages if any(producer.target.same_as(source) for source in sources[id(stage)])
        ]
        if consumers and not operator.is_output(producer.target) and _worth_inlining(producer, consumers):
            inlined = {id(stage): inline(producer, stage) for stage in consumers}
            stages = tuple(inlined.get(id(stage), stage) for stage in operator.stages if stage is not producer)
            sources |= {id(stage): stage.sources() for stage in inlined.values()}
            operator = dataclasses.replace(operator, stages=stages)
        else:
            position += 1
    return operator


def check_size(operator: OperatorBody) -> None:
    """Raise LimitPassed where the operator has too many stages, or one of them too large a value."""
    check_count("stages", len(operator.stages), "stages")
    for stage in operator.stages:
        check_count("value_operations", count_operations(stage.value), f"operations in {stage.name}")


def _worth_inlining(producer: Stage, consumers: Sequence[Stage]) -> bool:
    if producer.is_reduction or not producer.writes_at_its_own_axes():
        return False
    if any(operations_after_inlining(producer, stage) > limits().inlined_operations for stage in consumers):
        return False
    if any(_choices_after_inlining(producer, stage) > limits().inlined_choices for stage in consumers):
        return False
    if _is_affine_copy(producer):
        return True
    for stage in consumers:
        if stage.is_reduction and (stage.point_count > producer.point_count or not _is_affine(producer)):
            return False  # each element is read more than once, or could not be read in vectors: compute it first
        if stage.is_reduction and is_padding(producer):
            return False  # a window's padding is cheaper between its rows than as a condition on each element
    cheap = not has_call(producer) and count_flops(producer.value) <= CHEAP_FLOPS
    once = len(consumers) == 1 and sum(load.source.same_as(producer.target) for load in consumers[0].loads()) == 1
    return once or cheap


def size_notes(operator: OperatorBody) -> list[str]:
    """For the report: the stages of a simplified operator that keep a buffer for a limit alone."""
    return [
        *_kept_for(operator, operations_after_inlining, limits().inlined_operations, "operations"),
        *_kept_for(operator, _choices_after_inlining, limits().inlined_choices, "choices"),
    ]


def _kept_for(operator: OperatorBody, count: Callable[[Stage, Stage], int], most: int, what: str) -> list[str]:
    kept = []
    for producer in operator.stages:
        consumers = operator.consumers(producer.target)
        inlinable = not producer.is_reduction and producer.writes_at_its_own_axes()
        sizes = [count(producer, stage) for stage in consumers]
        if inlinable and not operator.is_output(producer.target) and max(sizes, default=0) > most:
            kept.append(producer.name)
    return [f"{', '.join(kept)} in a buffer: an expression may have {most} {what}"] if kept else []


def operations_after_inlining(producer: Stage, consumer: Stage) -> int:
    """How many loads, sums, calls and so on ``consumer`` has once each load of ``producer``'s result is its value."""
    return count_operations(consumer.value) + _times_read(producer, consumer) * count_operations(producer.value)


def _times_read(producer: Stage, consumer: Stage) -> int:
    found: list[bool] = []
    structural_walk(consumer.value, (TensorLoad, lambda load: found.append(load.source.same_as(producer.target))))
    return sum(found)


def _choices_after_inlining(producer: Stage, consumer: Stage) -> int:
    """How many Selects ``consumer`` has with ``producer`` inlined, which may bring some; 0 where it brings none."""
    own = _choices(producer)
    return own and _choices(consumer) + _times_read(producer, consumer) * own


def _choices(stage: Stage) -> int:
    found: list[bool] = []
    structural_walk(stage.value, (tirx.Select, lambda _: found.append(True)))
    return len(found)


def _is_affine_copy(stage: Stage) -> bool:
    """A transpose, slice, flip or broadcast: one load with affine indices and nothing else."""
    loads = stage.loads()
    return len(loads) == 1 and stage.value.same_as(loads[0]) and _is_affine(stage)


def _is_affine(stage: Stage) -> bool:
    """Whether every load is affine in the stage's axes (a reshape's ``//`` and ``%`` are not)."""
    names = axis_names(stage)
    return all(
        linear_index(index, stage.variables, names) is not None for load in stage.loads() for index in load.indices
    )


def plan(operator: OperatorBody) -> list[TileGroup | RowGroup]:
    """The kernels of a simplified operator, in order of execution."""
    groups: list[TileGroup | RowGroup] = []
    taken: list[Stage] = []
    for position, stage in enumerate(operator.stages):
        if any(stage is other for other in taken):
            continue
        if is_tiled(stage):
            epilogue = epilogue_of(operator, stage, operator.stages[position + 1 :])
            taken += epilogue
            groups.append(TileGroup(anchor=stage, epilogue=epilogue))
        elif groups and isinstance(groups[-1], RowGroup) and _may_join(groups[-1], stage):
            groups[-1] = RowGroup(stages=(*groups[-1].stages, stage))
        else:
            groups.append(RowGroup(stages=(stage,)))
    return groups


def _may_join(group: RowGroup, stage: Stage) -> bool:
    """Joining must keep at least one row axis, and every row reduction must see its whole row."""
    joined = (*group.stages, stage)
    connected = any(reads(stage.value, other.target) for other in group.stages)
    return connected and shared_axes(joined) >= 1


def is_tiled(stage: Stage) -> bool:
    """Whether a reduction has what register tiles exploit: an input used for several outputs, or a sliding window."""
    stage = split_divided_axes(stage)  # a grouped convolution is affine only then
    if not stage.is_reduction or not stage.spatial or not _is_affine(stage):
        return False
    names = dict(zip([v.name for v in stage.variables], axis_names(stage), strict=True))
    wide = [names[v.name] for v in stage.spatial if stage.extent(v) > 1]
    if not wide:
        return False
    for load in stage.loads():
        access = access_of(load.source, load.indices, stage)
        if any(index is not None and len(index.terms) > 1 for index in access.indices):
            return True
        strides = [access.stride(name) for name in wide]
        used_reduction = any(access.stride(names[v.name]) for v in stage.reduction)
        if used_reduction and 0 in strides:
            return True
    return _contiguous_axis_is_spatial(stage)


def _contiguous_axis_is_spatial(stage: Stage) -> bool:
    names = dict(zip([v.name for v in stage.variables], axis_names(stage), strict=True))
    for load in stage.loads():
        access = access_of(load.source, load.indices, stage)
        if any(access.stride(names[v.name]) == 1 and stage.extent(v) > 1 for v in stage.reduction):
            return False
    return len(stage.loads()) == 1


def epilogue_of(operator: OperatorBody, anchor: Stage, later: Sequence[Stage]) -> tuple[Stage, ...]:
    """The consumers of ``anchor``, if all of them can run on its accumulators; () otherwise."""
    consumers = operator.consumers(anchor.target)
    if operator.is_output(anchor.target) or not consumers:
        return ()
    produced_later = [stage.target for stage in later]
    for consumer in consumers:
        if not reads_only_its_own_element(consumer, anchor):
            return ()
        others = [load.source for load in consumer.loads() if not load.source.same_as(anchor.target)]
        if any(source.same_as(buffer) for source in others for buffer in produced_later):
            return ()
    return tuple(consumers)
