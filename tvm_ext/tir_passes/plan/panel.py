"""Divides a chain of operators into panels: the part of every computation that one panel of the result needs.

A chain of products is computed panel by panel (Bolt, §3.1): for 128 rows of the last product, the 128 rows of each
product before it. Which part of a computation a panel needs follows from the indices by which it is read, from the
result back to the inputs. Worked example, rows 4p ... 4p + 3 of a 1x1 convolution behind a 3x3 one of stride 2: rows
4p ... 4p + 3 of the 3x3 one's result, and rows 8p ... 8p + 8 of its padded input.

A panel's computations are like the operator's, over fewer points and counting from 0; where the panel begins is known
only to the views, which stand for the part of a parameter that it reads or writes. So every planner and emitter takes
them for an operator of their own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from tvm_ext._tvm import Buffer, Expr, TensorLoad, Var, tirx
from tvm_ext.analysis.computation_exprs import linear_form
from tvm_ext.analysis.computations import Computation, OperatorBody, dtype_of, mentions, replace_loads, static_shape
from tvm_ext.analysis.predicates import is_in
from tvm_ext.analysis.window import Interval, is_padding, padding_of
from tvm_ext.errors import IllegalRewrite
from tvm_ext.ir.build_ir import INDEX_DTYPE, index, new_buffer
from tvm_ext.support.arithmetic import ceil_div


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """The part of a dimension that a panel needs: ``extent`` elements from ``start`` on.

    ``start`` is affine in where the panel begins: ``(coefficient of each divided axis, ..., constant)``.
    """

    start: tuple[int, ...]
    extent: int

    @property
    def moves(self) -> bool:
        """Whether another panel needs another part."""
        return any(self.start[:-1])


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PanelView:
    """What a panel sees of a parameter: ``buffer`` stands for the ``parts`` of ``original``."""

    buffer: Buffer
    original: Buffer
    parts: tuple[Part, ...]
    written: bool

    @property
    def divided(self) -> int:
        """The innermost dimension that is divided."""
        return max(d for d, part in enumerate(self.parts) if part.moves)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PanelPadding:
    """A padding computation of a panel: ``inside`` where ``low <= start + v < high`` in every dimension, else
    ``outside``.

    ``bounds`` holds (low, high) of each dimension of the whole tensor, None where nothing is padded.
    """

    computation: Computation
    inside: Expr
    outside: Expr
    parts: tuple[Part, ...]
    bounds: tuple[Interval | None, ...]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Panel:
    """One panel of a chain, which begins at ``bases`` along the divided axes of the result.

    ``operator`` has the computations of the panel, ``views`` what they name in place of parameters that are divided;
    ``before`` has those computations that every panel reads whole.
    """

    bases: tuple[Var, ...]
    sizes: tuple[int, ...]
    extents: tuple[int, ...]  # of the divided axes
    operator: OperatorBody
    before: OperatorBody
    views: tuple[PanelView, ...]
    paddings: tuple[PanelPadding, ...]

    @property
    def counts(self) -> tuple[int, ...]:
        """Panels along each divided axis."""
        return tuple(ceil_div(extent, size) for extent, size in zip(self.extents, self.sizes, strict=True))

    def start_of(self, part: Part) -> Expr:
        """Where ``part`` begins in the whole tensor."""
        total: Expr = index(part.start[-1])
        for base, factor in zip(self.bases, part.start[:-1], strict=True):
            total = total + base * index(factor) if factor else total
        return total


def panel_axes(operator: OperatorBody) -> tuple[int, ...]:
    """Axes of the result along which panels need nothing twice of any reduction; outermost first.

    Raises IllegalRewrite where there is none, with the reason for the first axis.
    """
    reasons = obstacles(operator)
    legal = tuple(axis for axis, reason in reasons.items() if reason is None)
    if not legal:
        raise IllegalRewrite(next(filter(None, reasons.values()), "the result has no axis to divide"))
    return legal


def obstacles(operator: OperatorBody) -> dict[int, str | None]:
    """For each axis of the result, why it cannot be divided; None where it can."""
    return {axis: _obstacle(operator, axis) for axis in range(len(_result_of(operator).spatial))}


def _obstacle(operator: OperatorBody, axis: int) -> str | None:
    """Why the result cannot be divided along ``axis``; None where it can."""
    try:
        panel_parts(operator, {axis: 1})
    except IllegalRewrite as refusal:
        return refusal.problem
    return None


def divide(operator: OperatorBody, sizes: Mapping[int, int]) -> Panel:
    """The panel of ``sizes`` along axes of the result; raises IllegalRewrite where a reduction would be repeated."""
    parts = panel_parts(operator, sizes)
    result = _result_of(operator)
    bases = tuple(Var(f"{result.spatial[axis].name.removeprefix('v_')}_base", INDEX_DTYPE) for axis in sizes)
    builder = _Builder(operator, parts)
    before = [c for c in operator.computations if not _moves(parts[c.target])]
    computations = tuple(builder.part_of(c) for c in operator.computations if _moves(parts[c.target]))
    seen = [[view for view in builder.views if view.original.same_as(param)] for param in operator.params]
    params = [views[0].buffer if len(views) == 1 else p for views, p in zip(seen, operator.params, strict=True)]
    return Panel(
        bases=bases,
        sizes=tuple(sizes.values()),
        extents=tuple(result.extent(result.spatial[axis]) for axis in sizes),
        operator=dataclasses.replace(
            operator, params=tuple(params), outputs=(computations[-1].target,), computations=computations
        ),
        before=dataclasses.replace(operator, computations=tuple(before)),
        views=tuple(builder.views),
        paddings=tuple(builder.paddings),
    )


def _moves(parts: Sequence[Part]) -> bool:
    return any(part.moves for part in parts)


def _result_of(operator: OperatorBody) -> Computation:
    if len(operator.outputs) != 1:
        raise IllegalRewrite(f"{operator.name} has {len(operator.outputs)} results")
    result = operator.computations[-1]
    if not operator.is_output(result.target) or not result.writes_at_its_own_axes():
        raise IllegalRewrite(f"{result.name} does not write the result along its own axes")
    return result


def check_runs(computation: Computation, views: Sequence[PanelView]) -> None:
    """Raise IllegalRewrite where an axis that was fused for a panel is no run of memory in the whole tensor.

    An axis may be fused from the divided one and others inside it, never from one outside.
    """
    for view in views:
        accesses = [load.indices for load in computation.loads() if load.source.same_as(view.buffer)]
        if view.written and len(computation.indices) == len(view.parts):
            accesses.append(computation.indices)
        for indices in accesses:
            for part, read_at in list(zip(view.parts, indices, strict=True))[: view.divided]:
                if part.extent > 1 and isinstance(read_at, tirx.IntImm):
                    raise IllegalRewrite(f"{computation.name} has an axis that runs across panels")


def check_strides(computation: Computation, views: Sequence[PanelView], axes: Sequence[Var]) -> None:
    """Raise IllegalRewrite where a view does not lie in memory along ``axes`` as it would alone: an instruction that
    takes several of their points at once counts on it.
    """
    for view in views:
        own, whole = (static_shape(buffer) for buffer in (view.buffer, view.original))
        for load in (load for load in computation.loads() if load.source.same_as(view.buffer)):
            for dim, read_at in enumerate(load.indices):
                if mentions(read_at, *axes) and prod(own[dim + 1 :]) != prod(whole[dim + 1 :]):
                    raise IllegalRewrite(f"{computation.name} reads a panel whose rows lie apart")


# --- which part of what a panel needs -------------------------------------------------------------------------------
def outside_parts(
    operator: OperatorBody, parts: Mapping[Buffer, tuple[Part, ...]]
) -> set[tuple[Buffer, tuple[Part, ...]]]:
    """What a panel that needs ``parts`` reads of parameters, unless every panel reads the same, and what it writes."""
    result = _result_of(operator).target
    found = {(result, parts[result])}
    for computation in operator.computations:
        if _moves(parts[computation.target]):
            for load in (load for load in computation.loads() if load.source not in parts):
                read = tuple(part for part, _ in _read_part(load, computation, parts[computation.target]))
                found |= {(load.source, read)} if _moves(read) else set()
    return found


def panel_parts(operator: OperatorBody, sizes: Mapping[int, int]) -> dict[Buffer, tuple[Part, ...]]:
    """The part of each computation's tensor that a panel of ``sizes`` along axes of the result needs.

    Raises IllegalRewrite where a reduction would be repeated or a panel would reach beyond a tensor.
    """
    result = _result_of(operator)
    own = list(_whole(result.target, len(sizes)))
    for position, (axis, size) in enumerate(sizes.items()):
        own[axis] = Part(start=_unit(position, len(sizes)), extent=min(size, own[axis].extent))
    parts: dict[Buffer, tuple[Part, ...]] = {result.target: tuple(own)}
    last = tuple(result.extents[axis] - own[axis].extent for axis in sizes)
    inner = [computation.target for computation in operator.computations]
    for computation in reversed(operator.computations):
        needed = parts.get(computation.target)
        if needed is None:
            raise IllegalRewrite(f"nothing reads {computation.name}")
        _check_part(computation, needed, tuple(sizes.values()))
        for load in computation.loads():
            if is_in(load.source, inner):
                read = tuple(part for part, _ in _read_part(load, computation, needed))
                known = parts.get(load.source)
                parts[load.source] = read if known is None else _union(known, read, load.source)
    for buffer, needed in parts.items():
        _check_inside(buffer, needed, last)
    return parts


def _unit(position: int, count: int) -> tuple[int, ...]:
    return tuple(int(i == position) for i in range(count + 1))


@lru_cache(maxsize=1024)
def _whole(buffer: Buffer, axes: int) -> tuple[Part, ...]:
    return tuple(Part(start=(0,) * (axes + 1), extent=size) for size in static_shape(buffer))


def _check_part(computation: Computation, parts: tuple[Part, ...], sizes: tuple[int, ...]) -> None:
    """A reduction is divided along every axis, and neighbouring panels need no point of it twice."""
    if _moves(parts) and not computation.writes_at_its_own_axes():
        raise IllegalRewrite(f"{computation.name} does not write along its own axes")
    if not computation.is_reduction:
        return
    for position, size in enumerate(sizes):
        along = [part for part in parts if part.start[position]]
        if not along:
            raise IllegalRewrite(f"every panel would repeat all of {computation.name}")
        step = along[0].start[position]
        own = tuple(step * c for c in _unit(position, len(sizes)))
        if len(along) != 1 or along[0].start[:-1] != own[:-1] or along[0].extent > step * size:
            raise IllegalRewrite(f"neighbouring panels would repeat points of {computation.name}")


def _check_inside(buffer: Buffer, parts: Sequence[Part], last: Sequence[int]) -> None:
    """No panel, of which the last begins at ``last``, computes what lies beyond a tensor, as its padding would ask for.

    Worked example, a convolution of three taps and stride 3 with one pad behind 100 rows of a product: there is no row
    100 to compute, nor are there operands of it.
    """
    for part, size in zip(parts, static_shape(buffer), strict=True):
        ends = [factor * base for factor, base in zip(part.start[:-1], last, strict=True)]
        low, high = (part.start[-1] + sum(choose(0, end) for end in ends) for choose in (min, max))
        if low < 0 or high + part.extent > size:
            raise IllegalRewrite(f"a panel would read {buffer.name} beyond its end")


def _read_part(load: TensorLoad, computation: Computation, needed: Sequence[Part]) -> list[tuple[Part, int]]:
    """The part of each dimension of the loaded tensor that the points ``needed`` of ``computation`` read.

    With it the smallest index, where the computation's own points count from 0.
    """
    axes = len(needed[0].start) - 1 if needed else 0
    spatial = (position for position, kind in enumerate(computation.kinds) if kind == "spatial")
    moving = {position: part for position, part in zip(spatial, needed, strict=False) if part.moves}
    found = []
    indices = _indices(load, computation.variables)
    for dimension, (used, form) in zip(_whole(load.source, axes), indices, strict=True):
        moves = any(position in used for position in moving)
        found.append(_read_dimension(form, computation, moving, axes) if moves else (dimension, 0))
    return found


@lru_cache(maxsize=1024)  # every size of a panel asks for the loads of a chain
def _indices(
    load: TensorLoad, variables: tuple[Var, ...]
) -> tuple[tuple[frozenset[int], tuple[list[int], int] | None], ...]:
    """Of each index the positions of the ``variables`` in it, and its `linear_form`."""
    return tuple(
        (frozenset(p for p, variable in enumerate(variables) if mentions(at, variable)), linear_form(at, variables))
        for at in load.indices
    )


def _read_dimension(
    form: tuple[list[int], int] | None, computation: Computation, moving: Mapping[int, Part], axes: int
) -> tuple[Part, int]:
    if form is None:
        raise IllegalRewrite(f"{computation.name} reads along a divided axis by an index that is not affine")
    start, low, high = [0] * (axes + 1), form[1], form[1]
    for position, (extent, factor) in enumerate(zip(computation.extents, form[0], strict=True)):
        part = moving.get(position)
        if part is not None:
            start = [a + factor * b for a, b in zip(start, part.start, strict=True)]
        span = factor * ((extent if part is None else part.extent) - 1)
        low, high = low + min(0, span), high + max(0, span)
    return Part(start=(*start[:-1], start[-1] + low), extent=high - low + 1), low


def _union(a: tuple[Part, ...], b: tuple[Part, ...], buffer: Buffer) -> tuple[Part, ...]:
    joined = []
    for left, right in zip(a, b, strict=True):
        if left.start[:-1] != right.start[:-1]:
            raise IllegalRewrite(f"two computations read different parts of {buffer.name} for one panel")
        first = min(left.start[-1], right.start[-1])
        end = max(left.start[-1] + left.extent, right.start[-1] + right.extent)
        joined.append(Part(start=(*left.start[:-1], first), extent=end - first))
    return tuple(joined)


# --- the computations of a panel ------------------------------------------------------------------------------------
class _Builder:
    """Makes the computations of one panel in their order, and collects the views and paddings that they need."""

    def __init__(self, operator: OperatorBody, parts: Mapping[Buffer, tuple[Part, ...]]) -> None:
        self.operator, self.parts = operator, parts
        self.views: list[PanelView] = []
        self.paddings: list[PanelPadding] = []
        self._inner: list[tuple[Buffer, Buffer]] = []

    def part_of(self, computation: Computation) -> Computation:
        """``computation`` over the points that a panel needs, counted from 0."""
        parts = self.parts[computation.target]
        sizes = {v: part.extent for v, part in zip(computation.spatial, parts, strict=True)}
        axes = zip(computation.variables, computation.extents, strict=True)
        part = dataclasses.replace(
            computation,
            extents=tuple(sizes.get(variable, extent) for variable, extent in axes),
            value=replace_loads(computation.value, lambda load: self._load(load, computation, parts)),
        )
        part = dataclasses.replace(part, target=self._target(computation, parts))
        self._keep_positions(part, parts, computation)
        return part

    def _target(self, computation: Computation, parts: tuple[Part, ...]) -> Buffer:
        if self.operator.is_output(computation.target):
            return self._view(computation.target, parts, written=True)
        made = new_buffer([part.extent for part in parts], dtype_of(computation.target), computation.target.name)
        self._inner.append((computation.target, made))
        return made

    def _view(self, buffer: Buffer, parts: tuple[Part, ...], *, written: bool = False) -> Buffer:
        for view in self.views:
            if view.original.same_as(buffer) and view.parts == parts:
                return view.buffer
        made = new_buffer([part.extent for part in parts], dtype_of(buffer), f"{buffer.name}_panel")
        self.views.append(PanelView(buffer=made, original=buffer, parts=parts, written=written))
        return made

    def _load(self, load: TensorLoad, computation: Computation, needed: tuple[Part, ...]) -> TensorLoad:
        """``load`` from the panel's buffer or view, by indices that count from where that begins."""
        read = _read_part(load, computation, needed)
        if not any(part.moves for part, _ in read):
            return load
        buffer = next((new for old, new in self._inner if old.same_as(load.source)), None)
        parts = tuple(part for part, _ in read) if buffer is None else self.parts[load.source]
        indices = [
            _less(read_at, part.start[-1] - own.start[-1] + low) if part.moves else read_at
            for read_at, part, (own, low) in zip(load.indices, parts, read, strict=True)
        ]
        return tirx.BufferLoad(self._view(load.source, parts) if buffer is None else buffer, indices)

    def _keep_positions(self, part: Computation, parts: tuple[Part, ...], whole: Computation) -> None:
        """Padding asks where an element is; of anything else that does there is no panel."""
        moving = [v for v, own in zip(whole.spatial, parts, strict=True) if own.moves]
        rest = replace_loads(whole.value, lambda load: tirx.const(0, dtype_of(load)))
        if not mentions(rest, *moving):
            return
        found = padding_of(whole) if is_padding(whole) else None
        padded = padding_of(part) if found is not None else None
        if found is None or padded is None:
            raise IllegalRewrite(f"{whole.name} depends on where in the tensor it is")
        inside, outside, bounds = padded[0], padded[1], found[2]
        if mentions(replace_loads(inside, lambda load: tirx.const(0, dtype_of(load))), *moving):
            raise IllegalRewrite(f"{whole.name} depends on where in the tensor it is")
        self.paddings.append(
            PanelPadding(computation=part, inside=inside, outside=outside, parts=parts, bounds=tuple(bounds))
        )


def _less(expr: Expr, offset: int) -> Expr:
    return expr if offset == 0 else expr - tirx.IntImm(dtype_of(expr), offset)
