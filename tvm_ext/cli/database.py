"""The commands ``tvm-ext database``: what measurements there are, and moving them between files and machines."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tvm_ext.errors import InputError, OptionError

from .common import AsJson

if TYPE_CHECKING:
    from tvm_ext.autotune.database import MeasurementDatabase
    from tvm_ext.autotune.database_files import Merged
    from tvm_ext.records.measurement import MeasuredWorkload, Measurement

database = typer.Typer(help="Show, merge, export and import measurements.", no_args_is_help=True)

File = Annotated[Path | None, typer.Option("--database", help="The database. Default: the one that builds use.")]
Summary = dict[str, str | int | float | None]
Sources = Annotated[
    list[Path], typer.Argument(metavar="FILE...", help="Databases, JSON lines, or folders of MetaSchedule or of jobs.")
]


@database.command()
def show(
    file: File = None,
    verify: Annotated[bool, typer.Option("--verify", help="Check every page and every row.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show the workloads that were measured, with their best times, and the time that tuning took.

    Exit code 1: rows are damaged.
    """
    from tvm_ext.autotune.database import MeasurementDatabase
    from tvm_ext.autotune.database_files import require_file

    path = _path(file)
    require_file(path)
    with MeasurementDatabase(path, read_only=True) as opened:
        rows = [_summary(opened, key, workload) for key, workload in opened.workloads().items()]
        problems = opened.problems() if verify else []
        damaged = opened.damaged
        count = len(opened)
    if as_json:
        state = {"file": str(path), "measurements": count, "damaged": damaged, "problems": problems, "workloads": rows}
        typer.echo(json.dumps(state))
    else:
        for row in rows:
            typer.echo(_plain(_line(row)))
        typer.echo(
            f"{path}: {count} measurements of {len(rows)} workloads" + (f", {damaged} damaged" if damaged else "")
        )
        for problem in problems:
            typer.echo(_plain(problem), err=True)
    raise typer.Exit(code=int(bool(damaged or problems)))


@database.command("import")
def import_(sources: Sources, file: File = None, as_json: AsJson = False) -> None:
    """Add the measurements of files to the database. Exit code 1: some were refused."""
    _merge(_path(file), sources, as_json)


@database.command()
def merge(
    target: Annotated[Path, typer.Argument(help="The database to add to; it is made if it does not exist.")],
    sources: Sources,
    as_json: AsJson = False,
) -> None:
    """Add the measurements of many machines to one database. Exit code 1: some were refused."""
    _merge(target, sources, as_json)


@database.command()
def export(
    output: Annotated[
        Path, typer.Option("--output", "-o", help="JSON lines to write; with --metaschedule the folder.")
    ],
    file: File = None,
    metaschedule: Annotated[
        bool, typer.Option("--metaschedule", help="Only those of TIR modules, as MetaSchedule's JSONDatabase.")
    ] = False,
    salvage: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A damaged database; its intact rows are exported.")
    ] = None,
) -> None:
    """Write measurements as JSON lines, one a line, or for MetaSchedule."""
    from tvm_ext.autotune import database_files
    from tvm_ext.autotune.database import MeasurementDatabase
    from tvm_ext.autotune.metaschedule_files import write_metaschedule

    if salvage is not None and file is not None:
        raise OptionError("--salvage and --database both name a file.", "give one of them")
    path = salvage or _path(file)
    database_files.require_file(path)
    with MeasurementDatabase(path, read_only=True) as opened:
        found: Iterable[Measurement] = database_files.salvage(path) if salvage else opened.measurements()
        count = write_metaschedule(found, output) if metaschedule else database_files.write_lines(found, output)
    typer.echo(f"{output}: {count} measurements")


@database.command()
def base(
    output: Annotated[Path, typer.Option("--output", "-o", help="The base to write; its name ends in .base.")],
    file: File = None,
) -> None:
    """Make a base: a file that gives tuned kernels to users who have not tuned."""
    from tvm_ext.autotune.base import make_base
    from tvm_ext.autotune.database import MeasurementDatabase
    from tvm_ext.autotune.database_files import require_file

    path = _path(file)
    require_file(path)
    with MeasurementDatabase(path, read_only=True) as opened:
        made = make_base(opened, output)
    typer.echo(f"{output}: {made.kept} kernels in {made.size_bytes} bytes; {made.left_out} were not worth it")


def _merge(target: Path, sources: list[Path], as_json: bool) -> None:
    from tvm_ext.autotune.database import MeasurementDatabase

    with MeasurementDatabase(target) as opened:
        done = list(_merged(opened, sources))
    if as_json:
        typer.echo(json.dumps([_counts(item) for item in done]))
    for item in done:
        if not as_json:
            typer.echo(str(item))
        for refused in item.refused:
            typer.echo(_plain(str(refused)), err=True)
    raise typer.Exit(code=int(any(item.refused for item in done)))


def _merged(target: MeasurementDatabase, sources: list[Path]) -> Iterator[Merged]:
    from tvm_ext.autotune.database_files import merge as merge_file

    for source in sources:
        if source.exists() and target.path.exists() and source.samefile(target.path):
            raise InputError(f"{source} is the database that is added to.", "remove it from the list of files")
        yield merge_file(target, source)


def _counts(merged: Merged) -> dict[str, str | int]:
    return {"source": merged.source, "added": merged.added, "known": merged.known, "refused": len(merged.refused)}


def _path(file: Path | None) -> Path:
    from tvm_ext.options import database_file

    path = file or database_file()
    if path is None:
        raise OptionError("the database is switched off (TVM_EXT_DATABASE).", "name one with --database")
    return path


def _summary(opened: MeasurementDatabase, key: str, workload: MeasuredWorkload) -> Summary:
    from tvm_ext.records.measurement import SESSION_KIND

    named: Summary = {
        "key": key,
        "kind": workload.kind,
        "structure": workload.structure,
        "dtype": workload.dtype,
        "device": workload.device,
        "instructions": workload.instructions,
        "threads": workload.threads,
    }
    if workload.kind == SESSION_KIND:
        spent = [trial.time_us or 0.0 for trial in opened.trials(workload)]
        return {**named, "batches": len(spent), "spent_s": 1e-6 * sum(spent)}
    verdicts = opened.verdicts(workload).values()
    times = [verdict.time_us for verdict in verdicts if verdict.time_us is not None]
    return {
        **named,
        "configurations": len(verdicts),
        "failed": sum(1 for verdict in verdicts if verdict.time_us is None),
        "best_us": min(times, default=None),
    }


_SHOWN = 60  # a choice: characters of a structure in a table of 120 columns


def _line(row: Summary) -> str:
    if "spent_s" in row:
        return f"{str(row['key'])[:12]} tuning on {row['device']}: {row['batches']} batches in {row['spent_s']:.0f} s"
    best = f"{row['best_us']:.1f} us" if row["best_us"] is not None else "no time"
    structure = str(row["structure"])
    shown = structure if len(structure) <= _SHOWN else f"{structure[: _SHOWN - 3]}..."
    return (
        f"{str(row['key'])[:12]} {row['kind']} {row['dtype']} on {row['device']}: {best} of "
        f"{row['configurations']} configurations, {row['failed']} failed; {shown}"
    )


def _plain(text: str) -> str:
    """``text`` without what a terminal would take for commands: records may be anybody's."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)
