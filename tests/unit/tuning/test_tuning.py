"""A model is tuned: which kernels can be, that their jobs are right, that builds take what was found."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tvm
from onnx import helper

from tests.support.small_models import onnx_model
from tvm_ext import relay
from tvm_ext._tvm import IRModule
from tvm_ext.analysis.tile_workload import ROWS, TILES
from tvm_ext.autotune.builders import ExecutorBuilder
from tvm_ext.autotune.choose import CONFIRMATIONS
from tvm_ext.autotune.database import MeasurementDatabase
from tvm_ext.autotune.measure import Measurer
from tvm_ext.autotune.runners import BatchEntry, InProcessRunner
from tvm_ext.autotune.store import MeasurementStore
from tvm_ext.devices.device_facts import with_unit_count
from tvm_ext.errors import IllegalRewrite, OptionError, UnsupportedEnvironmentError
from tvm_ext.options import BuildOptions
from tvm_ext.pass_pipeline import BuildPlan, operator_pipeline, plan_build
from tvm_ext.records.kernel_job import TimingPlan
from tvm_ext.records.measurement import MeasuredWorkload, Measurement, Trial
from tvm_ext.records.tuned import TuningBudget, TuningRequest
from tvm_ext.relay_passes.annotate_constants import AnnotateConstants
from tvm_ext.tir_passes.plan.chosen_tiles import CHOSEN, LEFT_OUT
from tvm_ext.tuning.kernels import TunableModel, job_of, tunable_model
from tvm_ext.tuning.model import KernelMeasure, require_measurable, tune_model

RNG = np.random.default_rng(0)
WEIGHTS = {name: RNG.normal(size=shape).astype("float32") for name, shape in (("w", (24, 40)), ("v", (40, 24)))}
MODEL = onnx_model(
    [
        helper.make_node("MatMul", ["x", "w"], ["a"]),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("MatMul", ["b", "v"], ["c"]),
        helper.make_node("Softmax", ["c"], ["y"], axis=-1),
    ],
    {"x": (33, 24)},
    constants=WEIGHTS,
)
OPTIONS = BuildOptions(enable_persistent_fusion=False, database="off")


def operators_of(plan: BuildPlan) -> IRModule:
    mod, params = relay.frontend.from_onnx(MODEL)
    with plan.target:
        passes = [operator_pipeline(plan.target, plan.device, plan.options), AnnotateConstants()]
        return tvm.transform.Sequential(passes)(relay.prepare(mod, params))


@pytest.fixture(scope="module")
def plan() -> BuildPlan:
    return plan_build("llvm", OPTIONS)


@pytest.fixture(scope="module")
def operators(plan: BuildPlan) -> IRModule:
    return operators_of(plan)


@pytest.fixture(scope="module")
def model(plan: BuildPlan, operators: IRModule) -> TunableModel:
    calls = {str(variable.name_hint): 2 for variable, _ in operators.functions_items()}
    with plan.target:
        return tunable_model(operators, calls, plan.device, OPTIONS)


SHORT = TimingPlan(samples=1, sample_s=1e-4, least_rounds=1, most_rounds=2)


def in_process(_request: TuningRequest | None = None) -> Measurer:
    """Everything in this process: seconds less than processes take to start."""
    return Measurer(ExecutorBuilder(ThreadPoolExecutor(1), 1, most_kept=512), [InProcessRunner()], plan=SHORT)


def test_products_can_be_tuned_and_rows(model: TunableModel) -> None:
    assert sorted(task.workload.kind for task in model.tasks) == [ROWS, TILES, TILES]
    assert all(task.calls == 2 for task in model.tasks)
    assert sum(task.share for task in model.tasks) == pytest.approx(1)
    assert model.untuned == ()
    for task in model.tasks:
        assert task.space.index(task.constructed) is not None


def test_jobs_compute_what_the_operator_does(plan: BuildPlan, model: TunableModel) -> None:
    """With weights repacked for each tile, and compared with the unscheduled operator."""
    task = model.tasks[0]
    configurations = [task.space[place].configuration for place in task.space.predictions.ranking[:3]]
    with plan.target:
        jobs = [
            job_of(model.kernels[task.workload.key], item, plan.device, plan.target, OPTIONS) for item in configurations
        ]
    assert any(item.pack is not None for item in jobs[0].arguments)
    with in_process() as measurer:
        trials = [trial for _, trial in measurer.measure(jobs)]
    assert [trial.outcome for trial in trials] == ["ok"] * 3


class Watched(InProcessRunner):
    """A runner that looks whether something is being compiled."""

    def __init__(self, executor: ThreadPoolExecutor) -> None:
        super().__init__()
        self.executor, self.batches, self.waiting = executor, 0, 0

    def run(self, entries: Sequence[BatchEntry], plan: TimingPlan) -> None:
        self.batches += 1
        self.waiting += self.executor._work_queue.qsize()
        super().run(entries, plan)


def test_a_batch_is_built_before_any_of_it_is_timed(plan: BuildPlan, model: TunableModel) -> None:
    executor = ThreadPoolExecutor(1)
    runner = Watched(executor)
    task = model.tasks[0]
    asked = [task.space[place].configuration for place in task.space.predictions.ranking[:3]]
    with Measurer(ExecutorBuilder(executor, 1, most_kept=512), [runner], plan=SHORT) as measurer:
        measure = KernelMeasure(model, measurer, plan.device, plan.target, OPTIONS)
        trials = list(measure(task, [task.constructed, *(item for item in asked if item != task.constructed)]))
    assert (runner.batches, runner.waiting) == (1, 0)
    assert trials[0].configuration == task.constructed
    assert len(trials) == len({trial.configuration for trial in trials}) >= 3


def test_a_job_of_an_illegal_tile_is_refused(plan: BuildPlan, model: TunableModel) -> None:
    kernel = model.kernels[model.tasks[0].workload.key]
    with plan.target, pytest.raises(IllegalRewrite, match="left out"):
        job_of(kernel, '{"vector":0}', plan.device, plan.target, OPTIONS)


def test_tuning_keeps_trials_and_a_second_run_needs_none(
    plan: BuildPlan, operators: IRModule, model: TunableModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("TVM_EXT_CPU", raising=False)
    monkeypatch.setattr("tvm.runtime.num_threads", lambda: plan.device.unit_count)  # of one core too
    store = MeasurementStore(MeasurementDatabase(tmp_path / "own.db"))
    calls = {str(variable.name_hint): 1 for variable, _ in operators.functions_items()}
    seen: list[str] = []
    request = TuningRequest(budget=TuningBudget(trials=2), progress=lambda status: seen.append(str(status)))

    def run() -> int:
        record = tune_model(operators, calls, plan.device, plan.target, OPTIONS, store, request, measurer_of=in_process)
        assert record.untuned == ()
        assert {task.name for task in record.tasks} == {task.name for task in model.tasks}
        return record.trials

    assert run() == 2
    assert "candidates, best" in seen[0]
    assert run() == 0


# --- builds ----------------------------------------------------------------------------------------------------------
def proven(workload: MeasuredWorkload, constructed: str, configuration: str) -> list[Measurement]:
    """Batches in which ``configuration`` took half the time."""
    return [
        Measurement(
            workload=workload,
            trial=Trial(configuration=name, outcome="ok", times_us=(time,), origin=f"{number:024x}.{place}"),
        )
        for number in range(CONFIRMATIONS)
        for place, (name, time) in enumerate(((constructed, 10.0), (configuration, 5.0)))
    ]


def built(database: Path) -> relay.Library:
    mod, params = relay.frontend.from_onnx(MODEL)
    return relay.build(mod, "llvm", params=params, options=replace(OPTIONS, database=str(database)))


def result(library: relay.Library) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    module = relay.GraphModule(library["default"](tvm.cpu()))
    module.run(x=np.linspace(-1, 1, 33 * 24, dtype="float32").reshape(33, 24))
    found: np.ndarray[tuple[int, ...], np.dtype[np.float32]] = module.get_output(0).numpy()
    return found


def notes_of(library: relay.Library) -> list[str]:
    return [note for operator in library.report.operators for note in operator.choice.notes]


def test_a_build_takes_what_was_proven_and_says_why(model: TunableModel, tmp_path: Path) -> None:
    task = model.tasks[0]
    other = task.space[int(task.space.predictions.ranking[-1])].configuration
    assert other != task.constructed
    with MeasurementDatabase(tmp_path / "own.db") as database:
        database.add(proven(task.workload, task.constructed, other))
    library = built(tmp_path / "own.db")
    assert [note for note in notes_of(library) if note.startswith(CHOSEN)] == [f"{CHOSEN}{other}"]
    (reason,) = library.report.tiles.reasons
    assert "50 % faster" in reason
    assert reason in str(library.report)
    np.testing.assert_allclose(result(library), result(built(tmp_path / "absent.db")), rtol=1e-5, atol=1e-6)


HOSTILE = (
    "", "rubbish", "{}", "[]", "null", '{"vector":9,"register":[1,1],"inner":[1,1],"outer":[1,1],"order":[0,1]}',
    '{"vector":1,"register":[1000000000,16],"inner":[1,1],"outer":[1,1],"order":[0,1]}',
    '{"vector":1,"register":[4,16],"inner":[1,1],"outer":[1,1],"order":[0,0]}',
    '{"vector":1,"register":[-4,16],"inner":[1,1],"outer":[1,1],"order":[0,1]}',
    '{"vector":1,"register":[4,16,2],"inner":[1,1,1],"outer":[1,1,1],"order":[0,1,2]}',
    '{"vector":1,"register":[4,16],"inner":[99999999999999999999,1],"outer":[1,1],"order":[0,1]}',
    '{"vector":1,"register":["__import__(\'os\')",16],"inner":[1,1],"outer":[1,1],"order":[0,1]}',
    "[" * 100_000,
)  # fmt: skip


@pytest.mark.parametrize("configuration", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_configurations_are_named_and_left_out(
    configuration: str, plan: BuildPlan, operators: IRModule, model: TunableModel
) -> None:
    """They cannot crash a construction; what is emitted is what would have been without them."""
    from tvm_ext.tir_passes.construct_kernels import construct_kernel

    task = model.tasks[0]
    func = model.kernels[task.workload.key].func
    with plan.target:
        plain = construct_kernel(func, "op", plan.device, OPTIONS)
        made = construct_kernel(func, "op", plan.device, OPTIONS, {task.workload.key: configuration})
    assert str(made.body) == str(plain.body)
    assert LEFT_OUT in str(made.attrs["tvm_ext.choice"])


def test_what_cannot_be_tuned_is_refused_before_anything_is_built(
    plan: BuildPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    mod, params = relay.frontend.from_onnx(MODEL)
    monkeypatch.setenv("TVM_EXT_CPU", "cpu-epyc-zen5")
    with pytest.raises(UnsupportedEnvironmentError, match="stand for this machine"):
        relay.build(mod, "llvm", params=params, tune=5, database="off")
    with pytest.raises(UnsupportedEnvironmentError, match="TVM finds no cuda device"):
        relay.build(mod, "nvidia-a100", params=params, tune=5, database="off")
    with pytest.raises(OptionError, match="'tune' is '5 minutes'"):
        relay.build(mod, "llvm", params=params, tune="5 minutes")
    monkeypatch.delenv("TVM_EXT_CPU")
    many = with_unit_count(plan.device, 1 + int(tvm.runtime.num_threads()))
    with pytest.raises(UnsupportedEnvironmentError, match="threads cannot be timed here: this process has"):
        require_measurable(many, plan.target, TuningRequest(budget=TuningBudget(trials=1)))
    foreign = plan_build({"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": "neoverse-n1"}, OPTIONS)
    with pytest.raises(UnsupportedEnvironmentError, match="cannot be timed here"):
        require_measurable(foreign.device, foreign.target, TuningRequest(budget=TuningBudget(trials=1)))
