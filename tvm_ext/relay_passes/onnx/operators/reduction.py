"""Reductions: over nothing, over no axes, means of integers, log-sum-exp of rows with infinities; running products."""

from __future__ import annotations

from collections.abc import Mapping

import ml_dtypes
import numpy as np
from onnx import TensorProto

from tvm_ext.support.arrays import Array, DType

from .context import DOUBLE, Pen, rule

_REDUCTIONS = ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare")
# What TVM's sort takes for a type that it has not.
_SORTED_AS: Mapping[int, int] = {
    TensorProto.INT16: TensorProto.INT32,
    TensorProto.UINT16: TensorProto.INT32,
    TensorProto.UINT32: TensorProto.INT64,
    TensorProto.UINT64: TensorProto.INT64,
}
# ONNX allows them of integers, and TVM's root, logarithm and exponential take none.
_NEEDS_FLOATS = ("ReduceL2", "ReduceLogSum", "ReduceLogSumExp")
# Without axes to reduce over, the operators still do what they do to single elements.
_OF_ONE_ELEMENT = {"L1": "Abs", "L2": "Abs", "LogSum": "Log", "SumSquare": "Mul"}


@rule(*(f"Reduce{what}" for what in _REDUCTIONS))
def _reduce(pen: Pen) -> None:
    axes, shape = _axes(pen), pen.shape(pen.x)
    if axes is not None and shape is not None and any(shape[axis] == 0 for axis in axes):
        _of_nothing(pen, shape, axes)
    elif pen.op_type in _NEEDS_FLOATS and pen.dtype(pen.x).kind in "iu":
        _in_float64(pen)
    elif axes is None:
        _of_single_elements(pen)
    elif pen.dtype(pen.x) == np.bool_:
        _of_bools(pen, axes)
    elif pen.op_type == "ReduceLogSumExp":
        _log_sum_exp(pen, axes)
    elif pen.op_type == "ReduceMean" and pen.dtype(pen.x).kind in "iu":
        _integer_mean(pen, axes)


def _axes(pen: Pen) -> list[int] | None:
    """The axes reduced over, not negative; None where the model asks for none at all."""
    given = pen.attribute("axes", None)
    if given is None:
        given = pen.known_value(1)
    rank = pen.rank(pen.x)
    if rank is None:
        raise pen.refusal(f"needs the rank of '{pen.x}'", "give its shape with shape={...}")
    if given is None or len(given) == 0:
        return None if pen.attribute("noop_with_empty_axes", 0) else list(range(rank))
    axes = [int(axis) for axis in given]
    if any(not -rank <= axis < rank for axis in axes) or len({axis % rank for axis in axes}) != len(axes):
        raise pen.refusal(f"reduces the axes {axes} of a tensor of rank {rank}", "name existing axes, each once")
    return [axis % rank for axis in axes]


def _of_single_elements(pen: Pen) -> None:
    x, what = pen.x, pen.op_type.removeprefix("Reduce")
    operands = [x, x] if what == "SumSquare" else [x]
    pen.add(_OF_ONE_ELEMENT.get(what, "Identity"), *operands, out=pen.out)


def _of_nothing(pen: Pen, shape: tuple[int, ...], axes: list[int]) -> None:
    """Every element of the result is the reduction's neutral element."""
    keeps, dtype = pen.flag("keepdims", True), pen.dtype(pen.x)
    reduced = [1 if axis in axes else extent for axis, extent in enumerate(shape) if keeps or axis not in axes]
    pen.give(pen.constant(np.full(reduced, _neutral(pen, dtype), dtype)))


def _neutral(pen: Pen, dtype: np.dtype) -> Array:
    what = pen.op_type.removeprefix("Reduce")
    if what in ("Sum", "SumSquare", "L1", "L2"):
        return np.zeros((), dtype)
    if what == "Prod":
        return np.ones((), dtype)
    if what in ("Max", "Min") and dtype == np.bool_:
        return np.asarray(what == "Min")
    if what in ("Max", "Min") and np.issubdtype(dtype, np.integer):
        return np.asarray(np.iinfo(dtype).min if what == "Max" else np.iinfo(dtype).max, dtype)
    if what == "Mean" or np.issubdtype(dtype, np.integer):
        raise pen.refusal("reduces over an axis without elements, where it is not defined", "check the shapes")
    return np.asarray(np.inf if what == "Min" else -np.inf, dtype)


def _of_bools(pen: Pen, axes: list[int]) -> None:
    """The maximum or minimum of bytes; a bool is a byte with the values 0 and 1."""
    numbers = pen.cast(pen.x, TensorProto.UINT8)
    reduced = pen.reduce(pen.op_type, numbers, axes, keepdims=pen.flag("keepdims", True))
    pen.cast(reduced, TensorProto.BOOL, out=pen.out)


def _in_float64(pen: Pen) -> None:
    """The reduction of integers in float64, cut towards 0: |(3, 5)| = 5.83 is 5.

    What the type cannot hold is its largest number or its lowest; the logarithm of 0 or less is the lowest, as ONNX
    Runtime has it.
    """
    wide, limits = pen.name("wide"), np.iinfo(pen.dtype(pen.x))
    lowest, largest = (pen.constant(value, np.float64) for value in (limits.min, np.nextafter(limits.max + 1.0, 0)))
    pen.again([pen.cast(pen.x, DOUBLE), *pen.input[1:]], [wide])
    above = pen.add("Where", pen.add("Greater", wide, lowest), wide, lowest)  # what is not a number is not greater
    inside = pen.add("Where", pen.add("Less", above, largest), above, largest)
    pen.cast(inside, pen.element_type(pen.x), out=pen.out)


def _integer_mean(pen: Pen, axes: list[int]) -> None:
    """The sum, divided as integers are: towards zero."""
    shape = pen.known_shape(pen.x)
    count = int(np.prod([shape[axis] for axis in axes], dtype=np.int64))
    total = pen.reduce("ReduceSum", pen.x, axes, keepdims=pen.flag("keepdims", True))
    pen.add("Div", total, pen.constant(count, pen.dtype(pen.x)), out=pen.out)


def _log_sum_exp(pen: Pen, axes: list[int]) -> None:
    """log(sum(exp(x - m))) + m with the maximum m, or 0 where that is infinite: inf - inf would make NaN of it."""
    x = pen.x
    finite = ml_dtypes.finfo(pen.dtype(pen.x))  # type: ignore[no-untyped-call] # of bfloat16 too, unlike NumPy's
    limit, nought = pen.like(float(finite.max)), pen.like(0.0)
    largest = pen.reduce("ReduceMax", x, axes, keepdims=True)
    shift = pen.add("Where", pen.add("Greater", pen.add("Abs", largest), limit), nought, largest)
    keepdims = pen.flag("keepdims", True)
    total = pen.reduce("ReduceSum", pen.add("Exp", pen.add("Sub", x, shift)), axes, keepdims=keepdims)
    # (The sum of a single element drops the axes, whichever operator set the model has.)
    last = shift if keepdims else pen.reduce("ReduceSum", shift, axes, keepdims=False)
    pen.add("Add", pen.add("Log", total), last, out=pen.out)


@rule("ArgMax", "ArgMin")
def _check_argument(pen: Pen) -> None:
    axis = pen.integer("axis", 0)
    rank = pen.rank(pen.x)
    if rank is None or not -rank <= axis < max(rank, 1):
        raise pen.refusal(f"looks along axis {axis} of a tensor of rank {rank}", "name an existing axis")
    if rank and pen.extent(pen.x, axis) == 0:
        raise pen.refusal(f"looks along axis {axis}, which has no elements", "check the shapes")


@rule("TopK")
def _check_top_k(pen: Pen) -> None:
    axis = pen.integer("axis", -1)
    rank = pen.rank(pen.x)
    if not rank or not -rank <= axis < rank:
        raise pen.refusal(f"looks along axis {axis} of a tensor of rank {rank}", "name an existing axis")
    k = pen.known_value(1) if pen.operand(1) else np.asarray(pen.attribute("k", -1))
    extent = pen.extent(pen.x, axis)
    if k is None or extent is None:
        raise pen.refusal(f"needs the extent of axis {axis} and k", "bind dynamic dimensions with shape={...}")
    if k.size != 1 or not 0 < int(k.reshape(-1)[0]) <= extent:
        raise pen.refusal(
            f"takes the first {k.reshape(-1).tolist()} of {extent} elements", "k must be between 1 and the extent"
        )


@rule("TopK", types=_SORTED_AS)
def _top_k(pen: Pen) -> None:
    """Sorted as a wider type that kernels sort; uint64 with the highest bit flipped, as int64 of the same order."""
    code, found = pen.element_type(pen.x), pen.name("values")
    flips = code == TensorProto.UINT64
    if flips and pen.opset < 18:
        raise pen.refusal("ranks uint64", "export with operator set 18 or later, or rank another type")
    wide = pen.cast(pen.x, _SORTED_AS[code])
    highest = pen.constant(np.iinfo(np.int64).min, np.int64) if flips else ""
    operands = [pen.add("BitwiseXor", wide, highest) if flips else wide, *pen.input[1:]]
    pen.again(operands, [found, pen.result(1) or pen.name("index")])
    pen.cast(pen.add("BitwiseXor", found, highest) if flips else found, code, out=pen.out or pen.name("unread"))


@rule("CumProd", replaces=True)
def _cum_prod(pen: Pen) -> None:
    """Products over distances 1, 2, 4, ...: after step s each element is the product of 2^s elements up to it.

    Worked example: [a, b, c, d] -> [a, ab, bc, cd] -> [a, ab, abc, abcd]. No loop, and any number type.
    """
    shape, dtype = pen.known_shape(pen.x), pen.dtype(pen.x)
    axis = _axis(pen, pen.known_number(1, 0), len(shape)) % max(1, len(shape))
    product, reverse = pen.x, pen.flag("reverse")
    if pen.flag("exclusive"):
        product = _shifted(pen, product, shape, axis, 1, reverse, dtype)
    distance = 1
    while distance < shape[axis]:
        product = pen.add("Mul", product, _shifted(pen, product, shape, axis, distance, reverse, dtype))
        distance *= 2
    pen.add("Identity", product, out=pen.out)


@rule("CumSum")
def _check_cum_sum(pen: Pen) -> None:
    rank, axis = pen.rank(pen.x), pen.constants.get(pen.operand(1))
    if rank is not None and axis is not None:
        _axis(pen, int(axis.reshape(-1)[0]), rank)


def _axis(pen: Pen, axis: int, rank: int) -> int:
    if not -rank <= axis < rank:
        raise pen.refusal(f"has no axis {axis} among {rank}", "export a valid axis")
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
