"""Products and convolutions of quantised tensors: integers inside, one scale behind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
from onnx import helper

from ..graph import attribute
from .context import Context, Pen, Rule, operand, refusal

_INT32, _FLOAT = onnx.TensorProto.INT32, onnx.TensorProto.FLOAT
_BYTES = (onnx.TensorProto.INT8, onnx.TensorProto.UINT8)
_QUANTISED = (*_BYTES, onnx.TensorProto.INT16, onnx.TensorProto.UINT16)


def _conv_integer(node: onnx.NodeProto, context: Context) -> list[onnx.NodeProto]:
    """Zero points are subtracted first, so that zeros are padded where ONNX pads zero points."""
    pen = Pen(node=node, context=context)
    x = _shifted(pen, node.input[0], operand(node, 2), [])
    weight = _shifted(pen, node.input[1], operand(node, 3), _per_filter(node, context, operand(node, 3)))
    _convolve(pen, [x, weight], node.output[0])
    return pen.nodes


def _shifted(pen: Pen, name: str, zero_point: str, shape: Sequence[int]) -> str:
    """x - zero point as int32; a zero point of more than one element is reshaped to `shape` first."""
    wide = pen.cast(name, _INT32)
    if not zero_point or _is_zero(pen.context, zero_point):
        return wide
    return pen.add("Sub", wide, _reshaped(pen, pen.cast(zero_point, _INT32), shape))


def _is_zero(context: Context, name: str) -> bool:
    return name in context.constants and not context.constants[name].any()


def _reshaped(pen: Pen, name: str, shape: Sequence[int]) -> str:
    return pen.add("Reshape", name, pen.integers(*shape)) if shape else name


def _per_filter(node: onnx.NodeProto, context: Context, name: str) -> list[int]:
    """The shape in which a value per filter broadcasts over the weight: [M, 1, 1, ...]; [] for a single value."""
    if not name or context.known_shape(node, name) in ((), (1,)):
        return []
    weight = context.known_shape(node, node.input[1] if node.op_type == "ConvInteger" else node.input[3])
    return [weight[0], *[1] * (len(weight) - 1)]


def _convolve(pen: Pen, inputs: list[str], out: str) -> str:
    output = out or pen.name("sums")
    pen.nodes.append(helper.make_node("Conv", inputs, [output], pen.node.name))
    pen.nodes[-1].attribute.extend(pen.node.attribute)
    return output


def _qlinear_conv(node: onnx.NodeProto, context: Context) -> list[onnx.NodeProto]:
    pen = Pen(node=node, context=context)
    x, x_scale, x_zero, weight, w_scale, w_zero, y_scale, y_zero = node.input[:8]
    filters = _per_filter(node, context, w_scale)
    shifted = [_shifted(pen, x, x_zero, []), _shifted(pen, weight, w_zero, _per_filter(node, context, w_zero))]
    bias = [operand(node, 8)] if operand(node, 8) else []
    sums = _convolve(pen, [*shifted, *bias], "")
    # [M, 1, 1] broadcasts from the right over [N, M, H, W].
    scale = _combined_scale(pen, x_scale, _reshaped(pen, w_scale, filters[:-1] if filters else []), y_scale)
    _requantise(pen, sums, scale, y_zero)
    return pen.nodes


def _qlinear_matmul(node: onnx.NodeProto, context: Context) -> list[onnx.NodeProto]:
    pen = Pen(node=node, context=context)
    a, a_scale, a_zero, b, b_scale, b_zero, y_scale, y_zero = node.input
    rows = _per_row(node, context, a_scale)
    left = _shifted(pen, a, a_zero, _per_row(node, context, a_zero))
    right = _shifted(pen, b, b_zero, [])
    sums = pen.add("MatMul", left, right)
    scale = _combined_scale(pen, _reshaped(pen, a_scale, rows), b_scale, y_scale)
    _requantise(pen, sums, scale, y_zero)
    return pen.nodes


def _per_row(node: onnx.NodeProto, context: Context, name: str) -> list[int]:
    """[M, 1] for a vector of M values, one a row of the left operand; values of higher rank broadcast as they are."""
    shape = context.known_shape(node, name)
    return [shape[0], 1] if len(shape) == 1 and shape[0] > 1 else []


def _combined_scale(pen: Pen, left: str, right: str, result: str) -> str:
    wide = [pen.cast(name, _FLOAT) for name in (left, right, result)]
    return pen.add("Div", pen.add("Mul", wide[0], wide[1]), wide[2])


def _requantise(pen: Pen, sums: str, scale: str, zero_point: str) -> None:
    """saturate(round(sums * scale) + zero point), rounded to even, as ONNX Runtime orders it."""
    code = pen.context.known_type(pen.node, zero_point)
    if code not in _BYTES:
        raise refusal(pen.node, f"gives element type {code}", "quantise to int8 or uint8")
    rounded = pen.add("Round", pen.add("Mul", pen.cast(sums, _FLOAT), scale))
    shifted = pen.add("Add", rounded, pen.cast(zero_point, _FLOAT))
    pen.cast(_clipped(pen, shifted, code), code, out=pen.node.output[0])


def _clipped(pen: Pen, x: str, code: int) -> str:
    """x (float32) within what the integer type `code` holds."""
    limits = np.iinfo(helper.tensor_dtype_to_np_dtype(code))
    if pen.context.opset >= 11:
        return pen.add("Clip", x, *(pen.constant(limit, np.float32) for limit in (limits.min, limits.max)))
    return pen.add("Clip", x, min=float(limits.min), max=float(limits.max))


def _blocked(node: onnx.NodeProto, context: Context) -> list[onnx.NodeProto] | None:
    """Quantisation by blocks: each value's own scale and zero point are gathered along the axis."""
    block = int(attribute(node, "block_size", 0))
    if block == 0:
        return None
    pen, x = Pen(node=node, context=context), node.input[0]
    shape = context.known_shape(node, x)
    axis = int(attribute(node, "axis", 1)) % len(shape)
    index = pen.constant(np.arange(shape[axis]) // block, np.int64)
    scale = pen.add("Gather", node.input[1], index, axis=axis)
    zero = pen.add("Gather", node.input[2], index, axis=axis) if operand(node, 2) else ""
    (_quantise_each if node.op_type == "QuantizeLinear" else _dequantise_each)(pen, x, scale, zero)
    return pen.nodes


def _quantise_each(pen: Pen, x: str, scale: str, zero_point: str) -> None:
    """saturate(round(x / scale) + zero point)."""
    node, context = pen.node, pen.context
    code = int(attribute(node, "output_dtype", 0))
    code = code or (context.known_type(node, node.input[2]) if zero_point else onnx.TensorProto.UINT8)
    if code not in _QUANTISED:
        raise refusal(node, f"gives element type {code} by blocks", "quantise to 8 or 16 bits")
    rounded = pen.add("Round", pen.add("Div", pen.cast(x, _FLOAT), pen.cast(scale, _FLOAT)))
    shifted = pen.add("Add", rounded, pen.cast(zero_point, _FLOAT)) if zero_point else rounded
    pen.cast(_clipped(pen, shifted, code), code, out=node.output[0])


def _dequantise_each(pen: Pen, x: str, scale: str, zero_point: str) -> None:
    """(x - zero point) * scale."""
    node, context = pen.node, pen.context
    if context.known_type(node, x) not in (*_QUANTISED, _INT32):
        raise refusal(node, f"reads element type {context.known_type(node, x)} by blocks", "quantise to 8 or 16 bits")
    shifted = pen.cast(x, _INT32)
    if zero_point:
        shifted = pen.add("Sub", shifted, pen.cast(zero_point, _INT32))
    code = int(attribute(node, "output_dtype", 0)) or context.known_type(node, node.input[1])
    product = pen.add("Mul", pen.cast(shifted, _FLOAT), pen.cast(scale, _FLOAT))
    pen.cast(product, code, out=node.output[0])


RULES: Mapping[str, Rule] = {
    "ConvInteger": _conv_integer,
    "DequantizeLinear": _blocked,
    "QLinearConv": _qlinear_conv,
    "QLinearMatMul": _qlinear_matmul,
    "QuantizeLinear": _blocked,
}
REPLACED = frozenset({"ConvInteger", "QLinearConv", "QLinearMatMul"})
