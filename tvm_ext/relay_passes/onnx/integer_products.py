"""Products and convolutions between DequantizeLinear and what follows, as integer ones with one scale behind.

ONNX Runtime's quantisers write them so ("QDQ"): floats in form, bytes in fact. Worked example: the product of
``(x - 3) * 0.5`` by ``w * 0.25`` is ``((x - 3) w) * 0.125``, whose sum is one of whole numbers. Where nothing but a
QuantizeLinear reads the result, both scales are one, as in a QLinearConv.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx

from tvm_ext.support.arrays import Array

from .decompose import context_of
from .fold_constants import fold_constants
from .graph import OnnxGraph, attribute, count_uses, is_standard
from .operators.context import FLOAT, Pen
from .operators.quantized import check_scales, requantise, shifted

_PRODUCTS = ("Conv", "MatMul", "Gemm")
_MOVES = ("MaxPool", "Reshape", "Flatten", "Transpose", "Squeeze", "Unsqueeze")
_BYTES = (np.dtype(np.int8), np.dtype(np.uint8))
_EQUAL = 1e-5
"""Relative difference of scales that a quantiser wrote for the same number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Codes:
    """(codes - zero) * scale; ``axis`` is that of scales and zeros of more than one element."""

    name: str
    scale: Array
    zero: str
    axis: int


def use_integers(graph: OnnxGraph) -> OnnxGraph:
    """`graph` with its Conv, MatMul and Gemm nodes over quantised operands as integer ones.

    The right operand is constant, but of a MatMul.

    What moves elements, or takes the largest, does so with bytes where it leaves their scale.
    """
    makers = {node.output[0]: node for node in graph.nodes if is_standard(node, "DequantizeLinear")}
    if not makers:
        return graph
    context, uses = context_of(graph), count_uses(graph)
    for node in graph.nodes:
        check_scales(context.at(node))
    readers = {node.input[0]: node for node in graph.nodes if is_standard(node, "QuantizeLinear")}
    single = {name: node for node in graph.nodes for name in node.output if uses[name] == 1}
    nodes: list[onnx.NodeProto] = []
    gone: set[str] = set()
    for node in graph.nodes:
        pen = context.at(node)
        write = _moved if is_standard(node, *_MOVES) else _product if is_standard(node, *_PRODUCTS) else None
        if write is not None:
            reader = readers.get(pen.out) if uses[pen.out] == 1 else None
            if write(pen, makers, reader) and reader is not None:
                gone.add(reader.output[0])
        elif is_standard(node, "QuantizeLinear") and node.output[0] not in gone:
            _sum(pen, makers, single)
        nodes.extend(pen.nodes or ([] if node.output[0] in gone else [node]))
    return fold_constants(graph.with_nodes(nodes))


def _moved(pen: Pen, makers: Mapping[str, onnx.NodeProto], reader: onnx.NodeProto | None) -> bool:
    """Write the node over bytes, if it moves them from a DequantizeLinear to a QuantizeLinear of the same scale."""
    codes = _codes(pen, makers, pen.x)
    if codes is None or reader is None or len(pen.output) > 1 or not _quantises(pen, reader):
        return False
    zero = pen.constants[codes.zero] if codes.zero else np.zeros((), pen.dtype(codes.name))
    own, same = pen.constants[reader.input[2]], codes.scale == pen.constants[reader.input[1]].reshape(-1)
    if codes.scale.size > 1 or not same.all() or own.dtype != pen.dtype(codes.name) or (own != zero).any():
        return False
    pen.again([codes.name, *pen.input[1:]], reader.output)
    return True


def _product(pen: Pen, makers: Mapping[str, onnx.NodeProto], reader: onnx.NodeProto | None) -> bool:
    """Write the node with integers, and its ``reader``, if one may join; whether that did."""
    data, weight = (_codes(pen, makers, pen.operand(place)) for place in (0, 1))
    values = None if weight is None else pen.constants.get(weight.name)
    if data is None or weight is None or data.name in pen.constants or data.scale.size != 1:
        return False
    if values is None:
        return pen.op_type == "MatMul" and weight.scale.size == 1 and _product_of_two(pen, data, weight, reader)
    if pen.op_type == "Gemm" and (pen.flag("transA") or not _plain_gemm(pen)):
        return False
    rank = values.ndim
    channel = 0 if pen.op_type == "Conv" or pen.flag("transB") else rank - 1
    if (pen.op_type != "Conv" and rank != 2) or (weight.scale.size > 1 and weight.axis % rank != channel):
        return False
    bias = _bias(pen, makers, data.scale * weight.scale) if pen.operand(2) else np.zeros(1, np.int32)
    if bias is None:
        return False
    sums = _sums(pen, data, _centred(pen, weight, values, channel), bias)
    behind = (1,) * (rank - 2) if pen.op_type == "Conv" else ()
    scale = (data.scale * weight.scale).astype(np.float32)
    if bias.dtype == np.int32 and reader is not None and _quantises(pen, reader):
        whole = (scale / pen.constants[reader.input[1]].reshape(-1)).astype(np.float32)
        requantise(pen, sums, pen.constant(whole.reshape(-1, *behind)), reader.input[2], reader.output[0])
        return True
    real = pen.add("Mul", pen.cast(sums, FLOAT), pen.constant(scale.reshape(-1, *behind)))
    if bias.dtype == np.int32:
        pen.give(real)
    else:
        pen.add("Add", real, pen.constant(bias.reshape(-1, *behind)), out=pen.out)
    return False


def _product_of_two(pen: Pen, data: _Codes, weight: _Codes, reader: onnx.NodeProto | None) -> bool:
    """Write the product of two that a run computes, and its ``reader``, if one may join; whether that did.

    Matrices that several others meet stay floats, for which no instruction's layout is known.
    """
    shapes = [pen.shape(own.name) for own in (data, weight)]
    if shapes[0] is None or shapes[1] is None or len(shapes[0]) < 2 or shapes[0][:-2] != shapes[1][:-2]:
        return False
    sums = pen.add("MatMul", *(shifted(pen, own.name, own.zero, []) for own in (data, weight)))
    scale = data.scale * weight.scale
    if reader is not None and _quantises(pen, reader):
        whole = (scale / pen.constants[reader.input[1]].reshape(-1)).astype(np.float32).reshape(())
        requantise(pen, sums, pen.constant(whole), reader.input[2], reader.output[0])
        return True
    pen.add("Mul", pen.cast(sums, FLOAT), pen.constant(scale.astype(np.float32).reshape(())), out=pen.out)
    return False


def _sum(pen: Pen, makers: Mapping[str, onnx.NodeProto], single: Mapping[str, onnx.NodeProto]) -> None:
    """Write a QuantizeLinear of the sum of two tensors of bytes with the scales divided before, and its Relu, if any.

    ONNX Runtime computes sums so, too: a division for each element takes longer than all else.
    """
    relu = single.get(pen.x)
    relu = relu if relu is not None and is_standard(relu, "Relu") else None
    total = single.get(pen.x if relu is None else relu.input[0])
    if total is None or not is_standard(total, "Add", "Sum") or len(total.input) != 2 or not _quantises(pen, pen.node):
        return
    codes, scale = [_codes(pen, makers, name) for name in total.input], pen.constants[pen.input[1]].reshape(-1)
    if any(own is None or own.scale.size > 1 for own in codes):
        return
    parts = [
        pen.add("DequantizeLinear", own.name, pen.constant((own.scale / scale).reshape(())), *filter(None, [own.zero]))
        for own in codes
        if own is not None
    ]
    y = pen.add("Add", *parts)
    pen.again([y if relu is None else pen.add("Relu", y), pen.constant(1.0, np.float32), pen.input[2]], pen.output)


def _codes(pen: Pen, makers: Mapping[str, onnx.NodeProto], operand: str) -> _Codes | None:
    """What ``operand`` was dequantised from, by a known scale; None where it was not."""
    maker = makers.get(operand)
    if maker is None or maker.input[1] not in pen.constants or attribute(maker, "block_size", 0):
        return None
    zero = maker.input[2] if len(maker.input) > 2 else ""
    known = np.dtype(pen.dtype(maker.input[0])) in _BYTES and (not zero or zero in pen.constants)
    scale = pen.constants[maker.input[1]]
    if not known or scale.dtype != np.float32:
        return None
    return _Codes(name=maker.input[0], scale=scale.reshape(-1), zero=zero, axis=int(attribute(maker, "axis", 1)))


def _plain_gemm(pen: Pen) -> bool:
    return bool(pen.attribute("alpha", 1.0) == 1.0 and pen.attribute("beta", 1.0) == 1.0)


def _centred(pen: Pen, weight: _Codes, values: Array, channel: int) -> Array:
    """The weights less their zero points."""
    zero = pen.constants[weight.zero] if weight.zero else np.zeros((), np.int32)
    if zero.size > 1:
        zero = zero.reshape([-1 if axis == channel else 1 for axis in range(values.ndim)])
    centred: Array = values.astype(np.int32) - zero.astype(np.int32)
    return centred


def _bias(pen: Pen, makers: Mapping[str, onnx.NodeProto], scale: Array) -> Array | None:
    """The bias, one a channel: int32 in units of ``scale``, else float32; None where it is not known or of two axes."""
    name = pen.operand(2)
    if name in pen.constants:
        value = pen.constants[name]
        return value.reshape(-1).astype(np.float32) if value.size == max(value.shape, default=1) else None
    maker = makers.get(name)
    if maker is None or any(own not in pen.constants for own in maker.input):
        return None
    codes, own, *zeros = (pen.constants[own] for own in maker.input)
    if codes.ndim != 1 or any(zero.any() for zero in zeros):
        return None
    if codes.dtype == np.int32 and np.allclose(own.reshape(-1), scale, rtol=_EQUAL, atol=0.0):
        return codes
    return (codes.astype(np.float64) * own.reshape(-1)).astype(np.float32)


def _sums(pen: Pen, data: _Codes, weight: Array, bias: Array) -> str:
    """The node over integers, its int32 result."""
    wide, sums = shifted(pen, data.name, data.zero, []), pen.name("sums")
    if pen.op_type == "Conv":
        own = [pen.constant(bias)] if bias.dtype == np.int32 and bias.any() else []
        pen.again([wide, pen.constant(weight), *own], [sums])
        return sums
    sums = pen.add("MatMul", wide, pen.constant(weight.T if pen.flag("transB") else weight))
    return pen.add("Add", sums, pen.constant(bias)) if bias.dtype == np.int32 and bias.any() else sums


def _quantises(pen: Pen, reader: onnx.NodeProto) -> bool:
    """Whether ``reader`` quantises to bytes by one known scale."""
    known = len(reader.input) > 2 and all(name in pen.constants for name in reader.input[1:])
    return (
        known
        and pen.constants[reader.input[1]].size == 1
        and pen.constants[reader.input[1]].dtype == np.float32
        and pen.constants[reader.input[2]].dtype in _BYTES
        and not attribute(reader, "output_dtype", 0)
    )
