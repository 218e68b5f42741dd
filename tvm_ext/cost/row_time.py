"""How long a row kernel takes where its inputs are still in a cache: what decides whether it is worth a fork.

The performance model reads inputs from DRAM, as the paper does. Between two layers of a network that is wrong by up to
six times: 400 KB that the last kernel wrote come from L2, and one core has them reduced in the time that waking the
other one takes.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm_ext._tvm import Buffer, Call, structural_walk
from tvm_ext.analysis.computation_exprs import count_flops, is_gather, itemsize_bytes, tensor_bytes
from tvm_ext.analysis.computations import Computation, dtype_of
from tvm_ext.analysis.predicates import contiguous_in, is_in
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.devices.machine import WARM, Machine
from tvm_ext.ir.build_ir import VECTORIZED, accumulator_dtype, lanes_of, vector_kind
from tvm_ext.records.tuning import RowTiles

CALL_OPERATIONS = 16  # vector instructions of an exp, erf or tanh, see vector_math
ASSUMED_GFLOPS = 16.0  # of one unit whose rate for a type is not known


def row_time_s(computations: Sequence[Computation], device: DeviceSpec) -> float:
    """Seconds of ``computations`` on all units together: the longer of moving each tensor once and of the arithmetic.

    Worked example, mean over 2048 rows of 49 on a unit of 210 GB/s from L2 and 126 G operations/s: 409,600 bytes take
    1.95 us, 200,704 operations 0.1 us (they fill lanes); on two units half of 1.95 us.
    """
    busy_s = max(_transfer_s(computations, device), arithmetic_s(computations, device))
    return busy_s / device.unit_count


def _transfer_s(computations: Sequence[Computation], device: DeviceSpec) -> float:
    buffers: list[Buffer] = []
    gathered_s = 0.0
    inner = [computation.target for computation in computations[:-1]]
    for computation in computations:
        tables = [load.source for load in computation.loads() if is_gather(load.indices)]
        for buffer in (*(load.source for load in computation.loads()), computation.target):
            if is_in(buffer, buffers) or is_in(buffer, inner):
                continue
            if is_in(buffer, tables):
                gathered_s += _gathered_s(buffer, computation, device)
            else:
                buffers.append(buffer)
    total = sum(tensor_bytes(buffer) for buffer in buffers)
    return gathered_s + total / Machine(device).held_rate(total, WARM) * device.unit_count


def _gathered_s(table: Buffer, computation: Computation, device: DeviceSpec) -> float:
    """Seconds of reading a part of ``table`` from the layer that holds all of it.

    Worked example, 128 rows of 768 floats from a table of 30522: 393 KB, not 94 MB, but from DRAM.
    """
    whole = tensor_bytes(table)
    read = min(whole, computation.point_count * itemsize_bytes(dtype_of(table)))
    return read / Machine(device).held_rate(whole, WARM) * device.unit_count


def arithmetic_s(computations: Sequence[Computation], device: DeviceSpec) -> float:
    """Seconds of the arithmetic of ``computations`` on one unit."""
    operations = sum(computation.point_count * operations_per_point(computation) for computation in computations)
    # A peak counts a multiply-add as two operations.
    peak = device.peak_gflops_of(dtype_of(computations[-1].target)) or ASSUMED_GFLOPS * device.unit_count
    return operations / (peak / 2 / device.unit_count * 1e9)


def operations_per_point(computation: Computation, call_operations: int = CALL_OPERATIONS) -> float:
    """Vector instructions for a register of results, ``call_operations`` of them for each function."""
    calls: list[bool] = []
    structural_walk(computation.value, (Call, lambda _: calls.append(True)))
    return count_flops(computation.value) + computation.is_reduction + call_operations * len(calls)


def is_vectorised(computation: Computation, device: DeviceSpec) -> bool:
    """Whether a kernel of rows runs along the last reduction axis in SIMD registers."""
    last = computation.reduction[-1]
    lanes = reduction_lanes(computation, device)
    wide = computation.extent(last) >= lanes > 1
    return wide and contiguous_in(computation, last) and vector_kind(computation.value) == VECTORIZED


def reduction_lanes(computation: Computation, device: DeviceSpec) -> int:
    """Elements in one register of what a reduction is accumulated in."""
    return lanes_of(accumulator_dtype(dtype_of(computation.target)), device.register_bytes)


def row_seconds(computations: Sequence[Computation], way: RowTiles, device: DeviceSpec) -> float:
    """On all cores or on one, with what additions wait for each other: 4 cycles of latency on 2 registers are 2."""
    units = device.unit_count if way.forks else 1
    busy_s = row_time_s(computations, device) * device.unit_count / units
    waiting = max(0.0, (device.fma_latency_cycles or 0) / way.registers - 1)
    steps = sum(
        computation.point_count / reduction_lanes(computation, device)
        for computation in computations
        if computation.is_reduction and is_vectorised(computation, device)
    )
    hz = Machine(device).vector_hz
    launch_s = Machine(device).launch_s if way.forks else 0.0
    return busy_s + (steps * waiting / hz / units if hz else 0.0) + launch_s
