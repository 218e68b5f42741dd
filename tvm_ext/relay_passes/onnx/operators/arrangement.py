"""Operators that move or repeat elements: Split, SpaceToDepth, ConstantOfShape; and Dropout, which moves nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx

from tvm_ext import _tvm
from tvm_ext._tvm import BlockBuilder, Expr, TeTensor
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
    """Of a value that is known at run time: zeros first, which a selection replaces."""
    given = pen.known_value(1) if pen.opset >= 11 else np.asarray(pen.attribute("pads", ()))
    shape, rank = pen.shape(pen.x), pen.rank(pen.x)
    if given is None or rank is None:
        return
    axes, value = pen.known_value(3), pen.operand(2)
    pads = _pads_by_axis(pen, rank, given, range(rank) if axes is None else axes.tolist())
    if pen.text("mode", "constant") != "constant":
        for axis, (begin, end) in pads.items():
            if begin + end > 0 and pen.extent(pen.x, axis) == 0:
                raise pen.refusal(f"pads axis {axis}, which has no elements", "check the shapes, or pad by a constant")
    elif shape is not None and value and value not in pen.constants:
        whole = np.asarray(True)
        for axis, extent in enumerate(shape):
            begin, end = pads.get(axis, (0, 0))
            at = np.arange(-begin, extent + end)
            whole = np.logical_and.outer(whole, (at >= 0) & (at < extent))
        zeros = pen.name("zeros")
        pen.again([*pen.input[:2], "", *pen.input[3:]], [zeros])
        pen.add("Where", pen.constant(whole), zeros, value, out=pen.out)


def _pads_by_axis(pen: Pen, rank: int, pads: Array, axes: Sequence[int]) -> dict[int, tuple[int, int]]:
    if pads.size != 2 * len(axes) or any(not -rank <= axis < rank for axis in axes):
        raise pen.refusal(f"pads {pads.tolist()} at the axes {list(axes)} of {rank}", "give two pads for each axis")
    return {axis % rank: (int(begin), int(end)) for axis, begin, end in zip(axes, *pads.reshape(2, -1), strict=True)}


@converter("Pad")
def _pad_by_indices(builder: BlockBuilder, operands: Sequence[Expr], attributes: Mapping[str, Any], opset: int) -> Expr:
    """Reflections of more than the tensor, and pads by what an axis of run time holds: a gather along each axis.

    Stock TVM reads beyond the tensor there. (`CheckValues` sees to it that an axis has something to gather.)
    """
    mode, result = attributes.get("mode", b"constant").decode(), operands[0]
    pads = np.asarray(attributes["pads"]) if opset < 11 else operands[1].value.numpy()
    axes = operands[3].value.numpy() if len(operands) > 3 and operands[3] is not None else range(pads.size // 2)
    extents = [] if mode == "constant" or result.ty.shape is None else list(result.ty.shape)
    padded = [(int(axis), *pair) for axis, *pair in zip(axes, *pads.reshape(2, -1).tolist(), strict=True) if any(pair)]
    if not extents or all(_is_padded_at_once(mode, extents[axis], max(pair)) for axis, *pair in padded):
        return _tvm.convert_onnx_operator("Pad", builder, operands, attributes, opset)
    for axis, begin, end in padded:

        def places(extent: Expr, begin: int = begin, end: int = end) -> TeTensor:
            return _tvm.te.compute([extent + begin + end], lambda at: _source(mode, at - begin, extent), "places")

        index = builder.emit(builder.call_te(places, extents[axis], primfunc_name_hint="places"), f"pad_{mode}")
        result = builder.emit(_tvm.relax.op.take(result, index, axis=axis))
    return result


def _is_padded_at_once(mode: str, extent: Expr, pad: int) -> bool:
    return isinstance(extent, _tvm.tirx.IntImm) and (mode != "reflect" or pad < int(extent))


def _source(mode: str, at: Expr, extent: Expr) -> Expr:
    """The element that is copied to place `at`, as counted from the first: reflected, 4 are 2 1 | 0 1 2 3 | 2 1 0 1."""
    tirx = _tvm.tirx
    if mode == "edge":
        return tirx.max(0, tirx.min(at, extent - 1))
    if mode == "wrap":
        return tirx.floormod(at, tirx.max(extent, 1))
    period = tirx.max(2 * extent - 2, 1)
    return tirx.min(tirx.floormod(at, period), period - tirx.floormod(at, period))


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
        return _tvm.convert_onnx_operator("Expand", builder, operands, attributes, opset)
    own = [getattr(extent, "value", 1) for extent in x.ty.shape] if x.ty.shape else []
    length = int(shape.ty.shape[0])
    if len(own) > length:
        ones = _tvm.relax.const(np.ones(len(own) - length, "int64"), "int64")
        shape = builder.emit(_tvm.relax.op.concat([ones, shape]))
    least = np.asarray([1] * (length - len(own)) + own, "int64")
    if (least > 1).any():
        shape = builder.emit(_tvm.relax.op.maximum(shape, _tvm.relax.const(least, "int64")))
    return _tvm.convert_onnx_operator("Expand", builder, [x, shape], attributes, opset)


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
    if not isinstance(sequence.ty, _tvm.relax.TupleType):
        raise ValueError("the sequence is an input, whose length is not known")
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
