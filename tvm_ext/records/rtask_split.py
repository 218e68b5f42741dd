"""How a CPU kernel falls into steps of rTasks (Rammer, §3.1): what `SplitRTasks` leaves at every kernel.

Worked example: a product that packs an input on entry has a workspace, 1 MiB, and two steps. The first, 11264 loops of
96 elements, reads parameter 0 and writes buffer 3, the workspace; the second, 704 tiles, reads 1 and 3 and writes 2.

`OperatorData` and its parts are the code of a schedule's operators, and where their data lies.
"""

from __future__ import annotations

from dataclasses import dataclass

from .rtasks import Need

RTASKS = "tvm_ext.rtasks"
"""PrimFunc attribute: the function's `RTaskSplit` as JSON."""

RKERNEL = "tvm_ext.rkernel"
"""PrimFunc attribute of what runs rTasks: a function of data pointers, and of the first iteration and that behind the
last."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RTaskStep:
    """A parallel loop at the top of a kernel, or what lies between two of them: one rOperator.

    ``kernel`` is the function to call with the data pointers of ``buffers``, and the first iteration and that behind
    the last of ``iterations`` independent ones. Buffers are counted through the function's parameters, then its
    workspaces. The function relies on the data starting at multiples of ``alignments`` bytes. ``operations`` estimates
    the instructions of all iterations together. On a GPU iterations are threadblocks, each of which needs ``need``.
    """

    kernel: str
    iterations: int
    buffers: tuple[int, ...]
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    alignments: tuple[int, ...]
    operations: float
    need: Need | None = None

    def __post_init__(self) -> None:
        assert self.iterations >= 1
        assert set(self.reads) | set(self.writes) == set(self.buffers)
        assert len(self.alignments) == len(self.buffers)


@dataclass(frozen=True, kw_only=True, slots=True)
class CopiedPiece:
    """Parameter ``piece`` of a kernel holds what parameter ``whole`` has from ``offset_bytes`` on."""

    whole: int
    piece: int
    offset_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RTaskSplit:
    """A kernel of ``param_count`` parameters as steps in their order; ``refusal`` says why there are none.

    ``workspaces`` are buffers that pass between steps, in bytes. ``time_s`` is the model's time of the whole kernel
    on one core, or on a GPU, of whose busiest resource it takes ``busy_s``; None where it has none. ``pieces`` has
    all that a kernel copies which does nothing else.
    ``variants`` are other kernels of the operator, with equal workspaces and steps but for the code of one of these.
    """

    param_count: int
    steps: tuple[RTaskStep, ...] = ()
    workspaces: tuple[int, ...] = ()
    time_s: float | None = None
    busy_s: float | None = None
    refusal: str = ""
    pieces: tuple[CopiedPiece, ...] = ()
    variants: tuple[RTaskSplit, ...] = ()

    def __post_init__(self) -> None:
        assert bool(self.steps) != bool(self.refusal)
        count = self.param_count + len(self.workspaces)
        assert all(0 <= buffer < count for step in self.steps for buffer in step.buffers)

    @property
    def operations(self) -> float:
        return sum(step.operations for step in self.steps)


ARENA = -1
"""In place of an argument's index: the memory that a run has for what lies between operators."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataPlace:
    """Where an rKernel finds ``size_bytes`` of data: ``offset`` bytes into argument ``argument``, or into `ARENA`."""

    argument: int
    size_bytes: int
    offset: int = 0

    def __post_init__(self) -> None:
        assert self.argument >= ARENA
        assert self.offset >= 0


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelCode:
    """An rKernel's function, and how many of its ``iterations`` are one rTask; the last one may have fewer.

    It relies on its data starting at multiples of ``alignments`` bytes.

    Worked example: of 7 iterations, 3 an rTask, there are 3 rTasks; rTasks 1 and 2 are iterations 3 to 6.
    """

    function: str
    iterations: int
    per_task: int
    alignments: tuple[int, ...]

    def __post_init__(self) -> None:
        assert 1 <= self.per_task <= self.iterations

    @property
    def task_count(self) -> int:
        return -(-self.iterations // self.per_task)

    def range_of(self, begin: int, end: int) -> tuple[int, int]:
        """The iterations of rTasks ``begin`` to ``end`` - 1: the first, and that behind the last."""
        assert 0 <= begin < end <= self.task_count
        return begin * self.per_task, min(end * self.per_task, self.iterations)


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorData:
    """Of an operator in a schedule: the code of each of its rKernels, and the data that all of them take."""

    codes: tuple[KernelCode, ...]
    places: tuple[DataPlace, ...]
