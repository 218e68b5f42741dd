"""Reductions: over nothing, over no axes, means of integers, and log-sum-exp of rows with infinities."""

from __future__ import annotations

from collections.abc import Mapping

import ml_dtypes
import numpy as np
import onnx
from onnx import TensorProto, helper

from tvm_ext.support.arrays import Array

from ..graph import attribute
from .context import Check, Context, Pen, Rule, operand, refusal

_REDUCTIONS = ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare")
_ARGUMENTS = ("ArgMax", "ArgMin")
# Without axes to reduce over, the operators still do what they do to single elements.
_OF_ONE_ELEMENT = {"L1": "Abs", "L2": "Abs", "LogSum": "Log"}


def _reduce(node: onnx.NodeProto, context: Context) -> list[onnx.NodeProto] | None:
    axes = _axes(node, context)
    if axes is None:
        return _of_single_elements(node, context)
    shape = context.shape(node.input[0])
    if shape is not None and any(shape[axis] == 0 for axis in axes):
        return _of_nothing(node, context, shape, axes)
    dtype = _dtype(node, context)
    if dtype == np.bool_:
        return _of_bools(node, context, axes)
    if node.op_type == "ReduceLogSumExp" and dtype.kind not in "iu":
        return _log_sum_exp(node, context, axes)
    return _integer_mean(node, context, axes) if node.op_type == "ReduceMean" and dtype.kind in "iu" else None


def _axes(node: onnx.NodeProto, context: Context) -> list[int] | None:
    """The axes reduced over, not negative; None where the model asks for none at all."""
    given = attribute(node, "axes", None)
    if given is None:
        given = context.known_value(node, 1)
    rank = context.rank(node.input[0])
    if rank is None:
        raise refusal(node, f"needs the rank of '{node.input[0]}'", "give its shape with shape={...}")
    if given is None or len(given) == 0:
        return None if attribute(node, "noop_with_empty_axes", 0) else list(range(rank))
    axes = [int(axis) for axis in given]
    if any(not -rank <= axis < rank for axis in axes) or len({axis % rank for axis in axes}) != len(axes):
        raise refusal(node, f"reduces the axes {axes} of a tensor of rank {rank}", "name existing axes, each once")
    return [axis % rank for axis in axes]


def _dtype(node: onnx.NodeProto, context: Context) -> np.dtype:
    return helper.tensor_dtype_to_np_dtype(context.known_type(node, node.input[0]))


def _of_single_elements(node: onnx.NodeProto, context: Context) -> list[onnx.NodeProto]:
    pen, x, what = Pen(node=node, context=context), node.input[0], node.op_type.removeprefix("Reduce")
    if what == "SumSquare":
        pen.add("Mul", x, x, out=node.output[0])
    else:
        pen.add(_OF_ONE_ELEMENT.get(what, "Identity"), x, out=node.output[0])
    return pen.nodes


def _of_nothing(
    node: onnx.NodeProto, context: Context, shape: tuple[int, ...], axes: list[int]
) -> list[onnx.NodeProto]:
    """Every element of the result is the reduction's neutral element."""
    keeps = bool(attribute(node, "keepdims", 1))
    reduced = [1 if axis in axes else extent for axis, extent in enumerate(shape) if keeps or axis not in axes]
    pen, dtype = Pen(node=node, context=context), _dtype(node, context)
    value = np.full(reduced, _neutral(node, dtype), dtype)
    pen.add("Identity", pen.constant(value), out=node.output[0])
    return pen.nodes


def _neutral(node: onnx.NodeProto, dtype: np.dtype) -> Array:
    what = node.op_type.removeprefix("Reduce")
    if what in ("Sum", "SumSquare", "L1", "L2"):
        return np.zeros((), dtype)
    if what == "Prod":
        return np.ones((), dtype)
    if what in ("Max", "Min") and dtype == np.bool_:
        return np.asarray(what == "Min")
    if what in ("Max", "Min") and np.issubdtype(dtype, np.integer):
        return np.asarray(np.iinfo(dtype).min if what == "Max" else np.iinfo(dtype).max, dtype)
    if what == "Mean" or np.issubdtype(dtype, np.integer):
        raise refusal(node, "reduces over an axis without elements, where it is not defined", "check the shapes")
    return np.asarray(np.inf if what == "Min" else -np.inf, dtype)


def _of_bools(node: onnx.NodeProto, context: Context, axes: list[int]) -> list[onnx.NodeProto]:
    """The maximum or minimum of bytes; a bool is a byte with the values 0 and 1."""
    pen = Pen(node=node, context=context)
    numbers = pen.cast(node.input[0], TensorProto.UINT8)
    reduced = pen.reduce(node.op_type, numbers, axes, keepdims=bool(attribute(node, "keepdims", 1)))
    pen.cast(reduced, TensorProto.BOOL, out=node.output[0])
    return pen.nodes


def _integer_mean(node: onnx.NodeProto, context: Context, axes: list[int]) -> list[onnx.NodeProto]:
    """The sum, divided as integers are: towards zero."""
    shape = context.known_shape(node, node.input[0])
    count = int(np.prod([shape[axis] for axis in axes], dtype=np.int64))
    pen = Pen(node=node, context=context)
    total = pen.reduce("ReduceSum", node.input[0], axes, keepdims=bool(attribute(node, "keepdims", 1)))
    pen.add("Div", total, pen.constant(count, _dtype(node, context)), out=node.output[0])
    return pen.nodes


def _log_sum_exp(node: onnx.NodeProto, context: Context, axes: list[int]) -> list[onnx.NodeProto]:
    """log(sum(exp(x - m))) + m with the maximum m, or 0 where that is infinite: inf - inf would make NaN of it."""
    pen, x = Pen(node=node, context=context), node.input[0]
    finite = ml_dtypes.finfo(_dtype(node, context))  # type: ignore[no-untyped-call] # of bfloat16 too, unlike NumPy's
    limit, nought = pen.scalar_like(float(finite.max), x), pen.scalar_like(0.0, x)
    largest = pen.reduce("ReduceMax", x, axes, keepdims=True)
    shift = pen.add("Where", pen.add("Greater", pen.add("Abs", largest), limit), nought, largest)
    keepdims = bool(attribute(node, "keepdims", 1))
    total = pen.reduce("ReduceSum", pen.add("Exp", pen.add("Sub", x, shift)), axes, keepdims=keepdims)
    # (The sum of a single element drops the axes, whichever operator set the model has.)
    last = shift if keepdims else pen.reduce("ReduceSum", shift, axes, keepdims=False)
    pen.add("Add", pen.add("Log", total), last, out=node.output[0])
    return pen.nodes


def _check_argument(node: onnx.NodeProto, context: Context) -> None:
    axis = int(attribute(node, "axis", 0))
    rank = context.rank(node.input[0])
    if rank is None or not -rank <= axis < max(rank, 1):
        raise refusal(node, f"looks along axis {axis} of a tensor of rank {rank}", "name an existing axis")
    if rank and context.extent(node.input[0], axis) == 0:
        raise refusal(node, f"looks along axis {axis}, which has no elements", "check the shapes")


def _check_top_k(node: onnx.NodeProto, context: Context) -> None:
    axis = int(attribute(node, "axis", -1))
    rank = context.rank(node.input[0])
    if not rank or not -rank <= axis < rank:
        raise refusal(node, f"looks along axis {axis} of a tensor of rank {rank}", "name an existing axis")
    k = context.known_value(node, 1) if operand(node, 1) else np.asarray(attribute(node, "k", -1))
    extent = context.extent(node.input[0], axis)
    if k is None or extent is None:
        raise refusal(node, f"needs the extent of axis {axis} and k", "bind dynamic dimensions with shape={...}")
    if k.size != 1 or not 0 < int(k.reshape(-1)[0]) <= extent:
        raise refusal(
            node, f"takes the first {k.reshape(-1).tolist()} of {extent} elements", "k must be between 1 and the extent"
        )


RULES: Mapping[str, Rule] = {f"Reduce{what}": _reduce for what in _REDUCTIONS}
CHECKS: Mapping[str, Check] = {**dict.fromkeys(_ARGUMENTS, _check_argument), "TopK": _check_top_k}
