"""Reads computations into row form: which axes all of them share, and whether each reads only what its own row has
made.

Two axes are one where a load inside the group says so: ``y[a, b] = x[a, b] - m[a]`` identifies y's a with m's. A
class of axes with one spatial axis of every computation is a grid axis; what is left of each computation is its row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tvm_ext._tvm import Analyzer, Buffer, Expr, TensorLoad, Var, ir, structural_equal, tirx
from tvm_ext.analysis.computation_rewrites import split_divided_axes
from tvm_ext.analysis.computations import Computation, dtype_of, replace_loads, substitute
from tvm_ext.errors import IllegalRewrite
from tvm_ext.ir.build_ir import combine

from .form import LoopAxis, RowForm, divides, position_of
from .fuse import address_runs, fuse_form


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
    computation = _simplify_indices(split_divided_axes(_simplify_indices(_without_unit_axes(computation))))
    if computation.is_reduction and not computation.reduction:
        value = combine(computation.combiner, computation.init, computation.value)
        return dataclasses.replace(computation, value=value, combiner=None, init=None)
    return computation


def _without_unit_axes(computation: Computation) -> Computation:
    gone = [
        (v, tirx.IntImm(dtype_of(v), 0))
        for v, e in zip(computation.variables, computation.extents, strict=True)
        if e == 1
    ]
    axes = [
        (v, e, k)
        for v, e, k in zip(computation.variables, computation.extents, computation.kinds, strict=True)
        if e != 1
    ]
    return dataclasses.replace(
        computation,
        variables=tuple(v for v, _, _ in axes),
        extents=tuple(e for _, e, _ in axes),
        kinds=tuple(k for _, _, k in axes),
        value=substitute(computation.value, gone),
        indices=tuple(substitute(item, gone) for item in computation.indices),
    )


def _simplify_indices(computation: Computation) -> Computation:
    """A reshape's ``((h // 8 + c) // 16 + n) % 2`` with h < 8, c < 16, n < 2 is ``n``."""
    analyzer = Analyzer()
    for variable, extent in zip(computation.variables, computation.extents, strict=True):
        analyzer.bind(variable, ir.Range(0, extent))

    def simple(item: TensorLoad) -> Expr:
        if not any(divides(index) for index in item.indices):
            return item
        return tirx.BufferLoad(item.source, [analyzer.simplify(index) for index in item.indices])

    return dataclasses.replace(computation, value=replace_loads(computation.value, simple))


# --- which axes all computations share
# -----------------------------------------------------------------------------------
class _Classes:
    """Union-find over the axes of all computations; an axis is (computation, position)."""

    def __init__(self, computations: Sequence[Computation]) -> None:
        self.parent = {
            (s, p): (s, p) for s, computation in enumerate(computations) for p in range(len(computation.variables))
        }

    def find(self, axis: tuple[int, int]) -> tuple[int, int]:
        while self.parent[axis] != axis:
            axis = self.parent[axis]
        return axis

    def union(self, a: tuple[int, int], b: tuple[int, int]) -> None:
        self.parent[self.find(b)] = self.find(a)

    def groups(self) -> list[list[tuple[int, int]]]:
        found: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for axis in self.parent:
            found.setdefault(self.find(axis), []).append(axis)
        return list(found.values())


def _grid_classes(computations: Sequence[Computation]) -> list[list[tuple[int, int]]]:
    """Groups of one spatial axis of every computation that internal loads and stores identify."""
    classes = _Classes(computations)
    for s, computation in enumerate(computations):
        for item in computation.loads():
            for p, producer in enumerate(computations):
                if item.source.same_as(producer.target):
                    for read, written in zip(item.indices, producer.indices, strict=True):
                        a, b = position_of(computation, read), position_of(producer, written)
                        if a is not None and b is not None:
                            classes.union((s, a), (p, b))
        for earlier in range(s):  # the computations of one block share their variables
            for a, variable in enumerate(computation.variables):
                b = position_of(computations[earlier], variable)
                if b is not None:
                    classes.union((s, a), (earlier, b))
    found = [group for group in classes.groups() if _is_grid(group, computations)]
    last = len(computations) - 1
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
        shared.append(_rename(computation, [*positions, *rest], axes))
    if not has_reduction and row:
        raise IllegalRewrite("computations without a reduction have no row in common")
    return RowForm(grid=tuple(grid), row=tuple(row or ()), computations=tuple(shared), kept=kept)


def _new_axis(computations: Sequence[Computation], axis: tuple[int, int]) -> LoopAxis:
    computation = computations[axis[0]]
    old = computation.variables[axis[1]]
    return LoopAxis(variable=Var(old.name, old.ty), extent=computation.extents[axis[1]])


def _rename(computation: Computation, positions: Sequence[int], axes: Sequence[LoopAxis]) -> Computation:
    """``computation`` with the axes at ``positions`` in this order and under new names."""
    if any(dtype_of(computation.variables[p]) != dtype_of(a.variable) for p, a in zip(positions, axes, strict=True)):
        raise IllegalRewrite(
            f"computation {computation.name} counts in another integer type than the computations before it"
        )
    table = [(computation.variables[p], axis.variable) for p, axis in zip(positions, axes, strict=True)]
    return dataclasses.replace(
        computation,
        variables=tuple(axis.variable for axis in axes),
        extents=tuple(axis.extent for axis in axes),
        kinds=tuple(computation.kinds[p] for p in positions),
        value=substitute(computation.value, table),
        indices=tuple(substitute(item, table) for item in computation.indices),
    )


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
