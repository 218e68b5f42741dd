"""Random configurations of CUTLASS's templates, compiled by nvcc, several in one translation unit.

    python -m tests.support.random_templates --count 200 --log build/templates.jsonl --output counts.json
    python -m tests.support.random_templates --case 17       # its source, and what the compiler says of it alone

No GPU is needed. Kernels alone are compiled, to machine code: the few lines of host code behind them are in every unit
that a build compiles. With ``--log`` what was compiled is not compiled again, and a run that was stopped goes on;
``--no-compile`` counts what there is by then.
Exits with 1 where a configuration was refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from tvm_ext.toolchains.cuda_toolchain import CompiledCuda
from tvm_ext.toolchains.cutlass_toolchain import compile_gemm

from ..commands import Count, First, OneCase, Output, Seed, console, watched, write
from . import summary
from .draw import TemplateCase, draw_case
from .units import TemplateResult, compile_unit, unit_cases

app = typer.Typer(add_completion=False)

SECONDS_EACH = 300.0


@app.command()
def main(
    count: Count = 200,
    seed: Seed = 0,
    first: First = 0,
    together: Annotated[int, typer.Option(min=1, help="Configurations of one translation unit.")] = 10,
    match: Annotated[str, typer.Option(help="Only of architectures that begin so, e.g. sm_90a.")] = "",
    log: Annotated[Path | None, typer.Option(help="What came of each, a line as soon as it is known.")] = None,
    case: OneCase = None,
    compile: Annotated[bool, typer.Option(help="Or count what the log has.")] = True,
    output: Output = None,
) -> None:
    """Draw legal configurations of every kind of template, each with an epilogue, and compile them."""
    if case is not None:
        raise typer.Exit(_run_one(draw_case(seed, case)))
    cases = [draw_case(seed, index) for index in range(first, first + count)]
    cases = [item for item in cases if item.architecture.startswith(match)]
    found = _logged(log, again=compile)
    units = unit_cases([item for item in cases if item.key not in found], together) if compile else []
    for result in watched(_results(units), sum(map(len, units)), "templates"):
        found[result.key] = result
        _keep(log, result)
        if not result.compiled:
            console.print(f"refused: {_named(cases, result.key)}\n  {result.problem[-2000:]}", markup=False)
    console.print(summary.table(cases, found))
    write(output, lambda: summary.document(cases, found, seed))
    raise typer.Exit(0 if all(item.key not in found or found[item.key].compiled for item in cases) else 1)


def _compile(text: str, architecture: str, count: int) -> CompiledCuda:
    return compile_gemm(text, architecture, time_limit_s=SECONDS_EACH * (count + 1), output="fatbin")


def _results(units: Sequence[Sequence[TemplateCase]]) -> Iterator[TemplateResult]:
    for unit in units:
        yield from compile_unit(unit, _compile)


def _named(cases: Sequence[TemplateCase], key: str) -> str:
    return ", ".join(f"case {item.index}, {item.architecture} {item.template}" for item in cases if item.key == key)


def _logged(log: Path | None, *, again: bool = True) -> dict[str, TemplateResult]:
    """What a run before this one found; ``again``: but for what was refused, which is tried again."""
    if log is None or not log.is_file():
        return {}
    results = [TemplateResult(**json.loads(line)) for line in log.read_text().splitlines()]
    return {item.key: item for item in results if item.compiled or not again}


def _keep(log: Path | None, result: TemplateResult) -> None:
    if log is not None:
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a") as file:
            file.write(json.dumps(asdict(result)) + "\n")


def _run_one(case: TemplateCase) -> int:
    console.print(case.source, markup=False, highlight=False)
    console.print(
        f"case {case.index}, {case.kind}, {case.architecture}, {case.template}: {case.epilogue}", markup=False
    )
    (result,) = compile_unit([case], _compile)
    console.print(str(result), markup=False)
    return 0 if result.compiled else 1


if __name__ == "__main__":
    app()
