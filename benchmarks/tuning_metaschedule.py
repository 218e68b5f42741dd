"""Operators tuned by us and by MetaSchedule for the same time, then run in turns.

    python benchmarks/tuning_metaschedule.py                       # eight operators, 2 minutes each on either side
    python benchmarks/tuning_metaschedule.py conv_3x3 --seconds 30 --output /tmp/quick.json

MetaSchedule runs in a process of its own that is ended when its time is over; its best records until then are applied.
Writes ``benchmarks/results/<date>-tuning_metaschedule.json`` after each operator.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import onnx
import typer
from _common import current_environment, earlier_results, progress, result_path, show, write_results
from metaschedule import (
    METASCHEDULE,
    OPERATORS,
    contender_of,
    measured_count,
    tunable_module,
    tune,
    with_records,
)
from rich.table import Table

from tvm_ext import relay
from tvm_ext.bench.compare import bench
from tvm_ext.bench.contenders import ONNX_RUNTIME, OURS, Contender
from tvm_ext.bench.placement import Placement
from tvm_ext.devices.device_db import device_for_target
from tvm_ext.errors import InputError
from tvm_ext.options import BuildOptions
from tvm_ext.support.arrays import Array

BAR = 1.2
MORE_THAN_ENOUGH = 100_000
FILES = ("database_workload.json", "database_tuning_record.json")


def search_by_metaschedule(name: str, seconds: float, folder: Path) -> None:
    """Leave the records of so many seconds of its search in ``folder``; raises CalledProcessError where it fails."""
    command = [sys.executable, __file__, "--worker", name, "--folder", str(folder)]
    paths = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))  # of its runners
    worker = subprocess.Popen(command, start_new_session=True, env={**os.environ, "PYTHONPATH": paths})
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


def prepare_metaschedule(name: str, seconds: float, inputs: Mapping[str, Array]) -> tuple[Contender, int]:
    """Its best kernel after ``seconds``, and how many trials gave a time."""
    from tvm.s_tir import meta_schedule

    _, target = device_for_target("llvm")
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        search_by_metaschedule(name, seconds, Path(folder))
        paths = [str(Path(folder) / file) for file in FILES]
        count = measured_count(meta_schedule.database.JSONDatabase(*paths))
        with target:
            mod = with_records(tunable_module(OPERATORS[name]()), folder)
        return contender_of(mod, target, inputs, start), count


def fight(name: str, seconds: float, rounds: int, tell: Callable[[str], None]) -> dict[str, Any] | None:
    """Both on one operator, ONNX Runtime as referee; None where MetaSchedule has nothing to show."""
    model: onnx.ModelProto = OPERATORS[name]()
    counts: list[int] = []

    def note(step: str) -> None:
        tell(f"{name}: {step}")

    with tempfile.TemporaryDirectory() as folder:
        database = str(Path(folder) / "tuning.db")
        mod, params = relay.frontend.from_onnx(model)
        library = relay.build(
            mod, "llvm", params=params, tune=f"{seconds:g}s", database=database, progress=note
        )  # fmt: skip
        tuning = library.report.tuning
        assert tuning is not None

        def peer(inputs: Mapping[str, Array], _threads: int, _placement: Placement | None) -> Contender:
            tell(f"{name}: {seconds:g} s of MetaSchedule")
            contender, count = prepare_metaschedule(name, seconds, inputs)
            counts.append(count)
            return contender

        result = bench(
            model, options=BuildOptions(database=database), peers=[ONNX_RUNTIME], others=[peer], rounds=rounds,
            progress=note,
        )  # fmt: skip
    if not counts[0]:
        return None
    fields = asdict(result)
    return {
        "id": name,
        "seconds": seconds,
        "metaschedule_trials": counts[0],
        "trials": tuning.trials,
        "speedup": {item.name: result.speedup(item.name) for item in result.timings[1:]},
        "median_s": {item.name: item.median_s for item in result.timings},
        "date": fields.pop("environment")["date"],
        "tuning": asdict(tuning),
        **fields,
    }


def table(records: list[dict[str, Any]]) -> Table:
    """A row per operator."""
    rows = Table("operator", "ours ms", "MetaSchedule ms", "speed-up", "our trials", "its trials", "error")
    for column in rows.columns[1:]:
        column.justify = "right"
    for record in records:
        errors = {item["name"]: item["relative_error"] for item in record["timings"]}
        rows.add_row(
            record["id"],
            *(f"{record['median_s'][name] * 1e3:.3g}" for name in (OURS, METASCHEDULE)),
            f"{record['speedup'][METASCHEDULE]:.2f}x",
            str(record["trials"]),
            str(record["metaschedule_trials"]),
            f"{errors[OURS]:.1e}",
        )
    mean = statistics.geometric_mean(record["speedup"][METASCHEDULE] for record in records)
    rows.add_section()
    rows.add_row(f"geometric mean (bar {BAR})", "", "", f"{mean:.2f}x", "", "", "")
    return rows


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
    for name in ops or []:
        if name not in OPERATORS:
            raise InputError(f"there is no operator {name!r}.", f"the operators are {', '.join(OPERATORS)}")
    environment = current_environment()
    path = result_path("tuning_metaschedule", environment, output)
    records = {record["id"]: record for record in earlier_results(path, environment)}
    with progress() as tell:
        for name in ops or OPERATORS:
            found = fight(name, seconds, rounds, tell)
            if found is None:
                print(f"{name}: MetaSchedule had no kernel after {seconds:g} s; nothing to compare with")
                continue
            records[name] = found
            write_results(path, "tuning_metaschedule", environment, list(records.values()))
    if records:
        show(table(list(records.values())))
        print(f"written: {path}")


if __name__ == "__main__":
    typer.run(main)
