"""Operators that move or repeat elements: Split, SpaceToDepth, ConstantOfShape; and Dropout, which moves nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx

from tvm_ext import _tvm
from tvm_ext._tvm import BlockBuilder, Expr
from tvm_ext.support.arithmetic import ceil_div
from tvm_ext.support.arrays import Array

from .context import Pen, converter, rule


@rule("Split")
def _split(pen: Pen) -> None:
    """Splits are given by their sizes, which add up; one part is the whole."""
    x, parts = pen.x, len(pen.output)
    axis = pen.integer("axis", 0)
    rank = pen.rank(x)
    if rank is None or not -rank <= axis < rank:
        raise pen.refusal(f"splits axis {axis} of a tensor of rank {rank}", "name an existing axis")
    extent = pen.extent(x, axis)
    if extent is None:
        raise pen.refusal(f"needs the extent of axis {axis} of '{x}'", "bind it with shape={...}")
    sizes = pen.attribute("split", None)
    given = pen.known_value(1) if sizes is None else np.asarray(sizes)
    if given is not None and given.size:
        values = [int(size) for size in given]
        if len(values) != parts or sum(values) != extent or min(values) < 0:
            raise pen.refusal(f"splits {extent} elements into {values} for {parts} outputs", "the sizes must add up")
        if parts == 1:
            pen.add("Identity", x, out=pen.out)
    else:
        _even_split(pen, extent)


def _even_split(pen: Pen, extent: int) -> None:
    """Equal parts; since operator set 18 the last one may be smaller."""
    parts = len(pen.output)
    if pen.integer("num_outputs", parts) != parts:
        raise pen.refusal(
            f"has {parts} outputs and num_outputs {pen.attribute('num_outputs', parts)}", "make them equal"
        )
    size = ceil_div(extent, parts)
    last = extent - size * (parts - 1)
    if last < 0 or (last != size and pen.opset < 18):
        raise pen.refusal(f"splits {extent} elements into {parts} equal parts", "give the sizes")
    if parts == 1:
        pen.add("Identity", pen.x, out=pen.out)
        return
    axis = pen.integer("axis", 0)
    sizes = [*[size] * (parts - 1), last]
    if pen.opset < 13:
        pen.add_many("Split", [pen.x], pen.output, axis=axis, split=sizes)
    else:
        pen.add_many("Split", [pen.x, pen.integers(*sizes)], pen.output, axis=axis)


@rule("SpaceToDepth")
def _space_to_depth(pen: Pen) -> None:
    """(b, c, h, s, w, s') with the small axes moved before the channels (DCR) or behind them (CRD)."""
    shape, block = _blocked_shape(pen)
    batch, channels, height, width = shape
    if height % block or width % block:
        raise pen.refusal(f"divides ({height}, {width}) into blocks of {block}", "the block must divide both")
    rows, columns = height // block, width // block
    split = pen.add("Reshape", pen.x, pen.integers(batch, channels, rows, block, columns, block))
    order = [0, 3, 5, 1, 2, 4] if pen.text("mode", "DCR") == "DCR" else [0, 1, 3, 5, 2, 4]
    moved = pen.add("Transpose", split, perm=order)
    pen.add("Reshape", moved, pen.integers(batch, channels * block**2, rows, columns), out=pen.out)


@rule("DepthToSpace")
def _check_depth_to_space(pen: Pen) -> None:
    shape, block = _blocked_shape(pen)
    if shape[1] % block**2:
        raise pen.refusal(f"spreads {shape[1]} channels over blocks of {block}", "the block's square must divide them")


def _blocked_shape(pen: Pen) -> tuple[tuple[int, ...], int]:
    shape, block = pen.known_shape(pen.x), pen.integer("blocksize", 0)
    if len(shape) != 4 or block < 1:
        raise pen.refusal(
            f"has blocks of {block} in a tensor of rank {len(shape)}", "give blocks of at least 1, rank 4"
        )
    mode = pen.text("mode", "DCR")
    if mode not in ("DCR", "CRD"):
        raise pen.refusal(f"has the mode '{mode}'", "use DCR or CRD")
    return shape, block


@rule("Pad")
def _pad(pen: Pen) -> None:
    """Reflections of more than the tensor, for which stock TVM reads beyond it; a value that is known at run time."""
    given = pen.known_value(1) if pen.opset >= 11 else np.asarray(pen.attribute("pads", ()))
    mode, value, shape = pen.text("mode", "constant"), pen.operand(2), pen.shape(pen.x)
    is_late = mode == "constant" and value != "" and value not in pen.constants
    if given is None or shape is None or (mode != "reflect" and not is_late):
        return
    places = _padded_places(pen, shape, given)
    if is_late:
        is_inside = [(at >= 0) & (at < extent) for at, extent in zip(places, shape, strict=True)]
        zeros, whole = pen.name("zeros"), np.asarray(True)
        for along in is_inside:
            whole = np.logical_and.outer(whole, along)
        pen.again([*pen.input[:2], "", *pen.input[3:]], [zeros])
        pen.add("Where", pen.constant(whole), zeros, value, out=pen.out)
    elif any(
        at.size and (at[0] <= -extent or at[-1] > 2 * extent - 2) for at, extent in zip(places, shape, strict=True)
    ):
        _reflect(pen, shape, places)


def _padded_places(pen: Pen, shape: tuple[int, ...], pads: Array) -> list[Array]:
    """By axis, the places of the result's elements in the operand: [-1, 0, 1, 2] for a pad of 1 before 3 elements."""
    rank, axes = len(shape), pen.known_value(3)
    padded = list(range(rank)) if axes is None else [int(axis) for axis in axes]
    if pads.size != 2 * len(padded) or any(not -rank <= axis < rank for axis in padded):
        raise pen.refusal(f"pads the axes {padded} of {list(shape)} by {pads.tolist()}", "give two pads for each axis")
    begins, ends = np.zeros((2, rank), np.int64)
    begins[padded], ends[padded] = pads.reshape(2, -1)
    return [np.arange(-begin, extent + end) for begin, extent, end in zip(begins, shape, ends, strict=True)]


def _reflect(pen: Pen, shape: tuple[int, ...], places: Sequence[Array]) -> None:
    """Back and forth: 4 elements reflected before 0 1 2 are 0 1 2 1."""
    result = pen.x
    for axis, (at, extent) in enumerate(zip(places, shape, strict=True)):
        if np.array_equal(at, np.arange(extent)):
            continue
        if extent == 0:
            raise pen.refusal(f"reflects axis {axis}, which has no elements", "check the shapes")
        period = max(2 * extent - 2, 1)
        source = np.minimum(at % period, (period - at) % period if extent > 1 else 0)
        result = pen.add("Gather", result, pen.constant(source, np.int64), axis=axis)
    pen.give(result)


@rule("Dropout")
def _dropout(pen: Pen) -> None:
    """In inference the mask is true everywhere; the stock importer gives it the type of the data."""
    training = pen.known_value(2)
    if training is not None and training.any():
        ratio = pen.known_value(1)
        if ratio is None or ratio.size == 0 or float(ratio.reshape(-1)[0]) != 0:
            raise pen.refusal("is in training mode", "export the model for inference (model.eval() in PyTorch)")
    mask = pen.result(1)
    if not mask and not any(pen.operand(index) for index in (1, 2)):
        return
    pen.add("Identity", pen.x, out=pen.out)
    if mask:
        shape = pen.known_shape(pen.x)
        dtype = np.bool_ if pen.opset >= 10 else pen.dtype(pen.x)
        pen.add("Identity", pen.constant(np.ones(shape, dtype)), out=mask)


@rule("ConstantOfShape")
def _constant_of_shape(pen: Pen) -> None:
    """By a shape of run time: a broadcast, which Expand does."""
    shape = pen.x
    if shape in pen.constants:
        return
    value = pen.attribute("value", None)
    element = np.zeros(1, np.float32) if value is None else onnx.numpy_helper.to_array(value)
    if element.size != 1:
        raise pen.refusal(f"repeats {element.size} values", "give one value")
    rank = pen.extent(shape, 0)
    pen.add("Expand", pen.constant(element.reshape(() if rank == 0 else (1,))), shape, out=pen.out)


@converter("Expand")
def _expand(builder: BlockBuilder, operands: Sequence[Expr], attributes: Mapping[str, Any], opset: int) -> Expr:
    """Broadcasts both ways; stock TVM takes a shape that is computed at run time for that of the result.

    Worked example: (1, 3, 1) expanded by (3, 3, 1, 3) is (3, 3, 3, 3), the larger of each pair of extents.
    """
    x, shape = operands
    if isinstance(shape, _tvm.Constant) or not isinstance(shape.ty, _tvm.relax.TensorType) or not shape.ty.shape:
        return _tvm.convert_onnx_as_stock("Expand", builder, list(operands), attributes, opset)
    own = [getattr(extent, "value", 1) for extent in x.ty.shape] if x.ty.shape else []
    length = int(shape.ty.shape[0])
    if len(own) > length:
        ones = _tvm.relax.const(np.ones(len(own) - length, "int64"), "int64")
        shape = builder.emit(_tvm.relax.op.concat([ones, shape]))
    least = np.asarray([1] * (length - len(own)) + own, "int64")
    if (least > 1).any():
        shape = builder.emit(_tvm.relax.op.maximum(shape, _tvm.relax.const(least, "int64")))
    return _tvm.convert_onnx_as_stock("Expand", builder, [x, shape], attributes, opset)


@converter("SequenceInsert")
def _insert(builder: BlockBuilder, inputs: Sequence[Expr], attributes: Mapping[str, Any], opset: int) -> Expr:
    """A negative position counts from the end: -1 is before the last tensor. Without one, it is the end."""
    operands = list(inputs)
    tensors = _tensors_of(operands[0])
    if len(operands) < 3 or operands[2] is None:
        return _tvm.relax.Tuple([*tensors, operands[1]])
    if not isinstance(operands[2], _tvm.Constant):
        raise ValueError("the position is not known when the model is imported")
    position = int(operands[2].value.numpy().reshape(-1)[0])
    if not -len(tensors) <= position <= len(tensors):
        raise ValueError(f"position {position} in a sequence of {len(tensors)}")
    tensors.insert(position, operands[1])
    return _tvm.relax.Tuple(tensors)


def _tensors_of(sequence: Expr) -> list[Expr]:
    """Its tensors; a sequence that is an input is a variable, which can be indexed without end."""
    if isinstance(sequence, _tvm.relax.Tuple):
        return list(sequence)
    return [sequence[position] for position in range(len(sequence.ty.fields))]


@rule("SplitToSequence")
def _split_to_sequence(pen: Pen) -> None:
    """A scalar is the size of all parts but the last: 9 elements by 4 are 4, 4, 1, not three times 3."""
    given = pen.known_value(1)
    if given is None:
        return
    axis = pen.integer("axis", 0)
    extent = pen.known_shape(pen.x)[axis]
    if given.ndim:
        if int(given.sum()) != extent or given.min(initial=0) < 0:
            raise pen.refusal(f"splits {extent} elements into {given.tolist()}", "the sizes must add up")
        return
    size = int(given)
    if size < 1:
        raise pen.refusal(f"splits into parts of {size}", "parts have at least 1 element")
    sizes = [min(size, extent - first) for first in range(0, extent, size)]
    pen.add("SplitToSequence", pen.x, pen.integers(*sizes), out=pen.out, axis=axis)
