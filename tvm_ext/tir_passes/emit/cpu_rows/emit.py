"""Emits computations that share their leading axes as one parallel loop over rows; a row stays in cache between
computations.

Softmax, layer and RMS normalisation, means and variances, and every injective operator have this form: the first p axes
of all computations run together, so that what one computation leaves in a row-sized buffer, the next one finds in L1.

    parallel for row in fused first p axes:
      m = max over k of x[row, k]                 # a reduction over the contiguous axis: SIMD partial results
      for k: y[row, k] = exp(x[row, k] - m); s += y[row, k]    # the exponentials go where the result will be
      for k: y[row, k] *= 1 / s

`analysis.predicates.shared_axes` finds p.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from tvm_ext._tvm import Buffer, Expr, ForKind, Stmt, TensorLoad, Var, structural_equal
from tvm_ext.analysis.computation_exprs import itemsize_bytes
from tvm_ext.analysis.computations import Computation, dtype_of, reads, replace_reads, static_shape, substitute
from tvm_ext.analysis.predicates import contiguous_in, is_in, shared_axes
from tvm_ext.cost.row_time import LEAST_LANES, is_vectorised, reduction_lanes
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.ir.build_ir import (
    SERIAL,
    accumulate,
    accumulator_dtype,
    allocate,
    bind,
    cast_to,
    if_all,
    in_dtype,
    index,
    load,
    loop,
    new_buffer,
    over,
    sequence,
    split_index,
    store,
    store_point,
    tile_size,
    vector_kind,
    vector_loops,
)
from tvm_ext.support.arithmetic import ceil_div

from ...expressions.reciprocals import with_reciprocals
from .reduce_row import PARTIAL_REGISTERS, reduce_row, runs_inside
from .sections import Section, sections
from .turned import TASKS_PER_UNIT, has_guard, turned_squares
from .woven import WovenAxis, turns_of

SHORT_AXES = (4, 8, 16)  # elements of a last axis that is one SIMD register, as in the layout NCHW16c
LOCAL_ROW_BYTES = 16 * 1024  # a row buffer up to this size lives on the thread's stack, a larger one in its workspace
ROWS_IN_TURNS, SHORT_ROW_REGISTERS = 4, 4  # rows whose computations take turns, of at most so many SIMD registers
CHUNK_REGISTERS = 4  # SIMD registers of which a chunk of a single loop is a multiple: what LLVM unrolls such a loop by


def emit_rows(
    computations: Sequence[Computation],
    device: DeviceSpec,
    keep: Sequence[Buffer],
    kind: ForKind,
    registers: int = PARTIAL_REGISTERS,
) -> list[Stmt]:
    """Statements that run ``computations`` in an outer loop of ``kind``, PARALLEL or SERIAL.

    Buffers in ``keep`` are read by others and written whole, the rest row by row. ``registers``: `reduce_row`'s.
    """
    first, *others = computations = _in_place(with_reciprocals(computations), keep)
    is_injective = not others and not first.is_reduction
    if is_injective and len(first.variables) == 1:
        return [_chunked(first, first.extents[0], device, kind)]
    squares = turned_squares(first, device) if is_injective else None
    if squares is not None:
        return [squares.emit(kind)]
    count = _task_axes(first, device) if is_injective else shared_axes(computations)
    # Scalar computations agree on an extent of 1 as well: any computation's extents serve.
    extents = [first.extent(v) for v in first.spatial[:count]]
    together = _rows_in_turns(computations, prod(extents), device)
    rows = [_with_row_buffers(computations, count, keep) for _ in range(together)]

    def turns(number: Expr) -> Stmt:
        """Each computation of all rows before the next one: what one row waits for, the others have time to do."""
        bodies = []
        for turn, (relocated, _) in enumerate(rows):
            at = split_index(number * index(together) + index(turn) if together > 1 else number, extents)
            emitter = _Row(at=at, device=device, registers=registers)
            bodies.append([emitter.statement(*pair) for pair in _pair_with_producers(relocated, count, device)])
        memory = [allocate(small) for _, buffers in rows for small in buffers]
        return sequence(*memory, *itertools.chain(*zip(*bodies, strict=True)))

    return [loop(prod(extents) // together, kind, "row", turns)]


def _rows_in_turns(computations: Sequence[Computation], rows: int, device: DeviceSpec) -> int:
    """How many of ``rows`` are computed in turns: several short ones, of which each waits for its own reductions.

    Of 384 softmaxes over 48 a core works on three at a time by itself: in turns of four they take 5.8 us, not 8.6.
    """
    reduced = [own for own in computations[:-1] if own.is_reduction and is_vectorised(own, device)]
    lengths = [own.extent(own.reduction[-1]) // reduction_lanes(own, device) for own in reduced]
    if not lengths or max(lengths) > SHORT_ROW_REGISTERS:
        return 1
    return next(size for size in (ROWS_IN_TURNS, 3, 2, 1) if rows % size == 0)


def _with_row_buffers(
    computations: Sequence[Computation], count: int, keep: Sequence[Buffer]
) -> tuple[list[Computation], list[Buffer]]:
    """The computations of a row in memory of its own, and that memory: all that is not in ``keep``."""
    row_buffers: list[tuple[Buffer, Buffer]] = []
    for target in (computation.target for computation in computations):
        if not is_in(target, [*keep, *(old for old, _ in row_buffers)]):
            row_buffers.append((target, _row_buffer(target, count)))
    return [_relocate(own, row_buffers, count) for own in computations], [small for _, small in row_buffers]


def _task_axes(computation: Computation, device: DeviceSpec) -> int:
    """Leading axes of a lone injective computation that are divided into tasks; the others stay plain loops inside.

    As few as give every unit enough tasks: each task divides its number into coordinates, which a loop gets for free.
    Worked example, padding (64, 58, 58) on two units: 64 tasks of 58 x 58, not 3712 tasks of 58.
    """
    tasks, count = 1, 0
    while count < len(computation.spatial) - 1 and tasks < TASKS_PER_UNIT * device.unit_count:
        tasks *= computation.extent(computation.spatial[count])
        count += 1
    return count


def _pair_with_producers(
    computations: Sequence[Computation], count: int, device: DeviceSpec
) -> list[tuple[Computation, Computation | None]]:
    """The computations in order, each reduction of a row together with the computation before it where that can run
    inside it.
    """
    pairs: list[tuple[Computation, Computation | None]] = []
    for computation in computations:
        before = pairs[-1][0] if pairs and pairs[-1][1] is None else None
        if before is not None and runs_inside(before, computation, count, device):
            pairs[-1] = (computation, before)
        else:
            pairs.append((computation, None))
    return pairs


# --- row buffers ----------------------------------------------------------------------------------------------------
def _in_place(computations: Sequence[Computation], keep: Sequence[Buffer]) -> list[Computation]:
    """The computations with a buffer that the last one reads at its own element only replaced by the last one's target.

    Worked example, softmax: ``e[n, k]`` is written, summed, and read for ``y[n, k] = e[n, k] / s[n]``: the exponentials
    go to ``y`` at once. A row of 30522 is then one stream through the cache less.
    """
    *before, last = computations
    for computation in before:
        if not is_in(computation.target, keep) and _may_replace(computation, last, before):
            return [_relocate(other, [(computation.target, last.target)], 0) for other in computations]
    return list(computations)


def _may_replace(computation: Computation, last: Computation, before: Sequence[Computation]) -> bool:
    own, final = computation.target, last.target
    if computation.is_reduction or last.is_reduction:
        return False
    if dtype_of(own) != dtype_of(final) or static_shape(own) != static_shape(final):
        return False
    if not (computation.writes_at_its_own_axes() and last.writes_at_its_own_axes()):
        return False
    if not reads(last.value, own) or any(reads(other.value, final) for other in before):
        return False
    return all(
        all(structural_equal(i, j) for i, j in zip(item.indices, last.indices, strict=True))
        for item in last.loads()
        if item.source.same_as(own)
    )


def _row_buffer(buffer: Buffer, count: int) -> Buffer:
    """Memory for the part of ``buffer`` behind its first ``count`` dimensions."""
    shape = list(static_shape(buffer)[count:]) or [1]
    scope = "local" if prod(shape) * itemsize_bytes(dtype_of(buffer)) <= LOCAL_ROW_BYTES else "global"
    return new_buffer(shape, dtype_of(buffer), f"{buffer.name}_row", scope)


def _relocate(computation: Computation, moves: Sequence[tuple[Buffer, Buffer]], count: int) -> Computation:
    """``computation`` with each first buffer of ``moves`` as the second one, which lacks ``count`` dimensions."""
    for old, new in moves:

        def moved(item: TensorLoad, new: Buffer = new) -> Expr:
            return load(new, list(item.indices[count:]) or [index(0)] * len(new.ty.shape))

        computation = dataclasses.replace(computation, value=replace_reads(computation.value, old, moved))
        if computation.target.same_as(old):
            own = tuple(computation.indices[count:]) or (index(0),) * len(new.ty.shape)
            computation = dataclasses.replace(computation, target=new, indices=own)
    return computation


# --- one row --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Row:
    """Writes the computations of the row at ``at`` of the axes that all of them share."""

    at: tuple[Expr, ...]
    device: DeviceSpec
    registers: int

    def statement(self, computation: Computation, producer: Computation | None) -> Stmt:
        table, inner = self._table(computation), computation.spatial[len(self.at) :]
        if producer is not None:
            inside = (producer, self._table(producer))
            return reduce_row(computation, table, self.device, self.registers, inside)
        if not computation.is_reduction:
            return self._outer_sections(computation, table, inner)
        if inner and not contiguous_in(computation, computation.reduction[-1]):
            return _accumulate_in_place(computation, table, inner)
        return over(
            computation,
            inner,
            lambda values: reduce_row(computation, table + bind(inner, values), self.device, self.registers),
        )

    def _outer_sections(self, computation: Computation, table: list[tuple[Var, Expr]], inner: tuple[Var, ...]) -> Stmt:
        """What of the row's own axes decides which tensor is read, as of a concatenation of channels, is asked once."""
        for axis, place in zip(computation.spatial, self.at, strict=False):
            parts = sections(computation.value, axis, computation.extent(axis)) if inner else []
            if len(parts) > 1:
                chosen: Stmt | None = None
                for part in reversed(parts):
                    own = _by_sections(dataclasses.replace(computation, value=part.value), table, inner, self.device)
                    chosen = own if chosen is None else if_all([place < index(part.first + part.size)], own, chosen)
                assert chosen is not None
                return chosen
        return _by_sections(computation, table, inner, self.device)

    def _table(self, computation: Computation) -> list[tuple[Var, Expr]]:
        return bind(computation.spatial[: len(self.at)], self.at)


def _by_sections(
    computation: Computation, table: list[tuple[Var, Expr]], inner: tuple[Var, ...], device: DeviceSpec
) -> Stmt:
    """`_spatial`, or for each section of the last axis a loop of its own, vector by vector where it is short; in turns
    where the elements come so."""
    turns = turns_of(computation, inner) if inner else []
    if turns:
        return _in_turns(computation, table, inner, turns)
    parts = sections(computation.value, inner[-1], computation.extent(inner[-1])) if inner else []
    if len(parts) < 2:
        return _spatial(computation, table, inner, device)
    *outer, last = inner

    def section(part: Section, at: tuple[Expr, ...]) -> Stmt:
        decided = dataclasses.replace(computation, value=part.value)

        def point(place: Expr) -> Stmt:
            return store_point(decided, table + bind(inner, (*at, index(part.first) + place)))

        if part.size > 4 * device.teu_lanes or not contiguous_in(decided, last):
            return loop(part.size, SERIAL, last.name, point)
        return vector_loops(part.size, device.teu_lanes, vector_kind(part.value), point)

    return over(computation, outer, lambda at: sequence(*(section(part, at) for part in parts)))


def _in_turns(
    computation: Computation, table: list[tuple[Var, Expr]], axes: tuple[Var, ...], turns: Sequence[WovenAxis]
) -> Stmt:
    if not axes:
        return store_point(computation, table)
    axis, extent = axes[0], computation.extent(axes[0])

    def at(place: Expr, value: Expr) -> Stmt:
        known = dataclasses.replace(computation, value=value)
        return _in_turns(known, table + bind([axis], [place]), axes[1:], turns)

    own = next((item for item in turns if item.axis.same_as(axis)), None)
    if own is not None:
        return own.emit(extent, computation.value, at)
    return loop(extent, SERIAL, axis.name, lambda place: at(place, computation.value))


def _spatial(
    computation: Computation, table: list[tuple[Var, Expr]], inner: tuple[Var, ...], device: DeviceSpec
) -> Stmt:
    """Plain nested loops with the last axis innermost, which LLVM vectorises."""

    def body(values: tuple[Expr, ...]) -> Stmt:
        return store_point(computation, table + bind(inner, values))

    size, lanes = computation.extent(inner[-1]) if inner else 0, device.teu_lanes
    is_row = LEAST_LANES < size <= SHORT_ROW_REGISTERS * lanes and not has_guard(computation.value)
    is_short = size in SHORT_AXES or is_row
    if not is_short or not contiguous_in(computation, inner[-1]):
        return over(computation, inner, body)
    # LLVM unrolls a loop of so few steps before it thinks of vectors, and then writes scalar code.
    kind, width = vector_kind(computation.value), size if size in SHORT_AXES else lanes
    return over(computation, inner[:-1], lambda at: vector_loops(size, width, kind, lambda lane: body((*at, lane))))


def _accumulate_in_place(computation: Computation, table: list[tuple[Var, Expr]], inner: tuple[Var, ...]) -> Stmt:
    """Reduction axes outside, the row's own axes inside: ``for k: for j: y[j] += x[k, j]`` runs along contiguous j."""
    own = dtype_of(computation.target)
    dtype = accumulator_dtype(own)
    sums = computation.target if dtype == own else new_buffer([computation.extent(v) for v in inner], dtype, "sums")

    def target(values: Sequence[Expr]) -> list[Expr]:
        return [substitute(i, table + bind(inner, values)) for i in computation.indices]

    def at(values: Sequence[Expr]) -> list[Expr]:
        return target(values) if dtype == own else list(values)

    def add(ks: tuple[Expr, ...], values: tuple[Expr, ...]) -> Stmt:
        value = substitute(computation.value, table + bind(inner, values) + bind(computation.reduction, ks))
        return accumulate(sums, at(values), in_dtype(value, dtype), computation.combiner)

    begin = over(computation, inner, lambda values: store(sums, in_dtype(computation.init, dtype), at(values)))
    lines = over(computation, computation.reduction, lambda ks: over(computation, inner, lambda js: add(ks, js)))
    if dtype == own:
        return sequence(begin, lines)

    def finish(values: tuple[Expr, ...]) -> Stmt:
        return store(computation.target, cast_to(load(sums, list(values)), own), target(values))

    return sequence(allocate(sums), begin, lines, over(computation, inner, finish))


# --- one contiguous injective computation ---------------------------------------------------------------------------
def _chunked(computation: Computation, extent: int, device: DeviceSpec, kind: ForKind) -> Stmt:
    """``extent`` points in equal chunks, a whole number of SIMD registers each, one or more per core."""

    def points(start: Expr, count: int | Expr) -> Stmt:
        return loop(count, SERIAL, "i", lambda i: store_point(computation, bind(computation.variables, [start + i])))

    if kind == SERIAL:
        return points(index(0), extent)
    grain = CHUNK_REGISTERS * device.teu_lanes
    chunk = ceil_div(extent, device.unit_count * grain) * grain

    def task(number: Expr) -> Stmt:
        start = number * index(chunk)
        return points(start, tile_size(extent, chunk, start))

    return loop(ceil_div(extent, chunk), kind, "chunk", task)
