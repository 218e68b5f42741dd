"""3x3 convolutions in Winograd's form beside direct sums, ONNX Runtime and OpenVINO, in one process.

    python benchmarks/winograd.py                    # layers of usual networks, and as many drawn ones
    python benchmarks/winograd.py --drawn 20 --seed 3

A layer is timed six times in a row, so that its tensors are in blocks of channels, as within a network. The first one
reads NCHW and the last one writes it. Writes ``benchmarks/results/<date>-winograd.json``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import onnx
import typer
from _common import current_environment, median_of, progress, result_path, show, write_results
from onnx.helper import make_node
from rich.table import Table

from tests.support.small_models import onnx_model
from tvm_ext.bench.compare import bench
from tvm_ext.bench.contenders import Contender, prepare_openvino, prepare_ours
from tvm_ext.bench.environment import Placement
from tvm_ext.options import BuildOptions
from tvm_ext.support.arrays import Array

Form = Literal["auto", "fast", "off"]
DEPTH = 6
RESNET = ((1, 64, 56), (1, 128, 28), (1, 256, 14), (1, 512, 7), (8, 64, 56), (8, 128, 28), (8, 256, 14), (8, 512, 7))
"""(batch, channels, side) of ResNet's 3x3 layers at two batch sizes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerTimes:
    """Seconds of `DEPTH` layers, by contender, and the largest error against ONNX Runtime."""

    batch: int
    channels: int
    side: int
    samples_s: Mapping[str, tuple[float, ...]]
    error: float

    def ratio(self, other: str) -> float:
        """How many times as long ``other`` takes as the default build."""
        return median_of(self.samples_s[other]) / median_of(self.samples_s["auto"])


def layers(batch: int, channels: int, side: int, seed: int) -> onnx.ModelProto:
    """`DEPTH` convolutions of as many filters as channels, each with a bias and a Relu."""
    draw = np.random.default_rng(seed)
    nodes, constants = [], {}
    for i in range(DEPTH):
        scale = (2 / (9 * channels)) ** 0.5
        constants[f"w{i}"] = (draw.standard_normal((channels, channels, 3, 3)) * scale).astype("float32")
        constants[f"b{i}"] = draw.standard_normal(channels).astype("float32") * np.float32(0.1)
        nodes.append(make_node("Conv", [f"x{i}", f"w{i}", f"b{i}"], [f"c{i}"], pads=[1] * 4))
        nodes.append(make_node("Relu", [f"c{i}"], [f"x{i + 1}"]))
    return onnx_model(nodes, {"x0": (batch, channels, side, side)}, (f"x{DEPTH}",), constants)


def prepare(
    proto: onnx.ModelProto, form: Form, values: Mapping[str, Array], _threads: int, _placement: Placement | None
) -> Contender:
    """A build with the option ``winograd=form``."""
    return replace(prepare_ours(proto, values, None, "llvm", BuildOptions(winograd=form)), name=form)


def measure(batch: int, channels: int, side: int, seed: int, rounds: int) -> LayerTimes:
    proto = layers(batch, channels, side, seed)
    others = [partial(prepare, proto, "off"), partial(prepare, proto, "fast"), partial(prepare_openvino, proto)]
    with progress() as tell:
        result = bench(proto, peers=["onnxruntime"], others=others, rounds=rounds, progress=tell)
    samples = {("auto" if timing.name == "tvm_ext" else timing.name): timing.samples_s for timing in result.timings}
    error = max(timing.relative_error or 0.0 for timing in result.timings)
    return LayerTimes(batch=batch, channels=channels, side=side, samples_s=samples, error=error)


def table_of(results: list[LayerTimes]) -> Table:
    names = [name for name in results[0].samples_s if name != "auto"]
    table = Table("batch", "channels", "side", "auto ms", *(f"{name} / auto" for name in names), "error")
    for item in results:
        own = f"{1e3 * median_of(item.samples_s['auto']):.3g}"
        ratios = (f"{item.ratio(name):.2f}" for name in names)
        table.add_row(str(item.batch), str(item.channels), str(item.side), own, *ratios, f"{item.error:.1e}")
    return table


def main(
    drawn: Annotated[int, typer.Option(min=0, help="Layers of random sizes besides.")] = 8,
    seed: Annotated[int, typer.Option(help="Of the sizes and weights.")] = 0,
    rounds: Annotated[int, typer.Option(min=1, help="Turns that each contender gets.")] = 8,
    output: Annotated[Path | None, typer.Option(help="Where to write the JSON.")] = None,
) -> None:
    """Time layers and write the results."""
    environment = current_environment()
    path = result_path("winograd", environment, output)
    draw = np.random.default_rng(seed)
    sizes = [
        (int(draw.choice([1, 2, 4])), 16 * int(draw.integers(2, 25)), int(draw.integers(5, 60))) for _ in range(drawn)
    ]
    results: list[LayerTimes] = []
    for batch, channels, side in (*RESNET, *sizes):
        results.append(measure(batch, channels, side, seed, rounds))
        write_results(path, "winograd", environment, results)
    show(table_of(results))
    print(f"written: {path}")


if __name__ == "__main__":
    typer.run(main)
