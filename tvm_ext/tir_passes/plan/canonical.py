"""Computations as Roller constructs for them and emitters write them: canonical, both as computation and expression."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm_ext._tvm import Buffer
from tvm_ext.analysis.computation_exprs import axis_names, tensor_expr_of
from tvm_ext.analysis.computation_rewrites import (
    address_runs,
    drop_unit_axes,
    fuse_axes,
    reads_whole_runs,
    split_divided_axes,
)
from tvm_ext.analysis.computations import Computation
from tvm_ext.analysis.predicates import shared_axes
from tvm_ext.analysis.tensor_expr import TensorExpr

from ..roller.canonical import canonicalise
from .plan_kernels import RowGroup


def canonical_computation(
    computation: Computation, expr_name: str = "", *, params: Sequence[Buffer] = (), **about: Any
) -> tuple[Computation, TensorExpr]:
    """``computation`` and its expression in canonical form: unit axes dropped, divided axes split, axes fused (paper
    §3.2).

    The i-th axis of the expression is the i-th variable of the computation, its i-th input the computation's i-th load.
    ``params``, the function's parameters, are addressed as runs of memory. ``about`` goes to `tensor_expr_of`.
    """
    computation = split_divided_axes(drop_unit_axes(computation))
    form = canonicalise(tensor_expr_of(computation, name=expr_name or computation.name, **about))
    names = list(axis_names(computation))
    groups = [[names.index(original) for original in originals] for _, originals in form.groups]
    return _with_runs(computation, fuse_axes(computation, groups), groups, about.get("epilogue", ()), params), form.expr


def _with_runs(
    before: Computation,
    fused: Computation,
    groups: Sequence[Sequence[int]],
    epilogue: Sequence[Computation],
    params: Sequence[Buffer],
) -> Computation:
    """``fused`` addressing parameters along its fused axes; its result too, where its consumers do not mind."""
    joined = [(i, group) for i, group in enumerate(groups) if len(group) > 1]
    extents = [[before.extents[p] for p in group] for _, group in joined]
    touched = [
        load.source
        for computation in epilogue
        for load in computation.loads()
        if not load.source.same_as(before.target)
    ]
    touched += [computation.target for computation in epilogue] if epilogue else [before.target]
    whole = all(any(buffer.same_as(param) for param in params) for buffer in touched)
    for (_, group), sizes in zip(joined, extents, strict=True):
        own = [before.variables[p] for p in group]
        dims = [d for d, index in enumerate(before.indices) if any(index.same_as(v) for v in own)]
        whole = whole and (not dims or all(reads_whole_runs(consumer, dims, sizes) for consumer in epilogue))
    return address_runs(fused, [fused.variables[i] for i, _ in joined], extents, buffers=params, stores=whole)


def canonical_rows(group: RowGroup, *, fuses_points: bool = False) -> RowGroup:
    """Fuse what a lone injective computation or the reduction axes of a row allow.

    With ``fuses_points`` also the axes of a row's points: 12 x 12 of them are one run of 144, whose vectors are whole.
    """
    if len(group.computations) == 1 and not group.computations[0].is_reduction:
        return RowGroup(computations=(canonical_computation(group.computations[0])[0],))
    rows = shared_axes(group.computations)
    return RowGroup(
        computations=tuple(
            _fuse_row(computation, rows) if computation.is_reduction or fuses_points else computation
            for computation in group.computations
        )
    )


def _fuse_row(computation: Computation, rows: int) -> Computation:
    """``computation`` with its reduction axes fused, or, of one without, those behind the first ``rows``."""
    names = axis_names(computation)
    groups: list[list[int]] = []
    for _, originals in canonicalise(tensor_expr_of(computation, name=computation.name)).groups:
        run = [names.index(original) for original in originals]
        if computation.kinds[run[0]] != "reduce":
            inner = [] if computation.is_reduction else [p for p in run if p >= rows]
            groups += [[p] for p in run if p not in inner]
            run = inner
        groups += [run] if run else []
    present = {p for run in groups for p in run}
    groups += [[p] for p in range(len(names)) if p not in present]  # unit axes, which canonical form leaves out
    return fuse_axes(computation, sorted(groups))
