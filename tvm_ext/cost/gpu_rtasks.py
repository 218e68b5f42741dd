"""rTasks of GPU kernels with times: a kernel's threadblocks, which share the time that is predicted for all of them.

The time is shared out in rounds: 500 blocks, of which 320 run at a time, are two rounds. How blocks of one unit slow
each other is assumed: its throughput takes eight warps to reach, two for each of four schedulers. Of two warps each,
four blocks run as fast as one alone, and eight half as fast.
"""

from __future__ import annotations

from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.devices.occupancy import BlockUse, blocks_per_unit
from tvm_ext.records.rtasks import Need, RKernel
from tvm_ext.support.arithmetic import ceil_div

WARPS_TO_FILL = 8
"""Warps of a unit that reach its throughput: assumed."""


def gpu_rkernel(name: str, need: Need, blocks: int, time_s: float, device: DeviceSpec) -> RKernel:
    """A kernel of ``blocks`` threadblocks that takes ``time_s``, its launch not counted, where it has ``device``."""
    use = BlockUse(threads=need.threads, registers=need.registers, shared_bytes=need.shared_bytes)
    room = max(1, blocks_per_unit(use, device))
    residents = min(room, ceil_div(blocks, device.unit_count))
    task_s = time_s / ceil_div(blocks, residents * device.unit_count)
    to_fill = max(1.0, WARPS_TO_FILL / ceil_div(need.threads, device.teu_lanes))
    return RKernel(
        name=name,
        task_count=blocks,
        task_s=task_s,
        residents=max(residents, int(to_fill)),
        alone_s=min(task_s, task_s / residents * to_fill),
        threads=need.threads,
        registers=need.registers,
        shared_bytes=need.shared_bytes,
    )
