"""MiniLM for any length up to 512 from one library: lengths between its own are padded and masked by the tokenizer.

    python benchmarks/open_lengths.py                   # builds 19 variants and a library for each length that is timed
    python benchmarks/open_lengths.py --folder built    # a second run loads what the first one built

For each length: a run of the open library, which includes padding to the next length that it has, of a library for that
length alone, and of ONNX Runtime with an open length, in turns. Padding that the attention mask hides changes nothing:
the sentence's vector is compared with ONNX Runtime's without padding. Writes ``<date>-open-lengths.json``.
"""

from __future__ import annotations

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
from onnx import helper, numpy_helper
from open_shapes import Seconds
from rich.table import Table

from benchmarks.networks import models
from tvm_ext import relay
from tvm_ext.bench.contenders import prepare_onnx_runtime
from tvm_ext.bench.timing import Runner, interleave
from tvm_ext.options import usable_core_count

LONGEST = 512
BUILT = (8, 16, 24, 32, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512)
TIMED = (16, 64, 128, 256, 512, 5, 20, 50, 100, 140, 200, 260, 400)
LENGTH = "length"


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenLengths:
    """Seconds and bytes; ``samples_s`` by length and contender, ``padded_to`` the variant that runs each length."""

    lengths: tuple[int, ...]
    build_s: float
    single_build_s: float
    library_bytes: int
    single_bytes: int
    padded_to: Mapping[str, int]
    samples_s: Mapping[str, Mapping[str, Any]]
    relative_error: Mapping[str, float]


def opened() -> onnx.ModelProto:
    """MiniLM whose inputs have an open length: Reshapes copy it, positions are cut to it."""
    model = models.build_model("minilm", 1, sequence=LONGEST)
    graph = model.graph
    for value in graph.input:
        value.type.tensor_type.shape.dim[1].dim_param = LENGTH
    for value in (*graph.output, *graph.value_info):
        value.type.tensor_type.ClearField("shape")
    constants = {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        target = constants.get(node.input[1]) if node.op_type == "Reshape" else None
        if target is not None:
            sizes = numpy_helper.to_array(target).copy()
            sizes[:2] = 0
            target.CopyFrom(numpy_helper.from_array(sizes, target.name))
    numbers = {"length_place": 1, "no_place": 0}
    graph.initializer.extend(numpy_helper.from_array(np.array([own], np.int64), key) for key, own in numbers.items())
    (places,) = (node for node in graph.node if "embeddings.positions" in node.input)
    places.input[list(places.input).index("embeddings.positions")] = "positions_of_length"
    cut = ["embeddings.positions", "no_place", "length_size", "length_place"]
    front = [
        helper.make_node("Shape", ["input_ids"], ["tokens_shape"]),
        helper.make_node("Gather", ["tokens_shape", "length_place"], ["length_size"]),
        helper.make_node("Slice", cut, ["positions_of_length"]),
    ]
    nodes = [*front, *graph.node]
    del graph.node[:]
    graph.node.extend(nodes)
    return model


def padded(inputs: Mapping[str, Any], length: int) -> dict[str, Any]:
    """``inputs`` with zeros up to ``length``: tokens that the mask, zero as well, hides."""
    longer = {name: np.zeros((value.shape[0], length), value.dtype) for name, value in inputs.items()}
    for name, value in inputs.items():
        longer[name][:, : value.shape[1]] = value
    return longer


def measure(timed: tuple[int, ...], rounds: int, folder: Path) -> OpenLengths:
    """Build, or load from ``folder``, compare and time."""
    model, path, times = opened(), folder / "minilm-lengths.so", Seconds(folder / "minilm-lengths.json")
    if not path.exists():
        start = time.perf_counter()
        relay.build_open(model, {LENGTH: list(BUILT)}, kernel_cache="off").export_library(path)
        times["open"] = time.perf_counter() - start
    library = relay.load(path)
    assert isinstance(library, relay.OpenLibrary)
    samples, errors, padding = {}, {}, {}
    for length in timed:
        shapes = {value.name: [1, length] for value in model.graph.input}
        random = np.random.default_rng(length)
        tokens = random.integers(1000, 20000, (1, length))
        inputs = {name: np.zeros((1, length), np.int64) for name in shapes}
        inputs |= {"input_ids": tokens, "attention_mask": np.ones((1, length), np.int64)}
        alone = folder / f"minilm-length-{length}.so"
        if not alone.exists():
            start = time.perf_counter()
            mod, params = relay.frontend.from_onnx(model, shape=shapes)
            relay.build(mod, params=params, kernel_cache="off").export_library(alone)
            times[str(length)] = time.perf_counter() - start
        peer = prepare_onnx_runtime(model, inputs, usable_core_count())
        padding[str(length)] = own = min(size for size in BUILT if size >= length)
        runs = {"open": _run(library["default"](), inputs, own), "single": _run(relay.load(alone)["default"](), inputs)}
        peer.run()
        wanted, found = peer.outputs()[0], runs["open"]()
        errors[str(length)] = float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))
        runners = [*(Runner(name=key, run=run) for key, run in runs.items()), Runner(name="onnxruntime", run=peer.run)]
        taken = interleave(runners, rounds=rounds)
        samples[str(length)] = {key: {"samples_s": seconds} for key, seconds in taken.items()}
    return OpenLengths(
        lengths=BUILT,
        build_s=times["open"],
        single_build_s=times[str(timed[0])],
        library_bytes=os.path.getsize(path),
        single_bytes=os.path.getsize(folder / f"minilm-length-{timed[0]}.so"),
        padded_to=padding,
        samples_s=samples,
        relative_error=errors,
    )


def _run(module: Any, inputs: Mapping[str, Any], length: int = 0) -> Any:
    result: list[Any] = []  # its memory is used again, as by `GraphModule.benchmark` and ONNX Runtime's binding

    def run() -> Any:
        module.run(**(padded(inputs, length) if length else inputs))
        if not result:
            result.append(module.get_output(0).numpy())
        return module.get_output(0, out=result[0])

    return run


def table(result: OpenLengths) -> Table:
    shown = Table("length", "variant", "open ms", "over single", "ONNX Runtime over open", "relative error")
    for length, own in result.samples_s.items():
        times = {name: median_of(taken["samples_s"]) for name, taken in own.items()}
        shown.add_row(
            length,
            str(result.padded_to[length]),
            f"{times['open'] * 1e3:.2f}",
            f"{times['open'] / times['single']:.3f}",
            f"{times['onnxruntime'] / times['open']:.2f}",
            f"{result.relative_error[length]:.1e}",
        )
    return shown


def main(
    length: Annotated[list[int] | None, typer.Option(min=1, max=LONGEST, help="Lengths to time.")] = None,
    folder: Annotated[Path | None, typer.Option(help="Keeps libraries, and has those of an earlier run.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each contender.")] = 9,
    output: Annotated[Path | None, typer.Option(help="Where to write the JSON.")] = None,
) -> None:
    """Measure one library for all lengths and write the results."""
    environment = current_environment()
    path = result_path("open-lengths", environment, output)
    with progress() as tell, tempfile.TemporaryDirectory(prefix="open-lengths-") as temporary:
        tell("measuring minilm")
        kept = folder or Path(temporary)
        kept.mkdir(parents=True, exist_ok=True)
        result = measure(tuple(length or TIMED), rounds, kept)
    write_results(path, "open-lengths", environment, [result])
    show(table(result))
    print(f"written: {path}")


if __name__ == "__main__":
    typer.run(main)
