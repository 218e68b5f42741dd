"""How long a row kernel takes where its inputs are still in a cache: what decides whether it is worth a fork.

The performance model reads inputs from DRAM, as the paper does. Between two layers of a network that is wrong by up to
six times: 400 KB that the last kernel wrote come from L2, and one core has them reduced in the time that waking the
other one takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import log2, prod

from tvm_ext._tvm import Buffer, Call, nodes_in, tirx
from tvm_ext.analysis.computation_exprs import count_flops, flat_stride, is_gather, itemsize_bytes, tensor_bytes
from tvm_ext.analysis.computations import Computation, dtype_of, mentions
from tvm_ext.analysis.predicates import contiguous_in, is_in
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.devices.machine import WARM, Machine
from tvm_ext.ir.build_ir import VECTORIZED, accumulator_dtype, lanes_of, vector_kind, vectors
from tvm_ext.records.rprogram import LayerCost, Prediction
from tvm_ext.records.tuning import RowTiles

CIRCULAR = ("sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh")
LIKE_EXP = frozenset((*CIRCULAR, "pow", "exp2", "log2", "log10", "log1p"))
"""Functions that are arithmetic, too, and count as an exp: none of them was measured."""
GATHER_OPERATIONS = 2  # of a lane whose address is loaded: a cycle (1.4 on a Zen 5); of one that is a step away 1
LIBRARY_OPERATIONS = 14  # of a lane that calls the C library: 7 cycles of a float64's sine on a Zen 5
LIBRARY_FUNCTIONS = frozenset(f"tirx.{name}" for name in ("asinh", "acosh", "atanh"))
WIDE_LIBRARY_FUNCTIONS = LIBRARY_FUNCTIONS | {f"tirx.{name}" for name in CIRCULAR}
LEAST_LANES = 4  # that save anything over additions one by one
ASSUMED_RESULTS_PER_S = 8e9  # of one unit whose rate for a type is not known


class RowClock:
    """What ``computations``, which run row by row together, take on ``device``: for threads and tuning.

    The longer of moving each tensor once and of the arithmetic. Worked example, mean over 2048 rows of 49 on a unit of
    210 GB/s from L2 and 126 G operations/s: 409,600 bytes take 1.95 us, 200,704 operations 0.1 us (they fill lanes);
    on two units half of 1.95 us.
    """

    def __init__(self, computations: Sequence[Computation], device: DeviceSpec) -> None:
        self.computations, self.device, self.machine = computations, device, Machine(device)

    def predict(self, way: RowTiles) -> Prediction:
        """On all cores or on one, with what additions wait for each other."""
        units = self.device.unit_count if way.forks else 1
        moved = self._transfer()
        cost = replace(moved, time_s=moved.time_s / units)
        compute_s = (self.arithmetic_s() + self._waiting_s(way.registers)) / units
        return self.machine.bind(compute_s, (cost,), launches=int(way.forks))

    def _transfer(self) -> LayerCost:
        """Moving each tensor once, of gathered tables what is read; by one unit, from the layer that holds them."""
        buffers: list[Buffer] = []
        gathered: list[LayerCost] = []
        inner = [computation.target for computation in self.computations[:-1]]
        for computation in self.computations:
            tables = [load.source for load in computation.loads() if is_gather(load.indices)]
            for buffer in (*(load.source for load in computation.loads()), computation.target):
                if is_in(buffer, buffers) or is_in(buffer, inner):
                    continue
                if is_in(buffer, tables):
                    gathered.append(self._gathered(buffer, computation))
                else:
                    buffers.append(buffer)
        total = sum(tensor_bytes(buffer) for buffer in buffers)
        parts = [*gathered, self._moved(total, total)]
        return replace(
            max(parts, key=lambda part: part.time_s),
            footprint_bytes=sum(part.footprint_bytes for part in parts),
            traffic_bytes=sum(part.traffic_bytes for part in parts),
            time_s=sum(part.time_s for part in parts),
        )

    def _gathered(self, table: Buffer, computation: Computation) -> LayerCost:
        """Reading a part of ``table`` from the layer that holds all of it.

        Worked example, 128 rows of 768 floats from a table of 30522: 393 KB, not 94 MB, but from DRAM.
        """
        whole = tensor_bytes(table)
        return self._moved(whole, min(whole, computation.point_count * itemsize_bytes(dtype_of(table))))

    def _moved(self, whole_bytes: float, read_bytes: float) -> LayerCost:
        layer = self.machine.holder(whole_bytes, WARM)
        time_s = read_bytes / self.machine.rate(layer) * self.device.unit_count
        return LayerCost(layer=layer.name, footprint_bytes=whole_bytes, traffic_bytes=read_bytes, time_s=time_s)

    def arithmetic_s(self) -> float:
        """Seconds of the arithmetic on one unit."""
        operations = sum(
            own.point_count
            * (operations_per_point(own, self.machine) + self.device.teu_lanes * self._operations_per_lane(own))
            for own in self.computations
        )
        all_units = self.machine.results_per_s(dtype_of(self.computations[-1].target))
        return operations / (all_units / self.device.unit_count or ASSUMED_RESULTS_PER_S)

    def _operations_per_lane(self, computation: Computation) -> int:
        """What is done for each lane by itself: addresses that are no vector's, and calls."""
        by_library = WIDE_LIBRARY_FUNCTIONS if dtype_of(computation.target) == "float64" else LIBRARY_FUNCTIONS
        called = sum(getattr(call.op, "name", "") in by_library for call in nodes_in(computation.value, Call))
        if not computation.spatial or computation.is_reduction:
            return LIBRARY_OPERATIONS * called
        last, loads = computation.spatial[-1], computation.loads()
        gathers = sum(is_gather([i]) and mentions([i], last) for item in loads for i in item.indices)
        apart = sum(flat_stride(item, last, computation) not in (0, 1, None) for item in loads)
        return GATHER_OPERATIONS * gathers + LIBRARY_OPERATIONS * called + apart

    def _waiting_s(self, registers: int) -> float:
        """Seconds on one unit that additions wait for each other: 4 cycles of latency on 2 registers are 2."""
        waiting, hz = max(0.0, (self.device.fma_latency_cycles or 0) / registers - 1), self.machine.vector_hz
        steps = sum(
            computation.point_count / reduction_lanes(computation, self.device)
            for computation in self.computations
            if computation.is_reduction and is_vectorised(computation, self.device)
        )
        return (steps * waiting + self._halving_cycles()) / hz if hz else 0.0

    def _halving_cycles(self) -> float:
        """Cycles that the lanes of reduced rows are added up in, a register by halves: 4 times for 16 lanes.

        A half waits for the one before; between those of other rows, a cycle each is left of that.
        """
        return sum(
            computation.point_count
            / prod(map(computation.extent, computation.reduction))
            * log2(reduction_lanes(computation, self.device))
            for computation in self.computations
            if computation.is_reduction and is_vectorised(computation, self.device)
        )


def operations_per_point(computation: Computation, machine: Machine) -> float:
    """Vector instructions for a register of results: functions, and quotients by what is no number, of its own axis.

    What is the same along it, as a row's root, is computed once a row.
    """
    kinds: list[str] = []
    lanes = (*computation.spatial[-1:], *computation.reduction[-1:])

    for node in nodes_in(computation.value, (Call, tirx.Div)):
        inner = node.b if isinstance(node, tirx.Div) else node
        if mentions(inner, *lanes) and not is_simple_power(node):
            kinds.append("divide" if isinstance(node, tirx.Div) else getattr(node.op, "name", "").removeprefix("tirx."))
    dear = sum(machine.instructions("exp" if kind in LIKE_EXP else kind) for kind in kinds)
    return count_flops(computation.value) + computation.is_reduction + dear


def is_simple_power(node: Call | tirx.Div) -> bool:
    """Whether ``node`` is a power by a number, which roots and products give."""
    return getattr(getattr(node, "op", None), "name", "") == "tirx.pow" and hasattr(node.args[1], "value")


def is_vectorised(computation: Computation, device: DeviceSpec) -> bool:
    """Whether a kernel of rows runs along the last reduction axis in SIMD registers, or in a part of one."""
    last = computation.reduction[-1]
    wide = reduction_lanes(computation, device) >= min(LEAST_LANES, device.teu_lanes) > 1
    return wide and contiguous_in(computation, last) and vector_kind(computation.value) == VECTORIZED


def reduction_lanes(computation: Computation, device: DeviceSpec) -> int:
    """Elements in one register of what a reduction is accumulated in; 8 of 16 where a row has 13."""
    lanes = lanes_of(accumulator_dtype(dtype_of(computation.target)), device.register_bytes)
    return vectors(computation.extent(computation.reduction[-1]), lanes)[0][1]
