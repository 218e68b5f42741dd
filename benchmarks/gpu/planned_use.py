"""What a kernel was planned to take, beside what ptxas says that it takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.devices.occupancy import BlockUse, block_register_limit, block_registers
from tvm_ext.toolchains.ptxas_report import KernelUse

_REGISTER_SLACK = 1.25
"""A plan counts what an rTile keeps; addresses and predicates come on top."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedUse:
    """What a kernel was planned to take, and what a threadblock may take of the device.

    ``register_count`` are 32-bit registers per thread. ``dynamic_shared`` says that ``shared_bytes`` are asked for at
    launch.
    """

    threads: int
    shared_bytes: int
    register_count: int
    device: DeviceSpec
    dynamic_shared: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """``problem``: the kernel is slow or cannot start; ``note``: the plan was off, which the model should know."""

    state: Literal["problem", "note"]
    text: str


def compare(use: KernelUse, plan: PlannedUse) -> tuple[Difference, ...]:
    """How ``use`` departs from ``plan``; empty where it does as planned.

    Worked example: 168 registers × 256 threads = 43,008 of a block's 65,536 fit; × 512 threads do not, and the launch
    fails with "too many resources requested".
    """
    return tuple(_differences(use, plan))


def _differences(use: KernelUse, plan: PlannedUse) -> Iterator[Difference]:
    where = f"{use.name} on {use.architecture}"
    if use.spills:
        moved = f"{use.spill_store_bytes} bytes stored, {use.spill_load_bytes} bytes loaded per thread"
        yield Difference(state="problem", text=f"{where} spills registers: {moved}")
    elif use.stack_bytes:
        yield Difference(state="problem", text=f"{where} keeps {use.stack_bytes} bytes per thread in local memory")
    block = BlockUse(threads=plan.threads, registers=use.register_count, shared_bytes=0)
    needed, limit = block_registers(block, plan.device), block_register_limit(plan.device)
    if limit is not None and needed > limit:
        counts = f"{use.register_count} registers x {plan.threads} threads take {needed}"
        yield Difference(state="problem", text=f"{where} cannot start: {counts} of {limit}")
    if use.register_count > _REGISTER_SLACK * plan.register_count:
        text = f"{where} takes {use.register_count} registers, planned were {plan.register_count}"
        yield Difference(state="note", text=text)
    planned = 0 if plan.dynamic_shared else plan.shared_bytes
    if use.shared_bytes > planned:
        text = f"{where} takes {use.shared_bytes} bytes of shared memory, planned were {planned}"
        yield Difference(state="problem" if planned else "note", text=text)
