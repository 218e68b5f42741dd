"""Measurements as JSON lines, and merging files of many machines: lines, databases, MetaSchedule's, folders of jobs.

A line is one measurement, so that files can be joined by `cat` and read by `jq`. What is no measurement is refused with
its place and reason, and the rest is taken: a file that was cut off by a kill has lost its last line alone. Merging is
a union: in any order, and any number of times, it comes to the same.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from tvm_ext.errors import DatabaseError, InputError
from tvm_ext.records.measurement import MeasuredWorkload, Measurement, RefusedRecord, Trial
from tvm_ext.records.serialise import from_json
from tvm_ext.support.files import write_atomically

from .batch_files import is_job_folder, measurements_in
from .database import MeasurementDatabase, connect, whole_trial, whole_workload
from .database_schema import translated
from .metaschedule_files import is_metaschedule, read_metaschedule

LINES_SCHEMA = 1
"""Of a line; a newer one is refused line by line."""

TRIALS = "trials"
"""In a line of a base: several trials of one workload, whose text is then there once."""

MOST_LINE_BYTES = 16 << 20  # a choice: above any record; bounds what is read of a damaged file
MOST_TRIALS = 10_000  # a choice: above any search; bounds what one line may hold
_SQLITE = b"SQLite format 3\0"


@dataclass(frozen=True, kw_only=True, slots=True)
class Merged:
    """What became of one file: measurements that were new, that were there, and what was refused."""

    source: str
    added: int
    known: int
    refused: tuple[RefusedRecord, ...]

    def __str__(self) -> str:
        refused = f", {len(self.refused)} refused" if self.refused else ""
        return f"{self.source}: {self.added} new, {self.known} known{refused}"


def merge(target: MeasurementDatabase, source: Path) -> Merged:
    """Add what ``source`` has - a database, JSON lines, a MetaSchedule work folder, jobs that ran - to ``target``, all
    at once.

    Raises DatabaseError, InputError where the file cannot be read at all, and ``target`` is then as it was.
    """
    taken: list[Measurement] = []
    refused: list[RefusedRecord] = []
    for item in read_any(source):
        if isinstance(item, Measurement):
            taken.append(item)
        else:
            refused.append(item)
    added = target.add(taken)
    return Merged(source=str(source), added=added, known=len(taken) - added, refused=tuple(refused))


def read_any(source: Path) -> Iterator[Measurement | RefusedRecord]:
    """The measurements of a file of any of the kinds; raises as `merge`."""
    if is_metaschedule(source):
        yield from read_metaschedule(source)
        return
    if is_job_folder(source):
        yield from measurements_in(source)
        return
    try:
        with source.open("rb") as file:
            is_database = file.read(len(_SQLITE)) == _SQLITE
    except OSError as error:
        raise InputError(f"{source} cannot be read: {error.strerror or error}.", "name a file that exists") from error
    if not is_database:
        yield from read_lines(source)
        return
    with MeasurementDatabase(source, read_only=True) as database:
        yield from database.measurements()
        if database.damaged:
            yield RefusedRecord(place=str(source), reason=f"{database.damaged} rows do not fit their checksum")


# --- JSON lines ------------------------------------------------------------------------------------------------------
def to_line(measurement: Measurement) -> str:
    """One line, without its end."""
    return json.dumps({"schema": LINES_SCHEMA, **asdict(measurement)}, separators=(",", ":"))


def to_base_line(workload: MeasuredWorkload, trials: Iterable[Trial]) -> str:
    """A workload and its trials as one line, without its end."""
    value = {"schema": LINES_SCHEMA, "workload": asdict(workload), TRIALS: [asdict(trial) for trial in trials]}
    return json.dumps(value, separators=(",", ":"))


def from_line(text: str) -> tuple[Measurement, ...]:
    """Raises ValueError for what neither `to_line` nor `to_base_line` wrote."""
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(value, dict):
        raise ValueError("it is no object")
    schema = value.pop("schema", None)
    if schema != LINES_SCHEMA or isinstance(schema, bool):
        raise ValueError(f"its schema is {str(schema)[:20]!r}, and this tvm-ext reads {LINES_SCHEMA}")
    trials = value.pop(TRIALS, None)
    if trials is None:
        return (from_json(Measurement, json.dumps(value)),)
    if not isinstance(trials, list) or len(trials) > MOST_TRIALS:
        raise ValueError(f"its trials are no list of at most {MOST_TRIALS}")
    return tuple(from_json(Measurement, json.dumps({**value, "trial": trial})) for trial in trials)


def write_lines(measurements: Iterable[Measurement], path: Path) -> int:
    """Write ``measurements`` to ``path``, the whole file or none of it; how many. Raises ExportError."""
    lines = [f"{to_line(measurement)}\n" for measurement in measurements]
    write_atomically(path, "".join(lines).encode())
    return len(lines)


def read_lines(path: Path) -> Iterator[Measurement | RefusedRecord]:
    """The lines of ``path``; raises InputError where it cannot be read."""
    try:
        with path.open("rb") as file:
            number = 0
            while line := file.readline(MOST_LINE_BYTES + 1):
                number += 1
                if line.strip():
                    yield from _read_line(line, f"{path}, line {number}")
                while len(line) > MOST_LINE_BYTES and not line.endswith(b"\n"):
                    line = file.readline(MOST_LINE_BYTES + 1)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}.", "name a file that exists") from error


def _read_line(line: bytes, place: str) -> tuple[Measurement | RefusedRecord, ...]:
    if len(line) > MOST_LINE_BYTES:
        return (RefusedRecord(place=place, reason=f"it has more than {MOST_LINE_BYTES} bytes"),)
    try:
        return from_line(line.decode())
    except ValueError as error:
        return (RefusedRecord(place=place, reason=str(error)[:200]),)


# --- damaged databases -----------------------------------------------------------------------------------------------
_MOST_SEARCHED = 1_000_000


def salvage(path: Path) -> Iterator[Measurement]:
    """All measurements of a damaged database that can be read and fit their checksum."""
    with translated(path):
        connection = connect(path, read_only=True, patience_s=1.0)
        try:
            for identity, workload, record in _readable_rows(connection):
                trial = whole_trial(identity, workload, record)
                found = _first(connection, "SELECT record FROM workload WHERE key = ?", str(workload))
                known = whole_workload(workload, found[0]) if found else None
                if trial is not None and known is not None:
                    yield Measurement(workload=known, trial=trial)
        finally:
            connection.close()


def _readable_rows(connection: sqlite3.Connection) -> Iterator[tuple[object, object, object]]:
    """Rows from the front until a page is damaged, from the back until one is, and what is between one by one."""
    columns = "SELECT identity, workload, record, rowid FROM measurement WHERE rowid"
    low, high = 0, (1 << 62)
    while row := _first(connection, f"{columns} > ? ORDER BY rowid LIMIT 1", low):
        low = int(str(row[3]))
        yield row[0], row[1], row[2]
    while row := _first(connection, f"{columns} < ? ORDER BY rowid DESC LIMIT 1", high):
        high = int(str(row[3]))
        if high <= low:
            return
        yield row[0], row[1], row[2]
    for place in range(low + 1, min(high, low + _MOST_SEARCHED)):
        if row := _first(connection, f"{columns} = ?", place):
            yield row[0], row[1], row[2]


def _first(connection: sqlite3.Connection, query: str, parameter: int | str) -> tuple[object, ...] | None:
    """The first row of a query; None where there is none, or it lies on a damaged page."""
    try:
        row: tuple[object, ...] | None = connection.execute(query, (parameter,)).fetchone()
    except sqlite3.DatabaseError:
        return None
    return row


def require_file(path: Path) -> None:
    """Raise DatabaseError unless there is a file ``path``."""
    if not path.is_file():
        raise DatabaseError(f"there is no database {path}.", "name one that `tvm-ext database import` has made")
