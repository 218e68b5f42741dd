"""What a model takes in memory while it is built and while it runs, beside ONNX Runtime; each in a process of its own.

    python benchmarks/memory.py resnet50 vgg19 minilm

*build*: the peak while a model is read, imported and built, over that before, in multiples of its weights. *run*: what
five runs leave resident over what was before the library, or the ONNX file, was loaded; *peak*: the most meanwhile.
Writes ``benchmarks/results/<date>-memory.json`` after each model.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import onnx
import typer
from _common import current_environment, progress, result_path, show, write_results
from rich.table import Table

from benchmarks.networks import models

DEFAULT = (
    "resnet50", "vgg19", "bert_base_layer", "minilm", "mobilenet_v2", "densenet121", "inception_v2", "squeezenet",
    "shufflenet", "resnet18",
)  # fmt: skip
RUNS = 5
TIMEOUT_S = 600.0
MIB = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Use:
    """Bytes over what the process had before: at the end, and at most."""

    after_bytes: int
    peak_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """One model: its weights, the build, and the runs of the library and of ONNX Runtime."""

    model: str
    weight_bytes: int
    build: Use
    run: Use
    onnx_runtime: Use


def measure(name: str) -> Memory:
    """Build, load and run ``name``, one process after another."""
    with tempfile.TemporaryDirectory(prefix="memory-") as folder:
        path, library = Path(folder, "model.onnx"), Path(folder, "model.so")
        model = models.build_model(name, 1)
        onnx.save(model, path)
        weights = sum(len(weight.raw_data) or weight.ByteSize() for weight in model.graph.initializer)
        ways = (("build", path, library), ("run", library, path), ("onnxruntime", path, path))
        build, run, peer = (_in_process(*way) for way in ways)
    return Memory(model=name, weight_bytes=weights, build=build, run=run, onnx_runtime=peer)


def _in_process(who: str, source: Path, other: Path) -> Use:
    command = [sys.executable, __file__, "--inside", who, str(source), str(other)]
    variables = {**os.environ, "TVM_EXT_KERNEL_CACHE": "off"}
    done = subprocess.run(command, env=variables, stdout=subprocess.PIPE, text=True, check=True, timeout=TIMEOUT_S)
    return Use(**json.loads(done.stdout.splitlines()[-1]))


def use_here(who: str, source: Path, other: Path) -> Use:
    """Of this process, which has imported what it needs before."""
    if who == "onnxruntime":
        import onnxruntime
    else:
        from tvm_ext import relay
        from tvm_ext.runtime.library import random_inputs
    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    if who == "build":
        mod, params = relay.frontend.from_onnx(onnx.load(source))
        built = relay.build(mod, "llvm", params=params)
    elif who == "run":
        library = relay.load(source)
        module = relay.GraphModule(library)
        for _ in range(RUNS):
            module.run(**random_inputs(library.inputs))
            module.get_output(0).numpy()
    else:
        session = onnxruntime.InferenceSession(source, providers=["CPUExecutionProvider"])
        inputs = models.random_inputs(onnx.load(source, load_external_data=False), 0)
        for _ in range(RUNS):
            session.run(None, inputs)
    use = Use(after_bytes=_resident("VmRSS") - before, peak_bytes=_resident("VmHWM") - before)
    if who == "build":
        built.export_library(other)
    return use


def _resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) << 10


def table(results: list[Memory]) -> Table:
    result = Table("model", "weights MiB", "build", "run MiB", "ONNX Runtime MiB", "peak MiB", "ONNX Runtime peak MiB")
    for item in results:
        sizes = (
            item.run.after_bytes,
            item.onnx_runtime.after_bytes,
            item.run.peak_bytes,
            item.onnx_runtime.peak_bytes,
        )
        built = f"{item.build.peak_bytes / item.weight_bytes:.2f}" if item.weight_bytes else "-"
        result.add_row(item.model, f"{item.weight_bytes / MIB:.1f}", built, *(f"{size / MIB:.1f}" for size in sizes))
    return result


def main(
    names: Annotated[list[str] | None, typer.Argument(help=f"Built-in models; {', '.join(DEFAULT)}.")] = None,
    output: Annotated[Path | None, typer.Option(help="Where to write the JSON.")] = None,
    inside: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Measure memory and write the results."""
    if inside is not None:
        source, other = map(Path, names or ())
        print(json.dumps(asdict(use_here(inside, source, other))))
        return
    environment = current_environment()
    path = result_path("memory", environment, output)
    results: list[Memory] = []
    for name in names or DEFAULT:
        with progress() as tell:
            tell(f"measuring {name}")
            results.append(measure(name))
        write_results(path, "memory", environment, results)
    show(table(results))
    print(f"written: {path}")


if __name__ == "__main__":
    typer.run(main)
