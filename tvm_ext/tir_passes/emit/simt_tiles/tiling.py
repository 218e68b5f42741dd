"""How an rProgram divides its operator on a GPU: grid, threads, registers and steps (paper Figures 6 and 7)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd, prod
from typing import Any

import numpy as np

from tvm_ext._tvm import Expr, Var, tirx
from tvm_ext.analysis.computations import Computation, dtype_of
from tvm_ext.analysis.tensor_expr import TensorExpr
from tvm_ext.devices.gpu import WARP
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.devices.occupancy import max_block_threads, static_shared_bytes
from tvm_ext.errors import IllegalRewrite
from tvm_ext.ir.build_ir import accumulator_dtype
from tvm_ext.records.rprogram import RProgram
from tvm_ext.support.arithmetic import ceil_div

Number = Any
"""An int, an array of them (to count bank conflicts), or an index expression of TensorIR (to emit)."""

SHORTEST_RUN = 8  # a choice: elements, one sector of floats (32 bytes)

STEP_POINTS = 8
"""Points of the reduction that a thread should have between two barriers."""

MAX_SPLIT = 16
"""Thread groups that may share one tile's reduction; each doubles the rounds of summing up by one."""

WARPS_PER_TEU = 2
"""Warps that a scheduler should have at least to hide latency; below it the reduction is split among more threads."""

MIN_SPLIT_REDUCTION = 256
"""Points of a reduction from which on dividing it among threads pays for the extra barriers."""


def quotient(value: Number, divisor: int) -> Number:
    """``value // divisor`` of an int or an index expression that is not negative."""
    if isinstance(value, int | np.ndarray):
        return value // divisor
    return value if divisor == 1 else tirx.floordiv(value, divisor)


def remainder(value: Number, divisor: int) -> Number:
    """``value % divisor`` of an int or an index expression that is not negative."""
    if isinstance(value, int | np.ndarray):
        return value % divisor
    return 0 if divisor == 1 else tirx.floormod(value, divisor)


def both(first: Expr, second: Expr) -> Expr:
    """Whether both conditions hold, of ints, arrays or index expressions."""
    if isinstance(first, bool | np.bool_ | np.ndarray):
        return first & second
    return tirx.And(first, second)


def digits(value: Number, extents: Sequence[int]) -> list[Number]:
    """Row-major coordinates of ``value`` in a grid of ``extents``; the first one is not reduced."""
    found: list[Number] = []
    for extent in reversed(extents[1:]):
        found.insert(0, remainder(value, extent))
        value = quotient(value, extent)
    return [value, *found] if extents else []


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SimtTiling:
    """The tiling of one anchor; axes are positions in ``computation.variables`` and ``expr.axes`` alike.

    A threadblock computes a tile of ``register[p] * threads[p]`` along each spatial axis p, in steps of ``step[p]``
    along each reduction axis. A thread's elements along p come in pieces of ``piece[p]`` neighbours, ``threads[p]``
    pieces apart, so that neighbouring threads read and write neighbouring pieces. Worked example: 8 elements a thread,
    16 threads, pieces of 4: thread 3 has 12..15 and 64 + 12..15.

    Threads are numbered along the ``outer`` axes, the last one fastest, and within them along the lane axis:
    `lane_run` neighbours there stay together, and the rest comes first.

    ``split`` groups of threads share the points of ``split_axis`` in a step and add up their sums at the end.
    """

    computation: Computation
    names: tuple[str, ...]
    spatial: tuple[int, ...]
    reduction: tuple[int, ...]
    register: Mapping[int, int]
    threads: Mapping[int, int]
    step: Mapping[int, int]
    piece: Mapping[int, int]
    lane: int
    outer: tuple[int, ...]
    split: int
    split_axis: int | None
    accumulator_dtype: str

    @property
    def tile(self) -> dict[int, int]:
        """Size of a step's tile along every axis."""
        return {**{p: self.register[p] * self.threads[p] for p in self.spatial}, **self.step}

    @property
    def order(self) -> tuple[int, ...]:
        """Spatial axes of a thread's registers, the lane axis last."""
        return (*(p for p in self.spatial if p != self.lane), self.lane)

    @property
    def lane_run(self) -> int:
        """Neighbouring threads along the lane axis.

        A part of a warp, so that no warp ends within a run: 56 threads are 7 runs of 8 (32 bytes of float32, a sector).
        """
        count = self.threads[self.lane]
        run = min(count & -count, WARP)
        return run if run >= SHORTEST_RUN else count

    @property
    def group_threads(self) -> int:
        """Threads that compute different elements of the tile."""
        return prod(self.threads.values())

    @property
    def thread_count(self) -> int:
        return self.group_threads * self.split

    @property
    def grid(self) -> tuple[int, ...]:
        """Tiles along each spatial axis."""
        return tuple(ceil_div(self.computation.extents[p], self.tile[p]) for p in self.spatial)

    @property
    def accumulators(self) -> int:
        return prod(self.register.values())

    def overhangs(self, axis: int) -> bool:
        """Whether the last tile of a spatial axis reaches beyond its end."""
        return self.computation.extents[axis] % self.tile[axis] != 0

    def coordinates(self, thread: Number) -> tuple[Number, dict[int, Number]]:
        """(group, position along each spatial axis) of a thread number."""
        run = self.lane_run
        runs = self.threads[self.lane] // run
        group, block, *rest = digits(thread, [self.split, runs, *(self.threads[p] for p in self.outer), run])
        return group, {**dict(zip(self.outer, rest, strict=False)), self.lane: block * run + rest[-1]}

    def within(self, axis: int, thread: Number, piece: Number, element: Number = 0) -> Number:
        """Where in the tile ``element`` of the ``piece``-th piece of the thread at position ``thread`` lies."""
        size = self.piece[axis]
        return piece * (self.threads[axis] * size) + thread * size + element

    def variable(self, name: str) -> Var:
        """A fresh variable of the type that the computation counts in, for proofs about its accesses."""
        return Var(name, dtype_of(self.computation.variables[0]))

    def any_starts(self) -> dict[int, Expr]:
        """Where any tile starts along each axis: a fresh variable times the tile's size."""
        tile = self.tile
        return {p: self.variable(f"t{p}") * tile[p] for p in (*self.spatial, *self.reduction)}

    def any_threads(self) -> dict[int, Expr]:
        """The position of any thread along each spatial axis."""
        return {p: self.variable(f"x{p}") for p in self.spatial}

    def register_element(self, axis: int, thread: Number, number: Number) -> Number:
        """Where in the tile the thread's element ``number`` along ``axis`` lies."""
        size = self.piece[axis]
        return self.within(axis, thread, quotient(number, size), remainder(number, size))


def tile_threads(computation: Computation, expr: TensorExpr, program: RProgram, device: DeviceSpec) -> SimtTiling:
    """The tiling of ``program``, without pieces yet; raises IllegalRewrite where a limit of the device is passed."""
    names = tuple(axis.name for axis in expr.axes)
    tiles = dict(program.tiles)
    if "L0" not in tiles or "L1" not in tiles:
        raise IllegalRewrite(f"{computation.name}: its rProgram has no tiles for registers and shared memory")
    upper, lower = tiles["L0"].sizes, tiles["L1"].sizes
    spatial = tuple(p for p, kind in enumerate(computation.kinds) if kind == "spatial")
    reduction = tuple(p for p, kind in enumerate(computation.kinds) if kind == "reduce")
    register = {p: min(upper.get(names[p], 1), computation.extents[p]) for p in spatial}
    block = {
        p: min(max(lower.get(names[p], 1), register[p]), ceil_div(computation.extents[p], register[p]) * register[p])
        for p in spatial
    }
    # the axis along which the output is contiguous, else the last one
    lane = next((p for p in reversed(spatial) if expr.output.stride(names[p]) == 1), spatial[-1])
    tiling = SimtTiling(
        computation=computation,
        names=names,
        spatial=spatial,
        reduction=reduction,
        register=register,
        threads={p: ceil_div(block[p], register[p]) for p in spatial},
        step={p: min(lower.get(names[p], 1), computation.extents[p]) for p in reduction},
        piece=dict.fromkeys(spatial, 1),
        lane=lane,
        outer=tuple(p for p in spatial if p != lane),
        split=1,
        split_axis=None,
        accumulator_dtype=accumulator_dtype(dtype_of(computation.target)),
    )
    limit = max_block_threads(device)
    if limit is not None and tiling.thread_count > limit:
        raise IllegalRewrite(
            f"{computation.name}: "
            f"tile {program.tile('L1')} over {program.tile('L0')} takes {tiling.thread_count} threads, "
            f"{device.name} has {limit} in a block"
        )
    return tiling


def reduction_split(tiling: SimtTiling, device: DeviceSpec) -> tuple[int, int | None]:
    """(thread groups, axis) among which a tile's reduction is divided; (1, None) where the grid fills the device.

    Worked example, 128 x 1000 x 2048 on 80 units of 4 schedulers: 72 blocks of one warp, wanted are 640 warps; the
    groups are doubled to 8, as far as steps of 8 points go.
    """
    computation = tiling.computation
    if not tiling.reduction or prod(computation.extents[p] for p in tiling.reduction) < MIN_SPLIT_REDUCTION:
        return 1, None
    wanted = device.unit_count * device.teus_per_unit * WARPS_PER_TEU * device.teu_lanes
    present = prod(tiling.grid) * tiling.thread_count
    axis = max(tiling.reduction, key=lambda p: tiling.step[p])
    divisible = gcd(tiling.step[axis], computation.extents[axis] % tiling.step[axis])
    threads = max_block_threads(device)
    limit = MAX_SPLIT if threads is None else min(MAX_SPLIT, threads // tiling.thread_count)
    groups = 1
    while groups * 2 <= limit and present * groups < wanted and divisible % (groups * 2) == 0:
        groups *= 2
    return (groups, axis) if groups > 1 else (1, None)


def deepened(tiling: SimtTiling, expr: TensorExpr, device: DeviceSpec) -> SimtTiling:
    """``tiling`` with steps of at least `STEP_POINTS` points of the reduction for every thread, where memory allows.

    A step costs two barriers. Where no input is contiguous along the reduction, no alignment rule asks for more than
    one point a step, nor does the model, which has no barriers.
    """
    capacity = static_shared_bytes(device) // 2
    while prod(tiling.step.values()) < STEP_POINTS * tiling.split:
        open_axes = [p for p in tiling.reduction if tiling.step[p] < tiling.computation.extents[p]]
        if not open_axes:
            return tiling
        axis = tiling.split_axis if tiling.split_axis in open_axes else open_axes[-1]
        # two to four times the step, dividing the axis where one does: 84 in steps of 7 goes to 14, 75 in 5 to 15
        extent, step = tiling.computation.extents[axis], tiling.step[axis]
        longer = next((count * step for count in (2, 3, 4) if extent % (count * step) == 0), 2 * step)
        deeper = replace(tiling, step={**tiling.step, axis: min(extent, longer)})
        sizes = {name: deeper.tile[p] for p, name in enumerate(tiling.names)}
        if sum(prod(item.tile_shape(sizes)) * item.itemsize_bytes for item in expr.inputs) > capacity:
            return tiling
        tiling = deeper
    return tiling
