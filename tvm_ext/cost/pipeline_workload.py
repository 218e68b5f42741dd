"""What ALCOP's model asks of a kernel (paper §4, Table 1), and how many of its threadblocks a unit holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

from tvm_ext.devices import occupancy
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.devices.occupancy import BlockUse, max_thread_registers, shared_limit_bytes
from tvm_ext.errors import IllegalRewrite
from tvm_ext.support.quantities import Quantity, chosen, smaller, square_root, whole_quotient

ASSEMBLER_PERCENT = 110
"""Registers that ptxas takes for a hundred planned: 106 to 110 in the median of Roller's kernels (docs/gpu.md)."""


Whole = TypeVar("Whole", covariant=True)
Real = TypeVar("Real", covariant=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopCounts(Generic[Whole, Real]):
    """What Table 1 asks of a kernel: two nested loops that load and use, counted for one threadblock.

    ``throughput`` is a key of the device's peaks (``float16_tensor``, ``float32``). ``workset_bytes`` are the distinct
    global bytes that ``workset_blocks`` concurrent blocks load in one iteration of the outer loop: what reaches memory
    when the cache serves the rest.
    """

    blocks: Whole
    warps_per_block: Whole
    other_shared_bytes: Whole  # of buffers that are not staged
    stage_bytes: Whole  # shared memory of one stage, all staged buffers
    registers_per_thread: Whole  # 32-bit, with one version of the fragments
    register_stage_registers: Whole  # 32-bit, of a thread for one more version of the fragments
    shared_trips: Whole
    register_trips: Whole
    flops_per_register_trip: Real
    bytes_per_shared_trip: Real  # global bytes that one block loads in one iteration of the outer loop
    shared_bytes_per_register_trip: Real  # bytes that one block reads from shared memory in one of the inner loop
    output_bytes_per_block: Real
    workset_bytes: Real
    workset_blocks: Whole
    throughput: str


Counted: TypeAlias = LoopCounts[Quantity, Quantity]
"""Of one kernel, or arrays with one entry a candidate."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineWorkload(LoopCounts[int, float]):
    """The counts of one kernel."""

    def __post_init__(self) -> None:
        assert min(self.blocks, self.warps_per_block, self.shared_trips, self.register_trips, self.workset_blocks) >= 1
        assert min(self.other_shared_bytes, self.stage_bytes, self.register_stage_registers) >= 0


def workset_of(counts: Counted, blocks: Quantity) -> Quantity:
    """Distinct bytes that ``blocks`` concurrent blocks load in one iteration.

    Blocks share panels of rows and of columns, whose number grows with the square root of the blocks': where 216
    tiles of 128 x 128 span 16 + 14 panels, 54 of them span half, 8 + 7.
    """
    grown = counts.workset_bytes * square_root(blocks / counts.workset_blocks)
    return smaller(grown, counts.bytes_per_shared_trip * blocks)


def shared_bytes(workload: PipelineWorkload, shared_stages: int) -> int:
    return int(shared_bytes_of(workload, shared_stages))


def shared_bytes_of(counts: Counted, shared_stages: Quantity) -> Quantity:
    return counts.other_shared_bytes + shared_stages * counts.stage_bytes


def registers(
    workload: PipelineWorkload, device: DeviceSpec, shared_stages: int, register_stages: int, held: bool
) -> int:
    return int(registers_of(workload, device, shared_stages, register_stages, held))


def registers_of(
    counts: Counted, device: DeviceSpec, shared_stages: Quantity, register_stages: Quantity, held: bool
) -> Quantity:
    """Registers of a thread; with ``held``, loads wait in registers until they are stored to shared memory.

    Worked example: tiles of 16 KiB copied by 128 threads are 128 bytes each, 32 registers.
    """
    count = counts.registers_per_thread + (register_stages - 1) * counts.register_stage_registers
    if not held:
        return count
    row = counts.warps_per_block * (device.teu_lanes * device.register_bytes)
    return count + chosen(shared_stages > 1, whole_quotient(counts.stage_bytes, row), 0)


def blocks_per_unit(workload: PipelineWorkload, device: DeviceSpec, size: int, register_count: int) -> int:
    """Blocks of ``size`` bytes of shared memory and ``register_count`` planned registers that a unit runs at a time.

    Raises IllegalRewrite, with the numbers, where not one fits.
    """
    limit, most = shared_limit_bytes(device), max_thread_registers(device)
    if size > limit:
        raise IllegalRewrite(f"{size} bytes of shared memory exceed {device.name}'s {limit} of a block")
    if register_count > most:
        raise IllegalRewrite(f"{register_count} registers exceed {device.name}'s {most} of a thread")
    threads = workload.warps_per_block * device.teu_lanes
    blocks = resident_of(threads, size, register_count, device)
    if blocks < 1:
        raise IllegalRewrite(f"{threads} threads of {register_count} registers exceed one unit of {device.name}")
    return blocks


def resident_of(threads: int, size: int, register_count: int, device: DeviceSpec) -> int:
    """Blocks of ``threads`` that a unit runs at a time; 0 where not one fits, also for what a block may not have."""
    most = max_thread_registers(device)
    if size > shared_limit_bytes(device) or register_count > most:
        return 0
    use = BlockUse(threads=threads, registers=min(most, expected_registers(register_count)), shared_bytes=size)
    return occupancy.blocks_per_unit(use, device)


def expected_registers(planned: int) -> int:
    """Registers that ptxas is expected to take: 84 for 76 planned, 88 for 80 (as a float, 1.1 * 80 is more)."""
    return -(-max(1, planned) * ASSEMBLER_PERCENT // 100)
