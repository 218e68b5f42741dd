"""Hostile models, each imported, built and run in a process of its own.

    python -m tests.support.hostile_models --count 1000 --jobs 1 --output counts.json
    python -m tests.support.hostile_models --mutated 417        # one model in this process, its error in full
    python -m tests.support.hostile_models --made "Tile*"       # hand-made ones by name

Exits with 1 where a model was a failure: anything but a run or a refusal by an error of ours.
"""

from __future__ import annotations

import fnmatch
import itertools
import json
import re
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from tvm_ext.bench.environment import current_environment

from ..case_workers import run_trials
from ..commands import First, Jobs, Output, Seed, console, write
from .check import LIMIT_S, TRIAL, build_and_run
from .draw import draw_case
from .made import made_cases
from .record import HostileCase, HostileResult, counts

app = typer.Typer(add_completion=False)


@app.command()
def main(
    count: Annotated[int, typer.Option(min=0, help="How many mutated models to draw.")] = 1000,
    seed: Seed = 0,
    first: First = 0,
    jobs: Jobs = 1,
    made: Annotated[str, typer.Option(help="Which hand-made models: a pattern of names; '' for none.")] = "*",
    mutated: Annotated[int | None, typer.Option(min=0, help="Only this mutated model, here, and its error.")] = None,
    save: Annotated[Path | None, typer.Option(help="Where to write the models that are failures.")] = None,
    output: Output = None,
) -> None:
    """Import, build and run hostile models; each runs, or is refused by an error of this package."""
    if mutated is not None:
        console.print(build_and_run(draw_case(seed, mutated, suite=True).data))
        return
    wanted = list(made_cases(lambda name: fnmatch.fnmatch(name, made)))
    drawn = (draw_case(seed, index, suite=True) for index in range(first, first + count))
    data: dict[str, bytes] = {}
    results = []
    for result in run_trials(_noted(itertools.chain(wanted, drawn), data), TRIAL, jobs=jobs, limit_s=LIMIT_S):
        results.append(result)
        _show(result, data.pop(result.name), save)
    console.print(json.dumps(counts(results), indent=2), markup=False)
    write(output, lambda: _document(results, seed))
    raise typer.Exit(1 if any(result.failed for result in results) else 0)


def _document(results: list[HostileResult], seed: int) -> str:
    record = {
        "environment": asdict(current_environment()),
        "seed": seed,
        "counts": counts(results),
        "failures": [asdict(result) for result in results if result.failed],
    }
    return json.dumps(record, indent=2)


def _noted(cases: Iterable[HostileCase], data: dict[str, bytes]) -> Iterable[HostileCase]:
    for case in cases:
        data[case.name] = case.data
        yield case


def _show(result: HostileResult, data: bytes, save: Path | None) -> None:
    if not result.failed:
        return
    what = f"{result.kind} {result.name} {result.outcome} after {result.seconds:.1f} s"
    console.print(f"{what}: {result.problem}", markup=False)
    if save is not None:
        save.mkdir(parents=True, exist_ok=True)
        (save / f"{re.sub(r'[^A-Za-z0-9]+', '_', result.name)[:60]}.onnx").write_bytes(data)


if __name__ == "__main__":
    app()
