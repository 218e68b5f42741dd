"""The search for GPU kernels from end to end, with a device that does not exist: a server of the folder of jobs that
answers with simulated times. Tune, build with what was found, run a bundle, import it, build with that.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax, te, topi

from tests.unit.benchmarks.gpu_scripts import fake_gpu, imported_scripts
from tests.unit.compilers import needs_cc, needs_nvcc
from tvm_ext import recorder, relay
from tvm_ext._tvm import IRModule, PrimFunc, Target
from tvm_ext.autotune.batch_files import RESULTS, ReturnedBatch, ReturnedKernel, read_batch, waiting_batches
from tvm_ext.autotune.builders import ExecutorBuilder, compile_job
from tvm_ext.autotune.database import MeasurementDatabase
from tvm_ext.autotune.job_folder import FolderRunner
from tvm_ext.autotune.kernel_host import KernelError
from tvm_ext.autotune.measure import Measurer
from tvm_ext.autotune.store import MeasurementStore
from tvm_ext.cost.vector_tiles import VectorTiles
from tvm_ext.devices.device_db import lookup
from tvm_ext.errors import IllegalRewrite, InputError, UnsupportedEnvironmentError
from tvm_ext.options import BuildOptions
from tvm_ext.pass_pipeline import BuildPlan, operator_pipeline, plan_build
from tvm_ext.records.choice import CHOICE, KernelChoice
from tvm_ext.records.kernel_job import KernelJob
from tvm_ext.records.measurement import MeasuredWorkload, Measurement, Trial, TrialOutcome
from tvm_ext.records.serialise import from_json, to_json
from tvm_ext.records.tuned import TuningBudget, TuningRequest
from tvm_ext.records.tuning import GpuTile
from tvm_ext.support.files import write_atomically
from tvm_ext.support.kernel_cache import KernelCache
from tvm_ext.tir_passes.construct_kernels import construct_kernel
from tvm_ext.tir_passes.kinds.registry import tunable_parts
from tvm_ext.tir_passes.pipelining.function import Function
from tvm_ext.tir_passes.pipelining.loops import to_loops
from tvm_ext.tir_passes.pipelining.plan import _detected, workload_of
from tvm_ext.tir_passes.plan.chosen_tiles import CHOSEN
from tvm_ext.tir_passes.plan.context import UnscheduledOperator
from tvm_ext.tuning import compile_gpu
from tvm_ext.tuning.compile_gpu import compile_gpu_job
from tvm_ext.tuning.kernels import TunablePart, _choice_with, job_of, measured_as, tunable_model, tunable_part
from tvm_ext.tuning.model import tune_model, usual_measurer

A100 = lookup("nvidia-a100")
HALF = ("float16", 64, 48, 192)
FLOAT = ("float32", 60, 44, 128)


def product_model(dtype: str, rows: int, columns: int, depth: int) -> IRModule:
    builder = relax.BlockBuilder()
    shapes = {"x": (rows, depth), "w": (depth, columns)}
    x, w = (relax.Var(name, relax.TensorType(shape, dtype)) for name, shape in shapes.items())
    with builder.function("main", [x, w]):
        with builder.dataflow():
            made = builder.emit_output(relax.op.nn.relu(relax.op.matmul(x, w, out_dtype="float32")))
        builder.emit_func_output(made)
    return builder.get()


def product(dtype: str, rows: int, columns: int, depth: int) -> PrimFunc:
    a, b = te.placeholder((rows, depth), dtype, "a"), te.placeholder((depth, columns), dtype, "b")
    return te.create_prim_func([a, b, topi.matmul(a, b) if dtype == "float32" else _mixed(a, b)])


def _mixed(a: Any, b: Any) -> Any:
    k = te.reduce_axis((0, a.shape[1]), "k")
    wide = (a.shape[0], b.shape[1])
    return te.compute(wide, lambda i, j: te.sum(a[i, k].astype("float32") * b[k, j].astype("float32"), k), "c")


def convolution() -> PrimFunc:
    x, w = te.placeholder((1, 16, 14, 14), "float32", "x"), te.placeholder((32, 16, 3, 3), "float32", "w")
    return te.create_prim_func([x, w, topi.nn.conv2d_nchw(x, w, 1, 1, 1)])


def options(tmp_path: Path) -> BuildOptions:
    return BuildOptions(database=str(tmp_path / "own.db"), enable_cutlass=False)


def no_code(job: KernelJob) -> bytes:
    """The stub runs no code."""
    assert job.module and not job.reference
    return b"no code"


def simulated_us(configuration: str) -> float:
    """What the stub device says of a configuration: one of five stages is faster than the model has it."""
    tile = from_json(GpuTile, configuration)
    return float(30.0 + 4 * abs(tile.shared_stages - 5) + tile.splits + np.prod(tile.block) / 1e6)


class StubDevice(threading.Thread):
    """Serves the folder: each kernel takes what `simulated_us` says."""

    def __init__(self, folder: Path) -> None:
        super().__init__(daemon=True)
        self.folder, self.stop, self.batches = folder, threading.Event(), 0

    def run(self) -> None:
        while not self.stop.wait(0.01):
            for batch in waiting_batches(self.folder):
                kernels = tuple(self._returned(item.job.configuration) for item in read_batch(batch).kernels)
                write_atomically(batch / RESULTS, to_json(ReturnedBatch(device="stub", kernels=kernels)).encode())
                self.batches += 1

    def _returned(self, configuration: str) -> ReturnedKernel:
        return ReturnedKernel(times_us=(simulated_us(configuration),) * 3, rounds=3, failure=None)

    def measurer(self, _request: TuningRequest) -> Measurer:
        builder = ExecutorBuilder(ThreadPoolExecutor(2), 2, compiler=no_code, most_kept=512)
        return Measurer(builder, [FolderRunner(self.folder)])


@pytest.fixture
def stub(tmp_path: Path) -> Iterator[StubDevice]:
    (tmp_path / "jobs").mkdir()
    device = StubDevice(tmp_path / "jobs")
    device.start()
    yield device
    device.stop.set()
    device.join()


def built(tmp_path: Path, mod: IRModule) -> tuple[KernelChoice, BuildPlan]:
    """What the next build makes of the model's one kernel."""
    plan = plan_build("nvidia-a100", options(tmp_path))
    with plan.target:
        kernels = plan.construct(relay.prepare(mod, {}))
    texts = [func.attrs[CHOICE] for _, func in kernels.functions_items() if func.attrs and CHOICE in func.attrs]
    (choice,) = (item for item in (from_json(KernelChoice, str(text)) for text in texts) if item.tile is not None)
    return choice, plan


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("sizes", [HALF, FLOAT], ids=["matrix", "vector"])
def test_a_tuned_tile_is_what_the_next_build_takes(
    sizes: tuple[str, int, int, int], stub: StubDevice, tmp_path: Path
) -> None:
    mod, asked = product_model(*sizes), options(tmp_path)
    before, plan = built(tmp_path, mod)
    store = MeasurementStore.for_build(asked)
    with plan.target:
        operators = operator_pipeline(plan.target, plan.device, asked)(relay.prepare(mod, {}))
    calls = recorder.call_counts(operators)
    request = TuningRequest(budget=TuningBudget(trials=16), jobs=stub.folder)
    record = tune_model(operators, calls, plan.device, plan.target, asked, store, request, measurer_of=stub.measurer)
    store.close()
    (task,) = record.tasks
    assert record.trials == 16 and stub.batches >= 3 and before.tile is not None
    assert task.constructed_us == simulated_us(before.tile.configuration)
    assert task.configuration is not None and simulated_us(task.configuration) < task.constructed_us
    after, plan = built(tmp_path, mod)
    assert after.tile is not None and after.tile.configuration == task.configuration
    assert f"{CHOSEN}{task.configuration}" in after.notes and "faster than the" in plan.tiles.reasons[after.workload]


def measured(choice: KernelChoice, plan: BuildPlan, mod: IRModule) -> MeasuredWorkload:
    with plan.target:
        operators = operator_pipeline(plan.target, plan.device, plan.options)(relay.prepare(mod, {}))
        model = tunable_model(operators, {}, plan.device, plan.options)
    return model.kernels[choice.workload].part.workload


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("outcome", ["wrong", "launch_failed"])
def test_a_kernel_that_failed_is_never_made(outcome: TrialOutcome, tmp_path: Path) -> None:
    """Alone it gives way to the next candidate, beside one that runs to that; another failure changes nothing."""
    mod = product_model(*HALF)
    first, plan = built(tmp_path, mod)
    assert first.tile is not None
    workload, failed = measured(first, plan, mod), first.tile.configuration
    with MeasurementDatabase(tmp_path / "own.db") as store:
        trial = Trial(configuration=failed, outcome=outcome, origin=f"{7:024x}.0")
        store.add([Measurement(workload=workload, trial=trial)])
    second, plan = built(tmp_path, mod)
    assert second.tile is not None and second.tile != first.tile and second.path == "rtile"
    assert any("was measured to fail" in note for note in second.notes)
    other = replace(second.tile, shared_stages=second.tile.shared_stages + 1).configuration
    with MeasurementDatabase(tmp_path / "own.db") as store:
        ran = Trial(configuration=other, outcome="ok", times_us=(9.0,), origin=f"{7:024x}.1")
        store.add([Measurement(workload=workload, trial=ran)])
    third, plan = built(tmp_path, mod)
    assert third.tile is not None and third.tile.configuration == other
    assert f"the constructed kernel is {outcome}" in plan.tiles.reasons[third.workload]


# --- a bundle --------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def scripts() -> Iterator[SimpleNamespace]:
    with imported_scripts() as modules:
        modules.bundle = importlib.import_module("bundle")
        yield modules


@pytest.fixture(scope="module")
def entry(scripts: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Three forms of a product in a bundle's table of contents; nothing is compiled."""
    settings = scripts.bundle.Settings(
        device=A100, target=Target(dict(A100.target)), architectures=("sm_80",), candidates=3,
        folder=tmp_path_factory.mktemp("bundle"), cache=KernelCache(None),
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scripts.bundle, "export", lambda *_: [])
        patch.setattr(scripts.bundle.tvm, "compile", lambda *_, **__: None)
        patch.setattr(scripts.bundle, "construct_kernel", _no_peer)
        return scripts.bundle.make_entry(scripts.cases.matmul("product", 128, 96, 256, "float16"), settings)


def _no_peer(*_arguments: Any) -> PrimFunc:
    raise ValueError("stock TVM's kernel is no matter here")


def ran_bundle(scripts: SimpleNamespace, entry: Any, tmp_path: Path, device: str, wrong: str = "") -> list[Any]:
    """Results of a GPU of NumPy arrays on which "ours_2" is twice as fast, and ``wrong`` computes zeros."""
    made = scripts.manifest.Manifest(
        created="", commit="", device="nvidia-a100", architectures=("sm_80",), toolkit=(13, 0), versions={},
        entries=(entry,), digests={"a": "b"},
    )  # fmt: skip
    manifest, gpu, last = scripts.manifest.from_json(scripts.manifest.to_json(made)), fake_gpu(scripts), [""]
    gpu.name = device
    gpu.time = lambda call: [4.0 if last[0] == "ours_2" else 8.0] * 3

    def function(name: str) -> Callable[[Sequence[Any]], None]:
        def call(arguments: Sequence[Any]) -> None:
            last[0] = name
            right = scripts.numpy_references.reference(entry.case, arguments[:-1])
            arguments[-1][...] = 0 if name == wrong else right

        return call

    functions = {item.contender: function(item.contender) for item in manifest.entries[0].programs}
    scripts.run.load_functions = lambda *_: functions
    scripts.run.run_bundle(manifest, tmp_path, gpu, tmp_path / "results.jsonl", 1.0, compiled=False)
    return list(scripts.import_results.read_results(tmp_path / "results.jsonl"))


@pytest.mark.parametrize("wrong", ["", "ours"])
def test_times_of_a_bundle_are_what_the_next_build_takes(
    wrong: str, scripts: SimpleNamespace, entry: Any, tmp_path: Path
) -> None:
    records = ran_bundle(scripts, entry, tmp_path, "NVIDIA A100-SXM4-80GB", wrong)
    assert scripts.import_results.import_times(records, tmp_path / "own.db") == 3
    assert scripts.import_results.import_times(records, tmp_path / "own.db") == 0
    fastest = next(item for item in entry.programs if item.contender == "ours_2")
    plan = plan_build("nvidia-a100", options(tmp_path))
    with plan.target:
        func, tiles = importlib.import_module("programs").program(entry.case), plan.tiles
        kernel = construct_kernel(func, "product", A100, plan.options, tiles.configurations, failed=tiles.failed)
    choice = from_json(KernelChoice, str(kernel.attrs[CHOICE]))
    assert choice.tile is not None and choice.tile.configuration == fastest.plan["measured"]["configuration"]
    assert len(plan.tiles.failed) == bool(wrong)


def test_a_bundle_that_ran_on_another_device_is_refused(scripts: SimpleNamespace, entry: Any, tmp_path: Path) -> None:
    records = ran_bundle(scripts, entry, tmp_path, "NVIDIA A30")
    with pytest.raises(InputError, match="A30 ran what was made for nvidia-a100"):
        scripts.import_results.import_times(records, tmp_path / "own.db")


# --- the space -------------------------------------------------------------------------------------------------------
@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("func", [product(*HALF), product(*FLOAT), convolution()], ids=["half", "float", "conv"])
def test_points_of_a_space_are_kernels(func: PrimFunc) -> None:
    """The constructed tile, the model's first and some drawn: nearly all are made as they are asked for."""
    with Target(dict(A100.target)):
        part = tunable_part(func, "op", A100, BuildOptions())
        drawn = np.random.default_rng(0).integers(len(part.space), size=8).tolist()
        best = part.space.predictions.ranking[:4].tolist()
        places = dict.fromkeys([part.space.index(part.constructed), *best, *drawn])
        made = []
        for place in places:
            assert place is not None
            configuration = part.space[place].configuration
            try:
                choice = _choice_with(part, configuration, func, "op", A100, BuildOptions())[1]
            except IllegalRewrite:
                continue
            assert choice.tile is not None and choice.tile.configuration == configuration
            made.append(choice.tile)
        plain = construct_kernel(func, "op", A100, BuildOptions())
    assert measured_as(func, plain, "op", A100) == (part.workload, part.constructed)
    assert len(made) >= 0.8 * len(places) and len({tile.shared_stages for tile in made}) > 2


def test_vector_tiles_count_what_the_emitted_loops_do() -> None:
    """The closed form beside ALCOP's counts of the emitted kernel."""
    func = product(*FLOAT)
    with Target(dict(A100.target)):
        part = tunable_part(func, "op", A100, BuildOptions())
        tile = from_json(GpuTile, part.constructed)
        plain = replace(tile, shared_stages=1, register_stages=1)
        kernel = _choice_with(part, plain.configuration, func, "op", A100, BuildOptions())[0]
    found = _detected(Function(to_loops(kernel)), A100)
    exact = workload_of(found.function, found.groups[0], A100)
    said = VectorTiles(_expr_of(part, func), A100).workload(tile.inner, tile.block)
    for name in ("blocks", "stage_bytes", "shared_trips", "bytes_per_shared_trip", "output_bytes_per_block"):
        assert getattr(said, name) == pytest.approx(getattr(exact, name), rel=0.15), name


def _expr_of(part: TunablePart, func: PrimFunc) -> Any:
    operator = UnscheduledOperator(func=func, name="op", device=A100, options=BuildOptions())
    return next(item for item in tunable_parts(operator) if item.key() == part.workload).candidates().expr


def test_without_a_gpu_or_a_way_to_one_tuning_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedEnvironmentError, match="TVM finds no cuda device"):
        relay.build(product_model(*HALF), "nvidia-a100", tune=5, options=options(tmp_path))
    with usual_measurer(A100, TuningRequest(budget=TuningBudget(trials=1), jobs=tmp_path / "jobs")) as measurer:
        (runner,) = measurer.fleet.current()
        assert isinstance(runner, FolderRunner) and (tmp_path / "jobs").is_dir()


# --- compiling -------------------------------------------------------------------------------------------------------
def gpu_job() -> KernelJob:
    func = product(*HALF)
    target = Target(dict(A100.target))
    with target:
        model = tunable_model(IRModule({"op": func.with_attr("global_symbol", "op")}), {"op": 1}, A100, BuildOptions())
        (kernel,) = model.kernels.values()
        return job_of(kernel, kernel.part.constructed, A100, target, BuildOptions())


def test_a_builder_for_cpus_refuses_a_gpu_kernel() -> None:
    with pytest.raises(KernelError, match="cuda is no CPU"):
        compile_job(gpu_job())


def test_kernels_of_jobs_have_their_indices_guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    guarded: list[int] = []

    def guard() -> Any:
        def run(mod: IRModule, _context: Any) -> IRModule:
            guarded.append(len(list(mod.functions_items())))
            return mod

        return tvm.transform.module_pass(run, opt_level=0)

    monkeypatch.setattr(compile_gpu, "GuardIndices", guard)
    compile_gpu.lowered_for_gpu(gpu_job())
    assert guarded == [1]


@needs_nvcc
@needs_cc
@pytest.mark.slow
def test_a_job_carries_machine_code() -> None:
    assert b"sm_80" in compile_gpu_job(gpu_job()) or b".nv_fatbin" in compile_gpu_job(gpu_job())
