"""What a build consults: bases first, its own database over them, and notes in place of errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.autotune.made import WORKLOAD, measured
from tvm_ext.analysis.tile_workload import KERNELS
from tvm_ext.autotune import store as store_module
from tvm_ext.autotune.base import WORTH
from tvm_ext.autotune.choose import choose_tuned
from tvm_ext.autotune.database import MeasurementDatabase
from tvm_ext.autotune.database_files import read_any, write_lines
from tvm_ext.autotune.standings import standings_of
from tvm_ext.autotune.store import SHIPPED, MeasurementStore
from tvm_ext.options import BuildOptions


def base(path: Path, *times_us: float, **fields: str) -> Path:
    write_lines([measured(name, value, **fields) for name, value in zip("abc", times_us, strict=False)], path)
    return path


def times(store: MeasurementStore) -> dict[str, float | None]:
    return {name: item.time_us for name, item in store.verdicts(WORKLOAD).items()}


def test_own_measurements_outrank_bases_and_the_first_base_the_next(tmp_path: Path) -> None:
    bases = [base(tmp_path / "one.jsonl", 10, 20), base(tmp_path / "two.jsonl", 11, 21, 31)]
    own = MeasurementDatabase(tmp_path / "own.db")
    store = MeasurementStore(own, bases)
    assert times(store) == {"a": 10, "b": 20, "c": 31}
    assert not own.path.exists()  # a base answers without one
    assert store.add([measured("b", 5)]) == 1
    assert times(store) == {"a": 10, "b": 5, "c": 31}


def test_a_base_is_a_database_too_and_is_not_written_to(tmp_path: Path) -> None:
    with MeasurementDatabase(tmp_path / "base.db") as made:
        made.add([measured("a", 3)])
    before = (tmp_path / "base.db").read_bytes()
    store = MeasurementStore(MeasurementDatabase(tmp_path / "own.db"), [tmp_path / "base.db"])
    store.add([measured("b", 4)])
    assert times(store) == {"a": 3, "b": 4}
    assert (tmp_path / "base.db").read_bytes() == before


def test_a_base_is_read_again_only_where_it_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, read = base(tmp_path / "base.jsonl", 10), []
    monkeypatch.setattr(store_module, "read_any", lambda source: read.append(source) or read_any(source))
    assert [times(MeasurementStore(None, [path])) for _ in range(3)] == [{"a": 10}] * 3
    base(path, 10, 20)
    assert times(MeasurementStore(None, [path])) == {"a": 10, "b": 20}
    assert len(read) == 2


def test_what_is_wrong_is_a_note(tmp_path: Path) -> None:
    (tmp_path / "own.db").write_bytes(b"rubbish" * 1000)
    (tmp_path / "base.jsonl").write_text("rubbish\n")
    store = MeasurementStore(
        MeasurementDatabase(tmp_path / "own.db"), [tmp_path / "base.jsonl", tmp_path / "absent.jsonl"]
    )
    with pytest.warns(RuntimeWarning) as caught:
        assert times(store) == {} and store.add([measured("a", 1)]) == 1
    assert times(store) == {"a": 1}  # what was measured counts for this process
    assert len(caught) == len(store.notes) == 3
    assert "not a database" in store.notes[str(tmp_path / "own.db")]
    assert "1 records of the base" in store.notes[str(tmp_path / "base.jsonl")]


def test_without_a_database_measurements_live_as_long_as_the_store() -> None:
    store = MeasurementStore(None)
    store.add([measured("a", 3), measured("a", 5), measured("b")])
    assert times(store) == {"a": 4, "b": None}
    assert times(MeasurementStore(None)) == {}


def test_options_name_the_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TVM_EXT_CACHE_DIR", str(tmp_path))
    for setting, environment, expected in (
        ("auto", "", tmp_path / "measurements.db"),
        ("auto", str(tmp_path / "x.db"), tmp_path / "x.db"),
        (str(tmp_path / "y.db"), "off", tmp_path / "y.db"),
    ):
        monkeypatch.setenv("TVM_EXT_DATABASE", environment)
        own = MeasurementStore.for_build(BuildOptions(database=setting)).own
        assert own is not None and own.path == expected
    for setting in ("off", "auto"):
        monkeypatch.setenv("TVM_EXT_DATABASE", "off")
        assert MeasurementStore.for_build(BuildOptions(database=setting)).own is None


@pytest.mark.parametrize("name", ["\0", "x" * 300, "~no_such_user/x.db", ".", "pyproject.toml/x.db"])
def test_a_name_that_no_file_can_have_is_a_note(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pyproject.toml").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.warns(RuntimeWarning, match="no database of measurements"):
        store = MeasurementStore.for_build(BuildOptions(database=name))
    assert store.own is None and times(store) == {}


@pytest.mark.parametrize("path", sorted(SHIPPED.glob("*.base")), ids=lambda path: path.stem)
def test_every_kernel_of_a_shipped_base_is_one_that_a_build_takes(path: Path) -> None:
    store = MeasurementStore(None, [path])
    workloads = store.workloads(KERNELS)
    chosen = [choose_tuned(standings_of(store.trials(workload))) for workload in workloads.values()]
    assert chosen
    assert all(choice.ratio is not None and choice.ratio <= 1 - WORTH for choice in chosen)
    assert not store.notes  # nothing was refused
