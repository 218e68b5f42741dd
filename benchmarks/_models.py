"""What the benchmarks of whole models share: one model timed beside its peers, and the tables of several."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import onnx
from _common import progress, show
from _explain import Explanation, explain
from _peers import PEAK, prepare_peak
from rich.table import Table

from tvm_ext.bench.compare import BenchResult, OtherPeer, bench
from tvm_ext.bench.contenders import OPENVINO_BF16, OURS, PEERS, prepare_openvino, prepare_ours
from tvm_ext.bench.environment import thread_count
from tvm_ext.errors import UnsupportedEnvironmentError


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
    for peer in (*PEERS, OPENVINO_BF16, FLOAT32):
        ratios = [(ratio, item.result.model) for item in results if (ratio := item.result.speedup(peer)) is not None]
        if ratios:
            mean, (lowest, where) = statistics.geometric_mean(ratio for ratio, _ in ratios), min(ratios)
            wins = sum(ratio >= 1 for ratio, _ in ratios)
            rows.add_row(peer, str(len(ratios)), f"{mean:.2f}x", f"{lowest:.2f}x {where}", str(wins))
    return rows


def peak_table(results: Sequence[ModelResult]) -> Table:
    """Per model: operations of a run, and each contender's share of the cores' float32 rate."""
    peers = [name for name in (*PEERS, OPENVINO_BF16) if any(item.result.timing(name) for item in results)]
    rows = Table("model", "GFLOP", *(f"{name}, of peak" for name in (OURS, *peers)))
    for item in results:
        shares = [item.of_peak(name) for name in (OURS, *peers)]
        cells = ["-" if share is None else f"{share:.0%}" for share in shares]
        rows.add_row(item.result.model, f"{item.result.flops / 1e9:.2f}", *cells)
    return rows


FLOAT32 = "tvm_ext_f32"
"""This plugin in float32, beside a model that was quantised, or bfloat16."""


def measure(
    name: str,
    model: Callable[[], onnx.ModelProto],
    peers: Sequence[str] | None,
    explain_below: float,
    floating: Callable[[], onnx.ModelProto] | None = None,
    **settings: Any,
) -> ModelResult | None:
    """Time one model, and explain its gap where its ratio to a peer is below ``explain_below``.

    ``peers`` may name OpenVINO, too; a ``floating`` model takes part as `FLOAT32`.
    None, with a line of reason, where the model or a peer cannot be had.
    """
    gc.collect()  # the last model's weights, up to half a gigabyte
    try:
        with progress() as tell:
            proto = model()
            peak, peak_flops = prepare_peak(thread_count())
            others: list[OtherPeer] = [lambda _inputs, _threads, _placement: peak]
            vino = [OPENVINO_BF16] if OPENVINO_BF16 in (peers or ()) else []
            others += [partial(prepare_openvino, proto, name=item) for item in vino]
            if floating is not None:
                real = floating()
                others.append(lambda inputs, *_: replace(prepare_ours(real, inputs, None, "llvm", None), name=FLOAT32))
            known = None if peers is None else [item for item in peers if item not in vino]
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
