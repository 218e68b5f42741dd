"""``tvm-ext database``: what its commands print, write, and say of bad input."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.autotune.made import WORKLOAD, measured, workload
from tvm_ext.autotune.database import MeasurementDatabase
from tvm_ext.autotune.database_files import write_lines
from tvm_ext.cli.app import main
from tvm_ext.records.measurement import SESSION_KIND

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Command:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TVM_EXT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("TVM_EXT_DATABASE")

    def call(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stop:
            main(["database", *map(str, arguments)])
        captured = capsys.readouterr()
        return int(stop.value.code or 0), captured.out, captured.err

    return call


def test_lines_go_into_the_default_database_and_out_again(command: Command, tmp_path: Path) -> None:
    write_lines([measured("a", 5.0), measured("b", 4.0), measured("c")], Path("some.jsonl"))
    assert command("import", "some.jsonl") == (0, "some.jsonl: 3 new, 0 known\n", "")
    assert command("import", "some.jsonl")[1] == "some.jsonl: 0 new, 3 known\n"
    code, out, _ = command("show")
    assert code == 0
    assert "4.0 us of 3 configurations, 1 failed" in out and "3 measurements of 1 workloads" in out
    assert command("export", "-o", "out.jsonl")[1] == "out.jsonl: 3 measurements\n"
    assert sorted(Path("out.jsonl").read_text().splitlines()) == sorted(Path("some.jsonl").read_text().splitlines())
    found = json.loads(command("show", "--json", "--verify")[1])
    assert (found["measurements"], found["problems"], found["workloads"][0]["best_us"]) == (3, [], 4.0)
    assert found["file"] == str(tmp_path / "cache" / "measurements.db")


def test_what_tuning_took_is_no_best_time(command: Command) -> None:
    session = replace(WORKLOAD, kind=SESSION_KIND, structure="a digest")
    write_lines([measured("batch", 4e6, of=session), measured("batch", 3e6, of=session), measured("a", 5.0)], Path("x"))
    command("import", "x", "--database", "own.db")
    out = command("show", "--database", "own.db")[1]
    assert "tuning on nvidia-a100: 2 batches in 7 s\n" in out
    assert out.count("5.0 us of 1 configurations") == 1 and "3500000" not in out
    rows = json.loads(command("show", "--database", "own.db", "--json")[1])["workloads"]
    assert sorted(row.get("spent_s", 0) for row in rows) == [0, 7.0]
    assert ["best_us" in row for row in sorted(rows, key=lambda row: row.get("spent_s", 0))] == [True, False]


def test_files_of_many_machines_are_merged(command: Command) -> None:
    write_lines([measured("a", 5.0)], Path("one.jsonl"))
    MeasurementDatabase("two.db").add([measured("b", 5.0, of=workload("other"))])
    Path("three.jsonl").write_text("rubbish\n")
    code, out, error = command("merge", "all.db", "one.jsonl", "two.db", "three.jsonl", "--json")
    assert code == 1
    assert [item["added"] for item in json.loads(out)] == [1, 1, 0]
    assert error.startswith("three.jsonl, line 1: ")
    assert len(MeasurementDatabase("all.db")) == 2


def test_a_damaged_database_shows_it_and_is_salvaged(command: Command) -> None:
    import sqlite3

    MeasurementDatabase("some.db").add([measured("a", 5.0), measured("b", 4.0)])
    with sqlite3.connect("some.db") as other:
        other.execute("UPDATE measurement SET record = replace(record, '5.0', '1.0')")
    code, out, error = command("show", "--database", "some.db", "--verify")
    assert code == 1 and "damaged" in out and "do not fit their checksum" in error
    assert command("export", "--salvage", "some.db", "-o", "rest.jsonl")[1] == "rest.jsonl: 1 measurements\n"


def test_a_hostile_record_sends_the_terminal_no_commands(command: Command) -> None:
    write_lines([measured("\x1b[2J", 5.0, of=workload("\x1b]0;title\x07[red]"))], Path("some.jsonl"))
    command("import", "some.jsonl")
    out = command("show")[1]
    assert "\x1b" not in out and "[red]" in out


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("show",), "there is no database"),
        (("show", "--database", "absent.db"), "there is no database absent.db"),
        (("import", "absent.jsonl"), "absent.jsonl cannot be read"),
        (("merge", "own.db", "own.db"), "own.db is the database that is added to"),
        (("export", "--salvage", "own.db", "--database", "own.db", "-o", "x"), "both name a file"),
        (("export", "--database", "own.db", "-o", "absent/x.jsonl"), "cannot write into absent"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(command: Command, arguments: tuple[str, ...], problem: str) -> None:
    MeasurementDatabase("own.db").add([measured("a", 5.0, of=WORKLOAD)])
    code, out, error = command(*arguments)
    assert (code, out) == (2, "")
    assert problem in error and "remedy: " in error


def test_a_database_that_is_switched_off(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TVM_EXT_DATABASE", "off")
    assert "switched off" in command("show")[2]
