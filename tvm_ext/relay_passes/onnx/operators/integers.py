"""Operators on bits: shifts, whose edges the code generator leaves undefined, and BitCast."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from onnx import helper

from tvm_ext import _tvm
from tvm_ext._tvm import BlockBuilder, Expr, TeTensor

from .context import BOOL, FLOATING, INTEGERS, Pen, converter, rule


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
