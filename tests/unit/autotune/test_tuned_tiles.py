"""What builds take from a database, and what a base keeps of one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tvm_ext.analysis.tile_workload import tile_machine
from tvm_ext.autotune.base import make_base
from tvm_ext.autotune.choose import CONFIRMATIONS, tiles_for_build, tuned_tiles
from tvm_ext.autotune.database import MeasurementDatabase
from tvm_ext.autotune.store import MeasurementStore
from tvm_ext.devices.device_db import lookup
from tvm_ext.devices.device_facts import with_unit_count
from tvm_ext.errors import DatabaseError, OptionError
from tvm_ext.options import BuildOptions
from tvm_ext.records.measurement import MeasuredWorkload, Measurement, Trial
from tvm_ext.records.tuned import TuningBudget

CPU = lookup("cpu-epyc-zen5")
KERNEL = replace(tile_machine(CPU), structure="a convolution")


def batches(
    workload: MeasuredWorkload, ratio: float, count: int = CONFIRMATIONS, *, start: int = 0
) -> list[Measurement]:
    """The constructed kernel at 100 us, a candidate beside it, and one that crashed."""
    found = []
    for number in range(start, start + count):
        times = {"constructed": 100.0 + number, "tuned": (100.0 + number) * ratio}
        for place, (name, time) in enumerate(times.items()):
            trial = Trial(
                configuration=name, outcome="ok", times_us=(time, time, 2 * time), origin=f"{number:024x}.{place}"
            )
            found.append(Measurement(workload=workload, trial=trial))
        crashed = Trial(configuration=f"bad {number}", outcome="crashed", origin=f"{number:024x}.9")
        found.append(Measurement(workload=workload, trial=crashed))
    return found


def test_a_build_takes_what_was_proven_on_its_own_machine(tmp_path: Path) -> None:
    store = MeasurementStore(MeasurementDatabase(tmp_path / "own.db"))
    store.add(batches(KERNEL, 0.8))
    tiles = tuned_tiles(store, CPU)
    assert dict(tiles.configurations) == {KERNEL.key: "tuned"}
    assert "20 % faster than the 101 us constructed" in tiles.reasons[KERNEL.key]


@pytest.mark.parametrize(
    "other",
    [
        replace(KERNEL, device="another processor"),
        replace(KERNEL, instructions="x86-64-v3"),
        replace(KERNEL, threads=KERNEL.threads + 1),
        replace(KERNEL, versions=(("apache-tvm", "0.1"),)),
    ],
)
def test_what_was_measured_elsewhere_is_not_taken(other: MeasuredWorkload, tmp_path: Path) -> None:
    store = MeasurementStore(MeasurementDatabase(tmp_path / "own.db"))
    store.add(batches(other, 0.5))
    assert not tuned_tiles(store, CPU).configurations


def test_other_threads_are_another_machine(tmp_path: Path) -> None:
    store = MeasurementStore(MeasurementDatabase(tmp_path / "own.db"))
    store.add(batches(KERNEL, 0.5))
    assert not tuned_tiles(store, with_unit_count(CPU, CPU.unit_count + 2)).configurations


def test_without_a_database_the_models_decide(tmp_path: Path) -> None:
    assert not tiles_for_build(CPU, BuildOptions(database="off")).configurations
    assert not tiles_for_build(CPU, BuildOptions(database=str(tmp_path / "absent.db"))).notes
    assert not (tmp_path / "absent.db").exists()
    assert not tiles_for_build(lookup("nvidia-a100"), BuildOptions()).configurations


def test_a_database_that_cannot_be_read_is_a_note(tmp_path: Path) -> None:
    (tmp_path / "own.db").write_bytes(b"rubbish" * 1000)
    with pytest.warns(RuntimeWarning, match="not a database"):
        tiles = tiles_for_build(CPU, BuildOptions(database=str(tmp_path / "own.db")))
    assert not tiles.configurations
    assert "not a database" in tiles.notes[0]


def test_measurements_wait_for_a_database_that_is_locked(tmp_path: Path) -> None:
    own = MeasurementDatabase(tmp_path / "own.db", patience_s=0.05)
    store = MeasurementStore(own)
    assert store.add(batches(KERNEL, 0.8, 1)) == 3
    with MeasurementDatabase(own.path) as other:
        connection = other._connection()
        assert connection is not None
        connection.execute("BEGIN IMMEDIATE")
        with pytest.warns(RuntimeWarning, match="locked"):
            assert store.add(batches(KERNEL, 0.8, 1, start=1)) == 3
        connection.rollback()
    assert len(own) == 3
    assert len(store.trials(KERNEL)) == 6  # this process knows them already
    assert store.add(batches(KERNEL, 0.8, 1, start=2)) == 3
    assert len(own) == 9
    assert tuned_tiles(store, CPU).configurations


def test_a_file_that_nobody_may_write_to_is_refused_before_it_matters(tmp_path: Path) -> None:
    path = tmp_path / "own.db"
    with MeasurementDatabase(path) as database:
        database.require_writable()
        assert path.exists()
    with pytest.raises(DatabaseError, match="opened for reading"):
        MeasurementDatabase(path, read_only=True).require_writable()
    (tmp_path / "text.db").write_text("no database, but some text")
    with pytest.raises(DatabaseError, match=r"text\.db"):
        MeasurementDatabase(tmp_path / "text.db").require_writable()


# --- bases -----------------------------------------------------------------------------------------------------------
def test_a_base_gives_a_new_user_the_tuned_kernel(tmp_path: Path) -> None:
    small = replace(KERNEL, structure="gains too little")
    with MeasurementDatabase(tmp_path / "own.db") as database:
        database.add([*batches(KERNEL, 0.8, 9), *batches(small, 0.975, 9)])
        made = make_base(database, tmp_path / "cpu.base")
        assert (made.kept, made.left_out) == (1, 1)
        assert made.size_bytes == (tmp_path / "cpu.base").stat().st_size < 2500
        first = (tmp_path / "cpu.base").read_bytes()
        make_base(database, tmp_path / "cpu.base")
        assert (tmp_path / "cpu.base").read_bytes() == first
    store = MeasurementStore(None, [tmp_path / "cpu.base"])
    tiles = tuned_tiles(store, CPU)
    assert dict(tiles.configurations) == {KERNEL.key: "tuned"}
    assert len(store.trials(KERNEL)) == 2 * CONFIRMATIONS


def test_a_base_has_only_what_was_measured_side_by_side(tmp_path: Path) -> None:
    """Trials of no batch, such as another program's, say nothing of the gain, however near theirs is to it."""
    apart = [
        Measurement(workload=KERNEL, trial=Trial(configuration=name, outcome="ok", times_us=(time_us,), origin=""))
        for name, time_us in (("constructed", 100.0), ("tuned", 80.0))
    ]
    with MeasurementDatabase(tmp_path / "own.db") as database:
        database.add([*batches(KERNEL, 0.8, CONFIRMATIONS), *apart])
        make_base(database, tmp_path / "cpu.base")
    store = MeasurementStore(None, [tmp_path / "cpu.base"])
    assert len(store.trials(KERNEL)) == 2 * CONFIRMATIONS
    assert tuned_tiles(store, CPU).configurations


def test_what_was_measured_here_outranks_a_base(tmp_path: Path) -> None:
    with MeasurementDatabase(tmp_path / "theirs.db") as database:
        database.add(batches(KERNEL, 0.8))
        make_base(database, tmp_path / "cpu.base")
    store = MeasurementStore(MeasurementDatabase(tmp_path / "own.db"), [tmp_path / "cpu.base"])
    assert tuned_tiles(store, CPU).configurations
    store.add(batches(KERNEL, 1.1, start=100))
    assert not tuned_tiles(store, CPU).configurations


def test_damaged_bases_are_named_and_left_out(tmp_path: Path) -> None:
    (tmp_path / "cpu.base").write_text('{"schema":1,"workload":{},"trials":7}\n{"schema":1,"trials":[]}\n')
    store = MeasurementStore(None, [tmp_path / "cpu.base"])
    with pytest.warns(RuntimeWarning, match="1 records of the base"):
        assert not tuned_tiles(store, CPU).configurations


def test_a_base_and_its_database_do_not_count_twice(tmp_path: Path) -> None:
    with MeasurementDatabase(tmp_path / "own.db") as database:
        database.add(batches(KERNEL, 0.8, CONFIRMATIONS))
        make_base(database, tmp_path / "cpu.base")
        alone = tuned_tiles(MeasurementStore(database), CPU)
        both = tuned_tiles(MeasurementStore(database, [tmp_path / "cpu.base"]), CPU)
    assert alone.reasons == both.reasons


# --- budgets ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("tune", "budget"),
    [
        (200, TuningBudget(trials=200)),
        ("120s", TuningBudget(seconds=120.0)),
        (" 1.5 min", TuningBudget(seconds=90.0)),
        ("2h", TuningBudget(seconds=7200.0)),
    ],
)
def test_budgets(tune: int | str, budget: TuningBudget) -> None:
    assert TuningBudget.of(tune) == budget


@pytest.mark.parametrize("tune", [0, -1, True, 2.5, "120", "s", "0s", "-3s", "1e9h", "31d", None, "٣s", 10**7, [200]])
def test_what_is_no_budget_is_refused(tune: object) -> None:
    with pytest.raises(OptionError, match="'tune' is"):
        TuningBudget.of(tune)  # type: ignore[arg-type]
