"""Reads stages into row form: which axes all of them share, and whether each reads only what its own row has made.

Two axes are one where a load inside the group says so: ``y[a, b] = x[a, b] - m[a]`` identifies y's a with m's. A
class of axes with one spatial axis of every stage is a grid axis; what is left of each stage is its row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from tvm_ext._tvm import Analyzer, Var, ir, structural_equal, tirx
from tvm_ext.analysis.stage_rewrites import split_divided_axes
from tvm_ext.analysis.stages import Stage, dtype_of, replace_loads, substitute
from tvm_ext.errors import IllegalRewrite
from tvm_ext.ir.build_ir import combine

from .form import LoopAxis, RowForm, divides, position_of
from .fuse import address_runs, fuse_form


def read_form(stages: Sequence[Stage], kept: Sequence[Any], params: Sequence[Any]) -> RowForm:
    """The stages in common form, ``params`` addressed as runs of memory; raises IllegalRewrite where they have none."""
    plain = [plain_stage(stage) for stage in stages]
    grid_classes = _grid_classes(plain)
    form = _with_shared_variables(plain, grid_classes, tuple(kept))
    _check_own_elements(form)
    form = fuse_form(form)
    return dataclasses.replace(form, stages=tuple(address_runs(stage, form, params) for stage in form.stages))


# --- reading --------------------------------------------------------------------------------------------------------
def plain_stage(stage: Stage) -> Stage:
    """``stage`` without axes of extent 1, with simple indices, its divided axes split; one of one element injective."""
    stage = _simplify_indices(split_divided_axes(_simplify_indices(_without_unit_axes(stage))))
    if stage.is_reduction and not stage.reduction:
        value = combine(stage.combiner, stage.init, stage.value)
        return dataclasses.replace(stage, value=value, combiner=None, init=None)
    return stage


def _without_unit_axes(stage: Stage) -> Stage:
    gone = [(v, tirx.IntImm(dtype_of(v), 0)) for v, e in zip(stage.variables, stage.extents, strict=True) if e == 1]
    axes = [(v, e, k) for v, e, k in zip(stage.variables, stage.extents, stage.kinds, strict=True) if e != 1]
    return dataclasses.replace(
        stage,
        variables=tuple(v for v, _, _ in axes),
        extents=tuple(e for _, e, _ in axes),
        kinds=tuple(k for _, _, k in axes),
        value=substitute(stage.value, gone),
        indices=tuple(substitute(item, gone) for item in stage.indices),
    )


def _simplify_indices(stage: Stage) -> Stage:
    """A reshape's ``((h // 8 + c) // 16 + n) % 2`` with h < 8, c < 16, n < 2 is ``n``."""
    analyzer = Analyzer()
    for variable, extent in zip(stage.variables, stage.extents, strict=True):
        analyzer.bind(variable, ir.Range(0, extent))

    def simple(item: Any) -> Any:
        if not any(divides(index) for index in item.indices):
            return item
        return tirx.BufferLoad(item.source, [analyzer.simplify(index) for index in item.indices])

    return dataclasses.replace(stage, value=replace_loads(stage.value, simple))


# --- which axes all stages share -----------------------------------------------------------------------------------
class _Classes:
    """Union-find over the axes of all stages; an axis is (stage, position)."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        self.parent = {(s, p): (s, p) for s, stage in enumerate(stages) for p in range(len(stage.variables))}

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


def _grid_classes(stages: Sequence[Stage]) -> list[list[tuple[int, int]]]:
    """Groups of one spatial axis of every stage that internal loads and stores identify."""
    classes = _Classes(stages)
    for s, stage in enumerate(stages):
        for item in stage.loads():
            for p, producer in enumerate(stages):
                if item.source.same_as(producer.target):
                    for read, written in zip(item.indices, producer.indices, strict=True):
                        a, b = position_of(stage, read), position_of(producer, written)
                        if a is not None and b is not None:
                            classes.union((s, a), (p, b))
        for earlier in range(s):  # the stages of one block share their variables
            for a, variable in enumerate(stage.variables):
                b = position_of(stages[earlier], variable)
                if b is not None:
                    classes.union((s, a), (earlier, b))
    found = [group for group in classes.groups() if _is_grid(group, stages)]
    last = len(stages) - 1
    return sorted(found, key=lambda group: next(p for s, p in group if s == last))


def _is_grid(group: Sequence[tuple[int, int]], stages: Sequence[Stage]) -> bool:
    if sorted(s for s, _ in group) != list(range(len(stages))):
        return False
    axes = [(stages[s].kinds[p], stages[s].extents[p]) for s, p in group]
    return all(kind == "spatial" and extent == axes[0][1] for kind, extent in axes)


def _with_shared_variables(
    stages: Sequence[Stage], classes: Sequence[Sequence[tuple[int, int]]], kept: tuple[Any, ...]
) -> RowForm:
    grid = [_new_axis(stages, group[0]) for group in classes]
    has_reduction = any(stage.is_reduction for stage in stages)
    row: list[LoopAxis] | None = None
    shared: list[Stage] = []
    for s, stage in enumerate(stages):
        positions = [next(p for owner, p in group if owner == s) for group in classes]
        rest = [p for p in range(len(stage.variables)) if p not in positions]
        if stage.is_reduction and any(stage.kinds[p] == "spatial" for p in rest):
            raise IllegalRewrite(f"stage {stage.name} keeps an axis that the other stages of its row reduce")
        if rest and row is None:
            row = [_new_axis(stages, (s, p)) for p in rest]
        if rest and [stage.extents[p] for p in rest] != [axis.extent for axis in row or ()]:
            raise IllegalRewrite(f"stage {stage.name} sweeps another row than the stages before it")
        axes = [*grid, *((row or []) if rest else [])]
        shared.append(_rename(stage, [*positions, *rest], axes))
    if not has_reduction and row:
        raise IllegalRewrite("stages without a reduction have no row in common")
    return RowForm(grid=tuple(grid), row=tuple(row or ()), stages=tuple(shared), kept=kept)


def _new_axis(stages: Sequence[Stage], axis: tuple[int, int]) -> LoopAxis:
    stage = stages[axis[0]]
    old = stage.variables[axis[1]]
    return LoopAxis(variable=Var(old.name, old.ty), extent=stage.extents[axis[1]])


def _rename(stage: Stage, positions: Sequence[int], axes: Sequence[LoopAxis]) -> Stage:
    """``stage`` with the axes at ``positions`` in this order and under new names."""
    if any(dtype_of(stage.variables[p]) != dtype_of(a.variable) for p, a in zip(positions, axes, strict=True)):
        raise IllegalRewrite(f"stage {stage.name} counts in another integer type than the stages before it")
    table = [(stage.variables[p], axis.variable) for p, axis in zip(positions, axes, strict=True)]
    return dataclasses.replace(
        stage,
        variables=tuple(axis.variable for axis in axes),
        extents=tuple(axis.extent for axis in axes),
        kinds=tuple(stage.kinds[p] for p in positions),
        value=substitute(stage.value, table),
        indices=tuple(substitute(item, table) for item in stage.indices),
    )


def _check_own_elements(form: RowForm) -> None:
    """Every internal load must read the element of its own grid point and row position, written by an earlier stage."""
    for position, stage in enumerate(form.stages):
        for item in stage.loads():
            writer = next((p for p, s in enumerate(form.stages) if s.target.same_as(item.source)), None)
            if writer is None:
                continue
            written = form.stages[writer].indices
            if writer >= position or not all(
                structural_equal(a, b) for a, b in zip(item.indices, written, strict=True)
            ):
                raise IllegalRewrite(f"stage {stage.name} reads other elements of {item.source.name} than its own")
