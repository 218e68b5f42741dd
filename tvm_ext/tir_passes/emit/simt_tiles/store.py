"""The end of a GPU kernel's tile: sums of thread groups are joined, pass the fused epilogue and are stored."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from tvm_ext._tvm import Buffer, BufferStore, Expr, Stmt, Var, structural_walk, tirx
from tvm_ext.analysis.computations import Computation
from tvm_ext.ir.build_ir import UNROLLED, VECTORIZED, as_index, combine, flat, index, load, loop, store
from tvm_ext.ir.epilogue import store_element
from tvm_ext.ir.simt_ir import unrolled
from tvm_ext.ir.vector_stores import is_lane_by_lane, store_lanes

from .copy import is_vector, is_vector_access
from .tiling import SimtTiling


def store_tile(
    tiling: SimtTiling,
    epilogue: Sequence[Computation],
    accumulators: Buffer,
    starts: Mapping[int, Expr],
    at: Mapping[int, Expr],
) -> Stmt:
    """Store the elements of the thread at position ``at`` of the tile that begins at ``starts``."""
    lane = tiling.lane
    width = tiling.piece[lane]
    vectors = width > 1 and tiling.computation.extents[lane] % width == 0 and _stores_vectors(tiling, epilogue)
    lane_by_lane = is_lane_by_lane(*(consumer.value for consumer in epilogue))

    def write(numbers: Mapping[int, Expr], piece: Expr, e: Expr) -> Stmt:
        order = [*(numbers[p] for p in tiling.order[:-1]), piece * index(width) + e]
        number = flat(order, [tiling.register[p] for p in tiling.order])
        return _write(tiling, epilogue, load(accumulators, [number]), starts, at, numbers, piece, e)

    def lanes(element: Callable[[Expr], Stmt]) -> Stmt:
        return store_lanes(width, element) if lane_by_lane else loop(width, VECTORIZED, "e", element)

    def pieces(numbers: Mapping[int, Expr]) -> Stmt:
        def one(piece: Expr) -> Stmt:
            if vectors:
                body = lanes(lambda e: write(numbers, piece, e))
                return _guarded(tiling, starts, at, {**numbers, lane: (piece, index(0))}, body)
            return loop(
                width,
                UNROLLED,
                "e",
                lambda e: _guarded(tiling, starts, at, {**numbers, lane: (piece, e)}, write(numbers, piece, e)),
            )

        return unrolled(tiling.register[lane] // width, "piece", one)

    return over_registers(tiling, tiling.order[:-1], pieces)


def _write(
    tiling: SimtTiling,
    epilogue: Sequence[Computation],
    value: Expr,
    starts: Mapping[int, Expr],
    at: Mapping[int, Expr],
    numbers: Mapping[int, Expr],
    piece: Expr,
    e: Expr,
) -> Stmt:
    """Store ``value``, the element ``e`` of a piece along the lane axis and ``numbers`` along the others."""
    lane, variables = tiling.lane, tiling.computation.variables
    place = {p: starts[p] + tiling.register_element(p, at[p], numbers[p]) for p in tiling.spatial if p != lane}
    place[lane] = starts[lane] + tiling.within(lane, at[lane], piece, e)
    table = [(variables[p], as_index(x, variables[p])) for p, x in place.items()]
    return store_element(tiling.computation, epilogue, value, table)


def _stores_vectors(tiling: SimtTiling, epilogue: Sequence[Computation]) -> bool:
    """Whether the pieces of the lane axis are vectors of the output, and of all that the epilogue reads."""
    element = tiling.variable("e")
    numbers = {p: tiling.variable(f"r{p}") for p in tiling.spatial}
    value = tirx.const(0, tiling.accumulator_dtype)
    probe = _write(
        tiling, epilogue, value, tiling.any_starts(), tiling.any_threads(), numbers, tiling.variable("g"), element
    )
    return is_vector_store(probe, element, tiling.piece[tiling.lane])


def over_registers(tiling: SimtTiling, axes: Sequence[int], body: Callable[[Mapping[int, Expr]], Stmt]) -> Stmt:
    """``body`` for every combination of the thread's elements along ``axes``, unrolled."""

    def inner(position: int, numbers: Mapping[int, Expr]) -> Stmt:
        if position == len(axes):
            return body(numbers)
        p = axes[position]
        name = f"{tiling.computation.variables[p].name}_r"
        return unrolled(tiling.register[p], name, lambda v: inner(position + 1, {**numbers, p: v}))

    return inner(0, {})


def _guarded(
    tiling: SimtTiling,
    starts: Mapping[int, Expr],
    at: Mapping[int, Expr],
    numbers: Mapping[int, Expr | tuple[Expr, ...]],
    body: Stmt,
) -> Stmt:
    """``body``, if the element is inside the output: tested along axes that the tiles do not divide."""
    condition: Expr | None = None
    for p in tiling.spatial:
        if not tiling.overhangs(p):
            continue
        number = numbers[p]
        if isinstance(number, tuple):
            within = tiling.within(p, at[p], *number)
        else:
            within = tiling.register_element(p, at[p], number)
        inside = starts[p] + within < index(tiling.computation.extents[p])
        condition = inside if condition is None else tirx.And(condition, inside)
    return body if condition is None else tirx.IfThenElse(condition, body, None)


def is_vector_store(statement: Stmt, element: Var, width: int) -> bool:
    """Whether the stores of ``statement`` for ``element`` in range(width), and its loads, are aligned vectors."""
    stores: list[BufferStore] = []
    structural_walk(statement, (BufferStore, stores.append))
    return all(
        is_vector_access(item.buffer, item.indices, element, width) and is_vector(item.value, element, width)
        for item in stores
    )


def join_groups(tiling: SimtTiling, accumulators: Buffer, partial: Buffer, group: Expr, thread: Expr) -> list[Stmt]:
    """Statements that add the sums of all thread groups to those of group 0, half of them at a time.

    Worked example, 8 groups: 4..7 leave their sums in shared memory, 0..3 add them; then 2..3, then 1. ``partial``
    holds half of the groups' sums, element by element, so that lanes read and write neighbours.
    """
    computation, statements = tiling.computation, []
    own = tiling.group_threads

    def slot(first: Expr, number: Expr) -> list[Expr]:
        return [(first * index(tiling.accumulators) + number) * index(own) + thread]

    half = tiling.split // 2
    while half >= 1:
        upper = tirx.And(group >= index(half), group < index(2 * half))
        lower = group < index(half)

        def leave(i: Expr, half: int = half) -> Stmt:
            return store(partial, load(accumulators, [i]), slot(group - index(half), i))

        def add(i: Expr) -> Stmt:
            return store(
                accumulators, combine(computation.combiner, load(accumulators, [i]), load(partial, slot(group, i))), [i]
            )

        statements.append(tirx.IfThenElse(upper, unrolled(tiling.accumulators, "i", leave), None))
        statements.append(tirx.IfThenElse(lower, unrolled(tiling.accumulators, "i", add), None))
        half //= 2
    return statements
