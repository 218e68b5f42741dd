"""Operators that move elements by indices, written as gathers and selections: none of them can write out of range."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import numpy as np
import onnx
from onnx import helper

from ..graph import attribute
from .context import Context, Pen, Rule, operand, refusal, text_attribute
from .windows import Windows, check_table, check_windows, contributions

_WIDE_INDICES = (onnx.TensorProto.INT32, onnx.TensorProto.INT64)
_NUMBERS_ONLY = (
    onnx.TensorProto.BOOL,
    onnx.TensorProto.STRING,
    onnx.TensorProto.COMPLEX64,
    onnx.TensorProto.COMPLEX128,
)


def _one_hot(node: onnx.NodeProto, context: Context) -> list[onnx.NodeProto]:
    """Index, wrapped if negative, == 0, 1, 2 ... along a new axis; what is out of range equals none of them."""
    pen, indices = Pen(node=node, context=context), node.input[0]
    shape, depth = context.known_shape(node, indices), _depth(node, context)
    rank = len(shape)
    axis = int(attribute(node, "axis", -1))
    if not -rank - 1 <= axis <= rank:
        raise refusal(node, f"has no axis {axis} among {rank + 1}", "export a valid axis")
    axis %= rank + 1
    code = context.known_type(node, indices)
    if code not in _WIDE_INDICES:
        code, indices = onnx.TensorProto.INT64, pen.cast(indices, onnx.TensorProto.INT64)
    dtype = helper.tensor_dtype_to_np_dtype(code)
    negative = pen.add("Less", indices, pen.constant(0, dtype))
    wrapped = pen.add("Where", negative, pen.add("Add", indices, pen.constant(depth, dtype)), indices)
    counted = pen.constant(np.arange(depth).reshape(-1, *[1] * (rank - axis)), dtype)
    is_on = pen.add("Equal", pen.add("Reshape", wrapped, pen.integers(*shape[:axis], 1, *shape[axis:])), counted)
    off, on = (pen.add("Gather", node.input[2], pen.constant(index, np.int64)) for index in (0, 1))
    pen.add("Where", is_on, on, off, out=node.output[0])
    return pen.nodes


def _depth(node: onnx.NodeProto, context: Context) -> int:
    given = context.known_value(node, 1)
    depth = 0 if given is None else int(given.reshape(-1)[0])
    if depth < 1:
        raise refusal(node, f"has depth {depth}", "a depth is at least 1")
    return depth


def _reverse_sequence(node: onnx.NodeProto, context: Context) -> list[onnx.NodeProto]:
    """Row t < n of a sequence of n comes from row n - 1 - t, later rows stay."""
    pen, data = Pen(node=node, context=context), node.input[0]
    shape = context.known_shape(node, data)
    batch_axis = int(attribute(node, "batch_axis", 1)) % len(shape)
    time_axis = int(attribute(node, "time_axis", 0)) % len(shape)
    if {batch_axis, time_axis} != {0, 1}:
        raise refusal(node, f"has axes {batch_axis} and {time_axis}", "ONNX allows 0 and 1, one each")
    batch, time = shape[batch_axis], shape[time_axis]
    order = (batch_axis, time_axis, *range(2, len(shape)))
    first = data if batch_axis == 0 else pen.add("Transpose", data, perm=order)
    length = pen.add("Reshape", node.input[1], pen.integers(batch, 1))
    steps = pen.constant(np.arange(time)[None, :], np.int64)
    reversed_step = pen.add("Sub", pen.add("Sub", length, pen.integers(1)), steps)
    source = pen.add("Where", pen.add("Less", steps, length), reversed_step, steps)
    rows = _gather_rows(pen, first, (batch,), time, source, shape[2:])
    moved = pen.add("Reshape", rows, pen.integers(batch, time, *shape[2:]))
    pen.add("Transpose", moved, out=node.output[0], perm=order)
    return pen.nodes


def _gather_rows(pen: Pen, data: str, prefix: Sequence[int], extent: int, source: str, rest: Sequence[int]) -> str:
    """data [*prefix, extent, *rest] read at row `source` [batch, count], the first of `prefix` being the batch.

    Returns rows of prod(rest) elements, one for each of prefix and count.
    """
    flat = pen.add("Reshape", data, pen.integers(prod(prefix) * extent, prod(rest)))
    starts = np.arange(prod(prefix)).reshape(prefix[0], -1, 1) * extent
    index = pen.add("Add", pen.add("Reshape", source, pen.integers(prefix[0], 1, -1)), pen.constant(starts, np.int64))
    return pen.add("Gather", flat, pen.add("Reshape", index, pen.integers(-1)), axis=0)


def _tensor_scatter(node: onnx.NodeProto, context: Context) -> list[onnx.NodeProto]:
    """Each row of the cache is selected: the update's, where its place is written, or the row that it was."""
    pen, cache, update = Pen(node=node, context=context), node.input[0], node.input[1]
    shape, new = context.known_shape(node, cache), context.known_shape(node, update)
    axis = int(attribute(node, "axis", -2)) % len(shape)
    if axis == 0 or len(new) != len(shape) or new[axis] > shape[axis]:
        raise refusal(node, f"writes {new} into {shape} along axis {axis}", "export a valid axis and shapes")
    prefix, rest = shape[:axis], shape[axis + 1 :]
    places = pen.constant(np.arange(shape[axis])[None, :], np.int64)
    if operand(node, 2):
        first = pen.add("Reshape", node.input[2], pen.integers(shape[0], 1))
        row = pen.add("Sub", places, first)
    else:
        row = pen.constant(np.tile(np.arange(shape[axis]), (shape[0], 1)), np.int64)
    if text_attribute(node, "mode", "linear") == "circular":
        row = pen.add("Mod", row, pen.integers(shape[axis]))
    last = pen.integers(new[axis] - 1)
    is_new = pen.add("And", pen.add("GreaterOrEqual", row, pen.integers(0)), pen.add("LessOrEqual", row, last))
    within = pen.add("Where", is_new, row, pen.integers(0))
    rows = pen.add("Reshape", _gather_rows(pen, update, prefix, new[axis], within, rest), pen.integers(*shape))
    ones = [1] * (len(shape) - 2)
    mask_shape = [shape[0], *ones[: axis - 1], shape[axis], *ones[axis - 1 :]]
    mask = pen.add("Reshape", is_new, pen.integers(*mask_shape))
    pen.add("Where", mask, rows, cache, out=node.output[0])
    return pen.nodes


def _col2im(node: onnx.NodeProto, context: Context) -> list[onnx.NodeProto]:
    """Each pixel sums the columns' elements that came from it: a gather by constant indices, and a sum over them."""
    pen, columns = Pen(node=node, context=context), node.input[0]
    image, block = context.known_value(node, 1), context.known_value(node, 2)
    assert image is not None and block is not None
    windows = Windows(
        extents=tuple(map(int, image)),
        kernel=tuple(map(int, block)),
        strides=tuple(attribute(node, "strides", [1] * len(image))),
        dilations=tuple(attribute(node, "dilations", [1] * len(image))),
        pads=tuple(attribute(node, "pads", [0] * 2 * len(image))),
    )
    batch, rows, count = context.known_shape(node, columns)
    check_windows(node, windows)
    check_table(node, windows)
    taps = prod(windows.kernel)
    if rows % taps or count != prod(windows.counts) or context.known_type(node, columns) in _NUMBERS_ONLY:
        raise refusal(
            node,
            f"has columns of shape {[batch, rows, count]}, where {prod(windows.counts)} blocks of {taps} fit",
            "export numeric columns of the image's and the blocks' shape",
        )
    channels = rows // taps
    sources = contributions(windows)
    flat = pen.add("Reshape", columns, pen.integers(batch, channels, taps * count))
    if (sources == taps * count).any():
        nothing = np.zeros((batch, channels, 1), helper.tensor_dtype_to_np_dtype(context.known_type(node, columns)))
        flat = pen.add("Concat", flat, pen.constant(nothing), axis=2)
    terms = pen.add("Gather", flat, pen.constant(sources), axis=2)
    summed = terms if sources.shape[1] == 1 else pen.reduce("ReduceSum", terms, -1)
    pen.add("Reshape", summed, pen.integers(batch, channels, *windows.extents), out=node.output[0])
    return pen.nodes


def _eye_like(node: onnx.NodeProto, context: Context) -> list[onnx.NodeProto]:
    shape = context.known_shape(node, node.input[0])
    if len(shape) != 2:
        raise refusal(node, f"has an input of shape {list(shape)}", "the input is a matrix")
    code = int(attribute(node, "dtype", 0)) or context.known_type(node, node.input[0])
    pen = Pen(node=node, context=context)
    value = np.eye(*shape, k=int(attribute(node, "k", 0))).astype(helper.tensor_dtype_to_np_dtype(code))
    pen.add("Identity", pen.constant(value), out=node.output[0])
    return pen.nodes


def _scatter_elements(node: onnx.NodeProto, context: Context) -> list[onnx.NodeProto] | None:
    """With fewer updates than elements along another axis, which stock TVM takes for as many: as ScatterND.

    Worked example: updates of (2, 2) into data of (3, 3) along axis 0 go to (index[i, j], j).
    """
    data, indices, updates = node.input
    extents, shape = context.known_shape(node, data), context.known_shape(node, indices)
    axis = int(attribute(node, "axis", 0))
    if len(shape) != len(extents) or not -len(extents) <= axis < len(extents):
        raise refusal(node, f"has indices of shape {list(shape)} along axis {axis}", "give one index for each update")
    axis %= len(extents)
    others = [a for a in range(len(extents)) if a != axis]
    if any(shape[a] > extents[a] for a in others):
        raise refusal(node, f"has indices of shape {list(shape)} for data of {list(extents)}", "leave out the others")
    if all(shape[a] == extents[a] for a in others):
        return None
    pen = Pen(node=node, context=context)
    last = pen.integers(*shape, 1)
    wide = pen.cast(indices, onnx.TensorProto.INT64)
    places = np.indices(shape, np.int64)[..., None]
    parts = [pen.add("Reshape", wide, last) if a == axis else pen.constant(places[a]) for a in range(len(extents))]
    tuples = pen.add("Concat", *parts, axis=len(extents))
    how = text_attribute(node, "reduction", "none")
    pen.add("ScatterND", data, tuples, updates, out=node.output[0], **({} if how == "none" else {"reduction": how}))
    return pen.nodes


def _compress(node: onnx.NodeProto, context: Context) -> list[onnx.NodeProto] | None:
    """Conditions beyond the last slice select nothing; nor do any where there are no slices."""
    shape, condition = context.shape(node.input[0]), context.shape(node.input[1])
    if shape is None or condition is None:
        return None
    axis = attribute(node, "axis", None)
    extent = prod(shape) if axis is None else shape[axis]
    if condition[0] <= extent:
        return None
    pen = Pen(node=node, context=context)
    if extent == 0:
        left = (0,) if axis is None else shape
        dtype = helper.tensor_dtype_to_np_dtype(context.known_type(node, node.input[0]))
        pen.add("Identity", pen.constant(np.zeros(left, dtype)), out=node.output[0])
        return pen.nodes
    first = pen.add("Slice", node.input[1], pen.integers(0), pen.integers(extent))
    pen.add("Compress", node.input[0], first, out=node.output[0], **({} if axis is None else {"axis": axis}))
    return pen.nodes


RULES: Mapping[str, Rule] = {
    "Col2Im": _col2im,
    "Compress": _compress,
    "EyeLike": _eye_like,
    "OneHot": _one_hot,
    "ReverseSequence": _reverse_sequence,
    "Scatter": _scatter_elements,
    "ScatterElements": _scatter_elements,
    "TensorScatter": _tensor_scatter,
}
REPLACED = frozenset(RULES) - {"Compress", "Scatter", "ScatterElements"}
