"""The end of a register tile: accumulators pass through the fused epilogue and are stored (paper Figure 6)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..._tvm import tirx
from ...stages import Stage, dtype_of, reads, replace_loads, substitute
from ..build_ir import (
    SERIAL,
    UNROLLED,
    Expr,
    Stmt,
    allocate,
    as_index,
    index,
    load,
    loop,
    nest,
    new_buffer,
    sequence,
    store,
    vector_kind,
)
from .register_tile import TileLayout, flat, vectors

EachRegister = Callable[[Callable[[tuple[Expr, ...], Expr, Expr], Stmt]], Stmt]
"""Runs ``body(row offsets, row number, lane)`` for every SIMD register of a tile."""


def reads_only_its_own_element(consumer: Stage, anchor: Stage) -> bool:
    """Whether an epilogue stage reads the anchor's result exactly at the element that it writes itself."""
    if consumer.is_reduction or not consumer.writes_at_its_own_axes() or len(consumer.spatial) != len(anchor.indices):
        return False
    loads = [item for item in consumer.loads() if item.source.same_as(anchor.target)]
    return reads(consumer.value, anchor.target) and all(
        all(i.same_as(v) for i, v in zip(item.indices, consumer.spatial, strict=True)) for item in loads
    )


def store_tile(
    layout: TileLayout,
    epilogue: Sequence[Stage],
    accumulators: Any,
    at: dict[int, Expr],
    sizes: dict[int, int],
    each: EachRegister,
) -> list[Stmt]:
    """Statements that store the tile of ``sizes`` at tile coordinates ``at``, through ``epilogue``."""
    if sizes[layout.vector] == 1 or layout.expr.output.stride(layout.names[layout.vector]) == 1:
        return [_store_along_vector(layout, epilogue, accumulators, at, sizes)]
    return _store_transposed(layout, epilogue, accumulators, at, sizes, each)


def _write(layout: TileLayout, epilogue: Sequence[Stage], element: Expr, table: list[tuple[Any, Expr]]) -> Stmt:
    """Store one accumulated element, or what each epilogue stage makes of it."""
    stage = layout.stage
    own = dtype_of(stage.target)
    if layout.accumulator_dtype != own:
        element = tirx.Cast(own, element)
    position = [substitute(i, table) for i in stage.indices]
    if not epilogue:
        return store(stage.target, element, position)
    writes = []
    for consumer in epilogue:
        value = replace_loads(consumer.value, lambda item: element if item.source.same_as(stage.target) else item)
        moved = [(v, as_index(x, v)) for v, x in zip(consumer.spatial, position, strict=True)]
        indices = [substitute(i, moved) for i in consumer.indices]
        writes.append(store(consumer.target, substitute(value, moved), indices))
    return sequence(*writes)


def _store_along_vector(
    layout: TileLayout, epilogue: Sequence[Stage], accumulators: Any, at: dict[int, Expr], sizes: dict[int, int]
) -> Stmt:
    """The output is contiguous along the vector axis: one vector store per accumulator register."""
    rows = [sizes[p] for p in layout.rows]
    kind = vector_kind(*(consumer.value for consumer in epilogue))

    def one(offsets: tuple[Expr, ...], lane: Expr) -> Stmt:
        element = load(accumulators, [flat(offsets, rows), lane])
        return _write(layout, epilogue, element, layout.element(at, offsets, lane))

    def row(offsets: tuple[Expr, ...]) -> Stmt:
        return _vector_loops(kind, vectors(sizes[layout.vector], layout.lanes), lambda lane: one(offsets, lane))

    return nest(rows, UNROLLED, _row_names(layout), row)


def _store_transposed(
    layout: TileLayout,
    epilogue: Sequence[Stage],
    accumulators: Any,
    at: dict[int, Expr],
    sizes: dict[int, int],
    each: EachRegister,
) -> list[Stmt]:
    """The output is contiguous along another axis: spill the tile once, then write it along that axis.

    The copy keeps every index of the accumulators constant, without which LLVM would hold them in memory.
    """
    rows = [sizes[p] for p in layout.rows]
    shape = [int(size) for size in accumulators.ty.shape]
    spill = new_buffer(shape, layout.accumulator_dtype, "spill", "local")
    strides = [layout.expr.output.stride(layout.names[p]) for p in layout.rows]
    along = next((i for i, stride in enumerate(strides) if stride == 1 and rows[i] > 1), None)
    length = 1 if along is None else rows[along]
    kind = vector_kind(*(consumer.value for consumer in epilogue))

    def one(lane: Expr, outer: tuple[Expr, ...], v: Expr) -> Stmt:
        offsets = outer if along is None else (*outer[:along], v, *outer[along + 1 :])
        element = load(spill, [flat(offsets, rows), lane])
        return _write(layout, epilogue, element, layout.element(at, offsets, lane))

    def write(lane: Expr) -> Stmt:
        extents = [1 if i == along else size for i, size in enumerate(rows)]
        pieces = vectors(length, layout.lanes)
        return nest(
            extents,
            SERIAL,
            _row_names(layout),
            lambda outer: _vector_loops(kind, pieces, lambda v: one(lane, outer, v)),
        )

    copy = each(lambda _offsets, row, lane: store(spill, load(accumulators, [row, lane]), [row, lane]))
    return [allocate(spill), copy, loop(sizes[layout.vector], SERIAL, "lane", write)]


def _row_names(layout: TileLayout) -> list[str]:
    return [f"{layout.stage.variables[p].name}_r" for p in layout.rows]


def _vector_loops(kind: Any, pieces: Sequence[tuple[int, int]], body: Callable[[Expr], Stmt]) -> Stmt:
    """``body(position)`` in one loop over lanes per (first, length) of ``pieces``."""

    def piece(first: int, length: int) -> Stmt:
        return loop(length, kind, "v", lambda v: body(index(first) + v))

    return sequence(*(piece(first, length) for first, length in pieces))
