"""Random operators, built, run and compared.

    python -m tests.support.random_operators --count 2000 --seed 0 --jobs 2
    python -m tests.support.random_operators --case 417            # one case in this process, with its kernels
    python -m tests.support.random_operators --device nvidia-a100 --device amd-mi50    # GPU kernels, through OpenCL

Exits with 1 where a case failed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from tvm_ext.bench.compare import relative_error

from ..commands import Count, Devices, First, Jobs, LimitS, OneCase, Output, Precision, Seed, console, watched, write
from . import reference, summary
from .check import CaseResult, attempt, build, run_once
from .draw import KINDS, draw_case
from .opencl import in_turn, is_gpu
from .record import OperatorCase
from .workers import run_cases

app = typer.Typer(add_completion=False)


@app.command()
def main(
    count: Count = 2000,
    seed: Seed = 0,
    first: First = 0,
    jobs: Jobs = 1,
    limit_s: LimitS = 120.0,
    kind: Annotated[list[str] | None, typer.Option(help="Only these kinds of operator.")] = None,
    case: OneCase = None,
    device: Devices = None,
    precision: Precision = "float32",
    output: Output = None,
) -> None:
    """Draw operators at random, build and run each, and compare it with NumPy in float64."""
    devices = device or []
    if case is not None:
        raise typer.Exit(_run_one(replace(in_turn(draw_case(seed, case), devices), precision=precision)))
    unknown = [name for name in kind or [] if name not in KINDS]
    if unknown:
        raise typer.BadParameter(f"there is no kind {unknown[0]!r}; the kinds are {', '.join(KINDS)}")
    cases = [in_turn(draw_case(seed, index), devices) for index in range(first, first + count)]
    cases = [replace(item, precision=precision) for item in cases if not kind or item.kind in kind]
    results = _run_all(cases, jobs, limit_s)
    console.print(summary.table(results))
    write(output, lambda: summary.document(results, seed, devices))
    raise typer.Exit(0 if all(result.passed for result in results) else 1)


def _run_all(cases: list[OperatorCase], jobs: int, limit_s: float) -> list[CaseResult]:
    by_index = {item.index: item for item in cases}
    results = []
    for result in watched(run_cases(cases, jobs=jobs, limit_s=limit_s), len(cases), "operators"):
        results.append(result)
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
