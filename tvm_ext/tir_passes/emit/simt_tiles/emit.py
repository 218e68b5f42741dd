"""Emits a GPU kernel from an rProgram: global memory to shared memory to registers (paper §4, Figures 6 and 7).

    blockIdx.x over the spatial L1 tiles:
      threadIdx.x over the L0 tiles of one L1 tile (neighbouring lanes along the output's contiguous axis):
        acc[...] = init                            # registers
        for step in the reduction, by L1's step:
          copy each input's data tile to shared memory, all threads together
          for point in the step:
            load the operands of one point into registers, by vectors
            acc[i, j] = combine(acc[i, j], value)  # unrolled by the device's compiler
        out[...] = epilogue(acc)                   # by vectors

Barriers are stock TVM's (ThreadSync). Reductions end at their own size: a last step that is smaller is emitted again
at its size, so that no product is padded. Spatial tiles that reach beyond the output are computed and not stored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from tvm_ext._tvm import Buffer, Expr, Stmt, TensorLoad, Var, structural_equal, tirx
from tvm_ext.analysis.computations import Computation, dtype_of, mentions, replace_loads, static_shape, substitute
from tvm_ext.analysis.tensor_expr import TensorExpr
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.ir.build_ir import (
    SERIAL,
    VECTORIZED,
    allocate,
    as_index,
    combine,
    flat,
    in_dtype,
    index,
    load,
    loop,
    sequence,
    split_index,
    store,
)
from tvm_ext.ir.simt_ir import SimtKernel, gpu_buffer, launch, unrolled, unrolled_by_tvm
from tvm_ext.records.rprogram import RProgram
from tvm_ext.support.arithmetic import ceil_div

from .banks import with_buffer
from .box import produce
from .copy import emit_copy, is_vector
from .limits import in_shared_memory, partial_sums, planned_registers
from .operands import Operand, plan_operands, tail_shape
from .store import join_groups, over_registers, store_tile
from .tiling import SimtTiling, deepened, reduction_split, tile_threads

UNROLLED_OPERATIONS = 1024
"""Loops over the points of a step are unrolled while their body stays below so many accumulations."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Body:
    """What the statements of one thread have in common."""

    tiling: SimtTiling
    operands: tuple[Operand, ...]
    accumulators: Buffer
    thread: Expr
    group: Expr
    at: Mapping[int, Expr]
    block: Mapping[int, Expr]  # where the threadblock's tile starts along each spatial axis


def emit_simt_tile(
    computation: Computation,
    expr: TensorExpr,
    prologue: Sequence[Computation],
    epilogue: Sequence[Computation],
    program: RProgram,
    device: DeviceSpec,
    params: Sequence[Buffer],
) -> SimtKernel:
    """The kernel of ``program`` for the reduction ``computation`` on a GPU.

    ``computation`` and ``expr`` are the anchor in canonical form: axis for variable, input for load. ``prologue`` are
    injective computations that only the anchor reads, computed while their data tile is copied; ``epilogue``
    computations read the anchor's result at their own element. ``params`` are the function's parameters. Half precision
    is accumulated in float32. Raises IllegalRewrite, with the numbers, where the program exceeds the device's threads,
    shared memory or registers.
    """
    tiling = tile_threads(computation, expr, program, device)
    split, split_axis = reduction_split(tiling, device)
    tiling = deepened(replace(tiling, split=split, split_axis=split_axis), expr, device)
    return emit_planned(*plan_operands(tiling, prologue, device), prologue, epilogue, program, device)


def emit_planned(
    tiling: SimtTiling,
    operands: tuple[Operand, ...],
    prologue: Sequence[Computation],
    epilogue: Sequence[Computation],
    program: RProgram,
    device: DeviceSpec,
) -> SimtKernel:
    """The kernel of ``operands``, as they were planned for ``tiling``; raises as `emit_simt_tile` does."""
    registers = planned_registers(tiling, operands, device)
    tiling, operands, scope, shared_bytes = in_shared_memory(tiling, operands, prologue, device)
    partial = partial_sums(tiling, scope)
    block_count = prod(tiling.grid)

    def body(block: Expr, thread: Expr) -> Stmt:
        return _thread_body(tiling, operands, epilogue, partial, block, thread)

    kernel = launch(block_count, tiling.thread_count, body)
    return SimtKernel(
        statements=(unrolled_by_tvm(kernel) if device.kind == "rocm" else kernel,),
        threads=tiling.thread_count,
        blocks=block_count,
        shared_bytes=shared_bytes,
        register_count=registers,
        notes=_notes(tiling, operands, program),
    )


def _notes(tiling: SimtTiling, operands: Sequence[Operand], program: RProgram) -> tuple[str, ...]:
    notes = [f"{tiling.thread_count} threads, tile {program.tile('L1')} over {program.tile('L0')}"]
    direct = [operand.load.source.name for operand in operands if operand.box is None]
    if direct:
        notes.append(f"{', '.join(direct)} read from global memory (used once)")
    if tiling.split > 1:
        notes.append(f"reduction divided among {tiling.split} groups of threads")
    return tuple(notes)


# --- one thread ----------------------------------------------------------------------------------------------------
def _thread_body(
    tiling: SimtTiling,
    operands: tuple[Operand, ...],
    epilogue: Sequence[Computation],
    partial: Buffer | None,
    block: Expr,
    thread: Expr,
) -> Stmt:
    accumulators = gpu_buffer((tiling.accumulators,), tiling.accumulator_dtype, "acc", "local")
    tile = tiling.tile
    blocks = split_index(block, tiling.grid)
    group, at = tiling.coordinates(thread)
    body = _Body(
        tiling=tiling,
        operands=operands,
        accumulators=accumulators,
        thread=thread,
        group=group,
        at=at,
        block={p: b * index(tile[p]) for p, b in zip(tiling.spatial, blocks, strict=True)},
    )
    initial = in_dtype(tiling.computation.init, tiling.accumulator_dtype)
    finish = store_tile(tiling, epilogue, accumulators, body.block, at)
    joined: list[Stmt] = []
    if partial is not None:
        own = tirx.floormod(thread, index(tiling.group_threads))
        joined = join_groups(tiling, accumulators, partial, group, own)
        finish = tirx.IfThenElse(group < index(1), finish, None)
    shared = [operand.box.buffer for operand in operands if operand.box is not None]
    return sequence(
        *(allocate(buffer) for buffer in (*shared, *([] if partial is None else [partial]))),
        *(allocate(buffer) for buffer in (accumulators, *(operand.fragment for operand in operands))),
        unrolled(tiling.accumulators, "i", lambda i: store(accumulators, initial, [i])),
        *_copies(body, [o for o in operands if not o.stepped(tiling)], body.block, tile),
        _steps(body),
        *joined,
        finish,
    )


def _copies(
    body: _Body, operands: Sequence[Operand], starts: Mapping[int, Expr], tile: Mapping[int, int]
) -> list[Stmt]:
    found = []
    for operand in operands:
        if operand.box is not None:
            shape = tail_shape(operand, body.tiling, tile)
            full = {**{p: index(0) for p in body.tiling.reduction}, **starts}
            found.append(emit_copy(operand.box, shape, body.tiling, body.thread, full, tile))
    return found


def _steps(body: _Body) -> Stmt:
    """The steps of the reduction; along each axis the whole ones in a loop, then the rest at its own size."""
    tiling = body.tiling

    def step_of(starts: Mapping[int, Expr], tile: Mapping[int, int]) -> Stmt:
        own = body if tile == tiling.tile else _with_own_memory(body)
        stepped = [operand for operand in own.operands if operand.stepped(tiling)]
        rest = [] if own is body else [allocate(o.box.buffer) for o in stepped if o.box is not None]
        return sequence(*rest, *_copies(own, stepped, starts, tile), _points(own, starts, tile))

    def along(axes: Sequence[int], starts: Mapping[int, Expr], tile: Mapping[int, int]) -> Stmt:
        if not axes:
            return step_of(starts, tile)
        p, rest = axes[0], axes[1:]
        whole, left = divmod(tiling.computation.extents[p], tiling.step[p])
        step = tiling.step[p]
        parts = []
        name = f"{tiling.computation.variables[p].name}_step"
        parts.append(loop(whole, SERIAL, name, lambda v: along(rest, {**starts, p: v * index(step)}, tile)))
        if left:
            parts.append(along(rest, {**starts, p: index(whole * step)}, {**tile, p: left}))
        return sequence(*parts)

    return along(tiling.reduction, body.block, tiling.tile)


def _with_own_memory(body: _Body) -> _Body:
    """``body`` for a last, smaller step, whose tiles have names of their own.

    A buffer that is also loaded behind the loop over the steps could not be loaded ahead in it. Stock StorageRewrite
    lets both lie in the same memory.
    """
    own = []
    for operand in body.operands:
        if operand.stepped(body.tiling) and operand.box is not None:
            old = operand.box.buffer
            buffer = gpu_buffer(static_shape(old), dtype_of(old), f"{old.name}_rest", str(old.ty.storage_scope))
            operand = replace(operand, box=with_buffer(operand.box, buffer))
        own.append(operand)
    return replace(body, operands=tuple(own))


def _points(body: _Body, starts: Mapping[int, Expr], tile: Mapping[int, int]) -> Stmt:
    """The points of one step, innermost loops unrolled; thread groups share the split axis in turn."""
    tiling = body.tiling
    budget = UNROLLED_OPERATIONS // max(1, tiling.accumulators)
    unroll: set[int] = set()
    for p in reversed(tiling.reduction):
        budget //= max(1, tile[p])
        if budget < 1:
            break
        unroll.add(p)

    def along(position: int, local: Mapping[int, Expr]) -> Stmt:
        if position == len(tiling.reduction):
            return _point(body, starts, tile, local)
        p = tiling.reduction[position]
        shared = tiling.split if p == tiling.split_axis else 1
        count = ceil_div(tile[p], shared)

        def one(v: Expr) -> Stmt:
            at = v * index(shared) + body.group if shared > 1 else v
            inner = along(position + 1, {**local, p: at})
            return inner if tile[p] % shared == 0 else tirx.IfThenElse(at < index(tile[p]), inner, None)

        name = tiling.computation.variables[p].name
        return unrolled(count, name, one) if p in unroll else loop(count, SERIAL, name, one)

    return along(0, {})


def _point(body: _Body, starts: Mapping[int, Expr], tile: Mapping[int, int], local: Mapping[int, Expr]) -> Stmt:
    """Loads the operands of one point of the reduction and accumulates."""
    tiling, computation = body.tiling, body.tiling.computation
    fragments = [_load_fragment(body, operand, starts, tile, local) for operand in body.operands]
    axes = [p for p in tiling.order if tiling.register[p] > 1]
    depends = _depends_on_axes(computation)

    def accumulate(numbers: Mapping[int, Expr]) -> Stmt:
        table: list[tuple[Var, Expr]] = []
        if depends:
            own = {p: tiling.register_element(p, body.at[p], numbers.get(p, 0)) for p in tiling.spatial}
            place = {p: body.block[p] + x for p, x in own.items()}
            place |= {p: starts[p] + local[p] for p in tiling.reduction}
            table = [(computation.variables[p], as_index(x, computation.variables[p])) for p, x in place.items()]
        value = in_dtype(_with_fragments(computation.value, body, numbers), tiling.accumulator_dtype)
        at = [flat([numbers[p] for p in axes], [tiling.register[p] for p in axes])]
        old = load(body.accumulators, at)
        return store(body.accumulators, combine(computation.combiner, old, substitute(value, table)), at)

    return sequence(*fragments, over_registers(tiling, axes, accumulate))


def _depends_on_axes(computation: Computation) -> bool:
    """Whether the update mentions its axes outside of the loads."""
    return mentions(
        replace_loads(computation.value, lambda item: tirx.const(0, dtype_of(item))), *computation.variables
    )


def _with_fragments(value: Expr, body: _Body, numbers: Mapping[int, Expr]) -> Expr:
    """The update with each load replaced by the register that holds it."""
    tiling = body.tiling

    def swap(item: TensorLoad) -> Expr:
        for operand in body.operands:
            if structural_equal(item, operand.load):
                at = flat([numbers[p] for p in operand.axes], [tiling.register[p] for p in operand.axes])
                return load(operand.fragment, [at])
        return item

    return replace_loads(value, swap)


# --- operands ------------------------------------------------------------------------------------------------------
def _load_fragment(
    body: _Body,
    operand: Operand,
    starts: Mapping[int, Expr],
    tile: Mapping[int, int],
    local: Mapping[int, Expr],
) -> Stmt:
    """Loads what one thread needs of ``operand`` at one point of the reduction."""
    tiling = body.tiling
    axes = operand.axes
    vector = axes[-1] if axes else None
    width = tiling.piece[vector] if vector is not None else 1

    def value(numbers: Mapping[int, Expr], piece: Expr, e: Expr) -> Expr:
        within = {p: tiling.register_element(p, body.at[p], numbers.get(p, 0)) for p in tiling.spatial}
        if vector is not None:
            within[vector] = tiling.within(vector, body.at[vector], piece, e)
        if operand.box is not None:
            return load(operand.box.buffer, [operand.box.read_address({**within, **local}, tile)])
        return _direct(tiling, operand, {p: body.block[p] + x for p, x in within.items()}, starts, local)

    def fill(numbers: Mapping[int, Expr], piece: Expr, e: Expr) -> Stmt:
        places = [numbers[p] for p in axes[:-1]] + ([piece * index(width) + e] if axes else [])
        at = [flat(places, [tiling.register[p] for p in axes])]
        return store(operand.fragment, value(numbers, piece, e), at)

    if vector is None:
        return fill({}, index(0), index(0))
    kind = _is_vector_fragment(body, operand, vector)

    def pieces(numbers: Mapping[int, Expr]) -> Stmt:
        def one(piece: Expr) -> Stmt:
            if kind:
                return loop(width, VECTORIZED, "e", lambda e: fill(numbers, piece, e))
            return unrolled(width, "e", lambda e: fill(numbers, piece, e))

        return unrolled(tiling.register[vector] // width, "piece", one)

    return over_registers(tiling, axes[:-1], pieces)


def _is_vector_fragment(body: _Body, operand: Operand, axis: int) -> bool:
    """Whether the elements of a piece lie side by side, aligned."""
    tiling = body.tiling
    width = tiling.piece[axis]
    if width == 1 or operand.box is not None:
        return operand.box is not None and width > 1 and operand.box.width == width
    starts, at, element = tiling.any_starts(), tiling.any_threads(), tiling.variable("e")
    place = {p: starts[p] + tiling.register_element(p, at[p], tiling.variable(f"r{p}")) for p in tiling.spatial}
    place[axis] = starts[axis] + tiling.within(axis, at[axis], tiling.variable("g"), element)
    local = {p: tiling.variable(f"k{p}") for p in tiling.reduction}
    return is_vector(_direct(tiling, operand, place, starts, local), element, width)


def _direct(
    tiling: SimtTiling,
    operand: Operand,
    place: Mapping[int, Expr],
    starts: Mapping[int, Expr],
    local: Mapping[int, Expr],
) -> Expr:
    """The operand's element at spatial coordinates ``place``, from global memory; zero beyond the output's end."""
    computation = tiling.computation
    everywhere = {**place, **{p: starts[p] + local[p] for p in tiling.reduction}}
    table = [(computation.variables[p], as_index(x, computation.variables[p])) for p, x in everywhere.items()]
    value = produce(substitute(operand.load, table), operand.producers)
    for p in tiling.spatial:
        if tiling.overhangs(p):
            inside = place[p] < index(computation.extents[p])
            value = tirx.if_then_else(inside, value, tirx.const(0, dtype_of(value)))
    return value
