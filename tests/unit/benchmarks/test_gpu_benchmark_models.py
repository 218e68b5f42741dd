"""Whole models in ``benchmarks/gpu``: graphs without weights, what they compute, the bundle that carries them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import onnx
import pytest

from benchmarks.networks.bert import build_bert_base
from benchmarks.networks.models import build_model
from benchmarks.networks.recurrent import Stack, build_lstm_tc
from tests.support.quick_target import UNOPTIMISED
from tests.support.stub_driver import stub_events
from tests.unit.benchmarks.gpu_scripts import bundled, fake_gpu, imported_scripts, run_there
from tests.unit.compilers import needs_cc, needs_nvcc
from tvm_ext.records.choice import GpuPlan, KernelChoice
from tvm_ext.relay_passes.onnx.half import to_half
from tvm_ext.reports.record import OperatorReport


@pytest.fixture(scope="module")
def scripts() -> Iterator[SimpleNamespace]:
    with imported_scripts() as modules:
        yield modules


@pytest.fixture(scope="module")
def model(scripts: SimpleNamespace) -> Any:
    """A perceptron of four layers as a case."""
    return scripts.model_graphs.model_case("mlp", build_model("mlp", 2), "nvidia-a100", {})


def test_a_model_is_a_graph_without_weights(scripts: SimpleNamespace, model: Any) -> None:
    case = model.case
    text = json.dumps(case.to_record())
    assert scripts.cases.Case.from_record(json.loads(text)) == case
    assert len(text) < 5_000
    assert [item.name for item in case.inputs] == [var.name for var in model.parameters]
    assert sum(item.size_bytes for item in case.inputs) > 5_000_000
    assert all(0.01 < item.scale < 1.0 for item in case.inputs[1:])
    assert {operator for _, operator, _, _ in case.attributes["nodes"]} == {"matmul", "add", "nn.relu"}


def recurrent() -> onnx.ModelProto:
    """LSTM-TC's form, small: its steps are calls of functions of their own."""
    return build_lstm_tc(batch=1, seed=0, stack=Stack(steps=2, layers=2, hidden=8))


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("name", ["mlp", "lstm"])
def test_a_models_graph_computes_what_its_module_does(scripts: SimpleNamespace, model: Any, name: str) -> None:
    """The graph by NumPy, from its record; the module, in which weights are parameters too, by stock TVM on the CPU."""
    import tvm

    made = model if name == "mlp" else scripts.model_graphs.model_case(name, recurrent(), "nvidia-a100", {})
    generator = np.random.default_rng(1)
    arrays = [scripts.gpu._random(item, generator) for item in made.case.inputs]
    (expected,) = scripts.numpy_references.reference(made.case, arrays)
    machine = tvm.relax.VirtualMachine(tvm.relax.build(made.module, UNOPTIMISED), tvm.cpu())
    actual = machine["main"](*map(tvm.runtime.tensor, arrays)).numpy()
    assert actual.shape == made.case.output.shape == expected.shape
    assert np.linalg.norm(actual - expected) / np.linalg.norm(expected) < 1e-5


def test_a_graph_is_recorded_once_and_replayed(scripts: SimpleNamespace) -> None:
    """What is captured reads the first call's inputs again; the result is where it was."""
    events: list[str] = []
    torch = MagicMock()
    torch.cuda.CUDAGraph.return_value.replay.side_effect = lambda: events.append("replay")
    graphed = scripts.gpu.graphed(torch, lambda inputs: events.append("call") or inputs[0])
    assert [graphed(["a"]), graphed(["b"])] == ["a", "a"]
    assert events == ["call", "call", "replay", "replay"], "once to compile, once to record"


def test_an_encoder_is_recorded_whole(scripts: SimpleNamespace) -> None:
    onnx_model = to_half(build_bert_base(batch=1, sequence=16, seed=0, layers=1))
    bounds = scripts.models.MODELS["bert_base_1x128"].below
    case = scripts.model_graphs.model_case("bert", onnx_model, "nvidia-a100", bounds).case
    assert [item.below for item in case.inputs[:3]] == [30522, 2, 2]
    assert len(case.attributes["outputs"]) == 2
    ids = scripts.gpu._random(case.inputs[0], np.random.default_rng(0))
    assert ids.min() >= 0 and 128 < ids.max() < 30522
    named = {item.name for item in case.inputs} | {node[0] for node in case.attributes["nodes"]}
    used = {item for node in case.attributes["nodes"] for item in node[2] if isinstance(item, str)}
    assert used <= named
    with pytest.raises(NotImplementedError, match="operator less has no reference here"):
        scripts.numpy_references.reference(case, [np.zeros(item.shape, item.dtype) for item in case.inputs])


def test_a_model_that_leaves_old_results_is_wrong(scripts: SimpleNamespace, model: Any) -> None:
    gpu = fake_gpu(scripts)
    inputs = gpu.inputs(model.case)
    right = scripts.numpy_references.reference(model.case, inputs)[0].astype("float32")
    kept = right.copy()
    functions = {"ours": lambda _inputs: right.copy(), "ours_1": lambda _inputs: kept}
    entry = scripts.manifest.Entry(case=model.case, programs=())
    record = scripts.run.run_entry(entry, gpu, functions, compiled=False)
    assert record["ours"]["state"] == "ok"
    assert (record["ours_1"]["state"], record["ours_1"]["error"]) == ("wrong", "not finite")


def test_counts_tell_paths_apart(scripts: SimpleNamespace) -> None:
    def operator(name: str, path: str, reason: str, calls: int) -> OperatorReport:
        plans = (GpuPlan(launches=2, blocks=1, threads=32, shared_bytes=0, register_count=32),)
        choice = KernelChoice(
            operator=name, path=path, notes=(reason,), device="d", flops=10.0, gpu=plans if path != "stock" else ()  # type: ignore[arg-type]
        )  # fmt: skip
        return OperatorReport(name=name, function=name, choice=choice, calls=calls)

    operators = [
        operator("matmul", "rtile", "matmul on matrix units in tiles", 3),
        operator("matmul1", "rtile", "matmul on vector units in tiles", 1),
        operator("softmax", "rows", "row by row", 2),
        operator("sort", "stock", "by stock", 1),
    ]
    counted = scripts.models.count(operators)
    assert {path: (part.kernels, part.calls, part.launches, part.flops) for path, part in counted.items()} == {
        "tensor cores": (1, 3, 6, 30.0), "vector units": (1, 1, 2, 10.0), "rows": (1, 2, 4, 20.0),
        "stock": (1, 1, 0, 10.0),
    }  # fmt: skip
    assert set(scripts.models.off_tensor_cores(operators)) == {"matmul1", "sort"}


def test_results_of_models_are_shown_one_by_one(scripts: SimpleNamespace) -> None:
    done = {"ours": {"state": "ok", "median_us": 1234.5}, "dlight": {"state": "wrong", "error": 1.0}}
    record = {"id": "bert", "group": "models", "contenders": done}
    table = scripts.import_results.show_models([record, {"id": "gemm", "group": "fused", "contenders": done}])
    assert [list(column.cells) for column in table.columns] == [["bert"], ["1.234"], ["wrong"]]
    scheduled = scripts.import_results.show_models([{**record, "group": "schedules"}])
    assert [column.header for column in scheduled.columns] == ["model", "ours", "dlight"]
    assert scripts.import_results.show_models([{**record, "group": "fused"}]) is None


@pytest.mark.slow  # as test_a_bundle_is_made_here_and_loads_there
@needs_nvcc
@needs_cc
def test_a_model_is_bundled_here_and_starts_there(scripts: SimpleNamespace, tmp_path: Path) -> None:
    mlp, log = scripts.models.Model(build=lambda: build_model("mlp", 2)), tmp_path / "log"
    folder, manifest = bundled(tmp_path, models={"mlp": mlp})
    (entry,) = scripts.manifest.read_bundle(folder).entries
    assert entry == manifest.entries[0] and entry.case.flops > 1e6
    assert [(item.contender, item.kind) for item in entry.programs] == [("ours", "model"), ("dlight", "model")]
    assert {kernel["path"] for kernel in entry.programs[0].plan["kernels"]} <= {"rtile", "rows"}
    assert all((folder / item.file).stat().st_size < 500_000 for item in entry.programs)  # no weights in them
    record = run_there(folder, tmp_path, log)
    assert {item["state"] for item in record["contenders"].values()} == {"wrong"}  # the stub computes nothing
    launches = [event for event in stub_events(log) if event["event"] == "launch"]
    assert len(launches) >= 2 * 2 * 3 and all(event["status"] == 0 for event in launches)


@needs_nvcc
@needs_cc
@pytest.mark.slow
def test_schedules_are_a_contender(scripts: SimpleNamespace, tmp_path: Path) -> None:
    """One launch in the place of many. Weights are inputs here; layers share functions for all that."""
    log = tmp_path / "log"
    lstm = scripts.models.Model(build=recurrent, group="schedules", tolerance=1e-4, scheduled=True)
    folder, _ = bundled(tmp_path, models={"lstm": lstm})
    (entry,) = scripts.manifest.read_bundle(folder).entries
    programs = {item.contender: item for item in entry.programs}
    assert set(programs) == {"ours", "ours_scheduled", "dlight"}
    (schedule,) = programs["ours_scheduled"].plan["schedules"]
    assert "static (" in schedule
    assert not any(use["spill_store_bytes"] for use in programs["ours_scheduled"].plan["uses"])
    record = run_there(folder, tmp_path, log)
    assert {item["state"] for item in record["contenders"].values()} == {"wrong"}  # the stub computes nothing
    launches = [event for event in stub_events(log) if event["event"] == "launch"]
    assert any("rammer_main_0" in str(event) for event in launches)
    assert all(event["status"] == 0 for event in launches)
