"""A kernel that runs a schedule of rTasks on a GPU (Rammer, §4.1): what it is, and the tables that it walks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MERGED = "tvm_ext.merged"
"""PrimFunc attribute: the `MergedKernel` as JSON. Such a function is behind stock TVM's ThreadSync already."""

BODY_SCOPE = "tvm_ext.rtask_body"
"""Statement attribute around what runs one rTask: `OutlineRTasks` makes a function of it."""

MergeLevel = Literal["static", "ticket", "waves"]
"""``static``: each block has its stream, in a run whose blocks are all on the device at once, else tickets; ``ticket``:
blocks take entries in an order in which nothing waits for what comes later; ``waves``: a launch for what waits for
nothing in it."""

TICKET, MARK, ARRIVED, CHOSEN = range(4)
"""The first words of a launch's state: tickets taken; a number that keeps states of several launches from being
taken for one constant; blocks that have begun, and whether they found all others there (`ir.device_sync.settle`). A
counter for each operator follows, and for each block how many runs it has ended."""

HEAD_WORDS = 4  # of the four above
NOT_CHOSEN = -1
"""What is in `CHOSEN` before the first run."""

BODY, OPERANDS, BEGIN, END, FIRST_WAIT, LAST_WAIT, COUNTER = range(7)
"""The words of an entry: which body; where its operands' places begin; rTasks ``BEGIN`` to ``END`` - 1; its waits, from
``FIRST_WAIT`` to behind ``LAST_WAIT``; the counter that it adds 1 to when it has ended."""

ENTRY_WORDS = 8  # a power of two, so that no division finds an entry: seven words and one that is empty
WAIT_WORDS = 2
"""A counter, and what every run adds to it."""

UNIT_BYTES = 16
"""What operands' places are counted in: the widest access of a thread."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CompiledUse:
    """What the device's compiler says of a kernel, per thread; ``shared_bytes`` a block, those that it declares."""

    registers: int
    spill_bytes: int
    shared_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class MergedLaunch:
    """One launch: ``bodies`` counts distinct rKernels, ``shared_bytes`` is what the one with the most has.

    ``registers`` (32-bit, a thread) are those of the compiler's report; None where nobody compiled it.
    """

    level: MergeLevel
    reason: str
    blocks: int
    threads: int
    shared_bytes: int
    bodies: int
    entries: int
    registers: int | None = None

    def __str__(self) -> str:
        took = "" if self.registers is None else f", {self.registers} registers"
        return (
            f"{self.level} ({self.reason}): {self.blocks} blocks of {self.threads} threads{took}, "
            f"{self.shared_bytes} bytes of shared memory, {self.bodies} bodies for {self.entries} entries"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class MergedKernel:
    """What the function ``symbol`` takes beside its inputs and outputs.

    In this order: inputs, constants as one tensor, ``table``, ``state`` (as it is before the first run), then what it
    writes: outputs, and an arena. ``weights`` are (argument, first byte) of the constants, all of them of
    ``weight_bytes``; ``arena_dtype`` and ``weight_dtype`` "" where there is none.
    """

    symbol: str
    launches: tuple[MergedLaunch, ...]
    table: tuple[int, ...]
    state: tuple[int, ...]
    weights: tuple[tuple[int, int], ...] = ()
    weight_bytes: int = 0
    weight_dtype: str = ""
    arena_bytes: int = 0
    arena_dtype: str = ""
