"""The benchmark's cases in NumPy, float64, for machines without PyTorch: slow, hence for small cases only."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import graph_references
import numpy as np
from cases import Case

FLOPS_LIMIT = 2e9
Array = np.ndarray[Any, Any]


def reference(case: Case, arrays: Sequence[Array]) -> Array | tuple[Array, ...]:
    """The exact result of ``arrays``, a model's as a tuple.

    Raises NotImplementedError for a case that would take minutes, and for a model of other operators than these.
    """
    if case.flops > FLOPS_LIMIT:
        raise NotImplementedError(f"{case.flops:.1e} operations are too many for NumPy: install PyTorch")
    if case.operator == graph_references.OPERATOR:
        wide = [array.astype("float64") if array.dtype.kind == "f" else array for array in arrays]
        return graph_references.evaluate(case, wide, _GRAPH, lambda value, _dtype: np.asarray(value))
    return _REFERENCES[case.operator](case, *(array.astype("float64") for array in arrays))


def _matmul(_case: Case, x: Array, w: Array, *bias: Array) -> Array:
    y = x @ w
    return np.maximum(y + bias[0], 0.0) if bias else y


def _windows(x: Array, kernel: Sequence[int], stride: int, dilation: int, pads: Sequence[int]) -> Array:
    """Views of NCHW ``x``: [n, c, y, x, ky, kx]."""
    top, left, bottom, right = pads
    padded = np.pad(x, ((0, 0), (0, 0), (top, bottom), (left, right)))
    spans = tuple((size - 1) * dilation + 1 for size in kernel)
    views = np.lib.stride_tricks.sliding_window_view(padded, spans, axis=(2, 3))
    return views[:, :, ::stride, ::stride, ::dilation, ::dilation]


def _convolution(case: Case, x: Array, w: Array) -> Array:
    settings = case.attributes
    last = settings["layout"] == "NHWC"
    if last:
        x, w = x.transpose(0, 3, 1, 2), w.transpose(3, 2, 0, 1)
    views = _windows(x, w.shape[2:], settings["stride"], settings["dilation"], settings["pads"])
    if settings["groups"] > 1:
        return np.einsum("ncyxij,cij->ncyx", views, w[:, 0])
    y: Array = np.einsum("ncyxij,fcij->nfyx", views, w, optimize=True)
    return y.transpose(0, 2, 3, 1) if last else y


def _chain(case: Case, x: Array, *factors: Array) -> Array:
    rest = iter(factors)
    for settings in case.attributes["links"]:
        one = _convolution if settings["kind"] == "conv2d" else _matmul
        x = one(replace(case, attributes=settings), x, next(rest))
        x = np.maximum(x + next(rest) if case.attributes["bias"] else x, 0.0)
    return x


def _activated(case: Case, x: Array, w: Array, bias: Array) -> Array:
    one = _convolution if case.operator.endswith("conv2d") else _matmul
    return _ACTIVATIONS[case.attributes["activation"]](one(case, x, w) + bias)


_ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "relu": lambda x: np.maximum(x, 0.0),
    "gelu": lambda x: 0.5 * x * (1.0 + np.vectorize(math.erf, otypes=["float64"])(x / math.sqrt(2.0))),
    "hardswish": lambda x: x * np.clip(x + 3.0, 0.0, 6.0) / 6.0,
    "softplus": lambda x: np.logaddexp(x, 0.0),
}


def _average_pool(case: Case, x: Array) -> Array:
    settings = case.attributes
    window = (settings["kernel"], settings["stride"], 1, settings["pads"])
    inside = _windows(np.ones((1, 1, *x.shape[2:])), *window).sum((-1, -2))
    y: Array = _windows(x, *window).sum((-1, -2)) / inside
    return y


def _softmax(_case: Case, x: Array) -> Array:
    exponentials = np.exp(x - x.max(-1, keepdims=True))
    y: Array = exponentials / exponentials.sum(-1, keepdims=True)
    return y


def _layer_norm(_case: Case, x: Array, gamma: Array, beta: Array) -> Array:
    y: Array = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * gamma + beta
    return y


_GRAPH: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "divide": np.divide,
    "matmul": np.matmul,
    "tanh": np.tanh,
    "sigmoid": lambda x: 1.0 / (1.0 + np.exp(-x)),
    "concat": lambda *parts, axis: np.concatenate(parts, axis),
    "strided_slice": graph_references.sliced,
    "split": lambda x, parts, axis: np.split(x, parts, axis),
    "pick": lambda parts, index: parts[index],
    "squeeze": lambda x, axis: x.reshape(graph_references.without(x.shape, axis)),
    "nn.relu": lambda x: np.maximum(x, 0.0),
    "reshape": lambda x, shape: x.reshape(shape),
    "permute_dims": lambda x, axes: x.transpose(axes),
}

_REFERENCES: dict[str, Callable[..., Array]] = {
    "matmul": _matmul,
    "batch_matmul": _matmul,
    "conv2d": _convolution,
    "depthwise": _convolution,
    "average_pool": _average_pool,
    "relu": lambda _case, x: np.maximum(x, 0.0),
    "chain": _chain,
    "activated_matmul": _activated,
    "activated_conv2d": _activated,
    "sum": lambda case, x: x.sum(tuple(case.attributes["axes"])),
    "softmax": _softmax,
    "layer_norm": _layer_norm,
}
