"""Where the windows of pools lie, MaxPool's second output, and MaxUnpool, which reads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import onnx

from tvm_ext.support.arithmetic import ceil_div
from tvm_ext.support.arrays import Array

from ..graph import attribute
from .context import Context, Pen, Rule, operand, refusal, result, text_attribute
from .windows import Windows, check_table, check_windows, positions


def _pool(node: onnx.NodeProto, context: Context) -> list[onnx.NodeProto] | None:
    """`auto_pad` and `ceil_mode` become pads: stock TVM forgets dilations, and windows that start behind the image.

    Worked example of ceil_mode: 6 elements, windows of 3 in steps of 2: 3 windows, the last with one more pad behind.
    What is padded for that counts in no average. Where that asks for padding of both kinds, zeros are padded first.
    """
    is_automatic = text_attribute(node, "auto_pad", "NOTSET") != "NOTSET"
    if not is_automatic and not attribute(node, "ceil_mode", 0):
        return None
    pen, data = Pen(node=node, context=context), node.input[0]
    rank = len(attribute(node, "kernel_shape", ()))
    windows, counts = _pool_windows(node, context.known_shape(node, data)[2:])
    ends = [
        max(0, (count - windows.counts[axis]) * windows.strides[axis] - windows.rest(axis))
        for axis, count in enumerate(counts)
    ]
    options = _options(node, "auto_pad", "ceil_mode", "pads")
    pads = [*windows.pads[:rank], *map(sum, zip(windows.pads[rank:], ends, strict=True))]
    if any(ends) and options.pop("count_include_pad", 0) and any(windows.pads):
        around = [0, 0, *windows.pads[:rank], 0, 0, *windows.pads[rank:]]
        data = pen.add("Pad", data, pads=around) if context.opset < 11 else pen.add("Pad", data, pen.integers(*around))
        pads = [*[0] * rank, *ends]
    pen.add(node.op_type, data, out=node.output[0], pads=pads, **options)
    return pen.nodes


def _options(node: onnx.NodeProto, *left_out: str) -> dict[str, Any]:
    values = {item.name: onnx.helper.get_attribute_value(item) for item in node.attribute}
    return {name: value for name, value in values.items() if name not in left_out}


def _max_pool(node: onnx.NodeProto, context: Context) -> list[onnx.NodeProto] | None:
    """The values by MaxPool itself; the index is the first one in the window (row-major) that holds the value."""
    if not result(node, 1):
        return _pool(node, context)
    pen, x = Pen(node=node, context=context), node.input[0]
    shape = context.known_shape(node, x)
    windows, counts = _pool_windows(node, shape[2:])
    check_table(node, windows)
    values = pen.add("MaxPool", x, out=result(node, 0), **_options(node, "storage_order"))
    pixels, sources = prod(shape[2:]), positions(windows, counts)
    flat = pen.add("Reshape", x, pen.integers(*shape[:2], pixels))
    terms = pen.add("Gather", flat, pen.constant(np.maximum(sources, 0)), axis=2)
    is_most = pen.add("Equal", terms, pen.add("Reshape", values, pen.integers(*shape[:2], len(sources), 1)))
    # Outside the image, and where the maximum is NaN, which equals nothing, stands a number above all indices.
    candidates = pen.constant(np.where(sources < 0, pixels, sources))
    index = pen.reduce("ReduceMin", pen.add("Where", is_most, candidates, pen.integers(pixels)), -1)
    index = pen.add("Min", index, pen.integers(pixels - 1))
    if attribute(node, "storage_order", 0):
        index = pen.add("Gather", pen.constant(_column_major(shape[2:])), index, axis=0)
    image = np.arange(shape[0] * shape[1]).reshape(*shape[:2], 1) * pixels
    whole = pen.add("Add", index, pen.constant(image, np.int64))
    pen.add("Reshape", whole, pen.integers(*shape[:2], *counts), out=result(node, 1))
    return pen.nodes


def _column_major(extents: tuple[int, ...]) -> Array:
    """Row-major index -> index with the first axis innermost."""
    return np.asarray(np.arange(prod(extents)).reshape(extents[::-1]).transpose().reshape(-1))


def _pool_windows(node: onnx.NodeProto, extents: tuple[int, ...]) -> tuple[Windows, tuple[int, ...]]:
    """The windows of a pool, their pads as `auto_pad` wants them, and how many there are with `ceil_mode`."""
    rank = len(extents)
    windows = Windows(
        extents=extents,
        kernel=tuple(attribute(node, "kernel_shape", [])),
        strides=tuple(attribute(node, "strides", [1] * rank)),
        dilations=tuple(attribute(node, "dilations", [1] * rank)),
        pads=tuple(attribute(node, "pads", [0] * 2 * rank)),
    )
    mode = text_attribute(node, "auto_pad", "NOTSET")
    if mode != "NOTSET":
        windows = replace(windows, pads=_automatic_pads(windows, same=mode.startswith("SAME"), lower="LOWER" in mode))
    check_windows(node, windows)
    counts = windows.counts
    if attribute(node, "ceil_mode", 0) and mode == "NOTSET":
        counts = tuple(_rounded_up(windows, axis, count) for axis, count in enumerate(counts))
    return windows, counts


def _automatic_pads(windows: Windows, *, same: bool, lower: bool) -> tuple[int, ...]:
    begins, ends = [], []
    for extent, kernel, stride, dilation in zip(
        windows.extents, windows.kernel, windows.strides, windows.dilations, strict=True
    ):
        total = max((ceil_div(extent, stride) - 1) * stride + (kernel - 1) * dilation + 1 - extent, 0) if same else 0
        begins.append(total - total // 2 if lower else total // 2)
        ends.append(total - begins[-1])
    return (*begins, *ends)


def _rounded_up(windows: Windows, axis: int, count: int) -> int:
    """One window more where a partial one is left that starts before the end padding."""
    starts_inside = count * windows.strides[axis] < windows.extents[axis] + windows.pads[axis]
    return count + (windows.rest(axis) > 0 and starts_inside)


def _max_unpool(node: onnx.NodeProto, context: Context) -> list[onnx.NodeProto] | None:
    """Without pads, by a smaller kernel; a wider `output_shape` is the inferred one with zeros behind it."""
    shape, indices = context.known_shape(node, node.input[0]), context.known_shape(node, operand(node, 1))
    if shape != indices:
        raise refusal(node, f"has indices of shape {indices} for values of {shape}", "give one index for each value")
    kernel, rank = list(attribute(node, "kernel_shape", [])), len(shape) - 2
    pads = list(attribute(node, "pads", [0] * 2 * rank))
    wanted = context.known_value(node, 2)
    if not any(pads) and wanted is None:
        return None
    strides = list(attribute(node, "strides", [1] * rank))
    kernel = [extent - pads[axis] - pads[axis + rank] for axis, extent in enumerate(kernel)]
    inferred = [(shape[axis + 2] - 1) * strides[axis] + kernel[axis] for axis in range(rank)]
    extents = inferred if wanted is None else [int(extent) for extent in wanted.reshape(-1)[2:]]
    if len(extents) != rank or min(inferred) < 1 or any(a < b for a, b in zip(extents, inferred, strict=True)):
        raise refusal(node, f"unpools to {extents}, where {inferred} are inferred", "export a fitting output_shape")
    pen = Pen(node=node, context=context)
    grows = extents != inferred
    out = "" if grows else node.output[0]
    data, index = node.input[0], operand(node, 1)
    unpooled = pen.add("MaxUnpool", data, index, out=out, kernel_shape=kernel, strides=strides)
    if grows:
        more = [0, 0, *(extent - had for extent, had in zip(extents, inferred, strict=True))]
        pen.add("Pad", unpooled, pen.integers(*[0] * len(shape), *more), out=node.output[0])
    return pen.nodes


RULES: Mapping[str, Rule] = {"AveragePool": _pool, "LpPool": _pool, "MaxPool": _max_pool, "MaxUnpool": _max_unpool}
