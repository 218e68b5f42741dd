"""Where a thread's warp is in its threadblock's tile."""

from __future__ import annotations

from dataclasses import dataclass

from tvm_ext._tvm import Expr, tirx
from tvm_ext.analysis.gemm_form import TileSplit
from tvm_ext.devices.gpu import WARP
from tvm_ext.ir.build_ir import index


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class WarpPlace:
    """A thread's lane and the first row and column of its warp's tile within the threadblock's."""

    lane: Expr
    row: Expr
    column: Expr


def place_of(thread: Expr, split: TileSplit, lanes: int = WARP) -> WarpPlace:
    """Warps, of ``lanes`` threads each, are numbered along the columns first."""
    warp, lane = tirx.floordiv(thread, index(lanes)), tirx.floormod(thread, index(lanes))
    along = split.warps_along_columns
    row = tirx.floordiv(warp, index(along)) * index(split.warp_rows)
    column = tirx.floormod(warp, index(along)) * index(split.warp_columns)
    return WarpPlace(lane=lane, row=row, column=column)
