"""The code of a schedule's operators, and where their data lies."""

from __future__ import annotations

from dataclasses import dataclass

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
