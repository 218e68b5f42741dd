"""How an rProgram divides its operator on a CPU: the numbers that the emitter's loops and stores are written from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from tvm_ext._tvm import Expr, TensorLoad, Var, structural_equal
from tvm_ext.analysis.computations import Computation, dtype_of, replace_equal_loads
from tvm_ext.analysis.live_taps import LiveTaps
from tvm_ext.analysis.predicates import factors_of
from tvm_ext.analysis.tensor_expr import TensorExpr
from tvm_ext.cost.cpu_tiles import tile_of
from tvm_ext.cost.dot_products import DotProduct, dot_product, is_grouped_already
from tvm_ext.cost.reduction_chunks import ReductionChunks, reduction_chunks, with_longer_runs
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.ir.build_ir import INDEX_DTYPE, accumulator_dtype, bind_at, in_dtype, index, lanes_of, load, vectors
from tvm_ext.records.rprogram import RProgram
from tvm_ext.support.arithmetic import ceil_div

from .ahead import EpilogueReads, NextPanel, NextTile, epilogue_reads, next_panel, next_tiles
from .packing import PackedInput, PhasePack, RowPack, pack_input, pack_rows


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TileLayout:
    """The register tiling of one anchor. Axes are positions in ``computation.variables`` and ``expr.axes`` alike.

    ``tile`` is the L0 size of each spatial axis, ``counts`` its number of tiles (the last may be smaller), ``full``
    the number of whole ones, ``blocks`` its (L2, L1) blocks in tiles.
    """

    computation: Computation
    expr: TensorExpr
    epilogue: tuple[Computation, ...]
    update: Expr  # the anchor's over its axis variables, packed loads addressed through panel and lane
    vector: int
    rows: tuple[int, ...]  # spatial axes other than the vector axis
    reduction: tuple[int, ...]  # without what one step of a dot-product instruction takes
    tile: dict[int, int]
    counts: dict[int, int]
    full: dict[int, int]
    blocks: dict[int, tuple[int, int]]
    order: tuple[int, ...]  # of the outer loops, outermost first
    lanes: int
    accumulator_dtype: str  # half precision is accumulated in float32
    packed: tuple[PackedInput | PhasePack | RowPack, ...]
    round_lanes: bool  # whether a partial register may be computed whole
    chunks: ReductionChunks | None  # of the reduction; None where it stays whole
    live: tuple[LiveTaps, ...]  # whose loops only go over those that meet an element
    dot: DotStep | None  # a step by an instruction; None where it is plain arithmetic
    next_panel: NextPanel | None  # of the weights, to be asked for; None where that is nothing to gain by
    next_tiles: tuple[NextTile, ...]  # of what streams through the register tiles, likewise
    reads: EpilogueReads | None  # of the epilogue, likewise
    panel: Expr  # variables of the packed addressing: which panel of the vector axis, and which lane in it
    lane: Expr

    @property
    def matrix(self) -> DotStep | None:
        """A step by tiles of a matrix unit; None where registers are vectors."""
        return self.dot if self.dot is not None and self.dot.product.has_tile_registers else None

    @property
    def spatial(self) -> tuple[int, ...]:
        return tuple(p for p, kind in enumerate(self.computation.kinds) if kind == "spatial")

    @property
    def row_names(self) -> list[str]:
        """Of the loops over a tile's rows."""
        return [f"{self.computation.variables[p].name}_r" for p in self.rows]

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
        start = {p: at[p] * index(self.tile[p]) for p in self.spatial}
        points = {p: start[p] + offset for p, offset in zip(self.rows, offsets, strict=True)}
        points |= dict(zip(self.reduction, ks, strict=False))
        if self.dot is not None:
            points |= dict.fromkeys(self.dot.product.axes, index(0))
        points[self.vector] = start[self.vector] + lane
        return [*bind_at(self.computation, points), (self.panel, at[self.vector]), (self.lane, lane)]


def lay_out(
    computation: Computation,
    expr: TensorExpr,
    epilogue: Sequence[Computation],
    program: RProgram,
    device: DeviceSpec,
    live: Sequence[LiveTaps] = (),
) -> TileLayout:
    """The layout of ``program`` with its fused ``epilogue``.

    Raises IllegalRewrite where it has no spatial axis to vectorise.
    """
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
    dot = dot_product(expr, device) if factors_of(computation) is not None else None
    taken = () if dot is None else dot.axes
    in_lane = taken[-1:] if dot is None or dot.rows is None or dot.has_tile_registers else taken
    reduction = tuple(p for p, kind in enumerate(computation.kinds) if kind == "reduce" and p not in taken)
    packed: tuple[PackedInput | PhasePack | RowPack, ...] = tuple(
        made
        for item, access in zip(computation.loads(), expr.inputs, strict=True)
        if not is_grouped_already(expr, access, dot)
        and (made := pack_input(item, access, computation, names, vector, tile[vector], lanes, device, in_lane))
        is not None
    )
    if dot is not None and dot.pieces:
        packed += (pack_rows(computation.loads()[dot.data], expr.inputs[dot.data], computation, names, dot),)
    order = tuple(spatial[place] for place in loops.order)
    blocks = dict(zip(spatial, zip(loops.outer, loops.inner, strict=True), strict=True))
    rows = tuple(p for p in spatial if p != vector)
    panel_after = None
    if chunks is None and order[0] == vector and blocks[vector][0] == 1:
        own_axes = (vector, *reduction, vector, *in_lane)
        panel_after = next_panel(packed, own_axes, prod(counts[p] for p in rows), program, device)
    panel, lane = Var("panel", INDEX_DTYPE), Var("lane", INDEX_DTYPE)
    read = [(item.original, load(item.buffer, item.indices(computation.variables, panel, lane))) for item in packed]
    return TileLayout(
        computation=computation,
        expr=expr,
        epilogue=tuple(epilogue),
        update=in_dtype(replace_equal_loads(computation.value, read), dtype),
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
        live=tuple(taps for taps in live if taps.taps in (reduction if chunks is None else reduction[1:])),
        dot=None if dot is None else _dot_step(dot, computation, read),
        next_panel=panel_after,
        next_tiles=() if dot and dot.has_tile_registers else next_tiles(computation, expr, loops, reduction, device),
        reads=epilogue_reads(computation, expr, epilogue, device),
        panel=panel,
        lane=lane,
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DotStep:
    """A step of a ``product`` by an instruction: the loads of the first of a group of data, and of weights in their
    panel.
    """

    product: DotProduct
    data: TensorLoad
    weights: TensorLoad


def _dot_step(dot: DotProduct, computation: Computation, packed: Sequence[tuple[TensorLoad, TensorLoad]]) -> DotStep:
    data, weights = (
        next((made for original, made in packed if structural_equal(original, load)), load)
        for load in (computation.loads()[place] for place in (dot.data, dot.weights))
    )
    return DotStep(product=dot, data=data, weights=weights)


def _only_padded_panels(
    computation: Computation, expr: TensorExpr, vector_axis: str, packed: Sequence[PackedInput | PhasePack | RowPack]
) -> bool:
    """Whether every load along the vector axis is from a panel padded with zeros, so that extra lanes are harmless."""
    return all(
        access.stride(vector_axis) == 0
        or any(item.is_constant and structural_equal(read, item.original) for item in packed)
        for read, access in zip(computation.loads(), expr.inputs, strict=True)
    )
