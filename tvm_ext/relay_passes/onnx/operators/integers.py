"""Operators on integers whose edges the code generator leaves undefined."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx

from tvm_ext import _tvm
from tvm_ext._tvm import BlockBuilder, Expr

from ..graph import attribute
from .context import Check, Context, Converter, operand, refusal


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


def _check_mod(node: onnx.NodeProto, context: Context) -> None:
    code = context.known_type(node, node.input[0])
    dtype = onnx.helper.tensor_dtype_to_np_dtype(code)
    is_integer = np.issubdtype(dtype, np.integer)
    if code == onnx.TensorProto.BFLOAT16 and not attribute(node, "fmod", 0):
        raise refusal(node, "takes the remainder of bfloat16 with fmod=0", "export the model in float32 or float16")
    divisor = context.constants.get(operand(node, 1))
    if is_integer and divisor is not None and (divisor == 0).any():
        raise refusal(node, "divides integers by zero", "check the divisor")


def _check_div(node: onnx.NodeProto, context: Context) -> None:
    divisor = context.constants.get(operand(node, 1))
    if divisor is not None and divisor.dtype.kind in "iu" and (divisor == 0).any():
        raise refusal(node, "divides integers by zero", "check the divisor")


CHECKS: Mapping[str, Check] = {"Mod": _check_mod, "Div": _check_div}
CONVERTERS: Mapping[str, Converter] = {"BitShift": _shift}
