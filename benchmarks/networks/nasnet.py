"""NASNet-A (6 @ 768) for CIFAR-10 and (4 @ 1056) for ImageNet (Zoph et al. 2018), with seeded weights.

Three stages of six normal cells with a reduction cell before the second and the third. A cell takes the outputs of the
two cells before it, brings both to its own width, and adds five pairs of branches. Their sums, side by side, are its
output: in a normal cell with its earlier input, in a reduction cell without the first pair. 768 channels come out of
the last cell: six times 4 x 32. ImageNet's form begins with a convolution of step 2 and two reduction cells of a
quarter and a half of the width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx

from .convolutional import CIFAR_CLASSES, CIFAR_EXTENT, batch_norm, conv_bn, dense
from .graph import GraphWriter, he_normal

CELLS, FILTERS, STEM_FACTOR = 6, 32, 3
IMAGENET_CELLS, IMAGENET_FILTERS, IMAGENET_STEM, IMAGENET_CLASSES = 4, 44, 32, 1000

# Each pair: (operation, input), (operation, input). Inputs 0 and 1 are the cell before and the one before that, 2 the
# first pair's sum, and so on; the tables of the published implementation.
_Branch = tuple[str, int]
_NORMAL: tuple[tuple[_Branch, _Branch], ...] = (
    (("separable5", 0), ("separable3", 1)),
    (("separable5", 1), ("separable3", 1)),
    (("average3", 0), ("identity", 1)),
    (("average3", 1), ("average3", 1)),
    (("separable3", 0), ("identity", 0)),
)
_REDUCTION: tuple[tuple[_Branch, _Branch], ...] = (
    (("separable5", 0), ("separable7", 1)),
    (("max3", 0), ("separable7", 1)),
    (("average3", 0), ("separable5", 1)),
    (("identity", 3), ("average3", 2)),
    (("separable3", 2), ("max3", 0)),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Value:
    """A tensor [batch, channels, extent, extent]."""

    name: str
    channels: int
    extent: int


def build_nasnet(
    *, batch: int, seed: int, cells: int = CELLS, filters: int = FILTERS, extent: int = CIFAR_EXTENT
) -> onnx.ModelProto:
    """``x`` [batch, 3, 32, 32] to ``logits`` [batch, 10]; ``cells`` normal cells in each stage."""
    graph = GraphWriter("nasnet")
    image = graph.input("x", (batch, 3, extent, extent))
    stem = conv_bn(graph, seed, "stem", image, 3, STEM_FACTOR * filters, 3)
    value = _Value(name=stem, channels=STEM_FACTOR * filters, extent=extent)
    return _stages(graph, seed, value, value, cells=cells, filters=filters, classes=CIFAR_CLASSES, batch=batch)


def build_nasnet_imagenet(*, batch: int, seed: int, extent: int = 224) -> onnx.ModelProto:
    """``x`` [batch, 3, 224, 224] to ``logits`` [batch, 1000].

    The first convolution pads, so that its image has 112 pixels a side; the published one does not, and has 111.
    """
    graph = GraphWriter("nasnet_imagenet")
    image = graph.input("x", (batch, 3, extent, extent))
    stem = conv_bn(graph, seed, "stem", image, 3, IMAGENET_STEM, 3, stride=2)
    before = value = _Value(name=stem, channels=IMAGENET_STEM, extent=extent // 2)
    for index, width in enumerate((IMAGENET_FILTERS // 4, IMAGENET_FILTERS // 2)):
        before, value = value, _Cell(graph, seed, f"stem{index}", width, 2).write(_REDUCTION, value, before)
    sizes = {"cells": IMAGENET_CELLS, "filters": IMAGENET_FILTERS, "classes": IMAGENET_CLASSES}
    return _stages(graph, seed, value, before, batch=batch, **sizes)


def _stages(
    graph: GraphWriter, seed: int, value: _Value, before: _Value, *, cells: int, filters: int, classes: int, batch: int
) -> onnx.ModelProto:
    """Three stages of ``cells`` normal cells behind ``value``, whose earlier one is ``before``, and the classifier."""
    for stage in range(3):
        width = filters * 2**stage
        if stage:
            before, value = value, _Cell(graph, seed, f"reduce{stage}", width, 2).write(_REDUCTION, value, before)
        for index in range(cells):
            cell = _Cell(graph, seed, f"cell{stage}_{index}", width, 1)
            before, value = value, cell.write(_NORMAL, value, before)
    pooled = graph.op("Flatten", graph.op("GlobalAveragePool", graph.op("Relu", value.name)))
    dense(graph, seed, "classes", pooled, value.channels, classes, "logits")
    graph.output("logits", (batch, classes))
    return graph.model({"weights": f"random, seed {seed}"})


def build_nasnet_cell(*, batch: int, seed: int, filters: int = FILTERS, extent: int = CIFAR_EXTENT) -> onnx.ModelProto:
    """A normal cell of the first stage: what two cells before it made, ``last`` and ``before``, to ``y``."""
    graph, channels = GraphWriter("nasnet_cell"), (len(_NORMAL) + 1) * filters
    shape = (batch, channels, extent, extent)
    last, before = (
        _Value(name=graph.input(name, shape), channels=channels, extent=extent) for name in ("last", "before")
    )
    made = _Cell(graph, seed, "cell", filters, 1).write(_NORMAL, last, before)
    graph.op("Relu", made.name, name="y")
    graph.output("y", (batch, made.channels, extent, extent))
    return graph.model({"weights": f"random, seed {seed}"})


class _Cell:
    """Writes one cell of ``width`` filters; ``stride`` 2 for a reduction."""

    def __init__(self, graph: GraphWriter, seed: int, name: str, width: int, stride: int) -> None:
        self.graph, self.seed, self.name, self.width, self.stride = graph, seed, name, width, stride

    def write(self, pairs: tuple[tuple[_Branch, _Branch], ...], last: _Value, before: _Value) -> _Value:
        states = [self._narrowed("last", last), self._fitted(before, last)]
        for number, pair in enumerate(pairs):
            parts = [self._branch(f"{number}{side}", *branch, states) for side, branch in zip("ab", pair, strict=True)]
            added = self.graph.op("Add", *(part.name for part in parts))
            states.append(_Value(name=added, channels=self.width, extent=parts[0].extent))
        kept = states[1:] if self.stride == 1 else states[3:]  # as published, whether a pair has used them or not
        joined = self.graph.op("Concat", *(state.name for state in kept), axis=1)
        return _Value(name=joined, channels=len(kept) * self.width, extent=states[-1].extent)

    def _branch(self, name: str, operation: str, index: int, states: list[_Value]) -> _Value:
        """One operation; those on a cell's inputs, and not on its own sums, have the cell's stride."""
        source, stride = states[index], self.stride if index < 2 else 1
        extent = -(-source.extent // stride)
        kernel = int(operation[-1]) if operation[-1].isdigit() else 1
        if operation.startswith("separable"):
            return _Value(name=self._separable(name, source, kernel, stride), channels=self.width, extent=extent)
        if operation == "identity":
            assert stride == 1
            return source
        kind = "AveragePool" if operation == "average3" else "MaxPool"
        window: dict[str, Any] = {"kernel_shape": [kernel] * 2, "strides": [stride] * 2, "pads": [kernel // 2] * 4}
        return _Value(name=self.graph.op(kind, source.name, **window), channels=self.width, extent=extent)

    def _separable(self, name: str, source: _Value, kernel: int, stride: int) -> str:
        """Twice: ReLU, a depthwise convolution, a pointwise one, BatchNormalization."""
        value = source.name
        for turn in range(2):
            label = f"{self.name}_{name}_{turn}"
            value = self._depthwise(f"{label}_d", self.graph.op("Relu", value), kernel, stride if turn == 0 else 1)
            value = conv_bn(self.graph, self.seed, label, value, self.width, self.width, 1)
        return value

    def _depthwise(self, name: str, value: str, kernel: int, stride: int) -> str:
        shape = (self.width, 1, kernel, kernel)
        weight = self.graph.constant(name, he_normal(self.seed, name, shape, fan_in=kernel * kernel))
        window: dict[str, Any] = {"kernel_shape": [kernel] * 2, "strides": [stride] * 2, "pads": [kernel // 2] * 4}
        return self.graph.op("Conv", value, weight, group=self.width, **window)

    def _narrowed(self, label: str, value: _Value) -> _Value:
        """ReLU and a 1x1 convolution to this cell's width."""
        name = f"{self.name}_{label}"
        rectified = self.graph.op("Relu", value.name)
        made = conv_bn(self.graph, self.seed, name, rectified, value.channels, self.width, 1)
        return _Value(name=made, channels=self.width, extent=value.extent)

    def _fitted(self, before: _Value, last: _Value) -> _Value:
        """The earlier input with the later one's extent and this cell's width."""
        if before.extent != last.extent:
            return self._halved(before)
        return before if before.channels == self.width else self._narrowed("before", before)

    def _halved(self, value: _Value) -> _Value:
        """Every second pixel, and its neighbour below and to the right, to half of the channels each, joined."""
        name, rectified = f"{self.name}_halved", self.graph.op("Relu", value.name)
        shifted = self.graph.op("Pad", rectified, self.graph.constant("shift", np.array([0, 0, 0, 0, 0, 0, 1, 1])))
        shifted = self.graph.op(
            "Slice",
            shifted,
            self.graph.constant("ones", np.array([1, 1])),
            self.graph.constant("ends", np.array([2**31, 2**31])),
            self.graph.constant("image_axes", np.array([2, 3])),
        )
        widths = (self.width // 2, self.width - self.width // 2)
        paths = zip((rectified, shifted), widths, strict=True)
        parts = [self._half(f"{name}{side}", path, value.channels, width) for side, (path, width) in enumerate(paths)]
        joined = batch_norm(self.graph, self.seed, name, self.graph.op("Concat", *parts, axis=1), self.width)
        return _Value(name=joined, channels=self.width, extent=-(-value.extent // 2))

    def _half(self, name: str, value: str, channels: int, width: int) -> str:
        weight = he_normal(self.seed, name, (width, channels, 1, 1), fan_in=channels)
        return self.graph.op(
            "Conv", value, self.graph.constant(name, weight), kernel_shape=[1, 1], strides=[2, 2], pads=[0] * 4
        )
