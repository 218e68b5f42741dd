"""Products and convolutions of quantised tensors: integers inside, one scale behind."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
from onnx import helper

from .context import FLOAT, Pen, rule

_INT32 = onnx.TensorProto.INT32
_BYTES = (onnx.TensorProto.INT8, onnx.TensorProto.UINT8)
_QUANTISED = (*_BYTES, onnx.TensorProto.INT16, onnx.TensorProto.UINT16)

_SCALES: dict[str, tuple[tuple[int, ...], int | None]] = {
    "QuantizeLinear": ((), 1),
    "DequantizeLinear": ((1,), None),
    **dict.fromkeys(("QLinearConv", "QLinearMatMul", "QLinearAdd", "QLinearMul"), ((1, 4), 6)),
    "QGemm": ((1, 4), 7),
    **{f"QLinear{name}": ((1,), 3) for name in ("Sigmoid", "LeakyRelu", "AveragePool", "GlobalAveragePool", "Softmax")},
    "QLinearWhere": ((2, 5), 7),
    "QAttention": ((3, 4), None),
    "DynamicQuantizeMatMul": ((2,), None),
    "MatMulIntegerToFloat": ((2, 3), None),
}
"""Operator -> the places of its operands' scales, each with the zero point behind it, and that of its result's."""


_ONE_EACH = ("QuantizeLinear", "DequantizeLinear")
"""Whose zero points are as many as their scales, along an attribute's axis; others may have one for all scales."""

_APART = ("QAttention", "MatMulIntegerToFloat")
"""Whose zero points are not behind their scales."""


def check_scales(pen: Pen) -> None:
    """Raise ModelError where a known scale of the node is NaN, infinite or negative, or 0 of what is divided by it.

    So where scales do not fit their tensor or zero points, and where bytes have a zero point of another type: that is
    out of range.
    """
    operands, result = _SCALES.get(pen.op_type, ((), None))
    if pen.op_type == "QLinearConcat":
        operands, result = tuple(range(3, len(pen.input), 3)), 0
    for place in (*operands, *([] if result is None else [result])):
        scale = pen.constants.get(pen.operand(place))
        if scale is None or scale.dtype.kind not in "f":
            continue
        if not np.isfinite(scale).all() or (scale < 0).any() or (place == result and not scale.all()):
            worst = next(number for number in scale.reshape(-1) if not number > 0 or not np.isfinite(number))
            raise pen.refusal(f"has a scale of {worst}", "calibrate the model again: scales are positive and finite")
        _check_tensor(pen, place, scale.size, is_result=place == result)


def _check_tensor(pen: Pen, place: int, scales: int, *, is_result: bool) -> None:
    """`check_scales` of the tensor whose ``scales`` are operand number ``place``."""
    zero = "" if pen.op_type in _APART else pen.operand(place + 1)
    x = pen.x if pen.op_type in _ONE_EACH else "" if is_result or pen.op_type in _APART else pen.operand(place - 1)
    kinds = [0 if pen.op_type == "QuantizeLinear" else pen.element_type(name) if name else 0 for name in (x, zero)]
    if all(kinds) and kinds[0] != kinds[1]:
        named = " and ".join(onnx.TensorProto.DataType.Name(kind) for kind in kinds)
        raise pen.refusal(f"has bytes and a zero point of types {named}", "give both one type")
    if pen.integer("block_size", 0):
        return
    count = pen.constants[zero].size if zero in pen.constants else scales
    if count != scales and (count != 1 or pen.op_type in _ONE_EACH):
        raise pen.refusal(f"has {count} zero points for {scales} scales", "give each scale one")
    shape, axis = pen.shape(x) if x else () if is_result else None, pen.integer("axis", 1)
    if scales == 1 or shape is None:
        return
    by_axis = pen.op_type in _ONE_EACH
    fits = shape[axis : axis + 1 or None] == (scales,) if by_axis else scales in shape
    if not fits:
        where = f" along axis {axis}" if by_axis else ""
        raise pen.refusal(f"has {scales} scales{where} of shape {list(shape)}", "give one for all, or each place one")


@rule("ConvInteger", replaces=True)
def _conv_integer(pen: Pen) -> None:
    """Zero points are subtracted first, so that zeros are padded where ONNX pads zero points."""
    x = shifted(pen, pen.x, pen.operand(2), [])
    weight = shifted(pen, pen.input[1], pen.operand(3), _per_filter(pen, pen.operand(3)))
    pen.again([x, weight], pen.output, "Conv")


def shifted(pen: Pen, name: str, zero_point: str, shape: Sequence[int]) -> str:
    """x - zero point as int32; a zero point of more than one element is reshaped to `shape` first."""
    wide = pen.cast(name, _INT32)
    if not zero_point or _is_zero(pen, zero_point):
        return wide
    return pen.add("Sub", wide, _reshaped(pen, pen.cast(zero_point, _INT32), shape))


def _is_zero(pen: Pen, name: str) -> bool:
    return name in pen.constants and not pen.constants[name].any()


def _reshaped(pen: Pen, name: str, shape: Sequence[int]) -> str:
    return pen.add("Reshape", name, pen.integers(*shape)) if shape else name


def _per_filter(pen: Pen, name: str) -> list[int]:
    """The shape in which a value per filter broadcasts over the weight: [M, 1, 1, ...]; [] for a single value."""
    if not name or pen.known_shape(name) in ((), (1,)):
        return []
    weight = pen.known_shape(pen.input[1] if pen.op_type == "ConvInteger" else pen.input[3])
    return [weight[0], *[1] * (len(weight) - 1)]


@rule("QLinearConv", replaces=True)
def _qlinear_conv(pen: Pen) -> None:
    x, x_scale, x_zero, weight, w_scale, w_zero, y_scale, y_zero = pen.input[:8]
    filters = _per_filter(pen, w_scale)
    operands = [shifted(pen, x, x_zero, []), shifted(pen, weight, w_zero, _per_filter(pen, w_zero))]
    sums = pen.name("sums")
    pen.again([*operands, *filter(None, pen.input[8:])], [sums], "Conv")
    # [M, 1, 1] broadcasts from the right over [N, M, H, W].
    scale = _combined_scale(pen, x_scale, _reshaped(pen, w_scale, filters[:-1] if filters else []), y_scale)
    requantise(pen, sums, scale, y_zero)


@rule("QLinearMatMul", replaces=True)
def _qlinear_matmul(pen: Pen) -> None:
    a, a_scale, a_zero, b, b_scale, b_zero, y_scale, y_zero = pen.input
    left = shifted(pen, a, a_zero, per_row(pen, a_zero))
    sums = pen.add("MatMul", left, shifted(pen, b, b_zero, []))
    scale = _combined_scale(pen, _reshaped(pen, a_scale, per_row(pen, a_scale)), b_scale, y_scale)
    requantise(pen, sums, scale, y_zero)


def per_row(pen: Pen, name: str) -> list[int]:
    """[M, 1] for a vector of M values, one a row of the left operand; values of higher rank broadcast as they are."""
    shape = pen.known_shape(name)
    return [shape[0], 1] if len(shape) == 1 and shape[0] > 1 else []


def _combined_scale(pen: Pen, left: str, right: str, result: str) -> str:
    wide = [pen.cast(name, FLOAT) for name in (left, right, result)]
    return pen.add("Div", pen.add("Mul", wide[0], wide[1]), wide[2])


def requantise(pen: Pen, sums: str, scale: str, zero_point: str, out: str = "") -> None:
    """saturate(round(sums * scale) + zero point), halves to even, as ONNX Runtime orders it; ``out`` or the node's."""
    code = pen.known_type(zero_point)
    if code not in _BYTES:
        raise pen.refusal(f"gives element type {code}", "quantise to int8 or uint8")
    real = pen.add("Mul", pen.cast(sums, FLOAT), scale)
    zero = zero_point if pen.known_shape(zero_point) == () else pen.add("Reshape", zero_point, pen.integers())
    pen.add("QuantizeLinear", real, pen.constant(1.0, np.float32), zero, out=out or pen.out)


def _clipped(pen: Pen, x: str, code: int) -> str:
    """x (float32) within what the integer type `code` holds."""
    limits = np.iinfo(helper.tensor_dtype_to_np_dtype(code))
    if pen.opset >= 11:
        return pen.add("Clip", x, *(pen.constant(limit, np.float32) for limit in (limits.min, limits.max)))
    return pen.add("Clip", x, min=float(limits.min), max=float(limits.max))


@rule("DequantizeLinear", "QuantizeLinear")
def _blocked(pen: Pen) -> None:
    """Quantisation by blocks: each value's own scale and zero point are gathered along the axis."""
    block, x = pen.integer("block_size", 0), pen.x
    if block == 0:
        return
    shape = pen.known_shape(x)
    axis = pen.integer("axis", 1) % len(shape)
    index = pen.constant(np.arange(shape[axis]) // block, np.int64)
    scale = pen.add("Gather", pen.input[1], index, axis=axis)
    zero = pen.add("Gather", pen.input[2], index, axis=axis) if pen.operand(2) else ""
    (_quantise_each if pen.op_type == "QuantizeLinear" else _dequantise_each)(pen, x, scale, zero)


def _quantise_each(pen: Pen, x: str, scale: str, zero_point: str) -> None:
    """saturate(round(x / scale) + zero point)."""
    code = pen.integer("output_dtype", 0)
    code = code or (pen.known_type(pen.input[2]) if zero_point else onnx.TensorProto.UINT8)
    if code not in _QUANTISED:
        raise pen.refusal(f"gives element type {code} by blocks", "quantise to 8 or 16 bits")
    rounded = pen.add("Round", pen.add("Div", pen.cast(x, FLOAT), pen.cast(scale, FLOAT)))
    moved = pen.add("Add", rounded, pen.cast(zero_point, FLOAT)) if zero_point else rounded
    pen.cast(_clipped(pen, moved, code), code, out=pen.out)


def _dequantise_each(pen: Pen, x: str, scale: str, zero_point: str) -> None:
    """(x - zero point) * scale."""
    if pen.known_type(x) not in (*_QUANTISED, _INT32):
        raise pen.refusal(f"reads element type {pen.known_type(x)} by blocks", "quantise to 8 or 16 bits")
    moved = shifted(pen, x, zero_point, [])
    code = pen.integer("output_dtype", 0) or pen.known_type(pen.input[1])
    product = pen.add("Mul", pen.cast(moved, FLOAT), pen.cast(scale, FLOAT))
    pen.cast(product, code, out=pen.out)
