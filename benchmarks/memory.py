"""What a model takes in memory while it is built, loaded and run, beside ONNX Runtime; each in a process of its own.

    python benchmarks/memory.py resnet50 vgg19 minilm

*build*: the peak while a model is read, imported and built, over that before, in multiples of its weights. *load* and
*run* are the peaks of `tvm_ext.bench.memory`, *kept* what five runs leave resident.
Writes ``benchmarks/results/<date>-memory.json`` after each model.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import onnx
import typer
from _common import current_environment, progress, result_path, show, write_results
from rich.table import Table

from benchmarks.networks import models
from tvm_ext.bench.contenders import ONNX_RUNTIME, OURS
from tvm_ext.bench.memory import MIB, Meter, measured
from tvm_ext.records.memory import MemoryUse
from tvm_ext.support.files import temporary_folder

DEFAULT = (
    "resnet50", "vgg19", "bert_base_layer", "minilm", "mobilenet_v2", "densenet121", "inception_v2", "squeezenet",
    "shufflenet", "resnet18",
)  # fmt: skip
TIMEOUT_S = 600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelMemory:
    """One model: its weights, the build's peak, and what the library and ONNX Runtime take."""

    model: str
    weight_bytes: int
    build_peak_bytes: int
    ours: MemoryUse
    onnx_runtime: MemoryUse


def measure(name: str, threads: int) -> ModelMemory:
    """Build, load and run ``name``, one process after another."""
    with temporary_folder("memory") as folder:
        path, library, inputs = folder / "model.onnx", folder / "model.so", folder / "inputs.npz"
        model = models.build_model(name, 1)
        onnx.save(model, path)
        np.savez(inputs, **models.random_inputs(model, 0))
        weights = sum(len(weight.raw_data) or weight.ByteSize() for weight in model.graph.initializer)
        command = [sys.executable, __file__, "--inside", str(path), str(library)]
        variables = {**os.environ, "TVM_EXT_KERNEL_CACHE": "off"}
        done = subprocess.run(command, env=variables, stdout=subprocess.PIPE, text=True, check=True, timeout=TIMEOUT_S)
        return ModelMemory(
            model=name,
            weight_bytes=weights,
            build_peak_bytes=int(done.stdout.splitlines()[-1]),
            ours=measured(OURS, library, inputs, threads),
            onnx_runtime=measured(ONNX_RUNTIME, path, inputs, threads),
        )


def build_peak_bytes(source: Path, library: Path) -> int:
    """Of reading, importing and building the model in this process, which writes ``library`` then."""
    from tvm_ext import relay

    meter = Meter()
    mod, params = relay.frontend.from_onnx(onnx.load(source))
    built = relay.build(mod, "llvm", params=params)
    peak = meter.peak_bytes()
    built.export_library(library)
    return peak


def table(results: list[ModelMemory]) -> Table:
    peers = [f"{what} MiB{of}" for what in ("load", "run", "kept") for of in ("", ", ONNX Runtime")]
    result = Table("model", "weights MiB", "build", *peers)
    for item in results:
        fields = ("load_peak_bytes", "run_peak_bytes", "resident_bytes")
        sizes = [getattr(own, field) for field in fields for own in (item.ours, item.onnx_runtime)]
        built = f"{item.build_peak_bytes / item.weight_bytes:.2f}" if item.weight_bytes else "-"
        result.add_row(item.model, f"{item.weight_bytes / MIB:.1f}", built, *(f"{size / MIB:.1f}" for size in sizes))
    return result


def main(
    names: Annotated[list[str] | None, typer.Argument(help=f"Built-in models; {', '.join(DEFAULT)}.")] = None,
    output: Annotated[Path | None, typer.Option(help="Where to write the JSON.")] = None,
    inside: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    """Measure memory and write the results."""
    if inside:
        source, library = map(Path, names or ())
        print(build_peak_bytes(source, library))
        return
    environment = current_environment()
    path = result_path("memory", environment, output)
    results: list[ModelMemory] = []
    for name in names or DEFAULT:
        with progress() as tell:
            tell(f"measuring {name}")
            results.append(measure(name, environment.threads))
        write_results(path, "memory", environment, results)
    show(table(results))
    print(f"written: {path}")


if __name__ == "__main__":
    typer.run(main)
