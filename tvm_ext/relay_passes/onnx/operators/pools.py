"""Where the windows of pools lie, MaxPool's second output, and MaxUnpool, which reads it."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import numpy as np

from tvm_ext.support.arithmetic import ceil_div
from tvm_ext.support.arrays import Array

from .context import Pen, rule
from .windows import Windows, check_table, check_windows, positions


@rule("AveragePool", "LpPool", "MaxPool")
def _pool(pen: Pen) -> None:
    """`auto_pad` and `ceil_mode` become pads: stock TVM forgets dilations, and windows that start behind the image.

    Worked example of ceil_mode: 6 elements, windows of 3 in steps of 2: 3 windows, the last with one more pad behind.
    What is padded for that counts in no average. Where that asks for padding of both kinds, zeros are padded first.
    """
    if pen.result(1) or (pen.text("auto_pad", "NOTSET") == "NOTSET" and not pen.flag("ceil_mode")):
        return
    data, rank = pen.x, len(pen.numbers("kernel_shape", ()))
    windows, counts = _pool_windows(pen, pen.known_shape(data)[2:])
    ends = [
        max(0, (count - windows.counts[axis]) * windows.strides[axis] - windows.rest(axis))
        for axis, count in enumerate(counts)
    ]
    options = pen.options("auto_pad", "ceil_mode", "pads")
    pads = [*windows.pads[:rank], *map(sum, zip(windows.pads[rank:], ends, strict=True))]
    if any(ends) and options.pop("count_include_pad", 0) and any(windows.pads):
        around = [0, 0, *windows.pads[:rank], 0, 0, *windows.pads[rank:]]
        data = pen.add("Pad", data, pads=around) if pen.opset < 11 else pen.add("Pad", data, pen.integers(*around))
        pads = [*[0] * rank, *ends]
    pen.add(pen.op_type, data, out=pen.out, pads=pads, **options)


@rule("MaxPool")
def _max_pool(pen: Pen) -> None:
    """The values by MaxPool itself; the index is the first one in the window (row-major) that holds the value."""
    if not pen.result(1):
        return
    x, shape = pen.x, pen.known_shape(pen.x)
    windows, counts = _pool_windows(pen, shape[2:])
    check_table(pen, windows)
    values = pen.add("MaxPool", x, out=pen.result(0), **pen.options("storage_order"))
    pixels, sources = prod(shape[2:]), positions(windows, counts)
    flat = pen.add("Reshape", x, pen.integers(*shape[:2], pixels))
    terms = pen.add("Gather", flat, pen.constant(np.maximum(sources, 0)), axis=2)
    is_most = pen.add("Equal", terms, pen.add("Reshape", values, pen.integers(*shape[:2], len(sources), 1)))
    # Outside the image, and where the maximum is NaN, which equals nothing, stands a number above all indices.
    candidates = pen.constant(np.where(sources < 0, pixels, sources))
    index = pen.reduce("ReduceMin", pen.add("Where", is_most, candidates, pen.integers(pixels)), -1)
    index = pen.add("Min", index, pen.integers(pixels - 1))
    if pen.attribute("storage_order", 0):
        index = pen.add("Gather", pen.constant(_column_major(shape[2:])), index, axis=0)
    image = np.arange(shape[0] * shape[1]).reshape(*shape[:2], 1) * pixels
    whole = pen.add("Add", index, pen.constant(image, np.int64))
    pen.add("Reshape", whole, pen.integers(*shape[:2], *counts), out=pen.result(1))


def _column_major(extents: tuple[int, ...]) -> Array:
    """Row-major index -> index with the first axis innermost."""
    return np.asarray(np.arange(prod(extents)).reshape(extents[::-1]).transpose().reshape(-1))


def _pool_windows(pen: Pen, extents: tuple[int, ...]) -> tuple[Windows, tuple[int, ...]]:
    """The windows of a pool, their pads as `auto_pad` wants them, and how many there are with `ceil_mode`."""
    windows = Windows.of(pen, extents, ())
    mode = pen.text("auto_pad", "NOTSET")
    if mode != "NOTSET":
        windows = replace(windows, pads=_automatic_pads(windows, same=mode.startswith("SAME"), lower="LOWER" in mode))
    check_windows(pen, windows)
    counts = windows.counts
    if pen.flag("ceil_mode") and mode == "NOTSET":
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


@rule("MaxUnpool")
def _max_unpool(pen: Pen) -> None:
    """Without pads, by a smaller kernel; a wider `output_shape` is the inferred one with zeros behind it."""
    shape, indices = pen.known_shape(pen.x), pen.known_shape(pen.operand(1))
    if shape != indices:
        raise pen.refusal(f"has indices of shape {indices} for values of {shape}", "give one index for each value")
    windows, rank, wanted = Windows.of(pen, shape[2:], ()), len(shape) - 2, pen.known_value(2)
    if not any(windows.pads) and wanted is None:
        return
    kernel = [extent - windows.pads[axis] - windows.pads[axis + rank] for axis, extent in enumerate(windows.kernel)]
    inferred = [(shape[axis + 2] - 1) * windows.strides[axis] + kernel[axis] for axis in range(rank)]
    extents = inferred if wanted is None else [int(extent) for extent in wanted.reshape(-1)[2:]]
    if len(extents) != rank or min(inferred) < 1 or any(a < b for a, b in zip(extents, inferred, strict=True)):
        raise pen.refusal(f"unpools to {extents}, where {inferred} are inferred", "export a fitting output_shape")
    unpooled = pen.add("MaxUnpool", *pen.input[:2], kernel_shape=kernel, strides=windows.strides)
    if extents != inferred:
        more = [0, 0, *(extent - had for extent, had in zip(extents, inferred, strict=True))]
        unpooled = pen.add("Pad", unpooled, pen.integers(*[0] * len(shape), *more))
    pen.give(unpooled)
