"""How an rProgram divides its operator on a CPU: the numbers that the emitter's loops and stores are written from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from tvm_ext._tvm import Buffer, Expr, Stmt, TensorLoad, Var, structural_equal, tirx
from tvm_ext.analysis.computation_exprs import itemsize_bytes
from tvm_ext.analysis.computations import Computation, dtype_of, replace_equal_loads
from tvm_ext.analysis.live_taps import LiveTaps
from tvm_ext.analysis.predicates import factors_of
from tvm_ext.analysis.tensor_expr import TensorExpr
from tvm_ext.cost.cpu_tiles import tile_of
from tvm_ext.cost.dot_products import DotProduct, dot_product
from tvm_ext.cost.reduction_chunks import ReductionChunks, reduction_chunks, with_longer_runs
from tvm_ext.devices.dot_instructions import DotInstruction
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.devices.machine import Machine
from tvm_ext.ir.build_ir import (
    INDEX_DTYPE,
    accumulator_dtype,
    bind_at,
    in_dtype,
    index,
    lanes_of,
    load,
    prefetch,
    vectors,
)
from tvm_ext.records.rprogram import RProgram
from tvm_ext.support.arithmetic import ceil_div

from .packing import PackedInput, PhasePack, pack_input


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
    reduction: tuple[int, ...]  # without the group of a dot-product instruction, which one step takes
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
    live: tuple[LiveTaps, ...]  # whose loops only go over those that meet an element
    dot: DotStep | None  # a step by an instruction; None where it is plain arithmetic
    ahead: NextPanel | None  # of the weights, to be asked for; None where that is nothing to gain by
    panel: Expr  # variables of the packed addressing: which panel of the vector axis, and which lane in it
    lane: Expr

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
            points[self.dot.axis] = index(0)
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
    group = None if dot is None else dot.axis
    reduction = tuple(p for p, kind in enumerate(computation.kinds) if kind == "reduce" and p != group)
    packed = tuple(
        made
        for item, access in zip(computation.loads(), expr.inputs, strict=True)
        if (made := pack_input(item, access, computation, names, vector, tile[vector], lanes, device, group))
        is not None
    )
    order = tuple(spatial[place] for place in loops.order)
    blocks = dict(zip(spatial, zip(loops.outer, loops.inner, strict=True), strict=True))
    rows = tuple(p for p in spatial if p != vector)
    ahead = None
    if chunks is None and order[0] == vector and blocks[vector][0] == 1:
        own_axes = (vector, *reduction, vector, *(() if group is None else (group,)))
        ahead = _next_panel(packed, own_axes, prod(counts[p] for p in rows), program, device)
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
        live=tuple(taps for taps in live if chunks is None or taps.taps != reduction[0]),
        dot=None if dot is None else _dot_step(dot, computation, read),
        ahead=ahead,
        panel=panel,
        lane=lane,
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DotStep:
    """A step by ``instruction``: the loads of the first of a group of data, and of weights in their panel.

    ``axis`` is that of the group.
    """

    instruction: DotInstruction
    axis: int
    data: TensorLoad
    weights: TensorLoad


def _dot_step(dot: DotProduct, computation: Computation, packed: Sequence[tuple[TensorLoad, TensorLoad]]) -> DotStep:
    loads = computation.loads()
    (weights,) = (made for original, made in packed if structural_equal(original, loads[dot.weights]))
    return DotStep(instruction=dot.instruction, axis=dot.axis, data=loads[dot.data], weights=weights)


def _only_padded_panels(
    computation: Computation, expr: TensorExpr, vector_axis: str, packed: Sequence[PackedInput | PhasePack]
) -> bool:
    """Whether every load along the vector axis is from a panel padded with zeros, so that extra lanes are harmless."""
    return all(
        access.stride(vector_axis) == 0
        or any(item.is_constant and structural_equal(read, item.original) for item in packed)
        for read, access in zip(computation.loads(), expr.inputs, strict=True)
    )


# --- the next panel ---------------------------------------------------------------------------------------------------
LEAST_GAIN = 0.03
"""Of a kernel's time, what reading its weights from memory must take, for them to be asked for."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class NextPanel:
    """Each step of a reduction asks for the next ``elements`` of the panel behind its own, while tiles of rows use that
    one: else the first of these would wait for memory. ``panels`` are those of ``buffer``, ``steps`` the extents of the
    reduction.

    Worked example, 100 x 256 times 256 x 512 on a core of a Cascade Lake: a panel of 64 columns is 64 KiB, which take
    7.5 us from memory. A tile of 5 rows computes 1.1 us, but the first one of each panel would take as long as the
    panel. 20 tiles of rows go over a panel's 256 steps, and each step asks for a twentieth of what one of its own
    reads: 16 bytes. Where the weights are in a cache already, the questions cost nothing: a step issues two dozen
    multiply-adds beside.
    """

    buffer: Buffer
    panels: int
    steps: tuple[int, ...]
    elements: int
    dims: int  # of the buffer behind those of the steps: lanes, and groups

    def ask(self, panel: Expr, row: Expr, ks: Sequence[Expr]) -> Stmt:
        """The question of step ``ks`` of the tile of rows number ``row``; behind the last panel, for that itself."""
        number = row
        for k, extent in zip(ks, self.steps, strict=True):
            number = number * index(extent) + k
        following = tirx.min(panel + index(1), index(self.panels - 1))
        inner = [index(0)] * (len(ks) + self.dims - 1)
        return prefetch(load(self.buffer, [following, *inner, number * index(self.elements)]))


def _next_panel(
    packed: Sequence[PackedInput | PhasePack],
    axes: tuple[int, ...],
    row_tiles: int,
    program: RProgram,
    device: DeviceSpec,
) -> NextPanel | None:
    """What the ``row_tiles`` tiles that use a panel ask for; None where weights are no panels of one constant by
    ``axes``, where
    they hardly count, or where there are so few tiles that a step would have to ask for several lines.
    """
    own = [item for item in packed if isinstance(item, PackedInput) and item.is_constant]
    if len(own) != 1 or own[0].axes != axes or own[0].extents[0] < 2:
        return None
    (weights,) = own
    itemsize = itemsize_bytes(dtype_of(weights.buffer))
    dims = len(axes) - 1 - axes[1:].index(axes[0])
    elements = ceil_div(prod(weights.extents[-dims:]), row_tiles)
    size_bytes = prod(weights.extents) * itemsize
    memory, first = device.lowest_layer, device.layers[1]
    if size_bytes <= (first.capacity_bytes or 0) or elements * itemsize > memory.transaction_bytes:
        return None
    if size_bytes / Machine(device).rate(memory) < LEAST_GAIN * program.prediction.compute_s:
        return None
    steps = weights.extents[1:-dims]
    return NextPanel(buffer=weights.buffer, panels=weights.extents[0], steps=steps, elements=elements, dims=dims)
