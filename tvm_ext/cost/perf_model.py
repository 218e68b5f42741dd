"""Roller's micro-performance model (paper §3.3, Figure 9): footprint, traffic and time of a tile, without running it.

Given an operator, a device and the axis that is vectorised, `PerfModel` answers Figure 9's questions for a tile
``shape`` (one size per axis, in the order of ``expr.axes``) held in memory layer ``level`` (0 is the highest):
MemFootprint, MemTraffic, MemPerf, MaxComputePerf; `PerfModel.predict` puts them together for a whole rProgram.

What a tile holds in the *highest* layer differs by device, and only there:

* GPU, IPU: the registers of one thread: its accumulators and the operands of one reduction step.
* CPU: vector registers. A matmul tile i=14, j=32 on AVX-512 (16 floats a register, 32 registers) has
  14 * 2 = 28 accumulators, keeps 2 registers of B and streams one broadcast of A: 28 + 2 + 1 = 31 <= 32.

All bandwidths and peaks are device-wide, so that times of the whole operator follow by one division.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from math import ceil, prod
from typing import Any

import numpy as np

from tvm_ext.analysis.tensor_expr import TensorExpr
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.devices.machine import OF_ONE_UNIT, Machine
from tvm_ext.records.rprogram import LayerCost, Prediction
from tvm_ext.support.arithmetic import ceil_div
from tvm_ext.support.quantities import anywhere, chosen, most_that, smaller, whole_quotient

from .access_table import Shape, access_table, is_columns, loop_order, unmoved_inputs, vector_lanes
from .matrix_tiles import core_of
from .register_tiles import overlapped

REPORTED_UNITS_PER_G = 1e9  # units, by definition

KINDS = {"sum": "add", "max": "max", "min": "max"}
"""Vector instruction of a point that is a reduction's one operation: minima run as maxima do."""

MEMORY_OVERLAP = 3
"""How nearly a CPU's computation and the loads of its caches run at once: t1, t2 take (t1**3 + t2**3) ** (1/3).

Loads from L2 that take half as long as the arithmetic add 4 %, as long 26 %. Measured on a Zen 5: docs/roller.md.
"""


class PerfModel:
    """The model of one operator on one device with one vector axis (None: scalar code, or a GPU's default)."""

    def __init__(self, expr: TensorExpr, device: DeviceSpec, vector_axis: str | None = None) -> None:
        self.expr = expr
        self.device = device
        self.machine = Machine(device)
        self.names: tuple[str, ...] = tuple(axis.name for axis in expr.axes)
        self.extents: Shape = tuple(axis.extent for axis in expr.axes)
        self.spatial = tuple(i for i, axis in enumerate(expr.axes) if axis.kind == "spatial")
        self.reduction = tuple(i for i, axis in enumerate(expr.axes) if axis.kind == "reduce")
        self.vector_axis = vector_axis
        self.vector = None if vector_axis is None else self.names.index(vector_axis)
        self.is_cpu = device.kind == "cpu"
        self.lanes = vector_lanes(expr, device) if self.is_cpu and vector_axis is not None else 1
        self.inputs = tuple(access_table(expr, access, vector_axis, device) for access in expr.inputs)
        self.output = access_table(expr, expr.output, vector_axis, device)
        self.core = core_of(expr, device, self.vector, self.lanes, self.inputs, self.output)
        self.last_level = len(device.layers) - 1
        self.partition_level = max(i for i, layer in enumerate(device.layers[:-1]) if layer.scope != "device" or i == 0)
        self.windows = self._window_axes()
        self.tensor_core = False
        self._orders: dict[Shape, tuple[int, ...]] = {}
        self._unmoved = unmoved_inputs(expr)
        self._traffic: dict[tuple[int, Shape, bool], float] = {}
        self._footprint: dict[tuple[int, Shape, tuple[int, ...]], float] = {}

    def _window_axes(self) -> frozenset[int]:
        """Reduction axes that share an index with a spatial one (``2*h + r``)."""
        windows: set[int] = set()
        for table in self.inputs:
            for _, terms in table.dims:
                used = {axis for axis, _ in terms or ()}
                if used & set(self.spatial):
                    windows |= used & set(self.reduction)
        return frozenset(windows)

    # ---- MemFootprint ------------------------------------------------------------------------------------------

    def capacity_bytes(self, level: int) -> float:
        """What a tile in ``level`` may occupy; a shared layer is split evenly among the units (paper §3.3)."""
        if level == 0:
            registers = self.core.limit
            return float(registers * self.device.register_bytes * (self.device.teu_lanes if self.tensor_core else 1))
        return self.machine.room_bytes(level, OF_ONE_UNIT)

    def footprint_bytes(self, level: int, shape: Shape, padding: Sequence[int] = ()) -> float:
        """MemFootprint: bytes that the tile occupies in ``level``.

        ``padding`` holds per input the elements added to each row of its stored data tile (bank alignment).
        A GPU's output stays in registers (Figure 6 stores it from L0 to the lowest layer); a CPU's passes the caches.
        """
        below = level and self.device.layers[level].transaction_bytes
        key = (below if self.is_cpu else level, shape, tuple(padding))  # a CPU's caches differ in their lines alone
        if key not in self._footprint:
            self._footprint[key] = self._footprint_bytes(level, shape, padding)
        return self._footprint[key]

    def _footprint_bytes(self, level: int, shape: Shape, padding: Sequence[int]) -> float:
        if level == 0:
            if self.is_cpu:
                return float(self.core.registers(shape) * self.device.register_bytes)
            return self._thread_register_bytes(shape)
        transaction = self.device.layers[level].transaction_bytes
        if self.is_cpu:
            tables = (*self.inputs, self.output)
            return sum(table.loaded_bytes(shape, transaction) for table in tables)
        total = 0.0
        for i, table in enumerate(self.inputs):
            spans = table.spans(shape)
            row = spans[-1] + (padding[i] if padding else 0) if spans else 1
            total += prod(spans[:-1]) * row * table.itemsize_bytes
        return total

    def _thread_register_bytes(self, shape: Shape) -> float:
        width = self.device.register_bytes
        step = self.one_reduction_step(shape)
        operands = sum(ceil(t.elements(step) * t.itemsize_bytes / width) for t in self.inputs)
        accumulators = prod(shape[i] for i in self.spatial) * max(1.0, self.output.itemsize_bytes / width)
        return (operands + accumulators) * width

    def one_reduction_step(self, shape: Shape) -> Shape:
        """The tile with every reduction axis at 1 (a tensor-core instruction's reduction is kept)."""
        if self.tensor_core:
            return shape
        return tuple(1 if i in self.reduction and i != self.vector else size for i, size in enumerate(shape))

    # ---- MemTraffic --------------------------------------------------------------------------------------------

    def traffic_bytes(self, level: int, shape: Shape, *, waited: bool = False) -> float:
        """MemTraffic Q(T): bytes moved into ``level`` from the layer below over the whole operator.

        Each input's data tile is loaded once per tile, also per step of an axis that does not index it; an input
        without reduction axes is loaded once per spatial tile. The output moves once. Worked example: M=N=K=64,
        tile 4x4x1: 16 * 16 * 64 tiles of (4 + 4) elements = 131072 elements = 2mnk / 4 (paper Figure 1).

        ``waited``: instead, what `waited_bytes` says.
        """
        key = (level, shape, waited)
        if key not in self._traffic:
            self._traffic[key] = self._traffic_bytes(level, shape, waited=waited)
        return self._traffic[key]

    def _traffic_bytes(self, level: int, shape: Shape, *, waited: bool) -> float:
        spatial, steps = self._tile_ratios(shape) if self.is_cpu else self.tile_counts(shape)
        if level == 0 and self.is_cpu:
            loads = self.core.operand_loads(shape)
            # A broadcast takes a load slot as a whole register does, so both count as one register's width.
            per_step = sum(n * (steps if t.uses_reduction else 1) for n, t in zip(loads, self.inputs, strict=True))
            return float(spatial * per_step * self.device.register_bytes)
        below = self.device.layers[level + 1]
        shared_by_threads = level == 0
        total = 0.0
        for table in self.inputs:
            count = spatial * (steps if table.uses_reduction else 1)
            if shared_by_threads:
                total += count * table.elements(shape) * table.itemsize_bytes
            else:
                line, loaded = below.transaction_bytes, count * table.loaded_bytes(shape, below.transaction_bytes)
                total += (
                    loaded * (1 / self.machine.row_share(below, table.row_bytes(shape, line)) - 1) if waited else loaded
                )
        if not waited and (self.is_cpu or level + 1 == self.last_level):
            total += spatial * self.output.loaded_bytes(shape, 1 if shared_by_threads else below.transaction_bytes)
        return total

    def tile_counts(self, shape: Shape) -> tuple[int, int]:
        """(tiles over the spatial axes, steps over the reduction axes)."""
        spatial, steps = 1, 1
        for i in self.spatial:
            spatial *= ceil_div(self.extents[i], shape[i])
        for i in self.reduction:
            steps *= ceil_div(self.extents[i], shape[i])
        return spatial, steps

    def _tile_ratios(self, shape: Shape) -> tuple[float, float]:
        """`tile_counts` where the last tile of an axis is cut to what is left: 83 rows are 5.93 tiles of 14."""
        most: Any = np.maximum if is_columns(shape) else max
        spatial = prod(most(1.0, self.extents[i] / shape[i]) for i in self.spatial)
        return spatial, prod(most(1.0, self.extents[i] / shape[i]) for i in self.core.stepped)

    # ---- MemPerf and MaxComputePerf ----------------------------------------------------------------------------

    def mem_perf_gflops(self, level: int, shape: Shape) -> float:
        """MemPerf: GFLOP/s that the loads into ``level`` can feed; infinite where the bandwidth is unknown."""
        bandwidth = self.device.layers[level + 1].bandwidth_gb_per_s
        traffic = self.traffic_bytes(level, shape)
        if bandwidth is None or traffic == 0:
            return float("inf")
        return self.expr.flops / traffic * bandwidth

    def max_compute_gflops(self) -> float:
        """MaxComputePerf of the expression: the peak; of points that are one operation its instruction's rate."""
        flops, keys = self.expr.flops_per_point or 2.0, (self.expr.output.dtype, "float32")
        kind = "fma" if flops >= 2 else KINDS.get(self.expr.combiner or "", "add")
        rates = [self.machine.results_per_s(dtype, kind) / REPORTED_UNITS_PER_G for dtype in keys]
        if self.tensor_core:
            rates[0] = (self.device.emitted_gflops_of(f"{self.expr.inputs[0].dtype}_tensor") or 0.0) / 2
        return (rates[0] or rates[1] or float("inf")) * min(2.0, flops)

    def tile_compute_gflops(self, shape: Shape) -> float:
        """Compute rate of the register tile itself: on a CPU the FMA latency and the load ports may lower it."""
        seconds = self.compute_s(shape)
        return self.expr.flops / seconds / REPORTED_UNITS_PER_G if seconds else float("inf")

    def saturates_teu(self, shape: Shape) -> bool:
        """Whether a CPU register tile has as many independent accumulators as its FMA pipes have slots in flight."""
        latency, pipes = self.device.fma_latency_cycles, self.device.fma_pipes
        if not self.is_cpu or self.expr.combiner is None or latency is None or pipes is None:
            return True
        return self.core.accumulators(shape) >= latency * pipes

    def compute_s(self, register_tile: Shape, upper_tile: Shape | None = None) -> float:
        """Seconds of computing on all units, padding included; ``upper_tile`` is a GPU's threadblock tile."""
        if self.is_cpu and (hz := self.machine.vector_hz):
            return self.core.total_cycles(register_tile) / (hz * self.device.unit_count)
        points = float(prod(ceil_div(e, t) * t for e, t in zip(self.extents, register_tile, strict=True)))
        if upper_tile is not None:
            points = float(prod(ceil_div(e, t) * t for e, t in zip(self.extents, upper_tile, strict=True)))
            points /= self._lane_utilisation(register_tile, upper_tile)
        peak = self.max_compute_gflops() * REPORTED_UNITS_PER_G
        return points * max(1.0, self.expr.flops_per_point) / peak

    def threads(self, register_tile: Shape, upper_tile: Shape) -> int:
        """Threads of a GPU's threadblock (a warp each where tensor cores compute the register tile)."""
        tiles = prod(ceil_div(upper_tile[i], register_tile[i]) for i in self.spatial)
        return tiles * (self.device.teu_lanes if self.tensor_core else 1)

    def _lane_utilisation(self, register_tile: Shape, upper_tile: Shape) -> float:
        """Share of lanes with work: 40 threads take 2 warps of 32 and use 40 / 64 of them."""
        threads = self.threads(register_tile, upper_tile)
        lanes = self.device.teu_lanes
        return threads / (ceil_div(threads, lanes) * lanes)

    def roofline_s(self) -> float:
        """Time that no program can beat: all arithmetic at peak, or every tensor moved once from the lowest layer."""
        return max(self.once_s, self.expr.flops / (self.max_compute_gflops() * REPORTED_UNITS_PER_G))

    @cached_property
    def once_s(self) -> float:
        """Seconds of moving every tensor once from the lowest layer."""
        moved = sum(prod(size for size, _ in t.dims) * t.itemsize_bytes for t in (*self.inputs, self.output))
        return (moved + self._fused_bytes()) / self.machine.rate(self.device.lowest_layer)

    # ---- a whole rProgram --------------------------------------------------------------------------------------

    def partition_count(self, shapes: Sequence[Shape]) -> int:
        """Parts that are spread over the units: spatial tiles of the lowest layer that a unit owns (paper §3.2)."""
        return self.tile_counts(shapes[self.partition_level])[0]

    def balance(self, partitions: int) -> float:
        """Share of the units' time that is used: 81 partitions on 80 units take 2 waves and use 81 / 160."""
        units = self.device.unit_count
        return partitions / (units * ceil_div(partitions, units))

    def _balance(self, shapes: Sequence[Shape], order: Sequence[int]) -> float:
        if self.is_cpu:
            return float(self.task_balance(shapes, order))
        return self.balance(self.partition_count(shapes))

    def task_balance(self, shapes: Sequence[Shape], order: Sequence[int] = ()) -> Any:
        """`balance` of a CPU's tasks, which each core gets one after the other in equal numbers: by their elements.

        Worked example: 33 register tiles in tasks of 8 are five for two cores. The first has three, 24 tiles of 33:
        33 / 48. Tasks at the end of an inner axis are smaller, and every core has its share of these. Sizes may be
        arrays under one ``order``.
        """
        task, units = shapes[self.partition_level], self.device.unit_count
        counts = {axis: -(-self.extents[axis] // task[axis]) for axis in self.spatial}
        first: Any = -(-prod(counts.values()) // units)
        outermost: Any = True  # no axis with several tasks so far
        for axis in order or self.loop_order(shapes[0]):
            even = self.extents[axis] / counts[axis]
            first = first * chosen(outermost & (counts[axis] > 1), task[axis], even)
            outermost = outermost & (counts[axis] == 1)
        return smaller(1.0, prod(self.extents[axis] for axis in self.spatial) / (units * first))

    def predict(self, shapes: Sequence[Shape], padding: Sequence[int] = (), order: Sequence[int] = ()) -> Prediction:
        """Predicted time of the rProgram with the tiles ``shapes`` (highest layer first).

        Compute and loads overlap, so the slowest resource binds (on a CPU less than perfectly, see `MEMORY_OVERLAP`);
        the launch adds to it. ``order``: axes of a CPU's loops over tiles from the outermost in, where it is not
        `loop_order`'s.
        """
        balance = self._balance(shapes, order)
        upper = shapes[1] if not self.is_cpu and len(shapes) > 1 else None
        compute = self.compute_s(shapes[0], upper) / balance
        costs = []
        for level, shape in enumerate(shapes):
            traffic, time = self.moved(level, shapes, order)
            footprint = self.footprint_bytes(level, shape, padding if level == 1 else ())
            costs.append(
                LayerCost(
                    layer=self.device.layers[level + 1].name,
                    footprint_bytes=footprint,
                    traffic_bytes=traffic,
                    time_s=time / balance,
                )
            )
        return self._bind(compute, tuple(costs))

    def moved(self, level: int, shapes: Sequence[Shape], order: Sequence[int] = ()) -> tuple[float, float]:
        """Bytes that the whole operator loads into ``level``, whose cache keeps what earlier tiles left; seconds."""
        resident = self.resident_tile(level, shapes, order) if self.is_cpu else shapes[level]
        traffic = self.traffic_bytes(level, resident)
        traffic += self._fused_bytes() if level + 1 == self.last_level else 0.0
        return traffic, self.layer_s(level, traffic + self.waited_bytes(level, resident))

    def waited_bytes(self, level: int, shape: Shape) -> float:
        """What could be loaded into ``level`` while it waits for short rows far apart (§3.3's small accesses).

        Worked example: 1 MiB of rows of 64 bytes, which come at 0.4 of the rate, takes as long as 2.5 MiB.
        """
        return self.traffic_bytes(level, shape, waited=True) if level and self.device.row_shares else 0.0

    def layer_s(self, level: int, traffic_bytes: float) -> float:
        """Seconds of loading so much into ``level`` from the layer below."""
        return traffic_bytes / self.machine.rate(self.device.layers[level + 1])

    def resident_tile(self, level: int, shapes: Sequence[Shape], order: Sequence[int] = ()) -> Shape:
        """What a CPU's cache in ``level`` holds at a time: its tile and those that run after it, while they fit.

        A cache keeps what earlier tiles left in it. Tiles run along ``order`` (else `loop_order`), within the tile of
        the layer below first: where 32x2x4 tiles run along the last axis of 128x28x28 and all 28 columns fit, they are
        loaded once. Sizes may be arrays with one entry a candidate, under one ``order``.
        """
        tile = shapes[level]
        if level == 0:
            return tile
        growing: Any = self.footprint_bytes(level, tile) <= self.capacity_bytes(level)
        within = shapes[level + 1] if level + 1 < len(shapes) else self.extents
        for bounds in (within, self.extents):
            for axis in reversed(order or self.loop_order(shapes[0])):
                if not anywhere(growing):
                    return tile
                grown: Any = self._grown(level, tile, axis, bounds[axis])
                kept: Any = chosen(growing, grown, tile[axis])
                tile = (*tile[:axis], kept, *tile[axis + 1 :])
                growing = growing & (grown >= bounds[axis])
        return tile

    def _grown(self, level: int, tile: Shape, axis: int, bound: int) -> Any:
        """``tile``'s size along ``axis``, repeated as often as the layer holds, at most to ``bound``."""
        capacity, before, size, behind = self.capacity_bytes(level), tile[:axis], tile[axis], tile[axis + 1 :]

        def holds(count: Any) -> Any:
            return self.footprint_bytes(level, (*before, count * size, *behind)) <= capacity

        return most_that(holds, whole_quotient(bound, size) + 1) * size

    def loop_order(self, register_tile: Shape) -> tuple[int, ...]:
        """Spatial axes from the outermost loop in: last the one along which the most loaded bytes stay put."""
        if register_tile not in self._orders:
            sizes = dict(zip(self.names, map(min, register_tile, self.extents), strict=True))
            order = loop_order(self.expr, sizes, self._unmoved)
            self._orders[register_tile] = tuple(self.names.index(name) for name in order)
        return self._orders[register_tile]

    def _fused_bytes(self) -> float:
        points = prod(self.extents[i] for i in self.spatial)
        return points * sum(s.extra_bytes_per_element for s in (*self.expr.prologue, *self.expr.epilogue))

    def _bind(self, compute_s: float, costs: tuple[LayerCost, ...]) -> Prediction:
        together = overlapped(_distinct_times(compute_s, costs), MEMORY_OVERLAP) if self.is_cpu else None
        return self.machine.bind(compute_s, costs, together_s=together)


def _distinct_times(compute_s: float, costs: tuple[LayerCost, ...]) -> list[float]:
    """Compute, which counts the loads from L1 already, and each layer below."""
    return [compute_s, *(cost.time_s for cost in costs[1:])]
