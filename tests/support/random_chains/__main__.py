"""Random chains of operators, imported from ONNX, built, run and compared.

    python -m tests.support.random_chains --count 5000 --seed 0 --jobs 2 --output counts.json --results results.jsonl
    python -m tests.support.random_chains --case 417            # one chain in this process, with its kernels
    python -m tests.support.random_chains --device nvidia-a100 --device amd-mi50    # GPU kernels, through OpenCL

Exits with 1 where a chain failed. A run with ``--results`` that was stopped goes on where it was.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tvm_ext.support.files import write_atomically

from ..case_workers import run_trials
from ..random_operators.opencl import in_turn
from . import summary
from .check import TRIAL, ChainResult, attempt, run_chain
from .draw import draw_case
from .record import ChainCase

app = typer.Typer(add_completion=False)
console = Console(width=None if sys.stdout.isatty() else 160)


@app.command()
def main(
    count: Annotated[int, typer.Option(min=1, help="How many chains to draw.")] = 1000,
    seed: Annotated[int, typer.Option(help="The same seed gives the same chains.")] = 0,
    first: Annotated[int, typer.Option(min=0, help="Number of the first chain.")] = 0,
    jobs: Annotated[int, typer.Option(min=1, help="Worker processes.")] = 1,
    limit_s: Annotated[float, typer.Option(min=1.0, help="Seconds that one chain may take.")] = 60.0,
    case: Annotated[int | None, typer.Option(min=0, help="Run only this chain, here, and show its kernels.")] = None,
    device: Annotated[list[str] | None, typer.Option(help="Rows to build for in turn; a GPU's run in OpenCL.")] = None,
    output: Annotated[Path | None, typer.Option(help="Where to write counts and failures as JSON.")] = None,
    results: Annotated[
        Path | None, typer.Option(help="Each result as it comes; what is there is not run again.")
    ] = None,
) -> None:
    """Draw chains at random, import, build and run each, and compare it with ONNX Runtime."""
    devices = device or []
    if case is not None:
        raise typer.Exit(_run_one(in_turn(draw_case(seed, case), devices)))
    done = summary.read_results(results) if results is not None else {}
    wanted = range(first, first + count)
    done = {index: result for index, result in done.items() if index in wanted}
    cases = (in_turn(draw_case(seed, index), devices) for index in wanted if index not in done)
    if len(done) < count:
        done |= _run_all(cases, count - len(done), jobs, limit_s, results)
    console.print(summary.table(done))
    for reason, indices in summary.refusals(done).items():
        console.print(f"refused {len(indices)} times, first by chain {indices[0]}: {reason}", markup=False)
    if output is not None:
        write_atomically(output, summary.document(done, seed, devices).encode())
        console.print(f"written: {output}")
    raise typer.Exit(1 if any(result.failed for result in done.values()) else 0)


def _run_all(
    cases: Iterable[ChainCase], count: int, jobs: int, limit_s: float, kept: Path | None
) -> dict[int, ChainResult]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    results = {}
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("chains", total=count)
        for result in run_trials(cases, TRIAL, jobs=jobs, limit_s=limit_s):
            results[result.index] = result
            progress.advance(task)
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
