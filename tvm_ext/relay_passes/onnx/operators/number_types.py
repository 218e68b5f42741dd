"""Operators in number types for which stock converters or kernels have nothing, or nothing right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper

from tvm_ext import _tvm
from tvm_ext._tvm import BlockBuilder, Expr, TeTensor

from ..graph import attribute
from .context import Check, Context, Converter, Pen, Rule, operand, refusal, result, text_attribute

_NARROW = (onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)
_FLOAT, _DOUBLE = onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE

# The number types that are read bit by bit: no halves of bytes, no complex numbers, no strings.
_WHOLE_BYTE_NAMES = "BOOL INT8 UINT8 INT16 UINT16 FLOAT16 BFLOAT16 INT32 UINT32 FLOAT INT64 UINT64 DOUBLE"
_WHOLE_BYTES = frozenset(getattr(onnx.TensorProto, name) for name in _WHOLE_BYTE_NAMES.split())

_INTEGERS = frozenset(
    code for code in _WHOLE_BYTES if onnx.TensorProto.DataType.Name(code).lstrip("U").startswith("INT")
)
# What TVM's sort takes for a type that it has not.
_SORTED_AS: Mapping[int, int] = {
    onnx.TensorProto.INT16: onnx.TensorProto.INT32,
    onnx.TensorProto.UINT16: onnx.TensorProto.INT32,
    onnx.TensorProto.UINT32: onnx.TensorProto.INT64,
}

_WIDENED_BFLOAT16_NAMES = "Clip IsInf IsNaN LayerNormalization Mod Pow RoiAlign"
# What stock TVM computes in bfloat16 wrongly or not at all.
_WIDENED_BFLOAT16 = frozenset(_WIDENED_BFLOAT16_NAMES.split())

# Where a step of the operator, or a constant, would be rounded or pass the largest float16.
_WIDENED_NAMES = (
    "Acos Acosh Asin Asinh Atan Cosh CumSum Elu Gelu GlobalLpPool HardSigmoid HardSwish InstanceNormalization LRN "
    "LpNormalization LpPool MeanVarianceNormalization PRelu ReduceL2 ReduceLogSum Selu Sinh Softsign Tan"
)
_WIDENED = frozenset(_WIDENED_NAMES.split())
_DEFAULTS = {"HardSigmoid": ("alpha", 0.2), "InstanceNormalization": ("epsilon", 1e-5), "LeakyRelu": ("alpha", 0.01)}
# Values that each converter of stock TVM writes as float32 constants, whatever the operand's type.
_SELU = {"alpha": 1.67326319217681884765625, "gamma": 1.05070102214813232421875}


def is_widened(node: onnx.NodeProto, context: Context) -> bool:
    """Whether ``node`` has an operand in half precision, and is computed in float32 and rounded once."""
    if node.op_type not in _WIDENED | _WIDENED_BFLOAT16:
        return False
    codes = set(map(context.element_type, node.input))
    return onnx.TensorProto.BFLOAT16 in codes or (node.op_type in _WIDENED and onnx.TensorProto.FLOAT16 in codes)


def in_float32(node: onnx.NodeProto, context: Context) -> list[onnx.NodeProto]:
    """``node`` with its halves of either kind read as float32, and what is of their type rounded once."""
    pen = Pen(node=node, context=context)
    inputs = [pen.cast(name, _FLOAT) if name and context.element_type(name) in _NARROW else name for name in node.input]
    code = next(found for name in node.input if (found := context.element_type(name)) in _NARROW)
    kept = [out for out in node.output if not out or context.element_type(out) not in (code, 0)]
    outputs = [out if out in kept else pen.name("wide") for out in node.output]
    pen.nodes.append(helper.make_node(node.op_type, inputs, outputs, node.name))
    pen.nodes[-1].attribute.extend(node.attribute)
    for wide, out in zip(outputs, node.output, strict=True):
        if out != wide:
            pen.cast(wide, code, out=out)
    return pen.nodes


def _elu(node: onnx.NodeProto, context: Context) -> list[onnx.NodeProto] | None:
    """x, and below 0 alpha (exp(x) - 1); Selu scales the whole by gamma."""
    if context.element_type(node.input[0]) != _DOUBLE:
        return None
    pen, x = Pen(node=node, context=context), node.input[0]
    defaults = _SELU if node.op_type == "Selu" else {"alpha": 1.0, "gamma": 1.0}
    alpha, gamma = (pen.constant(attribute(node, name, defaults[name]), np.float64) for name in ("alpha", "gamma"))
    # What exp gives for large x is not taken.
    bent = pen.add("Mul", alpha, pen.add("Sub", pen.add("Exp", x), pen.constant(1, np.float64)))
    is_bent = pen.add("Less", x, pen.constant(0, np.float64))
    pen.add("Mul", gamma, pen.add("Where", is_bent, bent, x), out=node.output[0])
    return pen.nodes


def _with_defaults(node: onnx.NodeProto, context: Context) -> list[onnx.NodeProto] | None:
    """In float64 a default of 0.01 is float32's, as if it were written in the file."""
    name, value = _DEFAULTS[node.op_type]
    if context.element_type(node.input[0]) != _DOUBLE or attribute(node, name, None) is not None:
        return None
    spelt = onnx.NodeProto()
    spelt.CopyFrom(node)
    spelt.attribute.append(helper.make_attribute(name, value))
    return [spelt]


def _gelu(node: onnx.NodeProto, context: Context) -> list[onnx.NodeProto] | None:
    """Stock TVM's has the accuracy of float32: x / 2 (1 + erf(x / sqrt 2)) in float64."""
    if context.element_type(node.input[0]) != _DOUBLE or text_attribute(node, "approximate", "none") != "none":
        return None
    pen, x = Pen(node=node, context=context), node.input[0]
    half, one, root = (pen.constant(value, np.float64) for value in (0.5, 1.0, 0.5**0.5))
    share = pen.add("Add", one, pen.add("Erf", pen.add("Mul", x, root)))
    pen.add("Mul", pen.add("Mul", half, x), share, out=node.output[0])
    return pen.nodes


def _mean_variance(node: onnx.NodeProto, context: Context) -> list[onnx.NodeProto] | None:
    """(x - mean) / (deviation + 1e-9), as ONNX defines it."""
    if context.element_type(node.input[0]) != _DOUBLE:
        return None
    pen, x = Pen(node=node, context=context), node.input[0]
    axes = list(attribute(node, "axes", [0, 2, 3]))
    centred = pen.add("Sub", x, pen.mean(x, axes))
    variance = pen.mean(pen.add("Mul", centred, centred), axes)
    deviation = pen.add("Add", pen.add("Sqrt", variance), pen.constant(1e-9, np.float64))
    pen.add("Div", centred, deviation, out=node.output[0])
    return pen.nodes


def _celu(node: onnx.NodeProto, context: Context) -> list[onnx.NodeProto]:
    """alpha elu(x / alpha), all of it in float32."""
    pen, x = Pen(node=node, context=context), node.input[0]
    code = context.known_type(node, x)
    wide = _DOUBLE if code == _DOUBLE else _FLOAT
    alpha = pen.constant(attribute(node, "alpha", 1.0), helper.tensor_dtype_to_np_dtype(wide))
    bent = pen.add("Elu", pen.add("Div", x if code == wide else pen.cast(x, wide), alpha))
    if code == wide:
        pen.add("Mul", alpha, bent, out=node.output[0])
    else:
        pen.cast(pen.add("Mul", alpha, bent), code, out=node.output[0])
    return pen.nodes


def _floor_mod(node: onnx.NodeProto, context: Context) -> list[onnx.NodeProto] | None:
    """Mod of floats with the divisor's sign: C's remainder, which is exact, plus y where the signs differ."""
    if attribute(node, "fmod", 0) or context.element_type(node.input[0]) not in (*_NARROW, _FLOAT, _DOUBLE):
        return None
    pen, (x, y) = Pen(node=node, context=context), node.input
    rest = pen.add("Mod", x, y, fmod=1)
    nought = pen.scalar_like(0, x)
    differ = pen.add("Xor", pen.add("Less", rest, nought), pen.add("Less", y, nought))
    wraps = pen.add("And", differ, pen.add("Not", pen.add("Equal", rest, nought)))
    pen.add("Where", wraps, pen.add("Add", rest, y), rest, out=node.output[0])
    return pen.nodes


def _top_k(node: onnx.NodeProto, context: Context) -> list[onnx.NodeProto] | None:
    """Sorted as a wider type that kernels sort; uint64 with the highest bit flipped, as int64 of the same order."""
    code = context.element_type(node.input[0])
    if code not in _SORTED_AS and code != onnx.TensorProto.UINT64:
        return None
    pen, x, values = Pen(node=node, context=context), node.input[0], result(node, 0)
    index = result(node, 1) or pen.name("index")
    flips = code == onnx.TensorProto.UINT64
    if flips and context.opset < 18:
        raise refusal(node, "ranks uint64", "export with operator set 18 or later, or rank another type")
    wide = pen.cast(x, onnx.TensorProto.INT64 if flips else _SORTED_AS[code])
    highest = pen.constant(np.iinfo(np.int64).min, np.int64) if flips else ""
    found = pen.name("values")
    operands = [pen.add("BitwiseXor", wide, highest) if flips else wide, *node.input[1:]]
    pen.nodes.append(helper.make_node("TopK", operands, [found, index], node.name))
    pen.nodes[-1].attribute.extend(node.attribute)
    pen.cast(pen.add("BitwiseXor", found, highest) if flips else found, code, out=values or pen.name("unread"))
    return pen.nodes


def sampled(node: onnx.NodeProto, context: Context) -> list[onnx.NodeProto] | None:
    """Operators at places between pixels give the type of the image; kernels take one type, float32 or float64."""
    image, places = (context.known_type(node, node.input[index]) for index in (0, 1))
    if image not in (*_NARROW, _FLOAT, _DOUBLE):
        raise refusal(node, f"samples {onnx.TensorProto.DataType.Name(image)}", "cast the image to float32 before")
    wide = _DOUBLE if _DOUBLE in (image, places) else _FLOAT
    if {image, places} == {wide}:
        return None
    pen, out = Pen(node=node, context=context), node.output[0]
    cast = [pen.cast(name, wide) for name in node.input[:2]]
    found = pen.name("samples")
    pen.nodes.append(helper.make_node(node.op_type, [*cast, *node.input[2:]], [found], node.name))
    pen.nodes[-1].attribute.extend(node.attribute)
    pen.cast(found, image, out=out)
    return pen.nodes


def _shrink(node: onnx.NodeProto, context: Context) -> list[onnx.NodeProto] | None:
    """Of integers in float64: a bias of 1/2 counts, and unsigned ones have no -lambd."""
    code = context.element_type(node.input[0])
    if code not in _INTEGERS:
        return None
    pen = Pen(node=node, context=context)
    attributes = {name: attribute(node, name, default) for name, default in (("bias", 0.0), ("lambd", 0.5))}
    pen.cast(pen.add("Shrink", pen.cast(node.input[0], _DOUBLE), **attributes), code, out=node.output[0])
    return pen.nodes


def _legacy_prelu(node: onnx.NodeProto, context: Context) -> list[onnx.NodeProto] | None:
    """Before operator set 7 a vector of slopes had one for each channel; later it broadcasts from the right."""
    rank, slopes = context.rank(node.input[0]), context.shape(operand(node, 1))
    if context.opset >= 7 or slopes is None or rank is None or len(slopes) != 1 or slopes[0] == 1 or rank < 3:
        return None
    pen = Pen(node=node, context=context)
    per_channel = pen.add("Reshape", node.input[1], pen.integers(-1, *[1] * (rank - 2)))
    pen.add("PRelu", node.input[0], per_channel, out=node.output[0])
    return pen.nodes


def _check_bit_cast(node: onnx.NodeProto, context: Context) -> None:
    given, wanted = context.known_type(node, node.input[0]), int(attribute(node, "to", 0))
    if {given, wanted} - _WHOLE_BYTES or _width(given) != _width(wanted):
        raise refusal(node, f"from element type {given} to {wanted}", "both must have the same number of whole bytes")


def _width(code: int) -> int:
    return int(helper.tensor_dtype_to_np_dtype(code).itemsize)


def _bit_cast(bb: BlockBuilder, operands: Sequence[Expr], attributes: Mapping[str, Any], opset: int) -> Expr:
    """The bits of each element, read as another type of the same width; a bool is a byte."""
    given, wanted = operands[0], str(helper.tensor_dtype_to_np_dtype(attributes["to"]))
    if given.ty.dtype.dtype == "bool":
        given = bb.normalize(_tvm.relax.op.astype(given, "uint8"))
    kind = "uint8" if wanted == "bool" else wanted

    def compute(x: TeTensor) -> TeTensor:
        return _tvm.te.compute(x.shape, lambda *index: _tvm.tirx.reinterpret(kind, x(*index)), "bit_cast")

    cast = bb.call_te(compute, given, primfunc_name_hint="bit_cast")
    return bb.normalize(_tvm.relax.op.astype(bb.normalize(cast), wanted)) if wanted == "bool" else cast


RULES: Mapping[str, Rule] = {
    **dict.fromkeys(_DEFAULTS, _with_defaults),
    "Celu": _celu,
    "Elu": _elu,
    "Gelu": _gelu,
    "GridSample": sampled,
    "MeanVarianceNormalization": _mean_variance,
    "Mod": _floor_mod,
    "PRelu": _legacy_prelu,
    "Selu": _elu,
    "Shrink": _shrink,
    "TopK": _top_k,
}
REPLACED = frozenset({"Celu"})
CHECKS: Mapping[str, Check] = {"BitCast": _check_bit_cast}
CONVERTERS: Mapping[str, Converter] = {"BitCast": _bit_cast}
