"""Random operators, built, run and compared.

    python -m tests.support.random_operators --count 2000 --seed 0 --jobs 2
    python -m tests.support.random_operators --case 417            # one case in this process, with its kernels
    python -m tests.support.random_operators --device nvidia-a100 --device amd-mi50    # GPU kernels, through OpenCL

Exits with 1 where a case failed.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tvm_ext.bench.compare import relative_error
from tvm_ext.support.files import write_atomically

from . import reference, summary
from .check import CaseResult, attempt, build, run_once
from .draw import KINDS, draw_case
from .opencl import in_turn, is_gpu
from .record import OperatorCase
from .workers import run_cases

app = typer.Typer(add_completion=False)
console = Console(width=None if sys.stdout.isatty() else 160)


@app.command()
def main(
    count: Annotated[int, typer.Option(min=1, help="How many cases to draw.")] = 2000,
    seed: Annotated[int, typer.Option(help="The same seed gives the same cases.")] = 0,
    first: Annotated[int, typer.Option(min=0, help="Number of the first case.")] = 0,
    jobs: Annotated[int, typer.Option(min=1, help="Worker processes.")] = 1,
    limit_s: Annotated[float, typer.Option(min=1.0, help="Seconds that one case may take.")] = 120.0,
    kind: Annotated[list[str] | None, typer.Option(help="Only these kinds of operator.")] = None,
    case: Annotated[int | None, typer.Option(min=0, help="Run only this case, here, and show its kernels.")] = None,
    device: Annotated[list[str] | None, typer.Option(help="Rows to build for in turn; a GPU's run in OpenCL.")] = None,
    output: Annotated[Path | None, typer.Option(help="Where to write counts and failures as JSON.")] = None,
) -> None:
    """Draw operators at random, build and run each, and compare it with NumPy in float64."""
    devices = device or []
    if case is not None:
        raise typer.Exit(_run_one(in_turn(draw_case(seed, case), devices)))
    unknown = [name for name in kind or [] if name not in KINDS]
    if unknown:
        raise typer.BadParameter(f"there is no kind {unknown[0]!r}; the kinds are {', '.join(KINDS)}")
    cases = [in_turn(draw_case(seed, index), devices) for index in range(first, first + count)]
    cases = [item for item in cases if not kind or item.kind in kind]
    results = _run_all(cases, jobs, limit_s)
    console.print(summary.table(results))
    if output is not None:
        write_atomically(output, summary.document(results, seed, devices).encode())
        console.print(f"written: {output}")
    raise typer.Exit(0 if all(result.passed for result in results) else 1)


def _run_all(cases: list[OperatorCase], jobs: int, limit_s: float) -> list[CaseResult]:
    by_index = {item.index: item for item in cases}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    results = []
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("operators", total=len(cases))
        for result in run_cases(cases, jobs=jobs, limit_s=limit_s):
            results.append(result)
            progress.advance(task)
            if not result.passed:
                console.print(f"{result.outcome}: {by_index[result.index]}\n  {result.problem}", markup=False)
    return results


def _run_one(case: OperatorCase) -> int:
    """Print the case, what came of it and its kernels; where it is wrong, also whether stock TVM agrees with NumPy."""
    console.print(str(case), markup=False)
    result = attempt(case)
    console.print(f"{result.outcome} {result.problem}", markup=False)
    for item in result.paths:
        console.print(f"  {item.name}: {item.path}: {item.reason}", markup=False)
    console.print(f"relative error {result.error:.2e}, tolerance {result.tolerance:.2e}, {result.seconds:.2f} s")
    if result.outcome == "wrong" and not is_gpu(case.device):
        stock = run_once(build(case, enable_roller=False), case)
        error = relative_error(stock, reference.evaluate(case, case.data(0)))
        console.print(f"stock TVM's relative error: {error:.2e}")
    return 0 if result.passed else 1


if __name__ == "__main__":
    app()
