"""Operators that move elements by indices, written as gathers and selections: none of them can write out of range."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np
import onnx
from onnx import helper

from .context import INT64, Pen, rule
from .windows import Windows, check_table, check_windows, contributions

_WIDE_INDICES = (onnx.TensorProto.INT32, INT64)
_NUMBERS_ONLY = tuple(map(onnx.TensorProto.DataType.Value, ("BOOL", "STRING", "COMPLEX64", "COMPLEX128")))


@rule("OneHot", replaces=True)
def _one_hot(pen: Pen) -> None:
    """Index, wrapped if negative, == 0, 1, 2 ... along a new axis; what is out of range equals none of them."""
    shape, depth, indices = pen.known_shape(pen.x), pen.known_number(1, 0), pen.x
    if depth < 1:
        raise pen.refusal(f"has depth {depth}", "a depth is at least 1")
    rank = len(shape)
    axis = pen.integer("axis", -1)
    if not -rank - 1 <= axis <= rank:
        raise pen.refusal(f"has no axis {axis} among {rank + 1}", "export a valid axis")
    axis %= rank + 1
    code = pen.known_type(indices)
    if code not in _WIDE_INDICES:
        code, indices = INT64, pen.cast(indices, INT64)
    dtype = helper.tensor_dtype_to_np_dtype(code)
    negative = pen.add("Less", indices, pen.constant(0, dtype))
    wrapped = pen.add("Where", negative, pen.add("Add", indices, pen.constant(depth, dtype)), indices)
    counted = pen.constant(np.arange(depth).reshape(-1, *[1] * (rank - axis)), dtype)
    is_on = pen.add("Equal", pen.add("Reshape", wrapped, pen.integers(*shape[:axis], 1, *shape[axis:])), counted)
    off, on = (pen.add("Gather", pen.input[2], pen.constant(index, np.int64)) for index in (0, 1))
    pen.add("Where", is_on, on, off, out=pen.out)


@rule("ReverseSequence", replaces=True)
def _reverse_sequence(pen: Pen) -> None:
    """Row t < n of a sequence of n comes from row n - 1 - t, later rows stay."""
    data, shape = pen.x, pen.known_shape(pen.x)
    batch_axis = pen.integer("batch_axis", 1) % len(shape)
    time_axis = pen.integer("time_axis", 0) % len(shape)
    if {batch_axis, time_axis} != {0, 1}:
        raise pen.refusal(f"has axes {batch_axis} and {time_axis}", "ONNX allows 0 and 1, one each")
    batch, time = shape[batch_axis], shape[time_axis]
    order = (batch_axis, time_axis, *range(2, len(shape)))
    first = data if batch_axis == 0 else pen.add("Transpose", data, perm=order)
    length = pen.add("Reshape", pen.input[1], pen.integers(batch, 1))
    steps = pen.constant(np.arange(time)[None, :], np.int64)
    reversed_step = pen.add("Sub", pen.add("Sub", length, pen.integers(1)), steps)
    source = pen.add("Where", pen.add("Less", steps, length), reversed_step, steps)
    rows = _gather_rows(pen, first, (batch,), time, source, shape[2:])
    moved = pen.add("Reshape", rows, pen.integers(batch, time, *shape[2:]))
    pen.add("Transpose", moved, out=pen.out, perm=order)


def _gather_rows(pen: Pen, data: str, prefix: Sequence[int], extent: int, source: str, rest: Sequence[int]) -> str:
    """data [*prefix, extent, *rest] read at row `source` [batch, count], the first of `prefix` being the batch.

    Returns rows of prod(rest) elements, one for each of prefix and count.
    """
    flat = pen.add("Reshape", data, pen.integers(prod(prefix) * extent, prod(rest)))
    starts = np.arange(prod(prefix)).reshape(prefix[0], -1, 1) * extent
    index = pen.add("Add", pen.add("Reshape", source, pen.integers(prefix[0], 1, -1)), pen.constant(starts, np.int64))
    return pen.add("Gather", flat, pen.add("Reshape", index, pen.integers(-1)), axis=0)


@rule("TensorScatter", replaces=True)
def _tensor_scatter(pen: Pen) -> None:
    """Each row of the cache is selected: the update's, where its place is written, or the row that it was."""
    cache, update = pen.x, pen.input[1]
    shape, new = pen.known_shape(cache), pen.known_shape(update)
    axis = pen.integer("axis", -2) % len(shape)
    if axis == 0 or len(new) != len(shape) or new[axis] > shape[axis]:
        raise pen.refusal(f"writes {new} into {shape} along axis {axis}", "export a valid axis and shapes")
    prefix, rest = shape[:axis], shape[axis + 1 :]
    places = pen.constant(np.arange(shape[axis])[None, :], np.int64)
    if pen.operand(2):
        row = pen.add("Sub", places, pen.add("Reshape", pen.input[2], pen.integers(shape[0], 1)))
    else:
        row = pen.constant(np.tile(np.arange(shape[axis]), (shape[0], 1)), np.int64)
    if pen.text("mode", "linear") == "circular":
        row = pen.add("Mod", row, pen.integers(shape[axis]))
    last = pen.integers(new[axis] - 1)
    is_new = pen.add("And", pen.add("GreaterOrEqual", row, pen.integers(0)), pen.add("LessOrEqual", row, last))
    within = pen.add("Where", is_new, row, pen.integers(0))
    rows = pen.add("Reshape", _gather_rows(pen, update, prefix, new[axis], within, rest), pen.integers(*shape))
    ones = [1] * (len(shape) - 2)
    mask_shape = [shape[0], *ones[: axis - 1], shape[axis], *ones[axis - 1 :]]
    mask = pen.add("Reshape", is_new, pen.integers(*mask_shape))
    pen.add("Where", mask, rows, cache, out=pen.out)


@rule("Col2Im", replaces=True)
def _col2im(pen: Pen) -> None:
    """Each pixel sums the columns' elements that came from it: a gather by constant indices, and a sum over them."""
    columns = pen.x
    image, block = pen.known_value(1), pen.known_value(2)
    assert image is not None and block is not None
    windows = Windows.of(pen, image.tolist(), block.tolist())
    batch, rows, count = pen.known_shape(columns)
    check_windows(pen, windows)
    check_table(pen, windows)
    taps = prod(windows.kernel)
    if rows % taps or count != prod(windows.counts) or pen.known_type(columns) in _NUMBERS_ONLY:
        raise pen.refusal(
            f"has columns of shape {[batch, rows, count]}, where {prod(windows.counts)} blocks of {taps} fit",
            "export numeric columns of the image's and the blocks' shape",
        )
    channels = rows // taps
    sources = contributions(windows)
    flat = pen.add("Reshape", columns, pen.integers(batch, channels, taps * count))
    if (sources == taps * count).any():
        nothing = pen.constant(np.zeros((batch, channels, 1), pen.dtype(columns)))
        flat = pen.add("Concat", flat, nothing, axis=2)
    terms = pen.add("Gather", flat, pen.constant(sources), axis=2)
    summed = terms if sources.shape[1] == 1 else pen.reduce("ReduceSum", terms, -1)
    pen.add("Reshape", summed, pen.integers(batch, channels, *windows.extents), out=pen.out)


@rule("EyeLike", replaces=True)
def _eye_like(pen: Pen) -> None:
    shape = pen.known_shape(pen.x)
    if len(shape) != 2:
        raise pen.refusal(f"has an input of shape {list(shape)}", "the input is a matrix")
    code = pen.integer("dtype", 0) or pen.known_type(pen.x)
    value = np.eye(*shape, k=pen.integer("k", 0)).astype(helper.tensor_dtype_to_np_dtype(code))
    pen.give(pen.constant(value))


@rule("Scatter", "ScatterElements")
def _scatter_elements(pen: Pen) -> None:
    """With fewer updates than elements along another axis, which stock TVM takes for as many: as ScatterND.

    Worked example: updates of (2, 2) into data of (3, 3) along axis 0 go to (index[i, j], j).
    """
    data, indices, updates = pen.input
    extents, shape = pen.known_shape(data), pen.known_shape(indices)
    axis = pen.integer("axis", 0)
    if len(shape) != len(extents) or not -len(extents) <= axis < len(extents):
        raise pen.refusal(f"has indices of shape {list(shape)} along axis {axis}", "give one index for each update")
    axis %= len(extents)
    others = [a for a in range(len(extents)) if a != axis]
    if any(shape[a] > extents[a] for a in others):
        raise pen.refusal(f"has indices of shape {list(shape)} for data of {list(extents)}", "leave out the others")
    if all(shape[a] == extents[a] for a in others):
        return
    last = pen.integers(*shape, 1)
    wide = pen.cast(indices, INT64)
    places = np.indices(shape, np.int64)[..., None]
    parts = [pen.add("Reshape", wide, last) if a == axis else pen.constant(places[a]) for a in range(len(extents))]
    tuples = pen.add("Concat", *parts, axis=len(extents))
    how = {} if pen.text("reduction", "none") == "none" else pen.options("axis")
    pen.add("ScatterND", data, tuples, updates, out=pen.out, **how)


@rule("Compress")
def _compress(pen: Pen) -> None:
    """Conditions beyond the last slice select nothing; nor do any where there are no slices."""
    shape, condition = pen.shape(pen.x), pen.shape(pen.input[1])
    if shape is None or condition is None:
        return
    axis = pen.attribute("axis", None)
    extent = prod(shape) if axis is None else shape[axis]
    if condition[0] <= extent:
        return
    if extent == 0:
        pen.give(pen.constant(np.zeros((0,) if axis is None else shape, pen.dtype(pen.x))))
        return
    first = pen.add("Slice", pen.input[1], pen.integers(0), pen.integers(extent))
    pen.again([pen.x, first], pen.output)
