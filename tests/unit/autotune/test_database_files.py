"""Exports, imports and merges: a union in any order, and whatever is no measurement refused with its place."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.autotune.made import WORKLOAD, identities, measured, workload
from tvm_ext._tvm import assert_structural_equal
from tvm_ext.autotune import database_files
from tvm_ext.autotune.database import MeasurementDatabase
from tvm_ext.autotune.database_files import from_line, merge, read_any, salvage, to_line, write_lines
from tvm_ext.autotune.metaschedule_files import RECORDS, WORKLOADS, write_metaschedule
from tvm_ext.errors import DatabaseError, ExportError, InputError
from tvm_ext.records.measurement import Measurement, RefusedRecord

SOME = [measured(name, value, of=workload(of)) for name, value, of in (("a", 5, "x"), ("b", 6.5, "x"), ("a", 7, "y"))]


def taken(path: Path) -> list[Measurement]:
    return [item for item in read_any(path) if isinstance(item, Measurement)]


def refused(path: Path) -> list[str]:
    return [str(item) for item in read_any(path) if isinstance(item, RefusedRecord)]


def test_lines_and_databases_hold_the_same(tmp_path: Path) -> None:
    lines, database = tmp_path / "some.jsonl", MeasurementDatabase(tmp_path / "some.db")
    assert write_lines(SOME, lines) == 3
    assert (database.add(SOME), taken(lines)) == (3, SOME)
    assert identities(taken(database.path)) == identities(SOME)
    assert len(lines.read_text().splitlines()) == 3


@settings(max_examples=60, deadline=None)
@given(
    st.builds(
        measured,
        st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1),
        st.floats(min_value=1e-3, max_value=1e12),
        reason=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=99),
        taken_at_s=st.floats(allow_nan=False, allow_infinity=False),
    )
)
def test_a_line_gives_the_same_measurement(item: Measurement) -> None:
    line = to_line(item)
    assert "\n" not in line
    (again,) = from_line(line)
    assert again == item and again.identity == item.identity


def test_merges_come_to_the_same_in_any_order(tmp_path: Path) -> None:
    files = []
    for index, part in enumerate((SOME[:2], SOME[1:], SOME[::2])):
        files.append(tmp_path / f"{index}.jsonl")
        write_lines(part, files[-1])
    results = []
    for number, order in enumerate(itertools.permutations([*files, files[0]])):
        target = MeasurementDatabase(tmp_path / f"target{number}.db")
        done = [merge(target, path) for path in order]
        assert sum(item.added for item in done) == 3 and sum(item.known for item in done) == 5
        results.append([item.identity for item in target.measurements()])
        target.close()
    assert all(item == results[0] for item in results)


HOSTILE = [
    ("", None),
    ('{"schema":1', "Expecting"),
    ("[1,2]", "no object"),
    ('{"schema":2,"workload":{},"trial":{}}', "its schema is '2'"),
    ('{"schema":true}', "its schema"),
    ("[" * 100_000, "nested too deeply"),
    ('{"schema":1,"a":' + '{"b":' * 20_000, "nested too deeply"),
    ("9" * 10_000, None),
    ('{"schema":1,"workload":{"__class__":"os.system"},"trial":{}}', "unknown fields"),
    (to_line(SOME[0]).replace('"times_us":[5.0]', '"times_us":[NaN]'), "not positive and finite"),
    (to_line(SOME[0]).replace('"times_us":[5.0]', '"times_us":["5"]'), "is no float"),
    (to_line(SOME[0]).replace('"times_us":[5.0]', '"times_us":[1e999]'), "not positive and finite"),
    (to_line(SOME[0]).replace('"configuration":"a"', '"configuration":"\\ud800"'), "surrogates"),
    (to_line(SOME[0]).replace('"configuration":"a"', '"configuration":"\\u0000"'), "NUL"),
    (to_line(SOME[0]).replace('"outcome":"ok"', '"outcome":"__import__(\'os\')"'), "is no"),
    (to_line(SOME[0]).replace('"threads":0', '"threads":-1'), "threads"),
    (to_line(SOME[0]).partition('"trial"')[0], "Expecting"),  # a fixed place: dates are of varying length
]


def test_hostile_lines_are_refused_one_by_one(tmp_path: Path) -> None:
    """Each with its place; the good ones between them are taken, and nothing is evaluated."""
    path = tmp_path / "hostile.jsonl"
    good = to_line(SOME[0])
    path.write_text("\n".join(itertools.chain.from_iterable((bad, good) for bad, _ in HOSTILE)))
    with path.open("ab") as file:
        file.write(b"\n\xff\xfe\n")
    reasons = refused(path)
    assert len(reasons) == len(HOSTILE)  # an empty line is none, and one is no text
    assert len(taken(path)) == len(HOSTILE)
    for bad, reason in HOSTILE:
        if reason is not None:
            number = 1 + 2 * HOSTILE.index((bad, reason))
            (said,) = [text for text in reasons if f", line {number}:" in text]
            assert reason in said


def test_a_line_without_end_is_refused_and_the_next_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database_files, "MOST_LINE_BYTES", 2000)
    path = tmp_path / "long.jsonl"
    path.write_text("x" * 9000 + "\n" + to_line(SOME[0]) + "\n")
    assert taken(path) == [SOME[0]]
    assert refused(path) == [f"{path}, line 1: it has more than 2000 bytes"]


def test_a_file_that_cannot_be_read_changes_nothing(tmp_path: Path) -> None:
    target = MeasurementDatabase(tmp_path / "target.db")
    target.add(SOME)
    (tmp_path / "folder").mkdir()
    for name in ("absent.jsonl", "folder"):
        with pytest.raises(InputError, match=name):
            merge(target, tmp_path / name)
    (tmp_path / "broken.db").write_bytes(b"SQLite format 3\0" + b"x" * 4000)
    with pytest.raises(DatabaseError, match=r"broken\.db"):
        merge(target, tmp_path / "broken.db")
    assert len(target) == 3
    with pytest.raises(ExportError):
        write_lines(SOME, tmp_path / "absent" / "out.jsonl")


# --- damage ----------------------------------------------------------------------------------------------------------
def test_what_damaged_pages_leave_is_saved(tmp_path: Path) -> None:
    """Pages are overwritten; every row on the others comes back, and none that was not written."""
    path, written = tmp_path / "some.db", [measured(f"c{i}" + "x" * 300, 1.0 + i) for i in range(400)]
    with MeasurementDatabase(path) as database:
        database.add(written)
        whole = salvage_count(path)
        connection = database._connection()
        assert connection is not None
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        (page_bytes,) = connection.execute("PRAGMA page_size").fetchone()
    assert whole == 400
    content = bytearray(path.read_bytes())
    for page in (20, 21, 40):
        content[page * page_bytes : (page + 1) * page_bytes] = random.Random(page).randbytes(page_bytes)
    path.write_bytes(content)
    saved = list(salvage(path))
    assert identities(saved) < identities(written) and len(saved) > 300
    with pytest.raises(DatabaseError, match="malformed") as caught:
        list(MeasurementDatabase(path).measurements())
    assert "--salvage" in caught.value.remedy
    assert MeasurementDatabase(path).problems()


def salvage_count(path: Path) -> int:
    return sum(1 for _ in salvage(path))


# --- MetaSchedule ----------------------------------------------------------------------------------------------------
TRACE = [[["GetSBlock", [], ["C", "main"], ["b0"]]], []]
TARGET = {"kind": "llvm", "mcpu": "znver5", "num-cores": 2, "keys": ["cpu"], "tag": ""}


def metaschedule_files(folder: Path) -> Path:
    folder.mkdir()
    workloads = [["123", "AAAA"], ["456", "BBBB"]]
    records = [
        [0, [TRACE, [1e-3, 2e-3], TARGET, [["TENSOR", "float32", [8]]]]],
        [1, [TRACE, [1e10], TARGET, None]],
        [1, [TRACE, [3e-3], TARGET, None]],
        [7, [TRACE, [3e-3], TARGET, None]],
        "rubbish",
    ]
    for name, lines in ((WORKLOADS, workloads), (RECORDS, records)):
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_metaschedules_records_come_and_go(tmp_path: Path) -> None:
    source = metaschedule_files(tmp_path / "work")
    database = MeasurementDatabase(tmp_path / "some.db")
    done = merge(database, source)
    assert (done.added, len(done.refused)) == (3, 2)
    assert "line 4" in str(done.refused[0]) and "line 5" in str(done.refused[1])
    assert (merge(database, source).added, merge(database, source).known) == (0, 3)
    found = {item.device: item for item in database.workloads().values()}["znver5"]
    assert (found.kind, found.threads) == ("tir", 2)
    database.add([measured("a", 5.0, of=WORKLOAD)])  # no TIR: stays out
    assert write_metaschedule(database.measurements(), tmp_path / "out") == 3
    assert identical(taken(tmp_path / "out"), taken(source))
    with pytest.raises(InputError, match="already"):
        write_metaschedule([], tmp_path / "out")


def identical(first: list[Measurement], second: list[Measurement]) -> bool:
    """But for their names."""

    def content(items: list[Measurement]) -> list[tuple[object, ...]]:
        trials = [(item.workload.key, item.trial) for item in items]
        return sorted((key, t.configuration, t.outcome, *(round(us, 6) for us in t.times_us)) for key, t in trials)

    return content(first) == content(second)


@pytest.mark.slow
def test_metaschedule_opens_what_was_exported(tmp_path: Path) -> None:
    """A real record of stock TVM's, taken in, written out and opened by stock TVM again."""
    ms = pytest.importorskip("tvm.s_tir.meta_schedule", reason="MetaSchedule imports packages of the extra bench")
    import tvm
    from tvm import te

    x = te.placeholder((64, 64), name="x")
    mod = tvm.IRModule({"main": te.create_prim_func([x, te.compute((64, 64), lambda i, j: x[i, j] * 2, name="y")])})
    schedule = tvm.s_tir.Schedule(mod)
    schedule.split(schedule.get_loops(schedule.get_sblock("y"))[0], [8, 8])
    (tmp_path / "a").mkdir()
    first = ms.database.JSONDatabase(work_dir=str(tmp_path / "a"))
    target = tvm.target.Target({"kind": "llvm", "num-cores": 2})
    first.commit_tuning_record(
        ms.database.TuningRecord(schedule.trace, first.commit_workload(mod), [1e-3, 3e-3], target, [])
    )
    database = MeasurementDatabase(tmp_path / "some.db")
    assert merge(database, tmp_path / "a").added == 1
    assert write_metaschedule(database.measurements(), tmp_path / "b") == 1
    (record,) = ms.database.JSONDatabase(work_dir=str(tmp_path / "b")).get_all_tuning_records()
    assert [float(item) for item in record.run_secs] == pytest.approx([1e-3, 3e-3])
    assert_structural_equal(record.workload.mod, mod)
    assert str(record.trace) == str(schedule.trace)


@pytest.mark.parametrize("configuration", ["no JSON", "[]", '{"trace":[]}'])
def test_what_only_says_that_it_is_metaschedules_is_not_written(configuration: str, tmp_path: Path) -> None:
    """JSON lines are anybody's: such a record comes in as what it says it is."""
    strange = measured(configuration, 5, of=replace(workload("x"), kind="tir", instructions="{}"))
    with pytest.raises(InputError, match="no trace of MetaSchedule's") as error:
        write_metaschedule([strange], tmp_path / "out")
    assert "JSON lines" in error.value.remedy
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ExportError, match="cannot make"):
        write_metaschedule([], tmp_path / "file" / "out")
