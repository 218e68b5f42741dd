"""Four tuning runs write to one database and are killed again and again: nothing is lost, torn or measured twice."""

from __future__ import annotations

import multiprocessing
import random
import time
from collections import Counter
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest

from tests.unit.autotune import tuning_writer
from tvm_ext.autotune.database import MeasurementDatabase

WRITERS, KILLS, TRIALS = 4, 50, 220


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_kills_of_four_writers_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "measurements.db"
    logs = [tmp_path / f"answered{number}" for number in range(WRITERS)]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([tuning_writer.__name__])

    def start(number: int) -> ForkServerProcess:
        process = context.Process(target=tuning_writer.main, args=(str(path), str(logs[number]), number, TRIALS))
        process.start()
        return process

    for log in logs:
        log.touch()
    rng = random.Random(0)
    running = [start(number) for number in range(WRITERS)]
    killed = 0
    while killed < KILLS:
        alive = [number for number in range(WRITERS) if running[number].is_alive()]
        assert alive, f"all runs have ended after {killed} kills"
        number = rng.choice(alive)
        answered = logs[number].stat().st_size
        while running[number].is_alive() and logs[number].stat().st_size == answered:
            time.sleep(0.005)  # so that each kill is of a run that gets on
        time.sleep(rng.uniform(0.0, 0.3))
        if running[number].is_alive():
            running[number].kill()
            killed += 1
        running[number].join()
        assert running[number].exitcode in (0, -9)
        if running[number].exitcode:
            running[number] = start(number)
    for process in running:
        process.join(300)
        assert process.exitcode == 0

    with MeasurementDatabase(path) as database:
        assert database.problems() == []
        kept = {item.identity for item in database.measurements()}
        assert {line for log in logs for line in log.read_text().split()} <= kept
        for number in range(WRITERS):
            tried = Counter(trial.configuration for trial in database.trials(tuning_writer.workload(number)))
            assert len(tried) == TRIALS
            assert set(tried.values()) == {1}
