"""The end of a GPU kernel's tile: sums of thread groups are joined, pass the fused epilogue and are stored."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from tvm_ext._tvm import Buffer, BufferStore, Expr, Stmt, Var, nodes_in, tirx
from tvm_ext.analysis.computations import Computation
from tvm_ext.ir.build_ir import UNROLLED, VECTORIZED, accumulate, bind_at, flat, if_all, index, load, loop, store
from tvm_ext.ir.simt_ir import unrolled
from tvm_ext.ir.stores import is_lane_by_lane, store_element, store_lanes

from .copy import is_vector, is_vector_access
from .tiling import SimtTiling

Numbers = Mapping[int, Expr]
"""By spatial axis, which of a thread's elements."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TileStore:
    """Stores the elements of the thread at position ``at`` of the tile that begins at ``starts``."""

    tiling: SimtTiling
    epilogue: tuple[Computation, ...]
    starts: Mapping[int, Expr]
    at: Mapping[int, Expr]

    def statement(self, sums: Buffer) -> Stmt:
        tiling = self.tiling
        lane, width = tiling.lane, tiling.piece[tiling.lane]
        lane_by_lane = is_lane_by_lane(*(consumer.value for consumer in self.epilogue))

        def write(numbers: Numbers, piece: Expr, e: Expr) -> Stmt:
            order = [*(numbers[p] for p in tiling.order[:-1]), piece * index(width) + e]
            element = load(sums, [flat(order, [tiling.register[p] for p in tiling.order])])
            return self._write(element, self._place(numbers, piece, e))

        def guarded(numbers: Numbers, piece: Expr, e: Expr, body: Stmt) -> Stmt:
            """Tested along axes that the tiles do not divide."""
            place, extents = self._place(numbers, piece, e), tiling.computation.extents
            return if_all([place[p] < index(extents[p]) for p in tiling.spatial if tiling.overhangs(p)], body)

        def vector(numbers: Numbers, piece: Expr) -> Stmt:
            def element(e: Expr) -> Stmt:
                return write(numbers, piece, e)

            lanes = store_lanes(width, element) if lane_by_lane else loop(width, VECTORIZED, "e", element)
            return guarded(numbers, piece, index(0), lanes)

        def elements(numbers: Numbers, piece: Expr) -> Stmt:
            return loop(width, UNROLLED, "e", lambda e: guarded(numbers, piece, e, write(numbers, piece, e)))

        one = vector if self._is_vector() else elements

        def pieces(numbers: Numbers) -> Stmt:
            return unrolled(tiling.register[lane] // width, "piece", lambda piece: one(numbers, piece))

        return over_registers(tiling, tiling.order[:-1], pieces)

    def _place(self, numbers: Numbers, piece: Expr, e: Expr) -> dict[int, Expr]:
        """Where element ``e`` of a piece along the lane axis and ``numbers`` along the others lies."""
        tiling, lane = self.tiling, self.tiling.lane
        within = {p: tiling.register_element(p, self.at[p], numbers[p]) for p in tiling.spatial if p != lane}
        within[lane] = tiling.within(lane, self.at[lane], piece, e)
        return {p: self.starts[p] + x for p, x in within.items()}

    def _write(self, value: Expr, place: Mapping[int, Expr]) -> Stmt:
        computation = self.tiling.computation
        return store_element(computation, self.epilogue, value, bind_at(computation, place))

    def _is_vector(self) -> bool:
        """Whether the pieces of the lane axis are vectors of the output, and of all that the epilogue reads."""
        tiling = self.tiling
        width = tiling.piece[tiling.lane]
        if width == 1 or tiling.computation.extents[tiling.lane] % width:
            return False
        element = tiling.variable("e")
        numbers = {p: tiling.variable(f"r{p}") for p in tiling.spatial}
        anywhere = replace(self, starts=tiling.any_starts(), at=tiling.any_threads())
        place = anywhere._place(numbers, tiling.variable("g"), element)
        return is_vector_store(anywhere._write(tirx.const(0, tiling.accumulator_dtype), place), element, width)


def over_registers(tiling: SimtTiling, axes: Sequence[int], body: Callable[[Numbers], Stmt]) -> Stmt:
    """``body`` for every combination of the thread's elements along ``axes``, unrolled."""

    def inner(position: int, numbers: Numbers) -> Stmt:
        if position == len(axes):
            return body(numbers)
        p = axes[position]
        name = f"{tiling.computation.variables[p].name}_r"
        return unrolled(tiling.register[p], name, lambda v: inner(position + 1, {**numbers, p: v}))

    return inner(0, {})


def is_vector_store(statement: Stmt, element: Var, width: int) -> bool:
    """Whether the stores of ``statement`` for ``element`` in range(width), and its loads, are aligned vectors."""
    stores = nodes_in(statement, BufferStore)
    return all(
        is_vector_access(item.buffer, item.indices, element, width) and is_vector(item.value, element, width)
        for item in stores
    )


def join_groups(tiling: SimtTiling, accumulators: Buffer, partial: Buffer, group: Expr, thread: Expr) -> list[Stmt]:
    """Statements that add the sums of all thread groups to those of group 0, half of them at a time.

    Worked example, 8 groups: 4..7 leave their sums in shared memory, 0..3 add them; then 2..3, then 1. ``partial``
    holds half of the groups' sums, element by element, so that lanes read and write neighbours.
    """
    own, statements = tiling.group_threads, []

    def slot(first: Expr, number: Expr) -> list[Expr]:
        return [(first * index(tiling.accumulators) + number) * index(own) + thread]

    def each(body: Callable[[Expr], Stmt]) -> Stmt:
        return unrolled(tiling.accumulators, "i", body)

    def add(i: Expr) -> Stmt:
        return accumulate(accumulators, [i], load(partial, slot(group, i)), tiling.computation.combiner)

    half = tiling.split // 2
    while half >= 1:
        first = group - index(half)
        upper = [group >= index(half), group < index(2 * half)]
        left = each(lambda i, first=first: store(partial, load(accumulators, [i]), slot(first, i)))  # type: ignore[misc]
        statements += [if_all(upper, left), if_all([group < index(half)], each(add))]
        half //= 2
    return statements
