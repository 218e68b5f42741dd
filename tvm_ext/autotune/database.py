"""The store of measurements: one SQLite file that many processes write to at once, and that no kill tears.

Every `add` is one transaction, on the disk when it returns. Each row carries its SHA-256, so that damage which SQLite
does not see (it has no checksums) is seen; such rows are left out and counted. Texts in a file are data: they are
parsed as JSON into records and never evaluated, and a file whose tables are not exactly ours is not used.

A connection belongs to one thread of one process. A child that was forked opens its own; its parent's is never closed
there, since that would give up the parent's locks.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

from tvm_ext.errors import DatabaseError
from tvm_ext.records.measurement import (
    MeasuredWorkload,
    Measurement,
    Trial,
    Verdict,
    canonical,
    identity_of,
    verdicts_of,
)
from tvm_ext.records.serialise import from_json

from .database_schema import check_schema, open_schema, transaction, translated

PATIENCE_S = 30.0
"""How long a writer waits for others; each of them is at it for milliseconds."""

_SELECT = "SELECT identity, workload, record FROM measurement"


class MeasurementDatabase:
    """The measurements in the file ``path``, which is made by the first `add`; reading makes nothing.

    Raises DatabaseError, with a remedy, for a file that is no database of ours, of a version that cannot be read,
    locked for longer than ``patience_s``, read-only, damaged, and where the disk is full. What `add` has not answered
    for is then not in it, what it has is.
    """

    def __init__(self, path: str | Path, *, read_only: bool = False, patience_s: float = PATIENCE_S) -> None:
        self.path, self.read_only, self.patience_s = Path(path), read_only, patience_s
        self.damaged = 0
        """Rows that were read and do not fit their checksum, or are no records."""
        self._local = threading.local()

    def add(self, measurements: Iterable[Measurement]) -> int:
        """Keep all of ``measurements``, or none where that fails; how many were new."""
        rows = [(measurement.workload, canonical(measurement.trial)) for measurement in measurements]
        if not rows:
            return 0
        with translated(self.path):
            connection = self._connection(make=True)
            assert connection is not None
            with transaction(connection):
                return _insert(connection, rows)

    def require_writable(self) -> None:
        """Make the file where there is none; raise DatabaseError where nothing can be added to it."""
        with translated(self.path):
            if self.read_only:
                raise DatabaseError(f"{self.path} was opened for reading.", "choose a file that you may write to")
            connection = self._connection(make=True)
            assert connection is not None
            connection.execute("BEGIN IMMEDIATE")
            connection.rollback()

    def trials(self, workload: MeasuredWorkload) -> tuple[Trial, ...]:
        """Of ``workload``, in the order of their identities."""
        query = f"{_SELECT} WHERE workload = ? ORDER BY identity"
        return tuple(trial for _, trial in self._read(query, (workload.key,)))

    def verdicts(self, workload: MeasuredWorkload) -> dict[str, Verdict]:
        """What is known of ``workload``, by configuration."""
        return verdicts_of(self.trials(workload))

    def workloads(self) -> dict[str, MeasuredWorkload]:
        """All that something is known of, by key."""
        found = {}
        with translated(self.path):
            connection = self._connection()
            rows = connection.execute("SELECT key, record FROM workload ORDER BY key") if connection else ()
            for key, record in rows:
                workload = whole_workload(key, record)
                if workload is None:
                    self.damaged += 1
                else:
                    found[key] = workload
        return found

    def measurements(self) -> Iterator[Measurement]:
        """All of them, by identity, as they were at one moment; through a connection of its own."""
        reader = MeasurementDatabase(self.path, read_only=self.read_only, patience_s=self.patience_s)
        with reader, reader._snapshot():
            workloads = reader.workloads()
            for key, trial in reader._read(f"{_SELECT} ORDER BY identity", ()):
                if key in workloads:
                    yield Measurement(workload=workloads[key], trial=trial)
                else:
                    reader.damaged += 1
        self.damaged += reader.damaged

    def __len__(self) -> int:
        with translated(self.path):
            connection = self._connection()
            return 0 if connection is None else int(_one(connection, "SELECT count(*) FROM measurement"))

    def problems(self) -> list[str]:
        """What SQLite's own check and our checksums find wrong with the file; empty where it is whole."""
        before = self.damaged
        try:
            with translated(self.path):
                connection = self._connection()
                rows = connection.execute("PRAGMA integrity_check(20)") if connection else ()
                said = [text for (text,) in rows if text != "ok"]
            count = sum(1 for _ in self.measurements())
        except DatabaseError as error:
            return [str(error)]
        damaged = self.damaged - before
        return said + ([f"{damaged} of {count + damaged} rows do not fit their checksum"] if damaged else [])

    def close(self) -> None:
        """Close this thread's connection; the next call opens another."""
        connection = self._of_this_process()
        if connection is not None:
            connection.close()
        self._local.__dict__.clear()

    def __enter__(self) -> MeasurementDatabase:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- connections -------------------------------------------------------------------------------------------------
    def _of_this_process(self) -> sqlite3.Connection | None:
        """This thread's connection; None where there is none to the file that is called ``path`` now."""
        connection: sqlite3.Connection | None = getattr(self._local, "connection", None)
        if connection is None:
            return None
        if self._local.process != os.getpid():
            _LEFT_TO_PARENT.append(connection)
        elif self._local.file == _file_number(self.path):
            return connection
        else:
            connection.close()
        self._local.__dict__.clear()
        return None

    def _connection(self, *, make: bool = False) -> sqlite3.Connection | None:
        """This thread's; None where there is no file and none is to be made."""
        connection = self._of_this_process()
        if connection is not None:
            return connection
        if not self.path.exists():
            if not make:
                return None
            if self.read_only:
                raise DatabaseError(f"{self.path} does not exist, and was opened for reading.", "name another file")
            self.path.parent.mkdir(parents=True, exist_ok=True)
        connection = connect(self.path, read_only=self.read_only, patience_s=self.patience_s)
        with contextlib.ExitStack() as refused:
            refused.callback(connection.close)
            if self.read_only:
                check_schema(connection, self.path)
            else:
                open_schema(connection, self.path, self.patience_s)
            refused.pop_all()
        self._local.connection, self._local.process = connection, os.getpid()
        self._local.file = _file_number(self.path)
        return connection

    @contextlib.contextmanager
    def _snapshot(self) -> Iterator[None]:
        """Within it all reads of this thread see the same rows."""
        with translated(self.path):
            connection = self._connection()
            if connection is not None:
                connection.execute("BEGIN")
            yield
            if connection is not None:
                connection.rollback()

    def _read(self, query: str, parameters: tuple[str, ...]) -> Iterator[tuple[str, Trial]]:
        """Workload's key and trial of each row that is whole."""
        with translated(self.path):
            connection = self._connection()
            rows = connection.execute(query, parameters) if connection else ()
            for identity, workload, record in rows:
                trial = whole_trial(identity, workload, record)
                if trial is None:
                    self.damaged += 1
                else:
                    yield workload, trial


_LEFT_TO_PARENT: list[sqlite3.Connection] = []
"""Connections of a process that this one was forked from: SQLite forbids to use and to close them here."""


def connect(path: Path, *, read_only: bool, patience_s: float) -> sqlite3.Connection:
    """A connection in which a file's own triggers, views and functions cannot do anything."""
    mode = "ro" if read_only else "rwc"
    # In a folder that nobody may write to there is no room for the index of a log; without a log nothing changes there.
    frozen = "&immutable=1" if read_only and not (os.access(path.parent, os.W_OK) or _log_bytes(path)) else ""
    uri = f"{path.absolute().as_uri()}?mode={mode}{frozen}"
    connection = sqlite3.connect(uri, uri=True, timeout=patience_s, isolation_level=None)
    connection.execute("PRAGMA trusted_schema = OFF")
    connection.execute("PRAGMA cell_size_check = ON")
    connection.execute("PRAGMA synchronous = FULL")  # after a power cut, too, what was answered for is there
    return connection


def _log_bytes(path: Path) -> int:
    """What SQLite's log beside the file holds that may not be in the file yet."""
    try:
        return path.with_name(f"{path.name}-wal").stat().st_size
    except OSError:
        return 0


def _file_number(path: Path) -> tuple[int, int] | None:
    """By which a file is known again when another has taken its name."""
    try:
        state = path.stat()
    except OSError:
        return None
    return state.st_dev, state.st_ino


def _insert(connection: sqlite3.Connection, rows: Iterable[tuple[MeasuredWorkload, str]]) -> int:
    keys: dict[MeasuredWorkload, str] = {}
    new = 0
    for workload, trial in rows:
        if workload not in keys:
            keys[workload] = workload.key
            known = (keys[workload], canonical(workload))
            connection.execute("INSERT OR IGNORE INTO workload (key, record) VALUES (?, ?)", known)
        row = (identity_of(keys[workload], trial), keys[workload], trial)
        new += connection.execute("INSERT OR IGNORE INTO measurement VALUES (?, ?, ?)", row).rowcount
    return new


def whole_trial(identity: object, workload: object, record: object) -> Trial | None:
    """The trial in a row; None where the row is not what was written."""
    if not (isinstance(identity, str) and isinstance(workload, str) and isinstance(record, str)):
        return None
    if identity_of(workload, record) != identity:
        return None
    try:
        return from_json(Trial, record)
    except (ValueError, RecursionError):
        return None


def whole_workload(key: object, record: object) -> MeasuredWorkload | None:
    """The workload in a row; None where the row is not what was written."""
    if not (isinstance(key, str) and isinstance(record, str)):
        return None
    try:
        workload = from_json(MeasuredWorkload, record)
    except (ValueError, RecursionError):
        return None
    return workload if workload.key == key else None


def _one(connection: sqlite3.Connection, query: str) -> int | str:
    value: int | str = connection.execute(query).fetchone()[0]
    return value
