"""Divides an operator's computations into GPU kernels: tiles through shared memory for what has reuse, rows for the
rest.

It differs from the CPU's plan (`plan_kernels.py`) where the machines do. Padding, dilation and casts before a reduction
with reuse are a *prologue*: a threadblock computes them while it copies its tile to shared memory, so that the padded
tensor never exists. Before a reduction without reuse they are computed where they are read: a thread's condition costs
less than a launch and a tensor. Reductions of a single input (sums, means, poolings) are row kernels, whose threads
share a row by shuffles: shared memory would hold nothing twice.

Worked example, a padded convolution, bias and ReLU: computations pad, conv, add, relu. ``simplify`` inlines add into
relu; conv is the anchor of a tile group, pad its prologue, relu its epilogue: one launch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tvm_ext.analysis.computation_rewrites import inline
from tvm_ext.analysis.computations import Computation, OperatorBody, reads
from tvm_ext.analysis.predicates import has_call

from .plan_kernels import RowGroup, TileGroup, epilogue_of, is_tiled, simplify


def simplify_for_gpu(operator: OperatorBody) -> OperatorBody:
    """``operator`` simplified as for a CPU, and without those that only pad the input of a lone-input reduction."""
    operator = simplify(operator)
    for producer in operator.computations:
        consumers = operator.consumers(producer.target)
        if not operator.is_output(producer.target) and _is_computed_in_place(producer, consumers):
            computations = tuple(
                inline(producer, computation) if any(computation is reader for reader in consumers) else computation
                for computation in operator.computations
                if computation is not producer
            )
            return simplify_for_gpu(dataclasses.replace(operator, computations=computations))
    return operator


def _is_computed_in_place(producer: Computation, consumers: Sequence[Computation]) -> bool:
    """Whether reading ``producer`` is computing it: it calls nothing and feeds one reduction of one input."""
    injective = not producer.is_reduction and producer.writes_at_its_own_axes() and not has_call_of_math(producer)
    return injective and len(consumers) == 1 and consumers[0].is_reduction and not has_reuse(consumers[0])


def has_call_of_math(computation: Computation) -> bool:
    """Whether the computation calls a function other than ``if_then_else``, which is how padding says where it ends."""
    return has_call(computation, besides_if_then_else=True)


def has_reuse(computation: Computation) -> bool:
    """Whether a reduction multiplies inputs and uses one for several outputs: what tiles exploit."""
    return len(computation.loads()) > 1 and is_tiled(computation)


def plan_for_gpu(operator: OperatorBody) -> list[TileGroup | RowGroup]:
    """The kernels of a simplified operator, in order of execution."""
    groups: list[TileGroup | RowGroup] = []
    computations = operator.computations
    epilogues = {
        id(s): epilogue_of(operator, s, computations[p + 1 :]) for p, s in enumerate(computations) if has_reuse(s)
    }
    behind = [computation for epilogue in epilogues.values() for computation in epilogue]
    prologues = {
        id(computation): _prologue(operator, computation, behind)
        for computation in computations
        if id(computation) in epilogues
    }
    taken = [*behind, *(computation for prologue in prologues.values() for computation in prologue)]
    for computation in computations:
        if any(computation is other for other in taken):
            continue
        if id(computation) in prologues:
            tile = TileGroup(
                anchor=computation, prologue=prologues[id(computation)], epilogue=epilogues[id(computation)]
            )
            groups.append(tile)
        elif groups and isinstance(groups[-1], RowGroup) and _reads_any(computation, groups[-1].computations):
            # Their emitter finds the fewest launches itself: what needs another row than its producer starts a new one.
            groups[-1] = RowGroup(computations=(*groups[-1].computations, computation))
        else:
            groups.append(RowGroup(computations=(computation,)))
    return groups


def _reads_any(computation: Computation, others: Sequence[Computation]) -> bool:
    return any(reads(computation.value, other.target) for other in others)


def _prologue(operator: OperatorBody, anchor: Computation, behind: Sequence[Computation]) -> tuple[Computation, ...]:
    """The producers of ``anchor`` that its threadblocks compute as they copy, except those of ``behind``.

    Those are epilogues: between two products a ReLU runs behind the first one, whose own result is then never stored.

    Each element is then computed once for every threadblock that reads it: conditions and a few operations are free
    beside the load, calls (``exp``) are not and stay kernels of their own.
    """
    return tuple(
        computation
        for computation in operator.computations
        if not computation.is_reduction
        and not operator.is_output(computation.target)
        and computation.writes_at_its_own_axes()
        and reads(anchor.value, computation.target)
        and len(operator.consumers(computation.target)) == 1
        and not has_call_of_math(computation)
        and not any(computation is other for other in behind)
    )
