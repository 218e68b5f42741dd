"""A register tile whose vector registers hold sums of two rows by two lanes each: Arm's usmmla and bfmmla.

    a, b: rows i and i + 1 of four lanes     a = i0 i1 i2 i3      b = j0 j1 j2 j3
    their two registers in the reduction     i0 i1 j0 j1          i2 i3 j2 j3

The turn from one to the other is its own inverse, two shuffles for two registers, before and behind the reduction. An
odd last row is multiplied twice in place of a pair.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod

from tvm_ext._tvm import Buffer, Expr, Stmt, tirx
from tvm_ext.analysis.computations import static_shape, substitute
from tvm_ext.ir.build_ir import allocate, flat, if_all, index, load, new_buffer, sequence, store
from tvm_ext.ir.dot_ir import dot_of_pairs
from tvm_ext.support.arithmetic import ceil_div

from .layout import DotStep
from .register_tile import RegisterTile, along_last, over_registers

TURNED = ((0, 1, 4, 5), (2, 3, 6, 7))
"""Lanes of two registers: the lower halves of both, then the upper ones."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PairedTile(RegisterTile):
    """A register tile of which an instruction takes two rows at once, along one of its axes."""

    def reduce(self, first: Expr | None = None, count: int | Expr | None = None) -> Stmt:
        """The reduction in registers of pairs: the sums are turned into these, and back behind it."""
        sums = self.sums.buffer
        paired = new_buffer(
            (2 * prod(self._pairs), static_shape(sums)[1]), self.layout.accumulator_dtype, "pairs", "local"
        )
        steps = RegisterTile.reduce(replace(self, sums=replace(self.sums, buffer=paired)), first, count)
        return sequence(allocate(paired), self._turned(sums, paired), steps, self._turned(paired, sums))

    @property
    def _along(self) -> int:
        """Which of the rows' axes has the pairs."""
        step = self.layout.dot
        assert step is not None and step.product.rows is not None
        return self.layout.rows.index(step.product.rows)

    @property
    def _pairs(self) -> list[int]:
        """The rows' sizes, in pairs along one."""
        return [ceil_div(size, 2) if place == self._along else size for place, size in enumerate(self.rows)]

    def _over_pairs(self, body: Callable[[tuple[int, int], Expr, tuple[Expr, ...], tuple[Expr, ...]], Stmt]) -> Stmt:
        """``body`` of (first lane, lanes), the first of a pair's two registers, and offsets of its two rows."""
        along, last = self._along, index(self.rows[self._along] - 1)

        def pair(piece: tuple[int, int], at: tuple[Expr, ...]) -> Stmt:
            upper = at[along] * 2
            rows = ((*at[:along], row, *at[along + 1 :]) for row in (upper, tirx.min(upper + 1, last)))
            return body(piece, flat(at, self._pairs) * 2, *rows)

        return over_registers(self.layout, self._pairs, self.layout.pieces(self.width), pair)

    def _turned(self, source: Buffer, target: Buffer) -> Stmt:
        """Statements that put sums by rows into registers of pairs, or back: ``source`` into ``target``."""

        def one(piece: tuple[int, int], register: Expr, upper: tuple[Expr, ...], lower: tuple[Expr, ...]) -> Stmt:
            lanes = tirx.Ramp(index(piece[0]), index(1), piece[1])
            rows, registers = [flat(row, self.rows) for row in (upper, lower)], [register, register + 1]
            taken, put = (registers, rows) if target.same_as(self.sums.buffer) else (rows, registers)
            both = [load(source, [row, lanes]) for row in taken]
            first, second = (
                store(target, tirx.Shuffle(both, [index(lane) for lane in own]), [row, lanes])
                for own, row in zip(TURNED, put, strict=True)
            )
            return sequence(
                first, second if put is registers else if_all([upper[self._along] < lower[self._along]], second)
            )

        return self._over_pairs(one)

    def _by_instruction(self, step: DotStep, ks: tuple[Expr, ...]) -> Stmt:
        """The registers of sums with two groups of products each."""
        layout, row = self.layout, step.product.instruction
        assert row.tile is not None
        depth = row.tile.groups * row.group

        def one(piece: tuple[int, int], register: Expr, upper: tuple[Expr, ...], lower: tuple[Expr, ...]) -> Stmt:
            first, length = piece
            tables = [layout.element(self.at, offsets, index(first), ks) for offsets in (upper, lower)]
            data = [along_last(substitute(step.data, table), depth) for table in tables]
            statements = []
            for half in range(2):
                lane = index(first + half * length // 2)
                place = [register + half, tirx.Ramp(index(first), index(1), length)]
                groups = substitute(step.weights, layout.element(self.at, upper, lane, ks))
                weights = along_last(groups, depth * length // 2)
                statements.append(
                    store(self.sums.buffer, dot_of_pairs(row, load(self.sums.buffer, place), data, weights), place)
                )
            return sequence(*statements)

        return self._over_pairs(one)
