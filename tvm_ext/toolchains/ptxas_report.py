"""What the CUDA assembler says of each kernel (``ptxas -v``), and how that compares with what was planned.

ptxas knows what no plan does: the registers it needed, and the bytes it had to move to memory ("spill") for want of
them. It writes both on its error stream, a few lines per kernel and architecture.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.devices.occupancy import BlockUse, block_register_limit, block_registers

_ENTRY = re.compile(r"Compiling entry function '(?P<name>[^']+)' for '(?P<architecture>sm_\w+)'")
_STACK = re.compile(
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads"
)
_CUMULATIVE = re.compile(r"(?P<bytes>\d+) bytes cumulative stack size")
_REGISTERS = re.compile(r"Used (?P<count>\d+) registers")
_SHARED = re.compile(r"(?P<bytes>\d+) bytes smem")
_BARRIERS = re.compile(r"used (?P<count>\d+) barriers")
_CONSTANT = re.compile(r"(?P<bytes>\d+) bytes cmem\[0\]")

_REGISTER_SLACK = 1.25
"""A plan counts what an rTile keeps; addresses and predicates come on top."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelUse:
    """What one kernel takes on one architecture, per thread (registers, stack, spills) and per threadblock (shared).

    ``shared_bytes`` counts static shared memory alone: what a launch asks for beyond it ("dynamic") is not known here.
    """

    name: str
    architecture: str
    register_count: int
    shared_bytes: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    barrier_count: int
    constant_bytes: int

    @property
    def spills(self) -> bool:
        return self.spill_store_bytes > 0 or self.spill_load_bytes > 0


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


def parse_report(text: str) -> tuple[KernelUse, ...]:
    """The kernels in ptxas' messages ``text``, in its order; what is not about a kernel is passed over."""
    starts = list(_ENTRY.finditer(text))
    bounds = [match.start() for match in starts] + [len(text)]
    pieces = [text[match.end() : end] for match, end in zip(starts, bounds[1:], strict=True)]
    return tuple(_parse_kernel(match, piece) for match, piece in zip(starts, pieces, strict=True))


def _parse_kernel(entry: re.Match[str], text: str) -> KernelUse:
    # The kernel's own properties come first. Those of functions that were not inlined follow; the kernel runs them.
    functions = list(_STACK.finditer(text))
    cumulative = _number(_CUMULATIVE, text)
    return KernelUse(
        name=entry["name"],
        architecture=entry["architecture"],
        register_count=_number(_REGISTERS, text),
        shared_bytes=_number(_SHARED, text),
        stack_bytes=cumulative or max((int(found["stack"]) for found in functions[:1]), default=0),
        spill_store_bytes=sum(int(found["stores"]) for found in functions),
        spill_load_bytes=sum(int(found["loads"]) for found in functions),
        barrier_count=_number(_BARRIERS, text),
        constant_bytes=_number(_CONSTANT, text),
    )


def _number(pattern: re.Pattern[str], text: str) -> int:
    found = pattern.search(text)
    return int(found[1]) if found else 0


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


def table(uses: Sequence[KernelUse]) -> str:
    """``uses`` as aligned text, one line each, for people."""
    width = max([len(use.name) for use in uses], default=0)
    rows = (
        f"{use.name:<{width}} {use.architecture:<7} {use.register_count:>3} registers {use.shared_bytes:>6} B shared "
        f"{use.spill_store_bytes + use.spill_load_bytes:>5} B spilled"
        for use in uses
    )
    return "\n".join(rows)
