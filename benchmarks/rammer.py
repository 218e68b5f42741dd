"""Rammer's six networks on a CPU: a build with schedules of rTasks, one without, ONNX Runtime and OpenVINO.

    python benchmarks/rammer.py                            # all six, batch 1
    python benchmarks/rammer.py lstm_tc nasbench_7 --rounds 20

All contenders take turns in one process. ONNX Runtime and OpenVINO (float32) run with one thread and with all of them,
and of either the faster setting counts: small steps of recurrent networks lose by threads. What ``enable_rammer`` makes
is "rammer"; "launches" is the same build without. Writes ``benchmarks/results/<date>-rammer.json`` after each network.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import onnx
import typer
from _common import current_environment, progress, result_path, show, write_results
from rich.table import Table

from benchmarks.networks.models import RAMMER, build_model
from tvm_ext.bench.compare import BenchResult, OtherPeer, bench
from tvm_ext.bench.contenders import (
    ONNX_RUNTIME,
    OPENVINO,
    OURS,
    Contender,
    prepare_onnx_runtime,
    prepare_openvino,
    prepare_ours,
)
from tvm_ext.bench.environment import Placement, thread_count
from tvm_ext.options import BuildOptions
from tvm_ext.support.arrays import Array

LAUNCHES = "launches"
ONE_THREAD = " 1 thread"
PEERS = (ONNX_RUNTIME, f"{ONNX_RUNTIME}{ONE_THREAD}", OPENVINO, f"{OPENVINO}{ONE_THREAD}")


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkResult:
    """One network. The ratios are of median times, above 1 where the build with rTasks is faster; NaN: not known."""

    result: BenchResult

    @property
    def best_peer(self) -> str:
        """The peer and setting of the smallest median."""
        timings = [item for name in PEERS if (item := self.result.timing(name)) is not None]
        return min(timings, key=lambda item: item.median_s).name

    @property
    def over_launches(self) -> float:
        return self.result.speedup(LAUNCHES) or float("nan")

    @property
    def over_best_peer(self) -> float:
        return self.result.speedup(self.best_peer) or float("nan")

    def record(self) -> dict[str, Any]:
        fields = asdict(self.result)
        del fields["environment"]
        others = [item.name for item in self.result.timings[1:]]
        return {
            "best_peer": self.best_peer,
            "speedup": {name: self.result.speedup(name) for name in others},
            "fastest_speedup": {name: self.result.fastest_speedup(name) for name in others},
            **fields,
        }


def measure(name: str, batch: int, rounds: int, tell: Any) -> NetworkResult:
    """Build network ``name`` in both ways and for the peers, and time them in turns."""
    model = build_model(name, batch)

    def launches(inputs: Mapping[str, Array], threads: int, _placement: Placement | None) -> Contender:
        options = BuildOptions(enable_rammer=False, num_threads=threads)
        return dataclasses.replace(prepare_ours(model, inputs, None, "llvm", options), name=LAUNCHES)

    result = bench(
        model,
        options=BuildOptions(enable_rammer=True, num_threads=thread_count()),
        peers=[],
        others=[launches, *_peers(model)],
        rounds=rounds,
        progress=lambda step: tell(f"{name}: {step}"),
    )
    return NetworkResult(result=dataclasses.replace(result, model=name))


def _peers(model: onnx.ModelProto) -> list[OtherPeer]:
    """ONNX Runtime and OpenVINO with all threads, then with one each."""

    def onnx_runtime(inputs: Mapping[str, Array], threads: int, placement: Placement | None) -> Contender:
        return prepare_onnx_runtime(model, inputs, threads, placement)

    def onnx_runtime_alone(inputs: Mapping[str, Array], _threads: int, _placement: Placement | None) -> Contender:
        return _alone(prepare_onnx_runtime(model, inputs, 1))

    def openvino(inputs: Mapping[str, Array], threads: int, _placement: Placement | None) -> Contender:
        made = prepare_openvino(model, inputs, threads)
        made.run()  # its threads start here, before this one is bound to a core
        return made

    def openvino_alone(inputs: Mapping[str, Array], _threads: int, _placement: Placement | None) -> Contender:
        made = _alone(prepare_openvino(model, inputs, 1))
        made.run()
        return made

    return [onnx_runtime, onnx_runtime_alone, openvino, openvino_alone]


def _alone(made: Contender) -> Contender:
    return dataclasses.replace(made, name=f"{made.name}{ONE_THREAD}")


def table(results: list[NetworkResult]) -> Table:
    """A network a line: medians in milliseconds, and the ratios."""
    shown = Table("network", "rammer ms", LAUNCHES, *PEERS, "vs launches", "vs best peer", "error", "build s")
    for column in shown.columns[1:]:
        column.justify = "right"
    for item in results:
        ours = item.result.timings[0]
        timings = [item.result.timing(name) for name in (OURS, LAUNCHES, *PEERS)]
        shown.add_row(
            item.result.model,
            *("-" if timing is None else f"{timing.median_s * 1e3:.3g}" for timing in timings),
            f"{item.over_launches:.2f}",
            f"{item.over_best_peer:.2f} ({item.best_peer})",
            "-" if ours.relative_error is None else f"{ours.relative_error:.1e}",
            f"{ours.import_s + ours.build_s:.1f}",
        )
    return shown


def main(
    names: Annotated[list[str] | None, typer.Argument(help="Built-in names; the six networks.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Batch size.")] = 1,
    rounds: Annotated[int, typer.Option(min=1, help="Turns that each contender gets.")] = 10,
    output: Annotated[Path | None, typer.Option(help="Where to write the JSON.")] = None,
) -> None:
    """Time the networks and write the results."""
    environment = current_environment()
    what = "rammer" if batch == 1 else f"rammer-batch{batch}"
    path = result_path(what, environment, output)
    results: list[NetworkResult] = []
    with progress() as tell:
        for name in names or RAMMER:
            results.append(measure(name, batch, rounds, tell))
            write_results(path, what, environment, [result.record() for result in results])
            gc.collect()  # weights of a quarter of a gigabyte
    show(table(results))
    print(f"written: {path}")


if __name__ == "__main__":
    typer.run(main)
