"""Whole models: this plugin beside ONNX Runtime and stock TVM, interleaved, medians, in one process.

    python benchmarks/models.py                       # every built-in model, batch 1, encoders of 16 and 128 tokens
    python benchmarks/models.py resnet50 --batch 1 --batch 8 --rounds 20
    python benchmarks/models.py --peer onnxruntime --peer openvino_f32
    python benchmarks/models.py --peer onnxruntime --explain
    python benchmarks/models.py resnet50 --quantise static --peer onnxruntime --peer openvino_f32
    python benchmarks/models.py resnet50 --precision bfloat16 --peer openvino_f32 --peer openvino_bf16

Kernels of multiply-adds alone take turns among the contenders: "of peak" is what of the cores' float32 rate a model
gets. Convolutions count as direct sums, so that Winograd's form may pass 100 %.

With ``--explain``, a model that a peer runs faster is also timed operator by operator beside ONNX Runtime, and the
operators that lose most are listed. With ``--quantise``, all contenders get the model that ONNX Runtime's quantiser
makes, and this plugin the float32 model, too; likewise with ``--precision``, of which the error is kept within
`PRECISION_BOUND`. Writes ``benchmarks/results/<date>-models-batch<N>.json`` after each
model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import onnx
import typer
from _common import current_environment, result_path, show, write_results
from _models import ModelResult, measure, peak_table, summary

from benchmarks.networks import models
from tvm_ext.bench.compare import STOCK_BUDGET_S, result_table
from tvm_ext.bench.quantise import QuantisationMode, quantised
from tvm_ext.options import BuildOptions
from tvm_ext.relay_passes.onnx.load import load_onnx

ENCODERS = ("minilm", "bert_base_layer")
"""The models to which the number of tokens matters."""

CALIBRATIONS = 2

PRECISION_BOUND = 0.05
"""For ``--precision``: the largest error of an output, by norm, on seeded inputs."""


def runs(names: Sequence[str], sequences: Sequence[int]) -> Iterator[tuple[str, int]]:
    """(model, tokens): an encoder once for each number of tokens, any other model once."""
    for name in names:
        for sequence in sequences if name in ENCODERS else sequences[:1]:
            yield name, sequence


def load(name: str, batch: int, sequence: int) -> onnx.ModelProto:
    """A built-in model, or that of a file."""
    return models.build_model(name, batch, sequence) if models.is_name(name) else load_onnx(name)


def _quantised(model: Callable[[], onnx.ModelProto], how: QuantisationMode) -> onnx.ModelProto:
    """As `quantised` says, ranges of activations taken from `CALIBRATIONS` random inputs."""
    floating = model()
    return quantised(floating, how, [models.random_inputs(floating, seed) for seed in range(CALIBRATIONS)])


def main(
    names: Annotated[list[str] | None, typer.Argument(help="Built-in names or ONNX files; all built-in ones.")] = None,
    batch: Annotated[list[int] | None, typer.Option(min=1, help="Batch sizes; 1.")] = None,
    sequence: Annotated[list[int] | None, typer.Option(min=1, help="Tokens, for the encoders; 16 and 128.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Turns that each contender gets.")] = 10,
    peer: Annotated[
        list[str] | None, typer.Option(help="Whom to compare with, openvino_f32 too; all others that are installed.")
    ] = None,
    stock_budget_s: Annotated[float, typer.Option(help="Seconds of runs that stock TVM is given.")] = STOCK_BUDGET_S,
    explain: Annotated[bool, typer.Option(help="List the operators that make a model slower than a peer.")] = False,
    quantise: Annotated[
        QuantisationMode | None, typer.Option(help="Time the model as ONNX Runtime quantises it.")
    ] = None,
    precision: Annotated[str | None, typer.Option(help="Build in bfloat16, or auto, beside float32.")] = None,
    output: Annotated[Path | None, typer.Option(help="Where to write the JSON; one batch size only.")] = None,
) -> None:
    """Time models and write the results."""
    for size in batch or [1]:
        environment = current_environment()
        what = f"models-{f'{quantise or precision}-' if quantise or precision else ''}batch{size}"
        path = result_path(what, environment, output)
        results: list[ModelResult] = []
        for name, tokens in runs(names or models.names(), sequence or [16, 128]):
            settings: dict[str, Any] = {"rounds": rounds, "stock_budget_s": stock_budget_s}
            model = floating = partial(load, name, size, tokens)
            if precision is not None:
                settings["options"] = BuildOptions.current(precision=precision, precision_bound=PRECISION_BOUND)
                settings["floating"] = floating
            if quantise is not None:
                model = partial(_quantised, floating, quantise)
                settings["floating"] = floating
            result = measure(Path(name).name, model, peer or None, 1.0 if explain else 0.0, **settings)
            if result is not None:
                results.append(result)
                write_results(path, what, environment, [item.record() for item in results])
        show(result_table([item.result for item in results]))
        show(summary(results))
        show(peak_table(results))
        print(f"written: {path}")


if __name__ == "__main__":
    typer.run(main)
