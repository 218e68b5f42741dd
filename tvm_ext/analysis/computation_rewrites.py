"""Pure rewrites of computations: inlining, and changes of axes to canonical form (paper §3.2)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from math import prod

from tvm_ext._tvm import Buffer, Expr, TensorLoad, Var, nodes_in, structural_equal, structural_map, tirx

from .computations import Computation, dtype_of, mentions, replace_loads, static_shape, substitute
from .tensor_expr import AxisKind


def inline(producer: Computation, consumer: Computation) -> Computation:
    """``consumer`` with each load of ``producer``'s buffer replaced by the producer's value at that point."""
    assert not producer.is_reduction
    assert producer.writes_at_its_own_axes()

    def replace(load: TensorLoad) -> Expr:
        if not load.source.same_as(producer.target):
            return load
        return substitute(producer.value, list(zip(producer.spatial, load.indices, strict=True)))

    return dataclasses.replace(consumer, value=replace_loads(consumer.value, replace))


def drop_unit_axes(computation: Computation, *, keep_one: bool = True) -> Computation:
    """``computation`` without its axes of extent 1, whose variables become 0; ``keep_one``: one spatial axis stays."""
    keep = [position for position, extent in enumerate(computation.extents) if extent != 1]
    if keep_one and not any(computation.kinds[position] == "spatial" for position in keep):
        first = next((p for p, kind in enumerate(computation.kinds) if kind == "spatial"), None)
        keep = sorted({*keep, first}) if first is not None else keep
    gone = [p for p in range(len(computation.extents)) if p not in keep]
    table = [(computation.variables[p], tirx.IntImm(dtype_of(computation.variables[p]), 0)) for p in gone]
    return _with_axes(
        computation, [(computation.variables[p], computation.extents[p], computation.kinds[p]) for p in keep], table
    )


def split_divided_axes(computation: Computation) -> Computation:
    """Split every axis that is only ever addressed through ``axis // c`` and ``axis % c``, or through it and itself.

    Worked example, grouped convolution: ``x[(f // 4) * 2 + c] * w[f, c]`` with f of extent 16 becomes
    ``x[g * 2 + c] * w[g * 4 + i, c]`` with g of extent 4 and i of extent 4: every index is affine again.
    """
    for variable, extent in zip(computation.variables, computation.extents, strict=True):
        divisor = _divisor(computation.value, variable)
        if divisor is None or divisor <= 1 or extent % divisor or extent == divisor:
            continue
        return split_divided_axes(split_axis(computation, variable, divisor))
    return computation


def split_axis(computation: Computation, variable: Var, divisor: int) -> Computation:
    """``computation`` with two axes in the place of ``variable``: the inner one, of ``divisor``, behind the outer."""
    outer = Var(variable.name + "_outer", variable.ty)
    inner = Var(variable.name + "_inner", variable.ty)

    def divide(node: Expr) -> Expr:
        return outer if _is_pair(node, variable, divisor) else node

    def remainder(node: Expr) -> Expr:
        return inner if _is_pair(node, variable, divisor) else node

    def rewrite(node: Expr) -> Expr:
        node = structural_map(node, [(tirx.FloorDiv, divide), (tirx.FloorMod, remainder)])
        return substitute(node, [(variable, outer * tirx.IntImm(dtype_of(variable), divisor) + inner)])

    axes: list[tuple[Var, int, AxisKind]] = []
    for v, extent, kind in zip(computation.variables, computation.extents, computation.kinds, strict=True):
        pieces = [(outer, extent // divisor, kind), (inner, divisor, kind)]
        axes += pieces if v.same_as(variable) else [(v, extent, kind)]
    return dataclasses.replace(
        computation,
        variables=tuple(v for v, _, _ in axes),
        extents=tuple(e for _, e, _ in axes),
        kinds=tuple(k for _, _, k in axes),
        indices=tuple(rewrite(index) for index in computation.indices),
        value=rewrite(computation.value),
    )


def _is_pair(node: Expr, variable: Var, divisor: int) -> bool:
    return bool(node.a.same_as(variable)) and getattr(node.b, "value", None) == divisor


def _divisor(node: Expr, variable: Var) -> int | None:
    pairs = nodes_in(node, (tirx.FloorDiv, tirx.FloorMod), "pre")
    return next((int(pair.b.value) for pair in pairs if pair.a.same_as(variable) and hasattr(pair.b, "value")), None)


def fuse_axes(computation: Computation, groups: Sequence[Sequence[int]]) -> Computation:
    """Fuse each group of axis positions into one axis (paper §3.2): ``a = f // Eb`` and ``b = f % Eb``.

    The result's axes are in the order of ``groups``; the positions of a group are of one kind, the outermost first.
    """
    axes: list[tuple[Var, int, AxisKind]] = []
    table: list[tuple[Var, Expr]] = []
    for group in groups:
        if len(group) == 1:
            p = group[0]
            axes.append((computation.variables[p], computation.extents[p], computation.kinds[p]))
            continue
        first = computation.variables[group[0]]
        fused = Var(".".join(computation.variables[p].name for p in group), first.ty)
        remaining: Expr = fused
        for p in reversed(group[1:]):
            extent = tirx.IntImm(dtype_of(first), computation.extents[p])
            table.append((computation.variables[p], tirx.floormod(remaining, extent)))
            remaining = tirx.floordiv(remaining, extent)
        table.append((computation.variables[group[0]], remaining))
        size = prod(computation.extents[p] for p in group)
        axes.append((fused, size, computation.kinds[group[0]]))
    return _with_axes(computation, axes, table)


def address_runs(
    computation: Computation,
    fused: Sequence[Var],
    extents: Sequence[Sequence[int]],
    *,
    buffers: Sequence[Buffer],
    stores: bool,
) -> Computation:
    """``computation`` addressing dimensions that one fused axis runs through as one: ``[f // W, f % W]`` becomes ``[0,
    f]``.

    The row-major address is the same, but neighbours along f are neighbours in memory without division: a vector that
    crosses from one row of W = 21 into the next is one load, not 16. ``fused`` holds the fused axes' variables,
    ``extents`` what each was fused from; ``stores`` also addresses the target so. Only loads from ``buffers`` are
    changed, which should be parameters: stock TVM shrinks the buffers that a kernel allocates to the indices it sees.
    """
    runs = [(variable, tuple(sizes)) for variable, sizes in zip(fused, extents, strict=True)]

    def joined(indices: Sequence[Expr], shape: Sequence[int]) -> list[Expr]:
        result = list(indices)
        for variable, sizes in runs:
            first = _run_start(indices, shape, variable, sizes)
            if first is not None:
                zero = tirx.IntImm(dtype_of(variable), 0)
                result[first : first + len(sizes)] = [zero] * (len(sizes) - 1) + [variable]
        return result

    def load(read: TensorLoad) -> TensorLoad:
        if not any(read.source.same_as(buffer) for buffer in buffers):
            return read
        indices = joined(read.indices, static_shape(read.source))
        unchanged = all(a is b for a, b in zip(indices, read.indices, strict=True))
        return read if unchanged else tirx.BufferLoad(read.source, indices)

    value = replace_loads(computation.value, load)
    indices = tuple(joined(computation.indices, static_shape(computation.target))) if stores else computation.indices
    return dataclasses.replace(computation, value=value, indices=indices)


def _run_start(indices: Sequence[Expr], shape: Sequence[int], variable: Var, sizes: tuple[int, ...]) -> int | None:
    """The first of the consecutive dimensions whose indices are the digits of ``variable`` in base ``sizes``."""
    digits: list[Expr] = []
    remaining: Expr = variable
    for size in reversed(sizes[1:]):
        extent = tirx.IntImm(dtype_of(variable), size)
        digits.insert(0, tirx.floormod(remaining, extent))
        remaining = tirx.floordiv(remaining, extent)
    digits.insert(0, remaining)
    for first in range(len(indices) - len(sizes) + 1):
        if tuple(shape[first + 1 : first + len(sizes)]) == sizes[1:] and all(
            structural_equal(index, digit) for index, digit in zip(indices[first:], digits, strict=False)
        ):
            return first
    return None


def reads_whole_runs(computation: Computation, dims: Sequence[int], sizes: Sequence[int]) -> bool:
    """Whether ``computation`` uses its spatial axes ``dims``, of extents ``sizes``, only as one whole run of memory.

    The outermost dimension of the run counts as well: a buffer of fewer rows ends before the run does.
    """
    variables = [computation.spatial[d] for d in dims]

    def whole(indices: Sequence[Expr], shape: Sequence[int]) -> bool:
        if not any(mentions(index, *variables) for index in indices):
            return True
        first = next(i for i, index in enumerate(indices) if mentions(index, *variables))
        run = indices[first : first + len(variables)]
        return (
            len(run) == len(variables)
            and all(index.same_as(variable) for index, variable in zip(run, variables, strict=True))
            and tuple(shape[first : first + len(variables)]) == tuple(sizes)
            and not any(mentions(index, *variables) for index in indices[first + len(variables) :])
        )

    accesses = [(load.indices, static_shape(load.source)) for load in computation.loads()]
    accesses.append((computation.indices, static_shape(computation.target)))
    rest = replace_loads(computation.value, lambda load: tirx.const(0, dtype_of(load)))
    return not mentions(rest, *variables) and all(whole(indices, shape) for indices, shape in accesses)


def _with_axes(
    computation: Computation, axes: list[tuple[Var, int, AxisKind]], table: list[tuple[Var, Expr]]
) -> Computation:
    return dataclasses.replace(
        computation,
        variables=tuple(v for v, _, _ in axes),
        extents=tuple(e for _, e, _ in axes),
        kinds=tuple(k for _, _, k in axes),
        indices=tuple(substitute(index, table) for index in computation.indices),
        value=substitute(computation.value, table),
    )
