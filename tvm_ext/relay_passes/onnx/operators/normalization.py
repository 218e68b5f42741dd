"""Normalisations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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
    normalized = _over_deviation(pen, _centred(pen, x, axes) if is_layer else x, axes, code)
    normalized = pen.cast(normalized, code) if narrow else normalized
    scaled_out, bias = node.output[0], operand(node, 2)
    scaled = pen.add("Mul", normalized, node.input[1], out="" if bias else scaled_out)
    if bias:
        pen.add("Add", scaled, bias, out=scaled_out)
    return pen.nodes


def _centred(pen: Pen, x: str, axes: Sequence[int]) -> str:
    return pen.add("Sub", x, pen.mean(x, axes))


def _over_deviation(pen: Pen, x: str, axes: Sequence[int], code: int) -> str:
    """x / sqrt(mean of x^2 + epsilon) in float64 or float32; epsilon is float32's, as an attribute is."""
    dtype = np.float64 if code == onnx.TensorProto.DOUBLE else np.float32
    epsilon = pen.constant(np.float32(attribute(pen.node, "epsilon", 1e-5)), dtype)
    return pen.add("Div", x, pen.add("Sqrt", pen.add("Add", pen.mean(pen.add("Mul", x, x), axes), epsilon)))


def _normalize_groups(node: onnx.NodeProto, context: Context) -> list[onnx.NodeProto] | None:
    """GroupNormalization of float64, which the stock importer computes in float32.

    Since operator set 21 there is a scale and a bias for each channel, before for each group.
    """
    shape, x = context.shape(node.input[0]), node.input[0]
    if context.element_type(x) != onnx.TensorProto.DOUBLE or shape is None or len(shape) < 2:
        return None
    pen, groups = Pen(node=node, context=context), int(attribute(node, "num_groups", 1))
    grouped = pen.add("Reshape", x, pen.integers(shape[0], groups, -1))
    normalized = _over_deviation(pen, _centred(pen, grouped, [2]), [2], onnx.TensorProto.DOUBLE)
    ones = [1] * (len(shape) - 2)
    by_channel = context.opset >= 21
    whole = pen.integers(*shape)
    normalized = pen.add("Reshape", normalized, whole) if by_channel else normalized
    scale, bias = (
        pen.add("Reshape", name, pen.integers(-1, *(ones if by_channel else [1]))) for name in node.input[1:]
    )
    moved = pen.add("Add", pen.add("Mul", normalized, scale), bias, out=node.output[0] if by_channel else "")
    if not by_channel:
        pen.add("Reshape", moved, whole, out=node.output[0])
    return pen.nodes


RULES: Mapping[str, Rule] = {
    "GroupNormalization": _normalize_groups,
    "LayerNormalization": _normalize,
    "LpNormalization": _lp_normalization,
    "RMSNormalization": _normalize,
}
REPLACED = frozenset({"LpNormalization"})
