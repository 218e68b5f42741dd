"""What a SIMT kernel takes of its device: a thread's registers, a block's shared memory; refusals with the numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tvm_ext._tvm import Buffer
from tvm_ext.analysis.computation_exprs import itemsize_bytes
from tvm_ext.analysis.computations import Computation
from tvm_ext.cost.thread_losses import OTHER_REGISTERS
from tvm_ext.devices.gpu import VECTOR_BYTES
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.devices.occupancy import registers_left, shared_limit_bytes, static_shared_bytes
from tvm_ext.errors import IllegalRewrite
from tvm_ext.ir.simt_ir import gpu_buffer
from tvm_ext.support.arithmetic import ceil_div

from .banks import with_buffer
from .operands import Operand, plan_operands
from .tiling import SimtTiling


def planned_registers(tiling: SimtTiling, operands: Sequence[Operand], device: DeviceSpec) -> int:
    """Registers that the plan needs; raises IllegalRewrite where a thread has not so many."""
    accumulators = ceil_div(int(tiling.accumulators * itemsize_bytes(tiling.accumulator_dtype)), 4)
    fragments = sum(operand.registers for operand in operands)
    needed = accumulators + fragments + OTHER_REGISTERS
    limit = min(device.register_limit + OTHER_REGISTERS, registers_left(tiling.thread_count, device))
    if needed > limit:
        raise IllegalRewrite(
            f"{tiling.computation.name}: "
            f"{accumulators} accumulators, {fragments} operands and {OTHER_REGISTERS} others "
            f"are {needed} registers; {device.name} leaves {limit} to each of {tiling.thread_count} threads"
        )
    return needed


def _shared_bytes(tiling: SimtTiling, operands: Sequence[Operand]) -> int:
    sizes = [int(o.box.elements * itemsize_bytes(o.box.box.dtype)) for o in operands if o.box is not None]
    return sum(ceil_div(size, VECTOR_BYTES) * VECTOR_BYTES for size in (*sizes, _partial_bytes(tiling)))


def _partial_bytes(tiling: SimtTiling) -> int:
    elements = tiling.split // 2 * tiling.accumulators * tiling.group_threads
    return int(elements * itemsize_bytes(tiling.accumulator_dtype))


def in_shared_memory(
    tiling: SimtTiling, operands: tuple[Operand, ...], prologue: Sequence[Computation], device: DeviceSpec
) -> tuple[SimtTiling, tuple[Operand, ...], str, int]:
    """The operands with their buffers, and the scope; fewer thread groups where their sums do not fit."""
    capacity, most = static_shared_bytes(device), shared_limit_bytes(device)
    while _shared_bytes(tiling, operands) > capacity and tiling.split > 1:
        fewer = tiling.split // 2
        tiling = replace(tiling, split=fewer, split_axis=tiling.split_axis if fewer > 1 else None)
        tiling, operands = plan_operands(tiling, prologue, device)
    total = _shared_bytes(tiling, operands)
    if total > most:
        raise IllegalRewrite(
            f"{tiling.computation.name}: its data tiles take {total} bytes of shared memory, {device.name} has "
            f"{most} for a block"
        )
    scope = "shared" if total <= capacity else "shared.dyn"
    return tiling, tuple(_with_buffer(operand, scope) for operand in operands), scope, total


def _with_buffer(operand: Operand, scope: str) -> Operand:
    if operand.box is None:
        return operand
    name = operand.fragment.name.replace("_fragment", "_shared")
    buffer = gpu_buffer((operand.box.elements,), operand.box.box.dtype, name, scope)
    return replace(operand, box=with_buffer(operand.box, buffer))


def partial_sums(tiling: SimtTiling, scope: str) -> Buffer:
    if tiling.split == 1:
        return None
    elements = tiling.split // 2 * tiling.accumulators * tiling.group_threads
    return gpu_buffer((elements,), tiling.accumulator_dtype, "partial", scope)
