"""Fewer row buffers: one that the last computation reads element by element becomes its output."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tvm_ext._tvm import Buffer, TensorLoad, structural_equal
from tvm_ext.analysis.computations import Computation, dtype_of, reads, replace_loads, static_shape
from tvm_ext.ir.build_ir import load


def in_place(computations: Sequence[Computation], keep: Sequence[Buffer]) -> list[Computation]:
    """The computations with a buffer that the last one reads at its own element only replaced by the last one's target.

    Worked example, softmax: ``e[n, k]`` is written, summed, and read for ``y[n, k] = e[n, k] / s[n]``: the exponentials
    go to ``y`` at once. A row of 30522 is then one stream through the cache less.
    """
    *before, last = computations
    for computation in before:
        if _may_replace(computation, last, before, keep):
            return [_redirect(other, computation.target, last.target) for other in computations]
    return list(computations)


def _may_replace(
    computation: Computation, last: Computation, before: Sequence[Computation], keep: Sequence[Buffer]
) -> bool:
    own, final = computation.target, last.target
    if computation.is_reduction or last.is_reduction or any(own.same_as(kept) for kept in keep):
        return False
    if dtype_of(own) != dtype_of(final) or static_shape(own) != static_shape(final):
        return False
    if not (computation.writes_at_its_own_axes() and last.writes_at_its_own_axes()):
        return False
    if not reads(last.value, own) or any(reads(other.value, final) for other in before):
        return False
    return all(
        all(structural_equal(i, j) for i, j in zip(item.indices, last.indices, strict=True))
        for item in last.loads()
        if item.source.same_as(own)
    )


def _redirect(computation: Computation, old: Buffer, new: Buffer) -> Computation:
    def swap(item: TensorLoad) -> TensorLoad:
        return load(new, list(item.indices)) if item.source.same_as(old) else item

    target = new if computation.target.same_as(old) else computation.target
    return dataclasses.replace(computation, value=replace_loads(computation.value, swap), target=target)
