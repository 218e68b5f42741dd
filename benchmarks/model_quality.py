"""How well the micro-performance model predicts: rank correlation and regret, on one core of this machine.

    python benchmarks/model_quality.py            # about a quarter of an hour
    python benchmarks/model_quality.py --quick

Per operator, Roller's 20 best rPrograms and 200 random legal ones are built and timed. "correlation" is Spearman's
between predicted and measured time of the 20; "regret" is the best measured of Roller's first ten over the best
measured of the random ones (below 1: Roller's is faster); "first" is the same for the first program alone, which is
what a build takes. A random program is legal (every tile fits its layer, vectors are whole) and large: its tiles grow
along random axes, 70 in 100 until nothing larger fits.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from _common import current_environment, progress, result_path, show, write_results
from _tiles import MATMULS, Bench, Case, Timed, models, prepare, single_core
from rich.table import Table
from scipy.stats import spearmanr

from tvm_ext.cost.access_table import Shape
from tvm_ext.cost.cpu_tiles import legal_vector_axes
from tvm_ext.cost.perf_model import PerfModel
from tvm_ext.records.rprogram import RProgram, RTile
from tvm_ext.support.arithmetic import ceil_div

PRODUCTS = tuple(name for name in MATMULS if name.startswith(("BERT", "M2")) or name == "matmul 512")
CONVOLUTIONS = ("C0", "C4", "C5", "C8", "C9", "C16", "C17", "C18", "C23", "C25", "C35", "C38")
"""Rows of roller_ops.csv at batch 1: 3x3, 1x1, 1x1 with stride 2, 7x7 with stride 2."""

QUICK = ("matmul 512", "BERT 128 tokens, projection", "C0", "C5")
TOP = 20
FIRST = 10
MAXIMAL_SHARE = 0.7
STOP_SHARE = 0.15  # of the growth steps of a tile that may stop early


def random_tile(model: PerfModel, rng: random.Random, level: int, start: Shape) -> Shape:
    """``start`` enlarged along random axes by whole steps while it fits its layer."""
    tile, early = start, rng.random() > MAXIMAL_SHARE
    while True:
        larger = []
        for axis in model.spatial:
            step = start[axis] if level else model.lanes if axis == model.vector else 1
            whole = ceil_div(model.extents[axis], step) * step
            for count in (1, 2, 4) if level else (1,):
                size = min(tile[axis] + count * step, whole)
                grown = (*tile[:axis], size, *tile[axis + 1 :])
                if size > tile[axis] and model.footprint_bytes(level, grown) <= model.capacity_bytes(level):
                    larger.append(grown)
        if not larger or (early and rng.random() < STOP_SHARE):
            return tile
        tile = rng.choice(larger)


def random_shapes(model: PerfModel, rng: random.Random) -> tuple[Shape, ...] | None:
    """Tiles of a random legal program, or None where not even one vector fits the registers."""
    start = tuple(model.lanes if axis == model.vector else 1 for axis in range(len(model.extents)))
    if model.footprint_bytes(0, start) > model.capacity_bytes(0):
        return None
    shapes = [random_tile(model, rng, 0, start)]
    for level in range(1, model.last_level):
        tile = tuple(model.extents[i] if i in model.reduction else size for i, size in enumerate(shapes[-1]))
        fits = model.footprint_bytes(level, tile) <= model.capacity_bytes(level)
        shapes.append(random_tile(model, rng, level, tile) if fits else tile)
    return tuple(shapes)


def random_programs(case: Case, count: int, seed: int) -> list[RProgram]:
    """Up to ``count`` different random legal programs (fewer for an operator that has fewer)."""
    rng = random.Random(seed)
    spatial = [axis.name for axis in case.expr.spatial]
    axes = [axis for axis in legal_vector_axes(case.expr, case.device) if axis in spatial]
    found: dict[tuple[str | None, tuple[Shape, ...]], RProgram] = {}
    for _ in range(20 * count):
        model = PerfModel(case.expr, case.device, rng.choice(axes))
        shapes = random_shapes(model, rng)
        if shapes is None or (model.vector_axis, shapes) in found:
            continue
        tiles = tuple(
            (case.device.layers[level].name, RTile(axes=model.names, shape=shape)) for level, shape in enumerate(shapes)
        )
        template = case.construction.programs[0]
        prediction = model.predict(shapes)
        found[model.vector_axis, shapes] = replace(
            template, tiles=tiles, vector_axis=model.vector_axis, prediction=prediction, shrunk=False
        )
        if len(found) == count:
            break
    return list(found.values())


def _row(timed: Timed) -> dict[str, Any]:
    return {
        "vector_axis": timed.program.vector_axis,
        "order": timed.program.order,
        "tiles": {layer: tile.sizes for layer, tile in timed.program.tiles},
        "predicted_us": timed.program.prediction.time_s * 1e6,
        "measured_us": timed.time_s * 1e6,
    }


def evaluate(case: Case, count: int, rounds: int, seed: int) -> dict[str, Any]:
    """Build and time one operator's programs."""
    top = [p for p in case.construction.programs[:TOP] if p.vector_axis in [axis.name for axis in case.expr.spatial]]
    bench = Bench(case, [*top, *random_programs(case, count, seed)])
    timed = bench.time(rounds)
    ours, others = timed[: len(top)], timed[len(top) :]
    predicted, measured = [t.program.prediction.time_s for t in ours], [t.time_s for t in ours]
    best = min(t.time_s for t in others)
    return {
        "operator": case.name,
        "gflop": case.expr.flops / 1e9,
        "correlation": float(spearmanr(predicted, measured).statistic),
        "correlation_all": float(
            spearmanr([t.program.prediction.time_s for t in timed], [t.time_s for t in timed]).statistic
        ),
        "first": measured[0] / best,
        "regret": min(measured[:FIRST]) / best,
        "gflops_first": case.expr.flops / measured[0] / 1e9,
        "gflops_best": case.expr.flops / min(best, *measured) / 1e9,
        "predicted_over_measured": statistics.median(p / m for p, m in zip(predicted, measured, strict=True)),
        "programs": [_row(t) for t in timed],
    }


def table(results: Sequence[dict[str, Any]]) -> Table:
    made = Table(title="The model's top-20, and its top-10 against random legal programs (one core)")
    for column in ("operator", "correlation", "first", "regret", "GFLOP/s first", "best", "predicted/measured"):
        made.add_column(column)
    for row in results:
        made.add_row(
            row["operator"],
            f"{row['correlation']:.2f}",
            f"{row['first']:.3f}",
            f"{row['regret']:.3f}",
            f"{row['gflops_first']:.0f}",
            f"{row['gflops_best']:.0f}",
            f"{row['predicted_over_measured']:.2f}",
        )
    made.add_row(
        "median",
        f"{statistics.median(row['correlation'] for row in results):.2f}",
        *(f"{statistics.median(row[key] for row in results):.3f}" for key in ("first", "regret")),
        "",
        "",
        f"{statistics.median(row['predicted_over_measured'] for row in results):.2f}",
    )
    return made


def main(
    operator: Annotated[list[str] | None, typer.Option(help="only these operators")] = None,
    count: Annotated[int, typer.Option("--random", min=1, help="random programs per operator")] = 200,
    rounds: Annotated[int, typer.Option(min=2, help="timings of each kernel")] = 15,
    seed: Annotated[int, typer.Option(help="of the random programs")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="four operators, 30 random programs each")] = False,
    out: Annotated[
        Path | None, typer.Option(help="JSON file; default benchmarks/results/DATE-model-quality.json")
    ] = None,
) -> None:
    """Measure, print the table, write the JSON (after each operator)."""
    names = operator or (QUICK if quick else (*PRODUCTS, *CONVOLUTIONS))
    count = min(count, 30) if quick else count
    environment = current_environment()
    path = result_path("model-quality", environment, out)
    device, target = single_core()
    results: list[dict[str, Any]] = []
    with progress() as say:
        for name, model in models(names):
            say(name)
            results.append(evaluate(prepare(name, model, device, target, TOP), count, rounds, seed))
            write_results(path, "model quality", environment, results)
    show(table(results))
    print(f"written to {path}")


if __name__ == "__main__":
    typer.run(main)
