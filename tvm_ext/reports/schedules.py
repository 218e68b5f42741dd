"""The page's section on schedules of rTasks: what each is predicted to do, and what it did."""

from __future__ import annotations

from html import escape

from tvm_ext.records.rammer import RegionRecord

from .gantt import gantt
from .record import BuildRecord
from .schedule_trace import region_runs
from .text import format_time, rammer_lines

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
