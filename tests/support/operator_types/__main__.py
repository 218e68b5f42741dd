"""Each ONNX operator with each type that its schema permits, imported, built, run and compared.

    python -m tests.support.operator_types --jobs 2 --output counts.json --log results.jsonl
    python -m tests.support.operator_types --match '^(Sign|Shrink) '      # some cases, by their names
    python -m tests.support.operator_types --drawn 2000 --seed 0     # nodes drawn at random, with every attribute

Exits with 1 where a case was neither right nor refused by an error of ours.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from tvm_ext.bench.environment import current_environment

from ..case_workers import run_trials
from ..commands import First, Jobs, LimitS, Output, Seed, console, write
from .cases import all_cases, empty_cases
from .check import TRIAL
from .draw import KINDS, draw_case
from .record import TypeCase, TypeResult

app = typer.Typer(add_completion=False)


@app.command()
def main(
    match: Annotated[str, typer.Option(help="A regular expression that the cases' names contain.")] = "",
    empty: Annotated[bool, typer.Option(help="Axes of 0 elements in place of other types.")] = False,
    drawn: Annotated[int, typer.Option(help="How many nodes to draw at random instead.")] = 0,
    kind: Annotated[list[str] | None, typer.Option(help=f"Only these of what is drawn: {', '.join(KINDS)}.")] = None,
    seed: Seed = 0,
    first: First = 0,
    jobs: Jobs = 1,
    limit_s: LimitS = 60.0,
    refusals: Annotated[bool, typer.Option(help="Print refusals too.")] = False,
    output: Output = None,
    log: Annotated[Path | None, typer.Option(help="A file to append each result to as it comes.")] = None,
) -> None:
    """Try every operator with every type, and compare with ONNX Runtime or ONNX's reference."""
    results = []
    cases = [
        case
        for case in (_drawn(seed, first, drawn, kind) if drawn else empty_cases() if empty else all_cases())
        if re.search(match, case.name)
    ]
    for result in run_trials(cases, TRIAL, jobs=jobs, limit_s=limit_s):
        results.append(result)
        if log is not None:
            with log.open("a") as file:
                file.write(json.dumps(asdict(result)) + "\n")
        if result.failed or (refusals and result.outcome == "refused"):
            console.print(f"{result.name}: {result.outcome}: {result.problem}", markup=False)
    counts = Counter(result.outcome for result in results)
    console.print(f"{len(results)} cases: {dict(sorted(counts.items()))}", markup=False)
    write(output, lambda: _document(results))
    raise typer.Exit(1 if any(result.failed for result in results) else 0)


def _drawn(seed: int, first: int, count: int, kinds: list[str] | None) -> Iterator[TypeCase]:
    """``count`` numbers, of which ``kinds`` keeps some."""
    for index in range(first, first + count):
        if not kinds or list(KINDS)[index % len(KINDS)] in kinds:
            yield draw_case(seed, index)


def _document(results: list[TypeResult]) -> str:
    record = {
        "what": "each ONNX operator with each type that its schema permits",
        "environment": asdict(current_environment()),
        "cases": len(results),
        "outcomes": dict(sorted(Counter(result.outcome for result in results).items())),
        "refused": {result.name: result.problem.splitlines()[0] for result in results if result.outcome == "refused"},
        "failures": [asdict(result) for result in results if result.failed],
    }
    return json.dumps(record, indent=1) + "\n"


if __name__ == "__main__":
    app()
