"""Constructed kernels, without a trial, beside the best of MetaSchedule's trials: how fast, and how soon.

    python benchmarks/metaschedule.py                              # eight operators, 64 trials each: about 20 minutes
    python benchmarks/metaschedule.py conv_3x3 depthwise --trials 8

Stock TVM imports, fuses and tunes the same ONNX model for the same target, weights packed as its tuned kernels ask
(``static_shape_tuning`` with ``cpu_weight_prepack``). Its runner's threads have a core each, as all threads have here.
Writes ``benchmarks/results/<date>-metaschedule.json`` after each operator; one measured again replaces its record
there, so that an interrupted run goes on with the operators that are left.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import onnx
import tvm
import typer
from _common import current_environment, earlier_results, progress, result_path, show, write_results
from rich.table import Table
from tvm import relax
from tvm.runtime.vm import VirtualMachine

from tvm_ext._tvm import import_onnx
from tvm_ext.bench.compare import BenchResult, bench
from tvm_ext.bench.contenders import ONNX_RUNTIME, OURS, Contender
from tvm_ext.bench.environment import Environment
from tvm_ext.bench.networks.graph import GraphWriter, he_normal
from tvm_ext.bench.placement import Placement, place_threads
from tvm_ext.devices.device_db import device_for_target
from tvm_ext.errors import InputError, UnsupportedEnvironmentError
from tvm_ext.options import BuildOptions
from tvm_ext.runtime.graph_module import flatten_outputs
from tvm_ext.support.arrays import Array

METASCHEDULE = "metaschedule"
RATIOS = ("speedup", "fastest_speedup")
TRIALS, TRIALS_PER_ROUND = 64, 16
"""In rounds, so that its cost model learns from the trials before; a single round of 64 would be random search."""

RUN_TIME_LIMIT_S, BUILD_TIME_LIMIT_S = 30.0, 300.0
"""Of one trial. A build begins with 15 s of imports, longer on a machine that is busy."""

SEED = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Duel:
    """One operator: both final kernels' times, and how long either took from the ONNX model to its kernel."""

    id: str
    trials: int
    measured_trials: int  # that gave a time; the others failed to build or to run
    result: BenchResult

    def to_solution_s(self, name: str) -> float:
        timing = self.result.timing(name)
        assert timing is not None
        return timing.import_s + timing.build_s

    def record(self) -> dict[str, Any]:
        fields, peers = asdict(self.result), self.result.timings[1:]
        return {
            "id": self.id,
            "trials": self.trials,
            "measured_trials": self.measured_trials,
            "median_s": {item.name: item.median_s for item in self.result.timings},
            "to_solution_s": {name: self.to_solution_s(name) for name in (OURS, METASCHEDULE)},
            "speedup": {item.name: self.result.speedup(item.name) for item in peers},
            "fastest_speedup": {item.name: self.result.fastest_speedup(item.name) for item in peers},
            "date": fields.pop("environment")["date"],
            **fields,
        }


def _matmul(*shapes: tuple[int, ...]) -> onnx.ModelProto:
    """Both operands are inputs of the run."""
    graph = GraphWriter("matmul")
    graph.op("MatMul", graph.input("a", shapes[0]), graph.input("b", shapes[1]), name="c")
    graph.output("c", (*shapes[0][:-1], shapes[1][-1]))
    return graph.model()


def _convolution(
    channels: int, filters: int, size: int, kernel: int, stride: int = 1, groups: int = 1
) -> onnx.ModelProto:
    """Square, padded by half its kernel, with a bias and ReLU."""
    graph = GraphWriter("convolution")
    fan_in, pad = channels // groups * kernel * kernel, kernel // 2
    weights = graph.constant("w", he_normal(SEED, "w", (filters, channels // groups, kernel, kernel), fan_in=fan_in))
    bias = graph.constant("b", np.linspace(-0.5, 0.5, filters, dtype="float32"))
    x = graph.input("x", (1, channels, size, size))
    window: dict[str, Any] = {"kernel_shape": [kernel] * 2, "strides": [stride] * 2, "pads": [pad] * 4}
    graph.op("Relu", graph.op("Conv", x, weights, bias, group=groups, **window), name="y")
    result = (size + 2 * pad - kernel) // stride + 1
    graph.output("y", (1, filters, result, result))
    return graph.model()


def _dense_gelu(rows: int, inner: int, columns: int) -> onnx.ModelProto:
    """A dense layer, its bias, and GELU as encoders are exported: x / 2 * (1 + erf(x / sqrt(2)))."""
    graph = GraphWriter("dense_gelu")
    x = graph.input("x", (rows, inner))
    weights = graph.constant("w", he_normal(SEED, "w", (inner, columns), fan_in=inner))
    bias = graph.constant("b", np.linspace(-0.5, 0.5, columns, dtype="float32"))
    one, half, root = (graph.constant(name, np.float32(v)) for name, v in (("1", 1), ("0.5", 0.5), ("root", 2**0.5)))
    dense = graph.op("Add", graph.op("MatMul", x, weights), bias)
    error = graph.op("Add", graph.op("Erf", graph.op("Div", dense, root)), one)
    graph.op("Mul", graph.op("Mul", dense, half), error, name="y")
    graph.output("y", (rows, columns))
    return graph.model()


OPERATORS: dict[str, Callable[[], onnx.ModelProto]] = {
    "matmul_512": lambda: _matmul((512, 512), (512, 512)),
    "matmul_1024": lambda: _matmul((1024, 1024), (1024, 1024)),
    "batch_matmul": lambda: _matmul((12, 128, 64), (12, 64, 128)),
    "conv_3x3": lambda: _convolution(64, 64, 56, 3),
    "conv_1x1": lambda: _convolution(256, 64, 56, 1),
    "conv_strided": lambda: _convolution(128, 128, 56, 3, stride=2),
    "depthwise": lambda: _convolution(96, 96, 56, 3, groups=96),
    "dense_gelu": lambda: _dense_gelu(128, 384, 1536),
}


def keep_runner_on_main_core() -> None:
    """In the runner's process, start TVM's pool and then keep the thread that calls kernels off the workers' cores."""
    from tvm_ext.bench.environment import thread_count

    placement = place_threads(thread_count())
    if placement is not None:
        os.sched_setaffinity(0, {placement.main_core})


def tune(model: onnx.ModelProto, target: Any, trials: int, folder: str) -> tuple[tvm.IRModule, int]:
    """Stock TVM's ``static_shape_tuning`` with weights packed, spelled out to give the runner cores of its own.

    Returns the module of tuned kernels and the number of trials that gave a time. Raises UnsupportedEnvironmentError
    where a package that MetaSchedule needs is missing.
    """
    try:
        from tvm.s_tir import meta_schedule
    except ModuleNotFoundError as error:
        remedy = "pip install 'tvm-ext[bench]'"
        raise UnsupportedEnvironmentError(f"MetaSchedule needs {error.name}.", remedy) from error
    runner = meta_schedule.runner.LocalRunner(timeout_sec=RUN_TIME_LIMIT_S, initializer=keep_runner_on_main_core)
    builder = meta_schedule.builder.LocalBuilder(timeout_sec=BUILD_TIME_LIMIT_S)
    with target:
        mod = tunable_module(model)
        per_round = min(trials, TRIALS_PER_ROUND)
        workers = {"builder": builder, "runner": runner}
        database = meta_schedule.relax_integration.tune_relax(
            mod, {}, target, folder, trials, num_trials_per_iter=per_round, seed=SEED, **workers
        )
        tuned = with_records(mod, folder)
    return tuned, measured_count(database)


def tunable_module(model: onnx.ModelProto) -> tvm.IRModule:
    """What MetaSchedule tunes; for the current target."""
    step = relax.transform
    before = [step.DecomposeOpsForInference(), step.CanonicalizeBindings(), relax.get_pipeline("zero")]
    return tvm.transform.Sequential([*before, step.AttachAttrLayoutFreeBuffers()])(import_onnx(model))


def with_records(mod: tvm.IRModule, folder: str) -> tvm.IRModule:
    """``mod`` with the best kernels of the records in ``folder``; for the current target."""
    step = relax.transform
    after = [step.SplitLayoutRewritePreproc(), step.LiftTransformParams(), step.FoldConstant()]
    return tvm.transform.Sequential([step.MetaScheduleApplyDatabase(folder), *after])(mod)


def measured_count(database: Any) -> int:
    """Records with a time."""
    times = [min(float(item) for item in record.run_secs) for record in database.get_all_tuning_records()]
    return sum(best_s < RUN_TIME_LIMIT_S for best_s in times)


def prepare_metaschedule(model: onnx.ModelProto, inputs: Mapping[str, Array], trials: int) -> tuple[Contender, int]:
    """Tune, build and load the model as a contender, beside the number of trials that gave a time."""
    _, target = device_for_target("llvm")
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        mod, measured = tune(model, target, trials, folder)
    return contender_of(mod, target, inputs, start), measured


def contender_of(mod: tvm.IRModule, target: Any, inputs: Mapping[str, Array], start_s: float) -> Contender:
    """The tuned module, compiled and loaded; ``start_s`` is when its tuning began."""
    machine = VirtualMachine(tvm.compile(mod, target), tvm.cpu())
    built = time.perf_counter()
    arguments = [tvm.runtime.tensor(np.ascontiguousarray(value)) for value in inputs.values()]
    results: list[Any] = [None]

    def run() -> None:
        results[0] = machine["main"](*arguments)

    return Contender(
        name=METASCHEDULE,
        import_s=0.0,
        build_s=built - start_s,
        run=run,
        outputs=lambda: [item.numpy() for item in flatten_outputs(results[0])],
    )


def fight(name: str, trials: int, rounds: int, tell: Callable[[str], None]) -> Duel:
    """Both contenders on one operator, ONNX Runtime as referee."""
    model = OPERATORS[name]()
    measured: list[int] = []

    def peer(inputs: Mapping[str, Array], _threads: int, _placement: Placement | None) -> Contender:
        tell(f"{name}: {trials} trials of MetaSchedule")
        contender, count = prepare_metaschedule(model, inputs, trials)
        measured.append(count)
        return contender

    result = bench(
        model,
        options=BuildOptions(kernel_cache="off"),  # a kernel found in the cache would take no time to solution
        peers=[ONNX_RUNTIME],
        others=[peer],
        rounds=rounds,
        progress=lambda step: tell(f"{name}: {step}"),
    )
    return Duel(id=name, trials=trials, measured_trials=measured[0], result=result)


def earlier_records(path: Path, environment: Environment) -> dict[str, dict[str, Any]]:
    """The records that ``path`` holds, by operator; see `earlier_results`."""
    return {record["id"]: record for record in earlier_results(path, environment)}


def write_records(path: Path, environment: Environment, records: Mapping[str, dict[str, Any]]) -> None:
    """All records, in the order of `OPERATORS`."""
    write_results(path, "metaschedule", environment, [records[name] for name in OPERATORS if name in records])


def table(records: list[dict[str, Any]]) -> Table:
    """A row per operator: median times, their ratio (above 1 where ours is faster), times to solution."""
    rows = Table(
        "operator", "ours ms", "MetaSchedule ms", "speed-up", "of fastest", "ours built s", "tuned s", "trials", "error"
    )
    for column in rows.columns[1:]:
        column.justify = "right"
    for record in records:
        errors = {item["name"]: item["relative_error"] for item in record["timings"]}
        rows.add_row(
            record["id"],
            *(f"{record['median_s'][name] * 1e3:.3g}" for name in (OURS, METASCHEDULE)),
            *(f"{record[key][METASCHEDULE]:.2f}x" for key in RATIOS),
            *(f"{record['to_solution_s'][name]:.2f}" for name in (OURS, METASCHEDULE)),
            f"{record['measured_trials']} of {record['trials']}",
            f"{errors[OURS]:.1e}",
        )
    means = [statistics.geometric_mean(record[key][METASCHEDULE] for record in records) for key in RATIOS]
    sums = [sum(record["to_solution_s"][name] for record in records) for name in (OURS, METASCHEDULE)]
    rows.add_section()
    ratios, totals = (f"{mean:.2f}x" for mean in means), (f"{total:.1f}" for total in sums)
    rows.add_row("geometric mean, sums", "", "", *ratios, *totals, "", "")
    return rows


def main(
    ops: Annotated[list[str] | None, typer.Argument(help=f"Operators, of {', '.join(OPERATORS)}; all of them.")] = None,
    trials: Annotated[int, typer.Option(min=1, help="MetaSchedule's, for each operator.")] = TRIALS,
    rounds: Annotated[int, typer.Option(min=1, help="Turns that each final kernel gets.")] = 10,
    output: Annotated[Path | None, typer.Option(help="Where to write the JSON.")] = None,
) -> None:
    """Tune, construct, time and write the results."""
    for name in ops or []:
        if name not in OPERATORS:
            raise InputError(f"there is no operator {name!r}.", f"the operators are {', '.join(OPERATORS)}")
    environment = current_environment()
    path = result_path("metaschedule", environment, output)
    records = earlier_records(path, environment)
    with progress() as tell:
        for name in ops or OPERATORS:
            duel = fight(name, trials, rounds, tell)
            if not duel.measured_trials:
                print(f"{name}: none of MetaSchedule's {trials} trials gave a time; nothing to compare with")
                continue
            records[name] = duel.record()
            write_records(path, environment, records)
    if records:
        show(table([records[name] for name in OPERATORS if name in records]))
        print(f"written: {path}")


if __name__ == "__main__":
    typer.run(main)
