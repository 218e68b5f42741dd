"""What the CUDA assembler says of each kernel (``ptxas -v``).

ptxas knows what no plan does: the registers it needed, and the bytes it had to move to memory ("spill") for want of
them. It writes both on its error stream, a few lines per kernel and architecture.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_ENTRY = re.compile(r"Compiling entry function '(?P<name>[^']+)' for '(?P<architecture>sm_\w+)'")
_STACK = re.compile(
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads"
)
_CUMULATIVE = re.compile(r"(?P<bytes>\d+) bytes cumulative stack size")
_REGISTERS = re.compile(r"Used (?P<count>\d+) registers")
_SHARED = re.compile(r"(?P<bytes>\d+) bytes smem")
_BARRIERS = re.compile(r"used (?P<count>\d+) barriers")
_CONSTANT = re.compile(r"(?P<bytes>\d+) bytes cmem\[0\]")


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


def table(uses: Sequence[KernelUse]) -> str:
    """``uses`` as aligned text, one line each, for people."""
    width = max([len(use.name) for use in uses], default=0)
    rows = (
        f"{use.name:<{width}} {use.architecture:<7} {use.register_count:>3} registers {use.shared_bytes:>6} B shared "
        f"{use.spill_store_bytes + use.spill_load_bytes:>5} B spilled"
        for use in uses
    )
    return "\n".join(rows)
