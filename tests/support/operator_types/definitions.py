"""What pools, transposed convolutions, recurrent layers and attention are by ONNX's text, in NumPy and float64.

ONNX Runtime or the ONNX package's evaluator is wrong about some of their attributes, or ends the process.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper

from ..onnx_evaluator import by_evaluator
from ..random_operators.record import Array
from ..recurrent_nodes import RecurrentNode, expected

Attributes = Mapping[str, Any]
Operands = Sequence[Array | None]


def pool(operator: str, attributes: Attributes, operands: Operands) -> list[Array]:
    """MaxPool (with indices), AveragePool and LpPool. A window without any element gives the lowest number, or 0."""
    (x,) = operands
    assert x is not None
    rank = x.ndim - 2
    kernel = attributes["kernel_shape"]
    strides, dilations = (attributes.get(name, [1] * rank) for name in ("strides", "dilations"))
    placed = [
        _along(attributes, axis, x.shape[axis + 2], kernel[axis], strides[axis], dilations[axis])
        for axis in range(rank)
    ]
    counts = [count for _, _, count in placed]
    wide = x.astype(np.float64) if x.dtype.kind == "f" else x
    values, indices = np.zeros((*x.shape[:2], *counts), wide.dtype), np.zeros((*x.shape[:2], *counts), np.int64)
    for place in np.ndindex(*counts):
        taps = [
            np.arange(kernel[axis]) * dilations[axis] + place[axis] * strides[axis] - placed[axis][0]
            for axis in range(rank)
        ]
        inside = [taps[axis][(taps[axis] >= 0) & (taps[axis] < x.shape[axis + 2])] for axis in range(rank)]
        padded = [
            ((taps[axis] >= -placed[axis][0]) & (taps[axis] < x.shape[axis + 2] + placed[axis][1])).sum()
            for axis in range(rank)
        ]
        where = (slice(None), slice(None), *place)
        window: tuple[Any, ...] = (slice(None), slice(None), *np.ix_(*inside))
        part = wide[window]
        part = part.reshape(*x.shape[:2], math.prod(part.shape[2:]))
        if operator == "LpPool":
            values[where] = (np.abs(part) ** attributes.get("p", 2)).sum(-1) ** (1 / attributes.get("p", 2))
        elif operator == "AveragePool":
            amount = math.prod(padded) if attributes.get("count_include_pad", 0) else part.shape[-1]
            values[where] = part.sum(-1) / max(amount, 1)
        elif part.shape[-1]:
            values[where] = part.max(-1)
            indices[where] = _flat_indices(inside, x.shape, part.argmax(-1), attributes.get("storage_order", 0))
        else:
            values[where] = -np.inf if x.dtype.kind == "f" else np.iinfo(x.dtype).min
    return [values, indices] if operator == "MaxPool" and attributes.get("storage_order") is not None else [values]


def global_pool(operator: str, attributes: Attributes, operands: Operands) -> list[Array]:
    """One window over the whole image."""
    (x,) = operands
    assert x is not None
    wide, axes = x.astype(np.float64), tuple(range(2, x.ndim))
    if operator == "GlobalLpPool":
        p = attributes["p"]
        return [(np.abs(wide) ** p).sum(axes, keepdims=True) ** (1 / p)]
    if operator == "GlobalAveragePool":
        return [wide.sum(axes, keepdims=True) / np.prod(x.shape[2:])]
    return [wide.max(axes, keepdims=True, initial=-np.inf)]


def local_response(size: int, operands: Operands) -> list[Array]:
    """LRN with the attributes that it has by default, which are float32: ONNX's evaluator loops over the batch."""
    (x,) = operands
    assert x is not None
    wide, before, behind = x.astype(np.float64), (size - 1) // 2, size // 2
    channels = range(x.shape[1])
    squares = [(wide[:, max(0, c - before) : c + behind + 1] ** 2).sum(1, keepdims=True) for c in channels]
    alpha = np.float64(np.float32(1e-4))
    return [wide / (1.0 + alpha / size * np.concatenate([wide[:, :0], *squares], axis=1)) ** 0.75]


def _flat_indices(inside: Sequence[Array], shape: Sequence[int], first: Array, column_major: int) -> Array:
    """The place in the whole tensor of each image's chosen element, the number ``first`` of its window."""
    at = np.unravel_index(first, [len(along) for along in inside])
    pixel = [along[index] for along, index in zip(inside, at, strict=True)]
    extents = tuple(shape[2:])
    flat = np.ravel_multi_index(pixel, extents, order="F" if column_major else "C")
    image = np.arange(shape[0] * shape[1]).reshape(shape[:2])
    return np.asarray(flat + image * math.prod(extents))


def _along(
    attributes: Attributes, axis: int, extent: int, kernel: int, stride: int, dilation: int
) -> tuple[int, int, int]:
    """(padding before, behind, number of windows) along one axis."""
    reach, mode = (kernel - 1) * dilation + 1, attributes.get("auto_pad", "NOTSET")
    if mode.startswith("SAME"):
        count = -(-extent // stride)
        total = max((count - 1) * stride + reach - extent, 0)
        before = total - total // 2 if mode == "SAME_LOWER" else total // 2
        return before, total - before, count
    pads = attributes.get("pads", None) or [0] * (2 * len(attributes["kernel_shape"]))
    before, behind = pads[axis], pads[axis + len(pads) // 2]
    steps = extent + before + behind - reach
    count = steps // stride + 1
    if attributes.get("ceil_mode", 0) and mode == "NOTSET":
        count = -(-steps // stride) + 1
        if (count - 1) * stride >= extent + before:  # it would start in the padding behind
            count -= 1
    return before, behind, max(count, 0)


def transposed_convolution(attributes: Attributes, operands: Operands) -> list[Array]:
    """Every element adds its multiple of the kernel; what lies in the padding is cut off."""
    x, weight, bias = operands
    assert x is not None and weight is not None
    rank, group = x.ndim - 2, attributes.get("group", 1)
    strides, dilations, extra = (
        attributes.get(name, [value] * rank)
        for name, value in (("strides", 1), ("dilations", 1), ("output_padding", 0))
    )
    kernel, filters = weight.shape[2:], weight.shape[1]
    whole = [(x.shape[a + 2] - 1) * strides[a] + (kernel[a] - 1) * dilations[a] + 1 + extra[a] for a in range(rank)]
    before, lengths = _cut(attributes, whole, strides, x.shape[2:])
    room = [max(size, b + length) for size, b, length in zip(whole, before, lengths, strict=True)]
    out = np.zeros((x.shape[0], group * filters, *room))
    wide = x.astype(np.float64).reshape(x.shape[0], group, x.shape[1] // group, *x.shape[2:])
    taps = weight.astype(np.float64).reshape(group, weight.shape[0] // group, *weight.shape[1:])
    for tap in np.ndindex(*kernel):
        at: tuple[Any, ...] = (slice(None), slice(None), slice(None), *tap)
        terms = np.einsum("ngc...,gcf->ngf...", wide, taps[at])
        ends = [tap[a] * dilations[a] + (x.shape[a + 2] - 1) * strides[a] + 1 for a in range(rank)]
        steps = [slice(tap[a] * dilations[a], ends[a], strides[a]) for a in range(rank)]
        where: tuple[Any, ...] = (slice(None), slice(None), *steps)
        out[where] += terms.reshape(x.shape[0], group * filters, *x.shape[2:])
    inside: tuple[Any, ...] = (
        slice(None),
        slice(None),
        *map(slice, before, map(sum, zip(before, lengths, strict=True))),
    )
    kept = out[inside]
    return [kept if bias is None else kept + bias.astype(np.float64).reshape(1, -1, *[1] * rank)]


def _cut(
    attributes: Attributes, whole: Sequence[int], strides: Sequence[int], extents: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Where the output begins in what all elements reach, and its extents."""
    mode, rank = attributes.get("auto_pad", "NOTSET"), len(whole)
    pads = attributes.get("pads", [0] * (2 * rank))
    wanted = attributes.get("output_shape")
    if wanted is None and mode.startswith("SAME"):
        wanted = [n * s for n, s in zip(extents, strides, strict=True)]
    if wanted is None:
        return list(pads[:rank]), [size - pads[a] - pads[a + rank] for a, size in enumerate(whole)]
    total = [max(size - n, 0) for size, n in zip(whole, wanted, strict=True)]
    return [n // 2 if mode == "SAME_UPPER" else n - n // 2 for n in total], list(wanted)


_RECURRENT = ("x", "w", "r", "b", "lengths", "h0", "c0", "p")


def recurrent(node: RecurrentNode, operands: Operands) -> list[Array]:
    return expected(node, {name: x for name, x in zip(_RECURRENT, operands, strict=False) if x is not None})


def attention(attributes: Attributes, outputs: int, operands: Operands) -> list[Array]:
    """By the evaluator, whose raw scores (mode 0) have passed `softcap`, against ONNX's text.

    It takes the scale's root in float32: queries carry the scale instead.
    """
    query = operands[0]
    if "scale" in attributes and query is not None:
        operands = [query * np.float64(np.float32(attributes["scale"])), *operands[1:]]
        attributes = {**attributes, "scale": 1.0}
    results = _evaluated_attention(attributes, operands)
    if attributes.get("qk_matmul_output_mode", 0) == 0:
        results[3] = _evaluated_attention({**attributes, "softcap": 0.0}, operands)[3]
    return results[:outputs]


def _evaluated_attention(attributes: Attributes, operands: Operands) -> list[Array]:
    """On doubles, with all outputs: the evaluator cannot leave one out."""
    given = {
        f"x{i}": x.astype(np.float64) if x.dtype.kind == "f" else x for i, x in enumerate(operands) if x is not None
    }
    names = [f"x{i}" if x is not None else "" for i, x in enumerate(operands)]
    results = [f"y{i}" for i in range(4)]
    graph = helper.make_graph(
        [helper.make_node("Attention", names, results, **attributes)],
        "attention",
        [helper.make_tensor_value_info(k, helper.np_dtype_to_tensor_dtype(v.dtype), v.shape) for k, v in given.items()],
        [onnx.ValueInfoProto(name=name) for name in results],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=11)
    return by_evaluator(model, given)


def wrapped(operands: Operands) -> list[Array]:
    """Pad of mode "wrap": "as if the data tensor forms a torus". Negative numbers cut what lies on it."""
    x, pads, *_ = operands
    assert x is not None and pads is not None
    for axis, extent in enumerate(x.shape):
        places = np.arange(-pads[axis], extent + pads[axis + x.ndim])
        x = np.take(x, places % extent, axis)
    return [x]


def one_hot(attributes: Attributes, operands: Operands) -> list[Array]:
    """Indices that are no integers become such first, which the evaluator forgets."""
    indices, depth, values = operands
    assert indices is not None and depth is not None and values is not None
    whole, count = np.asarray(indices).astype(np.int64), int(depth)
    axis = attributes["axis"] % (whole.ndim + 1)
    counted = np.arange(count).reshape(count, *[1] * (whole.ndim - axis))
    is_on = np.expand_dims(np.where(whole < 0, whole + count, whole), axis) == counted
    return [np.where(is_on, values[1], values[0])]
