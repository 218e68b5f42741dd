"""What the benchmarks against MetaSchedule share: operators, how stock TVM tunes one, and a run over all of them.

Stock TVM imports, fuses and tunes the same ONNX model for the same target, weights packed as its tuned kernels ask
(``static_shape_tuning`` with ``cpu_weight_prepack``). Its runner's threads have a core each, as all threads have here.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import tvm
from _common import Environment, earlier_results, progress, result_path, show, write_results
from rich.table import Table
from tvm import relax
from tvm.runtime.vm import VirtualMachine

from benchmarks.networks.graph import GraphWriter, he_normal
from tvm_ext._tvm import import_onnx
from tvm_ext.bench.contenders import OURS, Contender
from tvm_ext.bench.environment import place_threads
from tvm_ext.errors import InputError, UnsupportedEnvironmentError
from tvm_ext.runtime.graph_module import flatten_outputs
from tvm_ext.support.arrays import Array

METASCHEDULE = "metaschedule"
TRIALS_PER_ROUND = 16
"""So that its cost model learns from the trials before; a single round of 64 would be random search."""

RUN_TIME_LIMIT_S, BUILD_TIME_LIMIT_S = 30.0, 300.0
"""Of one trial. A build begins with 15 s of imports, longer on a machine that is busy."""

SEED = 0
Record = dict[str, Any]


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
    "held_out_matmul": lambda: _matmul((49, 768), (768, 384)),
    "held_out_batch_matmul": lambda: _matmul((8, 256, 64), (8, 64, 256)),
    "held_out_conv_1x1": lambda: _convolution(144, 256, 24, 1),
    "held_out_conv_5x5": lambda: _convolution(192, 384, 24, 5, stride=2),
    "held_out_depthwise": lambda: _convolution(672, 672, 40, 5, stride=2, groups=672),
}
"""Those named ``held_out`` were drawn by lot after construction was finished."""


# --- tuning -------------------------------------------------------------------------------------------------------
def keep_runner_on_main_core() -> None:
    """In the runner's process, start TVM's pool and then keep the thread that calls kernels off the workers' cores."""
    from tvm_ext.bench.environment import thread_count

    placement = place_threads(thread_count())
    if placement is not None:
        os.sched_setaffinity(0, {placement.main_core})


def tune(
    model: onnx.ModelProto,
    target: Any,
    trials: int,
    folder: str,
    *,
    per_round: int = TRIALS_PER_ROUND,
    seed: int = SEED,
    **workers: Any,
) -> tuple[tvm.IRModule, int]:
    """Stock TVM's ``static_shape_tuning`` with weights packed, spelled out to give the runner cores of its own.

    ``workers`` are other parts of MetaSchedule's than its own (``cost_model``, ``builder``, ``runner``). Returns the
    module of tuned kernels and the number of trials that gave a time. Raises UnsupportedEnvironmentError where a
    package that MetaSchedule needs is missing.
    """
    try:
        import cloudpickle
        from tvm.s_tir import meta_schedule
    except ModuleNotFoundError as error:
        remedy = "pip install 'tvm-ext[bench]'"
        raise UnsupportedEnvironmentError(f"MetaSchedule needs {error.name}.", remedy) from error
    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # its workers cannot import this file
    if "runner" not in workers:
        workers["runner"] = meta_schedule.runner.LocalRunner(
            timeout_sec=RUN_TIME_LIMIT_S, initializer=keep_runner_on_main_core
        )
    if "builder" not in workers:
        workers["builder"] = meta_schedule.builder.LocalBuilder(timeout_sec=BUILD_TIME_LIMIT_S)
    with target:
        mod = tunable_module(model)
        database = meta_schedule.relax_integration.tune_relax(
            mod, {}, target, folder, trials, num_trials_per_iter=min(trials, per_round), seed=seed, **workers
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


# --- a run over operators -----------------------------------------------------------------------------------------
def check_operators(names: Sequence[str]) -> None:
    """Raise InputError for a name that no operator has."""
    for name in names:
        if name not in OPERATORS:
            raise InputError(f"there is no operator {name!r}.", f"the operators are {', '.join(OPERATORS)}")


def measure_each(
    what: str,
    environment: Environment,
    names: Sequence[str],
    output: Path | None,
    measure: Callable[[str, Callable[[str], None]], Record | None],
    table: Callable[[Sequence[Record]], Table],
) -> None:
    """Measure operators, write all records after each one, and print them as ``table`` has them.

    ``names`` are measured even where the file has them; without names, those that it lacks. Where ``measure`` answers
    None there is nothing to compare with.
    """
    check_operators(names)
    path = result_path(what, environment, output)
    records = earlier_records(path, environment)
    with progress() as tell:
        for name in names or [name for name in OPERATORS if name not in records]:
            found = measure(name, tell)
            if found is None:
                print(f"{name}: MetaSchedule has no kernel; nothing to compare with")
                continue
            records[name] = found
            write_records(path, what, environment, records)
    if records:
        show(table([records[name] for name in OPERATORS if name in records]))
        print(f"written: {path}")


def earlier_records(path: Path, environment: Environment) -> dict[str, Record]:
    """The records that ``path`` holds, by operator; see `earlier_results`."""
    return {record["id"]: record for record in earlier_results(path, environment)}


def write_records(path: Path, what: str, environment: Environment, records: Mapping[str, Record]) -> None:
    """All records, in the order of `OPERATORS`."""
    write_results(path, what, environment, [records[name] for name in OPERATORS if name in records])


def duel_table(
    records: Sequence[Record],
    ratios: Mapping[str, str],
    columns: Mapping[str, Callable[[Record], str]],
    sums: Mapping[str, str],
    note: str = "",
) -> Table:
    """A row per operator: median times of both, ``ratios`` (title to field, above 1 where ours is faster), and more.

    ``sums`` are the last row's text below ``columns``.
    """
    rows = Table("operator", "ours ms", "MetaSchedule ms", *ratios, *columns, "error")
    for column in rows.columns[1:]:
        column.justify = "right"
    for record in records:
        errors = {item["name"]: item["relative_error"] for item in record["timings"]}
        rows.add_row(
            record["id"],
            *(_cell(record["median_s"].get(name), 1e3, ".3g") for name in (OURS, METASCHEDULE)),
            *(_cell(record[key].get(METASCHEDULE), 1, ".2f", "x") for key in ratios.values()),
            *(cell(record) for cell in columns.values()),
            f"{errors[OURS]:.1e}",
        )
    gains = [
        [record[key][METASCHEDULE] for record in records if METASCHEDULE in record[key]] for key in ratios.values()
    ]
    means = (f"{statistics.geometric_mean(item):.2f}x" if item else "-" for item in gains)
    rows.add_section()
    rows.add_row(f"geometric mean{note}", "", "", *means, *(sums.get(title, "") for title in columns), "")
    return rows


def _cell(value: float | None, factor: float, form: str, unit: str = "") -> str:
    """A number, "-" where MetaSchedule has none."""
    return "-" if value is None else f"{value * factor:{form}}{unit}"
