"""Writers of a database of measurements are killed at random moments: what `add` answered for is there, and whole."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.attack.children import wait
from tests.unit.autotune.made import measured, workload
from tvm_ext.autotune.database import MeasurementDatabase

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")

WRITERS = 4
LONGEST_S = 0.15
_IDENTITY = 64


def _write_for_ever(path: Path, name: str, answer: int) -> None:
    """Add batches of 1 to 6, and tell the identities of each once `add` has answered."""
    database, draw = MeasurementDatabase(path), random.Random(name)
    for number in range(1_000_000):
        size = draw.randint(1, 6)
        batch = [
            measured(f"{name}/{number}/{size}/{place}", 1.0 + place, of=workload(f"w{draw.randint(0, 9)}"))
            for place in range(size)
        ]
        assert database.add(batch) == size
        os.write(answer, "".join(item.identity for item in batch).encode())  # less than a pipe tears


def _writer(path: Path, name: str, answer: int) -> int:
    child = os.fork()
    if child == 0:
        try:
            _write_for_ever(path, name, answer)
        finally:
            os._exit(1)
    return child


def _killed_writers(path: Path, round_name: str, delay_s: float) -> set[str]:
    """Identities of what `WRITERS` processes had an answer for when they were killed."""
    reader, writer = os.pipe()
    children = [_writer(path, f"{round_name}.{index}", writer) for index in range(WRITERS)]
    os.close(writer)
    time.sleep(delay_s)
    for child in children:
        os.kill(child, signal.SIGKILL)
    for child in children:
        status = wait(child)
        assert status is not None and os.WTERMSIG(status) == signal.SIGKILL, "a writer failed by itself"
    with os.fdopen(reader, "rb") as file:
        text = file.read().decode()
    assert len(text) % _IDENTITY == 0
    return {text[place : place + _IDENTITY] for place in range(0, len(text), _IDENTITY)}


def _check(path: Path, answered: set[str]) -> int:
    database = MeasurementDatabase(path)
    found = list(database.measurements())
    assert answered <= {item.identity for item in found}, "a measurement that was answered for is lost"
    assert database.problems() == [] and database.damaged == 0
    batches = Counter(item.trial.configuration.rsplit("/", 1)[0] for item in found)
    torn = {name: count for name, count in batches.items() if count != int(name.split("/")[2])}
    assert torn == {}, "a part of a batch is there"
    database.close()
    return len(found)


@pytest.mark.parametrize(
    "moments", [4, pytest.param(50, marks=[pytest.mark.slow, pytest.mark.timeout(900)])], ids=lambda n: f"{n} moments"
)
def test_killed_writers_lose_and_tear_nothing(moments: int, tmp_path: Path) -> None:
    """Every second round goes on with the file of the round before, else a new one is killed while it is made."""
    draw, answered, path, kept = random.Random(moments), set[str](), tmp_path / "0.db", 0
    for moment in range(moments):
        if moment % 2 == 0:
            path, answered = tmp_path / f"{moment}.db", set()
        answered |= _killed_writers(path, str(moment), draw.uniform(0.0, LONGEST_S))
        kept += _check(path, answered)
    assert kept > 0
    print(f"{moments} kills of {WRITERS} writers, {kept} measurements looked at")


@pytest.mark.parametrize("moments", [2, pytest.param(50, marks=pytest.mark.slow)], ids=lambda n: f"{n} moments")
def test_a_killed_merge_is_all_or_nothing(moments: int, tmp_path: Path) -> None:
    draw = random.Random(moments)
    batch = [measured(f"c{index}", 1.0, of=workload(str(index % 50))) for index in range(3000)]
    for moment in range(moments):
        path = tmp_path / f"{moment}.db"
        MeasurementDatabase(path).add([measured("first", 1.0)])
        child = os.fork()
        if child == 0:
            try:
                MeasurementDatabase(path).add(batch)
            finally:
                os._exit(0)
        time.sleep(draw.uniform(0.0, 0.2))
        os.kill(child, signal.SIGKILL)
        assert wait(child) is not None
        assert len(MeasurementDatabase(path)) in (1, 3001)
        assert MeasurementDatabase(path).problems() == []


def test_a_process_that_dies_with_a_lock_blocks_nobody(tmp_path: Path) -> None:
    path = tmp_path / "some.db"
    MeasurementDatabase(path).add([measured("a", 1.0)])
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        connection = sqlite3.connect(path, isolation_level=None)
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("DELETE FROM measurement")
        os.write(writer, b"locked")
        time.sleep(60)
        os._exit(1)
    assert os.read(reader, 6) == b"locked"
    os.kill(child, signal.SIGKILL)
    assert wait(child) is not None
    assert MeasurementDatabase(path, patience_s=1.0).add([measured("b", 1.0)]) == 1
    assert len(MeasurementDatabase(path)) == 2
    os.close(reader)
    os.close(writer)
