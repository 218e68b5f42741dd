"""Bolt's back-to-back products (Tables 1 and 2 of the paper) on a CPU: one kernel, two, ONNX Runtime and OpenVINO.

    python benchmarks/persistent.py                   # all rows, with the paper's M and batch, in float32
    python benchmarks/persistent.py T1.2 T2.3 --rounds 10 --scale 4
    python benchmarks/persistent.py --one-core        # one thread each, by processor time: for a machine that is busy

The weights are constants. "fused" is what a build does by itself (``enable_persistent_fusion="auto"``), "apart" the
same build with the switch off; both and the peers take turns in one process. With each row go its floors: arithmetic at
the device's peak, and its tensors over the bandwidth of memory, the value between the products left out or not.
Writes ``benchmarks/results/<date>-persistent.json`` after each row.
"""

from __future__ import annotations

import csv
import dataclasses
import gc
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import onnx
import typer
from _common import current_environment, progress, result_path, show, write_results
from rich.table import Table

from benchmarks.networks.graph import GraphWriter, he_normal, small_normal
from tvm_ext.bench.compare import BenchResult, bench
from tvm_ext.bench.contenders import ONNX_RUNTIME, OPENVINO, OURS, Contender, prepare_openvino, prepare_ours
from tvm_ext.bench.environment import Placement, thread_count
from tvm_ext.devices.device_db import device_for_target
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.errors import InputError
from tvm_ext.options import BuildOptions
from tvm_ext.support.arrays import Array

WORKLOAD = Path(__file__).resolve().parent / "workloads" / "bolt_ops.csv"
APART = "apart"
AGAIN = "fused again"  # what two equal contenders differ by is noise
FLOAT_BYTES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Two products of the paper's tables. ``tensors`` counts the elements of input, value between and result."""

    id: str
    shape: str
    paper_speedup: float
    scale: int
    flops: float
    tensors: tuple[int, int, int]
    weights: int

    def floors_ms(self, device: DeviceSpec) -> dict[str, float]:
        """Milliseconds that the row takes at least on ``device``, by arithmetic and by memory."""
        peak = device.peak_gflops_of("float32") or float("inf")
        rate = device.lowest_layer.bandwidth_gb_per_s or float("inf")
        read, between, written = self.tensors
        fused = FLOAT_BYTES * (read + written + self.weights)
        return {
            "arithmetic": self.flops / peak / 1e6,
            "memory_fused": fused / rate / 1e6,
            "memory_apart": (fused + 2 * FLOAT_BYTES * between) / rate / 1e6,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class RowResult:
    """One row, its floors, what the build decided and what each contender took."""

    row: Row
    floors_ms: Mapping[str, float]
    decisions: tuple[str, ...]
    fused: bool
    result: BenchResult

    @property
    def gain(self) -> float:
        """Two kernels' median time over that of one."""
        return self.result.speedup(APART) or float("nan")

    @property
    def over_best_peer(self) -> float:
        """The faster peer's median time over ours."""
        ratios = [ratio for peer in (ONNX_RUNTIME, OPENVINO) if (ratio := self.result.speedup(peer)) is not None]
        return min(ratios, default=float("nan"))

    def record(self) -> dict[str, Any]:
        fields = asdict(self.result)
        del fields["environment"], fields["inputs"]
        others = [item.name for item in self.result.timings[1:]]
        return {
            **asdict(self.row),
            "floors_ms": dict(self.floors_ms),
            "fused": self.fused,
            "decisions": self.decisions,
            "speedup": {name: self.result.speedup(name) for name in others},
            "fastest_speedup": {name: self.result.fastest_speedup(name) for name in others},
            **fields,
        }


def rows(scale: int) -> Iterator[tuple[Row, onnx.ModelProto]]:
    """The rows of Tables 1 and 2, their M or batch divided by ``scale``, each with its model."""
    numbers: dict[str, int] = {}
    with WORKLOAD.open(newline="", encoding="utf-8") as file:
        for entry in csv.DictReader(file):
            table = entry["table"]
            numbers[table] = numbers.get(table, 0) + 1
            if table in ("T1", "T2"):
                make = _products if table == "T1" else _convolutions
                yield make(f"{table}.{numbers[table]}", entry["shape"], float(entry["paper_speedup"]), scale)


def _products(name: str, shape: str, speedup: float, scale: int) -> tuple[Row, onnx.ModelProto]:
    """``M=16384 N0=64 K0=256 | N1=16 K1=64``: two products with ReLU behind each."""
    sizes = {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", shape)}
    m = max(1, sizes["M"] // scale)
    graph = GraphWriter(name)
    value = graph.input("x", (m, sizes["K0"]))
    for layer in "01":
        depth, columns = sizes[f"K{layer}"], sizes[f"N{layer}"]
        weights = graph.constant(f"w{layer}", he_normal(0, f"w{layer}", (depth, columns), fan_in=depth))
        value = graph.op("Relu", graph.op("MatMul", value, weights), name=f"y{layer}")
    graph.output(value, (m, sizes["N1"]))
    weights_count = sizes["K0"] * sizes["N0"] + sizes["K1"] * sizes["N1"]
    tensors = (m * sizes["K0"], m * sizes["N0"], m * sizes["N1"])
    row = Row(
        id=name,
        shape=shape,
        paper_speedup=speedup,
        scale=scale,
        flops=2.0 * m * weights_count,
        tensors=tensors,
        weights=weights_count,
    )
    return row, graph.model()


def _convolutions(name: str, shape: str, speedup: float, scale: int) -> tuple[Row, onnx.ModelProto]:
    """``N=32 H=W=56 IC=48 OC=48 s=1 | ...``: 3x3 with padding 1, then 1x1, bias and ReLU behind each."""
    sizes = {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", shape.partition("|")[0])}
    n, image, channels, filters = max(1, sizes["N"] // scale), sizes["W"], sizes["IC"], sizes["OC"]
    out = (image - 1) // sizes["s"] + 1
    graph = GraphWriter(name)
    value = graph.input("x", (n, channels, image, image))
    for layer, (kernel, depth) in enumerate(((3, channels), (1, filters))):
        weights = he_normal(0, f"w{layer}", (filters, depth, kernel, kernel), fan_in=depth * kernel * kernel)
        bias = graph.constant(f"b{layer}", small_normal(0, f"b{layer}", (filters,)))
        strides = [sizes["s"] if kernel > 1 else 1] * 2
        window = {"kernel_shape": [kernel] * 2, "pads": [kernel // 2] * 4, "strides": strides}
        conv = graph.op("Conv", value, graph.constant(f"w{layer}", weights), bias, **window)
        value = graph.op("Relu", conv, name=f"y{layer}")
    graph.output(value, (n, filters, out, out))
    weights_count = filters * channels * 9 + filters * filters
    points = n * out * out
    row = Row(
        id=name,
        shape=shape,
        paper_speedup=speedup,
        scale=scale,
        flops=2.0 * points * weights_count,
        tensors=(n * channels * image * image, points * filters, points * filters),
        weights=weights_count,
    )
    return row, graph.model()


def measure(row: Row, model: onnx.ModelProto, rounds: int, clock: Callable[[], float], tell: Any) -> RowResult:
    """Build the row in both ways and for the peers, and time them in turns."""
    reports: list[Any] = []

    def apart(inputs: Mapping[str, Array], threads: int, _placement: Placement | None) -> Contender:
        options = BuildOptions(enable_persistent_fusion=False, num_threads=threads)
        return dataclasses.replace(prepare_ours(model, inputs, None, "llvm", options), name=APART)

    def decided(inputs: Mapping[str, Array], threads: int, _placement: Placement | None) -> Contender:
        made = prepare_ours(model, inputs, None, "llvm", BuildOptions(num_threads=threads))
        assert made.library is not None
        reports.append(made.library.report)
        return dataclasses.replace(made, name=AGAIN)

    def openvino(inputs: Mapping[str, Array], threads: int, _placement: Placement | None) -> Contender:
        made = prepare_openvino(model, inputs, threads)
        made.run()  # its threads start here, before this one is bound to a core
        return made

    result = bench(
        model,
        options=BuildOptions(num_threads=thread_count()),
        peers=[ONNX_RUNTIME],
        others=[apart, openvino, decided],
        rounds=rounds,
        clock=clock,
        progress=lambda step: tell(f"{row.id}: {step}"),
    )
    persistent = reports[0].persistent
    device, _ = device_for_target("llvm")
    return RowResult(
        row=row,
        floors_ms=row.floors_ms(device),
        decisions=tuple(str(region) for region in persistent.regions) if persistent is not None else (),
        fused=persistent is not None and bool(persistent.fused),
        result=result,
    )


def table(results: list[RowResult]) -> Table:
    """A row of the paper a line: medians, floors and ratios (above 1 where one kernel of ours is faster)."""
    names = ("fused ms", "apart", "ort", "openvino f32", "floors", "gain", "paper", "vs best")
    shown = Table("id", "products", *names)
    for column in shown.columns[2:]:
        column.justify = "right"
    for item in results:
        medians = [item.result.timing(name) for name in (OURS, APART, ONNX_RUNTIME, OPENVINO)]
        floors = " / ".join(f"{value:.2f}" for value in item.floors_ms.values())
        shown.add_row(
            item.row.id,
            item.row.shape,
            *("-" if timing is None else f"{timing.median_s * 1e3:.3g}" for timing in medians),
            floors,
            f"{item.gain:.2f}{'' if item.fused else ' (not fused)'}",
            f"{item.row.paper_speedup:.2f}",
            f"{item.over_best_peer:.2f}",
        )
    return shown


def summary(results: list[RowResult]) -> list[str]:
    """Geometric means of each table's ratios."""
    lines = []
    for name in ("T1", "T2"):
        chosen = [item for item in results if item.row.id.startswith(name)]
        if chosen:
            gain = statistics.geometric_mean(item.gain for item in chosen)
            peer = statistics.geometric_mean(item.over_best_peer for item in chosen)
            least = min(item.gain for item in chosen)
            lines.append(f"{name}: apart / fused {gain:.2f} (least {least:.2f}), best peer / fused {peer:.2f}")
    return lines


def main(
    ids: Annotated[list[str] | None, typer.Argument(help="Rows, as T1.2; all of them.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Turns that each contender gets.")] = 6,
    scale: Annotated[int, typer.Option(min=1, help="What M or the batch is divided by.")] = 1,
    one_core: Annotated[bool, typer.Option("--one-core", help="One thread each, by its processor time.")] = False,
    output: Annotated[Path | None, typer.Option(help="Where to write the JSON.")] = None,
) -> None:
    """Time the rows and write the results."""
    environment = current_environment()
    if one_core and environment.threads != 1:
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "TVM_NUM_THREADS": "1"})
    what = "persistent-one-core" if one_core else "persistent"
    clock = time.process_time if one_core else time.perf_counter
    path = result_path(what, environment, output)
    known = {row.id: (row, model) for row, model in rows(scale)}
    for name in ids or []:
        if name not in known:
            raise InputError(f"there is no row {name!r}.", f"the rows are {', '.join(known)}")
    results: list[RowResult] = []
    with progress() as tell:
        for name in ids or known:
            results.append(measure(*known[name], rounds, clock, tell))
            write_results(path, what, environment, [result.record() for result in results])
            gc.collect()  # tensors of up to 77 MB
    show(table(results))
    for line in summary(results):
        print(line)
    print(f"written: {path}")


if __name__ == "__main__":
    typer.run(main)
