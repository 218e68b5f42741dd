"""Element-wise functions that the stock importer writes with sums that cancel: log(1 + e^x) is 0 from x = -17 on."""

from __future__ import annotations

from collections.abc import Mapping

import onnx
from onnx import TensorProto, helper

from ..graph import attribute
from .context import Context, Pen, Rule

_HALF = (TensorProto.FLOAT16, TensorProto.BFLOAT16)
_COMPUTED = (TensorProto.FLOAT, TensorProto.DOUBLE)


def _log1p(pen: Pen, u: str, code: int) -> str:
    """log(1 + u) within a few units in the last place for every u, after Kahan: log(w) u / (w - 1) with w = 1 + u.

    Worked example, u = 1e-5 in float32: w - 1 is 1.001358e-5, and log(w) errs by just as much.
    """
    one, nought = _constant(pen, 1.0, code), _constant(pen, 0.0, code)
    w = pen.add("Add", u, one)
    rounded, log = pen.add("Sub", w, one), pen.add("Log", w)
    corrected = pen.add("Mul", log, pen.add("Div", u, rounded))
    exact = pen.add("Where", pen.add("Equal", rounded, u), log, corrected)  # infinity too
    return pen.add("Where", pen.add("Equal", rounded, nought), u, exact)


def _constant(pen: Pen, value: float, code: int) -> str:
    return pen.constant(value, helper.tensor_dtype_to_np_dtype(code))


def _softplus_of(pen: Pen, x: str, code: int) -> str:
    """log(1 + e^x) = max(x, 0) + log(1 + e^-|x|)."""
    return pen.add("Add", pen.add("Relu", x), _log1p(pen, pen.add("Exp", pen.add("Neg", pen.add("Abs", x))), code))


def _mish_of(pen: Pen, x: str, code: int) -> str:
    return pen.add("Mul", x, pen.add("Tanh", _softplus_of(pen, x, code)))


def _atanh_of(pen: Pen, x: str, code: int) -> str:
    """sign(x) / 2 * log(1 + 2|x| / (1 - |x|))."""
    size = pen.add("Abs", x)
    ratio = pen.add("Div", pen.add("Add", size, size), pen.add("Sub", _constant(pen, 1.0, code), size))
    half = pen.add("Mul", _constant(pen, 0.5, code), _log1p(pen, ratio, code))
    return pen.add("Mul", half, pen.add("Sign", x))


_FORMS = {"Softplus": _softplus_of, "Mish": _mish_of, "Atanh": _atanh_of}


def _written_out(node: onnx.NodeProto, context: Context) -> list[onnx.NodeProto] | None:
    """In float32 where the operand is of half precision; as it is where its type is not known."""
    code = context.element_type(node.input[0])
    if code not in (*_HALF, *_COMPUTED):
        return None
    pen = Pen(node=node, context=context)
    if code in _COMPUTED:
        pen.add("Identity", _FORMS[node.op_type](pen, node.input[0], code), out=node.output[0])
    else:
        wide = pen.cast(node.input[0], TensorProto.FLOAT)
        pen.cast(_FORMS[node.op_type](pen, wide, TensorProto.FLOAT), code, out=node.output[0])
    return pen.nodes


def _thresholded_relu(node: onnx.NodeProto, context: Context) -> list[onnx.NodeProto] | None:
    """x above alpha, 0 elsewhere: the stock importer's x * (x > alpha) is NaN for x = -inf."""
    if context.element_type(node.input[0]) not in (*_HALF, *_COMPUTED):
        return None
    pen, x = Pen(node=node, context=context), node.input[0]
    above = pen.add("Greater", x, pen.scalar_like(float(attribute(node, "alpha", 1.0)), x))
    pen.add("Where", above, x, pen.scalar_like(0.0, x), out=node.output[0])
    return pen.nodes


RULES: Mapping[str, Rule] = {**dict.fromkeys(_FORMS, _written_out), "ThresholdedRelu": _thresholded_relu}
