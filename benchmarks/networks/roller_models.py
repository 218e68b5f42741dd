"""Roller's 119 operators as ONNX models of one node each, for any batch size."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import onnx

from tvm_ext.support.arithmetic import ceil_div

from .graph import GraphWriter, he_normal

WORKLOAD_BATCH = 128
"""The batch size of the table; a matmul's M is that many rows or a multiple of them (tokens)."""

Row = Mapping[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class RollerModel:
    """``flops`` counts a multiply-add as two; ``bytes`` is what must be moved at least: inputs, weights and output."""

    id: str
    operator: str
    model: onnx.ModelProto
    flops: float
    bytes: float


def read_models(
    workload: Path, *, batch: int, seed: int = 0, ids: frozenset[str] | None = None
) -> Iterator[RollerModel]:
    """The operators of ``roller_ops.csv`` in its order; only those in ``ids`` where given. Weights are constants."""
    with workload.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if ids is None or row["id"] in ids:
                yield BUILDERS[row["op"]](row, batch, seed)


def read_ids(workload: Path) -> tuple[str, ...]:
    with workload.open(newline="", encoding="utf-8") as file:
        return tuple(row["id"] for row in csv.DictReader(file))


def same_padding(size: int, kernel: int, stride: int, dilation: int = 1) -> tuple[int, int, int]:
    """(output size, before, after) of TensorFlow's SAME.

    Worked example: 83 by steps of 2 in windows of 5 gives 42 outputs, which span 41 * 2 + 5 = 87: 2 before, 2 after.
    """
    output = ceil_div(size, stride)
    missing = max((output - 1) * stride + (kernel - 1) * dilation + 1 - size, 0)
    return output, missing // 2, missing - missing // 2


def _result(row: Row, graph: GraphWriter, flops: float, *element_counts: int) -> RollerModel:
    return RollerModel(
        id=row["id"], operator=row["op"], model=graph.model(), flops=flops, bytes=4.0 * sum(element_counts)
    )


def _matmul(row: Row, batch: int, seed: int) -> RollerModel:
    rows, k, n = int(row["M"]) * batch // WORKLOAD_BATCH, int(row["K"]), int(row["N_mm"])
    graph = GraphWriter(row["id"])
    x = graph.input("x", (rows, k))
    graph.op("MatMul", x, graph.constant("w", he_normal(seed, "w", (k, n), fan_in=k)), name="y")
    graph.output("y", (rows, n))
    return _result(row, graph, 2.0 * rows * k * n, rows * k, k * n, rows * n)


def _convolution(row: Row, batch: int, seed: int) -> RollerModel:
    return _conv(row, batch, seed, groups=1)


def _depthwise(row: Row, batch: int, seed: int) -> RollerModel:
    return _conv(row, batch, seed, groups=int(row["C"]))


def _conv(row: Row, batch: int, seed: int, *, groups: int) -> RollerModel:
    channels, filters = int(row["C"]), int(row["F"])
    kernel, stride, dilation = (int(row["KH"]), int(row["KW"])), int(row["stride"]), int(row["dilation"])
    shape, output, pads = _window(row, batch, kernel, stride, dilation)
    graph = GraphWriter(row["id"])
    x = graph.input("x", shape)
    fan_in = channels // groups * kernel[0] * kernel[1]
    weights = (filters, channels // groups, *kernel)
    w = graph.constant("w", he_normal(seed, "w", weights, fan_in=fan_in))
    strides, dilations = [stride] * 2, [dilation] * 2
    graph.op(
        "Conv", x, w, name="y", kernel_shape=list(kernel), strides=strides, dilations=dilations, pads=pads, group=groups
    )
    result = (batch, filters, *output)
    graph.output("y", result)
    return _result(
        row, graph, 2.0 * math.prod(result) * fan_in, math.prod(shape), math.prod(weights), math.prod(result)
    )


def _window(
    row: Row, batch: int, kernel: tuple[int, int], stride: int, dilation: int
) -> tuple[tuple[int, int, int, int], tuple[int, int], list[int]]:
    """(input shape, output height and width, ONNX pads: both befores, then both afters)."""
    height, width = int(row["H"]), int(row["W"])
    if row["padding"] == "SAME":
        (oh, top, bottom), (ow, left, right) = (
            same_padding(size, k, stride, dilation) for size, k in zip((height, width), kernel, strict=True)
        )
        return (batch, int(row["C"]), height, width), (oh, ow), [top, left, bottom, right]
    oh, ow = ((n - (k - 1) * dilation - 1) // stride + 1 for n, k in zip((height, width), kernel, strict=True))
    return (batch, int(row["C"]), height, width), (oh, ow), [0, 0, 0, 0]


def _relu(row: Row, batch: int, _seed: int) -> RollerModel:
    shape = _shape(row, batch)
    graph = GraphWriter(row["id"])
    graph.op("Relu", graph.input("x", shape), name="y")
    graph.output("y", shape)
    return _result(row, graph, float(math.prod(shape)), math.prod(shape), math.prod(shape))


def _average_pool(row: Row, batch: int, _seed: int) -> RollerModel:
    """TensorFlow's: padding does not count."""
    kernel, stride = (int(row["KH"]), int(row["KW"])), int(row["stride"])
    shape, output, pads = _window(row, batch, kernel, stride, 1)
    graph = GraphWriter(row["id"])
    x = graph.input("x", shape)
    graph.op("AveragePool", x, name="y", kernel_shape=list(kernel), strides=[stride] * 2, pads=pads)
    result = (*shape[:2], *output)
    graph.output("y", result)
    return _result(row, graph, float(math.prod(result) * math.prod(kernel)), math.prod(shape), math.prod(result))


def _reduce_mean(row: Row, batch: int, _seed: int) -> RollerModel:
    shape = _shape(row, batch)
    axes = [int(axis) for axis in row["axis"].strip("[]").split(",")]
    graph = GraphWriter(row["id"])
    graph.op("ReduceMean", graph.input("x", shape), name="y", axes=axes, keepdims=0)
    result = tuple(size for axis, size in enumerate(shape) if axis not in axes)
    graph.output("y", result)
    return _result(row, graph, float(math.prod(shape)), math.prod(shape), math.prod(result))


def _shape(row: Row, batch: int) -> tuple[int, ...]:
    """The row's shape, its first dimension scaled from batch 128: 65536 rows are 512 for each element of the batch."""
    first, *rest = (int(size) for size in row["shape"].split("x"))
    return (first * batch // WORKLOAD_BATCH, *rest)


BUILDERS: dict[str, Callable[[Row, int, int], RollerModel]] = {
    "MatMul": _matmul,
    "Conv2D": _convolution,
    "DepthwiseConv": _depthwise,
    "Elementwise(ReLU)": _relu,
    "AvgPool": _average_pool,
    "ReduceMean": _reduce_mean,
}
