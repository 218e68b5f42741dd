"""MetaSchedule with its own cost model beside MetaSchedule with ours: the best after few trials and after many.

    python benchmarks/metaschedule_model.py                                # eight operators, 3 seeds: some two hours
    python benchmarks/metaschedule_model.py conv_1x1 --seeds 1 --stop-after 60      # a piece of it; again: the next

Either side has stock TVM's search, features, builder's code and runner; kernels are compiled in this process, which
spares each round the 15 s in which a builder's process begins. Ours asks for smaller rounds, since it learns from the
first on. What MetaSchedule has recorded stays in ``--folder``, where a run that was stopped goes on. In the end the
best kernels of either side take turns in one process: only those times are compared.
"""

from __future__ import annotations

import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from _common import current_environment, earlier_results, progress, result_path, show, write_results
from _metaschedule import OPERATORS, RUN_TIME_LIMIT_S, Record, check_operators, contender_of, tunable_module, tune
from _metaschedule import with_records as tuned_by
from rich.table import Table

from benchmarks.trace_model.learner import TraceLearner, cost_model_for_metaschedule
from tvm_ext.bench.environment import on_main_core, place_threads, thread_count
from tvm_ext.bench.models import random_inputs
from tvm_ext.bench.timing import Runner, interleave, median
from tvm_ext.devices.device_db import device_for_target

STOCK, OURS, UNTAUGHT = "stock", "ours", "untaught"
SIDES = (STOCK, OURS, UNTAUGHT)
"""``untaught`` is ours without the analytical model. It runs where it is named."""

MANY, FEW = 64, 16
ROUNDS = {STOCK: 16, OURS: 4, UNTAUGHT: 4}
FOLDER = Path("build") / "metaschedule_model"
WORKLOADS, RECORDS, DONE = "database_workload.json", "database_tuning_record.json", "done"
REACHED = 1.02
"""Within so much of the other side's best is as good as it."""


def search(name: str, seed: int, side: str, trials: int, folder: Path) -> None:
    """Leave the records of one side's trials in ``folder``, which is made anew."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    _, target = device_for_target("llvm")
    parts: dict[str, Any] = {"builder": in_process_builder()}
    if side != STOCK:
        parts["cost_model"] = cost_model_for_metaschedule(TraceLearner(seed), pretrained=side == OURS)
    np.random.seed(seed)
    tune(OPERATORS[name](), target, trials, str(folder), per_round=ROUNDS[side], seed=seed + 1, **parts)
    (folder / DONE).write_text("")


def in_process_builder() -> Any:
    """Compiles one candidate after the other, here."""
    from tvm.ir.utils import derived_object
    from tvm.s_tir.meta_schedule.builder import BuilderResult, PyBuilder
    from tvm.s_tir.meta_schedule.builder.local_builder import default_build, default_export

    @derived_object
    class InProcessBuilder(PyBuilder):  # type: ignore[misc]
        def build(self, build_inputs: Sequence[Any]) -> list[Any]:
            return [self.made(item) for item in build_inputs]

        def made(self, item: Any) -> Any:
            try:
                return BuilderResult(default_export(default_build(item.mod, item.target, None)), None)
            except (RuntimeError, ValueError, TypeError) as error:
                return BuilderResult(None, str(error))

    return InProcessBuilder()


def curve(folder: Path) -> list[float | None]:
    """Seconds of each trial as MetaSchedule measured it, in order; None for a failure."""
    lines = (folder / RECORDS).read_text(encoding="utf-8").splitlines()
    medians = [statistics.median(map(float, json.loads(line)[1][1] or [RUN_TIME_LIMIT_S])) for line in lines]
    return [item if item < RUN_TIME_LIMIT_S else None for item in medians]


def best(times: Sequence[float | None]) -> float | None:
    return min((item for item in times if item is not None), default=None)


def trials_to(times: Sequence[float | None], goal_s: float) -> int | None:
    """How many trials it took to come as near as `REACHED` to ``goal_s``."""
    return next((n for n, item in enumerate(times, 1) if item is not None and item <= goal_s * REACHED), None)


def kernel_after(name: str, folder: Path, trials: int) -> Callable[[], object]:
    """A run of the operator with the best kernel of the first ``trials``."""
    model = OPERATORS[name]()
    _, target = device_for_target("llvm")
    with tempfile.TemporaryDirectory() as short, target:
        shutil.copyfile(folder / WORKLOADS, Path(short) / WORKLOADS)
        lines = (folder / RECORDS).read_text(encoding="utf-8").splitlines(keepends=True)
        (Path(short) / RECORDS).write_text("".join(lines[:trials]))
        mod = tuned_by(tunable_module(model), short)
        return contender_of(mod, target, random_inputs(model), time.perf_counter()).run


def compare(name: str, seed: int, folders: dict[str, Path], few: int, rounds: int) -> Record:
    """All sides' best kernels after ``few`` trials and after all, in turns."""
    curves = {side: curve(folder) for side, folder in folders.items()}
    places = [(side, count) for side, times in curves.items() for count in sorted({min(few, len(times)), len(times)})]
    placement = place_threads(thread_count())
    runners = [Runner(name=f"{side} {count}", run=kernel_after(name, folders[side], count)) for side, count in places]
    with on_main_core(placement):
        samples = interleave(runners, rounds=rounds)
    stock_best = best(curves[STOCK])
    medians = {key: median(values) for key, values in samples.items()}
    reference = medians[f"{STOCK} {len(curves[STOCK])}"]
    return {
        "id": f"{name} {seed}",
        "operator": name,
        "seed": seed,
        "few": few,
        "trials": {side: len(times) for side, times in curves.items()},
        "median_s": medians,
        "speedup": {key: reference / value for key, value in medians.items()},
        "trials_to_stock_best": {
            side: None if stock_best is None else trials_to(times, stock_best) for side, times in curves.items()
        },
        "curves_s": curves,
        "samples_s": {key: list(values) for key, values in samples.items()},
    }


def table(records: Sequence[Record]) -> Table:
    """A row per operator and seed: each side's best as a share of stock's best after all its trials."""
    keys = list(dict.fromkeys(key for record in records for key in record["speedup"]))
    rows = Table("operator, seed", *keys, *(f"{side} reaches it at" for side in (OURS, UNTAUGHT)))
    for record in records:
        found = [record["speedup"].get(key) for key in keys]
        when = [record["trials_to_stock_best"].get(side) for side in (OURS, UNTAUGHT)]
        rows.add_row(record["id"], *(f"{gain:.2f}" if gain else "-" for gain in found), *(str(n or "-") for n in when))
    rows.add_section()
    gains = [[record["speedup"][key] for record in records if key in record["speedup"]] for key in keys]
    rows.add_row("geometric mean", *(f"{statistics.geometric_mean(item):.2f}" for item in gains), "", "")
    return rows


def main(
    ops: Annotated[list[str] | None, typer.Argument(help=f"Operators, of {', '.join(OPERATORS)}; all of them.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each operator and side.")] = 3,
    many: Annotated[int, typer.Option(min=1, help="Trials of stock TVM's model.")] = MANY,
    few: Annotated[int, typer.Option(min=1, help="Trials of ours.")] = FEW,
    sides: Annotated[list[str] | None, typer.Option("--side", help=f"Of {', '.join(SIDES)}.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Turns that each final kernel gets.")] = 10,
    folder: Annotated[Path, typer.Option(help="Where searches are kept, to go on.")] = FOLDER,
    stop_after: Annotated[float, typer.Option(help="Seconds after which nothing new is begun.")] = float("inf"),
    output: Annotated[Path | None, typer.Option(help="Where to write the JSON.")] = None,
) -> None:
    """Search with each model, time the best kernels in turns, write the results."""
    check_operators(ops or [])
    environment = current_environment()
    path = result_path("metaschedule_model", environment, output)
    records = {record["id"]: record for record in earlier_results(path, environment)}
    start = time.monotonic()
    with progress() as tell:
        for name, seed in _wanted(ops or list(OPERATORS), seeds, records):
            folders = {side: folder / f"{name}-{seed}-{side}" for side in sides or (STOCK, OURS)}
            for side, own in folders.items():
                if time.monotonic() - start > stop_after:
                    print(f"{stop_after:g} s are over; start again to go on")
                    return
                if not (own / DONE).exists():
                    tell(f"{name}, seed {seed}: {side}")
                    search(name, seed, side, many if side == STOCK else few, own)
            if time.monotonic() - start <= stop_after:
                records[f"{name} {seed}"] = compare(name, seed, folders, few, rounds)
                write_results(path, "metaschedule_model", environment, list(records.values()))
    if records:
        show(table(list(records.values())))
        print(f"written: {path}")


def _wanted(names: Sequence[str], seeds: int, known: dict[str, Record]) -> Iterator[tuple[str, int]]:
    yield from ((name, seed) for seed in range(seeds) for name in names if f"{name} {seed}" not in known)


if __name__ == "__main__":
    typer.run(main)
