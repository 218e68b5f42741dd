"""How long a schedule of rTasks takes (Rammer, paper §3.3: the profiler's time of an rProgram), by arithmetic alone.

A vEU takes the entries of its stream in turn. One that waits begins ``barrier_s`` behind the last end that it waits
for, or at once where its own vEU was busy until after that; taking it costs ``task_overhead_s``, and constants that its
vEU's cache does not hold are read first. A program costs ``launch_s``, and begins when the one before it has ended.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tvm_ext.records.rtask_order import walk
from tvm_ext.records.rtasks import RKernel, ROperator, RTaskGraph, RTaskProgram, RTaskSchedule, ScheduleEntry, VDevice

from .constant_cache import ConstantCache, ConstantKey


@dataclass(frozen=True, kw_only=True, slots=True)
class TimedEntry:
    """When entry ``place`` of vEU ``unit`` ran: from when its rTasks began to when the last of them ended."""

    program: int
    unit: int
    place: int
    start_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleTimes:
    """A run of a schedule. ``work_s`` is the time in rTasks, all vEUs together, ``overhead_s`` that of taking entries.

    ``veu_seconds`` is what all vEUs had: the time of each program times its vEUs, launches included.
    """

    entries: tuple[TimedEntry, ...]
    makespan_s: float
    work_s: float
    overhead_s: float
    launch_s: float
    veu_seconds: float
    unit_work_s: tuple[float, ...]  # by vEU, of the programs that have so many

    @property
    def utilisation(self) -> float:
        """Of all the time that vEUs had, the share in which rTasks ran: 0 to 1."""
        return self.work_s / self.veu_seconds


def key_of(operator: ROperator, kernel: RKernel) -> ConstantKey:
    """What the rTasks of ``kernel`` find again in the cache of a vEU that ran them for the same constants."""
    return operator.constants, kernel.name


def simulate(schedule: RTaskSchedule, graph: RTaskGraph) -> ScheduleTimes:
    """The times of ``schedule``; raises ValueError where it waits for itself."""
    now, launches, overhead, veu_seconds = 0.0, 0.0, 0.0, 0.0
    entries: list[TimedEntry] = []
    work = [0.0] * max(len(program.streams) for program in schedule.programs)
    for number, program in enumerate(schedule.programs):
        run = _ProgramRun(program, graph, now + program.device.launch_s)
        entries += run.times(number)
        work = [sum(pair) for pair in zip(work, [*run.work, *[0.0] * (len(work) - len(run.work))], strict=True)]
        veu_seconds += (run.end_s - now) * len(program.streams)
        overhead += run.entry_count * program.device.task_overhead_s
        launches += program.device.launch_s
        now = run.end_s
    return ScheduleTimes(
        entries=tuple(entries),
        makespan_s=now,
        work_s=sum(work),
        overhead_s=overhead,
        launch_s=launches,
        veu_seconds=veu_seconds,
        unit_work_s=tuple(work),
    )


def run_s(device: VDevice, cache: ConstantCache, operator: ROperator, kernel: RKernel, tasks: tuple[int, int]) -> float:
    """The time of rTasks from the first of ``tasks`` to the one before the last; ``cache`` keeps their constants."""
    begin, end = tasks
    seconds = (end - begin) * kernel.task_s_beside(device.veus_per_unit)
    if not (device.cache_bytes and operator.constants and kernel.constant_bytes):
        return seconds
    return seconds + device.refill_s(cache.run(key_of(operator, kernel), begin, end, kernel.constant_bytes))


def last_ends(ends: Iterable[tuple[float, int]]) -> tuple[float, int, float]:
    """Of pairs (end, vEU): the last end, its vEU, and the last one of another vEU; 0 where there is none.

    That is all that vEUs with one barrier in common need of it, for what a vEU did itself it need not be told.
    """
    found = sorted(ends)
    last, unit = found[-1] if found else (0.0, -1)
    return last, unit, found[-2][0] if len(found) > 1 else 0.0


def passed_s(ends: tuple[float, int, float], unit: int, barrier_s: float) -> float:
    """When a barrier of these `last_ends` lets vEU ``unit`` pass; 0 where it waits for nobody else."""
    last, of_unit, before = ends
    end = before if of_unit == unit else last
    return end + barrier_s if end else 0.0


class _ProgramRun:
    """One program from ``start_s`` on."""

    def __init__(self, program: RTaskProgram, graph: RTaskGraph, start_s: float) -> None:
        self._device, self._graph = program.device, graph
        self._spans: list[list[tuple[float, float]]] = [[] for _ in program.streams]
        self._caches = [ConstantCache(program.device.cache_bytes) for _ in program.streams]
        self._ends: dict[int, tuple[float, int, float]] = {}  # of barriers, by object: many entries may share one
        self.work = [0.0] * len(program.streams)
        self.end_s = start_s
        self.entry_count = 0
        clock = [start_s] * len(program.streams)
        for unit, _, entry in walk(program):
            begin = max(clock[unit], self._passed(entry, unit)) + self._device.task_overhead_s
            operator = graph.operators[entry.operator]
            kernel = operator.kernel(entry.kernel)
            seconds = run_s(program.device, self._caches[unit], operator, kernel, (entry.begin, entry.end))
            clock[unit] = begin + seconds
            self._spans[unit].append((begin, clock[unit]))
            self.work[unit] += seconds
            self.entry_count += 1
        self.end_s = max(clock)

    def times(self, number: int) -> list[TimedEntry]:
        return [
            TimedEntry(program=number, unit=unit, place=position, start_s=start, end_s=end)
            for unit, spans in enumerate(self._spans)
            for position, (start, end) in enumerate(spans)
        ]

    def _passed(self, entry: ScheduleEntry, unit: int) -> float:
        """When the barrier of ``entry`` lets it pass, as far as other vEUs are concerned."""
        if not entry.waits:
            return 0.0
        if id(entry.waits) not in self._ends:
            self._ends[id(entry.waits)] = last_ends(
                (self._spans[unit][order - 1][1], unit) for unit, order in entry.waits
            )
        return passed_s(self._ends[id(entry.waits)], unit, self._device.barrier_s)
