"""Running products."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
from onnx import helper

from tvm_ext.support.arrays import Array, DType

from ..graph import attribute
from .context import Check, Context, Pen, Rule, operand, refusal


def _cum_prod(node: onnx.NodeProto, context: Context) -> list[onnx.NodeProto]:
    """Products over distances 1, 2, 4, ...: after step s each element is the product of 2^s elements up to it.

    Worked example: [a, b, c, d] -> [a, ab, bc, cd] -> [a, ab, abc, abcd]. No loop, and any number type.
    """
    pen, x = Pen(node=node, context=context), node.input[0]
    shape = context.known_shape(node, x)
    given = context.known_value(node, 1)
    axis = _axis(node, given, len(shape)) % max(1, len(shape))
    dtype = helper.tensor_dtype_to_np_dtype(context.known_type(node, x))
    product, reverse = x, bool(attribute(node, "reverse", 0))
    if attribute(node, "exclusive", 0):
        product = _shifted(pen, product, shape, axis, 1, reverse, dtype)
    distance = 1
    while distance < shape[axis]:
        product = pen.add("Mul", product, _shifted(pen, product, shape, axis, distance, reverse, dtype))
        distance *= 2
    pen.add("Identity", product, out=node.output[0])
    return pen.nodes


def _check_cum_sum(node: onnx.NodeProto, context: Context) -> None:
    rank, axis = context.rank(node.input[0]), context.constants.get(operand(node, 1))
    if rank is not None and axis is not None:
        _axis(node, axis, rank)


def _axis(node: onnx.NodeProto, given: Array | None, rank: int) -> int:
    axis = 0 if given is None else int(given.reshape(-1)[0])
    if not -rank <= axis < rank:
        raise refusal(node, f"has no axis {axis} among {rank}", "export a valid axis")
    return axis


def _shifted(pen: Pen, x: str, shape: tuple[int, ...], axis: int, distance: int, backwards: bool, dtype: DType) -> str:
    """x moved by `distance` along `axis`, ones in the gap."""
    gap = (*shape[:axis], min(distance, shape[axis]), *shape[axis + 1 :])
    ones = pen.constant(np.ones(gap, dtype))
    begin, end = (distance, shape[axis]) if backwards else (0, shape[axis] - distance)
    if begin >= end:
        return ones
    kept = pen.add("Slice", x, pen.integers(begin), pen.integers(end), pen.integers(axis))
    return pen.add("Concat", *((kept, ones) if backwards else (ones, kept)), axis=axis)


CHECKS: Mapping[str, Check] = {"CumSum": _check_cum_sum}
RULES: Mapping[str, Rule] = {"CumProd": _cum_prod}
REPLACED = frozenset(RULES)
