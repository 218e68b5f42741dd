"""Element-wise operators."""

from __future__ import annotations

from collections.abc import Mapping

import onnx

from ..graph import attribute
from .context import Context, Pen, Rule

_FLOATING = (
    onnx.TensorProto.FLOAT,
    onnx.TensorProto.DOUBLE,
    onnx.TensorProto.FLOAT16,
    onnx.TensorProto.BFLOAT16,
)


def _is_inf(node: onnx.NodeProto, context: Context) -> list[onnx.NodeProto] | None:
    """One-sided IsInf: x > -x says that x is positive, whatever its type; x > x is never true."""
    positive, negative = bool(attribute(node, "detect_positive", 1)), bool(attribute(node, "detect_negative", 1))
    if positive and negative:
        return None
    pen, x = Pen(node=node, context=context), node.input[0]
    opposite = pen.add("Neg", x)
    side = pen.add("Greater" if positive else "Less", x, opposite if positive or negative else x)
    pen.add("And", pen.add("IsInf", x), side, out=node.output[0])
    return pen.nodes


def _pow(node: onnx.NodeProto, context: Context) -> list[onnx.NodeProto] | None:
    """Pow of integers, and with two types, given in the base's type.

    Integers are raised in float64, as ONNX Runtime does it: exact up to 2^53. Where only the exponent is floating, its
    type is computed in.
    """
    base, exponent, out = node.input[0], node.input[1], node.output[0]
    base_type, exponent_type = context.element_type(base), context.element_type(exponent)
    is_float = base_type in _FLOATING
    if 0 in (base_type, exponent_type) or (base_type == exponent_type and is_float):
        return None
    pen = Pen(node=node, context=context)
    if not is_float and exponent_type not in _FLOATING:
        wide = (pen.cast(name, onnx.TensorProto.DOUBLE) for name in (base, exponent))
        pen.cast(pen.add("Round", pen.add("Pow", *wide)), base_type, out=out)
    elif exponent_type in _FLOATING and base_type not in _FLOATING:
        pen.cast(pen.add("Pow", pen.cast(base, exponent_type), exponent), base_type, out=out)
    else:
        pen.add("Pow", base, pen.cast(exponent, base_type), out=out)
    return pen.nodes


RULES: Mapping[str, Rule] = {"IsInf": _is_inf, "Pow": _pow}
