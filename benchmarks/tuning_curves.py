"""How fast searches find good tiles on a simulated GPU: ALCOP's Figures 12 and 13 as a simulation, not a measurement.

    python benchmarks/tuning_curves.py                 # six of ALCOP's operators, five seeds
    python benchmarks/tuning_curves.py --seeds 1 --output /tmp/curves.json

The times are those of `tests/support/simulated_gpu.py`: the analytical model's with hidden factors and noise. Their
size is an assumption, under which the searches compare as the result says. For each operator, method and seed: the best
true simulated time among the first k trials, as a share of the best of the whole space. Writes
``benchmarks/results/<date>-tuning-curves-simulated.json``.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import typer
from _common import current_environment, progress, result_path, show, write_results
from rich.table import Table

from tests.support.simulated_gpu import NOISE, SPREAD, SimulatedGpu
from tvm_ext.autotune.cost_model import TileCostModel
from tvm_ext.autotune.search import Annealed, AtRandom, Drafted, InOrder, LikelihoodFree, Proposer, SpaceSearch
from tvm_ext.autotune.tile_space import TileSpace
from tvm_ext.devices.device_db import lookup
from tvm_ext.records.tuning import TunedProduct, product_of_convolution, product_of_matmul

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
"""Rows of ``alcop_ops.csv``."""

METHODS: dict[str, Callable[[TileSpace, int], Proposer]] = {
    "random": lambda space, seed: AtRandom(),
    "bottleneck ranking": lambda space, seed: InOrder(space.predictions.bottleneck_ranking),
    "analytical ranking": lambda space, seed: InOrder(space.predictions.ranking),
    "plain XGB": lambda space, seed: Annealed(TileCostModel(space, pretrained=False, seed=seed)),
    "analytical + XGB": lambda space, seed: Annealed(TileCostModel(space, seed=seed)),
    "draft-then-verify": lambda space, seed: Drafted(TileCostModel(space, seed=seed)),
    "likelihood-free": lambda space, seed: LikelihoodFree(TileCostModel(space, pretrained=False), seed=seed),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TuningCurve:
    """One method on one operator: the share of the exhaustive best after k simulated trials, the mean over seeds."""

    simulated: bool
    device: str
    operator: str
    method: str
    candidates: int
    seeds: int
    spread: float
    noise: float
    best_in_k: dict[int, float]


def best_in_trials(gpu: SimulatedGpu, proposer: Proposer, seed: int) -> dict[int, float]:
    """The share of the best true time that the candidate has which is fastest in the first k trials (0: none ran)."""
    search, asked = SpaceSearch(gpu.space, proposer, seed=seed), []
    while len(asked) < max(TRIALS):
        batch = search.ask(BATCH)
        asked += batch
        search.tell(gpu.measure(batch))
    shares = [gpu.share_of_best(candidate) for candidate in asked]
    return {k: max(shares[:k]) for k in TRIALS}


def curve(name: str, space: TileSpace, method: str, seeds: int) -> TuningCurve:
    """The mean over ``seeds``, which draw the simulation's hidden factors and the search's choices."""
    runs = [best_in_trials(SimulatedGpu(space, seed=seed), METHODS[method](space, seed), seed) for seed in range(seeds)]
    return TuningCurve(
        simulated=True,
        device=space.device.name,
        operator=name,
        method=method,
        candidates=len(space),
        seeds=seeds,
        spread=SPREAD,
        noise=NOISE,
        best_in_k={k: round(statistics.mean(run[k] for run in runs), 4) for k in TRIALS},
    )


def main(
    seeds: Annotated[int, typer.Option(min=1, help="Simulations of each operator.")] = 5,
    output: Annotated[Path | None, typer.Option(help="Instead of a dated file in results/.")] = None,
) -> None:
    """Run every method on every operator and write the curves."""
    environment = current_environment()
    path = result_path("tuning-curves-simulated", environment, output)
    curves: list[TuningCurve] = []
    with progress() as say:
        for name, product in OPERATORS.items():
            space = TileSpace(product, lookup(DEVICE))
            for method in METHODS:
                say(f"{name}: {method}")
                curves.append(curve(name, space, method, seeds))
            write_results(path, "searches on a simulated GPU", environment, curves)
    show(summary(curves))


def summary(curves: list[TuningCurve]) -> Table:
    """Means over operators."""
    table = Table(title="share of the exhaustive best after k trials; simulated, not measured", title_justify="left")
    for heading in ("method", *(f"k = {k}" for k in TRIALS)):
        table.add_column(heading)
    for method in METHODS:
        mine = [item for item in curves if item.method == method]
        table.add_row(method, *(f"{statistics.mean(item.best_in_k[k] for item in mine):.1%}" for k in TRIALS))
    return table


if __name__ == "__main__":
    typer.run(main)
