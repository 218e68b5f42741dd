"""How exported networks are run, compared and reported; the networks themselves need torch: tests/models/."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from typer.testing import CliRunner

from tests.support.dot_rows import use_models_of_missing_instructions
from tests.support.exported_models import __main__ as command
from tests.support.exported_models import check, networks, quantised, runs
from tests.support.exported_models.export import inputs_file
from tests.support.exported_models.open_networks import MORE
from tests.support.exported_models.record import CPU, EXPORTERS, ExportResult
from tests.support.exported_models.timed import TIMED
from tvm_ext.bench import models, quantise
from tvm_ext.errors import InputError, OptionError, TvmExtError

ONES = np.ones((2, 3), "float32")


def test_there_are_many_kinds_of_networks() -> None:
    packages = [item.package for item in networks.NETWORKS.values()]
    assert len(packages) >= 25
    assert min(packages.count(name) for name in ("torchvision", "timm", "transformers")) >= 5
    assert all(set(item.exporters) <= set(EXPORTERS) and item.exporters for item in networks.NETWORKS.values())
    assert len(MORE) >= 15 and not set(MORE) & set(networks.NETWORKS)
    assert len(TIMED) >= 20
    assert networks.network("timed_resnet18").inputs["pixel_values"][-1] == 224
    with pytest.raises(InputError, match=r"no network 'resnet19'(.|\n)*resnet18"):
        networks.network("resnet19")


# --- comparing ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("got", "wanted", "problem"),
    [
        ([ONES], [ONES], ""),
        ([ONES * (1 + 5e-5)], [ONES], ""),
        ([ONES * (1 + 5e-4)], [ONES], "output 0 errs by 5.00e-04"),
        ([ONES, ONES], [ONES], "2 outputs instead of 1"),
        ([ONES.T], [ONES], "instead of float32 (2, 3)"),
        ([ONES.astype("float64")], [ONES], "output 0 is float64"),
        ([ONES], [ONES * np.nan], "not finite: it compares nothing"),
        ([ONES * np.nan], [ONES], "errs by inf"),
        ([np.array([1, 2])], [np.array([1, 2])], ""),
        ([np.array([1, 20000])], [np.array([1, 20001])], "errs by"),
    ],
)
def test_outputs_are_compared(got: list[np.ndarray], wanted: list[np.ndarray], problem: str) -> None:
    found = check.compare(got, wanted)
    assert (problem in found) if problem else found == ""


def _exported(folder: Path, scale: float = 1.0) -> runs.Run:
    """A network as `export` leaves it: x times ``scale`` plus 1 through a Relu, with two sets of inputs."""
    run = runs.Run(network="resnet18", exporter="dynamo", devices=(CPU,), folder=folder, limit_s=500.0)
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 3]) for name in "xy")
    constants = [helper.make_tensor(n, TensorProto.FLOAT, [1], [v]) for n, v in (("s", scale), ("one", 1.0))]
    nodes = [
        helper.make_node("Mul", ["x", "s"], ["xs"]),
        helper.make_node("Add", ["xs", "one"], ["a"]),
        helper.make_node("Relu", ["a"], ["y"]),
    ]
    graph = helper.make_graph(nodes, "g", [x], [y], constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, str(run.model))
    for index in range(2):
        np.savez(inputs_file(run.model, index), x=ONES * (index + 1))
    return run


def test_a_network_is_checked_in_a_process_of_its_own(tmp_path: Path) -> None:
    (result,) = runs.run_one(_exported(tmp_path))
    assert result.passed, result
    assert result.error == pytest.approx(0.0, abs=1e-6)
    assert result.variation == pytest.approx(1 / 3)
    assert dict(result.paths) == {"rows": 1}


def test_a_network_that_answers_every_input_alike_compares_nothing(tmp_path: Path) -> None:
    run = _exported(tmp_path, scale=1e-4)
    result = check.check(run.network, run.exporter, CPU, run.model)
    assert result.outcome == "wrong"
    assert "they compare little" in result.problem


def test_a_network_that_magnifies_rounding_compares_nothing(tmp_path: Path) -> None:
    """x times 10^6 minus 10^6 of it: what is left is what the inputs were rounded by."""
    run = _exported(tmp_path, scale=1.0)
    model = onnx.load(str(run.model))
    for constant, value in zip(model.graph.initializer, (1e6, -1e6 + 1.0), strict=True):
        constant.CopyFrom(helper.make_tensor(constant.name, TensorProto.FLOAT, [1], [value]))
    onnx.save(model, str(run.model))
    result = check.check(run.network, run.exporter, CPU, run.model)
    assert result.outcome == "wrong"
    assert "rounding the inputs makes a difference" in result.problem


def test_a_network_is_built_for_a_gpu_as_far_as_its_source(tmp_path: Path) -> None:
    run = _exported(tmp_path)
    result = check.check(run.network, run.exporter, "nvidia-v100", run.model)
    assert (result.outcome, result.error, result.build_s is None) == ("passed", None, False)


# --- processes --------------------------------------------------------------------------------------------------------
@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Makes a module of some source that `python -m` finds; gives its name."""

    def make(source: str) -> str:
        (tmp_path / "child.py").write_text(source)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        return "child"

    return make


@pytest.mark.parametrize(
    ("source", "outcome", "words"),
    [
        ("", "passed", ""),
        ("raise ValueError('no such\\nthing')", "failed", "no such\nthing"),
        ("import os; os.kill(os.getpid(), 11)", "crashed", "SIGSEGV"),
        ("import os; os._exit(3)", "failed", ""),
        ("import time; time.sleep(60)", "timed out", "not done after 1 s"),
    ],
)
def test_what_becomes_of_a_process_is_told(module: Callable[[str], str], source: str, outcome: str, words: str) -> None:
    found, problem = runs.attempt([module(source)], 1.0 if outcome == "timed out" else 60.0)
    assert found == outcome
    assert words in problem


def test_a_network_that_is_not_exported_is_a_failure_on_every_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "attempt", lambda arguments, _limit: ("failed", f"no {arguments[1]}"))
    run = runs.Run(network="swin", exporter="dynamo", devices=(CPU, "nvidia-a100"), folder=tmp_path)
    results = runs.run_one(run)
    assert [(item.device, item.outcome) for item in results] == [(CPU, "not exported"), ("nvidia-a100", "not exported")]
    assert {item.problem for item in results} == {"no swin"}


# --- the command ------------------------------------------------------------------------------------------------------
def test_the_command_writes_what_it_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def result(network: str, **more: object) -> ExportResult:
        return ExportResult(network=network, exporter="dynamo", device=CPU, **more)  # type: ignore[arg-type]

    found = [
        result("swin", outcome="passed", error=1e-6, variation=0.5, build_s=2.0, paths=(("rows", 3),)),
        result("gpt2", outcome="crashed", problem="SIGSEGV"),
    ]
    monkeypatch.setattr(command, "run_all", lambda _runs, _jobs: iter(found))
    monkeypatch.setattr(command, "require_packages", lambda: None)
    output = tmp_path / "out.json"
    done = CliRunner().invoke(
        command.app, ["swin", "gpt2", "--exporter", "dynamo", "--keep", str(tmp_path), "--output", str(output)]
    )
    assert done.exit_code == 1
    assert "gpt2, dynamo, llvm: crashed SIGSEGV" in done.output and "1 of 2" in done.output
    record = json.loads(output.read_text())
    assert record["outcomes"] == {"passed": 1, "crashed": 1}
    assert record["results"][1]["problem"] == "SIGSEGV"


@pytest.mark.parametrize(
    ("arguments", "words"), [(["swin", "--exporter", "dynamic"], "no exporter 'dynamic'"), (["swan"], "no network")]
)
def test_the_command_refuses_unknown_names(arguments: list[str], words: str) -> None:
    done = CliRunner().invoke(command.app, arguments)
    assert isinstance(done.exception, TvmExtError | OptionError) and words in str(done.exception)


def test_without_the_packages_the_command_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(networks, "missing_packages", lambda: ("torch",))
    done = CliRunner().invoke(command.app, ["swin", "--keep", str(tmp_path)])
    assert "needs torch." in str(done.exception) and "tvm-ext[models]" in str(done.exception)


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("mode", ["static", "operators", "dynamic"])
def test_every_tensor_of_bytes_is_compared(mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    use_models_of_missing_instructions(monkeypatch)
    model = models.build_model("mlp")
    inputs = models.random_inputs(model)
    steps = quantised.check(quantise.quantised(model, mode, [inputs]), inputs)
    assert steps.passed
    assert steps.tensors >= 3
    piece = quantised._piece
    monkeypatch.setattr(quantised, "_piece", lambda *given: _moved(piece(*given)))
    wrong = quantised.check(quantise.quantised(model, mode, [inputs]), inputs)
    assert not wrong.passed
    assert wrong.wrong > 0.9 * wrong.values


def _moved(value: Any) -> Any:
    """Two steps away, wherever that is another byte."""
    return value ^ 2 if value.dtype.kind in "iu" else value
