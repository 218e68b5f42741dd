"""Constructs rPrograms for Roller's 119 operators on one device of the tables, and checks the paper's alignment facts.

    python benchmarks/construct.py --device nvidia-v100

On a GPU the kernel of each operator is emitted too, as a build does it (`emit_ms`: construction and emission, nothing
cached), and named with what emitted it.

Prints one line per operator (tiles, time to construct, predicted time, the artifact's measured time, alignment) and
writes all of it as JSON. No GPU is needed: construction reads only the device tables.
"""

from __future__ import annotations

import csv
import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer
from _common import current_environment, result_path, write_results
from rich.console import Console
from rich.table import Table

from benchmarks.networks.roller_models import WORKLOAD_BATCH, read_models
from tests.support.alignment_facts import alignment_facts
from tests.support.tensor_exprs import roller_operators
from tvm_ext import relay
from tvm_ext._tvm import PrimFunc
from tvm_ext.cli.explain import operators_of
from tvm_ext.devices import device_db
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.options import BuildOptions
from tvm_ext.records.choice import CHOICE, KernelChoice
from tvm_ext.records.rprogram import RProgram
from tvm_ext.records.serialise import from_json
from tvm_ext.tir_passes.construct_kernels import construct_kernel
from tvm_ext.tir_passes.roller.canonical import canonicalise
from tvm_ext.tir_passes.roller.construct import construct

HERE = Path(__file__).resolve().parent
WORKLOAD = HERE / "workloads" / "roller_ops.csv"
REPEATS = 3


def _measured() -> dict[str, float]:
    with WORKLOAD.open(newline="", encoding="utf-8") as file:
        return {row["id"]: float(row["v100_ms_roller_top1"]) for row in csv.DictReader(file)}


def _tiles(program: RProgram) -> str:
    lines = []
    for layer, tile in program.tiles:
        sizes = " ".join(f"{axis}={size}" for axis, size in tile.sizes.items() if size > 1)
        padding = " ".join(f"{tensor}+{pad}" for tensor, pad in tile.storage_padding)
        lines.append(f"{layer}: {sizes or 'one point'}" + (f" (padding {padding})" if padding else ""))
    return "\n".join(lines)


def _run(device: DeviceSpec, k: int) -> list[dict[str, Any]]:
    measured = _measured()
    models = (
        {item.id: item.model for item in read_models(WORKLOAD, batch=WORKLOAD_BATCH)} if device.kind != "cpu" else {}
    )
    rows = []
    for name, expr in roller_operators(WORKLOAD):
        wall, cpu = [], []
        for _ in range(REPEATS):
            start, busy = time.perf_counter(), time.process_time()
            construction = construct(canonicalise(expr).expr, device, k=k)
            wall.append((time.perf_counter() - start) * 1e3)
            cpu.append((time.process_time() - busy) * 1e3)
        best = construction.programs[0]
        emitted = {} if device.kind == "cpu" else _emitted(models[name], device)
        facts = alignment_facts(construction.canonical.expr, best, device)
        rows.append(
            {
                "id": name,
                "operator": expr.name,
                "construct_ms": min(wall),
                "construct_cpu_ms": min(cpu),  # what it takes on a machine that does nothing else
                "programs": len(construction.programs),
                "tiles": {layer: {**tile.sizes, "padding": dict(tile.storage_padding)} for layer, tile in best.tiles},
                "tiles_text": _tiles(best),
                "epsilon": best.epsilon,
                "partitions": best.partition_count,
                "shrunk": best.shrunk,
                "predicted_ms": best.prediction.time_s * 1e3,
                "bound": best.prediction.bound,
                "artifact_v100_ms": measured[name],
                "alignment": facts,
                **emitted,
            }
        )
    return rows


def _emitted(model: Any, device: DeviceSpec) -> dict[str, Any]:
    """Time to construct and emit the kernel of the model's only operator, and who made it."""
    mod, params = relay.frontend.from_onnx(model)
    operators = operators_of(relay.prepare(mod, params), device)
    functions = [func for _, func in operators.functions_items() if isinstance(func, PrimFunc)]
    start, busy = time.perf_counter(), time.process_time()
    kernels = [construct_kernel(func, "operator", device, BuildOptions()) for func in functions]
    elapsed_ms, busy_ms = (time.perf_counter() - start) * 1e3, (time.process_time() - busy) * 1e3
    choices = [from_json(KernelChoice, str(kernel.attrs[CHOICE])) for kernel in kernels]
    return {
        "emit_ms": elapsed_ms,
        "emit_cpu_ms": busy_ms,
        "paths": [choice.path for choice in choices],
        "how": "; ".join(choice.reason for choice in choices),
        "launches": sum(plan.launches for choice in choices for plan in choice.gpu),
    }


def _table(device: DeviceSpec, rows: list[dict[str, Any]]) -> Table:
    table = Table(title=f"Roller's operators on {device.name}", show_lines=False)
    for column in (
        "id",
        "operator",
        "tiles",
        "ε",
        "parts",
        "bound",
        "ms predicted",
        "ms artifact (V100)",
        "ms construct",
        "not aligned",
    ):
        table.add_column(column)
    for row in rows:
        failed = ", ".join(rule for rule, holds in row["alignment"].items() if holds is False)
        table.add_row(
            row["id"],
            row["operator"],
            row["tiles_text"],
            f"{row['epsilon']:g}",
            str(row["partitions"]) + (" shrunk" if row["shrunk"] else ""),
            row["bound"],
            f"{row['predicted_ms']:.3f}",
            f"{row['artifact_v100_ms']:.3f}",
            f"{row['construct_ms']:.1f}",
            failed or "-",
        )
    return table


def _summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    times = [row["construct_ms"] for row in rows]
    aligned = Counter(rule for row in rows for rule, holds in row["alignment"].items() if holds is not False)
    emitted = [row["emit_ms"] for row in rows if "emit_ms" in row]
    gpu: dict[str, Any] = {}
    if emitted:
        gpu = {"emit_ms_median": statistics.median(emitted), "emit_ms_max": max(emitted)}
        gpu["emit_cpu_ms_median"] = statistics.median(row["emit_cpu_ms"] for row in rows)
    paths = Counter(path for row in rows for path in row.get("paths", ()))
    return {
        **gpu,
        **({"paths": dict(paths)} if paths else {}),
        "operators": len(rows),
        "construct_ms_median": statistics.median(times),
        "construct_cpu_ms_median": statistics.median(row["construct_cpu_ms"] for row in rows),
        "construct_ms_mean": statistics.fmean(times),
        "construct_ms_max": max(times),
        "aligned": dict(aligned),
        "bound": dict(Counter(row["bound"] for row in rows)),
    }


def main(
    device: Annotated[str, typer.Option(help="name in the device tables")] = "nvidia-v100",
    k: Annotated[int, typer.Option(min=1, help="rPrograms to construct per operator")] = 1,
    out: Annotated[
        Path | None, typer.Option(help="JSON file; default benchmarks/results/DATE-construct-DEVICE.json")
    ] = None,
) -> None:
    """Construct for all operators, print the table and the summary, write the JSON."""
    spec = device_db.lookup(device)
    environment = current_environment()
    path = result_path(f"construct-{spec.name}", environment, out)
    rows = _run(spec, k)
    console = Console(width=200)
    console.print(_table(spec, rows))
    summary = _summary(rows)
    for key, value in summary.items():
        console.print(f"{key}: {value}")
    write_results(
        path, "construct", environment, [{"device": spec.name, "k": k, "summary": summary, "operators": rows}]
    )
    console.print(f"written to {path}")


if __name__ == "__main__":
    typer.run(main)
