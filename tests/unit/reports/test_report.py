"""The build report: lossless JSON, table, and a page that needs nothing but itself."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import get_args

import pytest

from tvm_ext.devices.hal import DeviceSpec, MemoryLayer
from tvm_ext.errors import ExportError
from tvm_ext.recorder import phases_of
from tvm_ext.records import choice as choice_records
from tvm_ext.records.build_profile import CONSTRUCTING, GENERATING, CacheUse, CodeTimes, Phase, Stopwatch
from tvm_ext.records.choice import KernelChoice
from tvm_ext.records.memory import MemoryUse
from tvm_ext.records.rprogram import LayerCost, Prediction, RProgram, RTile
from tvm_ext.reports.record import Ceiling, OperatorReport, PassTime, ceilings_of
from tvm_ext.reports.report import BuildReport
from tvm_ext.reports.svg import LogAxis, points, roofline
from tvm_ext.reports.text import by_time, format_time
from tvm_ext.support.pass_clock import PassClock

TILE = RTile(axes=("i", "j", "k"), shape=(14, 32, 1), storage_padding=(("A", 1),))


def program(time_s: float) -> RProgram:
    cost = LayerCost(layer="L1", footprint_bytes=100.0, traffic_bytes=1e6, time_s=time_s / 3)
    prediction = Prediction(time_s=time_s, compute_s=time_s / 2, layers=(cost,), bound="compute")
    return RProgram(
        device="cpu", expr_digest="ab", tiles=(("L0", TILE), ("L1", TILE.replace("k", 64))), vector_axis="j",
        unit_count=2, partition_count=8, epsilon=0.1, shrunk=True, prediction=prediction,
    )  # fmt: skip


def operator(name: str, *, path: str = "rtile", measured_s: float | None = None, calls: int = 1) -> OperatorReport:
    choice = KernelChoice(
        operator=name, path=path, notes=(f"because of {name}",), device="cpu",  # type: ignore[arg-type]
        flops=2e6, bytes=1e5, program=program(1e-3) if path == "rtile" else None,
    )  # fmt: skip
    return OperatorReport(name=name, function=f"{name}_packed", choice=choice, calls=calls, measured_s=measured_s)


PROFILE = ("phases", "code", "kernel_cache")


@pytest.fixture
def report() -> BuildReport:
    return BuildReport(
        model="net", device="cpu", device_description="a CPU", target="llvm", created="2026-01-02T03:04:05+00:00",
        options=(("enable_roller", "True"),), versions=(("python", "3.11"),),
        ceilings=(
            Ceiling(name="float32", kind="compute", value=300.0),
            Ceiling(name="L1", kind="memory", value=600.0),
            Ceiling(name="DRAM", kind="memory", value=20.0),
        ),
        operators=(
            operator("slow", measured_s=2e-3, calls=3),
            operator("quick"),
            operator("pool", path="fallback", measured_s=5e-4),
            operator("odd", path="stock"),
        ),
        passes=(PassTime(name="FuseOps", seconds=0.25), PassTime(name="LegalizeOps", seconds=0.5)),
        import_s=0.125, build_s=2.0, constant_bytes=8_000_000, code_generation_s=1.25, run_s=7e-3,
    )  # fmt: skip


@pytest.fixture
def profiled(report: BuildReport) -> BuildReport:
    return replace(
        report,
        phases=(Phase(name="import", seconds=0.125), Phase(name="graph passes", seconds=0.5)),
        code=CodeTimes(threads=2, compiled=3, lowering_s=0.75, objects_s=0.5, link_s=0.0625),
        kernel_cache=CacheUse(folder="/kernels", hits=4, misses=3, duplicates=1, notes=("an entry was corrupt",)),
    )


def test_the_build_profile_is_in_every_form_of_the_report(profiled: BuildReport) -> None:
    assert BuildReport.from_json(profiled.to_json()) == profiled
    for text in (profiled.table(), profiled.to_html()):
        for part in ("graph passes", "500 ms", "3 kernels on 2 thread(s)", "4 found, 3 made, 1 equal", "was corrupt"):
            assert part in text, part


def test_a_report_without_a_build_profile_is_read_and_shown(report: BuildReport) -> None:
    old = {name: value for name, value in json.loads(report.to_json()).items() if name not in PROFILE}
    assert BuildReport.from_json(json.dumps(old)) == report
    assert "build profile" not in report.table()


def test_phases_do_not_overlap() -> None:
    clock, watch = PassClock(), Stopwatch()
    clock.seconds.update({"tvm_ext.ConstructKernels": 1.2, "tvm_ext.PackConstants": 0.3, "FuseOps": 0.4})
    watch.phases += [Phase(name=CONSTRUCTING, seconds=2.0), Phase(name=GENERATING, seconds=1.0)]
    phases = {phase.name: phase.seconds for phase in phases_of(watch, clock, 0.5)}
    assert list(phases) == ["import", "graph passes", "kernel construction", "packing constants", "code generation"]
    assert phases["graph passes"] == pytest.approx(0.5)
    assert sum(phases.values()) == pytest.approx(0.5 + watch.seconds)
    assert [phase.name for phase in phases_of(watch, PassClock(), None)] == [CONSTRUCTING, GENERATING]


def test_json_is_lossless(report: BuildReport) -> None:
    assert BuildReport.from_json(report.to_json()) == report


@pytest.mark.parametrize("text", ["{}", "[]", "null", '{"model": "x"}', "no json"])
def test_other_json_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"BuildReport|Expecting"):
        BuildReport.from_json(text)


def test_times_prefer_the_measurement(report: BuildReport) -> None:
    assert report.operator("slow").total_s == 3 * 2e-3
    assert report.operator("quick").total_s == 1e-3
    assert report.operator("odd").total_s is None
    assert [item.name for item in by_time(report)] == ["slow", "quick", "pool", "odd"]


def test_a_binding_layer_is_named_in_full(report: BuildReport) -> None:
    slow = report.operator("slow")
    assert report.bound_of(slow) == "compute"
    program = slow.choice.program
    assert program is not None
    bound = replace(program, prediction=replace(program.prediction, bound="L1"))
    limited = replace(slow, choice=replace(slow.choice, program=bound))
    named = replace(report, ceilings=(Ceiling(name="L1 data cache", kind="memory", value=1.0),))
    assert named.bound_of(limited) == "L1 data cache"
    assert named.bound_of(report.operator("odd")) == ""


def test_path_counts(report: BuildReport) -> None:
    assert report.path_counts() == {"rtile": 2, "fallback": 1, "stock": 1}


def test_measurements_reach_the_operators_named(report: BuildReport) -> None:
    measured = report.with_measurements({"quick_packed": 4e-3}, 1e-2)
    assert measured.operator("quick").measured_s == 4e-3
    assert measured.operator("slow").measured_s == 2e-3
    assert measured.run_s == 1e-2


def test_table_says_what_was_done_and_why(report: BuildReport) -> None:
    text = str(report)
    assert "4 kernels: 1 fallback, 2 rtile, 1 stock; 6 calls; 8 MB of parameters" in text
    for item in report.operators:
        assert item.choice.reason in text
    assert text.index("slow") < text.index("quick") < text.index("odd")


@pytest.mark.parametrize(
    ("seconds", "text"), [(None, "-"), (0.0, "0 us"), (1.5e-6, "1.5 us"), (0.25, "250 ms"), (12.34, "12.3 s")]
)
def test_times_are_printed_in_the_unit_that_suits(seconds: float | None, text: str) -> None:
    assert format_time(seconds) == text


class Page(HTMLParser):
    """Collects what a test asks of the page, and that its tags are balanced."""

    VOID = frozenset({"meta", "input"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.addresses: list[str] = []
        self.circles = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "action", "data")]
        self.circles += tag == "circle"
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in ("line", "circle"), "only these are written as <tag/>"
        self.circles += tag == "circle"

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_page_is_self_contained_and_well_formed(report: BuildReport) -> None:
    html = report.to_html()
    page = Page()
    page.feed(html)
    assert page.open == []
    assert page.addresses == []
    assert not re.search(r"https?://|@import|url\(", html)
    assert page.circles == len(points(report)) == 3
    for item in report.operators:
        assert item.choice.reason in html
    assert "$" not in html


def test_page_escapes_what_a_model_calls_its_operators(report: BuildReport) -> None:
    hostile = "<script>alert(1)</script>&\"'"
    named = replace(report, model=hostile, operators=(operator(hostile, measured_s=1e-3),))
    assert "<script>alert" not in named.to_html()


def test_page_has_the_memory_of_each_contender(report: BuildReport) -> None:
    assert "<h2>Memory" not in report.to_html()
    peaks = (
        ("tvm_ext", MemoryUse(load_peak_bytes=3 << 20, run_peak_bytes=4 << 20, resident_bytes=2 << 20)),
        ("onnx<runtime>", MemoryUse(load_peak_bytes=8 << 20, run_peak_bytes=6 << 20, resident_bytes=5 << 20)),
    )
    measured = replace(report, memory=peaks)
    page = measured.to_html()
    assert "<b>4.0 MiB</b><span>memory, at most" in page
    section = page[page.index('<section id="memory"') :]
    section = section[: section.index("</section>")]
    assert re.findall(r"width:([\d.]+)%", section) == ["37.50", "50.00", "25.00", "100.00", "75.00", "62.50"]
    assert "onnx&lt;runtime&gt;, while running" in section
    assert BuildReport.from_json(measured.to_json()) == measured


def test_page_of_an_empty_report(report: BuildReport) -> None:
    empty = replace(report, operators=(), passes=(), ceilings=(), run_s=None, import_s=None, code_generation_s=0.0)
    html = empty.to_html()
    assert "Passes were not timed" in html
    assert "<svg" not in html


def test_points_lie_where_their_numbers_say(report: BuildReport) -> None:
    slow = points(report)[0]
    assert (slow.operator.name, slow.intensity) == ("slow", 20.0)
    assert slow.gflops == pytest.approx(2e6 / 2e-3 / 1e9)
    assert sum(point.share for point in points(report)) == pytest.approx(1.0)


def test_logarithmic_axis() -> None:
    axis = LogAxis(low=1.0, high=100.0, start=0.0, end=200.0)
    assert [axis(value) for value in (1.0, 10.0, 100.0)] == pytest.approx([0.0, 100.0, 200.0])
    assert list(axis.decades()) == [1.0, 10.0, 100.0]


def test_saving_by_suffix(report: BuildReport, tmp_path: Path) -> None:
    report.save(tmp_path / "report.html")
    report.save(tmp_path / "report.json")
    assert (tmp_path / "report.html").read_text() == report.to_html()
    assert BuildReport.from_json((tmp_path / "report.json").read_text()) == report
    with pytest.raises(ExportError, match="cannot write into"):
        report.save(tmp_path / "missing" / "report.html")


def test_ceilings_leave_out_what_is_not_known() -> None:
    layers = (
        MemoryLayer(
            name="L0", description="registers", scope="teu", capacity_bytes=64,
            bandwidth_gb_per_s=None, transaction_bytes=4,
        ),
        MemoryLayer(
            name="L1", description="L1 cache", scope="unit", capacity_bytes=1024,
            bandwidth_gb_per_s=100.0, transaction_bytes=64,
        ),
        MemoryLayer(
            name="L2", description="DRAM", scope="device", capacity_bytes=None,
            bandwidth_gb_per_s=10.0, transaction_bytes=64,
        ),
    )  # fmt: skip
    device = DeviceSpec(
        name="d", kind="cpu", description="", unit_count=1, teus_per_unit=1, teu_lanes=4, clock_ghz=None,
        register_limit=16, register_bytes=16, layers=layers, peak_gflops=(("float32", 5.0),),
    )  # fmt: skip
    assert ceilings_of(device) == (
        Ceiling(name="float32", kind="compute", value=5.0),
        Ceiling(name="L1 cache", kind="memory", value=100.0),
        Ceiling(name="L2 DRAM", kind="memory", value=10.0),
    )


@pytest.mark.parametrize("path", get_args(choice_records.Path))
def test_the_page_names_every_path(path: str, report: BuildReport) -> None:
    """A path that the page does not know would end it."""
    page = replace(report, operators=(operator("one", path=path),)).to_html()
    assert f'class="swatch {path}"' in page


def test_no_name_covers_what_the_roofline_says_of_the_peak(report: BuildReport) -> None:
    """An operator right above the peak's line, where its text stands: the name goes elsewhere."""
    near = replace(operator("near"), measured_s=1.55e-8)
    near = replace(near, choice=replace(near.choice, flops=5e3, bytes=50.0))
    drawn = roofline(replace(report, operators=(near,)))
    texts = re.findall(r'<text class="label" x="([\d.]+)" y="([\d.]+)"[^>]*>([^<]+)<', drawn)
    peak, name = (next((float(x), float(y), text) for x, y, text in texts if said in text) for said in ("peak", "near"))
    apart = abs(peak[1] - name[1]) >= 18 or abs(peak[0] - name[0]) >= 4 * (len(peak[2]) + len(name[2]))
    assert apart, (peak, name)
