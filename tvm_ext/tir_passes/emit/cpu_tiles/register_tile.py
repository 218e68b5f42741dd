"""How an rProgram divides its operator on a CPU: the numbers that the emitter's loops and stores are written from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from tvm_ext._tvm import Expr, Var, structural_equal
from tvm_ext.analysis.computations import Computation, dtype_of
from tvm_ext.analysis.tensor_expr import TensorExpr
from tvm_ext.cost.cpu_tiles import tile_of
from tvm_ext.cost.reduction_chunks import ReductionChunks, reduction_chunks, with_longer_runs
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.ir.build_ir import INDEX_DTYPE, accumulator_dtype, as_index, index, lanes_of, vectors
from tvm_ext.records.rprogram import RProgram
from tvm_ext.support.arithmetic import ceil_div

from .ahead import NextPanel, next_panel
from .pack_inputs import PackedInput, pack_input
from .phase_pack import PhasePack


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TileLayout:
    """The register tiling of one anchor. Axes are positions in ``computation.variables`` and ``expr.axes`` alike.

    ``tile`` is the L0 size of each spatial axis, ``counts`` its number of tiles (the last may be smaller), ``full``
    the number of whole ones, ``blocks`` its (L2, L1) blocks in tiles.
    """

    computation: Computation
    expr: TensorExpr
    vector: int
    rows: tuple[int, ...]  # spatial axes other than the vector axis
    reduction: tuple[int, ...]
    tile: dict[int, int]
    counts: dict[int, int]
    full: dict[int, int]
    blocks: dict[int, tuple[int, int]]
    order: tuple[int, ...]  # of the outer loops, outermost first
    lanes: int
    accumulator_dtype: str  # half precision is accumulated in float32
    packed: tuple[PackedInput | PhasePack, ...]
    round_lanes: bool  # whether a partial register may be computed whole
    chunks: ReductionChunks | None  # of the reduction; None where it stays whole
    ahead: NextPanel | None  # of the weights, to be asked for; None where that is nothing to gain by
    panel: Expr  # variables of the packed addressing: which panel of the vector axis, and which lane in it
    lane: Expr

    @property
    def spatial(self) -> tuple[int, ...]:
        return tuple(p for p, kind in enumerate(self.computation.kinds) if kind == "spatial")

    @property
    def names(self) -> list[str]:
        return [axis.name for axis in self.expr.axes]

    def tail(self, axis: int) -> int:
        """Size of the smaller last tile; 0 where the tile divides the axis."""
        return self.computation.extents[axis] - self.full[axis] * self.tile[axis]

    def pieces(self, size: int) -> list[tuple[int, int]]:
        """(first lane, lanes) of each SIMD register over ``size`` lanes of the vector axis."""
        return vectors(ceil_div(size, self.lanes) * self.lanes if self.round_lanes else size, self.lanes)

    def element(
        self, at: dict[int, Expr], offsets: Sequence[Expr], lane: Expr, ks: Sequence[Expr] = ()
    ) -> list[tuple[Var, Expr]]:
        """What each axis variable of the anchor is, for one element of the tile at tile coordinates ``at``."""
        variables = self.computation.variables
        table = [
            (variables[p], at[p] * index(self.tile[p]) + offset) for p, offset in zip(self.rows, offsets, strict=True)
        ]
        table += [(variables[p], k) for p, k in zip(self.reduction, ks, strict=False)]
        table.append((variables[self.vector], at[self.vector] * index(self.tile[self.vector]) + lane))
        table += [(self.panel, at[self.vector]), (self.lane, lane)]
        return [(variable, as_index(value, variable)) for variable, value in table]


def lay_out(computation: Computation, expr: TensorExpr, program: RProgram, device: DeviceSpec) -> TileLayout:
    """The layout of ``program``; raises IllegalRewrite where it has no spatial axis to vectorise."""
    names = [axis.name for axis in expr.axes]
    spatial = [p for p, kind in enumerate(computation.kinds) if kind == "spatial"]
    loops = tile_of(program, expr)
    chunks = reduction_chunks(loops, expr, device)
    if chunks is not None:
        loops = with_longer_runs(loops, expr, device)
    vector = spatial[loops.vector]
    tile = dict(zip(spatial, loops.register, strict=True))
    counts = {p: ceil_div(computation.extents[p], tile[p]) for p in spatial}
    dtype = accumulator_dtype(dtype_of(computation.target))
    lanes = lanes_of(dtype, device.register_bytes)
    reduction = tuple(p for p, kind in enumerate(computation.kinds) if kind == "reduce")
    packed = tuple(
        made
        for load, access in zip(computation.loads(), expr.inputs, strict=True)
        if (made := pack_input(load, access, computation, names, vector, tile[vector], lanes, device)) is not None
    )
    order = tuple(spatial[place] for place in loops.order)
    blocks = dict(zip(spatial, zip(loops.outer, loops.inner, strict=True), strict=True))
    rows = tuple(p for p in spatial if p != vector)
    ahead = None
    if chunks is None and order[0] == vector and blocks[vector][0] == 1:
        ahead = next_panel(packed, vector, reduction, prod(counts[p] for p in rows), program, device)
    return TileLayout(
        computation=computation,
        expr=expr,
        vector=vector,
        rows=rows,
        reduction=reduction,
        tile=tile,
        counts=counts,
        full={p: computation.extents[p] // tile[p] for p in spatial},
        blocks=blocks,
        order=order,
        lanes=lanes,
        accumulator_dtype=dtype,
        packed=packed,
        round_lanes=_only_padded_panels(computation, expr, names[vector], packed),
        chunks=chunks,
        ahead=ahead,
        panel=Var("panel", INDEX_DTYPE),
        lane=Var("lane", INDEX_DTYPE),
    )


def _only_padded_panels(
    computation: Computation, expr: TensorExpr, vector_axis: str, packed: Sequence[PackedInput | PhasePack]
) -> bool:
    """Whether every load along the vector axis is from a panel padded with zeros, so that extra lanes are harmless."""
    for load, access in zip(computation.loads(), expr.inputs, strict=True):
        if access.stride(vector_axis) == 0:
            continue
        if not any(item.is_constant and structural_equal(load, item.original) for item in packed):
            return False
    return True
