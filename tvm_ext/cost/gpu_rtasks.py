"""rTasks of GPU kernels with times: a kernel's threadblocks, which share the time that is predicted for all of them.

The time is shared out in rounds: 500 blocks, of which 320 run at a time, are two rounds. How blocks of one unit slow
each other is assumed: its throughput takes eight warps to reach, two for each of four schedulers. Of two warps each,
four blocks run as fast as one alone, and eight half as fast; but never faster together than the unit's busiest
resource allows. A kernel of which one block keeps that busy all the time, by its own model, shares it from the second.
"""

from __future__ import annotations

from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.devices.occupancy import BlockUse, blocks_per_unit
from tvm_ext.records.rtasks import Need, RKernel
from tvm_ext.support.arithmetic import ceil_div

WARPS_TO_FILL = 8
"""Warps of a unit that reach its throughput: assumed."""


def shortest_s(device: DeviceSpec) -> float:
    """Seconds that a kernel takes at least without its launch; 0.0 where the table does not say."""
    return (device.least_kernel_us or 0.0) * 1e-6


def unplanned_registers(device: DeviceSpec) -> int:
    """What a thread is taken to have of a kernel that no emitter planned, until the compiler says."""
    return device.unplanned_registers or device.register_limit


def gpu_rkernel(
    name: str, need: Need, blocks: int, time_s: float, device: DeviceSpec, busy_s: float | None = None
) -> RKernel:
    """A kernel of ``blocks`` threadblocks that takes ``time_s``, its launch not counted, where it has ``device``.

    ``busy_s`` is how long that takes of the device's busiest resource, if all units have as much of it; None: unknown.
    """
    use = BlockUse(threads=need.threads, registers=need.registers, shared_bytes=need.shared_bytes)
    room = max(1, blocks_per_unit(use, device))
    residents = min(room, ceil_div(blocks, device.unit_count))
    task_s = time_s / ceil_div(blocks, residents * device.unit_count)
    to_fill = max(1.0, WARPS_TO_FILL / ceil_div(need.threads, device.teu_lanes))
    allowed = to_fill if not busy_s else min(to_fill, task_s * blocks / (busy_s * device.unit_count))
    return RKernel(
        name=name,
        task_count=blocks,
        task_s=task_s,
        residents=max(residents, int(allowed)),
        alone_s=min(task_s, task_s / residents * to_fill),
        threads=need.threads,
        registers=need.registers,
        shared_bytes=need.shared_bytes,
    )
