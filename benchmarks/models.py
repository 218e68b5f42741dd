"""Whole models: this plugin beside ONNX Runtime and stock TVM, interleaved, medians, in one process.

    python benchmarks/models.py                       # every built-in model, batch 1, encoders of 16 and 128 tokens
    python benchmarks/models.py resnet50 --batch 1 --batch 8 --rounds 20
    python benchmarks/models.py --peer onnxruntime --peer openvino_f32
    python benchmarks/models.py --peer onnxruntime --explain

Kernels of multiply-adds alone take turns among the contenders: "of peak" is what of the cores' float32 rate a model
gets. Convolutions count as direct sums, so that Winograd's form may pass 100 %.

With ``--explain``, a model that a peer runs faster is also timed operator by operator beside ONNX Runtime, and the
operators that lose most are listed. Writes ``benchmarks/results/<date>-models-batch<N>.json`` after each model.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import onnx
import typer
from _common import current_environment, progress, result_path, show, write_results
from _explain import Explanation, explain
from _peers import OPENVINO, PEAK, prepare_openvino, prepare_peak
from rich.table import Table

from benchmarks.networks import models
from tvm_ext.bench.compare import STOCK_BUDGET_S, BenchResult, OtherPeer, bench, result_table
from tvm_ext.bench.contenders import OURS, PEERS
from tvm_ext.bench.environment import thread_count
from tvm_ext.errors import UnsupportedEnvironmentError
from tvm_ext.relay_passes.onnx.load import load_onnx

ENCODERS = ("minilm", "bert_base_layer")
"""The models to which the number of tokens matters."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelResult:
    """One model, and the operators that explain its gap where that was asked for and there is one.

    ``peak_flops`` are of one run of the contender `PEAK`.
    """

    result: BenchResult
    peak_flops: float
    explanation: Explanation | None = None

    @property
    def peers(self) -> list[str]:
        """Who else runs the model, `PEAK` left out."""
        return [item.name for item in self.result.timings[1:] if item.name != PEAK]

    def of_peak(self, contender: str) -> float | None:
        """The model's operations in a second, as a share of what `PEAK` does in one."""
        own, peak = self.result.timing(contender), self.result.timing(PEAK)
        if own is None or peak is None:
            return None
        return self.result.flops / own.median_s / (self.peak_flops / peak.median_s)

    def record(self) -> dict[str, Any]:
        fields = asdict(self.result)
        del fields["environment"]
        peers = self.peers
        return {
            **fields,
            "of_peak": {name: self.of_peak(name) for name in (OURS, *peers)},
            "speedup": {name: self.result.speedup(name) for name in peers},
            "fastest_speedup": {name: self.result.fastest_speedup(name) for name in peers},
            "explanation": None if self.explanation is None else asdict(self.explanation),
        }


def summary(results: Sequence[ModelResult]) -> Table:
    """Per peer: geometric mean of the speed-ups, the lowest, and how many models are not slower."""
    rows = Table("peer", "models", "geometric mean", "lowest", "not slower")
    for peer in (*PEERS, OPENVINO):
        ratios = [(ratio, item.result.model) for item in results if (ratio := item.result.speedup(peer)) is not None]
        if ratios:
            mean, (lowest, where) = statistics.geometric_mean(ratio for ratio, _ in ratios), min(ratios)
            wins = sum(ratio >= 1 for ratio, _ in ratios)
            rows.add_row(peer, str(len(ratios)), f"{mean:.2f}x", f"{lowest:.2f}x {where}", str(wins))
    return rows


def peak_table(results: Sequence[ModelResult]) -> Table:
    """Per model: operations of a run, and each contender's share of the cores' float32 rate."""
    peers = [name for name in (*PEERS, OPENVINO) if any(item.result.timing(name) for item in results)]
    rows = Table("model", "GFLOP", *(f"{name}, of peak" for name in (OURS, *peers)))
    for item in results:
        shares = [item.of_peak(name) for name in (OURS, *peers)]
        cells = ["-" if share is None else f"{share:.0%}" for share in shares]
        rows.add_row(item.result.model, f"{item.result.flops / 1e9:.2f}", *cells)
    return rows


def runs(names: Sequence[str], sequences: Sequence[int]) -> Iterator[tuple[str, int]]:
    """(model, tokens): an encoder once for each number of tokens, any other model once."""
    for name in names:
        for sequence in sequences if name in ENCODERS else sequences[:1]:
            yield name, sequence


def measure(
    name: str, model: Callable[[], onnx.ModelProto], peers: Sequence[str] | None, explain_below: float, **settings: Any
) -> ModelResult | None:
    """Time one model, and explain its gap where its ratio to a peer is below ``explain_below``.

    ``peers`` may name OpenVINO, too. None, with a line of reason, where the model or a peer cannot be had.
    """
    gc.collect()  # the last model's weights, up to half a gigabyte
    try:
        with progress() as tell:
            proto = model()
            peak, peak_flops = prepare_peak(thread_count())
            others: list[OtherPeer] = [lambda _inputs, _threads, _placement: peak]
            others += [partial(prepare_openvino, proto)] if OPENVINO in (peers or ()) else []
            known = None if peers is None else [item for item in peers if item != OPENVINO]
            result = replace(bench(proto, progress=tell, others=others, peers=known, **settings), model=name)
    except UnsupportedEnvironmentError as error:
        print(f"skipped {name}: {error}")
        return None
    show(result.table())
    made = ModelResult(result=result, peak_flops=peak_flops)
    if all((result.speedup(name) or 1.0) >= explain_below for name in made.peers):
        return made
    explanation = explain(name, proto)
    show(explanation.table())
    return replace(made, explanation=explanation)


def load(name: str, batch: int, sequence: int) -> onnx.ModelProto:
    """A built-in model, or that of a file."""
    return models.build_model(name, batch, sequence) if models.is_name(name) else load_onnx(name)


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
    output: Annotated[Path | None, typer.Option(help="Where to write the JSON; one batch size only.")] = None,
) -> None:
    """Time models and write the results."""
    for size in batch or [1]:
        environment = current_environment()
        what = f"models-batch{size}"
        path = result_path(what, environment, output)
        results: list[ModelResult] = []
        for name, tokens in runs(names or models.names(), sequence or [16, 128]):
            settings = {"rounds": rounds, "stock_budget_s": stock_budget_s}
            model = partial(load, name, size, tokens)
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
