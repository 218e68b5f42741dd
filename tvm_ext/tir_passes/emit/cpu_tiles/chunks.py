"""Reductions in chunks: for those that go over more rows of an input than the processor can load ahead.

A register tile of a 1x1 convolution of 1,024 channels reads a few pixels of each, from 64 pages in turn where channels
lie in blocks of 16; the hardware follows a few tens of streams at once. In chunks all tiles of a run along the
innermost loop go over the same few pages before the next ones come, and the chunk of the packed constant that they
share stays in L1. The sums of the run wait in memory meanwhile:

    for chunk in reduction / chunk:
      for tile in run:
        acc = sums[tile] if chunk > 0 else init
        for k in chunk: acc = combine(acc, value)
        sums[tile] = acc
    for tile in run: out[...] = epilogue(sums[tile])

Every sum is added up in the order in which it would be without chunks, so that results are the same to the last bit.
`cost/reduction_chunks.py` says when, and how long.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

from tvm_ext._tvm import Expr, Stmt, tirx
from tvm_ext.analysis.computations import Computation
from tvm_ext.cost.reduction_chunks import ReductionChunks
from tvm_ext.ir.build_ir import SERIAL, allocate, in_dtype, index, load, loop, new_buffer, sequence, tile_size
from tvm_ext.support.arithmetic import ceil_div

from .epilogue import store_tile
from .register_tile import TileLayout
from .tile_sums import TileSums, choose_tile


def chunked_task(
    layout: TileLayout,
    chunks: ReductionChunks,
    epilogue: Sequence[Computation],
    update: Expr,
    starts: tuple[Expr, ...],
) -> Stmt:
    """One L2 tile that begins at tile coordinates ``starts``: a run along the innermost loop after the other."""

    def within(done: tuple[Expr, ...]) -> Stmt:
        if len(done) == len(layout.order) - 1:
            return _run(layout, chunks, epilogue, update, done, starts[-1])
        p, base = layout.order[len(done)], starts[len(done)]
        name = f"{layout.computation.variables[p].name}_tile"
        return loop(
            tile_size(layout.counts[p], layout.blocks[p][0], base),
            SERIAL,
            name,
            lambda v: within((*done, base + v)),
        )

    return within(())


def _run(
    layout: TileLayout,
    chunks: ReductionChunks,
    epilogue: Sequence[Computation],
    update: Expr,
    outer: tuple[Expr, ...],
    base: Expr,
) -> Stmt:
    """The tiles along the innermost loop from ``base`` on, below the coordinates ``outer`` of the other loops."""
    last = layout.order[-1]
    name = f"{layout.computation.variables[last].name}_tile"
    steps = tile_size(layout.counts[last], layout.blocks[last][0], base)
    rows = prod(layout.tile[p] for p in layout.rows)
    width = ceil_div(layout.tile[layout.vector], layout.lanes) * layout.lanes
    sums = new_buffer((layout.blocks[last][0], rows, width), layout.accumulator_dtype, "sums", "local")
    initial = in_dtype(layout.computation.init, layout.accumulator_dtype)

    def part(chunk: Expr, tile: Expr, at: dict[int, Expr], sizes: dict[int, int]) -> Stmt:
        own = TileSums.of(layout, update, at, sizes)
        first = chunk * index(chunks.steps)
        count = tile_size(chunks.extent, chunks.steps, first)
        start = own.set_all(lambda row, lane: tirx.Select(chunk > 0, load(sums, [tile, row, lane]), initial))
        return sequence(allocate(own.accumulators), start, own.reduce(first, count), own.copy_to(sums, [tile]))

    def end(tile: Expr, at: dict[int, Expr], sizes: dict[int, int]) -> Stmt:
        own = TileSums.of(layout, update, at, sizes)
        fetch = own.set_all(lambda row, lane: load(sums, [tile, row, lane]))
        return sequence(allocate(own.accumulators), fetch, *store_tile(layout, epilogue, own.accumulators, at, sizes))

    def tiles(body: Callable[[Expr, dict[int, Expr], dict[int, int]], Stmt]) -> Stmt:
        return loop(
            steps, SERIAL, name, lambda v: choose_tile(layout, (*outer, base + v), lambda at, sizes: body(v, at, sizes))
        )

    return sequence(
        allocate(sums),
        loop(chunks.count, SERIAL, "chunk", lambda c: tiles(lambda v, at, sizes: part(c, v, at, sizes))),
        tiles(end),
    )
