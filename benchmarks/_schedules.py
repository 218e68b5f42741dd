"""What benchmarks say of schedules of rTasks beside the report: pictures as files, and how busy units are."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from html import escape
from importlib import resources
from pathlib import Path

from tvm_ext.cost.schedule_simulator import ScheduleTimes, TimedEntry
from tvm_ext.records.rtasks import RTaskGraph, RTaskSchedule
from tvm_ext.reports.gantt import gantt

PAPER = Path(__file__).resolve().parent / "workloads" / "rammer_models.csv"


def unit_activity(schedule: RTaskSchedule, times: ScheduleTimes) -> float:
    """The share of the time in which a unit runs at least one rTask, 0 to 1, as nvprof's SM efficiency (§5.2.2).

    vEU ``u`` is on unit ``u mod unit_count``, as a GPU places the blocks of a launch.
    """
    spans: dict[int, list[tuple[float, float]]] = {}
    for item in times.entries:
        count = schedule.programs[item.program].device.unit_count
        spans.setdefault(item.unit % count, []).append((item.start_s, item.end_s))
    active = 0.0
    for found in spans.values():
        until = 0.0
        for start_s, end_s in sorted(found):
            active += max(0.0, end_s - max(start_s, until))
            until = max(until, end_s)
    return active / (times.makespan_s * max(program.device.unit_count for program in schedule.programs))


def gantt_file(schedule: RTaskSchedule, graph: RTaskGraph, times: Sequence[TimedEntry]) -> str:
    """`gantt` as the text of an SVG file, which any browser shows."""
    style = (resources.files("tvm_ext") / "reports" / "page" / "style.css").read_text(encoding="utf-8")
    picture = gantt(schedule, graph, times)
    if not picture.startswith("<svg "):
        picture = f'<svg viewBox="0 0 600 40"><text x="10" y="24">{picture[3:-4]}</text></svg>'
    head, _, body = picture.partition(">")
    background = '<rect width="100%" height="100%" fill="var(--page)"/>'
    return f'{head} xmlns="http://www.w3.org/2000/svg"><style>{escape(style)}</style>{background}{body}\n'


def paper_ms() -> dict[str, float]:
    """Rammer's own times on a V100 (Figure 11), by the names of `models`."""
    names = {"ResNeXt": "resnext29", "NASNet": "nasnet", "AlexNet": "alexnet", "DeepSpeech2": "deepspeech2"}
    names |= {"LSTM-TC": "lstm_tc", "Seq2Seq-NMT": "seq2seq_nmt"}
    with PAPER.open(newline="", encoding="utf-8") as file:
        return {names[row["model"]]: float(row["paper_v100_bs1_ms_rammer"]) for row in csv.DictReader(file)}
