"""Operators on boxes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx

from tvm_ext import _tvm
from tvm_ext._tvm import BlockBuilder, Expr

from .context import DOUBLE, FLOAT, FLOATING, Pen, converter, rule

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
