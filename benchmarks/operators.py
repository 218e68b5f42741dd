"""Roller's 119 operators one by one: this plugin beside ONNX Runtime or stock TVM, interleaved, medians, one process.

    python benchmarks/operators.py                            # all, batch 1, against ONNX Runtime
    python benchmarks/operators.py C0 M1 D4 --peer onnxruntime --peer stock_tvm --stock-budget-s 2

Writes ``benchmarks/results/<date>-operators-batch<N>.json`` after each operator: samples, GFLOP/s, and GB/s of the
bytes that must be moved at least.
"""

from __future__ import annotations

import gc
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from _common import current_environment, progress, result_path, show, write_results
from rich.table import Table

from benchmarks.networks import roller_models
from benchmarks.networks.roller_models import RollerModel
from tvm_ext.bench.compare import BenchResult, bench
from tvm_ext.bench.contenders import ONNX_RUNTIME, OURS, STOCK_TVM
from tvm_ext.errors import InputError

WORKLOAD = Path(__file__).resolve().parent / "workloads" / "roller_ops.csv"
STOCK_BUDGET_S = 3.0


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorResult:
    """One operator: what it is, and what each contender took."""

    id: str
    operator: str
    flops: float
    bytes: float
    result: BenchResult

    def rate(self, contender: str, amount: float) -> float | None:
        """``amount`` per second of the contender's median, in units of 1e9."""
        timing = self.result.timing(contender)
        return None if timing is None else amount / timing.median_s / 1e9

    def record(self) -> dict[str, Any]:
        fields = asdict(self.result)
        del fields["environment"]
        return {
            "id": self.id,
            "operator": self.operator,
            "gflops": self.rate(OURS, self.flops),
            "gb_per_s": self.rate(OURS, self.bytes),
            "speedup": {item.name: self.result.speedup(item.name) for item in self.result.timings[1:]},
            "fastest_speedup": {item.name: self.result.fastest_speedup(item.name) for item in self.result.timings[1:]},
            **fields,
        }


def measure(item: RollerModel, peers: list[str], rounds: int, stock_budget_s: float, tell: Any) -> OperatorResult:
    """Build the operator with every contender and time them."""
    result = bench(
        item.model,
        peers=peers,
        rounds=rounds,
        stock_budget_s=stock_budget_s,
        progress=lambda step: tell(f"{item.id}: {step}"),
    )
    return OperatorResult(id=item.id, operator=item.operator, flops=item.flops, bytes=item.bytes, result=result)


def table(results: list[OperatorResult], peers: list[str]) -> Table:
    """A row per operator: our median, its rates, and each peer's median over ours (above 1 where we are faster)."""
    rows = Table("id", "operator", "input", "ms", "GFLOP/s", "GB/s", *[f"vs {peer}" for peer in peers], "error")
    for column in rows.columns[3:]:
        column.justify = "right"
    for item in results:
        ours = item.result.timing(OURS)
        assert ours is not None
        _, shape = item.result.inputs[0]
        error = "-" if ours.relative_error is None else f"{ours.relative_error:.1e}"
        rates = (item.rate(OURS, item.flops), item.rate(OURS, item.bytes))
        rows.add_row(
            item.id,
            item.operator,
            "x".join(map(str, shape)),
            f"{ours.median_s * 1e3:.3g}",
            *(f"{rate:.3g}" for rate in rates),
            *(_ratio(item.result.speedup(peer)) for peer in peers),
            error,
        )
    return rows


def _ratio(speedup: float | None) -> str:
    return "-" if speedup is None else f"{speedup:.2f}x"


def summary(results: list[OperatorResult], peers: list[str]) -> Table:
    """Per kind of operator and peer: the geometric mean of the speed-ups, and how many operators are not slower."""
    rows = Table("operator", "peer", "measured", "geometric mean", "not slower", "slowest", "fastest")
    for kind in ["all", *dict.fromkeys(item.operator for item in results)]:
        chosen = [item for item in results if kind in ("all", item.operator)]
        for peer in peers:
            ratios = [ratio for item in chosen if (ratio := item.result.speedup(peer)) is not None]
            if ratios:
                mean = statistics.geometric_mean(ratios)
                wins = sum(ratio >= 1 for ratio in ratios)
                ends = (f"{min(ratios):.2f}x", f"{max(ratios):.2f}x")
                rows.add_row(kind, peer, str(len(ratios)), f"{mean:.2f}x", f"{wins}", *ends)
    return rows


def chosen_ids(ids: list[str] | None) -> frozenset[str]:
    """``ids``, or all; raises InputError for one that the table does not have."""
    known = roller_models.read_ids(WORKLOAD)
    for name in ids or []:
        if name not in known:
            raise InputError(
                f"there is no operator {name!r}.", f"the operators are {known[0]} to {known[-1]} of {WORKLOAD.name}"
            )
    return frozenset(ids or known)


def main(
    ids: Annotated[list[str] | None, typer.Argument(help="Operators by their id in the table; all of them.")] = None,
    batch: Annotated[int, typer.Option(min=1)] = 1,
    rounds: Annotated[int, typer.Option(min=1, help="Turns that each contender gets.")] = 10,
    peer: Annotated[list[str] | None, typer.Option(help="onnxruntime, stock_tvm; the former.")] = None,
    stock_budget_s: Annotated[float, typer.Option(help="Seconds of runs that stock TVM is given.")] = STOCK_BUDGET_S,
    output: Annotated[Path | None, typer.Option(help="Where to write the JSON.")] = None,
) -> None:
    """Time operators and write the results."""
    environment = current_environment()
    peers = peer or [ONNX_RUNTIME]
    what = f"operators-batch{batch}" + ("-stock" if peers == [STOCK_TVM] else "")
    path = result_path(what, environment, output)
    results: list[OperatorResult] = []
    with progress() as tell:
        for item in roller_models.read_models(WORKLOAD, batch=batch, ids=chosen_ids(ids)):
            results.append(measure(item, peers, rounds, stock_budget_s, tell))
            write_results(path, what, environment, [result.record() for result in results])
            gc.collect()  # the last operator's weights, up to 125 MB
    show(table(results, peers))
    show(summary(results, peers))
    print(f"written: {path}")


if __name__ == "__main__":
    typer.run(main)
