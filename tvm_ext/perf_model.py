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

from collections.abc import Mapping, Sequence
from math import ceil, log2, pow, prod

from tvm_ext.access_table import Shape, access_table, vector_lanes
from tvm_ext.hal import DeviceSpec
from tvm_ext.plan import LayerCost, Prediction, RTile
from tvm_ext.tensor_expr import TensorExpr

REPORTED_UNITS_PER_G = 1e9

COMPILER_SHARE = 10
"""One vector register in so many is left to a CPU's compiler, which otherwise spills: 3 of 32, 1 of 16.

The paper lowers V100's 255 registers to 96 for the same reason (§4). Measured: docs/roller.md, "What was fitted".
"""

OVERLAP_NORM = 4
"""How imperfectly a CPU's resources overlap: busy times t1, t2 take (t1**4 + t2**4) ** (1/4) together.

Equal times take 19 % longer than one of them; a time of half the longest adds 1.5 %. Measured: docs/roller.md.
"""

PACKING_CYCLES = 3
"""Cycles that a CPU takes to copy one element of a strided input into its panel: address, load, scattered store.

Measured: the 1.4 million elements of a 3x3 stride-2 window over (3, 227, 227) take 0.9 ms on one 3.9 GHz core.
"""


class PerfModel:
    """The model of one operator on one device with one vector axis (None: scalar code, or a GPU's default)."""

    def __init__(self, expr: TensorExpr, device: DeviceSpec, vector_axis: str | None = None) -> None:
        self.expr = expr
        self.device = device
        self.names: tuple[str, ...] = tuple(axis.name for axis in expr.axes)
        self.extents: Shape = tuple(axis.extent for axis in expr.axes)
        self.spatial = tuple(i for i, axis in enumerate(expr.axes) if axis.kind == "spatial")
        self.reduction = tuple(i for i, axis in enumerate(expr.axes) if axis.kind == "reduce")
        self.vector_axis = vector_axis
        self.vector = None if vector_axis is None else self.names.index(vector_axis)
        self.is_cpu = device.kind == "cpu"
        self.lanes = vector_lanes(expr, device) if self.is_cpu and vector_axis is not None else 1
        self.inputs = tuple(access_table(expr, access, vector_axis, is_cpu=self.is_cpu) for access in expr.inputs)
        self.output = access_table(expr, expr.output, vector_axis, is_cpu=self.is_cpu)
        self.last_level = len(device.layers) - 1
        self.partition_level = max(i for i, layer in enumerate(device.layers[:-1]) if layer.scope != "device" or i == 0)
        self.tensor_core = False
        self._traffic: dict[tuple[int, Shape], float] = {}
        self._footprint: dict[tuple[int, Shape, tuple[int, ...]], float] = {}

    # ---- MemFootprint ------------------------------------------------------------------------------------------

    def capacity_bytes(self, level: int) -> float:
        """What a tile in ``level`` may occupy; a shared layer is split evenly among the units (paper §3.3)."""
        layer = self.device.layers[level]
        if level == 0:
            registers = self.device.register_limit
            if self.is_cpu:
                registers -= registers // COMPILER_SHARE
            return float(registers * self.device.register_bytes * (self.device.teu_lanes if self.tensor_core else 1))
        if layer.capacity_bytes is None:
            return float("inf")
        return layer.capacity_bytes / (self.device.unit_count if layer.scope == "device" else 1)

    def footprint_bytes(self, level: int, shape: Shape, padding: Sequence[int] = ()) -> float:
        """MemFootprint: bytes that the tile occupies in ``level``.

        ``padding`` holds per input the elements added to each row of its stored data tile (bank alignment).
        A GPU's output stays in registers (Figure 6 stores it from L0 to the lowest layer); a CPU's passes the caches.
        """
        key = (level, shape, tuple(padding))
        if key not in self._footprint:
            self._footprint[key] = self._footprint_bytes(level, shape, padding)
        return self._footprint[key]

    def _footprint_bytes(self, level: int, shape: Shape, padding: Sequence[int]) -> float:
        if level == 0:
            if self.is_cpu:
                return float(self.registers(shape) * self.device.register_bytes)
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

    def in_registers(self, shape: Shape) -> Shape:
        """The tile's shape with the vector axis counted in registers: 33 floats of 16 lanes are 3 registers."""
        if self.vector is None:
            return shape
        count = -(-shape[self.vector] // self.lanes)
        return (*shape[: self.vector], count, *shape[self.vector + 1 :])

    def accumulators(self, shape: Shape) -> int:
        """Vector registers that hold the output tile; along a vectorised reduction axis each lane sums its share."""
        units = self.in_registers(shape)
        return prod(units[i] for i in self.spatial)

    def operand_loads(self, shape: Shape) -> list[int]:
        """Load instructions of one reduction step per input: registers, broadcasts, or one per lane for a gather."""
        units = self.in_registers(self.one_reduction_step(shape))
        loads = []
        for table in self.inputs:
            count = table.elements(units)
            loads.append(count * self.lanes if table.vector_use == "gather" else count)
        return loads

    def registers(self, shape: Shape) -> int:
        """Vector registers: accumulators, the smallest operand kept whole, one register to stream each other one."""
        units = self.in_registers(self.one_reduction_step(shape))
        operands = [table.elements(units) for table in self.inputs]
        kept = min(operands, default=0)
        return self.accumulators(shape) + kept + max(0, len(operands) - 1)

    # ---- MemTraffic --------------------------------------------------------------------------------------------

    def traffic_bytes(self, level: int, shape: Shape) -> float:
        """MemTraffic Q(T): bytes moved into ``level`` from the layer below over the whole operator.

        Each input's data tile is loaded once per tile, also per step of an axis that does not index it; an input
        without reduction axes is loaded once per spatial tile. The output moves once. Worked example: M=N=K=64,
        tile 4x4x1: 16 * 16 * 64 tiles of (4 + 4) elements = 131072 elements = 2mnk / 4 (paper Figure 1).
        """
        key = (level, shape)
        if key not in self._traffic:
            self._traffic[key] = self._traffic_bytes(level, shape)
        return self._traffic[key]

    def _traffic_bytes(self, level: int, shape: Shape) -> float:
        spatial, steps = self._tile_ratios(shape) if self.is_cpu else self.tile_counts(shape)
        if level == 0 and self.is_cpu:
            loads = self.operand_loads(shape)
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
                total += count * table.loaded_bytes(shape, below.transaction_bytes)
        if self.is_cpu or level + 1 == self.last_level:
            total += spatial * self.output.loaded_bytes(shape, 1 if shared_by_threads else below.transaction_bytes)
        return total

    def tile_counts(self, shape: Shape) -> tuple[int, int]:
        """(tiles over the spatial axes, steps over the reduction axes)."""
        spatial, steps = 1, 1
        for i in self.spatial:
            spatial *= -(-self.extents[i] // shape[i])
        for i in self.reduction:
            steps *= -(-self.extents[i] // shape[i])
        return spatial, steps

    def _tile_ratios(self, shape: Shape) -> tuple[float, float]:
        """`tile_counts` where the last tile of an axis is cut to what is left: 83 rows are 5.93 tiles of 14."""
        spatial = prod(max(1.0, self.extents[i] / shape[i]) for i in self.spatial)
        return spatial, prod(max(1.0, self.extents[i] / shape[i]) for i in self.reduction)

    # ---- MemPerf and MaxComputePerf ----------------------------------------------------------------------------

    def mem_perf_gflops(self, level: int, shape: Shape) -> float:
        """MemPerf: GFLOP/s that the loads into ``level`` can feed; infinite where the bandwidth is unknown."""
        bandwidth = self.device.layers[level + 1].bandwidth_gb_per_s
        traffic = self.traffic_bytes(level, shape)
        if bandwidth is None or traffic == 0:
            return float("inf")
        return self.expr.flops / traffic * bandwidth

    def max_compute_gflops(self) -> float:
        """MaxComputePerf of the expression: the device's peak, halved where points are no multiply-adds."""
        dtype = self.expr.output.dtype
        if self.tensor_core:
            peak = self.device.peak_gflops_of(f"{self.expr.inputs[0].dtype}_tensor")
        else:
            peak = self.device.peak_gflops_of(dtype)
        peak = peak or self.device.peak_gflops_of("float32") or float("inf")
        return peak * min(1.0, self.expr.flops_per_point / 2) if self.expr.flops_per_point else peak

    def tile_compute_gflops(self, shape: Shape) -> float:
        """Compute rate of the register tile itself: on a CPU the FMA latency and the load ports may lower it."""
        seconds = self.compute_s(shape)
        return self.expr.flops / seconds / REPORTED_UNITS_PER_G if seconds else float("inf")

    def saturates_teu(self, shape: Shape) -> bool:
        """Whether a CPU register tile has as many independent accumulators as its FMA pipes have slots in flight."""
        latency, pipes = self.device.fma_latency_cycles, self.device.fma_pipes
        if not self.is_cpu or self.expr.combiner is None or latency is None or pipes is None:
            return True
        return self.accumulators(shape) >= latency * pipes

    def compute_s(self, register_tile: Shape, upper_tile: Shape | None = None) -> float:
        """Seconds of computing on all units, padding included; ``upper_tile`` is a GPU's threadblock tile."""
        if self.is_cpu and self.clock_hz:
            return self._cpu_cycles(register_tile) / (self.clock_hz * self.device.unit_count)
        points = float(prod(-(-e // t) * t for e, t in zip(self.extents, register_tile, strict=True)))
        if upper_tile is not None:
            points = float(prod(-(-e // t) * t for e, t in zip(self.extents, upper_tile, strict=True)))
            points /= self._lane_utilisation(register_tile, upper_tile)
        peak = self.max_compute_gflops() * REPORTED_UNITS_PER_G
        return points * max(1.0, self.expr.flops_per_point) / peak

    def threads(self, register_tile: Shape, upper_tile: Shape) -> int:
        """Threads of a GPU's threadblock (a warp each where tensor cores compute the register tile)."""
        tiles = prod(-(-upper_tile[i] // register_tile[i]) for i in self.spatial)
        return tiles * (self.device.teu_lanes if self.tensor_core else 1)

    def _lane_utilisation(self, register_tile: Shape, upper_tile: Shape) -> float:
        """Share of lanes with work: 40 threads take 2 warps of 32 and use 40 / 64 of them."""
        threads = self.threads(register_tile, upper_tile)
        lanes = self.device.teu_lanes
        return threads / (-(-threads // lanes) * lanes)

    @property
    def clock_hz(self) -> float:
        """Cycles per second under full vector load: from the measured peak where there is one, else nominal."""
        device = self.device
        peak = device.peak_gflops_of("float32")
        if peak and device.fma_pipes:
            return peak * REPORTED_UNITS_PER_G / (device.unit_count * device.teu_lanes * 2 * device.fma_pipes)
        return (device.clock_ghz or 0.0) * REPORTED_UNITS_PER_G

    def _cpu_cycles(self, shape: Shape) -> float:
        """Cycles of all register tiles on one core; the last tile of an axis runs at its own smaller size.

        83 rows in tiles of 14 are five tiles of 14 and one of 13.
        """
        steps = self.tile_counts(shape)[1]
        kinds: list[tuple[int, Shape]] = [(1, shape)]
        for i in self.spatial:
            full, rest = divmod(self.extents[i], shape[i])
            if rest:
                cut = [(n, (*s[:i], rest, *s[i + 1 :])) for n, s in kinds]
                kinds = [(n * full, s) for n, s in kinds if full] + cut
            else:
                kinds = [(n * full, s) for n, s in kinds]
        tiles = sum(count * self._tile_cycles(tile, steps) for count, tile in kinds)
        return tiles + self._packing_cycles()

    def _tile_cycles(self, shape: Shape, steps: int) -> float:
        """Cycles of one register tile over the whole reduction.

        One step of i=12, j=32: 24 FMAs on 2 pipes are 12 cycles, 2 + 12 loads on 2 ports are 7, and 4 of latency are
        hidden: 12.4 cycles. Of i=1, j=16 (one accumulator): 0.5 and 1 cycles, but each FMA waits 4.
        A tile ends with its stores: one per register, or one per element where the output is strided.
        """
        device = self.device
        accumulators = self.accumulators(shape)
        operations = max(1.0, self.expr.flops_per_point / 2) * self._instructions_per_multiply_add()
        arithmetic = accumulators * operations / (device.fma_pipes or 1)
        loads = self.operand_loads(shape)
        gathers = sum(n for n, t in zip(loads, self.inputs, strict=True) if t.vector_use == "gather")
        once = sum(n for n, t in zip(loads, self.inputs, strict=True) if not t.uses_reduction and self.reduction)
        issue = (sum(loads) - once) / device.loads_per_cycle if device.loads_per_cycle else 0.0
        latency = (device.fma_latency_cycles or 0) if self.expr.combiner is not None else 0
        step = _overlapped(arithmetic, issue, float(latency), float(gathers))
        return steps * step + self._store_cycles(accumulators) + latency

    def _instructions_per_multiply_add(self) -> float:
        """1 with fused multiply-add; 2 where the type's peak is half of float32's at as many lanes (int32)."""
        peak32, peak = self.device.peak_gflops_of("float32"), self.device.peak_gflops_of(self.expr.output.dtype)
        if not peak32 or not peak:
            return 1.0
        return min(2.0, max(1.0, peak32 / peak * self.lanes / self.device.teu_lanes))

    def _packing_cycles(self) -> float:
        """Cycles of copying strided inputs into vectors on entry, element by element."""
        if self.device.stores_per_cycle is None:
            return 0.0
        return PACKING_CYCLES * sum(table.packed_elements for table in self.inputs)

    def _store_cycles(self, accumulators: int) -> float:
        per_cycle = self.device.stores_per_cycle
        if per_cycle is None:
            return 0.0
        if self.vector in self.reduction:  # add the lanes together: log2(lanes) shuffles and additions
            return accumulators * (2 * log2(self.lanes) + 1) / per_cycle
        stores = accumulators * (1 if self.output.vector_use == "vector" else self.lanes)
        epilogue = sum(stage.flops_per_element for stage in self.expr.epilogue) / 2
        return stores / per_cycle + accumulators * epilogue / (self.device.fma_pipes or 1)

    def roofline_s(self) -> float:
        """Time that no program can beat: all arithmetic at peak, or every tensor moved once from the lowest layer."""
        bandwidth = self.device.lowest_layer.bandwidth_gb_per_s
        moved = sum(prod(size for size, _ in t.dims) * t.itemsize_bytes for t in (*self.inputs, self.output))
        memory = (moved + self._fused_bytes()) / (bandwidth * REPORTED_UNITS_PER_G) if bandwidth else 0.0
        return max(memory, self.expr.flops / (self.max_compute_gflops() * REPORTED_UNITS_PER_G))

    # ---- a whole rProgram --------------------------------------------------------------------------------------

    def partition_count(self, shapes: Sequence[Shape]) -> int:
        """Parts that are spread over the units: spatial tiles of the lowest layer that a unit owns (paper §3.2)."""
        return self.tile_counts(shapes[self.partition_level])[0]

    def balance(self, partitions: int) -> float:
        """Share of the units' time that is used: 81 partitions on 80 units take 2 waves and use 81 / 160."""
        units = self.device.unit_count
        return partitions / (units * -(-partitions // units))

    def predict(self, shapes: Sequence[Shape], padding: Sequence[int] = (), conflict_degree: float = 1.0) -> Prediction:
        """Predicted time of the rProgram with the tiles ``shapes`` (highest layer first).

        Compute and loads overlap, so the slowest resource binds (on a CPU less than perfectly, see `OVERLAP_NORM`); the
        launch adds to it. ``conflict_degree`` multiplies the time of reading the banked layer.
        """
        balance = self.balance(self.partition_count(shapes))
        upper = shapes[1] if not self.is_cpu and len(shapes) > 1 else None
        compute = self.compute_s(shapes[0], upper) / balance
        costs = []
        for level, shape in enumerate(shapes):
            below = self.device.layers[level + 1]
            traffic = self.traffic_bytes(level, shape)
            if level + 1 == self.last_level:
                traffic += self._fused_bytes()
            time = traffic / (below.bandwidth_gb_per_s * REPORTED_UNITS_PER_G) if below.bandwidth_gb_per_s else 0.0
            time *= conflict_degree if level == 0 else 1.0
            footprint = self.footprint_bytes(level, shape, padding if level == 1 else ())
            costs.append(
                LayerCost(layer=below.name, footprint_bytes=footprint, traffic_bytes=traffic, time_s=time / balance)
            )
        return self._bind(compute, tuple(costs))

    def _fused_bytes(self) -> float:
        points = prod(self.extents[i] for i in self.spatial)
        return points * sum(s.extra_bytes_per_element for s in (*self.expr.prologue, *self.expr.epilogue))

    def _bind(self, compute_s: float, costs: tuple[LayerCost, ...]) -> Prediction:
        launch = (self.device.launch_overhead_us or 0.0) * 1e-6
        times = {"compute": compute_s, **{cost.layer: cost.time_s for cost in costs}}
        slowest = max(times, key=lambda name: times[name])
        together = _overlapped(*_distinct_times(compute_s, costs)) if self.is_cpu else times[slowest]
        bound = "launch" if launch > times[slowest] else slowest
        return Prediction(time_s=together + launch, compute_s=compute_s, layers=costs, bound=bound)


def _overlapped(*times: float) -> float:
    """Time of activities that run at once on a CPU, a little above the longest."""
    longest = max(times)
    if longest <= 0:
        return 0.0
    return longest * pow(sum((time / longest) ** OVERLAP_NORM for time in times), 1 / OVERLAP_NORM)


def _distinct_times(compute_s: float, costs: tuple[LayerCost, ...]) -> list[float]:
    """Compute, which counts the loads from L1 already, and each layer below."""
    return [compute_s, *(cost.time_s for cost in costs[1:])]


def predict(
    expr: TensorExpr,
    tiles: Mapping[str, RTile],
    device: DeviceSpec,
    *,
    vector_axis: str | None = None,
    storage_padding: Sequence[int] = (),
) -> Prediction:
    """Predicted time of ``expr`` under ``tiles`` (layer name -> rTile over all of the expression's axes)."""
    model = PerfModel(expr, device, vector_axis)
    sizes = [tiles[layer.name].sizes for layer in device.layers[:-1]]
    return model.predict([tuple(size[name] for name in model.names) for size in sizes], storage_padding)
