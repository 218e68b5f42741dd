"""Operators on boxes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx

from tvm_ext import _tvm
from tvm_ext._tvm import BlockBuilder, Expr

from ..graph import attribute
from .context import Check, Context, Converter, Pen, Rule, refusal, text_attribute
from .number_types import sampled

_LIMIT, _OVERLAP, _SCORE = 2, 3, 4


def _suppression(node: onnx.NodeProto, context: Context) -> list[onnx.NodeProto] | None:
    """Without boxes, classes or images nothing is selected: a table of no rows."""
    for index in (_LIMIT, _OVERLAP, _SCORE):
        context.known_value(node, index)
    boxes, scores = context.shape(node.input[0]), context.shape(node.input[1])
    if boxes is None or scores is None:
        return None
    if len(boxes) != 3 or len(scores) != 3 or boxes[2] != 4 or (boxes[0], boxes[1]) != (scores[0], scores[2]):
        raise refusal(node, f"has boxes of shape {boxes} and scores of {scores}", "expected (b, n, 4) and (b, c, n)")
    if 0 not in (*boxes, *scores):
        return None
    pen = Pen(node=node, context=context)
    pen.add("Identity", pen.constant(np.zeros((0, 3), np.int64)), out=node.output[0])
    return pen.nodes


def _suppress(builder: BlockBuilder, inputs: Sequence[Expr], attributes: Mapping[str, Any], opset: int) -> Expr:
    """Stock's kernel with ONNX's defaults, and with its comparison: a box goes where its overlap exceeds the threshold.

    Stock's asks for "at least the threshold", and takes a threshold of 0 for "none": the next float is what ONNX means.
    """
    operands = [*inputs, *[None] * (5 - len(inputs))]
    limit = _scalar(operands[_LIMIT], 0)
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


def _check_roi_align(node: onnx.NodeProto, context: Context) -> None:
    if text_attribute(node, "mode", "avg") != "avg":
        raise refusal(
            node,
            "takes the maximum over samples, which ONNX defines by single weighted corners",
            "use mode avg, which every implementation computes alike",
        )


def _roi_align(node: onnx.NodeProto, context: Context) -> list[onnx.NodeProto] | None:
    """Boxes are scaled first, then moved by half a pixel; the stock importer moves them first, and gives float32."""
    if context.element_type(node.input[0]) == onnx.TensorProto.FLOAT16:
        return sampled(node, context)
    default = "half_pixel" if context.opset >= 16 else "output_half_pixel"
    scale = float(attribute(node, "spatial_scale", 1.0))
    if scale == 1.0 or text_attribute(node, "coordinate_transformation_mode", default) != "half_pixel":
        return None
    pen = Pen(node=node, context=context)
    options = {
        item.name: onnx.helper.get_attribute_value(item) for item in node.attribute if item.name != "spatial_scale"
    }
    scaled = pen.add("Mul", node.input[1], pen.scalar_like(scale, node.input[1]))
    pen.add("RoiAlign", node.input[0], scaled, node.input[2], out=node.output[0], **options)
    return pen.nodes


CHECKS: Mapping[str, Check] = {"RoiAlign": _check_roi_align}
RULES: Mapping[str, Rule] = {"NonMaxSuppression": _suppression, "RoiAlign": _roi_align}
CONVERTERS: Mapping[str, Converter] = {"NonMaxSuppression": _suppress}
