"""Two reports side by side, times far from their prediction, and a measured run as a trace."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tvm_ext.cli.app import main
from tvm_ext.records.choice import KernelChoice
from tvm_ext.records.nodes import CallSite, ModelNode
from tvm_ext.records.rprogram import Prediction, RProgram
from tvm_ext.reports.comparison import compare
from tvm_ext.reports.doubts import doubt
from tvm_ext.reports.graph import graph_section
from tvm_ext.reports.record import Ceiling, OperatorReport, TimedCall
from tvm_ext.reports.report import BuildReport

CONV, RELU, POOL = (ModelNode(name=name, kind=kind) for name, kind in (("c", "Conv"), ("r", "Relu"), ("p", "MaxPool")))


def operator(name: str, measured_s: float, predicted_s: float = 1e-3, note: str = "tiles") -> OperatorReport:
    prediction = Prediction(time_s=predicted_s, compute_s=predicted_s, layers=(), bound="compute")
    program = RProgram(
        device="cpu", expr_digest="ab", tiles=(), vector_axis=None, unit_count=2, partition_count=8, epsilon=0.1,
        shrunk=True, prediction=prediction,
    )  # fmt: skip
    choice = KernelChoice(
        operator=name, path="rtile", notes=(note,), device="cpu", flops=1e8, bytes=1e6, program=program
    )
    return OperatorReport(name=name, function=name, choice=choice, calls=1, measured_s=measured_s)


def report(operators: list[OperatorReport], nodes: list[tuple[ModelNode, ...]], run_s: float = 5e-3) -> BuildReport:
    sites = [
        CallSite(function=item.function, nodes=own, reads=(place - 1,) if place else (), dtype="float32")
        for place, (item, own) in enumerate(zip(operators, nodes, strict=True))
    ]
    return BuildReport(
        model="net", device="cpu", device_description="a CPU", target="llvm", created="2026-01-02T03:04:05+00:00",
        options=(("layout", "auto"),), versions=(), operators=tuple(operators), passes=(), import_s=None, build_s=1.0,
        ceilings=(
            Ceiling(name="float32", kind="compute", value=200.0), Ceiling(name="DRAM", kind="memory", value=10.0)
        ),
        constant_bytes=0, code_generation_s=0.0, run_s=run_s, sites=tuple(sites),
    )  # fmt: skip


FUSED = report([operator("conv_relu", 2e-3), operator("pool", 1e-3)], [(CONV, RELU), (POOL,)])
APART = report(
    [operator("conv7", 3e-3, note="other tiles"), operator("relu", 1e-3), operator("pool9", 1e-3)],
    [(CONV,), (RELU,), (POOL,)],
    run_s=8e-3,
)


def test_kernels_are_matched_by_nodes_whatever_they_are_called() -> None:
    found = compare(FUSED, APART)
    first, second = found.parts
    assert (first.first_kernels, first.second_kernels) == (("conv_relu",), ("conv7", "relu"))
    assert (first.first_s, first.second_s) == (2e-3, 4e-3)
    assert first.changed
    assert (second.title, second.gain_s, second.changed) == ("MaxPool p", 0.0, False)  # a name alone is no change
    assert (found.first_s, found.second_s) == (pytest.approx(3e-3), pytest.approx(5e-3))
    assert found.measured


def test_times_of_one_kind_are_compared() -> None:
    """A measured and a predicted time say nothing about each other."""
    predicted = replace(APART, operators=tuple(replace(item, measured_s=None) for item in APART.operators))
    found = compare(FUSED, predicted)
    assert not found.measured
    assert found.first_s == pytest.approx(2e-3)


def test_builds_of_two_models_have_nothing_in_common() -> None:
    other = report([operator("gemm", 1e-3)], [(ModelNode(name="g", kind="Gemm"),)])
    with pytest.raises(ValueError, match="no node and no kernel in common"):
        compare(FUSED, other)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [str(tmp_path / name) for name in ("a.json", "b.json")]
    for path, item in zip(paths, (FUSED, APART), strict=True):
        item.save(path)
    for extra, code in ([], 0), (["--slower", "100"], 0), (["--slower", "10"], 1), (["--json"], 0):
        with pytest.raises(SystemExit) as end:
            main(["compare", *paths, *extra])
        assert (end.value.code or 0) == code
    out = capsys.readouterr().out
    assert "Conv c" in out
    assert "+100.0 %" in out
    assert json.loads(out.splitlines()[-1])["measured"] is True
    with pytest.raises(SystemExit) as end:
        main(["compare", paths[0], str(tmp_path / "none.json")])
    assert end.value.code == 2


@pytest.mark.parametrize(
    ("measured_s", "spread", "words"),
    [
        (2e-3, (1.9e-3, 2.1e-3), ""),
        (9e-3, (2e-3, 9e-3), "noise"),
        (9e-3, (8.8e-3, 9.1e-3), "misjudges"),
        (1e-4, (1e-4, 1.1e-4), "in a cache"),
        (5e-6, (4.9e-6, 5.1e-6), "so short"),
    ],
)
def test_a_time_far_from_its_prediction_has_a_reason(
    measured_s: float, spread: tuple[float, float], words: str
) -> None:
    odd = replace(operator("odd", measured_s), fastest_s=spread[0], slowest_s=spread[1])
    steady = [operator(f"steady{number}", 1e-3) for number in range(30)]
    text = doubt(report([odd, *steady], [(CONV,), *([(RELU,)] * 30)]), odd)
    assert (words in text) if words else text == ""


def test_when_everything_is_slow_the_machine_is_named() -> None:
    slow = report([operator("a", 9e-3), operator("b", 9e-3)], [(CONV,), (RELU,)])
    assert "machine is busy" in doubt(slow, slow.operators[0])


def test_shares_of_peak_and_bandwidth() -> None:
    conv = FUSED.operators[0]
    assert FUSED.peak_share(conv) == pytest.approx(1e8 / 2e-3 / 200e9)
    assert FUSED.bandwidth_share(conv) == pytest.approx(1e6 / 2e-3 / 10e9)


def test_a_measured_run_is_a_trace_under_the_names_of_nodes(tmp_path: Path) -> None:
    calls = (TimedCall(site=0, start_s=0.0, seconds=2e-3), TimedCall(site=1, start_s=2e-3, seconds=1e-3))
    replace(FUSED, timeline=calls).save_trace(tmp_path / "trace.json")
    slices = [e for e in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if e["ph"] == "X"]
    assert [(e["name"], e["ts"], e["dur"]) for e in slices] == [
        ("Conv c + Relu r", 0.0, 2000.0),
        ("MaxPool p", 2000.0, 1000.0),
    ]
    assert slices[0]["args"]["kernel"] == "conv_relu"


def test_the_graph_has_a_box_for_each_call() -> None:
    picture = graph_section(APART)
    assert picture.count('class="box"') == 3
    assert picture.count('class="edge"') == 2
