"""Which rows of bytes the threads of a block copy together: a tile as bulk copies see it.

A schedule divides a tile among threads, loops and vector lanes as it likes. Here that is undone by counting: every
element that any thread copies, sorted by where it goes, falls into runs that are neighbours on both sides. If all runs
are equally long and lie at regular distances, one bulk copy a run does what all threads did. Worked example: 64 threads
copy 8 halves each from rows of 1024 into a tile of 16 x 32; the runs are 16 rows of 32 halves (64 bytes), 1024 apart in
global memory and 32 apart in the tile.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from tvm_ext._tvm import Analyzer, Expr, For, Var, nodes_in, tirx
from tvm_ext._tvm import Var as Variable
from tvm_ext.analysis.computations import substitute
from tvm_ext.errors import IllegalRewrite
from tvm_ext.ir.bulk_ir import BULK_BYTES
from tvm_ext.support.arrays import Array

from .copies import Copy, analyzer_for, without_casts
from .index_values import Known, index_values
from .loops import bytes_per_element, integer, scope_of, zero

MOST_ELEMENTS = 1 << 18
"""Larger tiles do not fit into any shared memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Level:
    """One level of regular distances: ``count`` steps of so many elements, in the tile and in global memory."""

    count: int
    to_step: int
    from_step: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BulkRows:
    """Rows of ``row_elements`` each. ``base`` is the place in global memory of the whole, of outer variables.

    Row number r has the digits of r in the bases ``levels`` (the last one fastest); it begins at ``to_first`` (or
    ``base`` + ``from_first``) plus each digit times its level's step.
    """

    row_elements: int
    levels: tuple[Level, ...]
    to_first: int
    from_first: int
    base: Expr

    @property
    def count(self) -> int:
        return prod(level.count for level in self.levels)


def bulk_rows(copy: Copy, threads: Mapping[Var, int], ranges: Mapping[Var, Expr]) -> BulkRows:
    """The rows that ``copy`` is, over all ``threads`` (thread index to extent) and the loops around it.

    Raises IllegalRewrite, with the reason, where it is not that regular, or not aligned to 16 bytes.
    """
    name = copy.buffer.name
    _check_kind(copy)
    inner = _extents(copy, threads)
    if prod(inner.values()) > MOST_ELEMENTS:
        raise IllegalRewrite(f"{name} is loaded by more than {MOST_ELEMENTS} copies of one element")
    analyzer = analyzer_for(copy.around, ranges)
    origin = {variable: zero(variable) for variable in inner}
    source = without_casts(copy.from_index)
    base = analyzer.simplify(substitute(source, origin.items()))
    relative = analyzer.simplify(source - base)
    target = analyzer.simplify(without_casts(copy.index))
    for expr, what in ((relative, f"the distances between its rows in {copy.source.name}"), (target, "its layout")):
        outer = _variables(expr, inner)
        if outer:
            raise IllegalRewrite(f"{name}: {what} depend on {', '.join(outer)}")
    points = _points(inner)
    chosen = _condition(copy, points, inner)
    to, frm = (index_values(expr, points)[chosen] for expr in (target, relative))
    rows = _runs(name, to, frm, bytes_per_element(str(copy.buffer.ty.dtype)))
    _check_alignment(copy, analyzer, base)
    return BulkRows(base=base, **rows)


def _check_kind(copy: Copy) -> None:
    name, source = copy.buffer.name, copy.source
    if not copy.is_pure:
        raise IllegalRewrite(f"{name} is computed on the way from {source.name}")
    if scope_of(source) not in ("global", ""):
        raise IllegalRewrite(f"{name} is copied from {source.name} in {scope_of(source)} memory")
    if str(copy.buffer.ty.dtype) != str(source.ty.dtype):
        raise IllegalRewrite(f"{name} holds {copy.buffer.ty.dtype}, {source.name} {source.ty.dtype}")
    if copy.predicate is not None:
        raise IllegalRewrite(f"{name} is loaded under a predicate, which a bulk copy does not have")


def _extents(copy: Copy, threads: Mapping[Var, int]) -> dict[Var, int]:
    """Everything that numbers the copies of a block: thread indices and the loops around."""
    found = dict(threads)
    for loop in copy.around:
        if isinstance(loop, tirx.IfThenElse):
            if loop.else_case is not None:
                raise IllegalRewrite(f"{copy.buffer.name} is loaded in one of two ways")
            continue
        extent = integer(loop.extent) if isinstance(loop, For) and integer(loop.min) == 0 else None
        if extent is None:
            raise IllegalRewrite(f"{copy.buffer.name} is loaded in a loop of unknown length")
        found[loop.loop_var] = extent
    return found


def _variables(expr: Expr, known: Mapping[Var, int]) -> list[str]:
    """Names of the variables in ``expr`` that are not ``known``."""
    found = nodes_in(expr, Variable, "pre")
    return list(dict.fromkeys(str(v.name) for v in found if not any(v.same_as(other) for other in known)))


def _points(extents: Mapping[Var, int]) -> Known:
    """Every combination of the variables' values: one flat array for each."""
    places = np.indices(tuple(extents.values()), dtype=np.int64).reshape(len(extents), -1)
    return list(zip(extents, places, strict=True))


def _condition(copy: Copy, points: Known, inner: Mapping[Var, int]) -> Array:
    """Which points copy at all: where the conditions around the copy hold."""
    chosen = np.ones(points[0][1].shape, bool)
    for around in copy.around:
        if isinstance(around, tirx.IfThenElse):
            outer = _variables(around.condition, inner)
            if outer:
                raise IllegalRewrite(f"whether {copy.buffer.name} is loaded depends on {', '.join(outer)}")
            chosen &= index_values(around.condition, points).astype(bool)
    return chosen


def _runs(name: str, to: Array, frm: Array, element_bytes: int) -> dict[str, Any]:
    """The runs of elements that are neighbours on both sides, by their levels of distances."""
    pairs = np.unique(np.stack([to, frm], axis=1), axis=0)
    if not len(pairs) or len(np.unique(pairs[:, 0])) != len(pairs):
        raise IllegalRewrite(f"{name} is loaded twice, or not at all")
    breaks = np.flatnonzero((np.diff(pairs, axis=0) != 1).any(axis=1)) + 1
    bounds = np.concatenate([[0], breaks, [len(pairs)]])
    lengths = np.diff(bounds)
    length = int(lengths[0])
    if (lengths != length).any():
        problem = f"{name} is loaded in runs of {int(lengths.min())} to {int(lengths.max())} elements"
        raise IllegalRewrite(f"{problem} (a swizzle, or an edge)")
    size = length * element_bytes
    if size % BULK_BYTES:
        raise IllegalRewrite(f"{name} is loaded in runs of {size} bytes; a bulk copy is of a multiple of {BULK_BYTES}")
    starts = pairs[bounds[:-1]]
    levels = _levels(name, starts)
    steps = [(int(starts[0, 0]), int(starts[0, 1])), *((level.to_step, level.from_step) for level in levels)]
    for position, (to_step, from_step) in enumerate(steps):
        for step, where in ((to_step, "in shared memory"), (from_step, "in global memory")):
            if step * element_bytes % BULK_BYTES:
                what = "its first row begins" if not position else "its rows are"
                problem = f"{name}: {what} {step * element_bytes} bytes apart {where}"
                raise IllegalRewrite(f"{problem}, which is no multiple of {BULK_BYTES}")
    return {"row_elements": length, "levels": levels, "to_first": steps[0][0], "from_first": steps[0][1]}


def _levels(name: str, starts: Array) -> tuple[Level, ...]:
    """``starts`` (rows, 2) as nested regular distances, outermost first.

    Worked example: 0, 8, 100, 108, 200, 208 is 3 steps of 100 around 2 steps of 8.
    """
    if len(starts) == 1:
        return ()
    step = starts[1] - starts[0]
    irregular = (np.diff(starts, axis=0) != step).any(axis=1)
    count = int(np.argmax(irregular)) + 1 if irregular.any() else len(starts)
    if len(starts) % count:
        raise IllegalRewrite(f"{name}: its rows lie at irregular distances (a swizzle, or an edge)")
    blocks = starts.reshape(-1, count, 2)
    if ((blocks - blocks[:, :1]) != (blocks[0] - blocks[0, :1])).any():
        raise IllegalRewrite(f"{name}: its rows lie at irregular distances (a swizzle, or an edge)")
    level = Level(count=count, to_step=int(step[0]), from_step=int(step[1]))
    return (*_levels(name, blocks[:, 0]), level)


def _check_alignment(copy: Copy, analyzer: Analyzer, base: Expr) -> None:
    elements = BULK_BYTES // bytes_per_element(str(copy.buffer.ty.dtype))
    known = analyzer.modular_set(base)
    if int(known.coeff) % elements or int(known.base) % elements:
        raise IllegalRewrite(
            f"{copy.buffer.name}: its place in {copy.source.name}, {base}, may be no multiple of 16 bytes"
        )
