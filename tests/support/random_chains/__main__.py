"""Random chains of operators, imported from ONNX, built, run and compared.

    python -m tests.support.random_chains --count 5000 --seed 0 --jobs 2 --output counts.json --results results.jsonl
    python -m tests.support.random_chains --case 417            # one chain in this process, with its kernels
    python -m tests.support.random_chains --device nvidia-a100 --device amd-mi50    # GPU kernels, through OpenCL

Exits with 1 where a chain failed. A run with ``--results`` that was stopped goes on where it was.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from ..case_workers import run_trials
from ..commands import Count, Devices, First, Jobs, LimitS, OneCase, Output, Precision, Seed, console, watched, write
from ..random_operators.opencl import in_turn
from . import summary
from .check import TRIAL, ChainResult, attempt, run_chain
from .draw import draw_case
from .record import ChainCase

app = typer.Typer(add_completion=False)


@app.command()
def main(
    count: Count = 1000,
    seed: Seed = 0,
    first: First = 0,
    jobs: Jobs = 1,
    limit_s: LimitS = 60.0,
    case: OneCase = None,
    device: Devices = None,
    precision: Precision = "float32",
    output: Output = None,
    results: Annotated[
        Path | None, typer.Option(help="Each result as it comes; what is there is not run again.")
    ] = None,
) -> None:
    """Draw chains at random, import, build and run each, and compare it with ONNX Runtime."""
    devices = device or []
    if case is not None:
        raise typer.Exit(_run_one(replace(in_turn(draw_case(seed, case), devices), precision=precision)))
    done = summary.read_results(results) if results is not None else {}
    wanted = range(first, first + count)
    done = {index: result for index, result in done.items() if index in wanted}
    drawn = (in_turn(draw_case(seed, index), devices) for index in wanted if index not in done)
    cases = (replace(item, precision=precision) for item in drawn)
    if len(done) < count:
        done |= _run_all(cases, count - len(done), jobs, limit_s, results)
    console.print(summary.table(done))
    for reason, indices in summary.refusals(done).items():
        console.print(f"refused {len(indices)} times, first by chain {indices[0]}: {reason}", markup=False)
    write(output, lambda: summary.document(done, seed, devices))
    raise typer.Exit(1 if any(result.failed for result in done.values()) else 0)


def _run_all(
    cases: Iterable[ChainCase], count: int, jobs: int, limit_s: float, kept: Path | None
) -> dict[int, ChainResult]:
    results = {}
    for result in watched(run_trials(cases, TRIAL, jobs=jobs, limit_s=limit_s), count, "chains"):
        results[result.index] = result
        if kept is not None:
            summary.append_result(kept, result)
        if result.failed:
            console.print(f"chain {result.index} {result.outcome}: {result.problem}", markup=False)
    return results


def _run_one(case: ChainCase) -> int:
    """Print the chain, what came of it and its kernels."""
    console.print(str(case), markup=False)
    result = attempt(case)
    console.print(f"{result.outcome} {result.problem} ({result.seconds:.2f} s)", markup=False)
    if result.outcome == "passed":
        for item in run_chain(case):
            console.print(f"  {item.name}: {item.choice.path}: {item.choice.reason}", markup=False)
    return 1 if result.failed else 0


if __name__ == "__main__":
    app()
