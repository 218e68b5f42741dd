"""The measured run of a build as slices of a trace that Perfetto (ui.perfetto.dev) and chrome://tracing show."""

from __future__ import annotations

from .record import BuildRecord
from .schedule_trace import Event


def run_events(report: BuildRecord) -> list[Event]:
    """A process with one slice for each call of a kernel, under the names of its nodes; empty without a measured run.

    Between slices the VirtualMachine allocates, checks and calls.
    """
    if not report.timeline:
        return []
    operators = {operator.function: operator for operator in report.operators}
    events: list[Event] = [
        {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": f"{report.model}, one run"}},
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": 0, "args": {"name": "kernels"}},
    ]
    for call in report.timeline:
        site = report.sites[call.site]
        operator = operators[site.function]
        details: dict[str, str | int] = {
            "kernel": site.function,
            "nodes": "; ".join(f"{node} {node.shape}" for node in site.nodes),
            "operands": ", ".join(site.operands),
            "result": site.result,
            "predicted us": round((operator.predicted_s or 0.0) * 1e6),
        }
        events.append(
            {
                "ph": "X",
                "name": site.title,
                "cat": operator.choice.path,
                "pid": 0,
                "tid": 0,
                "ts": call.start_s * 1e6,
                "dur": call.seconds * 1e6,
                "args": details,
            }
        )
    return events
