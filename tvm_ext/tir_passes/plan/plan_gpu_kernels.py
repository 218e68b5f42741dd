"""Divides an operator's stages into GPU kernels: tiles through shared memory for what has reuse, rows for the rest.

It differs from the CPU's plan (`plan_kernels.py`) where the machines do. Padding, dilation and casts before a reduction
with reuse are a *prologue*: a threadblock computes them while it copies its tile to shared memory, so that the padded
tensor never exists. Before a reduction without reuse they are computed where they are read: a thread's condition costs
less than a launch and a tensor. Reductions of a single input (sums, means, poolings) are row kernels, whose threads
share a row by shuffles: shared memory would hold nothing twice.

Worked example, a padded convolution, bias and ReLU: stages pad, conv, add, relu. ``simplify`` inlines add into relu;
conv is the anchor of a tile group, pad its prologue, relu its epilogue: one launch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from tvm_ext.analysis.stage_rewrites import inline
from tvm_ext.analysis.stages import OperatorBody, Stage, reads

from ..emit.cpu_rows.emit import has_call
from .plan_kernels import RowGroup, epilogue_of, is_tiled, simplify


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class GpuTileGroup:
    """A reduction with reuse, what is computed while its inputs are copied, and what is fused behind it.

    A stage of ``prologue`` is injective, writes at its own axes, and is read by ``anchor`` alone.
    """

    anchor: Stage
    prologue: tuple[Stage, ...]
    epilogue: tuple[Stage, ...]


def simplify_for_gpu(operator: OperatorBody) -> OperatorBody:
    """``operator`` simplified as for a CPU, and without stages that only pad the input of a lone-input reduction."""
    operator = simplify(operator)
    for producer in operator.stages:
        consumers = operator.consumers(producer.target)
        if not operator.is_output(producer.target) and _is_computed_in_place(producer, consumers):
            stages = tuple(
                inline(producer, stage) if any(stage is reader for reader in consumers) else stage
                for stage in operator.stages
                if stage is not producer
            )
            return simplify_for_gpu(dataclasses.replace(operator, stages=stages))
    return operator


def _is_computed_in_place(producer: Stage, consumers: Sequence[Stage]) -> bool:
    """Whether reading ``producer`` is computing it: it calls nothing and feeds one reduction of one input."""
    injective = not producer.is_reduction and producer.writes_at_its_own_axes() and not has_call_of_math(producer)
    return injective and len(consumers) == 1 and consumers[0].is_reduction and not has_reuse(consumers[0])


def has_call_of_math(stage: Stage) -> bool:
    """Whether the stage calls a function other than ``if_then_else``, which is how padding says where it ends."""
    return has_call(stage, besides_if_then_else=True)


def has_reuse(stage: Stage) -> bool:
    """Whether a reduction multiplies inputs of which one is used for several outputs: what tiles exploit."""
    return len(stage.loads()) > 1 and is_tiled(stage)


def plan_for_gpu(operator: OperatorBody) -> list[GpuTileGroup | RowGroup]:
    """The kernels of a simplified operator, in order of execution."""
    groups: list[GpuTileGroup | RowGroup] = []
    stages = operator.stages
    epilogues = {id(s): epilogue_of(operator, s, stages[p + 1 :]) for p, s in enumerate(stages) if has_reuse(s)}
    behind = [stage for epilogue in epilogues.values() for stage in epilogue]
    prologues = {id(stage): _prologue(operator, stage, behind) for stage in stages if id(stage) in epilogues}
    taken = [*behind, *(stage for prologue in prologues.values() for stage in prologue)]
    for stage in stages:
        if any(stage is other for other in taken):
            continue
        if id(stage) in prologues:
            tile = GpuTileGroup(anchor=stage, prologue=prologues[id(stage)], epilogue=epilogues[id(stage)])
            groups.append(tile)
        elif groups and isinstance(groups[-1], RowGroup) and _reads_any(stage, groups[-1].stages):
            # Their emitter finds the fewest launches itself: what needs another row than its producer starts a new one.
            groups[-1] = RowGroup(stages=(*groups[-1].stages, stage))
        else:
            groups.append(RowGroup(stages=(stage,)))
    return groups


def _reads_any(stage: Stage, others: Sequence[Stage]) -> bool:
    return any(reads(stage.value, other.target) for other in others)


def _prologue(operator: OperatorBody, anchor: Stage, behind: Sequence[Stage]) -> tuple[Stage, ...]:
    """The producers of ``anchor`` that its threadblocks compute as they copy, except those of ``behind``.

    Those are epilogues: between two products a ReLU runs behind the first one, whose own result is then never stored.

    Each element is then computed once for every threadblock that reads it: conditions and a few operations are free
    beside the load, calls (``exp``) are not and stay kernels of their own.
    """
    return tuple(
        stage
        for stage in operator.stages
        if not stage.is_reduction
        and not operator.is_output(stage.target)
        and stage.writes_at_its_own_axes()
        and reads(anchor.value, stage.target)
        and len(operator.consumers(stage.target)) == 1
        and not has_call_of_math(stage)
        and not any(stage is other for other in behind)
    )
