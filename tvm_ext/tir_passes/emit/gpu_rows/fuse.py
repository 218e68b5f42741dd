"""Fuses the axes of a row form that every access runs through as one (paper §3.2, canonical form).

Worked example, bias and ReLU of (8, 64, 7, 7) with ``b[c]``: n stays, c stays, and h and w become one axis of 49;
without the bias all four would be one axis of 25088, whose vectors need not divide 7.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tvm_ext._tvm import Buffer, Expr, TensorLoad, Var, tirx
from tvm_ext.analysis.computation_rewrites import fuse_axes
from tvm_ext.analysis.computations import Computation, dtype_of, mentions, replace_loads, substitute
from tvm_ext.analysis.predicates import is_in

from .form import Address, LoopAxis, RowForm, accesses, address_of, divides, position_of


def fuse_form(form: RowForm) -> RowForm:
    """Neighbouring axes that every access runs through as one (paper §3.2, canonical form) become one."""
    for position in range(len(form.grid) - 1):
        if _may_fuse(form, form.grid[position], form.grid[position + 1]):
            return fuse_form(_fused(form, position))
    for position in range(len(form.row) - 1):
        if _may_fuse(form, form.row[position], form.row[position + 1]):
            return fuse_form(_fused(form, len(form.grid) + position))
    return form


def _may_fuse(form: RowForm, outer: LoopAxis, inner: LoopAxis) -> bool:
    pair = [outer.variable, inner.variable]
    for computation in form.computations:
        if mentions(_without_loads(computation.value), *pair):
            return False
    for computation, buffer, indices in accesses(form):
        if not mentions(list(indices), *pair):
            continue
        form_of = address_of(buffer, indices, list(zip(computation.variables, computation.extents, strict=True)))
        if form_of is None:
            return False
        a, b = (_coefficient(form_of, computation, variable) for variable in pair)
        if a != b * inner.extent:
            return False
    return True


def _without_loads(value: Expr) -> Expr:
    return replace_loads(value, lambda item: tirx.const(1, dtype_of(item.source)))


def _coefficient(address: Address, computation: Computation, variable: Var) -> int:
    position = position_of(computation, variable)
    return 0 if position is None else address.coefficients[position]


def _fused(form: RowForm, position: int) -> RowForm:
    """``form`` with the axes at ``position`` and after it as one, of the same variable in every computation."""
    axes = [*form.grid, *form.row]
    outer, inner = axes[position : position + 2]
    fused = LoopAxis(
        variable=Var(f"{outer.variable.name}.{inner.variable.name}", outer.variable.ty),
        extent=outer.extent * inner.extent,
    )

    def apply(computation: Computation) -> Computation:
        if position + 1 >= len(computation.variables):
            return computation
        groups = [[p] for p in range(len(computation.variables)) if p != position + 1]
        groups[position] = [position, position + 1]
        computation = fuse_axes(computation, groups)
        own = computation.variables[position]
        return _rename_one(computation, own, fused.variable)

    new = [*axes[:position], fused, *axes[position + 2 :]]
    cut = len(form.grid) - (1 if position + 1 < len(form.grid) else 0)
    return dataclasses.replace(
        form,
        grid=tuple(new[:cut]),
        row=tuple(new[cut:]),
        computations=tuple(apply(computation) for computation in form.computations),
    )


def _rename_one(computation: Computation, old: Var, new: Var) -> Computation:
    table = [(old, new)]
    return dataclasses.replace(
        computation,
        variables=tuple(new if v.same_as(old) else v for v in computation.variables),
        value=substitute(computation.value, table),
        indices=tuple(substitute(item, table) for item in computation.indices),
    )


def address_runs(computation: Computation, form: RowForm, params: Sequence[Buffer]) -> Computation:
    """``computation`` addressing the function's parameters by one number: ``[0, 84*n + f]``, not ``[n, f // 21, f %
    21]``.

    Only parameters: stock TVM shrinks buffers that the function allocates to the indices that it sees.
    """
    axes = list(zip(computation.variables, computation.extents, strict=True))

    def flat(buffer: Buffer, indices: Sequence[Expr]) -> list[Expr]:
        if not is_in(buffer, params) or not indices or not any(divides(item) for item in indices):
            return list(indices)
        address = address_of(buffer, indices, axes)
        return list(indices) if address is None else _run(address, len(indices), axes)

    def move(item: TensorLoad) -> TensorLoad:
        return item if form.is_internal(item.source) else tirx.BufferLoad(item.source, flat(item.source, item.indices))

    return dataclasses.replace(
        computation,
        value=replace_loads(computation.value, move),
        indices=tuple(flat(computation.target, computation.indices)),
    )


def _run(address: Address, dims: int, axes: Sequence[tuple[Var, int]]) -> list[Expr]:
    dtype = dtype_of(axes[0][0])
    flat: Expr = tirx.IntImm(dtype, address.constant)
    for (variable, _), coefficient in zip(axes, address.coefficients, strict=True):
        if coefficient:
            flat = flat + variable * tirx.IntImm(dtype, coefficient)
    return [tirx.IntImm(dtype, 0)] * (dims - 1) + [flat]
