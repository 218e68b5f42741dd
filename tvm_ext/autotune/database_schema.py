"""The tables of a database of measurements, their versions, and the way from one version to the next.

A file is used where SQLite's fields for that purpose say that it is ours and of which version, and where it has exactly
that version's tables: a trigger or a view that somebody added would run whenever we write or read.
"""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from tvm_ext.errors import DatabaseError

APPLICATION = 0x54564D45
"""In the file's header: "TVME"."""

SCHEMA = 1
"""Of the tables, and of the records in them."""

MIGRATIONS: Mapping[int, tuple[str, ...]] = {}
"""By version, the statements that make the next one of it; one transaction runs them all."""

TABLES = (
    "CREATE TABLE workload (key TEXT PRIMARY KEY NOT NULL, record TEXT NOT NULL) WITHOUT ROWID",
    "CREATE TABLE measurement (identity TEXT PRIMARY KEY NOT NULL, workload TEXT NOT NULL, record TEXT NOT NULL)",
    "CREATE INDEX measurement_of ON measurement (workload)",
)
"""Of version `SCHEMA`. A ``record`` is a `MeasuredWorkload` or a `Trial` as JSON; ``key``, ``identity`` are digests."""

_RETRY_S = 0.01  # a choice: a writer holds the file for milliseconds


@contextlib.contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """All that is written within it, or nothing; it begins with the right to write, so that it never has to give up."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    finally:
        if connection.in_transaction:
            connection.rollback()


def open_schema(connection: sqlite3.Connection, path: Path, patience_s: float) -> None:
    """Make the tables in a new file, or bring an old one up to date; raises DatabaseError for one that is not ours."""
    if _is_new(connection):
        _keep_a_log(connection, patience_s)
    version = _version(connection)
    if version != SCHEMA or _is_new(connection):
        with transaction(connection):
            if _is_new(connection):  # no other process was faster
                _create(connection)
            else:
                _migrate(connection, path)
    check_schema(connection, path)


def check_schema(connection: sqlite3.Connection, path: Path) -> None:
    """Raise DatabaseError unless the file is empty, or ours, of this version, with our tables and nothing else."""
    if _is_new(connection):
        return
    _check_application(connection, path)
    version = _version(connection)
    if version != SCHEMA:
        raise _wrong_version(path, version, "add to it once, with `tvm-ext database import`: that brings it up to date")
    if _objects(connection) != set(TABLES):
        raise DatabaseError(
            f"{path} has tables, views or triggers that this package did not make.",
            "do not use it: take the file from where it was written, or import a JSON lines export of it",
        )


def _migrate(connection: sqlite3.Connection, path: Path) -> None:
    _check_application(connection, path)
    version = _version(connection)
    if version == SCHEMA:
        return
    while version != SCHEMA:
        if version not in MIGRATIONS:
            raise _wrong_version(path, version, "export it with the version of tvm-ext that wrote it, and import that")
        for statement in MIGRATIONS[version]:
            connection.execute(statement)
        version += 1
    connection.execute(f"PRAGMA user_version = {SCHEMA:d}")


def _wrong_version(path: Path, version: int, remedy: str) -> DatabaseError:
    newer = f"it was written by a newer tvm-ext: update this one, or use another file than {path.name}"
    return DatabaseError(
        f"{path} is a database of version {version}, and this tvm-ext reads version {SCHEMA}.",
        newer if version > SCHEMA else remedy,
    )


def _check_application(connection: sqlite3.Connection, path: Path) -> None:
    if _pragma(connection, "application_id") != APPLICATION:
        raise DatabaseError(f"{path} is a database of another program.", "name another file: this one is left as it is")


def _create(connection: sqlite3.Connection) -> None:
    for statement in TABLES:
        connection.execute(statement)
    connection.execute(f"PRAGMA application_id = {APPLICATION:d}")
    connection.execute(f"PRAGMA user_version = {SCHEMA:d}")


def _keep_a_log(connection: sqlite3.Connection, patience_s: float) -> None:
    """Let readers and writers not wait for each other (WAL), where the file system allows it.

    SQLite does not wait by itself for the lock that this takes.
    """
    end = time.monotonic() + patience_s
    while not _set_log(connection, last=time.monotonic() > end):
        time.sleep(_RETRY_S)


def _set_log(connection: sqlite3.Connection, *, last: bool) -> bool:
    """False where another process holds the lock, unless this is the ``last`` attempt."""
    try:
        connection.execute("PRAGMA journal_mode = WAL")
    except sqlite3.OperationalError as error:
        if last or "locked" not in str(error):
            raise
        return False
    return True


def _is_new(connection: sqlite3.Connection) -> bool:
    return not _objects(connection) and _version(connection) == 0 and _pragma(connection, "application_id") == 0


def _objects(connection: sqlite3.Connection) -> set[str]:
    """The statements that made what the file has; indices of primary keys have none."""
    return {str(row[0]) for row in connection.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL")}


def _version(connection: sqlite3.Connection) -> int:
    return _pragma(connection, "user_version")


def _pragma(connection: sqlite3.Connection, name: str) -> int:
    return int(connection.execute(f"PRAGMA {name}").fetchone()[0])


# --- What SQLite says, as errors that name the file and a remedy. (Its error codes are no part of Python 3.10.) -------
_REMEDIES = (
    (("locked", "busy"), "wait for the other process (`fuser` names it), or use a database of your own"),
    (("readonly", "read-only"), "choose a file that you may write to, or open it for reading"),
    (("full",), "free some space, or move the database to another disk: nothing of this attempt was kept"),
    (
        ("malformed", "corrupt", "disk i/o error", "constraint"),
        "save what is whole with `tvm-ext database export --salvage FILE -o rest.jsonl`, move the file aside, "
        "and bring it back with `tvm-ext database import`",
    ),
    (
        ("not a database",),
        "name another file; if this one was a database, its first page is lost: move it aside, and import an export",
    ),
    (("unable to open",), "check that the file and its folder are there, and that you may write to them"),
)
_OTHERWISE = "please report this, with the file if you can"


@contextlib.contextmanager
def translated(path: Path) -> Iterator[None]:
    """Within it an error of SQLite's, or of the file system, over ``path`` is a DatabaseError."""
    try:
        yield
    except sqlite3.Error as error:
        text = str(error)
        raise DatabaseError(f"the database {path} cannot be used: {text}.", remedy_of(text)) from error
    except DatabaseError:
        raise
    except OSError as error:
        remedy = "check that the folder is there, and that you may write to it"
        raise DatabaseError(f"the database {path} cannot be used: {error.strerror or error}.", remedy) from error


def remedy_of(text: str) -> str:
    """What to do about SQLite's message ``text``."""
    lower = text.lower()
    return next((remedy for words, remedy in _REMEDIES if any(word in lower for word in words)), _OTHERWISE)
