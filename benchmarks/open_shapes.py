"""One library for any batch up to 32, beside libraries of one shape and ONNX Runtime with an open batch.

    python benchmarks/open_shapes.py                 # resnet50 and minilm; a minute of building each
    python benchmarks/open_shapes.py resnet18 --batch 8 --batch 13
    python benchmarks/open_shapes.py resnet50 --folder built   # a second run loads what the first one built

For each batch: a run of the open library, of a library of that batch alone, and of ONNX Runtime, in turns. Also what
building and the proof take, and the size of the open library over that of the first batch's own. Inputs and outputs are
NumPy arrays. Writes ``benchmarks/results/<date>-open-shapes.json`` after each model.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import onnx
import typer
from _common import current_environment, median_of, progress, result_path, show, write_results
from onnx import numpy_helper
from rich.table import Table

from benchmarks.networks import models
from tvm_ext import relay
from tvm_ext.bench.contenders import prepare_onnx_runtime
from tvm_ext.bench.timing import Runner, interleave
from tvm_ext.options import usable_core_count
from tvm_ext.records.build_profile import PROVING

DEFAULT = ("resnet50", "minilm")
LARGEST, BATCHES = 32, (8, 13, 31)
BATCH = "batch"


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenShapes:
    """Seconds and bytes of one model; ``samples_s`` by batch and contender."""

    model: str
    variants: int
    divided: bool
    parts: Mapping[str, list[int]]  # the variants that run each batch
    build_s: float
    proof_s: float
    single_build_s: float
    library_bytes: int
    single_bytes: int
    samples_s: Mapping[str, Mapping[str, Any]]
    relative_error: Mapping[str, float]


def opened(model: onnx.ModelProto) -> onnx.ModelProto:
    """``model`` whose inputs begin with an open batch, and whose Reshapes copy it."""
    graph = model.graph
    constants = {tensor.name: tensor for tensor in graph.initializer}
    for value in graph.input:
        if value.name not in constants:
            value.type.tensor_type.shape.dim[0].dim_param = BATCH
    for value in (*graph.output, *graph.value_info):
        value.type.tensor_type.ClearField("shape")
    for node in graph.node:
        target = constants.get(node.input[1]) if node.op_type == "Reshape" else None
        sizes = None if target is None else numpy_helper.to_array(target).copy()
        if target is not None and sizes is not None and sizes[0] == 1:
            sizes[0] = 0
            target.CopyFrom(numpy_helper.from_array(sizes, target.name))
    return model


def measure(name: str, batches: tuple[int, ...], rounds: int, folder: Path) -> OpenShapes:
    """Build, or load from ``folder``, compare and time ``name``."""
    model = opened(models.build_model(name, 1))
    path = folder / f"{name}.so"
    times = Seconds(folder / f"{name}.json")
    if not path.exists():
        start = time.perf_counter()
        made = relay.build_open(model, {BATCH: (1, LARGEST)}, kernel_cache="off")
        times["open"] = time.perf_counter() - start
        times["proof"] = {own.name: own.seconds for own in made.variants[0].signature.report.phases}[PROVING]
        made.export_library(path)
    library = relay.load(path)
    assert isinstance(library, relay.OpenLibrary)
    samples, errors = {}, {}
    for batch in batches:
        shapes = {
            spec.original_name or spec.name: [batch, *(int(n) for n in (spec.shape or ())[1:])]
            for spec in library.inputs
        }
        inputs = models.random_inputs(model, 0, shape=shapes)
        alone = folder / f"{name}-{batch}.so"
        if not alone.exists():
            start = time.perf_counter()
            mod, params = relay.frontend.from_onnx(model, shape=shapes)
            relay.build(mod, params=params, kernel_cache="off").export_library(alone)
            times[str(batch)] = time.perf_counter() - start
        peer = prepare_onnx_runtime(model, inputs, usable_core_count())
        own = {spec.name: inputs[spec.original_name or spec.name] for spec in library.inputs}
        runs = {"open": _run(library["default"](), own), "single": _run(relay.load(alone)["default"](), own)}
        peer.run()
        wanted, found = peer.outputs()[0], runs["open"]()
        errors[str(batch)] = float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))
        runners = [*(Runner(name=key, run=run) for key, run in runs.items()), Runner(name="onnxruntime", run=peer.run)]
        samples[str(batch)] = {key: {"samples_s": own} for key, own in interleave(runners, rounds=rounds).items()}
    return OpenShapes(
        model=name,
        variants=len(library.variants),
        divided=library.dimensions[0].axes is not None,
        parts={str(batch): [part for (part,) in library.parts([batch])] for batch in batches},
        build_s=times["open"],
        proof_s=times["proof"],
        single_build_s=times[str(batches[0])],
        library_bytes=os.path.getsize(path),
        single_bytes=os.path.getsize(folder / f"{name}-{batches[0]}.so"),
        samples_s=samples,
        relative_error=errors,
    )


class Seconds(dict[str, float]):
    """What building took, kept in a file beside what was built."""

    def __init__(self, path: Path) -> None:
        super().__init__(json.loads(path.read_text()) if path.exists() else {})
        self._path = path

    def __setitem__(self, key: str, value: float) -> None:
        super().__setitem__(key, value)
        self._path.write_text(json.dumps(self))


def _run(module: Any, inputs: Mapping[str, Any]) -> Any:
    def run() -> Any:
        module.run(**inputs)
        return module.get_output(0).numpy()

    return run


def table(results: list[OpenShapes]) -> Table:
    result = Table("model", "batch", "open ms", "over single", "ONNX Runtime over open", "build s", "proof s", "bytes")
    for item in results:
        for batch, own in item.samples_s.items():
            times = {name: median_of(taken["samples_s"]) for name, taken in own.items()}
            result.add_row(
                item.model,
                batch,
                f"{times['open'] * 1e3:.1f}",
                f"{times['open'] / times['single']:.3f}",
                f"{times['onnxruntime'] / times['open']:.2f}",
                f"{item.build_s:.1f} ({item.single_build_s:.1f})",
                f"{item.proof_s:.1f}",
                f"{item.library_bytes / item.single_bytes:.2f}",
            )
    return result


def main(
    names: Annotated[list[str] | None, typer.Argument(help=f"Built-in models; {', '.join(DEFAULT)}.")] = None,
    batch: Annotated[list[int] | None, typer.Option(min=1, max=LARGEST, help="Batches to time.")] = None,
    folder: Annotated[Path | None, typer.Option(help="Keeps libraries, and has those of an earlier run.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each contender.")] = 6,
    output: Annotated[Path | None, typer.Option(help="Where to write the JSON.")] = None,
) -> None:
    """Measure open libraries and write the results."""
    environment = current_environment()
    path = result_path("open-shapes", environment, output)
    results: list[OpenShapes] = []
    for name in names or DEFAULT:
        with progress() as tell, tempfile.TemporaryDirectory(prefix="open-shapes-") as temporary:
            tell(f"measuring {name}")
            kept = folder or Path(temporary)
            kept.mkdir(parents=True, exist_ok=True)
            results.append(measure(name, tuple(batch or BATCHES), rounds, kept))
        write_results(path, "open-shapes", environment, results)
    show(table(results))
    print(f"written: {path}")


if __name__ == "__main__":
    typer.run(main)
