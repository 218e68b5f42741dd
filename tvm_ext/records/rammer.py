"""What `ScheduleWavefronts` made of a graph (Rammer, §3.3): for the report, and for what writes its tables."""

from __future__ import annotations

from dataclasses import dataclass

from .rtask_plan import OperatorData

RAMMER = "tvm_ext.rammer"
"""Module attribute: the `RammerRecord` as JSON."""

RTASK_PLANS = "tvm_ext.rtask_plans"
"""Module attribute: a list of `SchedulePlan` as JSON, one for each function that runs a schedule."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RegionArgument:
    """A tensor that a region takes: its bytes, and the multiple of bytes at which it starts."""

    size_bytes: int
    alignment: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulePlan:
    """What runs a region: function ``symbol`` of ``arguments``, inputs first, then outputs, which it writes.

    ``schedule`` is an `RTaskSchedule` as its JSON; ``operators`` and ``names`` are as it counts them.
    """

    symbol: str
    schedule: str
    names: tuple[str, ...]
    operators: tuple[OperatorData, ...]
    arguments: tuple[RegionArgument, ...]
    arena_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorSchedule:
    """An operator of a region: how many rTasks, on how many vEUs, and the model's microseconds of all of them."""

    name: str
    task_count: int
    veu_count: int
    work_us: float


@dataclass(frozen=True, kw_only=True, slots=True)
class RegionRecord:
    """A region of the graph, and what the simulator says of it; ``symbol`` "" where it was left to run in sequence.

    ``sequential_us`` is the model's time of the same operators one after another, each divided among all vEUs.
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

    def __str__(self) -> str:
        times = f"{self.predicted_us:.1f} us by the simulator, {self.sequential_us:.1f} us one after another"
        if not self.symbol:
            return f"no schedule of {len(self.operators)} operators: {times}"
        tasks = sum(operator.task_count for operator in self.operators)
        return (
            f"{self.symbol}: {len(self.operators)} operators, {tasks} rTasks in {self.entries} entries on "
            f"{self.veu_count} vEU{'s' * (self.veu_count > 1)} ({self.policy}): {times}; vEUs busy "
            f"{self.utilisation:.0%}; arena {self.arena_bytes / 1e6:.3g} MB"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class OutsideOperator:
    """What no schedule runs, and why."""

    name: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RammerRecord:
    """Regions in their order, and what lies outside of them."""

    regions: tuple[RegionRecord, ...]
    outside: tuple[OutsideOperator, ...]

    @property
    def scheduled(self) -> tuple[RegionRecord, ...]:
        return tuple(region for region in self.regions if region.symbol)
