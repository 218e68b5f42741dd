"""Matrix products, convolutions and pools in NumPy, for any number of spatial dimensions. Knows nothing of TVM.

Everything is brought to one layout first: data (N, C, *spatial), weights (O, I, *kernel).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from .record import Array, OperatorCase


def _to_layout(x: Array, layout: str, wanted: str) -> Array:
    """``x`` with its axes, called by ``layout``'s letters, in the order of ``wanted``."""
    return np.asarray(x.transpose([layout.index(letter) for letter in wanted]))


def _spatial(layout: str) -> str:
    return "".join(letter for letter in "DHW" if letter in layout)


# --- products ------------------------------------------------------------------------------------------------------
def matmul(case: OperatorCase, inputs: list[Array]) -> Array:
    a, b = inputs
    if case.flag("transpose_a"):
        a = np.swapaxes(a, -1, -2)
    if case.flag("transpose_b"):
        b = np.swapaxes(b, -1, -2)
    return np.asarray(np.matmul(a, b))


# --- convolutions --------------------------------------------------------------------------------------------------
def _pairs(padding: Sequence[int]) -> list[tuple[int, int]]:
    """(before, after) per spatial dimension from TVM's order: all befores, then all afters."""
    half = len(padding) // 2
    return list(zip(padding[:half], padding[half:], strict=True))


def _windows(x: Array, kernel: Sequence[int], strides: Sequence[int], dilation: Sequence[int]) -> Array:
    """All windows of (N, C, *spatial) as (N, C, *output, *kernel); a window spans (kernel - 1) * dilation + 1."""
    axes = tuple(range(2, x.ndim))
    spans = tuple((k - 1) * d + 1 for k, d in zip(kernel, dilation, strict=True))
    every = sliding_window_view(x, spans, axis=axes)
    at = [slice(None)] * 2 + [slice(None, None, s) for s in strides] + [slice(None, None, d) for d in dilation]
    return np.asarray(every[tuple(at)])


def convolution(case: OperatorCase, inputs: list[Array]) -> Array:
    """out[n, o, p] = sum over i, k of x[n, group(o) + i, p * stride + k * dilation - padding] * w[o, i, k]."""
    data_layout, weight_layout = case.layouts
    dims = _spatial(data_layout)
    x = _to_layout(inputs[0], data_layout, "NC" + dims)
    w = _to_layout(inputs[1], weight_layout, "OI" + dims)
    (groups,) = case.get("groups")
    x = np.pad(x, [(0, 0), (0, 0), *_pairs(case.get("padding"))])
    parts = _windows(x, w.shape[2:], case.get("strides"), case.get("dilation"))
    batch, channels = parts.shape[:2]
    rank = len(dims)
    parts = parts.reshape(batch, groups, channels // groups, *parts.shape[2:])
    weights = w.reshape(groups, w.shape[0] // groups, *w.shape[1:])
    results = [
        np.tensordot(parts[:, g], weights[g], axes=([1, *range(2 + rank, 2 + 2 * rank)], [1, *range(2, 2 + rank)]))
        for g in range(groups)
    ]  # each (batch, *output, channels of the group)
    joined = np.concatenate(results, axis=-1)
    return _to_layout(joined, "N" + dims + "C", data_layout)


def transposed_convolution(case: OperatorCase, inputs: list[Array]) -> Array:
    """Every input element adds its multiple of the kernel: out[p * stride + k] += x[p] * w[k]; then the crop."""
    x, w = inputs  # (N, I, *spatial), (I, O / groups, *kernel)
    (groups,) = case.get("groups")
    strides, padding, extra = case.get("strides"), _pairs(case.get("padding")), case.get("output_padding")
    kernel, sizes = w.shape[2:], x.shape[2:]
    spans = [(n - 1) * s + k + e for n, s, k, e in zip(sizes, strides, kernel, extra, strict=True)]
    out = np.zeros((x.shape[0], w.shape[1] * groups, *spans), x.dtype)
    per_group = x.shape[1] // groups
    for g, position in itertools.product(range(groups), itertools.product(*[range(k) for k in kernel])):
        source = x[:, g * per_group : (g + 1) * per_group]
        tap: tuple[Any, ...] = (slice(g * per_group, (g + 1) * per_group), slice(None), *position)
        at = [slice(k, k + (n - 1) * s + 1, s) for k, n, s in zip(position, sizes, strides, strict=True)]
        target = (slice(None), slice(g * w.shape[1], (g + 1) * w.shape[1]), *at)
        out[target] += np.moveaxis(np.tensordot(source, w[tap], axes=([1], [0])), -1, 1)
    crop = (slice(before, span - after) for (before, after), span in zip(padding, spans, strict=True))
    kept = (slice(None), slice(None), *crop)
    return np.asarray(out[kept])


# --- pools ---------------------------------------------------------------------------------------------------------
def _pool(case: OperatorCase, x: Array, fill: float) -> tuple[Array, int]:
    """(windows, rank): the windows (N, C, *output, *kernel) over ``x`` padded with ``fill``, further for ceil_mode.

    Worked example of ceil_mode: 6 elements, windows of 3 by steps of 2, no padding. Steps that fit: 1.5, rounded up
    to 2, so 3 windows; the last one ends at 2 * 2 + 3 = 7: one more element of padding.
    """
    kernel, strides, dilation = case.get("pool_size"), case.get("strides"), case.get("dilation")
    pairs = []
    for size, k, s, d, (before, after) in zip(
        x.shape[2:], kernel, strides, dilation, _pairs(case.get("padding")), strict=True
    ):
        span = (k - 1) * d + 1
        steps = (size + before + after - span) / s
        count = (math.ceil(steps) if case.flag("ceil_mode") else math.floor(steps)) + 1
        needed = (count - 1) * s + span
        pairs.append((before, max(after, needed - size - before)))
    padded = np.pad(x, [(0, 0), (0, 0), *pairs], constant_values=fill)
    return _windows(padded, kernel, strides, dilation), len(kernel)


def _in_data_layout(compute: Callable[[OperatorCase, Array], Array]) -> Callable[[OperatorCase, list[Array]], Array]:
    def run(case: OperatorCase, inputs: list[Array]) -> Array:
        layout = case.layouts[0]
        inner = "NC" + _spatial(layout)
        return _to_layout(compute(case, _to_layout(inputs[0], layout, inner)), inner, layout)

    return run


@_in_data_layout
def max_pool(case: OperatorCase, x: Array) -> Array:
    parts, rank = _pool(case, x.astype(np.float64), -np.inf)
    return np.asarray(parts.max(axis=tuple(range(-rank, 0))))


@_in_data_layout
def average_pool(case: OperatorCase, x: Array) -> Array:
    """Divides by how many of a window's elements are not padding; with ``count_include_pad``, by how many are no more
    than the padding asked for: what ceil_mode adds beyond that never counts.
    """
    parts, rank = _pool(case, x, 0.0)
    axes = tuple(range(-rank, 0))
    pairs = [(0, 0), (0, 0), *_pairs(case.get("padding"))]
    counted = np.pad(np.ones_like(x), pairs, constant_values=1.0 if case.flag("count_include_pad") else 0.0)
    unpadded = replace(case, attributes=(("padding", (0,) * 2 * rank), *_without(case, "padding")))
    counts, _ = _pool(unpadded, counted, 0.0)
    return np.asarray(parts.sum(axis=axes) / counts.sum(axis=axes))


def _without(case: OperatorCase, name: str) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return tuple(item for item in case.attributes if item[0] != name)


@_in_data_layout
def adaptive_average_pool(case: OperatorCase, x: Array) -> Array:
    """Output i of an axis of n averages elements floor(i * n / size) to ceil((i + 1) * n / size)."""
    for axis, size in enumerate(case.get("output_size"), start=2):
        n = x.shape[axis]
        ranges = [(i * n // size, -(-(i + 1) * n // size)) for i in range(size)]
        pieces: list[Any] = [x.take(range(a, b), axis=axis).mean(axis=axis, keepdims=True) for a, b in ranges]
        x = np.concatenate(pieces, axis=axis)
    return x


_RANKS = (1, 2, 3)
OPERATORS: dict[str, Callable[[OperatorCase, list[Array]], Array]] = {
    "matmul": matmul,
    **{f"nn.conv{rank}d": convolution for rank in _RANKS},
    **{f"nn.conv{rank}d_transpose": transposed_convolution for rank in _RANKS},
    **{f"nn.max_pool{rank}d": max_pool for rank in _RANKS},
    **{f"nn.avg_pool{rank}d": average_pool for rank in _RANKS},
    **{f"nn.adaptive_avg_pool{rank}d": adaptive_average_pool for rank in _RANKS},
}
