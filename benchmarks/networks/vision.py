"""VGG-16 and ResNet-18 with seeded weights.

Bolt's evaluation has six convolutional networks, two of each of three families (§4.2, Figure 10): these two, the onnx
wheel's VGG-19 and ResNet-50 (`light`), and RepVGG-A0 and B0 (`repvgg`). Weights are drawn by the He rule,
BatchNormalization statistics near 1.
"""

from __future__ import annotations

import itertools

import onnx

from .convolutional import conv_bn, dense
from .graph import GraphWriter, he_normal, small_normal

IMAGE_EXTENT, CLASSES = 224, 1000
VGG16_STAGES = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))
"""Filters and 3x3 convolutions of each stage, which a pool ends (Simonyan and Zisserman 2015, Table 1, column D)."""
VGG_HIDDEN = 4096
RESNET18_STAGES = ((64, 1), (128, 2), (256, 2), (512, 2))
"""Filters and first stride of each stage of two blocks (He et al. 2016, Table 1)."""
RESNET18_BLOCKS = 2


def build_vgg16(*, batch: int, seed: int, extent: int = IMAGE_EXTENT, hidden: int = VGG_HIDDEN) -> onnx.ModelProto:
    """``x`` [batch, 3, extent, extent] to ``logits`` [batch, 1000]; ``extent`` is a multiple of 32."""
    graph = GraphWriter("vgg16")
    value, inner = graph.input("x", (batch, 3, extent, extent)), 3
    for stage, (filters, count) in enumerate(VGG16_STAGES):
        for index in range(count):
            value = graph.op("Relu", _biased(graph, seed, f"conv{stage}_{index}", value, inner, filters))
            inner = filters
        value = graph.op("MaxPool", value, kernel_shape=[2, 2], strides=[2, 2])
    value = graph.op("Flatten", value)
    widths = (inner * (extent // 32) ** 2, hidden, hidden)
    for index, (before, after) in enumerate(itertools.pairwise(widths)):
        value = graph.op("Relu", dense(graph, seed, f"dense{index}", value, before, after))
    dense(graph, seed, "classes", value, hidden, CLASSES, "logits")
    graph.output("logits", (batch, CLASSES))
    return graph.model({"weights": f"random, seed {seed}"})


def _biased(graph: GraphWriter, seed: int, name: str, value: str, inner: int, outer: int) -> str:
    """A 3x3 convolution with its bias."""
    shape = (outer, inner, 3, 3)
    weight = graph.constant(f"{name}_w", he_normal(seed, f"{name}_w", shape, fan_in=inner * 9))
    bias = graph.constant(f"{name}_b", small_normal(seed, f"{name}_b", (outer,)))
    return graph.op("Conv", value, weight, bias, kernel_shape=[3, 3], pads=[1] * 4)


def build_resnet18(*, batch: int, seed: int, extent: int = IMAGE_EXTENT) -> onnx.ModelProto:
    """``x`` [batch, 3, extent, extent] to ``logits`` [batch, 1000]."""
    graph = GraphWriter("resnet18")
    value = graph.input("x", (batch, 3, extent, extent))
    value = graph.op("Relu", conv_bn(graph, seed, "stem", value, 3, 64, 7, stride=2))
    value, inner = graph.op("MaxPool", value, kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4), 64
    for stage, (outer, stride) in enumerate(RESNET18_STAGES):
        for block in range(RESNET18_BLOCKS):
            step = stride if block == 0 else 1
            value, inner = _basic_block(graph, seed, f"stage{stage}_{block}", value, (inner, outer), step), outer
    value = graph.op("Flatten", graph.op("GlobalAveragePool", value))
    dense(graph, seed, "classes", value, inner, CLASSES, "logits")
    graph.output("logits", (batch, CLASSES))
    return graph.model({"weights": f"random, seed {seed}"})


def _basic_block(graph: GraphWriter, seed: int, name: str, value: str, channels: tuple[int, int], stride: int) -> str:
    """Two 3x3 convolutions and a shortcut, which is a 1x1 one where extents change."""
    inner, outer = channels
    branch = graph.op("Relu", conv_bn(graph, seed, f"{name}_a", value, inner, outer, 3, stride=stride))
    branch = conv_bn(graph, seed, f"{name}_b", branch, outer, outer, 3)
    if inner != outer:
        value = conv_bn(graph, seed, f"{name}_s", value, inner, outer, 1, stride=stride)
    return graph.op("Relu", graph.op("Add", branch, value))
