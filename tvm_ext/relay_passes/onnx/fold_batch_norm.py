"""Folds inference batch normalization, and any per-channel scale and shift, into the weights before it, in NumPy.

Inference BatchNormalization is an affine map per channel c:
    y = scale[c] * (x - mean[c]) / sqrt(var[c] + epsilon) + shift[c]  =  a[c] * x + b[c]
    a = scale / sqrt(var + epsilon),   b = shift - mean * a
so that after a convolution  y = a * (W x + w0) + b = (a W) x + (a w0 + b).

Numbers are not reals: only constants of ordinary size are folded (`is_ordinary`), which moves a result by its last
places. ``x + 12582912 - 12582912`` rounds x to an integer, and ``x * 1e30 * 1e-30`` overflows, on purpose or not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import helper

from tvm_ext.support.arrays import Array, aligned_empty

from .graph import GraphEdit, OnnxGraph, attribute, count_uses, is_standard, rank_of, with_operands
from .infer import infer_types

_CONVOLUTIONS = ("Conv", "ConvTranspose")


def lower_batch_norm(graph: OnnxGraph) -> OnnxGraph:
    """Each BatchNormalization in inference with constant parameters becomes Mul and Add.

    Their constants have shape (C, 1, ..., 1), so that they broadcast over (N, C, ...) without a reshape. One that
    trains, whose statistics are read, or whose input has no known rank and type stays.
    """
    if not any(node.op_type == "BatchNormalization" for node in graph.nodes):
        return graph
    types, uses, edit = infer_types(graph), count_uses(graph), GraphEdit(graph)
    for node in graph.nodes:
        kind = types.get(node.input[0]) if node.input else None
        if kind is None or not _is_affine(node, graph, uses, kind):
            edit.append(node)
            continue
        factor, moved = _affine_constants(node, graph, kind)
        stem = node.output[0]
        scale, shift = edit.constant(f"{stem}_scale", factor), edit.constant(f"{stem}_shift", moved)
        scaled = edit.name(f"{stem}_scaled")
        edit.append(helper.make_node("Mul", [node.input[0], scale], [scaled], f"{node.name}_scale"))
        edit.append(helper.make_node("Add", [scaled, shift], [stem], f"{node.name}_shift"))
    return edit.result()


def _is_affine(node: onnx.NodeProto, graph: OnnxGraph, uses: Counter[str], kind: onnx.TypeProto) -> bool:
    return (
        is_standard(node, "BatchNormalization")
        and all(name in graph.constants for name in node.input[1:5])
        and not any(uses[name] for name in node.output[1:])
        and attribute(node, "training_mode", 0) == 0
        and attribute(node, "spatial", 1) == 1
        and (rank_of(kind) or 0) >= 2
        # Operators before opset 7 broadcast only on request.
        and graph.opset >= 7
    )


def _affine_constants(node: onnx.NodeProto, graph: OnnxGraph, kind: onnx.TypeProto) -> tuple[Array, Array]:
    scale, shift, mean, variance = (graph.constants[name].astype(np.float64) for name in node.input[1:5])
    # A negative variance gives NaN here as it would at run time.
    with np.errstate(invalid="ignore", divide="ignore"):
        factor = scale / np.sqrt(variance + attribute(node, "epsilon", 1e-5))
    dtype = helper.tensor_dtype_to_np_dtype(kind.tensor_type.elem_type)
    shape = (-1,) + (1,) * ((rank_of(kind) or 0) - 2)
    return factor.reshape(shape).astype(dtype), (shift - mean * factor).reshape(shape).astype(dtype)


def is_ordinary(constant: Array, op_type: str) -> bool:
    """Whether a factor or summand is of a size that neither rounds away what it meets nor runs out of its type.

    A summand has up to half of its type's digits, a factor up to a quarter of its exponents, or half of them below 1:
    for float32 that is 4096 and from 2^-64 to 2^32, for half precision 32 and from 1/256 to 16. A factor may be 0.
    (Trained networks have batch normalisations that scale a channel by 1e-10.)
    """
    if constant.dtype.kind != "f":
        return False
    limits = np.finfo(constant.dtype)
    size = np.abs(constant.astype(np.float64))
    if op_type == "Add":
        return bool(np.all(size <= 2.0 ** ((limits.nmant + 1) // 2)))
    largest, smallest = 2.0 ** (limits.maxexp // 4), 2.0 ** (-limits.maxexp // 2)
    return bool(np.all((size == 0) | ((size >= smallest) & (size <= largest))))


def fold_channel_scales(graph: OnnxGraph) -> OnnxGraph:
    """Mul and Add by a constant per output channel go into the Conv, ConvTranspose or Gemm that alone feeds them.

    Legal where the weights and bias are constants, nobody else reads the unscaled result, and the constant varies along
    the channel axis only: (C, 1, 1) or a scalar after a 4-D convolution, but not (H, W).
    """
    return _absorbed(graph, _fold_into_producer)


def _absorbed(graph: OnnxGraph, absorb: Callable[[onnx.NodeProto, GraphEdit, Counter[str]], bool]) -> OnnxGraph:
    """``graph`` without the nodes that ``absorb`` puts into an earlier one."""
    edit, uses = GraphEdit(graph), count_uses(graph)
    for node in graph.nodes:
        if not absorb(node, edit, uses):
            edit.append(node)
    return edit.result()


def _fold_into_producer(node: onnx.NodeProto, edit: GraphEdit, uses: Counter[str]) -> bool:
    if not is_standard(node, "Mul", "Add") or edit.graph.opset < 7:
        return False
    for data, other in (node.input, tuple(reversed(node.input))):
        constant, index = edit.value(other), edit.producer.get(data)
        if constant is None or index is None or uses[data] != 1:
            continue
        if not is_ordinary(constant, node.op_type):
            continue
        folded = _scaled_or_shifted(edit, edit.nodes[index], node, constant)
        if folded is not None:
            edit.replace(index, folded)
            return True
    return False


def merge_scales(graph: OnnxGraph) -> OnnxGraph:
    """Chains of Mul and Add by constants become one Mul and one Add: (x * a + b) * c = x * (a * c) + b * c.

    Batch normalization followed by a Scale layer, each one Mul and one Add by now, is such a chain.
    """
    return _absorbed(graph, _merge_into_producer)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Affine:
    """A node `data * constant` or `data + constant` that stands at `index`."""

    index: int
    node: onnx.NodeProto
    data: str
    constant_name: str
    constant: Array


def _affine_producer(name: str, edit: GraphEdit, uses: Counter[str]) -> _Affine | None:
    """The affine node that makes tensor `name` for a single reader."""
    index = edit.producer.get(name)
    if index is None or uses[name] != 1:
        return None
    return _as_affine(edit.nodes[index], index, edit)


def _as_affine(node: onnx.NodeProto, index: int, edit: GraphEdit) -> _Affine | None:
    if not is_standard(node, "Mul", "Add") or edit.graph.opset < 7:
        return None
    for data, other in (node.input, tuple(reversed(node.input))):
        constant = edit.value(other)
        if constant is not None and constant.dtype.kind == "f" and edit.value(data) is None:
            return _Affine(index=index, node=node, data=data, constant_name=other, constant=constant)
    return None


def _merge_into_producer(node: onnx.NodeProto, edit: GraphEdit, uses: Counter[str]) -> bool:
    outer = _as_affine(node, -1, edit)
    inner = _affine_producer(outer.data, edit, uses) if outer is not None else None
    if outer is None or inner is None or not _combine_without_growth(inner.constant, outer.constant):
        return False
    if not (is_ordinary(outer.constant, outer.node.op_type) and is_ordinary(inner.constant, inner.node.op_type)):
        return False
    if outer.node.op_type == inner.node.op_type:
        _replace_affine(edit, inner, outer.constant, node.output[0], node.op_type)
        return True
    first = _affine_producer(inner.data, edit, uses)
    # (y + b) * c with y = x * a: only where that Mul exists does moving the scale forward save an operator.
    if node.op_type != "Mul" or first is None or first.node.op_type != "Mul":
        return False
    if not _combine_without_growth(first.constant, outer.constant):
        return False
    _replace_affine(edit, first, outer.constant, first.node.output[0], "Mul")
    _replace_affine(edit, inner, outer.constant, node.output[0], "Mul")
    return True


def _combine_without_growth(left: Array, right: Array) -> bool:
    """(C, 1, 1) with (1, C, 1, 1) is fine; (C, 1, 1) with (W,) would make a (C, 1, W) constant of the two."""
    if left.dtype != right.dtype:
        return False
    return int(np.prod(np.broadcast_shapes(left.shape, right.shape))) <= max(left.size, right.size)


def _replace_affine(edit: GraphEdit, inner: _Affine, constant: Array, output: str, combine: str) -> None:
    left, right = inner.constant.astype(np.float64), constant.astype(np.float64)
    value = left * right if combine == "Mul" else left + right
    name = edit.constant(f"{inner.constant_name}_merged", value.astype(constant.dtype))
    merged = helper.make_node(inner.node.op_type, [inner.data, name], [output], inner.node.name)
    edit.replace(inner.index, merged)


def _scaled_or_shifted(
    edit: GraphEdit, producer: onnx.NodeProto, node: onnx.NodeProto, constant: Array
) -> onnx.NodeProto | None:
    """`producer` with weights scaled or bias shifted so that it makes the output of `node`; None where illegal."""
    if not is_standard(producer, *_CONVOLUTIONS, "Gemm"):
        return None
    weight = edit.value(producer.input[1])
    has_bias = len(producer.input) > 2 and producer.input[2] != ""
    bias = edit.value(producer.input[2]) if has_bias else None
    if weight is None or (has_bias and bias is None) or weight.dtype.kind != "f" or weight.dtype != constant.dtype:
        return None
    channels = _output_channels(producer, weight)
    per_channel = _per_channel(constant, weight.ndim, channels)
    if per_channel is None or (bias is not None and bias.shape != (channels,)):
        return None
    if attribute(producer, "alpha", 1.0) != 1.0 or attribute(producer, "beta", 1.0) != 1.0:
        return None
    old_bias = np.zeros(channels) if bias is None else bias.astype(np.float64)
    weight_name = producer.input[1]
    bias_name = producer.input[2] if bias is not None else ""
    if node.op_type == "Add":
        bias_name = edit.constant(f"{weight_name}_bias", (old_bias + per_channel).astype(weight.dtype))
    else:
        weight_name = edit.constant(f"{weight_name}_scaled", _scaled_weight(producer, weight, per_channel))
        if bias is not None:
            bias_name = edit.constant(f"{bias_name}_scaled", (old_bias * per_channel).astype(weight.dtype))
    inputs = [producer.input[0], weight_name, *([bias_name] if bias_name else [])]
    return with_operands(producer, inputs, node.output)


def _output_channels(node: onnx.NodeProto, weight: Array) -> int:
    """Weights are (M, C/group, ...) in Conv, (C, M/group, ...) in ConvTranspose, (K, N) or (N, K) in Gemm."""
    if node.op_type == "Conv":
        return int(weight.shape[0])
    if node.op_type == "ConvTranspose":
        return int(weight.shape[1]) * int(attribute(node, "group", 1))
    return int(weight.shape[0 if attribute(node, "transB", 0) else 1])


def _per_channel(constant: Array, rank: int, channels: int) -> Array | None:
    """`constant` as one float64 value per channel, or None where it varies along another axis than 1.

    Worked example, rank 4, 64 channels: (64, 1, 1) and (1, 64, 1, 1) and () pass; (64,) varies along the last axis.
    """
    if constant.ndim > rank:
        return None
    shape = (1,) * (rank - constant.ndim) + constant.shape
    if any(extent != 1 for axis, extent in enumerate(shape) if axis != 1) or shape[1] not in (1, channels):
        return None
    return np.broadcast_to(constant.astype(np.float64).reshape(-1), (channels,))


def _scaled_weight(node: onnx.NodeProto, weight: Array, factor: Array) -> Array:
    if node.op_type == "Conv":
        return _product(weight, factor.reshape((-1,) + (1,) * (weight.ndim - 1)))
    if node.op_type == "Gemm":
        return _product(weight, factor[:, None] if attribute(node, "transB", 0) else factor)
    # ConvTranspose: output channel m of group g is weight[g * C/group : (g+1) * C/group, m].
    group = int(attribute(node, "group", 1))
    grouped = weight.reshape((group, weight.shape[0] // group, *weight.shape[1:]))
    factors = factor.reshape((group, 1, weight.shape[1]) + (1,) * (weight.ndim - 2))
    return _product(grouped, factors).reshape(weight.shape)


def _product(weight: Array, factor: Array) -> Array:
    """In float64 and rounded once, without a copy of the weights in float64: NumPy converts a few of them at a time."""
    made = aligned_empty(weight.shape, weight.dtype)
    return np.multiply(weight, factor, out=made, dtype=np.float64, casting="same_kind")


def split_biases(graph: OnnxGraph) -> OnnxGraph:
    """Conv and ConvTranspose with a constant bias become the convolution and an Add of a (1, C, 1, ...) constant.

    The stock importer would reshape the bias at run time, one more operator per convolution. A bias of zeros goes.
    """
    edit = GraphEdit(graph)
    for node in graph.nodes:
        bias = graph.constants.get(node.input[2]) if len(node.input) > 2 else None
        weight = graph.constants.get(node.input[1]) if len(node.input) > 1 else None
        if node.op_type not in _CONVOLUTIONS or bias is None or weight is None or graph.opset < 7:
            edit.append(node)
        elif not bias.any():
            edit.append(with_operands(node, node.input[:2]))
        else:
            result = edit.name(f"{node.output[0]}_unbiased")
            channels = bias.reshape((1, -1) + (1,) * (weight.ndim - 2))
            name = edit.constant(f"{node.input[2]}_channels", channels)
            edit.append(with_operands(node, node.input[:2], [result]))
            edit.append(helper.make_node("Add", [result, name], node.output, f"{node.name}_bias"))
    return edit.result()
