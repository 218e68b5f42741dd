"""MobileNetV2 and one of its blocks."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx

from .graph import GraphWriter, he_normal, near_one, small_normal

MOBILENET_CHANNELS, MOBILENET_EXPANSION, MOBILENET_EXTENT = 24, 6, 56
"""The second block of MobileNetV2 at 56x56 (Sandler et al. 2018, Table 2)."""

MOBILENET_STAGES = (
    (1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1)
)  # fmt: skip
"""Of the same table: expansion, channels, blocks, stride of the first."""
MOBILENET_STEM, MOBILENET_HEAD, CLASSES = 32, 1280, 1000


def build_mobilenet_block(*, batch: int, seed: int) -> onnx.ModelProto:
    """Inverted residual block: 1x1 expand, depthwise 3x3, 1x1 project, each with BatchNormalization; ReLU6; residual.

    Input ``x`` and output ``y`` are float32 [batch, 24, 56, 56].
    """
    graph = GraphWriter("mobilenet_block")
    narrow, wide = MOBILENET_CHANNELS, MOBILENET_CHANNELS * MOBILENET_EXPANSION
    shape = (batch, narrow, MOBILENET_EXTENT, MOBILENET_EXTENT)
    source = graph.input("x", shape)
    value = _conv_bn(graph, seed, "expand", source, (wide, narrow, 1, 1))
    value = _relu6(graph, value)
    value = _conv_bn(graph, seed, "depthwise", value, (wide, 1, 3, 3), group=wide, pads=[1, 1, 1, 1])
    value = _relu6(graph, value)
    value = _conv_bn(graph, seed, "project", value, (narrow, wide, 1, 1))
    graph.output(graph.op("Add", source, value, name="y"), shape)
    return graph.model({"weights": f"random, seed {seed}"})


def build_mobilenet_v2(*, batch: int, seed: int) -> onnx.ModelProto:
    """MobileNetV2 (Sandler et al. 2018, Table 2): input ``x`` float32 [batch, 3, 224, 224], output ``logits``."""
    graph = GraphWriter("mobilenet_v2")
    value = graph.input("x", (batch, 3, 224, 224))
    value = _relu6(graph, _conv_bn(graph, seed, "stem", value, (MOBILENET_STEM, 3, 3, 3), pads=[1] * 4, stride=2))
    channels = MOBILENET_STEM
    for stage, (expansion, outer, repeats, stride) in enumerate(MOBILENET_STAGES):
        for index in range(repeats):
            name = f"block{stage}_{index}"
            value = _inverted_residual(
                graph, seed, name, value, (channels, outer), expansion, stride if index == 0 else 1
            )
            channels = outer
    value = _relu6(graph, _conv_bn(graph, seed, "head", value, (MOBILENET_HEAD, channels, 1, 1)))
    value = graph.op("Flatten", graph.op("GlobalAveragePool", value))
    weight = graph.constant("w", he_normal(seed, "w", (CLASSES, MOBILENET_HEAD), fan_in=MOBILENET_HEAD))
    graph.op("Gemm", value, weight, graph.constant("b", small_normal(seed, "b", (CLASSES,))), transB=1, name="logits")
    graph.output("logits", (batch, CLASSES))
    return graph.model({"weights": f"random, seed {seed}"})


def _inverted_residual(
    graph: GraphWriter, seed: int, name: str, source: str, channels: tuple[int, int], expansion: int, stride: int
) -> str:
    """1x1 expand (where it does), depthwise 3x3, 1x1 project; the input is added where it has the output's shape."""
    narrow, outer = channels
    wide = narrow * expansion
    value = source
    if expansion > 1:
        value = _relu6(graph, _conv_bn(graph, seed, f"{name}_expand", value, (wide, narrow, 1, 1)))
    depthwise = _conv_bn(
        graph, seed, f"{name}_depthwise", value, (wide, 1, 3, 3), group=wide, pads=[1] * 4, stride=stride
    )
    value = _conv_bn(graph, seed, f"{name}_project", _relu6(graph, depthwise), (outer, wide, 1, 1))
    return graph.op("Add", source, value) if stride == 1 and narrow == outer else value


def _conv_bn(
    graph: GraphWriter,
    seed: int,
    name: str,
    source: str,
    shape: tuple[int, int, int, int],
    group: int = 1,
    pads: list[int] | None = None,
    stride: int = 1,
) -> str:
    fan_in = shape[1] * shape[2] * shape[3]
    weight = graph.constant(f"{name}_w", he_normal(seed, f"{name}_w", shape, fan_in=fan_in))
    strides = {"strides": [stride, stride]} if stride > 1 else {}
    window: dict[str, Any] = {"kernel_shape": list(shape[2:]), "pads": pads or [0, 0, 0, 0], **strides}
    value = graph.op("Conv", source, weight, group=group, **window)
    channels = (shape[0],)
    statistics = (
        graph.constant(f"{name}_gamma", near_one(seed, f"{name}_gamma", channels, spread=0.2)),
        graph.constant(f"{name}_beta", small_normal(seed, f"{name}_beta", channels)),
        graph.constant(f"{name}_mean", small_normal(seed, f"{name}_mean", channels)),
        graph.constant(f"{name}_var", near_one(seed, f"{name}_var", channels, spread=0.5)),
    )
    return graph.op("BatchNormalization", value, *statistics)


def _relu6(graph: GraphWriter, source: str) -> str:
    return graph.op("Clip", source, graph.constant("zero", np.float32(0)), graph.constant("six", np.float32(6)))
