"""Emits a CPU kernel from an rProgram: register tiles of accumulators under blocked, parallel loops (paper §4).

The shape of every kernel is that of the paper's Figure 6, with the CPU's layers:

    parallel for task in grid(L2 tiles):            # scale-out: spatial partitions only
      for block in L2 tile / L1 tile:
        for tile in L1 tile / L0 tile:
          acc[rows, vector] = init                  # L0: registers, all indices constant
          for k in reduction:                       # the whole reduction stays on one unit
            acc[r, v] = combine(acc[r, v], value)   # unrolled over rows, one SIMD register per (row, piece)
          out[...] = epilogue(acc)

Where a reduction goes over more rows of an input than the processor can load ahead, `chunks.py` divides it.

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
from tvm_ext.analysis.tensor_expr import TensorExpr
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.ir.build_ir import (
    SERIAL,
    allocate,
    in_dtype,
    index,
    loop,
    outer_kind,
    sequence,
    split_index,
    tile_count,
    tile_size,
)
from tvm_ext.records.choice import ConstantPack
from tvm_ext.records.rprogram import RProgram
from tvm_ext.support.arithmetic import ceil_div

from .chunks import chunked_task
from .epilogue import store_tile
from .pack_inputs import PackedInput, pack_on_entry
from .register_tile import TileLayout, lay_out
from .tile_sums import TileSums, choose_tile, update_template


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
) -> TileKernel:
    """The kernel of ``program`` for ``computation`` with its fused ``epilogue``.

    ``computation`` and ``expr`` are the anchor in canonical form: axis for variable, input for load. Inputs that
    ``expr`` marks constant are read by nothing else and may be replaced by a packed copy. ``params`` are the function's
    parameters. Raises IllegalRewrite where the program has no spatial axis to vectorise.
    """
    layout = lay_out(computation, expr, program, device)
    kind = outer_kind(program.prediction.busy_s, device)
    entry = [
        pack_on_entry(item, computation, layout.vector, layout.tile[layout.vector], kind)
        for item in layout.packed
        if not item.is_constant
    ]
    packs = [
        (item.buffer, item.constant_pack(params))
        for item in layout.packed
        if isinstance(item, PackedInput) and item.is_constant
    ]
    return TileKernel(statements=(*entry, _grid(layout, epilogue, kind)), packs=tuple(packs))


# --- loops ---------------------------------------------------------------------------------------------------------
def _grid(layout: TileLayout, epilogue: Sequence[Computation], kind: ForKind) -> Stmt:
    """One task per L2 tile."""
    update = update_template(layout)
    chunks = layout.chunks
    extents = [ceil_div(layout.counts[p], layout.blocks[p][0]) for p in layout.order]
    tasks = prod(extents)

    def task(number: Expr) -> Stmt:
        blocks = split_index(number, extents)
        starts = tuple(b * index(layout.blocks[p][0]) for b, p in zip(blocks, layout.order, strict=True))
        if chunks is not None:
            return chunked_task(layout, chunks, epilogue, update, starts)
        return _blocked(
            layout,
            starts,
            lambda tiles: choose_tile(layout, tiles, lambda at, sizes: whole_tile(layout, epilogue, update, at, sizes)),
        )

    return loop(tasks, kind, "task", task)


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


def whole_tile(
    layout: TileLayout, epilogue: Sequence[Computation], update: Expr, at: dict[int, Expr], sizes: dict[int, int]
) -> Stmt:
    """One register tile from the initial values of its sums to its stores."""
    sums = TileSums.of(layout, update, at, sizes)
    initial = in_dtype(layout.computation.init, layout.accumulator_dtype)
    return sequence(
        allocate(sums.accumulators),
        sums.set_all(lambda _row, _lane: initial),
        sums.reduce(),
        *store_tile(layout, epilogue, sums.accumulators, at, sizes),
    )
