"""Nodes drawn at random that compute with quantised numbers."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.unit.relay_passes.onnx.drawn_nodes.values import Generator, numbers
from tests.unit.relay_passes.onnx.drawn_nodes.windows import conv_shapes
from tests.unit.relay_passes.onnx.random_nodes import NodeCase


def quantised(draw: Generator, shape: Any) -> Any:
    return numbers(draw, shape, str(draw.choice(["int8", "uint8"])))


def conv_integer(draw: Generator) -> NodeCase:
    data, weight, attributes = conv_shapes(draw)
    x, w = numbers(draw, data, "uint8"), quantised(draw, weight)
    operands = {
        "x": x,
        "w": w,
        "x_zero": numbers(draw, (), "uint8") if draw.integers(2) else None,
        "w_zero": numbers(draw, (), str(w.dtype)) if draw.integers(2) else None,
    }
    known = ("w", "w_zero") if draw.integers(2) else ()
    return NodeCase(operator="ConvInteger", operands=operands, attributes=attributes, known=known, by_runtime=True)


def qlinear_conv(draw: Generator) -> NodeCase:
    data, weight, attributes = conv_shapes(draw)
    x, w = numbers(draw, data, "uint8"), numbers(draw, weight, "int8")
    each = [weight[0]] if draw.integers(2) else []
    operands = {
        "x": x,
        "x_scale": np.float32(0.02),
        "x_zero": numbers(draw, (), "uint8"),
        "w": w,
        "w_scale": draw.uniform(0.01, 0.03, each).astype(np.float32),
        "w_zero": np.zeros(each, np.int8),
        "y_scale": np.float32(draw.uniform(0.1, 0.5)),
        "y_zero": numbers(draw, (), "uint8"),
        "b": numbers(draw, [weight[0]], "int32") if draw.integers(2) else None,
    }
    known = ("w", "w_scale", "w_zero", "x_scale", "y_scale") if draw.integers(2) else ()
    return NodeCase(operator="QLinearConv", operands=operands, attributes=attributes, known=known, by_runtime=True)


def qlinear_matmul(draw: Generator) -> NodeCase:
    rows, inner, columns = (int(size) for size in draw.integers(2, 7, 3))
    batch = draw.integers(1, 4, int(draw.integers(0, 3))).tolist()
    a, b = quantised(draw, [*batch, rows, inner]), quantised(draw, [*batch, inner, columns])
    each = [columns] if draw.integers(2) else []
    operands = {
        "a": a,
        "a_scale": np.float32(0.02),
        "a_zero": numbers(draw, (), str(a.dtype)),
        "b": b,
        "b_scale": draw.uniform(0.01, 0.03, each).astype(np.float32),
        "b_zero": numbers(draw, each, str(b.dtype)),
        "y_scale": np.float32(draw.uniform(0.05, 0.5)),
        "y_zero": numbers(draw, (), str(a.dtype)),
    }
    return NodeCase(operator="QLinearMatMul", operands=operands, opset=21, outputs=1)


def by_blocks(draw: Generator) -> NodeCase:
    rank, block = int(draw.integers(1, 4)), int(draw.integers(2, 5))
    shape = draw.integers(1, 4, rank)
    axis = int(draw.integers(rank))
    scales = shape.copy()
    shape[axis] *= block
    kind = str(draw.choice(["int8", "uint8", "int16", "uint16"]))
    scale = draw.uniform(0.1, 2, scales).astype(np.float32)
    zero = numbers(draw, scales, kind)
    attributes = {"axis": axis, "block_size": block}
    quantise = bool(draw.integers(2))
    x = (draw.standard_normal(shape) * 30).astype(np.float32) if quantise else numbers(draw, shape, kind)
    operands = {"x": x, "scale": scale, "zero": zero}
    operator = "QuantizeLinear" if quantise else "DequantizeLinear"
    return NodeCase(operator=operator, operands=operands, attributes=attributes)


DRAWN = (by_blocks, conv_integer, qlinear_conv, qlinear_matmul)
