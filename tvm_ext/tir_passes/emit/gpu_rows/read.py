"""Reads computations into row form: which axes all of them share, and whether each reads only what its own row has
made.

Two axes are one where a load inside the group says so: ``y[a, b] = x[a, b] - m[a]`` identifies y's a with m's. A
class of axes with one spatial axis of every computation is a grid axis; what is left of each computation is its row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import pairwise

from tvm_ext._tvm import Buffer, Expr, Node, TensorLoad, Var, nodes_in, structural_equal, tirx
from tvm_ext.analysis.computation_exprs import analyzer_of
from tvm_ext.analysis.computation_rewrites import drop_unit_axes, fuse_axes, split_divided_axes
from tvm_ext.analysis.computations import Computation, dtype_of, mentions, replace_loads
from tvm_ext.analysis.predicates import is_in
from tvm_ext.errors import IllegalRewrite
from tvm_ext.ir.build_ir import combine

from .form import LoopAxis, RowForm, accesses, address_of, position_of, rename_axes


def read_form(computations: Sequence[Computation], kept: Sequence[Buffer], params: Sequence[Buffer]) -> RowForm:
    """The computations in common form, ``params`` addressed as runs of memory; raises IllegalRewrite where they have
    none.
    """
    plain = [plain_computation(computation) for computation in computations]
    grid_classes = _grid_classes(plain)
    form = _with_shared_variables(plain, grid_classes, tuple(kept))
    _check_own_elements(form)
    form = _fuse_form(form)
    return dataclasses.replace(
        form, computations=tuple(_address_runs(computation, form, params) for computation in form.computations)
    )


# --- reading --------------------------------------------------------------------------------------------------------
def plain_computation(computation: Computation) -> Computation:
    """``computation`` without axes of extent 1, with simple indices, its divided axes split; one of one element
    injective.
    """
    computation = _simplify_indices(split_divided_axes(_simplify_indices(drop_unit_axes(computation, keep_one=False))))
    if computation.is_reduction and not computation.reduction:
        value = combine(computation.combiner, computation.init, computation.value)
        return dataclasses.replace(computation, value=value, combiner=None, init=None)
    return computation


def _simplify_indices(computation: Computation) -> Computation:
    """A reshape's ``((h // 8 + c) // 16 + n) % 2`` with h < 8, c < 16, n < 2 is ``n``."""
    analyzer = analyzer_of(computation.variables, computation.extents)

    def simple(load: TensorLoad) -> Expr:
        if not any(_divides(index) for index in load.indices):
            return load
        return tirx.BufferLoad(load.source, [analyzer.simplify(index) for index in load.indices])

    return dataclasses.replace(computation, value=replace_loads(computation.value, simple))


# --- which axes all computations share --------------------------------------------------------------------------------
def _grid_classes(computations: Sequence[Computation]) -> list[list[tuple[int, int]]]:
    """Groups of one spatial axis of every computation, (computation, position), that loads and stores identify."""
    axes = [(s, p) for s, computation in enumerate(computations) for p in range(len(computation.variables))]
    group_of = {axis: [axis] for axis in axes}

    def identify(a: tuple[int, int | None], b: tuple[int, int | None]) -> None:
        if a[1] is not None and b[1] is not None and group_of[a] is not group_of[b]:  # type: ignore[index]
            joined = group_of[a] + group_of[b]  # type: ignore[index]
            group_of.update(dict.fromkeys(joined, joined))

    for s, computation in enumerate(computations):
        for load in computation.loads():
            for p, producer in enumerate(computations):
                if load.source.same_as(producer.target):
                    for read, written in zip(load.indices, producer.indices, strict=True):
                        identify((s, position_of(computation, read)), (p, position_of(producer, written)))
        for earlier in range(s):  # the computations of one block share their variables
            for a, variable in enumerate(computation.variables):
                identify((s, a), (earlier, position_of(computations[earlier], variable)))
    groups = [sorted(group_of[axis]) for axis in axes if axis == min(group_of[axis])]
    last = len(computations) - 1
    found = [group for group in groups if _is_grid(group, computations)]
    return sorted(found, key=lambda group: next(p for s, p in group if s == last))


def _is_grid(group: Sequence[tuple[int, int]], computations: Sequence[Computation]) -> bool:
    if sorted(s for s, _ in group) != list(range(len(computations))):
        return False
    axes = [(computations[s].kinds[p], computations[s].extents[p]) for s, p in group]
    return all(kind == "spatial" and extent == axes[0][1] for kind, extent in axes)


def _with_shared_variables(
    computations: Sequence[Computation], classes: Sequence[Sequence[tuple[int, int]]], kept: tuple[Buffer, ...]
) -> RowForm:
    grid = [_new_axis(computations, group[0]) for group in classes]
    has_reduction = any(computation.is_reduction for computation in computations)
    row: list[LoopAxis] | None = None
    shared: list[Computation] = []
    for s, computation in enumerate(computations):
        positions = [next(p for owner, p in group if owner == s) for group in classes]
        rest = [p for p in range(len(computation.variables)) if p not in positions]
        if computation.is_reduction and any(computation.kinds[p] == "spatial" for p in rest):
            raise IllegalRewrite(
                f"computation {computation.name} keeps an axis that the other computations of its row reduce"
            )
        if rest and row is None:
            row = [_new_axis(computations, (s, p)) for p in rest]
        if rest and [computation.extents[p] for p in rest] != [axis.extent for axis in row or ()]:
            raise IllegalRewrite(f"computation {computation.name} sweeps another row than the computations before it")
        axes = [*grid, *((row or []) if rest else [])]
        shared.append(rename_axes(computation, [*positions, *rest], axes))
    if not has_reduction and row:
        raise IllegalRewrite("computations without a reduction have no row in common")
    return RowForm(grid=tuple(grid), row=tuple(row or ()), computations=tuple(shared), kept=kept)


def _new_axis(computations: Sequence[Computation], axis: tuple[int, int]) -> LoopAxis:
    computation = computations[axis[0]]
    old = computation.variables[axis[1]]
    return LoopAxis(variable=Var(old.name, old.ty), extent=computation.extents[axis[1]])


def _check_own_elements(form: RowForm) -> None:
    """Every internal load must read the element of its own grid point and row position, written by an earlier
    computation.
    """
    for position, computation in enumerate(form.computations):
        for load in computation.loads():
            writer = next((p for p, s in enumerate(form.computations) if s.target.same_as(load.source)), None)
            if writer is None:
                continue
            written = form.computations[writer].indices
            if writer >= position or not all(
                structural_equal(a, b) for a, b in zip(load.indices, written, strict=True)
            ):
                raise IllegalRewrite(
                    f"computation {computation.name} reads other elements of {load.source.name} than its own"
                )


# --- axes and addresses that are runs ---------------------------------------------------------------------------------
def _fuse_form(form: RowForm) -> RowForm:
    """Neighbouring axes that every access runs through as one (paper §3.2, canonical form) become one.

    Worked example, bias and ReLU of (8, 64, 7, 7) with ``b[c]``: n stays, c stays, and h and w become one axis of 49;
    without the bias all four would be one axis of 25088, whose vectors need not divide 7.
    """
    for position, (outer, inner) in enumerate(pairwise((*form.grid, *form.row))):
        if position + 1 != len(form.grid) and _may_fuse(form, outer, inner):
            return _fuse_form(_fuse(form, position))
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


def _divides(node: Node) -> bool:
    return bool(nodes_in(node, (tirx.FloorDiv, tirx.FloorMod)))


def _address_runs(computation: Computation, form: RowForm, params: Sequence[Buffer]) -> Computation:
    """``computation`` addressing the function's parameters by one number: ``[0, 84*n + f]``, not ``[n, f // 21, f %
    21]``.

    Only parameters: stock TVM shrinks buffers that the function allocates to the indices that it sees.
    """

    def flat(buffer: Buffer, indices: Sequence[Expr]) -> list[Expr]:
        if not is_in(buffer, params) or not indices or not any(_divides(index) for index in indices):
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

    def move(load: TensorLoad) -> TensorLoad:
        return load if form.is_internal(load.source) else tirx.BufferLoad(load.source, flat(load.source, load.indices))

    return dataclasses.replace(
        computation,
        value=replace_loads(computation.value, move),
        indices=tuple(flat(computation.target, computation.indices)),
    )
