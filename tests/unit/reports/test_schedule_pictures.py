"""Pictures and traces of schedules: well-formed, whole, and true to the times that they are given."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree

import pytest

from benchmarks._schedules import gantt_file
from benchmarks.baseline_policies import BASELINES
from tvm_ext.cost.schedule_simulator import simulate
from tvm_ext.records.rammer import joined_entries
from tvm_ext.records.rtasks import RKernel, ROperator, RTaskGraph, RTaskSchedule, VDevice
from tvm_ext.relay_passes.wavefronts.policies import schedule
from tvm_ext.reports.gantt import gantt
from tvm_ext.reports.schedule_trace import ScheduleRun, chrome_trace, measured_entries, report_trace

SVG = "{http://www.w3.org/2000/svg}"


def _graph(tasks: int, length: int = 3) -> RTaskGraph:
    return RTaskGraph(
        operators=tuple(
            ROperator(
                name=f"<operator & {index}>",
                kernels=(RKernel(name=f'"k{index % 2}"', task_count=tasks, task_s=1e-6),),
                predecessors=(index - 1,) if index else (),
            )
            for index in range(length)
        )
    )


def _made(tasks: int, units: int, policy: str = "wavefront") -> tuple[RTaskSchedule, RTaskGraph]:
    graph = _graph(tasks)
    device = VDevice(name="device", unit_count=units, barrier_s=2e-7, launch_s=1e-6)
    return schedule(graph, lambda need: device, policy), graph


def _bars(text: str) -> list[ElementTree.Element]:
    found = ElementTree.fromstring(text).findall(f"{SVG}rect")
    return [item for item in found if item.find(f"{SVG}title") is not None]


def test_each_entry_has_a_bar_of_its_length() -> None:
    made, graph = _made(tasks=4, units=3)
    times = simulate(made, graph)
    bars = _bars(gantt_file(made, graph, times.entries))
    assert len(bars) == len(times.entries)
    widths = sorted(float(bar.attrib["width"]) for bar in bars)
    lengths = sorted(item.end_s - item.start_s for item in times.entries)
    pixels = 1100 - 76 - 56
    for width, length in zip(widths, lengths, strict=True):
        assert width == pytest.approx(length / times.makespan_s * pixels, abs=0.5)
    tips = [bar.find(f"{SVG}title") for bar in bars]
    assert any(tip is not None and "<operator & 1>: rTask" in (tip.text or "") for tip in tips)


def test_names_of_units_and_their_shares_are_drawn() -> None:
    made, graph = _made(tasks=4, units=3)
    times = simulate(made, graph)
    text = gantt(made, graph, times.entries)
    assert all(f">vEU {unit}<" in text for unit in range(3))
    assert f">{100 * times.unit_work_s[0] / times.makespan_s:.0f} %<" in text


def test_wide_schedules_stay_small() -> None:
    """300 vEUs with the same three bars each: three rectangles of all rows, not 900."""
    made, graph = _made(tasks=300, units=300)
    bars = _bars(gantt_file(made, graph, simulate(made, graph).entries))
    assert len(bars) == 3
    assert {round(float(bar.attrib["height"])) for bar in bars} == {720}
    made, graph = _made(tasks=1000, units=1000)
    assert "the first 360 of 1000 vEUs" in gantt(made, graph, simulate(made, graph).entries)


def test_long_schedules_join_what_is_too_narrow() -> None:
    graph = _graph(tasks=1, length=3000)
    graph = RTaskGraph(operators=tuple(graph.operators))
    made = schedule(graph, lambda need: VDevice(name="one", unit_count=1), next(iter(BASELINES)))
    one_colour = [
        ROperator(name="o", kernels=graph.operators[0].kernels, predecessors=item.predecessors)
        for item in graph.operators
    ]
    text = gantt_file(made, RTaskGraph(operators=tuple(one_colour)), simulate(made, graph).entries)
    assert len(_bars(text)) == 1
    assert "3000 entries from o: rTask 0" in text


def test_several_programs_are_told_apart() -> None:
    made, graph = _made(tasks=4, units=3, policy="launches")
    assert gantt(made, graph, simulate(made, graph).entries).count('class="cache"') == 2


def test_nothing_is_drawn_of_nothing() -> None:
    made, graph = _made(tasks=4, units=3)
    assert gantt(made, graph, ()) == "<p>Nothing of the schedule has run.</p>"
    assert "Nothing of the schedule" in gantt_file(made, graph, ())
    ElementTree.fromstring(gantt_file(made, graph, ()))


def test_a_trace_has_slices_threads_and_arrows() -> None:
    made, graph = _made(tasks=4, units=3)
    times = simulate(made, graph)
    measured = measured_entries(
        made, ((item.unit, item.place, 7 + item.start_s, 7.5 + item.end_s) for item in times.entries)
    )
    runs = {"simulated": times.entries, "measured": measured}
    named = [ScheduleRun(name=name, schedule=made, graph=graph, times=found) for name, found in runs.items()]
    events = json.loads(chrome_trace(named))["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert len(slices) == 2 * len(times.entries)
    assert {event["pid"] for event in slices} == {1, 2}
    assert [event["args"]["name"] for event in events if event["name"] == "process_name"] == ["simulated", "measured"]
    ends = max(event["ts"] + event["dur"] for event in slices if event["pid"] == 1)
    assert ends == pytest.approx(times.makespan_s * 1e6)
    waits = sum(1 for _, _, entry in made.programs[0].entries() for _ in entry.waits)
    arrows = [event["ph"] for event in events if event["ph"] in "sf"]
    assert arrows.count("s") == arrows.count("f") == 2 * waits > 0


def test_a_measured_run_counts_from_its_start() -> None:
    made, _ = _made(tasks=4, units=3)
    (first, second) = measured_entries(made, [(0, 0, 5.0, 6.0), (1, 0, 5.5, 7.0)])
    assert (first.start_s, first.end_s, second.start_s, second.end_s) == (0.0, 1.0, 0.5, 2.0)


def test_places_of_a_measured_run_go_through_all_programs() -> None:
    made, graph = _made(tasks=4, units=3, policy="launches")
    joined = joined_entries(made)
    rows = [(unit, place, 0.0, 1.0) for unit, stream in enumerate(joined) for place in range(len(stream))]
    found = measured_entries(made, rows)
    assert {(item.program, item.unit, item.place) for item in found} == {
        (number, unit, place) for number, program in enumerate(made.programs) for unit, place, _ in program.entries()
    }
    for (unit, place, _, _), item in zip(rows, found, strict=True):
        assert made.programs[item.program].streams[unit][item.place] == joined[unit][place]
    assert RTaskGraph.from_json(graph.to_json()) == graph
    assert report_trace(None) == '{"displayTimeUnit":"ns","traceEvents":[]}'


@pytest.mark.parametrize(
    "row", [(3, 0, 0.0, 1.0), (-1, 0, 0.0, 1.0), (0, 99, 0.0, 1.0), (0, 0, 2.0, 1.0), (0, 0, 0.0, float("nan"))]
)
def test_rows_of_no_entry_are_refused(row: tuple[int, int, float, float]) -> None:
    made, _ = _made(tasks=4, units=3)
    with pytest.raises(ValueError, match="is none of the schedule's"):
        measured_entries(made, [row])
