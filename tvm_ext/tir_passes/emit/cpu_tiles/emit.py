"""Emits a CPU kernel from an rProgram: register tiles of accumulators under blocked, parallel loops (paper §4).

The shape of every kernel is that of the paper's Figure 6, with the CPU's layers:

    parallel for task in grid(L2 tiles):            # scale-out: spatial partitions only
      for block in L2 tile / L1 tile:
        for tile in L1 tile / L0 tile:
          acc[rows, vector] = init                  # L0: registers, all indices constant
          for k in reduction:                       # the whole reduction stays on one unit
            acc[r, v] = combine(acc[r, v], value)   # unrolled over rows, one SIMD register per (row, piece)
          out[...] = epilogue(acc)

No tile is guarded and none reads past a tensor: where a tile does not divide its axis, the last tile is emitted again
at its own smaller size (x = 83 in tiles of 14 is five tiles of 14 and one of 13). docs/architecture.md says why these
are plain loops and not schedule primitives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

from tvm_ext._tvm import Buffer, Expr, ForKind, Stmt, TensorLoad, structural_equal, tirx
from tvm_ext.analysis.computations import Computation, replace_loads, substitute
from tvm_ext.analysis.tensor_expr import Access, TensorExpr
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.ir.build_ir import (
    SERIAL,
    UNROLLED,
    allocate,
    combine,
    in_dtype,
    index,
    load,
    loop,
    nest,
    new_buffer,
    outer_kind,
    sequence,
    split_index,
    store,
    vector_kind,
)
from tvm_ext.records.choice import ConstantPack
from tvm_ext.records.rprogram import RProgram
from tvm_ext.support.arithmetic import ceil_div

from .epilogue import store_tile
from .pack_inputs import PackedInput, pack_on_entry
from .register_tile import TileLayout, flat, lay_out


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
    extents = [ceil_div(layout.counts[p], layout.blocks[p][0]) for p in layout.order]
    tasks = 1
    for extent in extents:
        tasks *= extent

    def task(number: Expr) -> Stmt:
        blocks = split_index(number, extents)
        starts = tuple(b * index(layout.blocks[p][0]) for b, p in zip(blocks, layout.order, strict=True))
        return _blocked(layout, starts, lambda tiles: choose_tile(layout, epilogue, update, tiles))

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
        steps = _steps(layout.counts[p], base, size, step)
        return loop(steps, SERIAL, name, lambda v: within(level, bases, (*done, base + v * index(step))))

    return within(0, starts, ())


def _steps(count: int, start: Expr, size: int, step: int) -> int | Expr:
    """Steps of ``step`` tiles in a block of ``size`` tiles that begins at ``start``, cut off after tile ``count``."""
    if count % size == 0:
        return ceil_div(size, step)
    left = tirx.min(index(size), index(count) - start)
    return left if step == 1 else tirx.floordiv(left + index(step - 1), index(step))


def choose_tile(layout: TileLayout, epilogue: Sequence[Computation], update: Expr, tiles: tuple[Expr, ...]) -> Stmt:
    """One L0 tile; where an axis has a smaller last tile, both sizes are emitted and chosen between."""
    at = dict(zip(layout.order, tiles, strict=True))

    def choose(remaining: tuple[int, ...], sizes: dict[int, int]) -> Stmt:
        if not remaining:
            return _register_tile(layout, epilogue, update, at, sizes)
        p, rest = remaining[0], remaining[1:]
        tail = layout.tail(p)
        if tail == 0 or layout.full[p] == 0:
            return choose(rest, {**sizes, p: tail or layout.tile[p]})
        return tirx.IfThenElse(
            at[p] < index(layout.full[p]),
            choose(rest, {**sizes, p: layout.tile[p]}),
            choose(rest, {**sizes, p: tail}),
        )

    return choose(layout.spatial, {})


# --- one register tile ---------------------------------------------------------------------------------------------
def _register_tile(
    layout: TileLayout, epilogue: Sequence[Computation], update: Expr, at: dict[int, Expr], sizes: dict[int, int]
) -> Stmt:
    computation = layout.computation
    rows = [sizes[p] for p in layout.rows]
    pieces = layout.pieces(sizes[layout.vector])
    count = 1
    for size in rows:
        count *= size
    # Rows start on whole registers, whatever the pieces: an aligned row is one aligned spill.
    width = ceil_div(sum(length for _, length in pieces), layout.lanes) * layout.lanes
    accumulators = new_buffer((count, width), layout.accumulator_dtype, "acc", "local")
    kind = vector_kind(update)

    def each(body: Callable[[tuple[Expr, ...], Expr, Expr], Stmt]) -> Stmt:
        def one(piece: tuple[int, int], offsets: tuple[Expr, ...]) -> Stmt:
            first, length = piece
            return loop(length, kind, "v", lambda v: body(offsets, flat(offsets, rows), index(first) + v))

        return _over_registers(layout, rows, pieces, one)

    def step(ks: tuple[Expr, ...]) -> Stmt:
        def one(offsets: tuple[Expr, ...], row: Expr, lane: Expr) -> Stmt:
            value = substitute(update, layout.element(at, offsets, lane, ks))
            return store(
                accumulators, combine(computation.combiner, load(accumulators, [row, lane]), value), [row, lane]
            )

        return each(one)

    initial = in_dtype(computation.init, layout.accumulator_dtype)
    reduction = nest(
        [computation.extents[p] for p in layout.reduction],
        SERIAL,
        [computation.variables[p].name for p in layout.reduction],
        step,
    )
    return sequence(
        allocate(accumulators),
        each(lambda _offsets, row, lane: store(accumulators, initial, [row, lane])),
        reduction,
        *store_tile(layout, epilogue, accumulators, at, sizes),
    )


def _over_registers(
    layout: TileLayout,
    rows: Sequence[int],
    pieces: Sequence[tuple[int, int]],
    body: Callable[[tuple[int, int], tuple[Expr, ...]], Stmt],
) -> Stmt:
    """``body`` for every SIMD register of a tile, those innermost that the smallest operand changes with.

    LLVM keeps in registers what the inner loops load and the outer ones reuse. Worked example, 2 filter blocks of one
    register by 14 columns: with the filters inside, 2 registers of weights stay while the columns stream; with the
    columns inside, 14 broadcasts stay, and with 28 accumulators no longer fit.
    """

    def loads(access: Access) -> int:
        used = [size for p, size in zip(layout.rows, rows, strict=True) if access.uses(layout.names[p])]
        return prod(used) * (len(pieces) if access.uses(layout.names[layout.vector]) else 1)

    inputs = [access for access in layout.expr.inputs if all(item is not None for item in access.indices)]
    kept = min(inputs, key=loads, default=None)
    axes = [*layout.rows, layout.vector]
    order = sorted(range(len(axes)), key=lambda i: kept is not None and kept.uses(layout.names[axes[i]]))

    def inner(position: int, offsets: dict[int, Expr], piece: tuple[int, int] | None) -> Stmt:
        if position == len(order):
            assert piece is not None
            return body(piece, tuple(offsets[i] for i in range(len(rows))))
        i = order[position]
        if i == len(rows):
            return sequence(*(inner(position + 1, offsets, each) for each in pieces))
        name = f"{layout.computation.variables[layout.rows[i]].name}_r"
        return loop(rows[i], UNROLLED, name, lambda v: inner(position + 1, {**offsets, i: v}, piece))

    return inner(0, {}, None)


def update_template(layout: TileLayout) -> Expr:
    """The anchor's update over its axis variables, with packed loads addressed through panel and lane."""

    def swap(item: TensorLoad) -> Expr:
        for packed in layout.packed:
            if structural_equal(item, packed.original):
                return load(packed.buffer, packed.indices(layout.computation.variables, layout.panel, layout.lane))
        return item

    return in_dtype(replace_loads(layout.computation.value, swap), layout.accumulator_dtype)
