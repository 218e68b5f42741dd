"""``tvm-ext compare``: two build reports side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tvm_ext.errors import InputError
from tvm_ext.records import serialise

from . import common


def compare(
    first: Annotated[Path, typer.Argument(metavar="A.json", help="A report: compile --report A.json.")],
    second: Annotated[Path, typer.Argument(metavar="B.json", help="The report of another build of the model.")],
    most: Annotated[int, typer.Option(min=0, help="How many of the largest differences to show.")] = 20,
    slower: Annotated[
        float | None, typer.Option(min=0.0, help="Exit code 1 if B takes more than so many percent longer.")
    ] = None,
    as_json: common.AsJson = False,
) -> None:
    """Compare two builds of a model: which nodes became faster or slower, and which kernels changed."""
    from tvm_ext.reports.comparison import compare as compared
    from tvm_ext.reports.comparison import comparison_table
    from tvm_ext.reports.report import BuildReport

    try:
        reports = [BuildReport.from_json(path.read_text(encoding="utf-8")) for path in (first, second)]
        found = compared(reports[0], reports[1], (first.stem, second.stem))
    except (OSError, ValueError) as error:
        raise InputError(
            f"{first} and {second} cannot be compared: {error}.",
            "write both with `tvm-ext compile MODEL --profile --report NAME.json`, of one model",
        ) from error
    if as_json:
        typer.echo(serialise.to_json(found))
    else:
        console = common.output_console()
        console.print(comparison_table(found, most))
        for name, one, other in found.settings:
            console.print(f"{name}: {one} → {other}", markup=False)
        changed = sum(part.changed for part in found.parts)
        console.print(f"{changed} of {len(found.parts)} parts have other kernels")
    whole = (found.first_run_s, found.second_run_s)
    before, after = (found.first_s, found.second_s) if None in whole else whole
    if slower is not None and before and after and after > before * (1 + slower / 100):
        raise typer.Exit(code=1)
