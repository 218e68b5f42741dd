"""Layers with weights, and attention."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from tvm_ext._tvm import Expr, relax

from .pen import TorchPen, dtype_of, extents, rule


@rule("matmul mm bmm linear addmm baddbmm mv dot")
def _product(pen: TorchPen) -> Expr:
    """Products are summed in the operands' type; ``beta`` and ``alpha`` scale the summand and the product."""
    bias, beta, alpha = None, 1, 1
    if "addm" in pen.name or "addbmm" in pen.name:
        bias, a, b, beta, alpha = pen.operands
    elif pen.name.startswith("linear"):
        a, b, bias = pen.operands
        b = pen.emit(relax.op.permute_dims(b)) if len(extents(b)) == 2 else b
    else:
        a, b = pen.operands
    value = pen.emit(relax.op.matmul(a, b))
    if alpha != 1:
        value = pen.emit(relax.op.multiply(value, pen.cast(alpha, pen.dtype)))
    if bias is None or beta == 0:
        return value
    if beta != 1:
        bias = pen.emit(relax.op.multiply(bias, pen.cast(beta, pen.dtype)))
    return pen.emit(relax.op.add(value, bias))


@rule("layer_norm native_layer_norm")
def _layer_norm(pen: TorchPen) -> Any:
    x, shape, weight, bias, epsilon = pen.operands[:5]
    axes = [*range(len(extents(x)) - len(shape), len(extents(x)))]
    value = pen.emit(relax.op.nn.layer_norm(x, *_affine(x, weight, bias, shape), axes, epsilon))
    return [value, None, None] if pen.name.startswith("native") else value


def _affine(x: Expr, weight: Expr | None, bias: Expr | None, shape: Sequence[int]) -> tuple[Expr, Expr]:
    dtype = dtype_of(x)
    ones, zeros = (relax.const(make(shape, np.float32), "float32") for make in (np.ones, np.zeros))
    scale = relax.op.astype(ones, dtype) if weight is None and dtype != "float32" else weight
    shift = relax.op.astype(zeros, dtype) if bias is None and dtype != "float32" else bias
    return ones if scale is None else scale, zeros if shift is None else shift


@rule("group_norm native_group_norm")
def _group_norm(pen: TorchPen) -> Any:
    if pen.name.startswith("native"):
        x, weight, bias, _, _, _, groups, epsilon = pen.operands
    else:
        x, groups, weight, bias, epsilon = pen.operands[:5]
    axes = [*range(2, len(extents(x)))]
    affine = _affine(x, weight, bias, extents(x)[1:2])
    value = pen.emit(relax.op.nn.group_norm(x, *affine, groups, 1, axes, epsilon))
    return [value, None, None] if pen.name.startswith("native") else value


@rule("_native_batch_norm_legit_no_training batch_norm native_batch_norm")
def _batch_norm(pen: TorchPen) -> Any:
    """x * scale + shift, both of the channel; what `fold_norms` has not put into a convolution."""
    x, weight, bias, mean, variance = pen.operands[:5]
    if not pen.name.startswith("_"):
        if pen.operands[5] or mean is None:
            raise pen.refusal("takes the statistics of its batch", "export a module in eval mode")
        epsilon = pen.operands[7]
    else:
        epsilon = pen.operands[6]
    scale = pen.emit(relax.op.rsqrt(pen.emit(relax.op.add(variance, pen.cast(epsilon, dtype_of(variance))))))
    scale = scale if weight is None else pen.emit(relax.op.multiply(scale, weight))
    shift = pen.emit(relax.op.negative(pen.emit(relax.op.multiply(mean, scale))))
    shift = shift if bias is None else pen.emit(relax.op.add(shift, bias))
    shape = [extents(x)[1], *[1] * (len(extents(x)) - 2)]
    scaled = pen.emit(relax.op.multiply(x, pen.cast(pen.reshaped(scale, shape), pen.dtype)))
    value = pen.emit(relax.op.add(scaled, pen.cast(pen.reshaped(shift, shape), pen.dtype)))
    return value if pen.name.startswith("batch_norm") else [value, None, None]


@rule("scaled_dot_product_attention")
def _attention(pen: TorchPen) -> Expr:
    """softmax(scale Q K^T + mask) V; a query that sees no key has 0, as in torch."""
    query, key, value, mask, dropout, is_causal, scale, is_grouped = pen.operands
    if dropout:
        raise pen.refusal("drops elements in training", "export a module in eval mode")
    if is_grouped:
        key, value = (_repeated(pen, item, extents(query)[-3]) for item in (key, value))
    dtype = dtype_of(query)
    scale = 1 / math.sqrt(extents(query)[-1]) if scale is None else scale
    rank = len(extents(key))
    turned = pen.emit(relax.op.permute_dims(key, [*range(rank - 2), rank - 1, rank - 2]))
    scores = pen.emit(relax.op.matmul(query, turned))
    scores = pen.emit(relax.op.multiply(scores, pen.cast(scale, dtype)))
    seen, lowest = None, pen.cast(-math.inf, dtype)
    if is_causal:
        below = relax.const(np.tril(np.ones((extents(query)[-2], extents(key)[-2]), "bool")), "bool")
        scores = pen.emit(relax.op.where(below, scores, lowest))
    if mask is not None:
        is_open = mask if dtype_of(mask) == "bool" else pen.emit(relax.op.greater(mask, lowest))
        seen = pen.cast(pen.emit(relax.op.max(pen.cast(is_open, "int32"), [-1], keepdims=True)), "bool")
        if dtype_of(mask) == "bool":
            scores = pen.emit(relax.op.where(mask, scores, lowest))
        else:
            scores = pen.emit(relax.op.add(scores, mask))
    result = pen.emit(relax.op.matmul(pen.emit(relax.op.nn.softmax(scores, axis=-1)), value))
    known = None if mask is None else pen.state(mask)
    if seen is None or (known is not None and _sees(known)):
        return result
    return pen.emit(relax.op.where(seen, result, pen.cast(0, dtype)))


def _sees(mask: Any) -> bool:
    """Whether each query of a known mask sees a key."""
    is_open = mask if str(mask.dtype) == "torch.bool" else mask > -math.inf
    return bool(is_open.any(-1).all())


def _repeated(pen: TorchPen, x: Expr, heads: int) -> Expr:
    """(..., groups, rows, features) with each group's heads beside each other."""
    shape = extents(x)
    groups = shape[-3]
    if groups == heads:
        return x
    split = pen.reshaped(x, [*shape[:-2], 1, *shape[-2:]])
    spread = pen.emit(relax.op.broadcast_to(split, [*shape[:-2], heads // groups, *shape[-2:]]))
    return pen.reshaped(spread, [*shape[:-3], heads, *shape[-2:]])


# ONNX has the gates i, o, f, c; torch i, f, c, o. ONNX has z, r, h; torch r, z, n.
_GATES: Mapping[str, tuple[int, ...]] = {"LSTM": (0, 3, 1, 2), "GRU": (1, 0, 2), "RNN": (0,)}


@rule("lstm.input gru.input rnn_tanh.input rnn_relu.input")
def _recurrent(pen: TorchPen) -> list[Expr]:
    """Layer by layer, by the converters of ONNX's operators."""
    from ..onnx.operators.tables import CONVERTERS

    x, states, weights, has_bias, layers, _, _, is_bidirectional, is_batch_first = pen.operands
    name = pen.name.partition(".")[0]
    kind = name.partition("_")[0].upper()
    states = states if kind == "LSTM" else [states]
    directions = 2 if is_bidirectional else 1
    attributes: dict[str, Any] = {"direction": b"bidirectional" if is_bidirectional else b"forward"}
    if kind == "GRU":
        attributes["linear_before_reset"] = 1
    if name == "rnn_relu":
        attributes["activations"] = [b"Relu"] * directions
    each = len(weights) // (layers * directions)
    if each != (4 if has_bias else 2):
        raise pen.refusal("projects its states", "export an LSTM without proj_size")
    x = pen.emit(relax.op.permute_dims(x, [1, 0, 2])) if is_batch_first else x
    last: list[list[Expr]] = [[] for _ in states]
    for layer in range(layers):
        own = weights[layer * directions * each : (layer + 1) * directions * each]
        packed = _packed(pen, kind, own, each, layer)
        given = [pen.sliced(state, 0, layer * directions, (layer + 1) * directions) for state in states]
        out = CONVERTERS[kind](pen.builder, [x, *packed, None, *given], attributes, 22)
        out = [pen.emit(field) for field in out.fields] if isinstance(out, relax.Tuple) else list(out)
        sequence = pen.emit(relax.op.permute_dims(out[0], [0, 2, 1, 3]))
        steps, batch, _, hidden = extents(sequence)
        x = pen.reshaped(sequence, [steps, batch, directions * hidden])
        for index, ends in enumerate(last):
            ends.append(out[1 + index])
    x = pen.emit(relax.op.permute_dims(x, [1, 0, 2])) if is_batch_first else x
    return [x, *(pen.joined(ends, 0) for ends in last)]


def _packed(pen: TorchPen, kind: str, own: Sequence[Expr], each: int, layer: int) -> list[Expr | None]:
    """ONNX's W, R and B of one layer of both directions: torch's with the gates in ONNX's order."""
    import torch

    tensors = [pen.state(item) for item in own]
    if any(item is None for item in tensors):
        raise pen.refusal("has weights that are computed", "give the layer parameters of its own")

    def turned(tensor: Any) -> Any:
        gates = tensor.detach().chunk(len(_GATES[kind]), 0)
        return torch.cat([gates[index] for index in _GATES[kind]], 0)

    def stacked(*places: int) -> Expr:
        parts = [
            torch.cat([turned(tensors[first + place]) for place in places], 0) for first in range(0, len(own), each)
        ]
        return pen.parameter("_".join([pen.where, *map(str, (layer, *places))]), torch.stack(parts))

    return [stacked(0), stacked(1), stacked(2, 3) if each == 4 else None]


@rule("_adaptive_avg_pool2d adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_avg_pool1d")
def _adaptive(pen: TorchPen) -> Expr:
    """Windows of one size where extents divide; others are averaged by a product with what each window takes."""
    x, sizes = pen.operands[0], pen.operands[1]
    rank = len(extents(x))
    for axis, size in zip(range(rank - len(sizes), rank), sizes, strict=True):
        extent = extents(x)[axis]
        shape = [*extents(x)]
        if extent % size == 0:
            split = pen.reshaped(x, [*shape[:axis], size, extent // size, *shape[axis + 1 :]])
            x = split if extent == size else pen.emit(relax.op.mean(split, [axis + 1]))
            x = pen.reshaped(x, [*shape[:axis], size, *shape[axis + 1 :]])
            continue
        shares = np.zeros((extent, size), "float32")
        for at in range(size):
            begin, end = at * extent // size, -(-(at + 1) * extent // size)
            shares[begin:end, at] = 1 / (end - begin)
        order = [*(at for at in range(rank) if at != axis), axis]
        rows = pen.emit(relax.op.permute_dims(x, order))
        rows = pen.emit(relax.op.matmul(rows, pen.cast(relax.const(shares), dtype_of(x))))
        x = pen.emit(relax.op.permute_dims(rows, [order.index(at) for at in range(rank)]))
    return x


@rule(
    "max_pool1d max_pool2d max_pool3d max_pool2d_with_indices max_pool3d_with_indices avg_pool1d avg_pool2d avg_pool3d"
)
def _pool(pen: TorchPen) -> Any:
    """Windows over the last axes; without an axis of batches, one is put in front."""
    x, rank = pen.operands[0], int(pen.name.partition("pool")[2][0])
    is_max = pen.name.startswith("max")
    defaults: tuple[Any, ...] = ([], 0, 1, False) if is_max else ([], 0, False, True, None)
    window, *rest = pen.operands[1:]
    given = [*rest, *defaults[len(rest) :]]
    each = [_each(item, rank) for item in (window, given[0] or window, given[1])]
    options = {"pool_size": each[0], "strides": each[1], "padding": each[2]}
    if is_max:
        options |= {"dilation": _each(given[2], rank), "ceil_mode": given[3]}
    elif rank > 1 and given[4] is not None:
        raise pen.refusal(f"divides sums by {given[4]}", "export an average by the window's size")
    else:
        options |= {"ceil_mode": given[2], "count_include_pad": given[3]}
    op = getattr(relax.op.nn, f"{'max' if is_max else 'avg'}_pool{rank}d")
    batched = pen.reshaped(x, [1] * (rank + 2 - len(extents(x))) + [*extents(x)])
    value = pen.reshaped(pen.emit(op(batched, **options)), pen.shape)
    return [value, None] if "indices" in pen.name else value


def _each(value: int | Sequence[int], rank: int) -> list[int]:
    given = [value] if isinstance(value, int) else list(value)
    return given * rank if len(given) == 1 else given


@rule("upsample_nearest2d.vec")
def _nearest(pen: TorchPen) -> Expr:
    """Rows and columns by the places that torch itself takes them from."""
    import torch

    x, options = pen.operands[0], pen.operands[1:]
    height, width = extents(x)[2:]
    places = torch.meshgrid(torch.arange(height).double(), torch.arange(width).double(), indexing="ij")
    rows, columns = (torch.ops.aten.upsample_nearest2d.vec(item[None, None], *options)[0, 0] for item in places)
    x = pen.emit(relax.op.take(x, relax.const(rows[:, 0].long().numpy()), axis=2))
    return pen.emit(relax.op.take(x, relax.const(columns[0].long().numpy()), axis=3))


@rule("pixel_shuffle")
def _pixel_shuffle(pen: TorchPen) -> Expr:
    x, factor = pen.operands
    *lead, channels, height, width = extents(x)
    x = pen.reshaped(x, [prod(lead), channels // factor**2, factor, factor, height, width])
    return pen.reshaped(pen.emit(relax.op.permute_dims(x, [0, 1, 4, 2, 5, 3])), pen.shape)
