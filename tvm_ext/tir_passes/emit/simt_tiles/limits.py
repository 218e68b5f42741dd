"""What a SIMT kernel takes of its device: a thread's registers, a block's shared memory; refusals with the numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tvm_ext.analysis.computation_exprs import itemsize_bytes
from tvm_ext.analysis.computations import Computation
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.errors import IllegalRewrite
from tvm_ext.ir.simt_ir import VECTOR_BYTES, gpu_buffer

from .banks import with_buffer
from .operands import Operand, plan_operands
from .tiling import SimtTiling

ADDRESS_REGISTERS = 24
"""Registers beside accumulators and operands: addresses, loop counters, what a copy has in flight."""

REGISTER_STEP = 8
"""Registers of a thread are allocated in multiples of this."""


def planned_registers(tiling: SimtTiling, operands: Sequence[Operand], device: DeviceSpec) -> int:
    """Registers that the plan needs; raises IllegalRewrite where a thread has not so many."""
    accumulators = -(-int(tiling.accumulators * itemsize_bytes(tiling.accumulator_dtype)) // 4)
    fragments = sum(operand.registers for operand in operands)
    needed = accumulators + fragments + ADDRESS_REGISTERS
    limit = min(device.register_limit + ADDRESS_REGISTERS, registers_left(tiling, device))
    if needed > limit:
        raise IllegalRewrite(
            f"{tiling.computation.name}: "
            f"{accumulators} accumulators, {fragments} operands and {ADDRESS_REGISTERS} others "
            f"are {needed} registers; {device.name} leaves {limit} to each of {tiling.thread_count} threads"
        )
    return needed


def registers_left(tiling: SimtTiling, device: DeviceSpec) -> int:
    """Registers that each thread of one block can have at most: each scheduler shares its own among its warps.

    Worked example: 18 warps are 5 on one of 4 schedulers, whose 16384 registers leave 16384 / (5 * 32) = 102 to a
    thread, allocated by 8: 96.
    """
    if device.registers_per_unit is None:
        return device.register_limit + ADDRESS_REGISTERS
    warps = -(-tiling.thread_count // device.teu_lanes)
    deepest = -(-warps // device.teus_per_unit)
    each = device.registers_per_unit // device.teus_per_unit // (deepest * device.teu_lanes)
    return each // REGISTER_STEP * REGISTER_STEP


def _shared_bytes(tiling: SimtTiling, operands: Sequence[Operand]) -> int:
    sizes = [int(o.box.elements * itemsize_bytes(o.box.box.dtype)) for o in operands if o.box is not None]
    return sum(-(-size // VECTOR_BYTES) * VECTOR_BYTES for size in (*sizes, _partial_bytes(tiling)))


def _partial_bytes(tiling: SimtTiling) -> int:
    elements = tiling.split // 2 * tiling.accumulators * tiling.group_threads
    return int(elements * itemsize_bytes(tiling.accumulator_dtype))


def in_shared_memory(
    tiling: SimtTiling, operands: tuple[Operand, ...], prologue: Sequence[Computation], device: DeviceSpec
) -> tuple[SimtTiling, tuple[Operand, ...], str, int]:
    """The operands with their buffers, and the scope; fewer thread groups where their sums do not fit."""
    layer = device.layer("L1")
    capacity = layer.capacity_bytes or 0
    while _shared_bytes(tiling, operands) > capacity and tiling.split > 1:
        fewer = tiling.split // 2
        tiling = replace(tiling, split=fewer, split_axis=tiling.split_axis if fewer > 1 else None)
        tiling, operands = plan_operands(tiling, prologue, device)
    total = _shared_bytes(tiling, operands)
    opt_in = layer.opt_in_capacity_bytes if device.kind == "cuda" else None
    if total > max(capacity, opt_in or 0):
        raise IllegalRewrite(
            f"{tiling.computation.name}: its data tiles take {total} bytes of shared memory, {device.name} has "
            f"{max(capacity, opt_in or 0)} for a block"
        )
    scope = "shared" if total <= capacity else "shared.dyn"
    return tiling, tuple(_with_buffer(operand, scope) for operand in operands), scope, total


def _with_buffer(operand: Operand, scope: str) -> Operand:
    if operand.box is None:
        return operand
    name = operand.fragment.name.replace("_fragment", "_shared")
    buffer = gpu_buffer((operand.box.elements,), operand.box.box.dtype, name, scope)
    return replace(operand, box=with_buffer(operand.box, buffer))


def partial_sums(tiling: SimtTiling, scope: str) -> Any:
    if tiling.split == 1:
        return None
    elements = tiling.split // 2 * tiling.accumulators * tiling.group_threads
    return gpu_buffer((elements,), tiling.accumulator_dtype, "partial", scope)
