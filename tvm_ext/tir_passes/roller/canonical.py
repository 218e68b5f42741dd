"""Axis fusion to canonical form (paper §3.2, "Small operator and irregular tensor shape").

Two axes that are adjacent in one tensor may be merged when in every other tensor they are both present and adjacent,
or both absent: an element-wise [17, 11, 3] becomes [561]; a 1x1 convolution's height and width become one axis, so
that 7 x 7 = 49 points fill 4 registers of 16 lanes (77 %), where rows of 7 fill 7 registers (44 %).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

from tvm_ext.analysis.tensor_expr import FUSED, Access, Axis, LinearIndex, TensorExpr


@dataclass(frozen=True, kw_only=True, slots=True)
class CanonicalForm:
    """An expression with merged axes; ``groups`` holds, per canonical axis, the original axes from the outermost in.

    Axes of extent 1 are dropped from ``expr`` and listed in ``dropped``.
    """

    expr: TensorExpr
    groups: tuple[tuple[str, tuple[str, ...]], ...]
    dropped: tuple[str, ...]


def canonicalise(expr: TensorExpr, *, fuse: bool = True) -> CanonicalForm:
    """Drop axes of extent 1 and, where ``fuse``, merge axes until no legal pair is left."""
    dropped = tuple(axis.name for axis in expr.axes if axis.extent == 1)
    if len(dropped) == len(expr.axes):
        dropped = dropped[1:]  # an operator of a single point keeps one axis
    groups: dict[str, tuple[str, ...]] = {axis.name: (axis.name,) for axis in expr.axes if axis.name not in dropped}
    current = _drop_axes(expr, frozenset(dropped))
    pair = _fusible_pair(current) if fuse else None
    while pair is not None:
        outer, inner = pair
        merged = f"{outer}{FUSED}{inner}"
        current = _merge(current, outer, inner, merged)
        groups[merged] = groups.pop(outer) + groups.pop(inner)
        pair = _fusible_pair(current)
    ordered = tuple((axis.name, groups[axis.name]) for axis in current.axes)
    return CanonicalForm(expr=current, groups=ordered, dropped=dropped)


def _drop_axes(expr: TensorExpr, names: frozenset[str]) -> TensorExpr:
    def kept(access: Access) -> Access:
        indices = tuple(
            None if index is None else replace(index, terms=tuple(t for t in index.terms if t[0] not in names))
            for index in access.indices
        )
        return replace(access, indices=indices)

    axes = tuple(axis for axis in expr.axes if axis.name not in names)
    return replace(expr, axes=axes, inputs=tuple(map(kept, expr.inputs)), output=kept(expr.output))


def _fusible_pair(expr: TensorExpr) -> tuple[str, str] | None:
    for access in (expr.output, *expr.inputs):
        for outer, inner in _adjacent_axes(access):
            if expr.axis(outer).kind == expr.axis(inner).kind and all(
                _allows(a, outer, expr.axis(inner)) for a in expr.accesses
            ):
                return outer, inner
    return None


def _single_axis(index: LinearIndex | None) -> str | None:
    """The axis that an index *is*, where it is just one axis."""
    if index is None or index.constant or len(index.terms) != 1 or index.terms[0][1] != 1:
        return None
    return index.terms[0][0]


def _real_dims(access: Access) -> list[tuple[int, LinearIndex | None]]:
    """Dimensions without those of size 1, which do not separate their neighbours."""
    return [(access.shape[d], access.indices[d]) for d in _real_places(access)]


def _real_places(access: Access) -> list[int]:
    dims = zip(access.shape, access.indices, strict=True)
    return [d for d, (size, index) in enumerate(dims) if size > 1 or index is None or index.terms]


def _adjacent_axes(access: Access) -> list[tuple[str, str]]:
    """Of [i, j, k] (i, j) and (j, k); the diagonal's [k, k] is one axis."""
    axes = [_single_axis(index) for _, index in _real_dims(access)]
    return [(outer, inner) for outer, inner in pairwise(axes) if outer and inner and outer != inner]


def _allows(access: Access, outer: str, inner: Axis) -> bool:
    """Both axes absent, or both present once, adjacent, with ``inner`` running over its whole dimension.

    A [64, 10] tensor read at [i, j] with j < 8 has gaps of 2 between rows, so (i, j) is not one run. An axis that
    chooses where a gather reads stays as it is.
    """
    if any({outer, inner.name} & set(axes) for axes in access.gathers):
        return False
    uses = (access.uses(outer), access.uses(inner.name))
    if not any(uses):
        return all(index is not None for index in access.indices)
    dims = _real_dims(access)
    places = [i for i, (_, index) in enumerate(dims) if index is not None and _mentions(index, outer, inner.name)]
    if len(places) != 2 or places[1] != places[0] + 1:
        return False
    (_, first), (size, second) = dims[places[0]], dims[places[1]]
    return (_single_axis(first), _single_axis(second)) == (outer, inner.name) and size == inner.extent


def _mentions(index: LinearIndex, outer: str, inner: str) -> bool:
    return bool(index.coefficient(outer) or index.coefficient(inner))


def _merge(expr: TensorExpr, outer: str, inner: str, name: str) -> TensorExpr:
    size = expr.axis(outer).extent * expr.axis(inner).extent
    merged = Axis(name=name, extent=size, kind=expr.axis(inner).kind)
    axes = tuple(merged if axis.name == inner else axis for axis in expr.axes if axis.name != outer)
    return replace(
        expr,
        axes=axes,
        inputs=tuple(_merge_access(access, outer, inner, merged) for access in expr.inputs),
        output=_merge_access(expr.output, outer, inner, merged),
    )


def _merge_access(access: Access, outer: str, inner: str, merged: Axis) -> Access:
    if not access.uses(outer):
        return access
    shape: list[int] = []
    indices: list[LinearIndex | None] = []
    gathers: list[tuple[str, ...]] = []
    rows = 1
    for d in _real_places(access):
        size, index = access.shape[d], access.indices[d]
        if _single_axis(index) == outer:
            rows = size
            continue
        is_inner = _single_axis(index) == inner
        shape.append(rows * size if is_inner else size)
        indices.append(LinearIndex(terms=((merged.name, 1),)) if is_inner else index)
        gathers.append(access.gathered_by(d))
    kept = tuple(gathers) if access.gathers else ()
    return replace(access, shape=tuple(shape), indices=tuple(indices), gathers=kept)
