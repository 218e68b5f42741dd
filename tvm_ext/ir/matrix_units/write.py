"""The end of a tensor-core tile: accumulators leave their fragments, pass through the epilogue, and are stored.

A lane of mma.sync holds two neighbouring columns, so that four lanes store 8 elements of a row: 32 bytes of float32,
one whole memory sector, but 16 bytes of float16. Two lanes then exchange halves of two fragments first, and each
stores four columns of one of them: again 32 bytes of a row at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import gcd

from tvm_ext._tvm import Buffer, Expr, Stmt, Var, tirx
from tvm_ext.analysis.computation_exprs import access_of, axis_names, itemsize_bytes
from tvm_ext.analysis.computations import Computation, dtype_of, static_shape, substitute
from tvm_ext.analysis.gemm_form import FRAGMENT, GemmForm, TileSplit
from tvm_ext.devices.gpu import SECTOR_BYTES, WARP
from tvm_ext.ir.build_ir import (
    UNROLLED,
    VECTORIZED,
    allocate,
    cast_to,
    if_all,
    index,
    load,
    loop,
    nest,
    sequence,
    store,
)
from tvm_ext.ir.simt_ir import gpu_buffer
from tvm_ext.ir.stores import consumed, is_lane_by_lane, store_element, store_lanes

from .mfma import Mfma
from .operand import Digits, digits_of, vector_of, within
from .warp import MMA_COLUMNS, MmaSync, Wmma
from .warp_place import WarpPlace

PIECE = 4
"""Elements that one lane stores at a time after an exchange, or out of shared memory."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Destination:
    """Where results go: ``write(batch, row, column, lane, element)``, in vectors of up to ``vector`` columns.

    ``lane_by_lane`` says that the epilogue computes what has no vector form.
    ``itemsize_bytes`` is that of the narrowest tensor written. ``row_bound`` and ``column_bound`` are None where no
    tile crosses the output's end.
    """

    write: Callable[[Expr, Expr, Expr, Expr | None, Expr], Stmt]
    vector: int
    lane_by_lane: bool
    itemsize_bytes: float
    row_bound: int | None
    column_bound: int | None

    def store_piece(self, batch: Expr, row: Expr, column: Expr, count: int, element: Callable[[Expr], Expr]) -> Stmt:
        """Store ``count`` elements from ``column`` on, those that the output has."""
        vector = gcd(count, self.vector)

        def piece(first: int) -> Stmt:
            at = column + index(first) if first else column
            if vector == 1:
                return self._bounded(row, at, self.write(batch, row, at, None, element(index(first))))

            def lane(v: Expr) -> Stmt:
                return self.write(batch, row, at, v, element(index(first) + v))

            lanes = store_lanes(vector, lane) if self.lane_by_lane else loop(vector, VECTORIZED, "v", lane)
            return self._bounded(row, at, lanes)

        return sequence(*(piece(first) for first in range(0, count, vector)))

    def _bounded(self, row: Expr, column: Expr, statement: Stmt) -> Stmt:
        return if_all([within(row, self.row_bound), within(column, self.column_bound)], statement)


def output_destination(
    computation: Computation, form: GemmForm, epilogue: Sequence[Computation], bounds: tuple[int | None, int | None]
) -> Destination:
    """The computation's own result, or what each of its ``epilogue`` computations makes of it."""
    groups = [digits_of(computation, positions) for positions in (form.batch, form.rows, form.columns)]

    def write(batch: Expr, row: Expr, column: Expr, lane: Expr | None, element: Expr) -> Stmt:
        table = [*groups[0].at(batch), *groups[1].at(row), *groups[2].at(column, lane)]
        return store_element(computation, epilogue, element, table)

    return Destination(
        write=write,
        vector=store_vector(computation, groups[2], epilogue),
        lane_by_lane=is_lane_by_lane(*(consumer.value for consumer in epilogue)),
        itemsize_bytes=min(itemsize_bytes(dtype_of(buffer)) for buffer in _written(computation, epilogue)),
        row_bound=bounds[0],
        column_bound=bounds[1],
    )


def value_at(
    computation: Computation,
    form: GemmForm,
    consumer: Computation | None,
    at: tuple[Expr, Expr, Expr | None],
    element: Expr,
) -> Expr:
    """What ``consumer``, or the computation itself, makes of ``element`` at (row, column, lane), to be kept on chip."""
    row, column, lane = at
    rows, columns = (digits_of(computation, positions) for positions in (form.rows, form.columns))
    batch = [pair for v in form.batch for pair in digits_of(computation, (v,)).at(index(0))]
    table = [*batch, *rows.at(row), *columns.at(column, lane)]
    result = cast_to(element, dtype_of(computation.target))
    if consumer is None:
        return result
    return consumed(consumer, computation, result, [substitute(i, table) for i in computation.indices])[0]


def store_vector(computation: Computation, columns: Digits, epilogue: Sequence[Computation]) -> int:
    """Columns that may be stored, and their epilogue's other tensors loaded, as one aligned vector; 1 where none."""
    variable, extent = columns.variables[-1], columns.extents[-1]
    widths = [_aligned(computation, computation.target, computation.indices, variable, extent)]
    widths += [
        _aligned(consumer, item.source, item.indices, consumer.spatial[-1], extent)
        for consumer in epilogue
        for item in consumer.loads()
        if not item.source.same_as(computation.target)
    ]
    # nvcc keeps stock TVM's struct of four bfloat16 in local memory, a pair of them in registers
    pairs = any(dtype_of(buffer) == "bfloat16" for buffer in _written(computation, epilogue))
    return gcd(*widths, 2 if pairs else PIECE)


def _written(computation: Computation, epilogue: Sequence[Computation]) -> list[Buffer]:
    return [consumer.target for consumer in epilogue] or [computation.target]


def _aligned(computation: Computation, buffer: Buffer, indices: Sequence[Expr], variable: Var, extent: int) -> int:
    """The widest aligned vector along ``variable``; ``extent`` where the access does not move along it."""
    access = access_of(buffer, indices, computation)
    name = next(n for n, v in zip(axis_names(computation), computation.variables, strict=True) if v.same_as(variable))
    stride = access.stride(name)
    if stride == 0:
        return extent
    return vector_of(access, name, extent) if stride == 1 else 1


def workspace_destination(workspace: Buffer, bounds: tuple[int | None, int | None]) -> Destination:
    """Partial sums: element [share, row, column] of ``workspace``, in the pairs that a lane of mma.sync holds."""
    columns = static_shape(workspace)[-1]

    def write(batch: Expr, row: Expr, column: Expr, lane: Expr | None, element: Expr) -> Stmt:
        return store(workspace, element, [batch, row, column if lane is None else column + lane])

    return Destination(
        write=write,
        vector=gcd(columns, 2),
        lane_by_lane=False,
        itemsize_bytes=itemsize_bytes(dtype_of(workspace)),
        row_bound=bounds[0],
        column_bound=bounds[1],
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TileCorner:
    """The first element of a warp's tile in the output."""

    batch: Expr
    row: Expr
    column: Expr


def write_tile(
    mma: MmaSync | Wmma | Mfma, corner: TileCorner, place: WarpPlace, thread: Expr, to: Destination
) -> list[Stmt]:
    """Statements that store a warp's accumulators."""
    if isinstance(mma, MmaSync):
        return [_write_fragments(mma, corner, place, to)]
    if isinstance(mma, Mfma):
        return [_write_mfma(mma, corner, place, to)]
    # In another scope than the tiles: stock StorageRewrite would put floats into an array of halves, then refuse.
    staging = gpu_buffer([staging_elements(mma.split)], mma.accumulator, "C_shared", "shared.dyn")
    return [allocate(staging), _write_wmma(mma, staging, corner, place, tirx.floordiv(thread, index(WARP)), to)]


# ---- mma.sync -------------------------------------------------------------------------------------------------------


def _write_fragments(mma: MmaSync, corner: TileCorner, place: WarpPlace, to: Destination) -> Stmt:
    """Store the accumulators of mma.sync: row lane // 4 (+ 8), columns 2 * (lane % 4) and the next."""
    exchange = to.itemsize_bytes * MMA_COLUMNS < SECTOR_BYTES and to.vector == PIECE
    rows, columns = (int(size) for size in mma.accumulators.ty.shape[:2])

    def strip(at: tuple[Expr, ...]) -> Stmt:
        i, half, j = at
        row = corner.row + i * index(FRAGMENT) + half * index(8) + tirx.floordiv(place.lane, index(4))

        def accumulator(fragment: Expr, e: Expr) -> Expr:
            return load(mma.accumulators, [i, fragment, half * index(2) + e])

        if exchange:
            return _write_pair(mma.accumulator, accumulator, corner, row, place.lane, to, j)
        column = corner.column + j * index(MMA_COLUMNS) + tirx.floormod(place.lane, index(4)) * index(2)
        return to.store_piece(corner.batch, row, column, 2, lambda e: accumulator(j, e))

    return nest((rows, 2, columns // 2 if exchange else columns), UNROLLED, ("i", "half", "j"), strip)


def _write_pair(
    dtype: str,
    accumulator: Callable[[Expr, Expr], Expr],
    corner: TileCorner,
    row: Expr,
    lane: Expr,
    to: Destination,
    pair: Expr,
) -> Stmt:
    """Two fragments after an exchange: even lanes keep the first one, odd lanes the second.

    Worked example, row 0: lane 0 holds columns 0, 1 and 8, 9, lane 1 columns 2, 3 and 10, 11. Lane 0 gives 8, 9 for
    2, 3 and stores 0-3; lane 1 stores 8-11; lanes 2 and 3 store 4-7 and 12-15.
    """
    odd = tirx.floormod(lane, index(2)) == index(1)
    piece = gpu_buffer([PIECE], dtype, "piece", "local")

    def exchanged(e: int) -> Stmt:
        first, second = (accumulator(pair * index(2) + index(fragment), index(e)) for fragment in (0, 1))
        given, kept = tirx.Select(odd, first, second), tirx.Select(odd, second, first)
        taken = gpu_buffer([1], dtype, "taken", "local")
        received = load(taken, [index(0)])
        return sequence(
            allocate(taken),
            store(taken, shuffle_xor(given, 1), [index(0)]),
            store(piece, tirx.Select(odd, received, kept), [index(e)]),
            store(piece, tirx.Select(odd, kept, received), [index(2 + e)]),
        )

    fragment = pair * index(2) + tirx.floormod(lane, index(2))
    quad = tirx.floordiv(tirx.floormod(lane, index(4)), index(2))
    column = corner.column + fragment * index(MMA_COLUMNS) + quad * index(PIECE)
    stored = to.store_piece(corner.batch, row, column, PIECE, lambda v: load(piece, [v]))
    return sequence(allocate(piece), exchanged(0), exchanged(1), stored)


ALL_LANES = 0xFFFFFFFF  # the 32 lanes of a warp, a bit each (PTX ISA, shfl.sync)


def shuffle_xor(value: Expr, mask: int) -> Expr:
    """The value of the lane whose number differs by ``mask``; every lane of the warp must take part."""
    width = tirx.const(WARP, "int32")
    operands = (tirx.const(ALL_LANES, "uint32"), value, tirx.const(mask, "int32"), width, width)
    return tirx.call_intrin(dtype_of(value), "tirx.tvm_warp_shuffle_xor", *operands)


# ---- mfma -----------------------------------------------------------------------------------------------------------


def _write_mfma(mma: Mfma, corner: TileCorner, place: WarpPlace, to: Destination) -> Stmt:
    """Store the accumulators of mfma: 16 or 32 lanes store neighbours of a row, 64 or 128 bytes of float32."""

    def piece(at: tuple[Expr, ...]) -> Stmt:
        i, j, e = at
        down, across = mma.place(place.lane, e)
        row, column = corner.row + i * index(mma.side) + down, corner.column + j * index(mma.side) + across
        return to.store_piece(corner.batch, row, column, 1, lambda _: load(mma.accumulators, [i, j, e]))

    return nest(mma.shape, UNROLLED, ("i", "j", "e"), piece)


# ---- wmma -----------------------------------------------------------------------------------------------------------


def staging_elements(split: TileSplit) -> int:
    """Elements of shared memory through which each warp stores one fragment at a time."""
    return split.warps * FRAGMENT * FRAGMENT


def _write_wmma(wmma: Wmma, staging: Buffer, corner: TileCorner, place: WarpPlace, warp: Expr, to: Destination) -> Stmt:
    """Store accumulators, whose layout is not known, one 16 x 16 fragment after another through shared memory.

    Two rows of 16 floats are all banks, so that nothing is padded; 16 halves are a whole memory sector of a row.
    """
    base, width = warp * index(FRAGMENT * FRAGMENT), to.vector

    def fragment(at: tuple[Expr, ...]) -> Stmt:
        i, j = at
        left, top = corner.column + j * index(FRAGMENT), corner.row + i * index(FRAGMENT)

        def take(u: Expr) -> Stmt:
            first = (u * index(WARP) + place.lane) * index(width)
            row, column = tirx.floordiv(first, index(FRAGMENT)), tirx.floormod(first, index(FRAGMENT))

            def staged(v: Expr) -> Expr:
                return load(staging, [base + first + v])

            return to.store_piece(corner.batch, top + row, left + column, width, staged)

        put = wmma.store(staging.access_ptr("w", offset=base), FRAGMENT, i, j)
        return sequence(put, loop(FRAGMENT * FRAGMENT // width // WARP, UNROLLED, "u", take))

    return nest((wmma.rows, wmma.columns), UNROLLED, ("i", "j"), fragment)
