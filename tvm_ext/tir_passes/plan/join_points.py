"""Element-wise computations of which each reads the last one at its own point, as one computation.

Worked example: ``a = c * g + b`` of a concatenation ``c``, and ``y = a * sigmoid(a)``. Inlined, ``a`` would be computed
twice; as two computations of a row they share all axes, so that a row is a single point. As one, ``let t = c * g + b in
t * sigmoid(t)``, they are a plain loop whose axes can be fused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tvm_ext._tvm import Buffer
from tvm_ext.analysis.computations import Computation, dtype_of, reads, replace_reads, substitute
from tvm_ext.analysis.predicates import is_in, reads_only_its_own_element
from tvm_ext.ir.build_ir import bind
from tvm_ext.ir.float_ir import bound

from .plan_kernels import RowGroup


def join_points(group: RowGroup, kept: Sequence[Buffer]) -> RowGroup:
    """``group`` with each computation that a single other one reads, at its own point, as a part of that.

    Those in ``kept`` are read by others, too, and stay. So does a group with a reduction: it runs row by row.
    """
    computations = list(group.computations)
    if any(computation.is_reduction for computation in computations):
        return group
    position = 0
    while position < len(computations) - 1:
        producer = computations[position]
        consumers = [other for other in computations if reads(other.value, producer.target)]
        if len(consumers) != 1 or is_in(producer.target, kept) or not _may_join(producer, consumers[0]):
            position += 1
            continue
        joined = _joined(producer, consumers[0])
        computations = [joined if own is consumers[0] else own for own in computations if own is not producer]
    return RowGroup(computations=tuple(computations))


def _may_join(producer: Computation, consumer: Computation) -> bool:
    is_float = dtype_of(producer.value).startswith("float")
    return is_float and producer.writes_at_its_own_axes() and reads_only_its_own_element(consumer, producer)


def _joined(producer: Computation, consumer: Computation) -> Computation:
    value = substitute(producer.value, bind(producer.spatial, consumer.spatial))
    joined = bound(value, lambda point: replace_reads(consumer.value, producer.target, lambda _: point))
    return dataclasses.replace(consumer, value=joined)
