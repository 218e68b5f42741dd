"""Quantised operators of the domain com.microsoft, as ONNX Runtime's quantisers write them, in ONNX's own operators.

The definitions are those of ONNX Runtime's contributed operators. Inference knows no type behind such a node, so that
these rules ask for shapes and types of constants alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import onnx

from tvm_ext.records.packed import MIDDLE
from tvm_ext.support.arrays import Array

from .context import FLOAT, INT64, Pen, contributed
from .packed_product import PACKED_PRODUCT
from .quantized import per_row, requantise, shifted

_INT32 = onnx.TensorProto.INT32
_CODE_BITS = (2, 4, 8)  # what MatMulNBits packs evenly into bytes


@contributed("QLinearAdd", "QLinearMul")
def _binary(pen: Pen) -> None:
    a, b = (_real(pen, start) for start in (0, 3))
    _quantised(pen, pen.add(pen.op_type.removeprefix("QLinear"), a, b), 6)


@contributed("QLinearSigmoid", "QLinearLeakyRelu", "QLinearAveragePool", "QLinearGlobalAveragePool")
def _unary(pen: Pen) -> None:
    """The operator of the same name between what is read as floats and what is rounded again."""
    if pen.flag("channels_last"):
        raise pen.refusal("has channels last", "export it with channels_last=0")
    operator = pen.op_type.removeprefix("QLinear")
    _quantised(pen, pen.add(operator, _real(pen, 0), **pen.options("channels_last")), 3)


@contributed("QLinearSoftmax")
def _softmax(pen: Pen) -> None:
    """Before operator set 13 a softmax is over all axes from `axis` on; with the last axis both are the same."""
    axis, older = pen.integer("axis", -1), pen.integer("opset", 13) < 13
    if older != (pen.opset < 13) and axis != -1 and axis + 1 != pen.rank(pen.x):
        raise pen.refusal(f"normalises as before operator set 13 from axis {axis} on", "quantise an export of 13 or up")
    _quantised(pen, pen.add("Softmax", _real(pen, 0), axis=axis), 3)


@contributed("QLinearWhere")
def _where(pen: Pen) -> None:
    _quantised(pen, pen.add("Where", pen.x, _real(pen, 1), _real(pen, 4)), 7)


@contributed("QLinearConcat")
def _concat(pen: Pen) -> None:
    parts = [_real(pen, start) for start in range(2, len(pen.input), 3)]
    _quantised(pen, pen.add("Concat", *parts, axis=pen.integer("axis", 0)), 0)


@contributed("QuantizeLinear", "DequantizeLinear")
def _standard(pen: Pen) -> None:
    """The operators of the same names in ONNX's domain."""
    pen.add(pen.op_type, *pen.input, out=pen.out, **pen.options())


def _real(pen: Pen, start: int) -> str:
    """(x - zero point) * scale, whose three operands begin at `start`."""
    operands = [pen.operand(start + index) for index in range(3)]
    return pen.add("DequantizeLinear", *filter(None, operands))


def _quantised(pen: Pen, x: str, start: int) -> None:
    """The node's result: x by the scale and zero point that begin at `start`."""
    scale, zero_point = pen.operand(start), pen.operand(start + 1)
    pen.add("QuantizeLinear", x, scale, zero_point or pen.like(0), out=pen.out)


@contributed("QGemm")
def _gemm(pen: Pen) -> None:
    """alpha * scale_a * scale_b * (A B + C), whole numbers inside, given as floats where no scale of Y is."""
    a, a_scale, a_zero, b, b_scale, b_zero = pen.input[:6]
    left, right = shifted(pen, a, a_zero, []), _columns(pen, b, b_zero)
    if pen.flag("transA"):
        left = pen.add("Transpose", left, perm=[1, 0])
    sums = pen.add("MatMul", left, right)
    if pen.operand(6):
        sums = pen.add("Add", sums, pen.operand(6))
    scale = pen.add("Mul", a_scale, b_scale)
    if (alpha := float(pen.attribute("alpha", 1.0))) != 1.0:
        scale = pen.add("Mul", scale, pen.constant(alpha, np.float32))
    if pen.operand(7):
        requantise(pen, sums, pen.add("Div", scale, pen.operand(7)), pen.operand(8))
    else:
        pen.add("Mul", pen.cast(sums, FLOAT), scale, out=pen.out)


def _columns(pen: Pen, b: str, zero_point: str) -> str:
    """B - zero points, which are one for all or one a column, as (K, N)."""
    if not pen.flag("transB"):
        return shifted(pen, b, zero_point, [])
    wide = shifted(pen, b, zero_point, [-1, 1] if math.prod(pen.known_shape(zero_point)) > 1 else [])
    return pen.add("Transpose", wide, perm=[1, 0])


@contributed("DynamicQuantizeMatMul")
def _dynamic_product(pen: Pen) -> None:
    """The left operand is quantised to uint8 by its own extremes, as DynamicQuantizeLinear does."""
    names = [pen.name(stem) for stem in ("quantised", "scale", "zero_point")]
    pen.add_many("DynamicQuantizeLinear", [pen.x], names)
    _scaled_product(pen, (names[0], names[1], names[2]), (pen.input[1], pen.input[2], pen.operand(3)), pen.operand(4))


@contributed("MatMulIntegerToFloat")
def _float_product(pen: Pen) -> None:
    a, b, a_scale, b_scale = pen.input[:4]
    _scaled_product(pen, (a, a_scale, pen.operand(4)), (b, b_scale, pen.operand(5)), pen.operand(6))


def _scaled_product(pen: Pen, a: tuple[str, str, str], b: tuple[str, str, str], bias: str) -> None:
    """scale_a * scale_b * ((A - zero_a) (B - zero_b)) + bias; an operand is (tensor, scale, zero point)."""
    left = shifted(pen, a[0], a[2], per_row(pen, a[2]) if a[2] in pen.constants else [])
    sums = pen.cast(pen.add("MatMul", left, shifted(pen, b[0], b[2], [])), FLOAT)
    scaled = pen.add("Mul", sums, pen.add("Mul", a[1], b[1]), out="" if bias else pen.out)
    if bias:
        pen.add("Add", scaled, bias, out=pen.out)


@contributed("MatMulNBits")
def _packed_product(pen: Pen) -> None:
    """A B in A's floats, B being N rows of blocks of K: floats, too, but of four bits."""
    weights, bias = _packed_weights(pen), list(filter(None, [pen.operand(5)]))
    sizes = {"K": pen.integer("K", 0), "N": pen.integer("N", 0), "level": pen.integer("accuracy_level", 0)}
    is_served = pen.shape(pen.x) is not None and pen.element_type(pen.x) == FLOAT
    packed = _by_columns(pen, weights) if is_served else []
    if packed:
        pen.add(PACKED_PRODUCT, pen.x, *packed, *bias, out=pen.out, domain=pen.node.domain, **sizes)
        return
    product = pen.add("MatMul", pen.x, pen.constant(_unpacked(weights)), out="" if bias else pen.out)
    if bias:
        pen.add("Add", product, *bias, out=pen.out)


@dataclass(frozen=True, kw_only=True, slots=True)
class _PackedWeights:
    """(code - zero) * scale: ``codes`` of (N, K), scales and zeros of (N, blocks); ``group`` is the block of each k."""

    bits: int
    block: int
    codes: Array
    scales: Array
    zeros: Array
    group: Array


def _packed_weights(pen: Pen) -> _PackedWeights:
    rows, depth, block = pen.integer("N", 0), pen.integer("K", 0), pen.integer("block_size", 0)
    bits, order = pen.integer("bits", 4), pen.known_value(4)
    packed, scales, zero_points = (pen.known_value(index) for index in (1, 2, 3))
    if bits not in _CODE_BITS:
        raise pen.refusal(f"has {bits} bits a weight", "quantise to 2, 4 or 8 bits")
    if packed is None or scales is None or min(rows, depth, block) < 1:
        raise pen.refusal("lacks weights or their sizes", "give B, scales, N, K and block_size")
    blocks = -(-depth // block)
    codes = _codes(packed.reshape(rows, blocks * block * bits // 8), bits)[:, :depth]
    if zero_points is None:
        zeros: Array = np.full((rows, blocks), 1 << (bits - 1), np.uint8)
    elif zero_points.dtype == np.uint8:
        zeros = _codes(zero_points.reshape(rows, -1), bits)[:, :blocks]
    else:
        zeros = zero_points.reshape(rows, blocks).astype(np.float32)
    group = np.arange(depth) // block if order is None else order.reshape(-1)[:depth]
    if len(group) < depth or (group < 0).any() or (group >= blocks).any():
        raise pen.refusal(
            f"has a g_idx that does not name one of {blocks} blocks for each of {depth} weights", "quantise it again"
        )
    return _PackedWeights(
        bits=bits, block=block, codes=codes, scales=scales.reshape(rows, blocks), zeros=zeros, group=group
    )


def _unpacked(weights: _PackedWeights) -> Array:
    """(code - zero point) * scale as (K, N), in the type of the scales."""
    codes, shift = weights.codes.astype(np.float32), weights.zeros.astype(np.float32)
    values = (codes - shift[:, weights.group]) * weights.scales[:, weights.group].astype(np.float32)
    return np.ascontiguousarray(values.T.astype(weights.scales.dtype))


def _by_columns(pen: Pen, weights: _PackedWeights) -> list[str]:
    """Codes, scales and zero points, if any, as functions with attribute `ACCURACY` have them; [] for another form."""
    (rows, depth), block = weights.codes.shape, weights.block
    is_plain = bool((weights.group == np.arange(depth) // block).all())
    if weights.bits != 4 or weights.scales.dtype != np.float32 or weights.zeros.dtype != np.uint8 or not is_plain:
        return []
    if depth % block or block % 2:
        return []
    halves = weights.codes.reshape(rows, depth // block, 2, block // 2)
    packed = (halves[:, :, 0] | (halves[:, :, 1] << 4)).transpose(1, 2, 0)
    zeros = [] if (weights.zeros == MIDDLE).all() else [weights.zeros.T]
    return [pen.constant(np.ascontiguousarray(value)) for value in (packed, weights.scales.T, *zeros)]


def _codes(packed: Array, bits: int) -> Array:
    """Rows of bytes -> rows of codes of fewer bits, the lowest bits of a byte first."""
    places = np.arange(0, 8, bits, dtype=np.uint8)
    codes: Array = (packed[:, :, None] >> places) & np.uint8((1 << bits) - 1)
    return codes.reshape(len(packed), -1)


@contributed("DynamicQuantizeLSTM")
def _lstm(pen: Pen) -> None:
    """An LSTM of floats over the weights that the quantised ones stand for.

    ONNX Runtime also rounds each step's operand to 8 bits, by its extremes; here it stays as it is.
    """
    weights = [_weights_of_gates(pen, place, start) for place, start in ((1, 8), (2, 10))]
    pen.add_many("LSTM", [pen.x, *weights, *pen.input[3:8]], pen.output, **pen.options())


def _weights_of_gates(pen: Pen, place: int, start: int) -> str:
    """(directions, inputs, gates) of bytes -> (directions, gates, inputs) of floats; a scale for each gate or one."""
    weights, scale, zero_point = (pen.known_value(index) for index in (place, start, start + 1))
    if weights is None or scale is None or zero_point is None:
        raise pen.refusal("lacks weights or their scales", "give W, R and their scales and zero points")
    per_gate = (weights.shape[0], 1, -1)
    shift = weights.astype(np.int32) - zero_point.astype(np.int32).reshape(per_gate)
    return pen.constant(np.moveaxis(shift * scale.reshape(per_gate), 1, 2).astype(np.float32))


@contributed("QAttention")
def _attention(pen: Pen) -> None:
    """Self-attention whose joint product of queries, keys and values is over bytes."""
    heads = pen.integer("num_heads", 0)
    width = pen.known_shape(pen.input[1])[1]
    if heads < 1 or width % (3 * heads) or pen.flag("do_rotary") or pen.flag("past_present_share_buffer"):
        raise pen.refusal(f"has {heads} heads over {width} columns, or a form of its own", "quantise another export")
    query, key, value = _joint_product(pen, heads)
    key, value = _with_past(pen, key, value)
    scale = float(pen.attribute("scale", 0.0)) or 1.0 / math.sqrt(width // 3 // heads)
    transposed = pen.add("Transpose", key, perm=[0, 1, 3, 2])
    scores = pen.add("MatMul", pen.add("Mul", query, pen.constant(scale, np.float32)), transposed)
    hide = pen.constant(pen.attribute("mask_filter_value", -10000.0), np.float32)
    if pen.operand(5):
        scores = pen.add("Add", scores, _hidden_keys(pen, key, hide))
    if pen.flag("unidirectional"):
        scores = pen.add("Where", _seen(pen, scores), scores, hide)
    rows = pen.add("MatMul", pen.add("Softmax", scores, axis=3 if pen.opset < 13 else -1), value)
    pen.add("Reshape", pen.add("Transpose", rows, perm=[0, 2, 1, 3]), pen.integers(0, 0, width // 3), out=pen.out)


def _joint_product(pen: Pen, heads: int) -> list[str]:
    """Queries, keys and values of (batch, heads, sequence, features)."""
    weight = shifted(pen, pen.input[1], pen.operand(7), [])
    product = pen.add("MatMul", shifted(pen, pen.x, pen.operand(6), []), weight)
    real = pen.add("Mul", pen.cast(product, FLOAT), pen.add("Mul", pen.input[3], pen.input[4]))
    joint = pen.add("Reshape", pen.add("Add", real, pen.input[2]), pen.integers(0, 0, 3, heads, -1))
    parts = [pen.add("Gather", joint, pen.constant(index, np.int64), axis=2) for index in range(3)]
    return [pen.add("Transpose", part, perm=[0, 2, 1, 3]) for part in parts]


def _with_past(pen: Pen, key: str, value: str) -> tuple[str, str]:
    """Keys and values behind those of the cache, (2, batch, heads, past, features), which grows by them."""
    if pen.operand(8):
        past = [pen.add("Gather", pen.operand(8), pen.constant(index, np.int64), axis=0) for index in range(2)]
        key, value = (pen.add("Concat", old, new, axis=2) for old, new in zip(past, (key, value), strict=True))
    if pen.result(1):
        shape = pen.add("Concat", pen.integers(1), pen.add("Shape", key), axis=0)
        pair = [pen.add("Reshape", name, shape) for name in (key, value)]
        pen.add("Concat", *pair, axis=0, out=pen.result(1))
    return key, value


def _hidden_keys(pen: Pen, key: str, hide: str) -> str:
    """What is added to scores: `hide` for keys that the mask, one number a key or one length a row, leaves out."""
    mask = pen.operand(5)
    rank = pen.rank(mask)
    if rank == 1:
        shape = pen.add("Shape", key)
        batch, extent = (pen.add("Gather", shape, pen.constant([axis], np.int64)) for axis in (0, 2))
        column = pen.add("Concat", batch, pen.integers(1, 1, 1), axis=0)
        lengths = pen.add("Reshape", pen.cast(mask, INT64), column)
        seen = pen.add("Less", _count(pen, pen.constant(0, np.int64), pen.add("Squeeze", extent)), lengths)
    elif rank == 2:
        seen = pen.cast(pen.add("Reshape", mask, pen.integers(0, 1, 1, -1)), onnx.TensorProto.BOOL)
    else:
        raise pen.refusal(f"has a mask of {rank} axes", "give lengths of rows, or one number a key")
    return pen.add("Where", seen, pen.constant(0.0, np.float32), hide)


def _seen(pen: Pen, scores: str) -> str:
    """Whether query i, which stands behind the cache, is not before key j."""
    shape = pen.add("Shape", scores)
    queries, keys = (pen.add("Gather", shape, pen.constant(axis, np.int64)) for axis in (2, 3))
    places = _count(pen, pen.add("Sub", keys, queries), keys)
    column = pen.add("Reshape", places, pen.integers(-1, 1))
    return pen.add("Not", pen.add("Less", column, _count(pen, pen.constant(0, np.int64), keys)))


def _count(pen: Pen, start: str, stop: str) -> str:
    return pen.add("Range", start, stop, pen.constant(1, np.int64))
