"""Element-wise operators; on bits, shifts, whose edges the code generator leaves undefined, and BitCast."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import numpy as np
from onnx import helper

from tvm_ext import _tvm
from tvm_ext._tvm import BlockBuilder, Expr, TeTensor

from .context import BOOL, DOUBLE, FLOAT, FLOATING, INTEGERS, Pen, converter, rule


@dataclass(frozen=True, slots=True)
class _Form:
    """An operator written by simpler ones: ``write(pen, x, *attributes)`` returns the result's name.

    ``types``: element types that are written so; halves are float32 by then (`decompose.WIDENED`). Empty: all.
    ``attributes``: attribute -> its default; each is a constant of the operand's type.
    """

    types: tuple[int, ...]
    write: Callable[..., str]
    attributes: Mapping[str, float] = field(default_factory=dict)


def _log1p(pen: Pen, u: str) -> str:
    """log(1 + u) within a few units in the last place for every u, after Kahan: log(w) u / (w - 1) with w = 1 + u.

    Worked example, u = 1e-5 in float32: w - 1 is 1.001358e-5, and log(w) errs by just as much.
    """
    one, nought = pen.like(1.0), pen.like(0.0)
    w = pen.add("Add", u, one)
    rounded, log = pen.add("Sub", w, one), pen.add("Log", w)
    corrected = pen.add("Mul", log, pen.add("Div", u, rounded))
    exact = pen.add("Where", pen.add("Equal", rounded, u), log, corrected)  # infinity too
    return pen.add("Where", pen.add("Equal", rounded, nought), u, exact)


def _softplus(pen: Pen, x: str) -> str:
    """log(1 + e^x) = max(x, 0) + log(1 + e^-|x|)."""
    return pen.add("Add", pen.add("Relu", x), _log1p(pen, pen.add("Exp", pen.add("Neg", pen.add("Abs", x)))))


def _mish(pen: Pen, x: str) -> str:
    return pen.add("Mul", x, pen.add("Tanh", _softplus(pen, x)))


def _atanh(pen: Pen, x: str) -> str:
    """sign(x) / 2 * log(1 + 2|x| / (1 - |x|))."""
    size = pen.add("Abs", x)
    ratio = pen.add("Div", pen.add("Add", size, size), pen.add("Sub", pen.like(1.0), size))
    return pen.add("Mul", pen.add("Mul", pen.like(0.5), _log1p(pen, ratio)), pen.add("Sign", x))


def _elu(pen: Pen, x: str, alpha: str, gamma: str) -> str:
    """gamma x, and below 0 gamma alpha (exp(x) - 1); what exp gives for large x is not taken."""
    bent = pen.add("Mul", alpha, pen.add("Sub", pen.add("Exp", x), pen.like(1)))
    return pen.add("Mul", gamma, pen.add("Where", pen.add("Less", x, pen.like(0)), bent, x))


def _celu(pen: Pen, x: str, alpha: str) -> str:
    """alpha elu(x / alpha)."""
    return pen.add("Mul", alpha, pen.add("Elu", pen.add("Div", x, alpha)))


def _thresholded_relu(pen: Pen, x: str, alpha: str) -> str:
    """x above alpha, 0 elsewhere: the stock importer's x * (x > alpha) is NaN for x = -inf."""
    return pen.add("Where", pen.add("Greater", x, alpha), x, pen.like(0.0))


def _swish(pen: Pen, x: str, alpha: str) -> str:
    """x sigmoid(alpha x)."""
    return pen.add("Mul", x, pen.add("Sigmoid", pen.add("Mul", alpha, x)))


_FORMS: Mapping[str, _Form] = {
    # The stock importer writes these with sums that cancel: log(1 + e^x) is 0 from x = -17 on.
    "Atanh": _Form((FLOAT, DOUBLE), _atanh),
    "Mish": _Form((FLOAT, DOUBLE), _mish),
    "Softplus": _Form((FLOAT, DOUBLE), _softplus),
    # Its converters write these values as float32 constants, whatever the operand's type.
    "Elu": _Form((DOUBLE,), _elu, {"alpha": 1.0, "gamma": 1.0}),
    "Selu": _Form((DOUBLE,), _elu, {"alpha": 1.67326319217681884765625, "gamma": 1.05070102214813232421875}),
    "Celu": _Form((), _celu, {"alpha": 1.0}),
    "Swish": _Form((), _swish, {"alpha": 1.0}),
    "ThresholdedRelu": _Form(FLOATING, _thresholded_relu, {"alpha": 1.0}),
}


@rule(*_FORMS.keys() - {"Celu", "Swish"})
@rule("Celu", "Swish", replaces=True)
def _written_out(pen: Pen) -> None:
    form = _FORMS[pen.op_type]
    if not form.types or pen.element_type(pen.x) in form.types:
        pen.give(form.write(pen, pen.x, *(pen.like(pen.attribute(*item)) for item in form.attributes.items())))


# Attributes and their defaults by ONNX's schemas.
_DEFAULTS = {"HardSigmoid": ("alpha", 0.2), "InstanceNormalization": ("epsilon", 1e-5), "LeakyRelu": ("alpha", 0.01)}


@rule(*_DEFAULTS, types=[DOUBLE])
def _with_defaults(pen: Pen) -> None:
    """In float64 a default of 0.01 is float32's, as if it were written in the file."""
    name, value = _DEFAULTS[pen.op_type]
    if pen.attribute(name, None) is None:
        pen.again(pen.input, pen.output)
        pen.nodes[-1].attribute.append(helper.make_attribute(name, value))


@rule("Gelu", types=[DOUBLE])
def _gelu(pen: Pen) -> None:
    """Stock TVM's has the accuracy of float32: x / 2 (1 + erf(x / sqrt 2)) in float64."""
    if pen.text("approximate", "none") != "none":
        return
    half, one, root = map(pen.like, (0.5, 1.0, 0.5**0.5))
    share = pen.add("Add", one, pen.add("Erf", pen.add("Mul", pen.x, root)))
    pen.add("Mul", pen.add("Mul", half, pen.x), share, out=pen.out)


@rule("IsInf")
def _is_inf(pen: Pen) -> None:
    """One-sided IsInf: x > -x says that x is positive, whatever its type; x > x is never true."""
    positive, negative, x = pen.flag("detect_positive", True), pen.flag("detect_negative", True), pen.x
    if positive and negative:
        return
    opposite = pen.add("Neg", x)
    side = pen.add("Greater" if positive else "Less", x, opposite if positive or negative else x)
    pen.add("And", pen.add("IsInf", x), side, out=pen.out)


@rule("Sum", "Max", "Min")
def _of_many(pen: Pen) -> None:
    """Sum(a, b, c) becomes Add(Add(a, b), c), and so for Max and Min: the stock importer would reduce a stack of them.

    Worked example: ResNet's residual Sum of two (1, 64, 56, 56) tensors would become a 5-D stack that neither fuses
    with the convolution before it nor converts to another layout.
    """
    is_sum = pen.op_type == "Sum"
    if pen.opset < (7 if is_sum else 8) or (len(pen.input) == 2 and not is_sum):
        return
    if len(pen.input) == 1:
        pen.add("Identity", pen.x, out=pen.out)
    else:
        pen.give(pen.chain("Add" if is_sum else pen.op_type, pen.input))


@converter("Max")
def _maximum(builder: BlockBuilder, inputs: Sequence[Expr], attributes: Mapping[str, Any], opset: int) -> Expr:
    """Of two. The stock importer reduces a stack of them, whose loop over two elements nothing vectorises."""
    return builder.normalize(reduce(_tvm.relax.op.maximum, inputs))


@converter("Min")
def _minimum(builder: BlockBuilder, inputs: Sequence[Expr], attributes: Mapping[str, Any], opset: int) -> Expr:
    return builder.normalize(reduce(_tvm.relax.op.minimum, inputs))


@rule("Pow")
def _pow(pen: Pen) -> None:
    """Pow of integers, and with two types, given in the base's type.

    Integers are raised in float64, as ONNX Runtime does it: exact up to 2^53. Where only the exponent is floating, its
    type is computed in.
    """
    (base, exponent), out = pen.input, pen.out
    base_type, exponent_type = pen.element_type(base), pen.element_type(exponent)
    is_float = base_type in FLOATING
    if 0 in (base_type, exponent_type) or (base_type == exponent_type and is_float):
        return
    if not is_float and exponent_type not in FLOATING:
        wide = (pen.cast(name, DOUBLE) for name in (base, exponent))
        pen.cast(pen.add("Round", pen.add("Pow", *wide)), base_type, out=out)
    elif not is_float:
        pen.cast(pen.add("Pow", pen.cast(base, exponent_type), exponent), base_type, out=out)
    else:
        pen.add("Pow", base, pen.cast(exponent, base_type), out=out)


@rule("Div")
def _check_division(pen: Pen) -> None:
    divisor = pen.constants.get(pen.operand(1))
    if divisor is not None and divisor.dtype.kind in "iu" and (divisor == 0).any():
        raise pen.refusal("divides integers by zero", "check the divisor")


@rule("Mod")
def _mod(pen: Pen) -> None:
    """Mod of floats with the divisor's sign: C's remainder, which is exact, plus y where the signs differ."""
    code = pen.known_type(pen.x)
    _check_division(pen)
    if pen.flag("fmod") or code not in FLOATING:
        return
    x, y = pen.input
    rest, nought = pen.add("Mod", x, y, fmod=1), pen.like(0)
    differ = pen.add("Xor", pen.add("Less", rest, nought), pen.add("Less", y, nought))
    wraps = pen.add("And", differ, pen.add("Not", pen.add("Equal", rest, nought)))
    pen.add("Where", wraps, pen.add("Add", rest, y), rest, out=pen.out)


@rule("Shrink", types=INTEGERS)
def _shrink(pen: Pen) -> None:
    """Of integers in float64: a bias of 1/2 counts, and unsigned ones have no -lambd."""
    options = {"bias": 0.0, "lambd": 0.5, **pen.options()}
    pen.cast(pen.add("Shrink", pen.cast(pen.x, DOUBLE), **options), pen.element_type(pen.x), out=pen.out)


@rule("PRelu")
def _legacy_prelu(pen: Pen) -> None:
    """Before operator set 7 a vector of slopes had one for each channel; later it broadcasts from the right."""
    rank, slopes = pen.rank(pen.x), pen.shape(pen.operand(1))
    if pen.opset >= 7 or slopes is None or rank is None or len(slopes) != 1 or slopes[0] == 1 or rank < 3:
        return
    per_channel = pen.add("Reshape", pen.input[1], pen.integers(-1, *[1] * (rank - 2)))
    pen.add("PRelu", pen.x, per_channel, out=pen.out)


@converter("BitShift")
def _shift(builder: BlockBuilder, inputs: Sequence[Expr], attributes: Mapping[str, Any], opset: int) -> Expr:
    """A shift by less than nothing, or by the width or more, leaves what sign extension alone leaves: 0 or -1."""
    op, const = _tvm.relax.op, _tvm.relax.const
    x, count = inputs[0], inputs[1]
    dtype = np.dtype(str(x.ty.dtype.dtype))
    width = const(dtype.itemsize * 8, dtype.name)
    zero = const(0, dtype.name)
    is_inside = op.less(count, width)
    if dtype.kind == "i":
        is_inside = op.logical_and(is_inside, op.greater_equal(count, zero))
    safe = op.where(is_inside, count, zero)
    if attributes["direction"] == b"LEFT":
        return builder.normalize(op.where(is_inside, op.left_shift(x, safe), zero))
    beyond = zero
    if dtype.kind == "i":
        beyond = op.where(op.less(x, zero), const(-1, dtype.name), zero)
    return builder.normalize(op.where(is_inside, op.right_shift(x, safe), beyond))


@rule("BitCast")
def _check_bit_cast(pen: Pen) -> None:
    given, wanted = pen.known_type(pen.x), pen.integer("to", 0)
    # The number types that are read bit by bit: no halves of bytes, no complex numbers, no strings.
    if {given, wanted} - {BOOL, *INTEGERS, *FLOATING} or _width(given) != _width(wanted):
        raise pen.refusal(f"from element type {given} to {wanted}", "both must have the same number of whole bytes")


def _width(code: int) -> int:
    return int(helper.tensor_dtype_to_np_dtype(code).itemsize)


@converter("BitCast")
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
