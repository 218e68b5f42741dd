"""Operators that move or repeat elements: Split, SpaceToDepth, ConstantOfShape; and Dropout, which moves nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx

from tvm_ext import _tvm
from tvm_ext._tvm import BlockBuilder, Expr
from tvm_ext.support.arithmetic import ceil_div

from ..graph import attribute
from .context import Check, Context, Converter, Pen, Rule, operand, refusal, result, text_attribute


def _split(node: onnx.NodeProto, context: Context) -> list[onnx.NodeProto] | None:
    """Splits are given by their sizes, which add up; one part is the whole."""
    x, parts = node.input[0], len(node.output)
    axis = int(attribute(node, "axis", 0))
    rank = context.rank(x)
    if rank is None or not -rank <= axis < rank:
        raise refusal(node, f"splits axis {axis} of a tensor of rank {rank}", "name an existing axis")
    extent = context.extent(x, axis)
    if extent is None:
        raise refusal(node, f"needs the extent of axis {axis} of '{x}'", "bind it with shape={...}")
    sizes = attribute(node, "split", None)
    given = context.known_value(node, 1) if sizes is None else np.asarray(sizes)
    if given is not None and given.size:
        values = [int(size) for size in given]
        if len(values) != parts or sum(values) != extent or min(values) < 0:
            raise refusal(node, f"splits {extent} elements into {values} for {parts} outputs", "the sizes must add up")
        return _whole(node, context) if parts == 1 else None
    return _even_split(node, context, extent)


def _even_split(node: onnx.NodeProto, context: Context, extent: int) -> list[onnx.NodeProto]:
    """Equal parts; since operator set 18 the last one may be smaller."""
    parts = len(node.output)
    if int(attribute(node, "num_outputs", parts)) != parts:
        raise refusal(
            node, f"has {parts} outputs and num_outputs {attribute(node, 'num_outputs', parts)}", "make them equal"
        )
    size = ceil_div(extent, parts)
    last = extent - size * (parts - 1)
    if last < 0 or (last != size and context.opset < 18):
        raise refusal(node, f"splits {extent} elements into {parts} equal parts", "give the sizes")
    if parts == 1:
        return _whole(node, context)
    pen, axis = Pen(node=node, context=context), int(attribute(node, "axis", 0))
    sizes = [*[size] * (parts - 1), last]
    if context.opset < 13:
        pen.add_many("Split", [node.input[0]], node.output, axis=axis, split=sizes)
    else:
        pen.add_many("Split", [node.input[0], pen.integers(*sizes)], node.output, axis=axis)
    return pen.nodes


def _whole(node: onnx.NodeProto, context: Context) -> list[onnx.NodeProto]:
    pen = Pen(node=node, context=context)
    pen.add("Identity", node.input[0], out=node.output[0])
    return pen.nodes


def _space_to_depth(node: onnx.NodeProto, context: Context) -> list[onnx.NodeProto]:
    """(b, c, h, s, w, s') with the small axes moved before the channels (DCR) or behind them (CRD)."""
    shape, block = _blocked_shape(node, context)
    batch, channels, height, width = shape
    if height % block or width % block:
        raise refusal(node, f"divides ({height}, {width}) into blocks of {block}", "the block must divide both")
    mode = text_attribute(node, "mode", "DCR")
    if mode not in ("DCR", "CRD"):
        raise refusal(node, f"has the mode '{mode}'", "use DCR or CRD")
    pen = Pen(node=node, context=context)
    rows, columns = height // block, width // block
    split = pen.add("Reshape", node.input[0], pen.integers(batch, channels, rows, block, columns, block))
    order = [0, 3, 5, 1, 2, 4] if mode == "DCR" else [0, 1, 3, 5, 2, 4]
    moved = pen.add("Transpose", split, perm=order)
    pen.add("Reshape", moved, pen.integers(batch, channels * block**2, rows, columns), out=node.output[0])
    return pen.nodes


def _check_depth_to_space(node: onnx.NodeProto, context: Context) -> None:
    shape, block = _blocked_shape(node, context)
    if shape[1] % block**2:
        raise refusal(
            node, f"spreads {shape[1]} channels over blocks of {block}", "the block's square must divide them"
        )
    if text_attribute(node, "mode", "DCR") not in ("DCR", "CRD"):
        raise refusal(node, f"has the mode '{text_attribute(node, 'mode', 'DCR')}'", "use DCR or CRD")


def _blocked_shape(node: onnx.NodeProto, context: Context) -> tuple[tuple[int, ...], int]:
    shape, block = context.known_shape(node, node.input[0]), int(attribute(node, "blocksize", 0))
    if len(shape) != 4 or block < 1:
        raise refusal(
            node, f"has blocks of {block} in a tensor of rank {len(shape)}", "give blocks of at least 1, rank 4"
        )
    return shape, block


def _dropout(node: onnx.NodeProto, context: Context) -> list[onnx.NodeProto] | None:
    """In inference the mask is true everywhere; the stock importer gives it the type of the data."""
    training = context.known_value(node, 2)
    if training is not None and training.any():
        ratio = context.known_value(node, 1)
        if ratio is None or ratio.size == 0 or float(ratio.reshape(-1)[0]) != 0:
            raise refusal(node, "is in training mode", "export the model for inference (model.eval() in PyTorch)")
    mask = result(node, 1)
    is_plain = not mask and not any(operand(node, index) for index in (1, 2))
    if is_plain:
        return None
    pen = Pen(node=node, context=context)
    pen.add("Identity", node.input[0], out=node.output[0])
    if mask:
        shape = context.known_shape(node, node.input[0])
        dtype = (
            np.bool_
            if context.opset >= 10
            else onnx.helper.tensor_dtype_to_np_dtype(context.known_type(node, node.input[0]))
        )
        pen.add("Identity", pen.constant(np.ones(shape, dtype)), out=mask)
    return pen.nodes


def _constant_of_shape(node: onnx.NodeProto, context: Context) -> list[onnx.NodeProto] | None:
    """By a shape of run time: a broadcast, which Expand does."""
    shape = node.input[0]
    if shape in context.constants:
        return None
    value = attribute(node, "value", None)
    element = np.zeros(1, np.float32) if value is None else onnx.numpy_helper.to_array(value)
    if element.size != 1:
        raise refusal(node, f"repeats {element.size} values", "give one value")
    pen = Pen(node=node, context=context)
    rank = context.extent(shape, 0)
    pen.add("Expand", pen.constant(element.reshape(() if rank == 0 else (1,))), shape, out=node.output[0])
    return pen.nodes


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


CONVERTERS: Mapping[str, Converter] = {"Expand": _expand}
RULES: Mapping[str, Rule] = {
    "ConstantOfShape": _constant_of_shape,
    "Dropout": _dropout,
    "SpaceToDepth": _space_to_depth,
    "Split": _split,
}
CHECKS: Mapping[str, Check] = {"DepthToSpace": _check_depth_to_space}
