"""A run of a schedule of rTasks as a picture: a row for each vEU, a bar for what it ran, nothing where it waited.

`gantt` is inline SVG with the page's style sheet; `section` is the page's part on schedules. Bars have the colour of
the constants that they read, else of their kernel, so that an operator which runs again and again is seen to.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from html import escape

from tvm_ext.cost.schedule_simulator import TimedEntry
from tvm_ext.records.rammer import RegionRecord
from tvm_ext.records.rtasks import RTaskGraph, RTaskProgram, RTaskSchedule, ScheduleEntry

from .record import BuildRecord
from .schedule_trace import region_runs
from .text import format_time, rammer_lines

_WIDTH, _LEFT, _RIGHT, _TOP, _BOTTOM = 1100, 76, 56, 34, 40
"""A choice: pixels of the picture and its margins, for labels of a dozen characters."""
_TALLEST, _LOWEST, _MOST_HEIGHT = 26.0, 2.0, 720.0  # a choice: pixels of a row, and of all rows of a screen
_APART = 8.0
"""Pixels: rows less tall than this have no gap between them."""
_COLOURS = 8
"""Of the style sheet: `.lane0` to `.lane7`, and `.lane` for all others."""
_NARROW = 0.4
"""Pixels: bars and gaps narrower than this are drawn as one with their neighbours."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Bar:
    """Pixels from ``left`` to ``right`` in the rows of ``units`` vEUs from ``unit`` on; ``entries`` joined to one."""

    unit: int
    units: int = 1
    left: float
    right: float
    colour: str
    tip: str
    entries: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class _Frame:
    """Where times and vEUs lie in the picture."""

    end_s: float
    rows: int
    row_height: float

    def x(self, seconds: float) -> float:
        return _LEFT + seconds / self.end_s * (_WIDTH - _LEFT - _RIGHT)

    def y(self, unit: int) -> float:
        return _TOP + unit * self.row_height

    @property
    def bottom(self) -> float:
        return self.y(self.rows)

    @property
    def height(self) -> float:
        return self.bottom + _BOTTOM


def gantt(schedule: RTaskSchedule, graph: RTaskGraph, times: Sequence[TimedEntry]) -> str:
    """The picture of a run, simulated or measured, as inline SVG; a sentence where nothing ran.

    Of more vEUs than have room, the first are drawn, and the picture says how many there are.
    """
    end_s = max((time.end_s for time in times), default=0.0)
    if end_s <= 0:
        return "<p>Nothing of the schedule has run.</p>"
    count = max(len(program.streams) for program in schedule.programs)
    height = max(_LOWEST, min(_TALLEST, _MOST_HEIGHT / count))
    frame = _Frame(end_s=end_s, rows=min(count, int(_MOST_HEIGHT / height)), row_height=height)
    colours = _colours(schedule, graph)
    parts = [*_grid(frame), *_rows(frame, times), *_programs(frame, schedule, times)]
    parts += [_drawn(frame, bar) for bar in _bars(frame, schedule, graph, times, colours)]
    parts += [*_legend(colours, _names(schedule, graph, colours)), *_note(frame, count)]
    label = f"{len(times)} entries on {count} vEUs in {format_time(end_s)}, policy {schedule.policy}"
    return (
        f'<svg viewBox="0 0 {_WIDTH} {frame.height:.0f}" role="img" aria-label="{escape(label)}">'
        + "".join(parts)
        + "</svg>"
    )


def _subject(graph: RTaskGraph, entry: ScheduleEntry) -> str:
    """What bars of one colour have in common."""
    operator = graph.operators[entry.operator]
    return operator.constants or operator.kernel(entry.kernel).name


def _entries(schedule: RTaskSchedule) -> Iterable[tuple[RTaskProgram, ScheduleEntry]]:
    return ((program, entry) for program in schedule.programs for _, _, entry in program.entries())


def _colours(schedule: RTaskSchedule, graph: RTaskGraph) -> dict[str, str]:
    """Classes of what takes most time, in the order in which it comes first; what is not there is drawn grey."""
    work: dict[str, float] = {}
    for program, entry in _entries(schedule):
        kernel = graph.operators[entry.operator].kernel(entry.kernel)
        seconds = entry.task_count * kernel.task_s_beside(program.device.veus_per_unit)
        work[_subject(graph, entry)] = work.get(_subject(graph, entry), 0.0) + seconds
    most = set(sorted(work, key=lambda subject: -work[subject])[:_COLOURS])
    return {subject: f"lane{index}" for index, subject in enumerate(item for item in work if item in most)}


def _names(schedule: RTaskSchedule, graph: RTaskGraph, subjects: Iterable[str]) -> dict[str, str]:
    """What to call each of ``subjects``: its first operator, numbered where others are called so too.

    "lstm_cell 3": the third of the layers that have a colour.
    """
    first: dict[str, str] = {}
    for _, entry in _entries(schedule):
        first.setdefault(_subject(graph, entry), graph.operators[entry.operator].name)
    names = {subject: first[subject] for subject in subjects}
    total, seen = Counter(names.values()), Counter[str]()
    for subject, name in names.items():
        seen[name] += 1
        names[subject] = f"{name} {seen[name]}" if total[name] > 1 else name
    return names | ({"": "others"} if len(first) > len(names) else {})


def _bars(
    frame: _Frame, schedule: RTaskSchedule, graph: RTaskGraph, times: Sequence[TimedEntry], colours: dict[str, str]
) -> list[_Bar]:
    """Bars from left to right in each row, those that would not be told apart joined to one."""
    found: list[_Bar] = []
    for time in sorted(times, key=lambda time: (time.unit, time.start_s)):
        if time.unit >= frame.rows:
            continue
        entry = schedule.programs[time.program].streams[time.unit][time.place]
        bar = _Bar(
            unit=time.unit,
            left=frame.x(time.start_s),
            right=frame.x(time.end_s),
            colour=colours.get(_subject(graph, entry), "lane"),
            tip=_tip(graph, entry, time),
        )
        if found and _are_one(found[-1], bar):
            bar = _joined(found.pop(), bar)
        found.append(bar)
    return found if frame.row_height >= _APART else _over_rows(found)


def _over_rows(bars: Sequence[_Bar]) -> list[_Bar]:
    """Bars of neighbouring vEUs that run from and to the same place as one."""
    found: list[_Bar] = []
    for bar in sorted(bars, key=lambda bar: (bar.colour, round(bar.left, 1), round(bar.right, 1), bar.unit)):
        above = found[-1] if found else None
        if above is not None and above.unit + above.units == bar.unit and _same_span(above, bar):
            tip = f"vEUs {above.unit} to {bar.unit}, {above.tip.partition(', ')[2] if above.units > 1 else above.tip}"
            found[-1] = replace(above, units=above.units + 1, entries=above.entries + bar.entries, tip=tip)
        else:
            found.append(bar)
    return found


def _same_span(first: _Bar, second: _Bar) -> bool:
    spans = [(round(bar.left, 1), round(bar.right, 1), bar.colour) for bar in (first, second)]
    return spans[0] == spans[1]


def _are_one(first: _Bar, second: _Bar) -> bool:
    alike = first.unit == second.unit and first.colour == second.colour
    narrow = min(first.right - first.left, second.right - second.left) < 2 * _NARROW
    return alike and narrow and second.left - first.right < _NARROW


def _joined(first: _Bar, second: _Bar) -> _Bar:
    count = first.entries + second.entries
    tip = f"{count} entries from {first.tip.partition(' entries from ')[2] or first.tip}"
    return replace(first, right=second.right, tip=tip, entries=count)


def _tip(graph: RTaskGraph, entry: ScheduleEntry, item: TimedEntry) -> str:
    operator = graph.operators[entry.operator]
    kernel = operator.kernel(entry.kernel)
    tasks = f"rTask {entry.begin}" if entry.task_count == 1 else f"rTasks {entry.begin} to {entry.end - 1}"
    waits = f", behind {len(entry.waits)} waits" if entry.waits else ""
    return (
        f"{operator.name}: {tasks} of {kernel.task_count} by {kernel.name}, {format_time(item.end_s - item.start_s)} "
        f"from {format_time(item.start_s)} on{waits}"
    )


def _drawn(frame: _Frame, bar: _Bar) -> str:
    gap = 1.0 if frame.row_height >= _APART else 0.0
    width = max(bar.right - bar.left - 0.3, _NARROW)
    return (
        f'<rect class="task {bar.colour}" x="{bar.left:.2f}" y="{frame.y(bar.unit) + gap:.1f}" width="{width:.2f}" '
        f'height="{bar.units * frame.row_height - 2 * gap:.1f}"><title>{escape(bar.tip)}</title></rect>'
    )


def _grid(frame: _Frame) -> list[str]:
    parts = []
    for seconds in _ticks(frame.end_s):
        x = frame.x(seconds)
        parts.append(f'<line class="grid" x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{frame.bottom:.1f}"/>')
        text = format_time(seconds) if seconds else "0"
        parts.append(f'<text x="{x:.1f}" y="{frame.bottom + 18:.1f}" text-anchor="middle">{text}</text>')
    return parts


def _ticks(end_s: float) -> list[float]:
    """Six to twelve round times from 0 on: steps of 1, 2 or 5 times a power of ten."""
    rough = end_s / 8
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    return [index * step for index in range(int(end_s / step) + 1)]


def _rows(frame: _Frame, times: Sequence[TimedEntry]) -> list[str]:
    """Names of vEUs, and the share of the time that each of them ran rTasks; of many, some."""
    work = [0.0] * frame.rows
    for item in times:
        if item.unit < frame.rows:
            work[item.unit] += item.end_s - item.start_s
    every = next(step for step in (1, 2, 5, 10, 20, 50, 100, 1000) if step * frame.row_height >= 13)
    parts = []
    for unit in range(0, frame.rows, every):
        y = frame.y(unit) + min(frame.row_height, 13.0) / 2 + 4
        if frame.row_height >= 13:
            y = frame.y(unit) + frame.row_height / 2 + 4
        parts.append(f'<text x="{_LEFT - 8}" y="{y:.1f}" text-anchor="end">vEU {unit}</text>')
        parts.append(f'<text x="{_WIDTH - _RIGHT + 8}" y="{y:.1f}">{100 * work[unit] / frame.end_s:.0f} %</text>')
    return parts


def _programs(frame: _Frame, schedule: RTaskSchedule, times: Sequence[TimedEntry]) -> list[str]:
    """A line where an rProgram ends, if there are several and they can be told apart."""
    ends: dict[int, float] = {}
    for item in times:
        ends[item.program] = max(ends.get(item.program, 0.0), item.end_s)
    if not 1 < len(ends) <= 40:
        return []
    places = [frame.x(ends[number]) for number in sorted(ends)[:-1]]
    return [f'<line class="cache" x1="{x:.1f}" y1="{_TOP - 4}" x2="{x:.1f}" y2="{frame.bottom:.1f}"/>' for x in places]


def _legend(colours: dict[str, str], names: dict[str, str]) -> list[str]:
    """The colours' names in one line, each with its share of it; cut in the middle, since names differ at the ends."""
    parts, room = [], (_WIDTH - _RIGHT - _LEFT) / max(len(names), 1)
    letters = max(4, int((room - 22) / 6.8))
    for position, (subject, name) in enumerate(names.items()):
        colour, x = colours.get(subject, "lane"), _LEFT + position * room
        if len(name) > letters:
            name = f"{name[: letters // 2]}…{name[len(name) - (letters - letters // 2 - 1) :]}"
        parts.append(f'<rect class="task {colour}" x="{x:.1f}" y="9" width="10" height="10"/>')
        parts.append(f'<text x="{x + 14:.1f}" y="18">{escape(name)}</text>')
    return parts


def _note(frame: _Frame, count: int) -> list[str]:
    if count == frame.rows:
        return []
    text = f"the first {frame.rows} of {count} vEUs"
    return [f'<text x="{_WIDTH - _RIGHT}" y="{frame.height - 6:.1f}" text-anchor="end">{text}</text>']


_SHOWN = 6  # a choice: pictures of a page


def section(report: BuildRecord) -> str:
    """Pictures of the schedules that take longest, and a line for each of the others; "" where none was asked for."""
    if report.rammer is None:
        return ""
    longest = sorted(report.rammer.scheduled, key=lambda region: -region.predicted_us)[:_SHOWN]
    drawn = {str(region) for region in longest}
    others = "".join(f"<li>{escape(line)}</li>" for line in rammer_lines(report) if line not in drawn)
    return (
        "<section>\n<h2>Schedules of rTasks</h2>\n"
        '<p class="muted">A row for each virtual execution unit, a bar for each entry of its stream, nothing where it '
        "waited; at the right the share of the time that it was busy. Bars of one colour read the same constants, or "
        "are of one kernel.</p>\n"
        + "".join(map(_schedule, longest))
        + (f'<ul class="muted">{others}</ul>' if others else "")
        + "\n</section>"
    )


def _schedule(region: RegionRecord) -> str:
    pictures = (
        f"<figure><figcaption>{run.name}: {format_time(max(time.end_s for time in run.times))}</figcaption>"
        f"{gantt(run.schedule, run.graph, run.times)}</figure>"
        for run in region_runs(region)
    )
    return f"<h3>{escape(region.symbol)}</h3>\n<p>{escape(str(region))}</p>\n{''.join(pictures)}\n"
