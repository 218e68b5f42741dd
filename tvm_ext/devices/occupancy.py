"""How many blocks one execution unit of a GPU runs at a time: its shared memory, registers, threads and blocks.

The rules are those of NVIDIA's occupancy calculator (cuda_occupancy.h, CUDA 13.0); the numbers are the device tables'.
`tests/unit/devices/test_occupancy.py` has the calculator's own answers.

* *Shared memory.* A block takes what it asks for and what the driver reserves for each block (1 KiB from capability
  8.0 on), rounded up to whole granules (128 bytes from 8.0 on, 256 before). Worked example, A100: 32 KiB take 33 KiB,
  and a unit's 164 KiB hold 4 of them. (32 KiB would go 5 times into the 163 KiB that one block may ask for.)
* *Registers* are given to warps, in whole granules of 256: 88 a thread are 2816 a warp, 89 to 96 are 3072. Each of a
  unit's schedulers has a share of them and its own warps: of 16384, 5 warps of 3072, so that a unit of four holds 20,
  two blocks of 8 warps. (65536 / 3072 would be 21.) One block may not have more than ``registers_per_block``, for which
  its warps are rounded up to four.
* *Threads* take whole warps: a unit of 2048 holds 64, however many lanes of them are in use.
* *Blocks* have a limit of their own.

What a table does not say (the IPU has no registers per unit) sets no limit. AMD's rules have the same form: registers
by wavefront, a quarter of them for each SIMD unit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tvm_ext.support.arithmetic import ceil_div

from .hal import DeviceSpec, MemoryLayer

SHARED, GLOBAL = "L1", "L2"
"""The layers of a GPU in the device tables: shared memory; global memory with its cache."""

Resource = Literal["shared memory", "registers", "threads", "blocks"]


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockUse:
    """What a block takes: its threads, 32-bit registers of each, and the shared memory that it asks for."""

    threads: int
    registers: int
    shared_bytes: int

    def __post_init__(self) -> None:
        assert self.threads >= 1
        assert min(self.registers, self.shared_bytes) >= 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Occupancy:
    """Blocks that a unit runs at a time, and of each resource how many it would have room for."""

    limits: tuple[tuple[Resource, int], ...]

    @property
    def blocks(self) -> int:
        """0 where not one block fits."""
        return min(count for _, count in self.limits)


def occupancy(use: BlockUse, device: DeviceSpec) -> Occupancy:
    """How many blocks of ``use`` a unit of ``device`` runs at a time, and what sets the limit."""
    known: dict[Resource, int | None] = {
        "shared memory": _by_shared_memory(use.shared_bytes, device),
        "registers": _by_registers(use, device),
        "threads": _by_threads(use.threads, device),
        "blocks": device.max_blocks_per_unit,
    }
    limits = tuple((resource, count) for resource, count in known.items() if count is not None)
    assert limits, f"{device.name}: the table says nothing of what a unit holds"
    return Occupancy(limits=limits)


def blocks_per_unit(use: BlockUse, device: DeviceSpec) -> int:
    """Blocks of ``use`` that a unit runs at a time; 0 where not one fits."""
    return occupancy(use, device).blocks


# --- shared memory ---------------------------------------------------------------------------------------------------


def static_shared_bytes(device: DeviceSpec) -> int:
    """Shared memory that a block has without asking: what a kernel may declare as ``__shared__`` arrays."""
    return device.layer(SHARED).capacity_bytes or 0


def shared_limit_bytes(device: DeviceSpec) -> int:
    """Shared memory that one block may have, on request where it must be asked for."""
    return layer_limit_bytes(device.layer(SHARED))


def layer_limit_bytes(layer: MemoryLayer) -> int:
    """What one block may have of ``layer``, on request where it must be asked for."""
    return max(layer.capacity_bytes or 0, layer.opt_in_capacity_bytes or 0)


def taken_shared_bytes(size_bytes: int, device: DeviceSpec) -> int:
    """What a block that asks for ``size_bytes`` takes of its unit's shared memory."""
    layer = device.layer(SHARED)
    return _rounded_up(size_bytes + (layer.block_reserved_bytes or 0), layer.granule_bytes or 1)


def _by_shared_memory(size_bytes: int, device: DeviceSpec) -> int | None:
    layer = device.layer(SHARED)
    most = layer_limit_bytes(layer)
    if size_bytes > most:
        return 0
    taken = taken_shared_bytes(size_bytes, device)
    return (layer.unit_capacity_bytes or most) // taken if taken else None


# --- registers -------------------------------------------------------------------------------------------------------


def max_thread_registers(device: DeviceSpec) -> int:
    """Registers that the hardware can give a thread, whatever the construction's budget is."""
    return device.max_registers_per_thread or device.register_limit


def warp_registers(registers: int, device: DeviceSpec) -> int:
    """Registers that are set aside for a warp whose threads use so many."""
    return _rounded_up(registers * device.teu_lanes, device.register_granule or device.teu_lanes)


def block_registers(use: BlockUse, device: DeviceSpec) -> int:
    """Registers that a block is counted with where it is started; more than `block_register_limit` is refused."""
    return warp_registers(use.registers, device) * _counted_warps(use.threads, device)


def block_register_limit(device: DeviceSpec) -> int | None:
    """What `block_registers` may be at most; None where the table does not say."""
    return device.registers_per_block or device.registers_per_unit


def registers_left(threads: int, device: DeviceSpec, *, blocks: int = 1) -> int:
    """The most registers of a thread with which ``blocks`` blocks of ``threads`` fit a unit.

    Worked example: 18 warps are 5 on one of 4 schedulers, whose 16384 registers leave 3276 to a warp, 3072 in whole
    granules: 96 to a thread.
    """
    most = max_thread_registers(device)
    if device.registers_per_unit is None:
        return most
    warps = _warps(threads, device)
    deepest = -(-blocks * warps // device.teus_per_unit)
    by_unit = device.registers_per_unit // device.teus_per_unit // deepest
    by_block = (block_register_limit(device) or 0) // _counted_warps(threads, device)
    granule = device.register_granule or device.teu_lanes
    return min(most, min(by_unit, by_block) // granule * granule // device.teu_lanes)


def _by_registers(use: BlockUse, device: DeviceSpec) -> int | None:
    if device.registers_per_unit is None:
        return None
    limit = block_register_limit(device) or 0
    if use.registers > max_thread_registers(device) or block_registers(use, device) > limit:
        return 0
    held = _held_warps(use.registers, device)
    return None if held is None else held // _warps(use.threads, device)


def _held_warps(registers: int, device: DeviceSpec) -> int | None:
    """Warps of so many registers a thread that a unit has registers for; None where nothing limits them."""
    if device.registers_per_unit is None or registers == 0:
        return None
    own = device.registers_per_unit // device.teus_per_unit
    return own // warp_registers(registers, device) * device.teus_per_unit


# --- threads ---------------------------------------------------------------------------------------------------------


def max_block_threads(device: DeviceSpec, *, registers: int = 0, blocks: int = 1) -> int | None:
    """The most threads that a block may have so that ``blocks`` of them, of so many registers a thread, fit a unit.

    None where the table sets no limit. Worked example: of 96 registers, four schedulers hold 20 warps, 640 threads.
    """
    limits = [] if device.max_threads_per_block is None else [device.max_threads_per_block]
    lanes, held = device.teu_lanes, _held_warps(registers, device)
    if held is not None:
        limits.append(held // blocks * lanes)
        by_block = (block_register_limit(device) or 0) // warp_registers(registers, device)
        granule = device.warp_granule or 1
        limits.append(by_block // granule * granule * lanes)
    if blocks > 1 and device.max_threads_per_unit is not None:
        limits.append(device.max_threads_per_unit // lanes // blocks * lanes)
    return min(limits, default=None)


def _by_threads(threads: int, device: DeviceSpec) -> int | None:
    if device.max_threads_per_block is not None and threads > device.max_threads_per_block:
        return 0
    if device.max_threads_per_unit is None:
        return None
    return device.max_threads_per_unit // device.teu_lanes // _warps(threads, device)


def _warps(threads: int, device: DeviceSpec) -> int:
    return ceil_div(threads, device.teu_lanes)


def _counted_warps(threads: int, device: DeviceSpec) -> int:
    return _rounded_up(_warps(threads, device), device.warp_granule or 1)


def _rounded_up(count: int, granule: int) -> int:
    return ceil_div(count, granule) * granule
