"""Operators that are computed in float32 where an operand is of half precision."""

from __future__ import annotations

from onnx import TensorProto

from .context import FLOAT, HALF, Pen

# Where a step of the operator, or a constant, would be rounded or pass the largest float16.
_WIDENED_NAMES = (
    "Acos Acosh Asin Asinh Atan Atanh Celu Cosh CumSum DFT DeformConv Det Elu Gelu GlobalLpPool HardSigmoid HardSwish "
    "InstanceNormalization LRN LpNormalization LpPool MeanVarianceNormalization Mish PRelu ReduceL2 ReduceLogSum STFT "
    "Selu Sinh Softplus Softsign Swish Tan"
)
WIDENED = frozenset(_WIDENED_NAMES.split())
# What stock TVM computes in bfloat16 wrongly or not at all.
_WIDENED_BFLOAT16 = frozenset(["Clip", "IsInf", "IsNaN", "LayerNormalization", "Mod", "Pow", "RoiAlign"])


def is_widened(pen: Pen) -> bool:
    """Whether the node has an operand in half precision, and is computed in float32 and rounded once."""
    codes = set(map(pen.element_type, pen.input))
    return (pen.op_type in WIDENED and not codes.isdisjoint(HALF)) or (
        pen.op_type in _WIDENED_BFLOAT16 and TensorProto.BFLOAT16 in codes
    )


def in_float32(pen: Pen) -> None:
    """The node with its halves of either kind read as float32, and what is of their type rounded once."""
    inputs = [pen.cast(name, FLOAT) if name and pen.element_type(name) in HALF else name for name in pen.input]
    code = next(found for name in pen.input if (found := pen.element_type(name)) in HALF)
    kept = [out for out in pen.output if not out or pen.element_type(out) not in (code, 0)]
    outputs = [out if out in kept else pen.name("wide") for out in pen.output]
    pen.again(inputs, outputs)
    for wide, out in zip(outputs, pen.output, strict=True):
        if out != wide:
            pen.cast(wide, code, out=out)
