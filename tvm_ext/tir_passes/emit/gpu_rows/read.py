"""Reads computations into row form: which axes all of them share, and whether each reads only what its own row has
made.

Two axes are one where a load inside the group says so: ``y[a, b] = x[a, b] - m[a]`` identifies y's a with m's. A
class of axes with one spatial axis of every computation is a grid axis; what is left of each computation is its row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tvm_ext._tvm import Buffer, Expr, TensorLoad, Var, structural_equal, tirx
from tvm_ext.analysis.computation_exprs import analyzer_of
from tvm_ext.analysis.computation_rewrites import drop_unit_axes, split_divided_axes
from tvm_ext.analysis.computations import Computation, replace_loads
from tvm_ext.errors import IllegalRewrite
from tvm_ext.ir.build_ir import combine

from .form import LoopAxis, RowForm, position_of, rename_axes
from .fuse import address_runs, divides, fuse_form


def read_form(computations: Sequence[Computation], kept: Sequence[Buffer], params: Sequence[Buffer]) -> RowForm:
    """The computations in common form, ``params`` addressed as runs of memory; raises IllegalRewrite where they have
    none.
    """
    plain = [plain_computation(computation) for computation in computations]
    grid_classes = _grid_classes(plain)
    form = _with_shared_variables(plain, grid_classes, tuple(kept))
    _check_own_elements(form)
    form = fuse_form(form)
    return dataclasses.replace(
        form, computations=tuple(address_runs(computation, form, params) for computation in form.computations)
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

    def simple(item: TensorLoad) -> Expr:
        if not any(divides(index) for index in item.indices):
            return item
        return tirx.BufferLoad(item.source, [analyzer.simplify(index) for index in item.indices])

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
        for item in computation.loads():
            for p, producer in enumerate(computations):
                if item.source.same_as(producer.target):
                    for read, written in zip(item.indices, producer.indices, strict=True):
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
        for item in computation.loads():
            writer = next((p for p, s in enumerate(form.computations) if s.target.same_as(item.source)), None)
            if writer is None:
                continue
            written = form.computations[writer].indices
            if writer >= position or not all(
                structural_equal(a, b) for a, b in zip(item.indices, written, strict=True)
            ):
                raise IllegalRewrite(
                    f"computation {computation.name} reads other elements of {item.source.name} than its own"
                )
