"""Each ONNX operator with each type that its schema permits, imported, built, run and compared.

    python -m tests.support.operator_types --jobs 2 --output counts.json --log results.jsonl
    python -m tests.support.operator_types --match '^(Sign|Shrink) '      # some cases, by their names

Exits with 1 where a case was neither right nor refused by an error of ours.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from tvm_ext.bench.environment import current_environment

from ..case_workers import run_trials
from ..commands import Jobs, LimitS, Output, console, write
from .cases import all_cases, empty_cases
from .check import TRIAL
from .record import TypeResult

app = typer.Typer(add_completion=False)


@app.command()
def main(
    match: Annotated[str, typer.Option(help="A regular expression that the cases' names contain.")] = "",
    empty: Annotated[bool, typer.Option(help="Axes of 0 elements in place of other types.")] = False,
    jobs: Jobs = 1,
    limit_s: LimitS = 60.0,
    refusals: Annotated[bool, typer.Option(help="Print refusals too.")] = False,
    output: Output = None,
    log: Annotated[Path | None, typer.Option(help="A file to append each result to as it comes.")] = None,
) -> None:
    """Try every operator with every type, and compare with ONNX Runtime or ONNX's reference."""
    results = []
    cases = [case for case in (empty_cases() if empty else all_cases()) if re.search(match, case.name)]
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
