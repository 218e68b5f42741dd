"""What `ScheduleWavefronts` made of a graph (Rammer, §3.3): for the report, and for what writes its tables."""

from __future__ import annotations

import collections
from dataclasses import dataclass
from typing import Literal

from .measurement import MeasuredWorkload
from .merged import MergedLaunch
from .rtask_split import OperatorData
from .rtasks import RTaskSchedule, ScheduleEntry

RAMMER = "tvm_ext.rammer"
"""Module attribute: the `RammerRecord` as JSON."""

RTASK_PLANS = "tvm_ext.rtask_plans"
"""Module attribute: a list of `SchedulePlan` as JSON, one for each function that runs a schedule."""


STEP = "#"
"""Between a kernel's name and the number of a step of it."""


MeasuredRun = tuple[tuple[int, int, int, int], ...]
"""A run of a schedule, entry after entry: vEU, place in its stream through all programs, start and end in ns."""


ArgumentRole = Literal["input", "constant", "output"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RegionArgument:
    """A tensor that a region takes: its bytes, and the multiple of bytes at which it starts."""

    size_bytes: int
    alignment: int
    shape: tuple[int, ...] = ()
    dtype: str = ""
    role: ArgumentRole = "input"


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulePlan:
    """What runs a region: function ``symbol`` of ``arguments``, inputs first, then outputs, which it writes.

    ``schedule`` is an `RTaskSchedule` as its JSON; ``operators``, ``names`` and ``predecessors`` are as it counts them.
    """

    symbol: str
    schedule: str
    names: tuple[str, ...]
    operators: tuple[OperatorData, ...]
    predecessors: tuple[tuple[int, ...], ...]
    arguments: tuple[RegionArgument, ...]
    arena_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorSchedule:
    """An operator of a region: how many rTasks, on how many vEUs, and the model's microseconds of all of them.

    ``selection`` says which of several kernels it has, and why; "" where it had one.
    """

    name: str
    task_count: int
    veu_count: int
    work_us: float
    selection: str = ""

    @property
    def kernel(self) -> str:
        """The kernel that it is a step of: "dense#1" is the second one of "dense"."""
        return self.name.partition(STEP)[0]

    @property
    def is_first_step(self) -> bool:
        return self.name.partition(STEP)[2] in ("", "0")


@dataclass(frozen=True, kw_only=True, slots=True)
class RegionRecord:
    """A region of the graph, and what the simulator says of it; ``symbol`` "" where it was left to run in sequence.

    ``sequential_us`` is the model's time of the same operators one after another, each divided among all vEUs.
    ``constructed_us`` is the simulated time where operators had the kernel alone that was constructed first; None where
    they had no other. ``schedule`` and ``graph`` are an `RTaskSchedule` and its `RTaskGraph` as JSON.
    ``launches`` are the kernels of a GPU that run it.
    """

    symbol: str
    policy: str
    veu_count: int
    entries: int
    operators: tuple[OperatorSchedule, ...]
    predicted_us: float
    sequential_us: float
    utilisation: float
    arena_bytes: int
    schedule: str
    graph: str
    measured: MeasuredRun = ()
    launches: tuple[MergedLaunch, ...] = ()
    constructed_us: float | None = None

    @property
    def measured_us(self) -> float | None:
        """From the first start of an entry to the last end; None where nothing was measured."""
        if not self.measured:
            return None
        return (max(row[3] for row in self.measured) - min(row[2] for row in self.measured)) / 1e3

    def selection_lines(self) -> list[str]:
        """What was chosen for operators that have several kernels: a line for each kernel, its first choice and how
        many there were.
        """
        found: dict[str, list[str]] = {}
        for operator in self.operators:
            if operator.selection:
                found.setdefault(operator.name, []).append(operator.selection)
        return [
            f"{name}: {texts[0]}" + (f" (and {len(texts) - 1} more calls)" if len(texts) > 1 else "")
            for name, texts in found.items()
        ]

    def measured_seconds(self) -> dict[str, float]:
        """By kernel, the measured time of one call: that of its rTasks on all vEUs, divided by the vEUs.

        Over all calls these are the schedule's time, but for that in which vEUs waited.
        """
        streams = joined_entries(RTaskSchedule.from_json(self.schedule))
        seconds: collections.defaultdict[str, float] = collections.defaultdict(float)
        for unit, place, start_ns, end_ns in self.measured:
            name = self.operators[streams[unit][place].operator].kernel
            seconds[name] += (end_ns - start_ns) / 1e9 / self.veu_count
        calls = collections.Counter(operator.kernel for operator in self.operators if operator.is_first_step)
        return {name: value / calls[name] for name, value in seconds.items()}

    def __str__(self) -> str:
        times = f"{self.predicted_us:.1f} us by the simulator, {self.sequential_us:.1f} us one after another"
        if self.constructed_us is not None:
            times += f", {self.constructed_us:.1f} us with one kernel for each operator"
        if self.measured_us is not None:
            times += f", {self.measured_us:.1f} us measured"
        if not self.symbol:
            return f"no schedule of {len(self.operators)} operators: {times}"
        tasks = sum(operator.task_count for operator in self.operators)
        return (
            f"{self.symbol}: {len(self.operators)} operators, {tasks} rTasks in {self.entries} entries on "
            f"{self.veu_count} vEU{'s' * (self.veu_count > 1)} ({self.policy}): {times}; vEUs busy "
            f"{self.utilisation:.0%}; arena {self.arena_bytes / 1e6:.3g} MB"
            f"{''.join(f'; {launch}' for launch in self.launches)}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class OutsideOperator:
    """What no schedule runs, and why."""

    name: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RammerRecord:
    """Regions in their order, and what lies outside of them.

    ``workloads`` are the keys under which a store keeps the times of the schedules' rKernels, by name; of them
    ``known`` had measured times, which the policy went by.
    """

    regions: tuple[RegionRecord, ...]
    outside: tuple[OutsideOperator, ...]
    workloads: tuple[tuple[str, MeasuredWorkload], ...] = ()
    known: int = 0

    @property
    def scheduled(self) -> tuple[RegionRecord, ...]:
        return tuple(region for region in self.regions if region.symbol)


def joined_entries(schedule: RTaskSchedule) -> list[list[ScheduleEntry]]:
    """By vEU, its entries through all programs, as the runtime walks them."""
    count = max(len(program.streams) for program in schedule.programs)
    streams: list[list[ScheduleEntry]] = [[] for _ in range(count)]
    for program in schedule.programs:
        for unit, stream in enumerate(program.streams):
            streams[unit] += stream
    return streams
