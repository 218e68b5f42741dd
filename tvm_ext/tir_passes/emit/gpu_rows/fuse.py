"""Fuses the axes of a row form that every access runs through as one (paper §3.2, canonical form).

Worked example, bias and ReLU of (8, 64, 7, 7) with ``b[c]``: n stays, c stays, and h and w become one axis of 49;
without the bias all four would be one axis of 25088, whose vectors need not divide 7.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import pairwise

from tvm_ext._tvm import Buffer, Expr, Node, TensorLoad, Var, structural_walk, tirx
from tvm_ext.analysis.computation_rewrites import fuse_axes
from tvm_ext.analysis.computations import Computation, dtype_of, mentions, replace_loads
from tvm_ext.analysis.predicates import is_in

from .form import LoopAxis, RowForm, accesses, address_of, position_of, rename_axes


def fuse_form(form: RowForm) -> RowForm:
    """Neighbouring axes that every access runs through as one (paper §3.2, canonical form) become one."""
    for position, (outer, inner) in enumerate(pairwise((*form.grid, *form.row))):
        if position + 1 != len(form.grid) and _may_fuse(form, outer, inner):
            return fuse_form(_fuse(form, position))
    return form


def _may_fuse(form: RowForm, outer: LoopAxis, inner: LoopAxis) -> bool:
    pair = [outer.variable, inner.variable]
    for computation in form.computations:
        if mentions(replace_loads(computation.value, lambda item: tirx.const(1, dtype_of(item.source))), *pair):
            return False
    for computation, buffer, indices in accesses(form):
        if not mentions(list(indices), *pair):
            continue
        address = address_of(buffer, indices, computation)
        if address is None:
            return False
        positions = [position_of(computation, variable) for variable in pair]
        a, b = (0 if p is None else address.coefficients[p] for p in positions)
        if a != b * inner.extent:
            return False
    return True


def _fuse(form: RowForm, position: int) -> RowForm:
    """``form`` with the axes at ``position`` and after it as one, of the same variable in every computation."""
    axes = [*form.grid, *form.row]
    outer, inner = axes[position : position + 2]
    variable = Var(f"{outer.variable.name}.{inner.variable.name}", outer.variable.ty)
    axes[position : position + 2] = [LoopAxis(variable=variable, extent=outer.extent * inner.extent)]

    def apply(computation: Computation) -> Computation:
        count = len(computation.variables) - 1
        if position >= count:
            return computation
        groups = [[p + (p > position)] for p in range(count)]
        groups[position].append(position + 1)
        return rename_axes(fuse_axes(computation, groups), range(count), axes[:count])

    cut = len(form.grid) - (1 if position + 1 < len(form.grid) else 0)
    fused = tuple(apply(computation) for computation in form.computations)
    return dataclasses.replace(form, grid=tuple(axes[:cut]), row=tuple(axes[cut:]), computations=fused)


def divides(node: Node) -> bool:
    found: list[Expr] = []
    structural_walk(node, [(tirx.FloorDiv, found.append), (tirx.FloorMod, found.append)])
    return bool(found)


def address_runs(computation: Computation, form: RowForm, params: Sequence[Buffer]) -> Computation:
    """``computation`` addressing the function's parameters by one number: ``[0, 84*n + f]``, not ``[n, f // 21, f %
    21]``.

    Only parameters: stock TVM shrinks buffers that the function allocates to the indices that it sees.
    """

    def flat(buffer: Buffer, indices: Sequence[Expr]) -> list[Expr]:
        if not is_in(buffer, params) or not indices or not any(divides(item) for item in indices):
            return list(indices)
        address = address_of(buffer, indices, computation)
        if address is None:
            return list(indices)
        dtype = dtype_of(computation.variables[0])
        run: Expr = tirx.IntImm(dtype, address.constant)
        for variable, coefficient in zip(computation.variables, address.coefficients, strict=True):
            if coefficient:
                run = run + variable * tirx.IntImm(dtype, coefficient)
        return [tirx.IntImm(dtype, 0)] * (len(indices) - 1) + [run]

    def move(item: TensorLoad) -> TensorLoad:
        return item if form.is_internal(item.source) else tirx.BufferLoad(item.source, flat(item.source, item.indices))

    return dataclasses.replace(
        computation,
        value=replace_loads(computation.value, move),
        indices=tuple(flat(computation.target, computation.indices)),
    )
