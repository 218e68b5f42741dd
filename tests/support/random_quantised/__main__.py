"""Random quantised operators and chains, imported from ONNX, built, run and compared.

    python -m tests.support.random_quantised --count 1000 --seed 0 --output counts.json
    python -m tests.support.random_quantised --case 417         # one case in this process, with its kernels

Exits with 1 where a case failed.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict

import typer

from tvm_ext.bench.environment import current_environment

from ..case_workers import run_trials
from ..commands import Count, First, Jobs, LimitS, OneCase, Output, Seed, console, watched, write
from .check import TRIAL, Number, QuantisedResult, attempt, run
from .draw import draw_case

app = typer.Typer(add_completion=False)


@app.command()
def main(
    count: Count = 1000,
    seed: Seed = 0,
    first: First = 0,
    jobs: Jobs = 1,
    limit_s: LimitS = 60.0,
    case: OneCase = None,
    output: Output = None,
) -> None:
    """Draw quantised operators at random, build and run each, and compare it with ONNX Runtime in float32."""
    if case is not None:
        raise typer.Exit(_run_one(seed, case))
    numbers = [Number(seed=seed, index=index) for index in range(first, first + count)]
    results = []
    for result in watched(run_trials(numbers, TRIAL, jobs=jobs, limit_s=limit_s), count, "quantised operators"):
        results.append(result)
        if not result.passed:
            console.print(f"case {result.index} {result.outcome}: {result.problem[:1500]}", markup=False)
    record = document(results, seed)
    console.print(json.dumps({key: record[key] for key in ("outcomes", "one step off", "values")}))
    write(output, lambda: json.dumps(record, indent=1) + "\n")
    raise typer.Exit(0 if all(result.passed for result in results) else 1)


def document(results: list[QuantisedResult], seed: int) -> dict[str, object]:
    """The environment, counts of outcomes and of values one step off, and every failure with its case in words."""
    return {
        "what": "random quantised ONNX operators and chains against ONNX Runtime in float32",
        "environment": asdict(current_environment()),
        "seed": seed,
        "outcomes": dict(Counter(result.outcome for result in results)),
        "kinds": dict(sorted(Counter(result.kind for result in results).items())),
        "one step off": sum(result.off for result in results),
        "values": sum(result.values for result in results),
        "failures": [
            {**asdict(result), "case": str(draw_case(seed, result.index)).splitlines()}
            for result in results
            if not result.passed
        ],
    }


def _run_one(seed: int, index: int) -> int:
    """Print the case, what came of it and its kernels."""
    case = draw_case(seed, index)
    console.print(str(case), markup=False)
    result = attempt(Number(seed=seed, index=index))
    console.print(f"{result.outcome} {result.problem}, {result.off} of {result.values} one step off", markup=False)
    if result.passed:
        for item in run(case)[1]:
            console.print(f"  {item.name}: {item.choice.path}: {item.choice.reason}", markup=False)
    return 0 if result.passed else 1


if __name__ == "__main__":
    app()
