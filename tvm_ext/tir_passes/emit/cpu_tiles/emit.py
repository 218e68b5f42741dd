"""Emits a CPU kernel from an rProgram: register tiles of accumulators under blocked, parallel loops (paper §4).

The shape of every kernel is that of the paper's Figure 6, with the CPU's layers:

    parallel for task in grid(L2 tiles):            # scale-out: spatial partitions only
      for block in L2 tile / L1 tile:
        for tile in L1 tile / L0 tile:
          acc[rows, vector] = init                  # L0: registers, all indices constant
          for k in reduction:                       # the whole reduction stays on one unit
            acc[r, v] = combine(acc[r, v], value)   # unrolled over rows, one SIMD register per (row, piece)
          out[...] = epilogue(acc)

Where a reduction goes over more than the processor loads ahead or keeps, `_chunked_task` divides it.

No tile is guarded and none reads past a tensor: where a tile does not divide its axis, the last tile is emitted again
at its own smaller size (x = 83 in tiles of 14 is five tiles of 14 and one of 13). docs/architecture.md says why these
are plain loops and not schedule primitives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

from tvm_ext._tvm import Buffer, Expr, ForKind, Stmt
from tvm_ext.analysis.computations import Computation
from tvm_ext.analysis.live_taps import LiveTaps
from tvm_ext.analysis.tensor_expr import TensorExpr
from tvm_ext.cost.reduction_chunks import ReductionChunks
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.ir.build_ir import (
    SERIAL,
    allocate,
    flat,
    if_all,
    index,
    loop,
    new_buffer,
    outer_kind,
    parallel_cut,
    sequence,
    tile_count,
    tile_size,
)
from tvm_ext.records.choice import ConstantPack
from tvm_ext.records.rprogram import RProgram
from tvm_ext.support.arithmetic import ceil_div

from .layout import TileLayout, lay_out
from .matrix_tile import MatrixTile, configured
from .packing import PackedInput
from .paired_tile import PairedTile
from .register_tile import RegisterTile


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TileKernel:
    """What the emitter made: statements to run in order, and the parameters to repack at compile time."""

    statements: tuple[Stmt, ...]
    packs: tuple[tuple[Buffer, ConstantPack], ...]  # (the packed buffer that replaces the parameter, how)


def emit_tile_kernel(
    computation: Computation,
    expr: TensorExpr,
    epilogue: Sequence[Computation],
    program: RProgram,
    device: DeviceSpec,
    params: Sequence[Buffer],
    live: Sequence[LiveTaps] = (),
) -> TileKernel:
    """The kernel of ``program`` for ``computation`` with its fused ``epilogue``.

    ``computation`` and ``expr`` are the anchor in canonical form: axis for variable, input for load. Inputs that
    ``expr`` marks constant are read by nothing else and may be replaced by a packed copy. ``params`` are the function's
    parameters. Of ``live`` taps, loops go over those that meet elements. Raises IllegalRewrite where the program has
    no spatial axis to vectorise.
    """
    layout = lay_out(computation, expr, epilogue, program, device, live)
    kind = outer_kind(program.prediction.busy_s, device)
    entry = [item.copy(computation, kind) for item in layout.packed if not item.is_constant]
    packs = [
        (item.buffer, item.constant_pack(params))
        for item in layout.packed
        if isinstance(item, PackedInput) and item.is_constant
    ]
    return TileKernel(statements=(*entry, _grid(layout, kind)), packs=tuple(packs))


# --- loops ---------------------------------------------------------------------------------------------------------
def _grid(layout: TileLayout, kind: ForKind) -> Stmt:
    """One task per L2 tile."""

    def task(blocks: tuple[Expr, ...]) -> Stmt:
        starts = tuple(b * index(layout.blocks[p][0]) for b, p in zip(blocks, layout.order, strict=True))
        if layout.chunks is not None:
            body = _chunked_task(layout, layout.chunks, starts)
        else:
            body = _blocked(layout, starts, lambda tiles: choose_tile(layout, tiles, lambda tile: tile.whole()))
        return body if layout.matrix is None else configured(layout, body)

    extents = [ceil_div(layout.counts[p], layout.blocks[p][0]) for p in layout.order]
    return parallel_cut(extents, kind, "task", task)


def _blocked(layout: TileLayout, starts: tuple[Expr, ...], body: Callable[[tuple[Expr, ...]], Stmt]) -> Stmt:
    """The loops inside one L2 tile: over its L1 tiles, and within each of them over its L0 tiles."""

    def within(level: int, bases: tuple[Expr, ...], done: tuple[Expr, ...]) -> Stmt:
        if len(done) == len(layout.order):
            return body(done) if level == 1 else within(1, done, ())
        p, base = layout.order[len(done)], bases[len(done)]
        outer, inner = layout.blocks[p]
        step, size = (inner, outer) if level == 0 else (1, inner)
        name = f"{layout.computation.variables[p].name}_{'block' if level == 0 else 'tile'}"
        steps = tile_count(tile_size(layout.counts[p], size, base), step)
        return loop(steps, SERIAL, name, lambda v: within(level, bases, (*done, base + v * index(step))))

    return within(0, starts, ())


# --- chunks of a reduction -------------------------------------------------------------------------------------------
def _chunked_task(layout: TileLayout, chunks: ReductionChunks, starts: tuple[Expr, ...]) -> Stmt:
    """One L2 tile that begins at tile coordinates ``starts``, a run of register tiles: for a reduction over more rows
    of an input than the processor can load ahead, or over a longer panel of weights than a core keeps.

    A register tile of a 1x1 convolution of 1,024 channels reads a few pixels of each, from 64 pages in turn where
    channels lie in blocks of 16; the hardware follows a few tens of streams at once. In chunks all tiles of a run
    go over the same few pages before the next ones come, and the chunk of the packed constant that
    they share stays in L1. The sums of the run wait in memory meanwhile:

        for chunk in reduction / chunk:
          for tile in run:
            acc = sums[tile] if chunk > 0 else init
            for k in chunk: acc = combine(acc, value)
            sums[tile] = acc
        for tile in run: out[...] = epilogue(sums[tile])

    Every sum is added up in the order in which it would be without chunks, so that results are the same to the last
    bit. `cost/reduction_chunks.py` says when, and how long.
    """
    longest = [layout.blocks[p][0] for p in layout.order]

    def run(body: Callable[[Expr, RegisterTile], Stmt]) -> Stmt:
        def within(done: tuple[Expr, ...]) -> Stmt:
            if len(done) == len(layout.order):
                tiles = tuple(start + at for start, at in zip(starts, done, strict=True))
                return choose_tile(layout, tiles, lambda tile: body(flat(done, longest), tile))
            p, start = layout.order[len(done)], starts[len(done)]
            steps = tile_size(layout.counts[p], layout.blocks[p][0], start)
            return loop(steps, SERIAL, f"{layout.computation.variables[p].name}_tile", lambda v: within((*done, v)))

        return within(())

    return _chunked_run(layout, chunks, prod(longest), run)


def _chunked_run(
    layout: TileLayout,
    chunks: ReductionChunks,
    longest: int,
    run: Callable[[Callable[[Expr, RegisterTile], Stmt]], Stmt],
) -> Stmt:
    """``run(body)``, up to ``longest`` tiles that follow each other, once for each chunk, and once for the stores."""
    rows = prod(layout.tile[p] for p in layout.rows)
    width = ceil_div(layout.tile[layout.vector], layout.lanes) * layout.lanes
    sums = new_buffer((longest, rows, width), layout.accumulator_dtype, "sums", "local")

    def chunk(number: Expr) -> Stmt:
        first = number * index(chunks.steps)
        count = tile_size(chunks.extent, chunks.steps, first)
        return run(lambda tile, own: own.part(sums, tile, number, first, count))

    stores = run(lambda tile, own: own.end(sums, tile))
    return sequence(allocate(sums), loop(chunks.count, SERIAL, "chunk", chunk), stores)


# --- register tiles ---------------------------------------------------------------------------------------------------
def choose_tile(layout: TileLayout, tiles: tuple[Expr, ...], body: Callable[[RegisterTile], Stmt]) -> Stmt:
    """``body`` of the L0 tile at ``tiles``; where an axis has a smaller last tile, of both, chosen between."""
    at = dict(zip(layout.order, tiles, strict=True))
    kind = (
        MatrixTile
        if layout.matrix
        else PairedTile
        if layout.dot and layout.dot.product.rows is not None
        else RegisterTile
    )

    def choose(remaining: tuple[int, ...], sizes: dict[int, int]) -> Stmt:
        if not remaining:
            return body(kind.of(layout, at, sizes))
        (p, *_), rest = remaining, remaining[1:]
        tail = layout.tail(p)
        if tail == 0 or layout.full[p] == 0:
            return choose(rest, {**sizes, p: tail or layout.tile[p]})
        whole, last = (choose(rest, {**sizes, p: size}) for size in (layout.tile[p], tail))
        return if_all([at[p] < index(layout.full[p])], whole, last)

    return choose(layout.spatial, {})
