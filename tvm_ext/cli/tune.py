"""The command ``tvm-ext tune``: search for faster tiles of a model's kernels, and keep what was measured."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tvm_ext.errors import OptionError

from . import common

if TYPE_CHECKING:
    from tvm_ext.records.tuned import TuningStatus

DEFAULT_TRIALS = 200  # a choice: a search of minutes


def tune(
    model: common.Model,
    trials: Annotated[
        int | None, typer.Option(min=1, help=f"Candidates to try. Default: {DEFAULT_TRIALS}, or as --seconds allows.")
    ] = None,
    seconds: Annotated[float | None, typer.Option(min=1.0, help="How long to search.")] = None,
    tracker: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Measure on servers of a TVM RPC tracker, which checks no passwords."),
    ] = None,
    key: Annotated[str | None, typer.Option(help="Key of those servers at the tracker. Default: cpu, cuda.")] = None,
    jobs: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Measure through a folder that a machine with the device serves."),
    ] = None,
    target: common.Target = "llvm",
    database: Annotated[str, typer.Option(help="Where measurements are kept: a file, or auto.")] = "auto",
    seed: common.Seed = 0,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Also write the tuned library.")] = None,
    report: common.Reports = None,
    shape: common.ShapeOption = None,
    batch: common.Batch = 1,
    as_json: common.AsJson = False,
) -> None:
    """Measure other tiles of a model's kernels. Later builds use the faster ones.

    A run that was stopped goes on where it stood: earlier trials in the database count.
    """
    from tvm_ext import relay
    from tvm_ext.records.serialise import to_json
    from tvm_ext.records.tuned import TuningBudget, TuningRequest

    file = _writable(database)
    if trials is None and seconds is None:
        trials = DEFAULT_TRIALS
    budget = TuningBudget(trials=trials, seconds=seconds)
    with common.progress_bar(2) as steps:
        steps.begin("importing")
        mod, params = common.import_model(model, shape, batch)
    with _live(file) as (watch, said):
        request = TuningRequest(budget=budget, seed=seed, progress=watch, tracker=tracker, key=key, jobs=jobs)
        library = relay.build(mod, target, params=params, tune=request, database=database)
        said.clear()
    if output is not None:
        library.export_library(output)
    for path in report or []:
        library.report.save(path)
    record = library.report.tuning
    assert record is not None
    if as_json:
        typer.echo(to_json(record))
        return
    console = common.output_console()
    for task in record.adopted:
        console.print(f"{task.calls} x {task.name}: {task.reason}", markup=False, highlight=False)
    console.print(f"{record}", markup=False, highlight=False)
    typer.echo(f"kept in {file}" + "".join(f"; wrote {path}" for path in [*filter(None, [output]), *(report or [])]))


def _writable(database: str) -> Path:
    """The file; raises OptionError, DatabaseError where nothing can be kept, before an hour is spent on it."""
    from tvm_ext.autotune.database import MeasurementDatabase
    from tvm_ext.options import database_file

    path = database_file(database)
    if path is None:
        raise OptionError("the database is switched off: nothing would be kept.", "name a file with --database")
    with MeasurementDatabase(path) as opened:
        opened.require_writable()
    return path


@contextlib.contextmanager
def _live(file: Path) -> Iterator[tuple[Callable[[TuningStatus], None], list[str]]]:
    """Best so far, predicted limit and time left on the error stream while it lasts.

    Where it ends by an error or Ctrl-C, it says what was kept.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console, said = Console(stderr=True), list[str]()
    columns = (SpinnerColumn(), BarColumn(bar_width=20), TimeElapsedColumn())
    text = TextColumn("{task.description}", markup=False)
    with Progress(*columns, text, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("the first batch", total=1.0)

        def watch(status: TuningStatus) -> None:
            said[:] = [f"stopped after {status.known} candidates, which are kept in {file}: the same command goes on"]
            progress.update(bar, completed=status.share_done, description=f"{status}, at {status.task}")

        try:
            yield watch, said
        finally:
            for line in said:
                console.print(line, markup=False, highlight=False)
