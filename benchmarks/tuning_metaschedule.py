"""Operators tuned by us and by MetaSchedule for the same time, then run in turns.

    python benchmarks/tuning_metaschedule.py                       # eight operators, 2 minutes each on either side
    python benchmarks/tuning_metaschedule.py conv_3x3 --seconds 30 --output /tmp/quick.json

MetaSchedule runs in a process of its own that is ended when its time is over; its best records until then are applied.
Where it has none by then, as it takes minutes for its first round of some operators, the record says so.
Writes ``benchmarks/results/<date>-tuning_metaschedule.json`` after each operator; without names, those that the file
lacks are measured, so that an interrupted run goes on.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import onnx
import typer
from _common import current_environment
from _metaschedule import (
    OPERATORS,
    Record,
    contender_of,
    duel_table,
    measure_each,
    measured_count,
    tunable_module,
    tune,
    with_records,
)
from rich.table import Table

from tvm_ext import relay
from tvm_ext.bench.compare import bench
from tvm_ext.bench.contenders import ONNX_RUNTIME, Contender
from tvm_ext.bench.environment import Placement
from tvm_ext.devices.device_db import device_for_target
from tvm_ext.options import BuildOptions
from tvm_ext.support.arrays import Array

BAR = 1.2
MORE_THAN_ENOUGH = 100_000
FILES = ("database_workload.json", "database_tuning_record.json")


def search_by_metaschedule(name: str, seconds: float, folder: Path) -> None:
    """Leave the records of so many seconds of its search in ``folder``; raises CalledProcessError where it fails."""
    command = [sys.executable, __file__, "--worker", name, "--folder", str(folder)]
    worker = subprocess.Popen(command, start_new_session=True)
    try:
        if worker.wait(timeout=seconds):
            raise subprocess.CalledProcessError(worker.returncode, command)
    except subprocess.TimeoutExpired:
        os.killpg(worker.pid, signal.SIGKILL)  # with its builders and runners
    finally:
        if worker.poll() is None:
            os.killpg(worker.pid, signal.SIGKILL)
        worker.wait()
    for file in FILES:
        drop_torn_line(folder / file)


def drop_torn_line(path: Path) -> None:
    """Cut off what was being written when the process was ended."""
    if path.exists():
        text = path.read_bytes()
        path.write_bytes(text[: text.rfind(b"\n") + 1])


def trials_in(folder: Path) -> int:
    """How many trials gave a time."""
    from tvm.s_tir import meta_schedule

    paths = [str(folder / file) for file in FILES]
    return measured_count(meta_schedule.database.JSONDatabase(*paths)) if all(map(os.path.exists, paths)) else 0


def fight(name: str, seconds: float, rounds: int, tell: Callable[[str], None]) -> Record:
    """Both on one operator, ONNX Runtime as referee; ours beside that alone where MetaSchedule has no kernel yet."""
    model: onnx.ModelProto = OPERATORS[name]()

    def note(step: str) -> None:
        tell(f"{name}: {step}")

    with tempfile.TemporaryDirectory() as own, tempfile.TemporaryDirectory() as theirs:
        database = str(Path(own) / "tuning.db")
        mod, params = relay.frontend.from_onnx(model)
        library = relay.build(mod, "llvm", params=params, tune=f"{seconds:g}s", database=database, progress=note)
        tuning = library.report.tuning
        assert tuning is not None
        start = time.perf_counter()
        note(f"{seconds:g} s of MetaSchedule")
        search_by_metaschedule(name, seconds, Path(theirs))
        trials = trials_in(Path(theirs))

        def peer(inputs: Mapping[str, Array], _threads: int, _placement: Placement | None) -> Contender:
            _, target = device_for_target("llvm")
            with target:
                tuned = with_records(tunable_module(model), theirs)
            return contender_of(tuned, target, inputs, start)

        others = [peer] if trials else []
        options = BuildOptions(database=database)
        result = bench(model, options=options, peers=[ONNX_RUNTIME], others=others, rounds=rounds, progress=note)
    fields = asdict(result)
    return {
        "id": name,
        "seconds": seconds,
        "metaschedule_trials": trials,
        "trials": tuning.trials,
        "speedup": {item.name: result.speedup(item.name) for item in result.timings[1:]},
        "median_s": {item.name: item.median_s for item in result.timings},
        "date": fields.pop("environment")["date"],
        "tuning": asdict(tuning),
        **fields,
    }


def table(records: Sequence[Record]) -> Table:
    """A row per operator."""
    columns: dict[str, Callable[[Record], str]] = {
        "our trials": lambda record: str(record["trials"]),
        "its trials": lambda record: str(record["metaschedule_trials"]),
    }
    return duel_table(records, {"speed-up": "speedup"}, columns, {}, f" (bar {BAR})")


def main(
    ops: Annotated[list[str] | None, typer.Argument(help=f"Operators, of {', '.join(OPERATORS)}; all of them.")] = None,
    seconds: Annotated[float, typer.Option(min=1, help="For each operator and side.")] = 120.0,
    rounds: Annotated[int, typer.Option(min=1, help="Turns that each final kernel gets.")] = 10,
    output: Annotated[Path | None, typer.Option(help="Where to write the JSON.")] = None,
    worker: Annotated[str | None, typer.Option(hidden=True)] = None,
    folder: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Tune on either side, time and write the results."""
    if worker is not None:
        tune(OPERATORS[worker](), device_for_target("llvm")[1], MORE_THAN_ENOUGH, str(folder))
        return
    measure_each(
        "tuning_metaschedule",
        current_environment(),
        ops or [],
        output,
        lambda name, tell: fight(name, seconds, rounds, tell),
        table,
    )


if __name__ == "__main__":
    typer.run(main)
