"""`bench`: records, peers, errors and tables; how long things take is not looked at."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import onnx
import pytest
from rich.console import Console

from tvm_ext.bench import compare as bench_module
from tvm_ext.bench import contenders, models
from tvm_ext.bench.compare import BenchResult, Timing, bench, relative_error
from tvm_ext.bench.contenders import ONNX_RUNTIME, OPENVINO, OURS, STOCK_TVM, missing_peer
from tvm_ext.errors import InputError, UnsupportedEnvironmentError
from tvm_ext.records.memory import MemoryUse
from tvm_ext.records.serialise import from_json, to_json
from tvm_ext.reports.report import BuildReport


@pytest.fixture(scope="module")
def result() -> BenchResult:
    pytest.importorskip("onnxruntime", reason="ONNX Runtime is one of the peers")
    return bench("mlp", batch=2, rounds=2, stock_budget_s=0.5)


def present(*peers: str) -> list[str]:
    return [name for name in peers if missing_peer(name) is None]


def test_quantiles_are_samples_that_were_taken() -> None:
    samples = tuple(float(number) for number in range(1, 101))
    item = Timing(name="x", import_s=0.0, build_s=0.0, samples_s=samples, relative_error=None)
    assert [item.quantile_s(share) for share in (0.5, 0.9, 0.99)] == [50.0, 90.0, 99.0]


def test_all_contenders_are_timed_and_right(result: BenchResult) -> None:
    assert [item.name for item in result.timings] == [OURS, *present(ONNX_RUNTIME, OPENVINO, STOCK_TVM)]
    assert result.inputs == (("x", (2, 784)),)
    assert {name for name, _ in result.skipped} <= {OPENVINO}
    for item in result.timings:
        assert item.samples_s
        assert min(item.samples_s) > 0
        assert min(item.samples_s) <= item.median_s <= max(item.samples_s)
    for name in (OURS, STOCK_TVM):
        error = result.timing(name).relative_error
        assert error is not None
        assert error < 1e-5
    assert result.timing(ONNX_RUNTIME).relative_error is None


def test_speedup_is_the_ratio_of_medians(result: BenchResult) -> None:
    expected = result.timing(STOCK_TVM).median_s / result.timing(OURS).median_s
    assert result.speedup(STOCK_TVM) == pytest.approx(expected)
    assert result.speedup("nobody") is None


def test_result_round_trips_through_json(result: BenchResult) -> None:
    assert from_json(BenchResult, to_json(result)) == result


def test_environment_is_complete(result: BenchResult) -> None:
    environment = result.environment
    versions = dict(environment.versions)
    assert {"python", "apache-tvm", "apache-tvm-ffi", "numpy", "onnx", "onnxruntime"} <= set(versions)
    assert environment.device
    assert environment.threads >= 1
    assert environment.load_average is None or environment.load_average >= 0
    assert environment.date.endswith("+00:00")


def test_progress_is_told_a_step_per_contender_and_one_for_the_timing() -> None:
    told: list[str] = []
    bench("mlp", peers=[STOCK_TVM], rounds=1, stock_budget_s=0.1, progress=told.append)
    assert told == ["building mlp", "building it with stock TVM", "timing 2 contenders in turns"]


def test_table_has_a_row_per_contender(result: BenchResult) -> None:
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(result.table())
    text = console.export_text()
    assert [text.count(name) for name in (OURS, ONNX_RUNTIME, STOCK_TVM)] == [1, 1, 1]
    assert "2x784" in text


def test_missing_onnx_runtime_is_skipped_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contenders.importlib.util, "find_spec", lambda _name: None)
    result = bench("mlp", rounds=1, stock_budget_s=0.1)
    assert [item.name for item in result.timings] == [OURS, STOCK_TVM]
    assert [name for name, _ in result.skipped] == [ONNX_RUNTIME, OPENVINO]
    assert all("tvm-ext[bench]" in reason for _, reason in result.skipped)
    with pytest.raises(UnsupportedEnvironmentError, match=r"tvm-ext\[bench\]"):
        bench("mlp", peers=[ONNX_RUNTIME])


def test_unknown_peer_is_refused() -> None:
    with pytest.raises(InputError, match="no peer called 'torch'"):
        bench("mlp", peers=["torch"])


def test_model_may_be_a_file_or_a_proto(tmp_path: object) -> None:
    model = models.build_model("mlp", batch=3)
    path = f"{tmp_path}/own.onnx"
    onnx.save(model, path)
    for source, name in ((path, "own.onnx"), (model, "mlp")):
        result = bench(source, peers=[], rounds=1)
        assert result.model == name
        assert result.inputs == (("x", (3, 784)),)
        assert [item.name for item in result.timings] == [OURS]


def test_peers_run_on_the_same_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong result shows: one contender computing on other inputs has an error far above rounding."""
    pytest.importorskip("onnxruntime", reason="the error is against ONNX Runtime")
    original = contenders.prepare_ours

    def on_other_inputs(model: onnx.ModelProto, inputs: dict[str, np.ndarray], *rest: object) -> contenders.Contender:
        return original(model, {name: value + 1 for name, value in inputs.items()}, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(bench_module.contenders, "prepare_ours", on_other_inputs)
    result = bench("mlp", peers=[ONNX_RUNTIME], rounds=1)
    assert result.timing(OURS).relative_error > 1e-2


def test_relative_error_by_hand() -> None:
    expected = np.array([3.0, 4.0], np.float32)
    assert relative_error([expected], [expected]) == 0.0
    assert relative_error([np.array([3.0, 4.5], np.float32)], [expected]) == pytest.approx(0.5 / 5)
    assert relative_error([expected, expected * 2], [expected, expected]) == pytest.approx(1.0)


@pytest.mark.parametrize("wrong", [[np.nan, 4.0], [np.inf, 4.0], [3.0]])
def test_relative_error_of_nonsense_is_infinite(wrong: list[float]) -> None:
    assert relative_error([np.array(wrong, np.float32)], [np.array([3.0, 4.0], np.float32)]) == float("inf")


def test_the_report_of_a_run_has_its_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use = MemoryUse(load_peak_bytes=1 << 20, run_peak_bytes=2 << 20, resident_bytes=1 << 20)
    monkeypatch.setattr(bench_module, "measured", lambda *_: use)
    result = bench("mlp", peers=[], rounds=1, memory=True, report=tmp_path / "report.json")
    report = BuildReport.from_json((tmp_path / "report.json").read_text())
    assert report.memory == ((OURS, use),)
    assert report.run_s == result.timings[0].median_s
