"""Runs of a schedule of rTasks in the Trace Event Format, which Perfetto (ui.perfetto.dev) and chrome://tracing show.

A run is a process, a vEU a thread, an entry a slice; arrows go from what an entry waited for to it. The simulated and
the measured run of one schedule lie below each other in one file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from tvm_ext.cost.schedule_simulator import TimedEntry, simulate
from tvm_ext.records.rammer import RammerRecord, RegionRecord
from tvm_ext.records.rtasks import RTaskGraph, RTaskProgram, RTaskSchedule

_MOST_ARROWS = 20_000  # a choice: bounds the size of the file that a browser opens

Event = dict[str, "str | int | float | dict[str, str | int]"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleRun:
    """A run of a schedule, simulated or measured, and what to call it."""

    name: str
    schedule: RTaskSchedule
    graph: RTaskGraph
    times: Sequence[TimedEntry]


def measured_entries(schedule: RTaskSchedule, found: Iterable[tuple[int, int, float, float]]) -> tuple[TimedEntry, ...]:
    """What a runtime noted: rows of vEU, place in its stream through all programs, start and end in seconds.

    Times count from the first start. Raises ValueError where the schedule has no such entry, or one ends too early.
    """
    rows = list(found)
    first = min((row[2] for row in rows), default=0.0)
    streams = [
        [(number, place) for number, program in enumerate(schedule.programs) for place in _places(program, unit)]
        for unit in range(max(len(program.streams) for program in schedule.programs))
    ]
    for unit, place, start_s, end_s in rows:
        if not (0 <= unit < len(streams) and 0 <= place < len(streams[unit]) and first <= start_s <= end_s):
            raise ValueError(f"entry {place} of vEU {unit}, from {start_s} to {end_s} s, is none of the schedule's")
    entries = ((unit, *streams[unit][place], start_s - first, end_s - first) for unit, place, start_s, end_s in rows)
    return tuple(
        TimedEntry(program=program, unit=unit, place=place, start_s=start_s, end_s=end_s)
        for unit, program, place, start_s, end_s in entries
    )


def _places(program: RTaskProgram, unit: int) -> range:
    return range(len(program.streams[unit]) if unit < len(program.streams) else 0)


def region_runs(region: RegionRecord) -> list[ScheduleRun]:
    """Of a region of a report: the simulated run, and the measured one where there is one."""
    schedule, graph = RTaskSchedule.from_json(region.schedule), RTaskGraph.from_json(region.graph)
    times = {"simulated": simulate(schedule, graph).entries}
    if region.measured:
        times["measured"] = measured_entries(schedule, [(u, p, s / 1e9, e / 1e9) for u, p, s, e in region.measured])
    return [ScheduleRun(name=name, schedule=schedule, graph=graph, times=found) for name, found in times.items()]


def chrome_trace(runs: Sequence[ScheduleRun], others: Sequence[Event] = ()) -> str:
    """The JSON text of ``runs``, each under its name, behind the events of ``others``."""
    events: list[Event] = list(others)
    for number, run in enumerate(runs, start=1):
        events.append({"ph": "M", "name": "process_name", "pid": number, "args": {"name": run.name}})
        units = sorted({time.unit for time in run.times})
        events += [
            {"ph": "M", "name": "thread_name", "pid": number, "tid": unit, "args": {"name": f"vEU {unit}"}}
            for unit in units
        ]
        events += [_slice(run.schedule, run.graph, time, number) for time in run.times]
        events += _arrows(run.schedule, run.times, number)
    return json.dumps({"displayTimeUnit": "ns", "traceEvents": events}, separators=(",", ":"))


def report_trace(report: RammerRecord | None, others: Sequence[Event] = ()) -> str:
    """`chrome_trace` of all schedules of a build behind ``others``; without any it is empty."""
    regions = report.scheduled if report is not None else ()
    return chrome_trace(
        [replace(run, name=f"{region.symbol}, {run.name}") for region in regions for run in region_runs(region)], others
    )


def _slice(schedule: RTaskSchedule, graph: RTaskGraph, item: TimedEntry, process: int) -> Event:
    entry = schedule.programs[item.program].streams[item.unit][item.place]
    operator = graph.operators[entry.operator]
    return {
        "ph": "X",
        "name": operator.name,
        "cat": operator.kernel(entry.kernel).name,
        "pid": process,
        "tid": item.unit,
        "ts": item.start_s * 1e6,
        "dur": (item.end_s - item.start_s) * 1e6,
        "args": {
            "kernel": operator.kernel(entry.kernel).name,
            "rTasks": f"{entry.begin} to {entry.end - 1} of {operator.kernel(entry.kernel).task_count}",
            "waits": len(entry.waits),
            "program": item.program,
        },
    }


def _arrows(schedule: RTaskSchedule, times: Sequence[TimedEntry], process: int) -> Iterator[Event]:
    """A pair of events for each wait, from the end of what is waited for to the start of who waits; too many: none."""
    by_place = {(time.program, time.unit, time.place): time for time in times}
    pairs = [
        (source, time)
        for time in times
        for unit, order in schedule.programs[time.program].streams[time.unit][time.place].waits
        if unit != time.unit and (source := by_place.get((time.program, unit, order - 1))) is not None
    ]
    if len(pairs) > _MOST_ARROWS:
        return
    for number, (source, item) in enumerate(pairs):
        common: Event = {"name": "wait", "cat": "wait", "id": f"{process}.{number}", "pid": process}
        # Perfetto binds an arrow to the slice that encloses its time: the end of a slice is outside of it.
        inside_s = max(source.start_s, source.end_s - 1e-9)
        yield {**common, "ph": "s", "tid": source.unit, "ts": inside_s * 1e6}
        yield {**common, "ph": "f", "bp": "e", "tid": item.unit, "ts": item.start_s * 1e6}
