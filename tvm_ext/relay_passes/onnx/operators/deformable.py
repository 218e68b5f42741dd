"""Deformable convolutions: samples gathered by computed coordinates, then one product."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np

from .context import INT64, Pen, rule
from .windows import Windows, check_windows


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sizes:
    """Extents of a deformable convolution; `offsets` are the groups of channels that share their offsets."""

    windows: Windows
    batch: int
    channels: int
    filters: int
    groups: int
    offsets: int

    @property
    def taps(self) -> int:
        return prod(self.windows.kernel)

    @property
    def points(self) -> int:
        """Elements of one output channel."""
        return prod(self.windows.counts)


@rule("DeformConv", replaces=True)
def _deform_conv(pen: Pen) -> None:
    """columns[n, channel, tap, point] by bilinear interpolation, times the weight as in any convolution."""
    sizes = _sizes(pen)
    x, weight, offset, bias, mask = map(pen.operand, range(5))
    columns = _columns(pen, sizes, x, offset, mask)
    rows = sizes.channels // sizes.groups * sizes.taps
    grouped = pen.add("Reshape", columns, pen.integers(sizes.batch, sizes.groups, rows, sizes.points))
    filters = pen.add("Reshape", weight, pen.integers(sizes.groups, sizes.filters // sizes.groups, rows))
    product = pen.add("MatMul", filters, grouped)
    result = pen.add("Reshape", product, pen.integers(sizes.batch, sizes.filters, *sizes.windows.counts))
    if bias:
        result = pen.add("Add", result, pen.add("Reshape", bias, pen.integers(1, sizes.filters, 1, 1)))
    pen.give(result)


def _sizes(pen: Pen) -> _Sizes:
    shape, weight = pen.known_shape(pen.x), pen.known_shape(pen.input[1])
    if len(shape) != 4:
        raise pen.refusal(f"has an input of shape {list(shape)}", "only images (two spatial axes) are supported")
    windows = Windows.of(pen, shape[2:], weight[2:])
    check_windows(pen, windows)
    sizes = _Sizes(
        windows=windows,
        batch=shape[0],
        channels=shape[1],
        filters=weight[0],
        groups=pen.integer("group", 1),
        offsets=pen.integer("offset_group", 1),
    )
    wanted = (sizes.batch, sizes.offsets * sizes.taps * 2, *windows.counts)
    given = pen.known_shape(pen.input[2])
    if given != wanted or windows.kernel != weight[2:] or sizes.channels != weight[1] * sizes.groups:
        raise pen.refusal(f"has offsets of shape {list(given)} and weights {list(weight)}", f"expected {wanted}")
    return sizes


def _columns(pen: Pen, sizes: _Sizes, x: str, offset: str, mask: str) -> str:
    """[batch, channels, taps, points]."""
    lead = (sizes.batch, sizes.offsets, sizes.taps)
    offsets = pen.add("Reshape", offset, pen.integers(*lead, 2, sizes.points))
    along = []
    for axis in (0, 1):
        moved = pen.add("Gather", offsets, pen.constant(axis, np.int64), axis=3)
        along.append(pen.add("Add", moved, pen.constant(_regular(sizes.windows, axis), pen.dtype(pen.x))))
    # Channels last, so that a sample is a row.
    per_group = sizes.channels // sizes.offsets
    height, width = sizes.windows.extents
    split = pen.add("Reshape", x, pen.integers(sizes.batch, sizes.offsets, per_group, height * width))
    rows = pen.add("Reshape", pen.add("Transpose", split, perm=[0, 1, 3, 2]), pen.integers(-1, per_group))
    total = _interpolate(pen, sizes, rows, along)
    if mask:
        total = pen.add("Mul", total, pen.add("Reshape", mask, pen.integers(*lead, sizes.points, 1)))
    ordered = pen.add("Transpose", total, perm=[0, 1, 4, 2, 3])
    return pen.add("Reshape", ordered, pen.integers(sizes.batch, sizes.channels, sizes.taps, sizes.points))


def _regular(windows: Windows, axis: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """Where each tap of each point lies without an offset, along `axis`: [taps, points]."""
    taps = np.indices(windows.kernel)[axis].reshape(-1, 1) * windows.dilations[axis]
    points = np.indices(windows.counts)[axis].reshape(1, -1) * windows.strides[axis]
    return np.asarray(taps + points - windows.pads[axis], np.float64)


def _interpolate(pen: Pen, sizes: _Sizes, rows: str, along: list[str]) -> str:
    """The four neighbours of each coordinate, weighted; those outside the image weigh nothing.

    [batch, offset groups, taps, points, channels of a group]
    """
    images = np.arange(sizes.batch * sizes.offsets).reshape(sizes.batch, sizes.offsets, 1, 1)
    first_row = pen.constant(images * prod(sizes.windows.extents), np.int64)
    sides = [_neighbours(pen, name, extent) for name, extent in zip(along, sizes.windows.extents, strict=True)]
    shape, terms = (sizes.batch, sizes.offsets, sizes.taps, sizes.points), []
    for row, row_weight in sides[0]:
        for column, column_weight in sides[1]:
            start = pen.add("Add", pen.add("Mul", row, pen.integers(sizes.windows.extents[1])), column)
            index = pen.add("Reshape", pen.add("Add", start, first_row), pen.integers(-1))
            sample = pen.add("Reshape", pen.add("Gather", rows, index, axis=0), pen.integers(*shape, -1))
            weight = pen.add("Reshape", pen.add("Mul", row_weight, column_weight), pen.integers(*shape, 1))
            terms.append(pen.add("Mul", sample, weight))
    return pen.chain("Add", terms)


def _neighbours(pen: Pen, place: str, extent: int) -> list[tuple[str, str]]:
    """The index, within the image, and the weight of the elements before and behind a coordinate."""
    # Beyond one element outside everything weighs nothing; a number that fits no integer never becomes one.
    place = pen.add("Min", pen.add("Max", place, pen.like(-1)), pen.like(extent))
    before = pen.add("Floor", place)
    behind_weight = pen.add("Sub", place, before)
    one, nought, last = map(pen.like, (1, 0, extent - 1))
    found = []
    for number, weight in (
        (before, pen.add("Sub", one, behind_weight)),
        (pen.add("Add", before, one), behind_weight),
    ):
        within = pen.add("Min", pen.add("Max", number, nought), last)
        inside = pen.add("Equal", within, number)
        found.append((pen.cast(within, INT64), pen.add("Where", inside, weight, nought)))
    return found
