"""Normalisations."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx

from ..graph import attribute
from .context import Context, Pen, Rule, operand


def _lp_normalization(node: onnx.NodeProto, context: Context) -> list[onnx.NodeProto]:
    """x / |x|_p along one axis, 0 where the norm is 0: the norm becomes 1 there, and 0 / 1 = 0."""
    pen, x = Pen(node=node, context=context), node.input[0]
    power = "L1" if attribute(node, "p", 2) == 1 else "L2"
    norm = pen.reduce(f"Reduce{power}", x, int(attribute(node, "axis", -1)), keepdims=True)
    is_zero = pen.add("Equal", norm, pen.add("Sub", norm, norm))
    pen.add("Div", x, pen.add("Add", norm, pen.add("CastLike", is_zero, x)), out=node.output[0])
    return pen.nodes


def _normalize(node: onnx.NodeProto, context: Context) -> list[onnx.NodeProto] | None:
    """LayerNormalization and RMSNormalization over several axes, of float64, or with a scale of another shape.

    (x - mean) / sqrt(variance + epsilon), in RMSNormalization without the mean; then the scale and the bias.
    """
    shape, code = context.shape(node.input[0]), context.element_type(node.input[0])
    if shape is None or not code or not shape:
        return None
    axis = int(attribute(node, "axis", -1)) % len(shape)
    is_layer = node.op_type == "LayerNormalization"
    is_plain = context.shape(node.input[1]) == shape[axis:] and (is_layer or axis == len(shape) - 1)
    if code != onnx.TensorProto.DOUBLE and is_plain:
        return None
    pen, x = Pen(node=node, context=context), node.input[0]
    narrow = code not in (onnx.TensorProto.DOUBLE, onnx.TensorProto.FLOAT)
    x = pen.cast(x, onnx.TensorProto.FLOAT) if narrow else x
    axes = [*range(axis, len(shape))]
    if is_layer:
        x = pen.add("Sub", x, pen.mean(x, axes))
    variance = pen.mean(pen.add("Mul", x, x), axes)
    dtype = np.float64 if code == onnx.TensorProto.DOUBLE else np.float32
    epsilon = pen.constant(attribute(node, "epsilon", 1e-5), dtype)
    normalized = pen.add("Div", x, pen.add("Sqrt", pen.add("Add", variance, epsilon)))
    normalized = pen.cast(normalized, code) if narrow else normalized
    scaled_out, bias = node.output[0], operand(node, 2)
    scaled = pen.add("Mul", normalized, node.input[1], out="" if bias else scaled_out)
    if bias:
        pen.add("Add", scaled, bias, out=scaled_out)
    return pen.nodes


RULES: Mapping[str, Rule] = {
    "LayerNormalization": _normalize,
    "LpNormalization": _lp_normalization,
    "RMSNormalization": _normalize,
}
REPLACED = frozenset({"LpNormalization"})
