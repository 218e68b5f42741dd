"""The store of measurements: what is kept, found again, refused, and what a fork, a lock or a full disk does to it."""

from __future__ import annotations

import dataclasses
import math
import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.attack.children import in_child
from tests.unit.autotune.made import WORKLOAD, identities, measured, workload
from tvm_ext.autotune import database_schema
from tvm_ext.autotune.database import MeasurementDatabase
from tvm_ext.errors import DatabaseError
from tvm_ext.records.measurement import MeasuredWorkload, Measurement, Trial, verdicts_of


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "folder" / "measurements.db"


def test_what_is_added_is_found_by_another(path: Path) -> None:
    added = [measured("a", 5.0, 7.0), measured("b", 4), measured("c", reason="too much shared memory")]
    assert MeasurementDatabase(path).add(added) == 3
    again = MeasurementDatabase(path, read_only=True)
    assert identities(list(again.measurements())) == identities(added)
    assert set(again.trials(WORKLOAD)) == {item.trial for item in added}
    verdicts = again.verdicts(WORKLOAD)
    assert {name: item.time_us for name, item in verdicts.items()} == {"a": 6.0, "b": 4.0, "c": None}
    assert verdicts["c"].reason == "too much shared memory" and verdicts["c"].is_settled
    assert len(again) == 3 and again.problems() == [] and again.damaged == 0


def test_a_measurement_is_kept_once(path: Path) -> None:
    database, item = MeasurementDatabase(path), measured("a", 5.0)
    assert [database.add([item]), database.add([item, measured("a", 5.0)])] == [1, 1]
    assert len(database) == 2  # two trials that came to the same are two


def test_reading_makes_no_file(path: Path) -> None:
    database = MeasurementDatabase(path)
    assert (len(database), database.verdicts(WORKLOAD), list(database.measurements())) == (0, {}, [])
    assert not path.parent.exists()
    with pytest.raises(DatabaseError, match="does not exist"):
        MeasurementDatabase(path, read_only=True).add([measured("a", 1.0)])


@pytest.mark.parametrize(
    "other",
    [
        {"structure": "other"}, {"layout": "row,row"}, {"dtype": "int8"}, {"device": "nvidia-h200"},
        {"instructions": "sm_90a"}, {"threads": 2}, {"versions": ()}, {"kind": "tir"},
    ],
    ids=lambda item: next(iter(item)),
)  # fmt: skip
def test_every_field_of_a_workload_counts(path: Path, other: dict[str, object]) -> None:
    database = MeasurementDatabase(path)
    database.add([measured("a", 5.0)])
    assert not database.verdicts(dataclasses.replace(WORKLOAD, **other))


def test_a_new_configuration_takes_nothing_away(path: Path) -> None:
    database = MeasurementDatabase(path)
    database.add([measured("a", 5.0)])
    database.add([measured("b", 3.0)])
    assert set(database.verdicts(WORKLOAD)) == {"a", "b"}


def test_nothing_is_decided_by_clocks() -> None:
    """A clock that jumped back, or stood still, changes no verdict and loses no trial."""
    trials = [
        Trial(configuration="a", outcome="ok", times_us=(value,), taken_at_s=taken)
        for value, taken in ((5.0, 1e12), (9.0, -4.0), (7.0, 0.0))
    ]
    assert verdicts_of(trials) == verdicts_of(reversed(trials))
    assert verdicts_of(trials)["a"].time_us == 7.0
    still = [Trial(configuration="a", outcome="ok", times_us=(5.0,), taken_at_s=1.0) for _ in range(2)]
    assert len({Measurement(workload=WORKLOAD, trial=item).identity for item in still}) == 2


@pytest.mark.parametrize(
    ("outcomes", "verdict", "settled"),
    [
        (("ok", "wrong"), "wrong", True),
        (("launch_failed", "ok"), "ok", True),
        (("timed_out",), "timed_out", False),
        (("timed_out", "compile_failed"), "compile_failed", True),
    ],
)
def test_verdicts(outcomes: tuple[str, ...], verdict: str, settled: bool) -> None:
    trials = [measured("a", *([5.0] if item == "ok" else []), outcome=item).trial for item in outcomes]
    found = verdicts_of(trials)["a"]
    assert (found.outcome, found.is_settled, found.trials) == (verdict, settled, len(trials))
    assert (found.time_us == 5.0) == (verdict == "ok")


@pytest.mark.parametrize(
    "wrong",
    [
        {"times_us": ()}, {"times_us": (math.nan,)}, {"times_us": (math.inf,)}, {"times_us": (0.0,)},
        {"times_us": (-1.0,)}, {"outcome": "crashed"}, {"taken_at_s": math.nan}, {"configuration": "a\0"},
        {"configuration": "\ud800"}, {"reason": "x" * 5000}, {"times_us": (1.0,) * 10_001},
    ],
    ids=str,
)  # fmt: skip
def test_what_cannot_have_been_measured_is_no_trial(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - every check has a text of its own
        dataclasses.replace(Trial(configuration="a", outcome="ok", times_us=(1.0,)), **wrong)


# --- several at once -------------------------------------------------------------------------------------------------
def test_threads_and_processes_lose_nothing(path: Path) -> None:
    """Eight threads, which begin with a file that is not there, and children of their process."""
    database = MeasurementDatabase(path)
    start = threading.Barrier(8)

    def write(name: int) -> int:
        start.wait()
        return sum(database.add([measured(f"{name}-{i}", 1.0, of=workload(str(i % 3)))]) for i in range(10))

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(write, range(8))) == 80
    assert in_child(lambda: database.add([measured("child", 2.0)])) == 1
    assert in_child(lambda: len(database)) == 81  # through a connection of its own
    assert len(database) == 81 and database.problems() == []
    assert len(database.workloads()) == 4


def test_a_lock_is_waited_for_and_then_named(path: Path) -> None:
    MeasurementDatabase(path).add([measured("a", 1.0)])
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(DatabaseError, match="locked") as caught:
        MeasurementDatabase(path, patience_s=0.05).add([measured("b", 1.0)])
    assert "wait for the other process" in caught.value.remedy
    assert MeasurementDatabase(path, patience_s=0.05).verdicts(WORKLOAD)  # readers do not wait
    other.execute("ROLLBACK")
    assert MeasurementDatabase(path, patience_s=0.05).add([measured("b", 1.0)]) == 1


def test_a_file_that_was_replaced_is_opened_anew(path: Path, tmp_path: Path) -> None:
    database = MeasurementDatabase(path)
    database.add([measured("a", 1.0)])
    path.rename(tmp_path / "aside.db")
    assert len(database) == 0
    database.add([measured("b", 1.0)])
    assert set(database.verdicts(WORKLOAD)) == {"b"}


# --- what goes wrong -------------------------------------------------------------------------------------------------
def test_a_full_disk_keeps_all_or_nothing(path: Path) -> None:
    database = MeasurementDatabase(path)
    database.add([measured("a", 1.0)])
    connection = database._connection()
    assert connection is not None
    pages = connection.execute("PRAGMA page_count").fetchone()[0]
    connection.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(DatabaseError, match="full") as caught:
        database.add([measured(f"b{i}", 1.0, of=workload("x" * 2000 + str(i))) for i in range(20)])
    assert "free some space" in caught.value.remedy
    assert len(database) == 1 and database.problems() == []
    database.close()
    assert database.add([measured("b", 1.0)]) == 1


def test_a_read_only_database_is_read_and_refuses_to_be_written(path: Path) -> None:
    MeasurementDatabase(path).add([measured("a", 1.0)])
    database = MeasurementDatabase(path, read_only=True)
    assert database.verdicts(WORKLOAD)
    with pytest.raises(DatabaseError, match="readonly") as caught:
        database.add([measured("b", 1.0)])
    assert "may write to" in caught.value.remedy


def test_another_programs_database_is_left_alone(path: Path) -> None:
    path.parent.mkdir()
    other = sqlite3.connect(path)
    other.execute("CREATE TABLE books (title TEXT)")
    other.commit()
    other.close()
    before = path.read_bytes()
    for read_only in (True, False):
        with pytest.raises(DatabaseError, match="of another program"):
            len(MeasurementDatabase(path, read_only=read_only))
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "statement",
    [
        "CREATE TRIGGER t AFTER INSERT ON measurement BEGIN DELETE FROM measurement; END",
        "CREATE VIEW v AS SELECT * FROM measurement",
        "CREATE TABLE more (x)",
        "DROP INDEX measurement_of",
    ],
)
def test_tables_that_are_not_ours_are_refused(path: Path, statement: str) -> None:
    MeasurementDatabase(path).add([measured("a", 1.0)])
    with sqlite3.connect(path) as other:
        other.execute(statement)
    with pytest.raises(DatabaseError, match="did not make"):
        MeasurementDatabase(path).add([measured("b", 1.0)])


@pytest.mark.parametrize("content", [b"no database at all, but long enough to be looked at" * 20, b"\0" * 5000])
def test_what_is_no_database_is_named(path: Path, content: bytes) -> None:
    path.parent.mkdir()
    path.write_bytes(content)
    with pytest.raises(DatabaseError, match=str(path)):
        len(MeasurementDatabase(path))
    assert path.read_bytes() == content


def test_an_empty_file_becomes_a_database(path: Path) -> None:
    """As a writer leaves it that was killed before it made the tables."""
    path.parent.mkdir()
    path.touch()
    assert len(MeasurementDatabase(path)) == 0
    assert MeasurementDatabase(path).add([measured("a", 1.0)]) == 1


def test_a_changed_row_is_left_out_and_counted(path: Path) -> None:
    MeasurementDatabase(path).add([measured("a", 5.03125), measured("b", 6.0)])
    with sqlite3.connect(path) as other:
        other.execute("UPDATE measurement SET record = replace(record, '5.03125', '4.03125')")
    database = MeasurementDatabase(path)
    assert set(database.verdicts(WORKLOAD)) == {"b"} and database.damaged == 1
    assert any("1 of 2 rows" in text for text in database.problems())


# --- versions --------------------------------------------------------------------------------------------------------
def test_a_newer_version_is_refused_with_a_remedy(path: Path) -> None:
    MeasurementDatabase(path).add([measured("a", 1.0)])
    with sqlite3.connect(path) as other:
        other.execute(f"PRAGMA user_version = {database_schema.SCHEMA + 1}")
    for read_only in (True, False):
        with pytest.raises(DatabaseError, match=f"of version {database_schema.SCHEMA + 1}") as caught:
            len(MeasurementDatabase(path, read_only=read_only))
        assert "update this one" in caught.value.remedy


NEXT = (*database_schema.TABLES, "CREATE TABLE note (text TEXT)")


def test_an_older_version_is_brought_up_to_date(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = MeasurementDatabase(path)
    old.add([measured("a", 1.0)])
    monkeypatch.setattr(database_schema, "SCHEMA", database_schema.SCHEMA + 1)
    monkeypatch.setattr(database_schema, "TABLES", NEXT)
    with pytest.raises(DatabaseError, match="reads version 2") as caught:
        len(MeasurementDatabase(path))
    assert "export it with the version" in caught.value.remedy
    monkeypatch.setattr(database_schema, "MIGRATIONS", {1: (NEXT[-1],)})
    with pytest.raises(DatabaseError, match="reads version 2"):
        len(MeasurementDatabase(path, read_only=True))  # would have to be written to
    assert MeasurementDatabase(path).verdicts(WORKLOAD)
    assert MeasurementDatabase(path, read_only=True).verdicts(WORKLOAD)


def test_a_migration_that_fails_leaves_the_old_version(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    MeasurementDatabase(path).add([measured("a", 1.0)])
    with monkeypatch.context() as patch:
        patch.setattr(database_schema, "SCHEMA", 2)
        patch.setattr(database_schema, "MIGRATIONS", {1: (NEXT[-1], "DROP TABLE no_such_table")})
        with pytest.raises(DatabaseError, match="no_such_table"):
            len(MeasurementDatabase(path))
    assert len(MeasurementDatabase(path)) == 1


def test_a_workload_is_known_by_its_key() -> None:
    assert WORKLOAD.key == dataclasses.replace(WORKLOAD).key
    assert len({WORKLOAD.key, workload("a").key, workload("b").key}) == 3
    with pytest.raises(ValueError, match="threads"):
        MeasuredWorkload(kind="cutlass", structure="", layout="", dtype="", device="", instructions="", threads=-1)
