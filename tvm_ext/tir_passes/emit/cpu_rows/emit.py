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
from collections.abc import Iterable, Sequence
from math import prod

from tvm_ext._tvm import Buffer, Expr, ForKind, Stmt, TensorLoad, Var, tirx
from tvm_ext.analysis.computation_exprs import itemsize_bytes
from tvm_ext.analysis.computations import Computation, dtype_of, replace_loads, static_shape, substitute
from tvm_ext.analysis.predicates import contiguous_in, is_in, shared_axes
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.ir.build_ir import (
    SERIAL,
    accumulator_dtype,
    allocate,
    bind,
    combine,
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
)
from tvm_ext.support.arithmetic import ceil_div

from ...expressions.reciprocals import with_reciprocals
from .reduce_row import PARTIAL_REGISTERS, reduce_row, runs_inside
from .rewrite_rows import in_place

SHORT_AXES = (4, 8, 16)  # elements of a last axis that is one SIMD register, as in the layout NCHW16c
LOCAL_ROW_BYTES = 16 * 1024  # a row buffer up to this size lives on the thread's stack, a larger one in its workspace
TASKS_PER_UNIT = 8  # enough that the last, uneven round of tasks is short


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
    computations = in_place(with_reciprocals(computations), keep)
    count = (
        shared_axes(computations)
        if len(computations) > 1 or computations[0].is_reduction
        else _task_axes(computations[0], device)
    )
    extents = [computations[0].extent(v) for v in computations[0].spatial[:count]]
    # Scalar computations agree on an extent of 1 as well: any computation's extents serve.
    rows = prod(extents)
    shrunk = [
        _shrink(buffer, count)
        for buffer in _distinct(computation.target for computation in computations)
        if not is_in(buffer, keep)
    ]

    def row(task: Expr) -> Stmt:
        at = split_index(task, extents) if count else ()
        moved = [_relocate(computation, shrunk, count) for computation in computations]
        body = [
            _computation_statement(computation, producer, at, count, device, registers)
            for computation, producer in _paired(moved, count, device)
        ]
        return sequence(*(allocate(small) for _, small in shrunk), *body)

    chunks = _single_loop(computations, count)
    if chunks is not None:
        return [_chunked(computations[0], chunks, device, kind)]
    return [loop(rows, kind, "row", row)]


def _distinct(buffers: Iterable[Buffer]) -> list[Buffer]:
    found: list[Buffer] = []
    for buffer in buffers:
        if not is_in(buffer, found):
            found.append(buffer)
    return found


def _paired(
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


def _shrink(buffer: Buffer, count: int) -> tuple[Buffer, Buffer]:
    shape = list(static_shape(buffer)[count:]) or [1]
    size = prod(shape)
    scope = "local" if size * itemsize_bytes(dtype_of(buffer)) <= LOCAL_ROW_BYTES else "global"
    return buffer, new_buffer(shape, dtype_of(buffer), f"{buffer.name}_row", scope)


def _relocate(computation: Computation, shrunk: Sequence[tuple[Buffer, Buffer]], count: int) -> Computation:
    """``computation`` reading and writing the row buffers, whose first ``count`` dimensions are gone."""

    def swap(item: TensorLoad) -> TensorLoad:
        for old, new in shrunk:
            if item.source.same_as(old):
                return load(new, list(item.indices[count:]) or [index(0)])
        return item

    moved = dataclasses.replace(computation, value=replace_loads(computation.value, swap))
    for old, new in shrunk:
        if computation.target.same_as(old):
            moved = dataclasses.replace(moved, target=new, indices=tuple(computation.indices[count:]) or (index(0),))
    return moved


def _computation_statement(
    computation: Computation,
    producer: Computation | None,
    at: Sequence[Expr],
    count: int,
    device: DeviceSpec,
    registers: int,
) -> Stmt:
    table = _row_table(computation, at, count)
    inner = computation.spatial[count:]
    if producer is not None:
        return reduce_row(computation, table, device, (producer, _row_table(producer, at, count)), registers)
    if computation.is_reduction:
        return _reduction(computation, table, inner, device, registers)
    return _spatial(computation, table, inner)


def _row_table(computation: Computation, at: Sequence[Expr], count: int) -> list[tuple[Var, Expr]]:
    return bind(computation.spatial[:count], at)


def _spatial(computation: Computation, table: list[tuple[Var, Expr]], inner: tuple[Var, ...]) -> Stmt:
    """Plain nested loops with the last axis innermost, which LLVM vectorises."""

    def body(values: tuple[Expr, ...]) -> Stmt:
        return store_point(computation, table + bind(inner, values))

    if not inner or computation.extent(inner[-1]) not in SHORT_AXES or not contiguous_in(computation, inner[-1]):
        return over(computation, inner, body)
    # LLVM unrolls a loop of so few steps before it thinks of vectors, and then writes scalar code.
    kind, (*outer, last) = vector_kind(computation.value), inner
    size = computation.extent(last)
    return over(computation, outer, lambda at: loop(size, kind, last.name, lambda lane: body((*at, lane))))


def _reduction(
    computation: Computation,
    table: list[tuple[Var, Expr]],
    inner: tuple[Var, ...],
    device: DeviceSpec,
    registers: int,
) -> Stmt:
    if inner and not contiguous_in(computation, computation.reduction[-1]):
        return _accumulate_in_place(computation, table, inner)

    def body(values: tuple[Expr, ...]) -> Stmt:
        return reduce_row(computation, table + bind(inner, values), device, registers=registers)

    return over(computation, inner, body)


def _accumulate_in_place(computation: Computation, table: list[tuple[Var, Expr]], inner: tuple[Var, ...]) -> Stmt:
    """Reduction axes outside, the row's own axes inside: ``for k: for j: y[j] += x[k, j]`` runs along contiguous j."""
    dtype = accumulator_dtype(dtype_of(computation.target))
    wide = dtype != dtype_of(computation.target)
    sums = new_buffer([computation.extent(v) for v in inner], dtype, "sums") if wide else computation.target

    def full(values: Sequence[Expr], ks: Sequence[Expr] = ()) -> list[tuple[Var, Expr]]:
        return table + bind(inner, values) + bind(computation.reduction[: len(ks)], ks)

    def at(values: Sequence[Expr]) -> list[Expr]:
        return list(values) if wide else [substitute(i, full(values)) for i in computation.indices]

    def start(values: tuple[Expr, ...]) -> Stmt:
        return store(sums, in_dtype(computation.init, dtype), at(values))

    def step(values: tuple[Expr, ...], ks: tuple[Expr, ...]) -> Stmt:
        value = in_dtype(substitute(computation.value, full(values, ks)), dtype)
        return store(sums, combine(computation.combiner, load(sums, at(values)), value), at(values))

    def finish(values: tuple[Expr, ...]) -> Stmt:
        narrow = tirx.Cast(dtype_of(computation.target), load(sums, list(values)))
        return store(computation.target, narrow, [substitute(i, full(values)) for i in computation.indices])

    def sum_up(ks: tuple[Expr, ...]) -> Stmt:
        return over(computation, inner, lambda values: step(values, ks))

    statements = [over(computation, inner, start), over(computation, computation.reduction, sum_up)]
    if wide:
        statements = [allocate(sums), *statements, over(computation, inner, finish)]
    return sequence(*statements)


# --- one contiguous injective computation ---------------------------------------------------------------------------
def _single_loop(computations: Sequence[Computation], count: int) -> int | None:
    """The length of the only axis of a lone injective computation (all its axes have been fused into one), or None."""
    if len(computations) != 1 or computations[0].is_reduction or len(computations[0].variables) != 1 or count != 0:
        return None
    return computations[0].extents[0]


def _chunked(computation: Computation, extent: int, device: DeviceSpec, kind: ForKind) -> Stmt:
    """``extent`` points in equal chunks, a whole number of SIMD registers each, one or more per core."""

    def body(k: Expr) -> Stmt:
        return store_point(computation, bind(computation.variables, [k]))

    if kind == SERIAL:
        return loop(extent, SERIAL, "i", body)
    grain = 4 * device.teu_lanes
    chunk = ceil_div(extent, device.unit_count * grain) * grain
    chunks = ceil_div(extent, chunk)

    def run(task: Expr) -> Stmt:
        start = task * index(chunk)
        return loop(tile_size(extent, chunk, start), SERIAL, "i", lambda i: body(start + i))

    return loop(chunks, kind, "chunk", run)
