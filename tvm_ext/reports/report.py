"""The report of a build: its record, as text, as a page, in a file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .record import BuildRecord


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildReport(BuildRecord):
    """A `BuildRecord` that can be shown: ``print(report)``, or ``report.save("report.html")``."""

    def to_html(self) -> str:
        """One self-contained page: roofline, time per operator, table, passes."""
        from .html import render

        return render(self)

    def save(self, path: str | Path) -> None:
        """Write the report atomically: HTML for a name ending in .html, JSON otherwise."""
        from tvm_ext.support.files import write_atomically

        text = self.to_html() if str(path).endswith((".html", ".htm")) else self.to_json() + "\n"
        write_atomically(path, text.encode())

    def save_trace(self, path: str | Path) -> None:
        """Write the measured run, and those of schedules of rTasks, simulated and measured, atomically for Perfetto."""
        from tvm_ext.support.files import write_atomically

        from .run_trace import run_events
        from .schedule_trace import report_trace

        write_atomically(path, report_trace(self.rammer, run_events(self)).encode())

    def table(self) -> str:
        """The operators and totals as text, one line per operator, the slowest first."""
        from .text import render

        return render(self)

    def __str__(self) -> str:
        return self.table()
