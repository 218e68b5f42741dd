"""Models tuned for some minutes beside the same models as constructed, interleaved; and built again, with no trial.

    python benchmarks/tuning.py                                # ResNet-50 and MobileNetV2, 5 minutes each
    python benchmarks/tuning.py resnet50 --seconds 60 --output /tmp/quick.json

Each model is constructed without measurements, tuned into a database of its own, and built once more from that database
alone, which must need no trial. The constructed and the tuned library then take turns. Writes
``benchmarks/results/<date>-tuning.json`` after each model.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from _common import current_environment, earlier_results, median_of, progress, result_path, show, write_results
from rich.table import Table

from benchmarks.networks import models
from tvm_ext import relay
from tvm_ext.bench.compare import BenchResult, bench
from tvm_ext.bench.contenders import ONNX_RUNTIME, OURS, Contender, prepare_ours
from tvm_ext.bench.environment import Placement
from tvm_ext.options import BuildOptions
from tvm_ext.records.tuned import TuningRecord
from tvm_ext.support.arrays import Array

CONSTRUCTED = "constructed"
DEFAULT = ("resnet50", "mobilenet_v2")
BAR = 1.05


@dataclass(frozen=True, kw_only=True, slots=True)
class TunedModel:
    """A model: what tuning did, and both libraries' times in turns."""

    id: str
    tuning: TuningRecord
    result: BenchResult
    kernels_by_measurement: int  # of the build that came after, without a trial

    @property
    def speedup(self) -> float:
        """Constructed by tuned, medians: above 1 where tuning gained."""
        found = self.result.speedup(CONSTRUCTED)
        assert found is not None
        return found

    def record(self) -> dict[str, Any]:
        fields = asdict(self.result)
        return {
            "id": self.id,
            "speedup": self.speedup,
            "fastest_speedup": self.result.fastest_speedup(CONSTRUCTED),
            "kernels_by_measurement": self.kernels_by_measurement,
            "predicted_speedup": self.tuning.constructed_us / self.tuning.tuned_us if self.tuning.tuned_us else None,
            "date": fields.pop("environment")["date"],
            "tuning": asdict(self.tuning),
            **fields,
        }


def tuned_model(
    name: str, file: Path, seconds: float, rounds: int, seed: int, tell: Callable[[str], None]
) -> TunedModel:
    """Tune, build again, and time."""
    model = models.build_model(name, 1)

    def note(step: str) -> None:
        tell(f"{name}: {step}")

    database = str(file)
    mod, params = relay.frontend.from_onnx(model)
    library = relay.build(
        mod, "llvm", params=params, tune=f"{seconds:g}s", database=database, progress=note
    )  # fmt: skip
    tuning = library.report.tuning
    assert tuning is not None
    constructed = BuildOptions(database="off")

    def other(inputs: Mapping[str, Array], _threads: int, _placement: Placement | None) -> Contender:
        return replace(prepare_ours(model, inputs, None, "llvm", constructed), name=CONSTRUCTED)

    result = bench(
        model,
        options=BuildOptions(database=database),
        peers=[ONNX_RUNTIME],
        others=[other],
        rounds=rounds,
        seed=seed,
        progress=note,
    )
    built = relay.build(mod, "llvm", params=params, database=database)
    assert built.report.tuning is None
    count = len(built.report.tiles.reasons)
    return TunedModel(id=name, tuning=tuning, result=result, kernels_by_measurement=count)


def table(records: list[dict[str, Any]]) -> Table:
    """A row per model."""
    rows = Table("model", "constructed ms", "tuned ms", "speed-up", "of fastest", "by measurement", "trials", "seconds")
    for column in rows.columns[1:]:
        column.justify = "right"
    for record in records:
        medians = {item["name"]: median_of(item["samples_s"]) for item in record["timings"]}
        tuning = record["tuning"]
        rows.add_row(
            record["id"],
            *(f"{medians[name] * 1e3:.3g}" for name in (CONSTRUCTED, OURS)),
            f"{record['speedup']:.3f}x",
            f"{record['fastest_speedup']:.3f}x",
            f"{record['kernels_by_measurement']} of {len(tuning['tasks'])}",
            str(tuning["trials"]),
            f"{tuning['seconds']:.0f}",
        )
    mean = statistics.geometric_mean(record["speedup"] for record in records)
    rows.add_section()
    rows.add_row(f"geometric mean (bar {BAR})", "", "", f"{mean:.3f}x", "", "", "", "")
    return rows


def main(
    names: Annotated[list[str] | None, typer.Argument(help=f"Built-in models; {', '.join(DEFAULT)}.")] = None,
    seconds: Annotated[float, typer.Option(min=1, help="Of tuning, for each model.")] = 300.0,
    rounds: Annotated[int, typer.Option(min=1, help="Turns that each library gets.")] = 30,
    seed: Annotated[int, typer.Option(help="Of the search and the inputs.")] = 0,
    output: Annotated[Path | None, typer.Option(help="Where to write the JSON.")] = None,
    keep: Annotated[Path | None, typer.Option(help="Keep the databases in this folder, and go on there.")] = None,
) -> None:
    """Tune, time and write the results."""
    environment = current_environment()
    path = result_path("tuning", environment, output)
    records = {record["id"]: record for record in earlier_results(path, environment)}
    with progress() as tell:
        for name in names or DEFAULT:
            with contextlib.nullcontext(keep) if keep is not None else tempfile.TemporaryDirectory() as folder:
                found = tuned_model(name, Path(folder) / f"{name}.db", seconds, rounds, seed, tell)
            records[name] = found.record()
            write_results(path, "tuning", environment, list(records.values()))
    show(table(list(records.values())))
    print(f"written: {path}")


if __name__ == "__main__":
    typer.run(main)
