"""RepVGG (Ding et al., CVPR 2021) as it is trained and as it runs, and Bolt's variants of it (§4.3).

A block is trained as the sum of a 3x3 convolution, a 1x1 convolution and, where the shape stays, the input itself, each
with BatchNormalization. At run time all three are one 3x3 convolution with a bias: BatchNormalization is a scale and a
shift of each filter, a 1x1 filter is the middle of a 3x3 one, and the input itself is a filter of a single 1. The
sums are made in float64.

Bolt's variants have another activation, or a 1x1 convolution of as many filters behind each block but the last
("RepVGGAug"), which persistent kernels add at little cost.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import onnx

from tvm_ext.support.arrays import Array

from .graph import FloatArray, GraphWriter, he_normal, near_one, small_normal

RepVggName = Literal["a0", "a1", "b0"]
Activation = Literal["Relu", "Gelu", "HardSwish", "Softplus"]

LAYERS: dict[str, tuple[int, ...]] = {"a0": (2, 4, 14, 1), "a1": (2, 4, 14, 1), "b0": (4, 6, 16, 1)}
WIDTHS: dict[str, tuple[float, float]] = {"a0": (0.75, 2.5), "a1": (1.0, 2.5), "b0": (1.0, 2.5)}
"""Factors of the stages' 64, 64, 128 and 256 channels, and of the last one's 512 (the paper's a and b)."""

CLASSES = 1000
EPSILON = 1e-5
OPSET = 20
"""The first with Gelu."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RepVggBlock:
    """Channels and stride of one block; of ``inner`` = ``outer`` at stride 1 the input itself is a branch."""

    name: str
    inner: int
    outer: int
    stride: int

    @property
    def has_identity(self) -> bool:
        return self.inner == self.outer and self.stride == 1


@dataclass(frozen=True, kw_only=True, slots=True)
class RepVggBranch:
    """A convolution without bias (None: the input itself) and its BatchNormalization."""

    weight: FloatArray | None
    scale: FloatArray
    shift: FloatArray
    mean: FloatArray
    variance: FloatArray

    def as_3x3(self) -> tuple[Array, Array]:
        """The same as 3x3 filters and a bias, in float64."""
        weight, outer = self.weight, len(self.scale)
        if weight is None:
            weight = np.eye(outer, dtype=np.float32).reshape(outer, outer, 1, 1)
        border = (3 - weight.shape[2]) // 2
        filters = np.pad(weight.astype("f8"), ((0, 0), (0, 0), (border, border), (border, border)))
        factor = self.scale.astype("f8") / np.sqrt(self.variance.astype("f8") + EPSILON)
        return filters * factor.reshape(-1, 1, 1, 1), self.shift - self.mean * factor


def blocks_of(name: RepVggName) -> Iterator[RepVggBlock]:
    """The blocks of a network, each stage's first of stride 2."""
    narrow, wide = WIDTHS[name]
    inner = 3
    stages = zip((1, *LAYERS[name]), (64, 64, 128, 256, 512), (*[narrow] * 4, wide), strict=True)
    for stage, (count, width, factor) in enumerate(stages):
        outer = min(64, int(64 * narrow)) if stage == 0 else int(width * factor)
        for position in range(count):
            stride = 2 if position == 0 else 1
            yield RepVggBlock(name=f"stage{stage}_{position}", inner=inner, outer=outer, stride=stride)
            inner = outer


def branches_of(block: RepVggBlock, seed: int) -> list[RepVggBranch]:
    """The block's branches with seeded weights that keep the scale of activations."""
    sizes: list[int | None] = [3, 1, None] if block.has_identity else [3, 1]
    return [_branch(f"{block.name}_{size or 'same'}", block, size, seed, len(sizes)) for size in sizes]


def _branch(name: str, block: RepVggBlock, size: int | None, seed: int, count: int) -> RepVggBranch:
    shape = (block.outer, block.inner, size or 1, size or 1)
    fan_in = block.inner * (size or 1) ** 2 * count
    return RepVggBranch(
        weight=None if size is None else he_normal(seed, f"{name}_w", shape, fan_in=fan_in),
        scale=near_one(seed, f"{name}_scale", (block.outer,), 0.2) * np.float32(0.5 if size is None else 1),
        shift=small_normal(seed, f"{name}_shift", (block.outer,)),
        mean=small_normal(seed, f"{name}_mean", (block.outer,)),
        variance=near_one(seed, f"{name}_variance", (block.outer,), 0.2),
    )


def reparameterised(branches: list[RepVggBranch]) -> tuple[FloatArray, FloatArray]:
    """Filters and bias of the one 3x3 convolution that computes the sum of the branches."""
    parts = [branch.as_3x3() for branch in branches]
    filters, biases = (sum(items, np.zeros(())) for items in zip(*parts, strict=True))
    return filters.astype(np.float32), biases.astype(np.float32)


def build_repvgg(
    name: RepVggName = "a0",
    *,
    batch: int = 1,
    size: int = 224,
    seed: int = 0,
    trained: bool = False,
    activation: Activation = "Relu",
    deepened: bool | int = False,
    classes: int = CLASSES,
    blocks: Sequence[RepVggBlock] | None = None,
) -> onnx.ModelProto:
    """Input ``x`` float32 [batch, 3, size, size], output ``logits`` [batch, classes].

    ``trained``: with all branches, as it is trained; otherwise re-parameterised. ``deepened``: with a 1x1
    convolution, its bias and activation behind each block but the last, or behind so many of the first blocks.
    ``blocks``: others than the network's own.
    """
    graph = GraphWriter(f"repvgg_{name}", opset=OPSET)
    value = graph.input("x", (batch, 3, size, size))
    blocks = list(blocks or blocks_of(name))
    deep = len(blocks) - 1 if deepened is True else int(deepened)
    for position, block in enumerate(blocks):
        branches = branches_of(block, seed)
        value = _sum(graph, value, block, branches) if trained else _one(graph, value, block, branches)
        value = graph.op(activation, value)
        if position < deep:
            value = graph.op(activation, _pointwise(graph, value, block, seed))
    value = graph.op("Flatten", graph.op("GlobalAveragePool", value))
    channels = blocks[-1].outer
    weight = graph.constant("fc_w", he_normal(seed, "fc_w", (classes, channels), fan_in=channels))
    bias = graph.constant("fc_b", small_normal(seed, "fc_b", (classes,)))
    graph.op("Gemm", value, weight, bias, transB=1, name="logits")
    graph.output("logits", (batch, classes))
    return graph.model({"weights": f"random, seed {seed}"})


def _convolution(graph: GraphWriter, source: str, name: str, weight: FloatArray, stride: int, *bias: str) -> str:
    size, tensor = weight.shape[2], graph.constant(f"{name}_w", weight)
    shape, strides, pads = [size, size], [stride, stride], [size // 2] * 4
    return graph.op("Conv", source, tensor, *bias, kernel_shape=shape, strides=strides, pads=pads)


def _sum(graph: GraphWriter, source: str, block: RepVggBlock, branches: list[RepVggBranch]) -> str:
    values = []
    for position, branch in enumerate(branches):
        name = f"{block.name}_{position}"
        parts = {"s": branch.scale, "b": branch.shift, "m": branch.mean, "v": branch.variance}
        constants = [graph.constant(f"{name}_{key}", array) for key, array in parts.items()]
        value = source
        if branch.weight is not None:
            value = _convolution(graph, source, name, branch.weight, block.stride)
        values.append(graph.op("BatchNormalization", value, *constants, epsilon=EPSILON))
    total = values[0]
    for value in values[1:]:
        total = graph.op("Add", total, value)
    return total


def _one(graph: GraphWriter, source: str, block: RepVggBlock, branches: list[RepVggBranch]) -> str:
    filters, bias = reparameterised(branches)
    return _convolution(graph, source, block.name, filters, block.stride, graph.constant(f"{block.name}_b", bias))


def _pointwise(graph: GraphWriter, source: str, block: RepVggBlock, seed: int) -> str:
    name = f"{block.name}_deep"
    weight = he_normal(seed, name, (block.outer, block.outer, 1, 1), fan_in=block.outer)
    bias = graph.constant(f"{name}_b", small_normal(seed, f"{name}_b", (block.outer,)))
    return _convolution(graph, source, name, weight, 1, bias)
