"""Pure rewrites of stages: inlining, and the axis changes that bring an operator to canonical form (paper §3.2)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from ._tvm import Var, structural_map, structural_walk, tirx
from .stages import Expr, Stage, dtype_of, replace_loads, substitute
from .tensor_expr import AxisKind


def inline(producer: Stage, consumer: Stage) -> Stage:
    """``consumer`` with each load of ``producer``'s buffer replaced by the producer's value at that point."""
    assert not producer.is_reduction
    assert producer.writes_at_its_own_axes()

    def replace(load: Any) -> Any:
        if not load.source.same_as(producer.target):
            return load
        return substitute(producer.value, list(zip(producer.spatial, load.indices, strict=True)))

    return dataclasses.replace(consumer, value=replace_loads(consumer.value, replace))


def drop_unit_axes(stage: Stage) -> Stage:
    """``stage`` without its axes of extent 1, whose variables become 0. At least one spatial axis stays."""
    keep = [position for position, extent in enumerate(stage.extents) if extent != 1]
    if not any(stage.kinds[position] == "spatial" for position in keep):
        first = next((p for p, kind in enumerate(stage.kinds) if kind == "spatial"), None)
        keep = sorted({*keep, first}) if first is not None else keep
    gone = [p for p in range(len(stage.extents)) if p not in keep]
    table = [(stage.variables[p], tirx.IntImm(dtype_of(stage.variables[p]), 0)) for p in gone]
    return _with_axes(stage, [(stage.variables[p], stage.extents[p], stage.kinds[p]) for p in keep], table)


def split_divided_axes(stage: Stage) -> Stage:
    """Split every axis that is only ever addressed through ``axis // c`` and ``axis % c``, or through it and itself.

    Worked example, grouped convolution: ``x[(f // 4) * 2 + c] * w[f, c]`` with f of extent 16 becomes
    ``x[g * 2 + c] * w[g * 4 + i, c]`` with g of extent 4 and i of extent 4: every index is affine again.
    """
    for variable, extent in zip(stage.variables, stage.extents, strict=True):
        divisor = _divisor(stage.value, variable)
        if divisor is None or divisor <= 1 or extent % divisor or extent == divisor:
            continue
        return split_divided_axes(_split(stage, variable, divisor))
    return stage


def _split(stage: Stage, variable: Any, divisor: int) -> Stage:
    outer = Var(variable.name + "_outer", variable.ty)
    inner = Var(variable.name + "_inner", variable.ty)

    def divide(node: Any) -> Any:
        return outer if _is_pair(node, variable, divisor) else node

    def remainder(node: Any) -> Any:
        return inner if _is_pair(node, variable, divisor) else node

    def rewrite(node: Any) -> Any:
        node = structural_map(node, [(tirx.FloorDiv, divide), (tirx.FloorMod, remainder)])
        return substitute(node, [(variable, outer * tirx.IntImm(dtype_of(variable), divisor) + inner)])

    axes: list[tuple[Any, int, AxisKind]] = []
    for v, extent, kind in zip(stage.variables, stage.extents, stage.kinds, strict=True):
        pieces = [(outer, extent // divisor, kind), (inner, divisor, kind)]
        axes += pieces if v.same_as(variable) else [(v, extent, kind)]
    return dataclasses.replace(
        stage,
        variables=tuple(v for v, _, _ in axes),
        extents=tuple(e for _, e, _ in axes),
        kinds=tuple(k for _, _, k in axes),
        indices=tuple(rewrite(index) for index in stage.indices),
        value=rewrite(stage.value),
    )


def _is_pair(node: Any, variable: Any, divisor: int) -> bool:
    return bool(node.a.same_as(variable)) and getattr(node.b, "value", None) == divisor


def _divisor(node: Any, variable: Any) -> int | None:
    found: list[int] = []

    def visit(pair: Any) -> None:
        if pair.a.same_as(variable) and hasattr(pair.b, "value"):
            found.append(int(pair.b.value))

    structural_walk(node, [(tirx.FloorDiv, visit), (tirx.FloorMod, visit)], order="pre")
    return found[0] if found else None


def fuse_axes(stage: Stage, groups: Sequence[Sequence[int]]) -> Stage:
    """Fuse each group of axis positions into one axis (paper §3.2): ``a = f // Eb`` and ``b = f % Eb``.

    The result's axes are in the order of ``groups``; the positions of a group are of one kind, the outermost first.
    """
    axes: list[tuple[Any, int, AxisKind]] = []
    table: list[tuple[Any, Expr]] = []
    for group in groups:
        if len(group) == 1:
            p = group[0]
            axes.append((stage.variables[p], stage.extents[p], stage.kinds[p]))
            continue
        first = stage.variables[group[0]]
        fused = Var(".".join(stage.variables[p].name for p in group), first.ty)
        remaining: Expr = fused
        for p in reversed(group[1:]):
            extent = tirx.IntImm(dtype_of(first), stage.extents[p])
            table.append((stage.variables[p], tirx.floormod(remaining, extent)))
            remaining = tirx.floordiv(remaining, extent)
        table.append((stage.variables[group[0]], remaining))
        size = 1
        for p in group:
            size *= stage.extents[p]
        axes.append((fused, size, stage.kinds[group[0]]))
    return _with_axes(stage, axes, table)


def _with_axes(stage: Stage, axes: list[tuple[Any, int, AxisKind]], table: list[tuple[Any, Expr]]) -> Stage:
    return dataclasses.replace(
        stage,
        variables=tuple(v for v, _, _ in axes),
        extents=tuple(e for _, e, _ in axes),
        kinds=tuple(k for _, _, k in axes),
        indices=tuple(substitute(index, table) for index in stage.indices),
        value=substitute(stage.value, table),
    )
