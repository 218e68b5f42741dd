"""Where the threadblocks of an implicit GEMM are: their order over the output, and split-K."""

from __future__ import annotations

from dataclasses import dataclass

from tvm_ext._tvm import Expr, tirx
from tvm_ext.ir.build_ir import index
from tvm_ext.support.arithmetic import ceil_div


@dataclass(frozen=True, kw_only=True, slots=True)
class GemmGrid:
    """``rows`` x ``columns`` tiles for each batch, each computed by ``splits`` blocks that share its reduction.

    Tiles are taken in groups of ``group`` rows, column by column: blocks that run at the same time then share panels of
    both factors, which stay in the device's cache. Worked example: 108 blocks of an 32 x 32 grid read 4 panels of rows
    and 32 of columns in row-major order, 8 and 14 in groups of 8 rows.
    """

    batch: int
    rows: int
    columns: int
    splits: int
    group: int

    @property
    def blocks(self) -> int:
        return self.batch * self.rows * self.columns * self.splits


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BlockPlace:
    """Which tile a block computes, and which share of its reduction."""

    batch: Expr
    row: Expr
    column: Expr
    split: Expr


def place_block(grid: GemmGrid, block: Expr) -> BlockPlace:
    """The place of ``block`` in ``range(grid.blocks)``: batches and splits outermost."""
    tiles = grid.rows * grid.columns
    outer, tile = _divide(block, tiles, grid.batch * grid.splits)
    split, batch = _divide(outer, grid.batch, grid.splits)
    group, within = _divide(tile, grid.group * grid.columns, ceil_div(grid.rows, grid.group))
    height: Expr = index(grid.group)
    if grid.rows % grid.group:  # the last group has fewer rows
        height = tirx.min(height, index(grid.rows) - group * index(grid.group))
    elif grid.group == 1:
        return BlockPlace(batch=batch, row=group, column=within, split=split)
    row = group * index(grid.group) + tirx.floormod(within, height)
    return BlockPlace(batch=batch, row=row, column=tirx.floordiv(within, height), split=split)


def _divide(value: Expr, size: int, count: int) -> tuple[Expr, Expr]:
    """(value // size, value % size) of a value below ``size * count``."""
    if count == 1:
        return index(0), value
    if size == 1:
        return value, index(0)
    return tirx.floordiv(value, index(size)), tirx.floormod(value, index(size))
