"""How soon searches find good tiles: ALCOP's Figures 12 and 13, from measurements on a CPU or on a simulated GPU.

    python benchmarks/tuning_curves.py --measured SAMPLES.json --plot docs/tuning.png    # of tuning_measured.py
    python benchmarks/tuning_curves.py                 # simulated: twelve operators, five seeds
    python benchmarks/tuning_curves.py --seeds 1 --output /tmp/curves.json

Measured times are those of `tuning_measured.py`, of every candidate. Simulated ones are those of
`alcop/simulated_gpu.py`: cycles of issue, banks, memory, tails and clocks, counted apart from the analytical model. For
each operator, method and seed: the best time among the first k trials, as a share of the best of the whole space.
Writes ``benchmarks/results/<date>-tuning-curves-<measured or simulated>.json``.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Protocol

import numpy as np
import typer
from _common import current_environment, progress, result_path, show, write_results
from rich.table import Table

from benchmarks.alcop.printed import bottleneck_order
from benchmarks.alcop.products import product_of_convolution, product_of_matmul
from benchmarks.alcop.searches import Drafted, InOrder, LikelihoodFree, PlainAnnealed, PlainModel
from benchmarks.alcop.simulated_gpu import NOISE, SimulatedGpu
from tvm_ext.analysis.tensor_expr import TensorExpr
from tvm_ext.autotune.cost_model import TileCostModel
from tvm_ext.autotune.cpu_space import CpuTileSpace
from tvm_ext.autotune.gpu_space import MatrixTileSpace
from tvm_ext.autotune.search import Annealed, AtRandom, Proposer, SpaceSearch
from tvm_ext.autotune.spaces import KernelSpace, SpaceCandidate
from tvm_ext.cost.gpu_columns import TunedProduct
from tvm_ext.devices.device_db import lookup
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.records.measurement import Trial
from tvm_ext.records.serialise import from_json
from tvm_ext.records.tuning import CpuTile

TRIALS = (1, 5, 10, 20, 50)
BATCH = 5
DEVICE = "nvidia-a100"

OPERATORS: dict[str, TunedProduct] = {
    "MM_RN50_FC": product_of_matmul(1024, 64, 2048),
    "MM_BERT_FC1": product_of_matmul(512, 3072, 768),
    "MM_2048": product_of_matmul(2048, 2048, 2048),
    "MM_Conv1x1": product_of_matmul(12544, 256, 1024),
    "BMM_BERT_QK": product_of_matmul(512, 512, 64, batch=12),
    "BMM_BERT_SV": product_of_matmul(512, 64, 512, batch=12),
    "Conv3x3_56": product_of_convolution((64, 56, 56, 64), (3, 3), 64, padding=1),
    "Conv3x3_14": product_of_convolution((64, 14, 14, 256), (3, 3), 256, padding=1),
}
"""Rows of ``alcop_ops.csv``, on which settings of the search were chosen."""

HELD_OUT: dict[str, TunedProduct] = {
    "MM_BERT_FC2": product_of_matmul(512, 768, 3072),
    "MM_1024": product_of_matmul(1024, 1024, 1024),
    "BMM_384x64": product_of_matmul(384, 384, 64, batch=16),
    "Conv3x3_28": product_of_convolution((64, 28, 28, 128), (3, 3), 128, padding=1),
}
"""Operators on which nothing was chosen."""

AnySpace = KernelSpace[Any]

METHODS: dict[str, Callable[[AnySpace, int], Proposer]] = {
    "random": lambda space, seed: AtRandom(),
    "bottleneck ranking": lambda space, seed: InOrder(bottleneck_order(space)),
    "analytical ranking": lambda space, seed: InOrder(space.predictions.ranking),
    "plain XGB": lambda space, seed: PlainAnnealed(PlainModel(space, seed=seed)),
    "analytical + XGB": lambda space, seed: Annealed(TileCostModel(space, seed=seed)),
    "draft-then-verify": lambda space, seed: Drafted(TileCostModel(space, seed=seed)),
    "likelihood-free": lambda space, seed: LikelihoodFree(space.features, seed=seed),
}


class Machine(Protocol):
    """What gives the candidates of a space their times."""

    @property
    def space(self) -> AnySpace: ...

    def measure(self, candidates: Sequence[Any]) -> list[Trial]: ...

    def share_of_best(self, candidate: Any) -> float: ...


class MeasuredCpu:
    """The measured times of all candidates of one operator; one that was not measured counts as failed."""

    def __init__(self, record: dict[str, Any]) -> None:
        from tuning_measured import time_of

        samples = record["samples_us"]
        first = [from_json(CpuTile, text) for text in list(samples)[:20]]  # construction's, wherever they lie
        self.space = CpuTileSpace(from_json(TensorExpr, record["expr"]), from_json(DeviceSpec, record["device"]), first)
        self.device = str(record.get("machine", self.space.device.description))
        self.time_us = np.full(len(self.space), np.inf)
        for text, own in samples.items():
            place = self.space.index(text)
            if place is not None:
                self.time_us[place] = time_of(own)
        place = self.space.index(record["constructed"])
        self.constructed = 0.0 if place is None else float(self.time_us.min() / self.time_us[place])

    def measure(self, candidates: Sequence[SpaceCandidate]) -> list[Trial]:
        """Trials of one sample each: `time_of` what was measured."""
        return [self._trial(item.configuration) for item in candidates]

    def share_of_best(self, candidate: SpaceCandidate) -> float:
        """The fastest of the space over the candidate's time."""
        return float(self.time_us.min()) / self._time_of(candidate.configuration)

    def _time_of(self, configuration: str) -> float:
        place = self.space.index(configuration)
        assert place is not None, configuration
        return float(self.time_us[place])

    def _trial(self, configuration: str) -> Trial:
        time_us = self._time_of(configuration)
        if not np.isfinite(time_us):
            return Trial(configuration=configuration, outcome="crashed", reason="not measured")
        return Trial(configuration=configuration, outcome="ok", times_us=(time_us,))


@dataclass(frozen=True, kw_only=True, slots=True)
class TuningCurve:
    """One method on one operator: the share of the exhaustive best after k trials, the mean over seeds.

    ``noise`` is the simulation's; ``held_out`` says that no setting of the search was chosen on it; ``constructed`` is
    the share that the constructed kernel has, where times are measured.
    """

    simulated: bool
    device: str
    operator: str
    method: str
    candidates: int
    seeds: int
    best_in_k: dict[int, float]
    held_out: bool = False
    noise: float | None = None
    constructed: float | None = None


def best_in_trials(machine: Machine, proposer: Proposer, seed: int) -> dict[int, float]:
    """The share of the best true time that the candidate has which is fastest in the first k trials (0: none ran)."""
    search, asked = SpaceSearch(machine.space, proposer, seed=seed), []
    while len(asked) < max(TRIALS):
        batch = search.ask(BATCH)
        asked += batch
        search.tell(machine.measure(batch))
    shares = [machine.share_of_best(candidate) for candidate in asked]
    return {k: max(shares[:k]) for k in TRIALS}


def curve(name: str, space: MatrixTileSpace, method: str, seeds: int) -> TuningCurve:
    """The mean over ``seeds``, which draw the simulation's hidden factors and the search's choices."""
    runs = [best_in_trials(SimulatedGpu(space, seed=seed), METHODS[method](space, seed), seed) for seed in range(seeds)]
    return TuningCurve(
        simulated=True,
        device=space.device.name,
        operator=name,
        method=method,
        candidates=len(space),
        seeds=seeds,
        noise=NOISE,
        held_out=name in HELD_OUT,
        best_in_k=_mean_of(runs),
    )


def measured_curve(record: dict[str, Any], method: str, seeds: int) -> TuningCurve:
    """The mean over ``seeds``, which draw the search's choices; the times are what they are."""
    machine = MeasuredCpu(record)
    runs = [best_in_trials(machine, METHODS[method](machine.space, seed), seed) for seed in range(seeds)]
    return TuningCurve(
        simulated=False,
        device=machine.device,
        operator=record["operator"],
        method=method,
        candidates=len(machine.space),
        seeds=seeds,
        best_in_k=_mean_of(runs),
        held_out=record["operator"].endswith("held_out"),
        constructed=round(machine.constructed, 4),
    )


def _mean_of(runs: Sequence[dict[int, float]]) -> dict[int, float]:
    return {k: round(statistics.mean(run[k] for run in runs), 4) for k in TRIALS}


def main(
    seeds: Annotated[int, typer.Option(min=1, help="Searches (and simulations) of each operator.")] = 5,
    measured: Annotated[
        Path | None, typer.Option(help="Times of `tuning_measured.py` in place of simulated ones.")
    ] = None,
    only: Annotated[list[str] | None, typer.Option(help="Simulated: these operators.")] = None,
    plot: Annotated[Path | None, typer.Option(help="A picture of the curves.")] = None,
    output: Annotated[Path | None, typer.Option(help="Instead of a dated file in results/.")] = None,
) -> None:
    """Run every method on every operator and write the curves."""
    environment = current_environment()
    what = "simulated" if measured is None else "measured"
    path = result_path(f"tuning-curves-{what}", environment, output)
    curves: list[TuningCurve] = []
    with progress() as say:
        for name, curve_by in _curves(measured, seeds, only or [*OPERATORS, *HELD_OUT]):
            for method in METHODS:
                say(f"{name}: {method}")
                curves.append(curve_by(method))
            write_results(path, f"searches, {what} times", environment, curves)
    show(summary(curves, what))
    if plot is not None:
        draw(curves, plot, what)


def _curves(measured: Path | None, seeds: int, only: Sequence[str]) -> list[tuple[str, Callable[[str], TuningCurve]]]:
    """By operator, what makes the curve of a method."""
    if measured is not None:
        records = json.loads(measured.read_text(encoding="utf-8"))["results"]
        return [(item["operator"], lambda method, item=item: measured_curve(item, method, seeds)) for item in records]
    spaces = {
        name: MatrixTileSpace(product, lookup(DEVICE))
        for name, product in (OPERATORS | HELD_OUT).items()
        if name in only
    }
    return [
        (name, lambda method, name=name, space=space: curve(name, space, method, seeds))
        for name, space in spaces.items()
    ]


def draw(curves: Sequence[TuningCurve], path: Path, what: str) -> None:
    """Figure 13: the share of the exhaustive best over the number of trials, means over operators."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.2))
    for method in METHODS:
        mine = [item for item in curves if item.method == method]
        axes.plot(
            TRIALS, [100 * statistics.mean(item.best_in_k[k] for item in mine) for k in TRIALS], "o-", label=method
        )
    axes.set_xscale("log")
    axes.set_xticks(TRIALS, [str(k) for k in TRIALS])
    axes.set_xlabel("trials")
    axes.set_ylabel("% of the exhaustive best")
    axes.set_title(f"{len({item.operator for item in curves})} operators, {what} times")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def summary(curves: Sequence[TuningCurve], what: str) -> Table:
    """Means over operators."""
    table = Table(title=f"share of the exhaustive best after k trials; {what} times", title_justify="left")
    for heading in ("method", *(f"k = {k}" for k in TRIALS)):
        table.add_column(heading)
    for method in METHODS:
        mine = [item for item in curves if item.method == method]
        _add_means(table, method, [item for item in mine if not item.held_out])
        _add_means(table, f"{method}, held out", [item for item in mine if item.held_out])
    known = {item.operator: item.constructed for item in curves if item.constructed is not None}
    if known:
        table.add_row("constructed", f"{statistics.mean(known.values()):.1%}")
    return table


def _add_means(table: Table, label: str, curves: Sequence[TuningCurve]) -> None:
    if curves:
        table.add_row(label, *(f"{statistics.mean(item.best_in_k[k] for item in curves):.1%}" for k in TRIALS))


if __name__ == "__main__":
    typer.run(main)
