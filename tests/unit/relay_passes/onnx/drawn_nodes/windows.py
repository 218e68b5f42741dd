"""Nodes drawn at random that move windows over an image: pooling, convolution and their inverses."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.unit.relay_passes.onnx.drawn_nodes.values import Generator, numbers
from tests.unit.relay_passes.onnx.random_nodes import NodeCase


def col2im(draw: Generator) -> NodeCase:
    rank = int(draw.integers(1, 4))
    block, strides, dilations = (draw.integers(1, 4, rank) for _ in range(3))
    pads = draw.integers(0, 2, 2 * rank)
    image = (block - 1) * dilations + 1 + draw.integers(0, 5, rank)
    counts = (image + pads[:rank] + pads[rank:] - (block - 1) * dilations - 1) // strides + 1
    channels = int(draw.integers(1, 3))
    columns = numbers(
        draw, [2, channels * block.prod(), counts.prod()], str(draw.choice(["float32", "float64", "int32"]))
    )
    return NodeCase(
        operator="Col2Im",
        operands={"x": columns, "image": image.astype(np.int64), "block": block.astype(np.int64)},
        attributes={"strides": strides.tolist(), "dilations": dilations.tolist(), "pads": pads.tolist()},
        known=("image", "block"),
    )


def pool(draw: Generator) -> tuple[dict[str, Any], Any, str]:
    rank = int(draw.integers(1, 4))
    kernel, strides = (draw.integers(1, 4, rank) for _ in range(2))
    dtype = str(draw.choice(["float32", "float64", "int8", "uint8"]))
    attributes: dict[str, Any] = {"kernel_shape": kernel.tolist(), "strides": strides.tolist()}
    x = numbers(draw, [2, 3, *(kernel * 2 + draw.integers(0, 6, rank))], dtype)
    return attributes, x, dtype


def max_pool(draw: Generator) -> NodeCase:
    attributes, x, _ = pool(draw)
    kernel = np.asarray(attributes["kernel_shape"])
    if draw.integers(3) == 0:
        attributes["auto_pad"] = str(draw.choice(["SAME_UPPER", "SAME_LOWER", "VALID"]))
    else:
        attributes["pads"] = [*draw.integers(0, kernel), *draw.integers(0, kernel)]
        attributes["ceil_mode"] = int(draw.integers(2))
        attributes["dilations"] = draw.integers(1, 3, kernel.size).tolist()
    attributes["storage_order"] = int(draw.integers(2))
    opset = int(draw.choice([12, 22]))
    return NodeCase(
        operator="MaxPool", operands={"x": x}, attributes=attributes, outputs=2, opset=opset, both_by_runtime=True
    )


def max_unpool(draw: Generator) -> NodeCase:
    rank = int(draw.integers(1, 4))
    kernel = draw.integers(1, 4, rank)
    strides = draw.integers(1, 4, rank)
    shape = draw.integers(2, 5, rank)
    # (No pads wider than what is left of one window.)
    pads = [int(draw.integers(0, 2)) if kernel[axis % rank] == 3 else 0 for axis in range(2 * rank)]
    inferred = (shape - 1) * strides + kernel - np.asarray(pads[:rank]) - np.asarray(pads[rank:])
    places = draw.permutation(2 * inferred.prod())
    x = numbers(draw, [2, 1, *shape], str(draw.choice(["float32", "float64"])))
    wide = np.asarray([2, 1, *(inferred + draw.integers(0, 3, rank))], np.int64) if draw.integers(2) else None
    while places.size < x.size:
        places = np.concatenate([places, places])
    operands = {"x": x, "index": places[: x.size].reshape(x.shape).astype(np.int64), "shape": wide}
    attributes = {"kernel_shape": kernel.tolist(), "strides": strides.tolist(), "pads": pads}
    return NodeCase(operator="MaxUnpool", operands=operands, attributes=attributes, known=("shape",), opset=22)


def conv_shapes(draw: Generator) -> tuple[list[int], list[int], dict[str, Any]]:
    rank, groups = int(draw.integers(1, 3)), int(draw.integers(1, 3))
    kernel = draw.integers(1, 4, rank)
    channels, filters = groups * int(draw.integers(1, 4)), groups * int(draw.integers(1, 4))
    attributes: dict[str, Any] = {"group": groups, "strides": draw.integers(1, 3, rank).tolist()}
    if draw.integers(3) == 0:
        attributes["auto_pad"] = str(draw.choice(["SAME_UPPER", "VALID"]))
    else:
        attributes["pads"] = draw.integers(0, 2, 2 * rank).tolist()
        attributes["dilations"] = draw.integers(1, 3, rank).tolist()
    if draw.integers(2):
        attributes["kernel_shape"] = kernel.tolist()
    return [2, channels, *draw.integers(6, 9, rank)], [filters, channels // groups, *kernel], attributes


def deform_conv(draw: Generator) -> NodeCase:
    kernel, strides, dilations = (draw.integers(1, 4, 2), draw.integers(1, 3, 2), draw.integers(1, 3, 2))
    pads, groups, offsets = draw.integers(0, 2, 4), int(draw.integers(1, 3)), int(draw.integers(1, 3))
    channels, filters = groups * offsets, groups * int(draw.integers(1, 3))
    image = (kernel - 1) * dilations + 2 + draw.integers(0, 3, 2)
    counts = (image + pads[:2] + pads[2:] - (kernel - 1) * dilations - 1) // strides + 1
    lead = [2, offsets * kernel.prod()]
    operands = {
        "x": numbers(draw, [2, channels, *image], "float32"),
        "w": numbers(draw, [filters, channels // groups, *kernel], "float32"),
        "offset": numbers(draw, [lead[0], lead[1] * 2, *counts], "float32"),
        "b": numbers(draw, [filters], "float32") if draw.integers(2) else None,
        "mask": numbers(draw, [*lead, *counts], "float32") if draw.integers(2) else None,
    }
    attributes = {
        "strides": strides.tolist(),
        "dilations": dilations.tolist(),
        "pads": pads.tolist(),
        "group": groups,
        "offset_group": offsets,
    }
    return NodeCase(operator="DeformConv", operands=operands, attributes=attributes, opset=22)


DRAWN = (col2im, deform_conv, max_pool, max_unpool)
