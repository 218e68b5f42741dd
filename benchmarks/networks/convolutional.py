"""ResNeXt-29 (16x64d), ResNeXt-101 (64x4d) and AlexNet: networks of Rammer's evaluation, with seeded weights.

Weights are drawn by the He rule, BatchNormalization statistics near 1.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import onnx

from .graph import GraphWriter, he_normal, near_one, small_normal

RESNEXT_STAGES = ((256, 1), (512, 2), (1024, 2))
"""Output channels and first stride of each stage of three blocks (Xie et al. 2017, §5.3)."""
RESNEXT_BLOCKS, RESNEXT_GROUPS, RESNEXT_WIDTH = 3, 16, 64
CIFAR_EXTENT, CIFAR_CLASSES = 32, 10

RESNEXT101_BLOCKS, RESNEXT101_GROUPS, RESNEXT101_WIDTH = (3, 4, 23, 3), 64, 4
"""Blocks of each stage, for ImageNet (Xie et al. 2017, Table 1 and §5.1)."""

# Filters, kernel, stride and padding of AlexNet's convolutions, and whether a pool follows: the one-tower form
# (Krizhevsky 2014), for Rammer's paper says no more than the name.
_ALEXNET = (
    (64, 11, 4, 2, True),
    (192, 5, 1, 2, True),
    (384, 3, 1, 1, False),
    (256, 3, 1, 1, False),
    (256, 3, 1, 1, True),
)
_ALEXNET_DENSE = (256 * 6 * 6, 4096, 4096, 1000)


def build_resnext29(
    *, batch: int, seed: int, width: int = RESNEXT_WIDTH, extent: int = CIFAR_EXTENT
) -> onnx.ModelProto:
    """``x`` [batch, 3, 32, 32] to ``logits`` [batch, 10]; grouped convolutions of 16 groups, ``width`` channels each.

    A stage has twice the channels of the one before: 16 x 64, 16 x 128, 16 x 256 inside the blocks.
    """
    graph = GraphWriter("resnext29")
    value = graph.input("x", (batch, 3, extent, extent))
    value = graph.op("Relu", conv_bn(graph, seed, "stem", value, 3, 64, 3))
    inner = 64
    for stage, (outer, stride) in enumerate(RESNEXT_STAGES):
        for block in range(RESNEXT_BLOCKS):
            name, step = f"stage{stage}_{block}", stride if block == 0 else 1
            middle = RESNEXT_GROUPS * width * 2**stage
            value = _resnext_block(graph, seed, name, value, (inner, middle, outer), step, RESNEXT_GROUPS)
            inner = outer
    return _classified(graph, seed, value, inner, CIFAR_CLASSES, batch)


def build_resnext101(*, batch: int, seed: int, extent: int = 224) -> onnx.ModelProto:
    """``x`` [batch, 3, 224, 224] to ``logits`` [batch, 1000]; 64 groups of 4 channels in the first stage's blocks."""
    graph = GraphWriter("resnext101")
    value = graph.input("x", (batch, 3, extent, extent))
    value = graph.op("Relu", conv_bn(graph, seed, "stem", value, 3, 64, 7, stride=2))
    value = graph.op("MaxPool", value, kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4)
    inner = 64
    for stage, blocks in enumerate(RESNEXT101_BLOCKS):
        channels = RESNEXT101_GROUPS * RESNEXT101_WIDTH * 2**stage
        for block in range(blocks):
            step = 2 if stage and not block else 1
            widths = (inner, channels, channels)
            value = _resnext_block(
                graph, seed, f"stage{stage}_{block}", value, widths, step, RESNEXT101_GROUPS, gain=0.3
            )
            inner = channels
    return _classified(graph, seed, value, inner, 1000, batch)


def _resnext_block(
    graph: GraphWriter,
    seed: int,
    name: str,
    value: str,
    channels: tuple[int, int, int],
    stride: int,
    groups: int,
    gain: float = 1.0,
) -> str:
    inner, middle, outer = channels
    branch = graph.op("Relu", conv_bn(graph, seed, f"{name}_a", value, inner, middle, 1))
    branch = conv_bn(graph, seed, f"{name}_b", branch, middle, middle, 3, stride=stride, groups=groups)
    branch = conv_bn(graph, seed, f"{name}_c", graph.op("Relu", branch), middle, outer, 1, gain=gain)
    if inner != outer:
        value = conv_bn(graph, seed, f"{name}_s", value, inner, outer, 1, stride=stride)
    return graph.op("Relu", graph.op("Add", branch, value))


def _classified(graph: GraphWriter, seed: int, value: str, channels: int, classes: int, batch: int) -> onnx.ModelProto:
    """Global average, one dense layer, ``logits``."""
    pooled = graph.op("Flatten", graph.op("GlobalAveragePool", value))
    dense(graph, seed, "classes", pooled, channels, classes, "logits")
    graph.output("logits", (batch, classes))
    return graph.model({"weights": f"random, seed {seed}"})


def build_alexnet(*, batch: int, seed: int) -> onnx.ModelProto:
    """``x`` [batch, 3, 224, 224] to ``logits`` [batch, 1000]."""
    graph = GraphWriter("alexnet")
    value, inner = graph.input("x", (batch, 3, 224, 224)), 3
    for index, (filters, kernel, stride, pad, has_pool) in enumerate(_ALEXNET):
        shape = (filters, inner, kernel, kernel)
        weight = graph.constant(f"w{index}", he_normal(seed, f"w{index}", shape, fan_in=inner * kernel * kernel))
        bias = graph.constant(f"b{index}", small_normal(seed, f"b{index}", (filters,)))
        window: dict[str, Any] = {"kernel_shape": [kernel] * 2, "strides": [stride] * 2, "pads": [pad] * 4}
        value, inner = graph.op("Relu", graph.op("Conv", value, weight, bias, **window)), filters
        if has_pool:
            value = graph.op("MaxPool", value, kernel_shape=[3, 3], strides=[2, 2])
    value = graph.op("Flatten", value)
    for index, (inner, outer) in enumerate(itertools.pairwise(_ALEXNET_DENSE)):
        is_last = index == len(_ALEXNET_DENSE) - 2
        value = dense(graph, seed, f"dense{index}", value, inner, outer, "logits" if is_last else "")
        value = value if is_last else graph.op("Relu", value)
    graph.output("logits", (batch, _ALEXNET_DENSE[-1]))
    return graph.model({"weights": f"random, seed {seed}"})


def conv_bn(
    graph: GraphWriter,
    seed: int,
    name: str,
    value: str,
    inner: int,
    outer: int,
    kernel: int,
    *,
    stride: int = 1,
    groups: int = 1,
    gain: float = 1.0,
) -> str:
    """A convolution without bias that keeps the image (divided by ``stride``), and BatchNormalization of ``gain``."""
    shape = (outer, inner // groups, kernel, kernel)
    weight = graph.constant(f"{name}_w", he_normal(seed, f"{name}_w", shape, fan_in=int(np.prod(shape[1:]))))
    pads = [kernel // 2] * 4
    window: dict[str, Any] = {"kernel_shape": [kernel] * 2, "strides": [stride] * 2, "pads": pads, "group": groups}
    return batch_norm(graph, seed, name, graph.op("Conv", value, weight, **window), outer, gain)


def batch_norm(graph: GraphWriter, seed: int, name: str, value: str, channels: int, gain: float = 1.0) -> str:
    statistics = (
        graph.constant(f"{name}_gamma", near_one(seed, f"{name}_gamma", (channels,), spread=0.2) * np.float32(gain)),
        graph.constant(f"{name}_beta", small_normal(seed, f"{name}_beta", (channels,))),
        graph.constant(f"{name}_mean", small_normal(seed, f"{name}_mean", (channels,))),
        graph.constant(f"{name}_var", near_one(seed, f"{name}_var", (channels,), spread=0.5)),
    )
    return graph.op("BatchNormalization", value, *statistics)


def dense(graph: GraphWriter, seed: int, name: str, value: str, inner: int, outer: int, result: str = "") -> str:
    """A Gemm with its bias; ``result``: what it is called."""
    weight = graph.constant(f"{name}_w", he_normal(seed, f"{name}_w", (outer, inner), fan_in=inner))
    bias = graph.constant(f"{name}_b", small_normal(seed, f"{name}_b", (outer,)))
    return graph.op("Gemm", value, weight, bias, transB=1, name=result)
