"""Constructed kernels, without a trial, beside the best of MetaSchedule's trials: how fast, and how soon.

    python benchmarks/metaschedule.py                              # 13 operators, 64 trials each: about half an hour
    python benchmarks/metaschedule.py conv_3x3 depthwise --trials 8

Writes ``benchmarks/results/<date>-metaschedule.json`` after each operator; without names, those that the file lacks are
measured, so that an interrupted run goes on. How stock TVM tunes: ``_metaschedule.py``.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import onnx
import typer
from _common import current_environment
from _metaschedule import METASCHEDULE, OPERATORS, Record, contender_of, duel_table, measure_each, tune
from rich.table import Table

from tvm_ext.bench.compare import BenchResult, bench
from tvm_ext.bench.contenders import ONNX_RUNTIME, OURS, Contender
from tvm_ext.bench.environment import Placement
from tvm_ext.devices.device_db import device_for_target
from tvm_ext.options import BuildOptions
from tvm_ext.support.arrays import Array

TRIALS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Duel:
    """One operator: both final kernels' times, and how long either took from the ONNX model to its kernel."""

    id: str
    trials: int
    measured_trials: int  # that gave a time; the others failed to build or to run
    result: BenchResult

    def to_solution_s(self, name: str) -> float:
        timing = self.result.timing(name)
        assert timing is not None
        return timing.import_s + timing.build_s

    def record(self) -> dict[str, Any]:
        fields, peers = asdict(self.result), self.result.timings[1:]
        return {
            "id": self.id,
            "trials": self.trials,
            "measured_trials": self.measured_trials,
            "median_s": {item.name: item.median_s for item in self.result.timings},
            "to_solution_s": {name: self.to_solution_s(name) for name in (OURS, METASCHEDULE)},
            "speedup": {item.name: self.result.speedup(item.name) for item in peers},
            "fastest_speedup": {item.name: self.result.fastest_speedup(item.name) for item in peers},
            "date": fields.pop("environment")["date"],
            **fields,
        }


def prepare_metaschedule(model: onnx.ModelProto, inputs: Mapping[str, Array], trials: int) -> tuple[Contender, int]:
    """Tune, build and load the model as a contender, beside the number of trials that gave a time."""
    _, target = device_for_target("llvm")
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        mod, measured = tune(model, target, trials, folder)
    return contender_of(mod, target, inputs, start), measured


def fight(name: str, trials: int, rounds: int, tell: Callable[[str], None]) -> Duel:
    """Both contenders on one operator, ONNX Runtime as referee."""
    model = OPERATORS[name]()
    measured: list[int] = []

    def peer(inputs: Mapping[str, Array], _threads: int, _placement: Placement | None) -> Contender:
        tell(f"{name}: {trials} trials of MetaSchedule")
        contender, count = prepare_metaschedule(model, inputs, trials)
        measured.append(count)
        return contender

    result = bench(
        model,
        options=BuildOptions(kernel_cache="off"),  # a kernel found in the cache would take no time to solution
        peers=[ONNX_RUNTIME],
        others=[peer],
        rounds=rounds,
        progress=lambda step: tell(f"{name}: {step}"),
    )
    return Duel(id=name, trials=trials, measured_trials=measured[0], result=result)


def table(records: Sequence[Record]) -> Table:
    """A row per operator: median times, their ratios, times to solution."""
    sides = {"ours built s": OURS, "tuned s": METASCHEDULE}
    totals = {title: sum(record["to_solution_s"][side] for record in records) for title, side in sides.items()}
    columns: dict[str, Callable[[Record], str]] = {
        "ours built s": lambda record: f"{record['to_solution_s'][OURS]:.2f}",
        "tuned s": lambda record: f"{record['to_solution_s'][METASCHEDULE]:.2f}",
        "trials": lambda record: f"{record['measured_trials']} of {record['trials']}",
    }
    sums = {title: f"{total:.1f}" for title, total in totals.items()}
    return duel_table(records, {"speed-up": "speedup", "of fastest": "fastest_speedup"}, columns, sums, ", sums")


def main(
    ops: Annotated[list[str] | None, typer.Argument(help=f"Operators, of {', '.join(OPERATORS)}; all of them.")] = None,
    trials: Annotated[int, typer.Option(min=1, help="MetaSchedule's, for each operator.")] = TRIALS,
    rounds: Annotated[int, typer.Option(min=1, help="Turns that each final kernel gets.")] = 10,
    output: Annotated[Path | None, typer.Option(help="Where to write the JSON.")] = None,
) -> None:
    """Tune, construct, time and write the results."""

    def measure(name: str, tell: Callable[[str], None]) -> Record | None:
        duel = fight(name, trials, rounds, tell)
        return duel.record() if duel.measured_trials else None

    measure_each("metaschedule", current_environment(), ops or [], output, measure, table)


if __name__ == "__main__":
    typer.run(main)
