"""Deformable convolutions: samples gathered by computed coordinates, then one product."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import onnx

from tvm_ext import _tvm
from tvm_ext._tvm import BlockBuilder, Expr
from tvm_ext.analysis.relax_values import static_shape

from .context import DOUBLE, FLOAT, FLOATING, INT64, Pen, converter, rule
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
    for number, weight in ((before, pen.add("Sub", one, behind_weight)), (pen.add("Add", before, one), behind_weight)):
        within = pen.add("Min", pen.add("Max", number, nought), last)
        inside = pen.add("Equal", within, number)
        found.append((pen.cast(within, INT64), pen.add("Where", inside, weight, nought)))
    return found


# --- Operators on boxes -----------------------------------------------------------------------------------------------
_LIMIT, _OVERLAP, _SCORE = 2, 3, 4  # places of inputs (ONNX, NonMaxSuppression)


@rule("NonMaxSuppression")
def _suppression(pen: Pen) -> None:
    """Without boxes, classes or images nothing is selected: a table of no rows."""
    for index in (_LIMIT, _OVERLAP, _SCORE):
        pen.known_value(index)
    boxes, scores = pen.shape(pen.x), pen.shape(pen.input[1])
    if boxes is None or scores is None:
        return
    if len(boxes) != 3 or len(scores) != 3 or boxes[2] != 4 or (boxes[0], boxes[1]) != (scores[0], scores[2]):
        raise pen.refusal(f"has boxes of shape {boxes} and scores of {scores}", "expected (b, n, 4) and (b, c, n)")
    if 0 in (*boxes, *scores):
        pen.give(pen.constant(np.zeros((0, 3), np.int64)))


@converter("NonMaxSuppression")
def _suppress(builder: BlockBuilder, inputs: Sequence[Expr], attributes: Mapping[str, Any], opset: int) -> Expr:
    """Stock's kernel with ONNX's defaults, and with its comparison: a box goes where its overlap exceeds the threshold.

    Stock's asks for "at least the threshold", and takes a threshold of 0 for "none": the next float is what ONNX means.
    """
    operands = [*inputs, *[None] * (5 - len(inputs))]
    boxes = int(inputs[0].ty.shape.values[1])
    limit = min(max(0, _scalar(operands[_LIMIT], 0)), boxes)  # rows of the result for each class, and its memory
    overlap = np.float32(_scalar(operands[_OVERLAP], 0.0))
    score = np.float32(_scalar(operands[_SCORE], -np.finfo(np.float32).max))
    above = max(np.nextafter(overlap, np.float32(np.inf)), np.finfo(np.float32).tiny)
    operands[_LIMIT] = _tvm.relax.const(np.asarray([limit], np.int64))
    operands[_OVERLAP] = _tvm.relax.const(np.asarray([above], np.float32))
    operands[_SCORE] = _tvm.relax.const(np.asarray([score], np.float32))
    return _tvm.convert_onnx_operator("NonMaxSuppression", builder, operands, attributes, opset)


def _scalar(operand: Expr, default: float) -> float:
    if operand is None:
        return default
    values = operand.value.numpy().reshape(-1)
    return float(values[0]) if values.size else default


@rule("RoiAlign")
def _roi_align(pen: Pen) -> None:
    """Boxes are scaled first, then moved by half a pixel; the stock importer moves them first, and gives float32."""
    if pen.text("mode", "avg") != "avg":
        raise pen.refusal(
            "takes the maximum over samples, which ONNX defines by single weighted corners",
            "use mode avg, which every implementation computes alike",
        )
    if pen.element_type(pen.x) == onnx.TensorProto.FLOAT16:
        _sampled(pen)
        return
    default = "half_pixel" if pen.opset >= 16 else "output_half_pixel"
    scale = float(pen.attribute("spatial_scale", 1.0))
    if scale == 1.0 or pen.text("coordinate_transformation_mode", default) != "half_pixel":
        return
    scaled = pen.add("Mul", pen.input[1], pen.like(scale, pen.input[1]))
    pen.add("RoiAlign", pen.x, scaled, pen.input[2], out=pen.out, **pen.options("spatial_scale"))


@converter("RoiAlign")
def _images(builder: BlockBuilder, operands: Sequence[Any], attributes: Mapping[str, Any], opset: int) -> Expr:
    """Stock's, which reads whatever image a number asks for: they are looked up first, and look-ups are checked."""
    data, boxes, images = operands
    shape = static_shape(data)
    if shape is not None:
        images = builder.emit(_tvm.relax.op.take(_tvm.relax.const(np.arange(shape[0]), "int64"), images, axis=0))
    return _tvm.convert_onnx_operator("RoiAlign", builder, [data, boxes, images], attributes, opset)


@rule("GridSample")
def _sampled(pen: Pen) -> None:
    """Operators at places between pixels give the type of the image; kernels take one type, float32 or float64."""
    image, places = (pen.known_type(pen.input[index]) for index in (0, 1))
    if image not in FLOATING:
        raise pen.refusal(f"samples {onnx.TensorProto.DataType.Name(image)}", "cast the image to float32 before")
    wide = DOUBLE if DOUBLE in (image, places) else FLOAT
    if {image, places} == {wide}:
        return
    samples = pen.name("samples")
    pen.again([*(pen.cast(name, wide) for name in pen.input[:2]), *pen.input[2:]], [samples])
    pen.cast(samples, image, out=pen.out)
