"""What a task of an attention keeps beside registers; its size is linear in the block of keys and in the features."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm_ext._tvm import Buffer, Expr, Stmt
from tvm_ext.ir.build_ir import VECTORIZED, index, loop, new_buffer, sequence
from tvm_ext.records.attention import Attention, AttentionTiles

FLOAT = "float32"
"""What everything is computed in, half precision too."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Workspace:
    """Buffers of one task, in float32; ``width`` lanes hold its queries."""

    queries: Buffer  # [features, width]
    scores: Buffer  # [key block, width]
    results: Buffer  # [value features, width]
    high: Buffer  # [width], as the next four: the largest score so far
    next_high: Buffer  # with the block of keys at hand
    shift: Buffer  # what is taken off scores: that, or 0 where it is -inf
    total: Buffer
    factor: Buffer  # what sums so far are multiplied by
    sums: Buffer  # accumulators of a register tile
    square: Buffer  # [lanes, lanes], one square of registers before it is transposed
    turned: Buffer  # [lanes * lanes], and after
    terms: tuple[Buffer | None, ...]  # [key block, width] for each term that differs by query
    keys: Buffer | None  # [key block, features], where blocks of keys are copied
    values: Buffer | None  # [key block, value features], where blocks of values are

    @classmethod
    def of(cls, work: Attention, tiles: AttentionTiles) -> Workspace:
        width, block = tiles.query_block, min(tiles.key_block, work.keys)

        def space(name: str, *extents: int) -> Buffer:
            return new_buffer(extents, FLOAT, name, "local")

        copies_values = tiles.copies in ("block", "values")
        return cls(
            queries=space("queries", work.features, width),
            scores=space("scores", block, width),
            results=space("results", work.value_features, width),
            high=space("high", width),
            next_high=space("next_high", width),
            shift=space("shift", width),
            total=space("total", width),
            factor=space("factor", width),
            sums=space("sums", max(tiles.key_rows, tiles.feature_rows), width),
            square=space("square", tiles.lanes, tiles.lanes),
            turned=space("turned", tiles.lanes * tiles.lanes),
            terms=tuple(
                space(f"term{number}", block, width) if term.operand.row_stride else None
                for number, term in enumerate(work.terms)
            ),
            keys=space("keys", block, work.features) if tiles.copies == "block" else None,
            values=space("values", block, work.value_features) if copies_values else None,
        )

    @property
    def buffers(self) -> list[Buffer]:
        own = [self.queries, self.scores, self.results, self.high, self.next_high, self.shift, self.total]
        own += [self.factor, self.sums, self.square, self.turned]
        return [*own, *(item for item in (*self.terms, self.keys, self.values) if item is not None)]


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
