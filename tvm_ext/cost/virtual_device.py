"""The virtual execution units of a device (Rammer, paper §3.2, §4.1.2): how many, and what running on them costs.

A GPU's unit runs as many vEUs, persistent threadblocks, as fit it of the most demanding rTask: the threads, registers
and shared memory of one kernel that all rTasks are compiled into. Worked example, V100: rTasks of 256 threads with 64
registers and 24 KiB of shared memory at most fit four times (registers and shared memory both), 320 vEUs on 80 SMs. A
CPU's core and an IPU's tile are one vEU each.
"""

from __future__ import annotations

from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.devices.machine import Machine
from tvm_ext.devices.occupancy import BlockUse, blocks_per_unit
from tvm_ext.errors import IllegalRewrite
from tvm_ext.records.rtasks import Need, VDevice


def virtual_device(device: DeviceSpec, need: Need) -> VDevice:
    """The vEUs of ``device`` for a program whose rTasks need ``need`` at most (`need_of` its kernels).

    Raises IllegalRewrite where a unit has no room for one of them.
    """
    own_cache = _own_cache(device)
    return VDevice(
        name=device.name,
        unit_count=device.unit_count,
        veus_per_unit=1 if device.kind in ("cpu", "ipu") else _resident_blocks(device, need),
        task_overhead_s=(device.dispatch_ns or 0.0) * 1e-9,
        barrier_s=(device.handoff_ns or 0.0) * 1e-9,
        launch_s=Machine(device).launch_s,
        cache_bytes=0 if own_cache is None else own_cache[0],
        refill_gb_per_s=None if own_cache is None else own_cache[1],
        fine_barriers=device.kind != "ipu",
    )


def _resident_blocks(device: DeviceSpec, need: Need) -> int:
    use = BlockUse(threads=max(need.threads, 1), registers=need.registers, shared_bytes=need.shared_bytes)
    blocks = blocks_per_unit(use, device)
    if not blocks:
        raise IllegalRewrite(
            f"rTasks that need {use.threads} threads, {use.registers} registers each and {use.shared_bytes} bytes of "
            f"shared memory, if not one rTask all of it, fit no unit of {device.name}.",
            "run them in programs of their own",
        )
    return blocks


def _own_cache(device: DeviceSpec) -> tuple[int, float] | None:
    """Bytes of a core's own last cache, and the GB/s at which one core fills it; None where rTasks keep nothing.

    A GPU's constants stay in the cache that all units share, whichever vEU runs an rTask.
    """
    if device.kind != "cpu":
        return None
    own = Machine(device).own_cache
    if own is None or own.capacity_bytes is None:
        return None
    rate = device.layers[device.layers.index(own) + 1].bandwidth_gb_per_s
    return None if rate is None else (own.capacity_bytes, rate / device.unit_count)
