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

from tvm_ext._tvm import Buffer, Expr, Stmt, tirx
from tvm_ext.analysis.computations import (
    Computation,
    dtype_of,
    mentions,
    replace_equal_loads,
    replace_loads,
    static_shape,
    substitute,
)
from tvm_ext.analysis.tensor_expr import TensorExpr
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.devices.occupancy import shared_limit_bytes, static_shared_bytes
from tvm_ext.ir.build_ir import (
    SERIAL,
    VECTORIZED,
    accumulate,
    allocate,
    below,
    bind_at,
    flat,
    if_all,
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

from .box import produce
from .copy import emit_copy, is_vector
from .operands import (
    Operand,
    in_shared_memory,
    partial_sums,
    plan_operands,
    planned_registers,
    rest_in_loop_bytes,
    tail_shape,
)
from .store import Numbers, TileStore, join_groups, over_registers
from .tiling import SimtTiling, deepened, reduction_split, tile_threads

UNROLLED_OPERATIONS = 1024
"""Loops over the points of a step are unrolled while their body stays below so many accumulations."""


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
    rest_bytes = rest_in_loop_bytes(tiling, operands)
    room = static_shared_bytes(device) if scope == "shared" else shared_limit_bytes(device)
    rest_apart = not rest_bytes or shared_bytes + rest_bytes <= room
    block_count = prod(tiling.grid)

    def body(block: Expr, thread: Expr) -> Stmt:
        blocks = split_index(block, tiling.grid)
        group, at = tiling.coordinates(thread)
        return _Thread(
            tiling=tiling,
            operands=operands,
            accumulators=gpu_buffer((tiling.accumulators,), tiling.accumulator_dtype, "acc", "local"),
            thread=thread,
            group=group,
            at=at,
            block={p: b * index(tiling.tile[p]) for p, b in zip(tiling.spatial, blocks, strict=True)},
            rest_apart=rest_apart,
        ).statement(tuple(epilogue), partial)

    kernel = launch(block_count, tiling.thread_count, body)
    return SimtKernel(
        statements=(unrolled_by_tvm(kernel) if device.kind == "rocm" else kernel,),
        threads=tiling.thread_count,
        blocks=block_count,
        shared_bytes=shared_bytes + (rest_bytes if rest_apart else 0),
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
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Thread:
    """Writes the statements of one thread, ``thread`` of its block, at ``at`` in the ``group`` of threads."""

    tiling: SimtTiling
    operands: tuple[Operand, ...]
    accumulators: Buffer
    thread: Expr
    group: Expr
    at: Mapping[int, Expr]
    block: Mapping[int, Expr]  # where the threadblock's tile starts along each spatial axis
    rest_apart: bool  # a last, smaller step has shared memory of its own

    def statement(self, epilogue: tuple[Computation, ...], partial: Buffer | None) -> Stmt:
        tiling, sums = self.tiling, self.accumulators
        initial = in_dtype(tiling.computation.init, tiling.accumulator_dtype)
        end = [TileStore(tiling=tiling, epilogue=epilogue, starts=self.block, at=self.at).statement(sums)]
        if partial is not None:
            own = tirx.floormod(self.thread, index(tiling.group_threads))
            end = [*join_groups(tiling, sums, partial, self.group, own), if_all([self.group < index(1)], *end)]
        shared = [operand.box.buffer for operand in self.operands if operand.box is not None]
        registers = [sums, *(operand.fragment for operand in self.operands)]
        return sequence(
            *map(allocate, [*shared, *([] if partial is None else [partial]), *registers]),
            unrolled(tiling.accumulators, "i", lambda i: store(sums, initial, [i])),
            *self._copies([o for o in self.operands if not o.stepped(tiling)], self.block, tiling.tile),
            self._steps(),
            *end,
        )

    def _copies(self, operands: Sequence[Operand], starts: Mapping[int, Expr], tile: Mapping[int, int]) -> list[Stmt]:
        full = {**{p: index(0) for p in self.tiling.reduction}, **starts}
        return [
            emit_copy(operand.box, tail_shape(operand, self.tiling, tile), self.tiling, self.thread, full, tile)
            for operand in operands
            if operand.box is not None
        ]

    def _steps(self) -> Stmt:
        """The steps of the reduction; along each axis the whole ones in a loop, then the rest at its own size."""
        tiling = self.tiling

        def step_of(starts: Mapping[int, Expr], tile: Mapping[int, int]) -> Stmt:
            is_alike = tile == tiling.tile or not self.rest_apart
            own = self if is_alike else self._with_own_memory()
            stepped = [operand for operand in own.operands if operand.stepped(tiling)]
            rest = [] if is_alike else [allocate(o.box.buffer) for o in stepped if o.box is not None]
            return sequence(*rest, *own._copies(stepped, starts, tile), own._points(starts, tile))

        def along(axes: Sequence[int], starts: Mapping[int, Expr], tile: Mapping[int, int]) -> Stmt:
            if not axes:
                return step_of(starts, tile)
            (p, *rest), step = axes, tiling.step[axes[0]]
            whole, left = divmod(tiling.computation.extents[p], step)
            name = f"{tiling.computation.variables[p].name}_step"
            parts = [loop(whole, SERIAL, name, lambda v: along(rest, {**starts, p: v * index(step)}, tile))]
            if left:
                parts.append(along(rest, {**starts, p: index(whole * step)}, {**tile, p: left}))
            return sequence(*parts)

        return along(tiling.reduction, self.block, tiling.tile)

    def _with_own_memory(self) -> _Thread:
        """For a last, smaller step, whose tiles have names of their own.

        A buffer that is also loaded behind the loop over the steps could not be loaded ahead in it. Stock
        StorageRewrite lets both lie in the same memory, but for a rest within an outer loop (`rest_in_loop_bytes`).
        """
        own = []
        for operand in self.operands:
            if operand.stepped(self.tiling) and operand.box is not None:
                old = operand.box.buffer
                buffer = gpu_buffer(static_shape(old), dtype_of(old), f"{old.name}_rest", str(old.ty.storage_scope))
                operand = replace(operand, box=replace(operand.box, buffer=buffer))
            own.append(operand)
        return replace(self, operands=tuple(own))

    def _points(self, starts: Mapping[int, Expr], tile: Mapping[int, int]) -> Stmt:
        """The points of one step, innermost loops unrolled; thread groups share the split axis in turn."""
        tiling = self.tiling
        budget = UNROLLED_OPERATIONS // max(1, tiling.accumulators)
        unroll: set[int] = set()
        for p in reversed(tiling.reduction):
            budget //= max(1, tile[p])
            if budget < 1:
                break
            unroll.add(p)

        def along(position: int, local: Mapping[int, Expr]) -> Stmt:
            if position == len(tiling.reduction):
                return _Point(thread=self, starts=starts, tile=tile, local=local).statement()
            p = tiling.reduction[position]
            shared = tiling.split if p == tiling.split_axis else 1
            count = ceil_div(tile[p], shared)

            def one(v: Expr) -> Stmt:
                at = v * index(shared) + self.group if shared > 1 else v
                return if_all([below(at, tile[p], shared)], along(position + 1, {**local, p: at}))

            name = tiling.computation.variables[p].name
            return unrolled(count, name, one) if p in unroll else loop(count, SERIAL, name, one)

        return along(0, {})


# --- one point of the reduction --------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Point:
    """The point ``local`` of the step of ``tile`` that begins at ``starts``."""

    thread: _Thread
    starts: Mapping[int, Expr]
    tile: Mapping[int, int]
    local: Mapping[int, Expr]

    def statement(self) -> Stmt:
        """Loads the operands and accumulates."""
        thread, tiling, computation = self.thread, self.thread.tiling, self.thread.tiling.computation
        fragments = [self._load_fragment(operand) for operand in thread.operands]
        axes = [p for p in tiling.order if tiling.register[p] > 1]
        loadless = replace_loads(computation.value, lambda item: tirx.const(0, dtype_of(item)))
        depends = mentions(loadless, *computation.variables)

        def add(numbers: Numbers) -> Stmt:
            held = [(o.load, load(o.fragment, [_number(tiling, o.axes, numbers)])) for o in thread.operands]
            value = in_dtype(replace_equal_loads(computation.value, held), tiling.accumulator_dtype)
            if depends:
                place = {p: thread.block[p] + x for p, x in self._within(numbers).items()}
                place |= {p: self.starts[p] + self.local[p] for p in tiling.reduction}
                value = substitute(value, bind_at(computation, place))
            return accumulate(thread.accumulators, [_number(tiling, axes, numbers)], value, computation.combiner)

        return sequence(*fragments, over_registers(tiling, axes, add))

    def _within(self, numbers: Numbers) -> dict[int, Expr]:
        """Where in the tile the thread's elements ``numbers`` are."""
        tiling, at = self.thread.tiling, self.thread.at
        return {p: tiling.register_element(p, at[p], numbers.get(p, 0)) for p in tiling.spatial}

    def _load_fragment(self, operand: Operand) -> Stmt:
        """Loads what one thread needs of ``operand``."""
        thread, tiling, axes = self.thread, self.thread.tiling, operand.axes
        vector = axes[-1] if axes else None
        width = tiling.piece[vector] if vector is not None else 1

        def value(numbers: Numbers, piece: Expr, e: Expr) -> Expr:
            within = self._within(numbers)
            if vector is not None:
                within[vector] = tiling.within(vector, thread.at[vector], piece, e)
            if operand.box is not None:
                return load(operand.box.buffer, [operand.box.read_address({**within, **self.local}, self.tile)])
            place = {p: thread.block[p] + x for p, x in within.items()}
            return _direct(tiling, operand, place, self.starts, self.local)

        def fill(numbers: Numbers, piece: Expr, e: Expr) -> Stmt:
            last = {} if vector is None else {vector: piece * index(width) + e}
            return store(operand.fragment, value(numbers, piece, e), [_number(tiling, axes, {**numbers, **last})])

        if vector is None:
            return fill({}, index(0), index(0))
        is_vectorised = _is_vector_fragment(tiling, operand, vector)

        def pieces(numbers: Numbers) -> Stmt:
            def one(piece: Expr) -> Stmt:
                if is_vectorised:
                    return loop(width, VECTORIZED, "e", lambda e: fill(numbers, piece, e))
                return unrolled(width, "e", lambda e: fill(numbers, piece, e))

            return unrolled(tiling.register[vector] // width, "piece", one)

        return over_registers(tiling, axes[:-1], pieces)


def _number(tiling: SimtTiling, axes: Sequence[int], numbers: Numbers) -> Expr:
    """Which of a thread's elements along ``axes``, counted row-major."""
    return flat([numbers[p] for p in axes], [tiling.register[p] for p in axes])


def _is_vector_fragment(tiling: SimtTiling, operand: Operand, axis: int) -> bool:
    """Whether the elements of a piece lie side by side, aligned."""
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
    value = produce(substitute(operand.load, bind_at(computation, everywhere)), operand.producers)
    for p in tiling.spatial:
        if tiling.overhangs(p):
            inside = place[p] < index(computation.extents[p])
            value = tirx.if_then_else(inside, value, tirx.const(0, dtype_of(value)))
    return value
