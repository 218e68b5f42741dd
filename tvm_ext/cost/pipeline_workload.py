"""What ALCOP's model asks of a kernel (paper §4, Table 1), and how many of its threadblocks a unit holds."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.errors import IllegalRewrite

SHARED, GLOBAL = "L1", "L2"
"""The layers of a GPU in the device tables: shared memory; global memory with its cache."""


REGISTERS_AT_A_TIME = 8
"""What a thread's registers are rounded up to: 256 for each warp (CUDA C++ Programming Guide, occupancy calculator)."""

ASSEMBLER_SHARE = 1.1
"""Registers that ptxas takes for each one planned: 1.06 to 1.10 in the median of Roller's kernels (docs/gpu.md)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineWorkload:
    """What Table 1 asks of a kernel: two nested loops that load and use, counted for one threadblock.

    ``throughput`` is a key of the device's peaks (``float16_tensor``, ``float32``). ``workset_bytes`` are the distinct
    global bytes that ``workset_blocks`` concurrent blocks load in one iteration of the outer loop: what reaches memory
    when the cache serves the rest.
    """

    blocks: int
    warps_per_block: int
    other_shared_bytes: int  # of buffers that are not staged
    stage_bytes: int  # shared memory of one stage, all staged buffers
    registers_per_thread: int  # 32-bit, with one version of the fragments
    register_stage_registers: int  # 32-bit, of a thread for one more version of the fragments
    shared_trips: int
    register_trips: int
    flops_per_register_trip: float
    bytes_per_shared_trip: float  # global bytes that one block loads in one iteration of the outer loop
    shared_bytes_per_register_trip: float  # bytes that one block reads from shared memory in one of the inner loop
    output_bytes_per_block: float
    workset_bytes: float
    workset_blocks: int
    throughput: str

    def __post_init__(self) -> None:
        assert min(self.blocks, self.warps_per_block, self.shared_trips, self.register_trips, self.workset_blocks) >= 1
        assert min(self.other_shared_bytes, self.stage_bytes, self.register_stage_registers) >= 0

    def workset_of(self, blocks: int) -> float:
        """Distinct bytes that ``blocks`` concurrent blocks load in one iteration.

        Blocks share panels of rows and of columns, whose number grows with the square root of the blocks': where 216
        tiles of 128 x 128 span 16 + 14 panels, 54 of them span half, 8 + 7.
        """
        return min(self.workset_bytes * sqrt(blocks / self.workset_blocks), self.bytes_per_shared_trip * blocks)


def shared_limit_bytes(device: DeviceSpec) -> int:
    """Shared memory that one block may have, on request where it must be asked for."""
    layer = device.layer(SHARED)
    return max(layer.capacity_bytes or 0, layer.opt_in_capacity_bytes or 0)


def shared_bytes(workload: PipelineWorkload, shared_stages: int) -> int:
    return workload.other_shared_bytes + shared_stages * workload.stage_bytes


def registers(
    workload: PipelineWorkload, device: DeviceSpec, shared_stages: int, register_stages: int, held: bool
) -> int:
    """Registers of a thread; with ``held``, loads wait in registers until they are stored to shared memory.

    Worked example: tiles of 16 KiB copied by 128 threads are 128 bytes each, 32 registers.
    """
    count = workload.registers_per_thread + (register_stages - 1) * workload.register_stage_registers
    if held and shared_stages > 1:
        count += -(-workload.stage_bytes // (workload.warps_per_block * device.teu_lanes * device.register_bytes))
    return count


def blocks_per_unit(workload: PipelineWorkload, device: DeviceSpec, size: int, register_count: int) -> int:
    """Blocks of ``size`` bytes of shared memory and ``register_count`` registers a thread that one unit runs at a time.

    Limited by shared memory, registers, threads and blocks of a unit. Raises IllegalRewrite where not one fits.
    """
    limit, threads = shared_limit_bytes(device), workload.warps_per_block * device.teu_lanes
    if size > limit:
        raise IllegalRewrite(f"{size} bytes of shared memory exceed {device.name}'s {limit} of a block")
    most = device.max_registers_per_thread or device.register_limit
    if register_count > most:
        raise IllegalRewrite(f"{register_count} registers exceed {device.name}'s {most} of a thread")
    allocated = min(most, _allocated(register_count))
    layer = device.layer(SHARED)
    taken = size + (layer.block_reserved_bytes or 0)
    limits = [device.max_blocks_per_unit or workload.blocks]
    if taken:
        limits.append((layer.unit_capacity_bytes or limit) // taken)
    if device.registers_per_unit is not None:
        limits.append(device.registers_per_unit // (threads * allocated))
    if device.max_threads_per_unit is not None:
        limits.append(device.max_threads_per_unit // threads)
    if min(limits) < 1:
        raise IllegalRewrite(f"{threads} threads of {register_count} registers exceed one unit of {device.name}")
    return min(limits)


def _allocated(register_count: int) -> int:
    """Registers that a unit sets aside for a thread. Worked example: of 76 planned, 83.6 are expected, 88 set aside."""
    return -(-int(max(1, register_count) * ASSEMBLER_SHARE + 0.999) // REGISTERS_AT_A_TIME) * REGISTERS_AT_A_TIME
