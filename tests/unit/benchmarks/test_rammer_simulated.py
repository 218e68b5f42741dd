"""The simulation of Rammer's models on GPUs: graphs of builds, and what is said of their schedules."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from rich.console import Console

from benchmarks.networks import models
from tvm_ext import relay
from tvm_ext.devices import device_db
from tvm_ext.records.rtasks import RKernel, ROperator, RTaskGraph

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
V100 = device_db.lookup("nvidia-v100")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    for name in ("rammer_simulated", "rammer_cells", "_rtask_graphs"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module("rammer_simulated")


@pytest.fixture
def cells(script: ModuleType) -> ModuleType:
    return importlib.import_module("rammer_cells")


def test_a_build_s_kernels_are_operators_in_their_order(script: ModuleType) -> None:
    graph: RTaskGraph = script.graph_of(
        relay.bind_params(*relay.frontend.from_onnx(models.build_model("mobilenet_block"))), V100.name
    )
    assert [item.predecessors for item in graph.operators] == [(), (0,), (1,)]
    for operator in graph.operators:
        (kernel,) = operator.kernels
        assert kernel.threads % 32 == 0
        assert kernel.registers > 16
        assert kernel.task_s >= (kernel.alone_s or 0.0) > 0
        rounds = -(-kernel.task_count // (V100.unit_count * kernel.residents))
        assert 1e-6 < rounds * kernel.task_s < 1e-3


def _branches() -> RTaskGraph:
    """Four small operators that do not need each other, and one that needs them all."""
    small = RKernel(name="small", task_count=20, task_s=4e-6, threads=128, registers=64)
    branches = tuple(ROperator(name=f"branch {index}", kernels=(small,)) for index in range(4))
    return RTaskGraph(operators=(*branches, ROperator(name="join", kernels=(small,), predecessors=(0, 1, 2, 3))))


def test_branches_gain_over_launches(script: ModuleType) -> None:
    found = {
        policy: script.simulated("branches", _branches(), V100, policy)[0] for policy in (*script.SHOWN, script.GLOBAL)
    }
    assert found["launches"].makespan_ms == pytest.approx(5 * (2e-3 + 4e-3))
    assert found["launches"].programs == 5
    ours = found["list"]
    assert ours.makespan_ms < 0.4 * found["launches"].makespan_ms
    assert ours.utilisation > found["launches"].utilisation
    assert ours.overhead_share < found["launches"].overhead_share
    assert ours.makespan_ms <= found[script.GLOBAL].makespan_ms
    assert ours.rtasks == 100


def test_tables_name_what_was_simulated(script: ModuleType) -> None:
    results = [script.simulated("alexnet", _branches(), V100, policy)[0] for policy in script.SHOWN]
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(script.model_table(V100.name, results))
    text = console.export_text()
    assert "0.96" in text  # the paper's time
    assert f"{results[0].makespan_ms / results[2].makespan_ms:.2f}" in text


def test_the_paper_s_times_belong_to_models(script: ModuleType) -> None:
    assert set(script.paper_ms()) == set(models.RAMMER)


def _with_a_large_branch() -> RTaskGraph:
    graph = _branches()
    large = RKernel(name="large", task_count=60, task_s=4e-6, threads=128, registers=64)
    return replace(graph, operators=(replace(graph.operators[0], kernels=(large,)), *graph.operators[1:]))


def test_a_cell_is_irregular_by_the_work_of_a_wave(cells: ModuleType) -> None:
    """Four equal branches are not; where one of them has three times the rTasks, they are."""
    assert not cells.is_irregular(_branches()) and cells.is_irregular(_with_a_large_branch())


def test_irregular_cells_are_found_and_compared(
    cells: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of cells whose graphs are in a folder, every third irregular: the fifth is cell 14, in the second block of 9."""
    monkeypatch.setattr(cells, "BLOCK", 9)
    monkeypatch.setattr(cells, "run_trials", lambda cases, trial, **_: map(trial.attempt, cases))
    for index in range(18):
        graph = _with_a_large_branch() if index % 3 == 2 else _branches()
        (tmp_path / f"nasbench_{index}@{V100.name}.json").write_text(graph.to_json(), encoding="utf-8")
    first, found = cells.first_irregular(V100.name, 5, str(tmp_path), jobs=1)
    assert [cell.index for cell in first] == list(range(9))
    assert [cell.index for cell in found if cell.times_us] == [2, 5, 8, 11, 14] and len(found) == 15
    results = {item.ratio: item for item in cells.gains(V100.name, found)}
    assert results["list over launches"].mean > 2 and results["several kernels over one"].mean == pytest.approx(1)
    fine = results["barriers between rTasks over global ones"]
    assert (fine.cells, fine.irregular) == (15, 5) and min(fine.percentiles) >= 1
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(cells.gain_table(list(results.values())))
    text = console.export_text()
    assert "5 irregular of 15 cells (33.3 %; paper 28.3 %)" in text and "1.11 (1.89)" in text


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnext29", "nasnet", "deepspeech2", "lstm_tc", "seq2seq_nmt"])
def test_segments_are_quicker_than_the_paper_s_policy_and_than_lists(script: ModuleType, name: str) -> None:
    """Of the six networks on a V100; of AlexNet, eleven operators in a row with a vEU a unit each, all are the same."""
    mod = relay.bind_params(*relay.frontend.from_onnx(models.build_model(name)))
    graph = script.constructed_alone(script.graph_of(mod, V100.name))
    found = {policy: script.simulated(name, graph, V100, policy)[0] for policy in script.SHOWN}
    print({policy: (round(item.makespan_ms, 4), item.programs) for policy, item in found.items()})
    assert found["segments"].makespan_ms < min(found["list"].makespan_ms, found["wavefront"].makespan_ms)
