"""Roller's 119 operators one by one: this plugin beside ONNX Runtime or stock TVM, interleaved, medians, one process.

    python benchmarks/operators.py                            # all, batch 1, against ONNX Runtime
    python benchmarks/operators.py C0 M1 D4 --peer onnxruntime --peer stock_tvm --stock-budget-s 2

Writes ``benchmarks/results/<date>-operators-batch<N>.json`` after each operator: samples, GFLOP/s, GB/s of the bytes
that must be moved at least, and how much of its saturated layer our fastest run uses (the paper's Table 2).
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
from tvm_ext.devices.machine import Holding, Machine
from tvm_ext.errors import InputError
from tvm_ext.reports.record import BuildRecord, OperatorReport
from tvm_ext.support.files import temporary_folder

WORKLOAD = Path(__file__).resolve().parent / "workloads" / "roller_ops.csv"
STOCK_BUDGET_S = 3.0
KEPT = Holding(first=2, divided=True, whole=True)
"""What a core's part of the tensors finds from run to run: its own L2 has it, or its part of what cores share."""
PAPER_SHARES = ((0.9, "66 %"), (0.8, "84 %"), (0.7, "95 %"))
"""Roller's Table 2, a V100: operators that use so much of the saturated layer, or more."""


def saturated(kernel: OperatorReport, machine: Machine) -> tuple[float, str]:
    """Seconds that ``kernel`` takes at least, by the layer that is then saturated.

    That is the arithmetic at its peak; or all tensors once, from the layer that holds them from run to run, a part for
    each core; or what the program loads from caches up to there. The arithmetic's cycles have the loads from L1.
    """
    choice, prediction = kernel.choice, kernel.choice.program and kernel.choice.program.prediction
    holder = machine.holder(choice.bytes / machine.spec.unit_count, KEPT)
    caches = [layer.name for layer in machine.spec.layers[2:-1] if layer.name <= holder.name]
    costs = [cost for cost in prediction.layers if cost.layer in caches] if prediction else []
    peak = (machine.spec.peak_gflops_of("float32") or 0.0) * 1e9
    return max(
        (choice.flops / peak, "compute"),
        (choice.bytes / machine.rate(holder), holder.name),
        *((cost.traffic_bytes / machine.rate(cost.layer), cost.layer) for cost in costs),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorResult:
    """One operator: what it is, and what each contender took."""

    id: str
    operator: str
    flops: float
    bytes: float
    result: BenchResult
    saturated_s: float
    saturated_layer: str  # of the kernel that takes longest so

    @property
    def share(self) -> float:
        """Of the saturated layer's peak, by our fastest run; above 1 where a form has fewer products (Winograd's)."""
        ours = self.result.timing(OURS)
        assert ours is not None
        return self.saturated_s / min(ours.samples_s)

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
            "saturated_layer": self.saturated_layer,
            "saturated_share": self.share,
            "speedup": {item.name: self.result.speedup(item.name) for item in self.result.timings[1:]},
            "fastest_speedup": {item.name: self.result.fastest_speedup(item.name) for item in self.result.timings[1:]},
            **fields,
        }


def measure(item: RollerModel, peers: list[str], rounds: int, stock_budget_s: float, tell: Any) -> OperatorResult:
    """Build the operator with every contender and time them."""
    with temporary_folder("operators") as folder:
        result = bench(
            item.model,
            peers=peers,
            rounds=rounds,
            stock_budget_s=stock_budget_s,
            report=folder / "report.json",
            progress=lambda step: tell(f"{item.id}: {step}"),
        )
        report = BuildRecord.from_json((folder / "report.json").read_text(encoding="utf-8"))
    assert report.row is not None, "a build for a CPU has a row"
    least = [(*saturated(kernel, Machine(report.row)), kernel.calls) for kernel in report.operators]
    return OperatorResult(
        id=item.id,
        operator=item.operator,
        flops=item.flops,
        bytes=item.bytes,
        result=result,
        saturated_s=sum(seconds * calls for seconds, _, calls in least),
        saturated_layer=max(least)[1],
    )


def table(results: list[OperatorResult], peers: list[str]) -> Table:
    """A row per operator: our median, its rates, and each peer's median over ours (above 1 where we are faster)."""
    rows = Table(
        "id",
        "operator",
        "input",
        "ms",
        "GFLOP/s",
        "GB/s",
        "saturated",
        "of peak",
        *[f"vs {peer}" for peer in peers],
        "error",
    )
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
            item.saturated_layer,
            f"{item.share:.2f}",
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


def shares(results: list[OperatorResult]) -> Table:
    """The paper's Table 2: how many operators use so much of their saturated layer's peak, by kind of operator."""
    rows = Table("operator", "median", *(f"{share:.0%} and more (paper: {paper})" for share, paper in PAPER_SHARES))
    for kind in ["all", *dict.fromkeys(item.operator for item in results)]:
        own = [item.share for item in results if kind in ("all", item.operator)]
        counts = (sum(share >= least for share in own) for least, _ in PAPER_SHARES)
        rows.add_row(kind, f"{statistics.median(own):.2f}", *(f"{count} of {len(own)}" for count in counts))
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
    show(shares(results))
    print(f"written: {path}")


if __name__ == "__main__":
    typer.run(main)
