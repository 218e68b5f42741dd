"""Products whose vectors are queries: register tiles of rows by SIMD registers, a scalar of each row for all lanes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm_ext._tvm import Buffer, Expr, Stmt
from tvm_ext.ir.build_ir import (
    SERIAL,
    UNROLLED,
    VECTORIZED,
    in_tiles,
    index,
    load,
    loop,
    sequence,
    store,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class QueryLanes:
    """``count`` SIMD registers of ``width`` lanes."""

    width: int
    count: int

    @property
    def total(self) -> int:
        return self.width * self.count

    def each(self, body: Callable[[Expr], Stmt]) -> Stmt:
        """``body`` for every lane, register by register."""

        def register(first: int) -> Stmt:
            return loop(self.width, VECTORIZED, "v", lambda v: body(index(first) + v))

        return sequence(*map(register, range(0, self.total, self.width)))


def product(
    sums: Buffer,
    rows: int,
    tile: int,
    lanes: QueryLanes,
    depth: int,
    *,
    scalar: Callable[[Expr, Expr], Expr],
    vector: Callable[[Expr, Expr], Expr],
    start: Callable[[Expr, Expr], Expr],
    finish: Callable[[Expr, Expr, Expr], Stmt],
) -> Stmt:
    """``finish(row, lane, start(row, lane) + sum over k of scalar(row, k) * vector(k, lane))`` for each row and lane.

    In tiles of ``tile`` rows, whose accumulators, ``sums``, stay in registers; the last tile may be smaller.
    """

    def rows_from(first: Expr, count: int) -> Stmt:
        def each(body: Callable[[Expr, Expr], Stmt]) -> Stmt:
            return loop(count, UNROLLED, "r", lambda row: lanes.each(lambda lane: body(row, lane)))

        def step(k: Expr) -> Stmt:
            return each(
                lambda row, lane: store(
                    sums, load(sums, [row, lane]) + scalar(first + row, k) * vector(k, lane), [row, lane]
                )
            )

        return sequence(
            each(lambda row, lane: store(sums, start(first + row, lane), [row, lane])),
            loop(depth, SERIAL, "k", step),
            each(lambda row, lane: finish(first + row, lane, load(sums, [row, lane]))),
        )

    return in_tiles(rows, tile, "tile", rows_from)
