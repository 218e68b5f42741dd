"""What each operator means, in NumPy: float64 for floating point, exact integers otherwise. Knows nothing of TVM.

Convolutions, pools and products are in `reference_windows`. Speed does not matter here, being plainly right does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from . import reference_windows as windows
from .record import Array, OperatorCase, is_float

EPSILON = 1e-5
"""Added to variances by every normalisation."""

CLIP = (-0.5, 0.75)
CLIP_INT = (-1000, 750)
SCALE = 0.5
REQUANTISE_SHIFT, REQUANTISE_OFFSET = 2.0**-7, 2.0**-9
"""Accumulators are multiplied by 2^-7, so that 2^-9 keeps every value off the ties of rounding."""

_erf = np.frompyfunc(math.erf, 1, 1)


def evaluate(case: OperatorCase, inputs: Sequence[Array]) -> list[Array]:
    """All outputs of ``case`` for ``inputs``, which already have the case's dtypes."""
    wide = [_widen(value) for value in inputs]
    extra = wide[case.arity :]
    first = wide[0]
    if case.prologue != "none":
        first = PROLOGUES[case.prologue](first, extra.pop(0) if case.prologue == "add" else None)
    result = OPERATORS[case.operator](case, [first, *wide[1 : case.arity]])
    if isinstance(result, list):
        return result
    return EPILOGUES[case.epilogue](result, [wide[0]] if case.epilogue == "skip" else extra)


def output_shape(case: OperatorCase) -> tuple[int, ...]:
    """Shape of the operator's (first) result."""
    ones = [
        np.zeros(i.shape, i.dtype) if i.values == "index" else np.ones(i.shape, i.dtype) for i in case.core().inputs
    ]
    return evaluate(case.core(), ones)[0].shape


def _widen(value: Array) -> Array:
    if value.dtype == np.bool_:
        return value
    return value.astype(np.float64 if is_float(value) else np.int64)


# --- around the operator -------------------------------------------------------------------------------------------
def relu(x: Array) -> Array:
    return np.asarray(np.maximum(x, 0))


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def erf(x: Array) -> Array:
    return np.asarray(_erf(x), dtype=np.float64)


def gelu(x: Array) -> Array:
    return np.asarray(0.5 * x * (1 + erf(x / math.sqrt(2))))


def _requantise(x: Array, _extra: Sequence[Array]) -> list[Array]:
    return [np.clip(np.rint(x * REQUANTISE_SHIFT + REQUANTISE_OFFSET), -128, 127).astype(np.int64)]


PROLOGUES: dict[str, Callable[[Array, Array | None], Array]] = {
    "relu": lambda x, _: relu(x),
    "scale": lambda x, _: x * SCALE,
    "add": lambda x, other: x + other if other is not None else x,
}

EPILOGUES: dict[str, Callable[[Array, Sequence[Array]], list[Array]]] = {
    "none": lambda x, _: [x],
    "relu": lambda x, _: [relu(x)],
    "bias": lambda x, extra: [x + extra[0]],
    "bias_relu": lambda x, extra: [relu(x + extra[0])],
    "bias_residual_relu": lambda x, extra: [relu(x + extra[0] + extra[1])],
    "residual": lambda x, extra: [x + extra[0]],
    "broadcast_product": lambda x, extra: [x * extra[0]],
    "skip": lambda x, extra: [x + extra[0]],
    "gelu": lambda x, _: [gelu(x)],
    "sigmoid_product": lambda x, _: [sigmoid(x) * x],
    "clip": lambda x, _: [np.clip(x, *(CLIP if x.dtype == np.float64 else CLIP_INT))],
    "scale_cast": lambda x, _: [x.astype(np.float64) * SCALE],
    "requantise": _requantise,
    "relu_beside": lambda x, _: [x, relu(x)],
}


# --- normalisations and reductions ---------------------------------------------------------------------------------
def _softmax(case: OperatorCase, inputs: list[Array]) -> Array:
    shifted = inputs[0] - inputs[0].max(axis=case.get("axis")[0], keepdims=True)
    powers = np.exp(shifted)
    return np.asarray(powers / powers.sum(axis=case.get("axis")[0], keepdims=True))


def _log_softmax(case: OperatorCase, inputs: list[Array]) -> Array:
    shifted = inputs[0] - inputs[0].max(axis=case.get("axis")[0], keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=case.get("axis")[0], keepdims=True)))


def _standardise(x: Array, axes: tuple[int, ...]) -> Array:
    return np.asarray((x - x.mean(axis=axes, keepdims=True)) / np.sqrt(x.var(axis=axes, keepdims=True) + EPSILON))


def _layer_norm(case: OperatorCase, inputs: list[Array]) -> Array:
    return _standardise(inputs[0], case.get("axes")) * inputs[1] + inputs[2]


def _rms_norm(case: OperatorCase, inputs: list[Array]) -> Array:
    mean_square = (inputs[0] ** 2).mean(axis=case.get("axes"), keepdims=True)
    return np.asarray(inputs[0] / np.sqrt(mean_square + EPSILON) * inputs[1])


def _per_channel(values: Array, rank: int) -> Array:
    return values.reshape(1, -1, *[1] * (rank - 2))


def _group_norm(case: OperatorCase, inputs: list[Array]) -> Array:
    x, (groups,) = inputs[0], case.get("num_groups")
    grouped = x.reshape(x.shape[0], groups, -1)
    normal = _standardise(grouped, (2,)).reshape(x.shape)
    return normal * _per_channel(inputs[1], x.ndim) + _per_channel(inputs[2], x.ndim)


def _instance_norm(_case: OperatorCase, inputs: list[Array]) -> Array:
    x = inputs[0]
    normal = _standardise(x, tuple(range(2, x.ndim)))
    return normal * _per_channel(inputs[1], x.ndim) + _per_channel(inputs[2], x.ndim)


def _reduction(compute: Callable[..., Array]) -> Callable[[OperatorCase, list[Array]], Array]:
    def run(case: OperatorCase, inputs: list[Array]) -> Array:
        return np.asarray(compute(inputs[0], axis=case.get("axes"), keepdims=case.flag("keepdims")))

    return run


def _search(compute: Callable[..., Array]) -> Callable[[OperatorCase, list[Array]], Array]:
    def run(case: OperatorCase, inputs: list[Array]) -> Array:
        return np.asarray(compute(inputs[0], axis=case.get("axis")[0], keepdims=case.flag("keepdims")))

    return run


# --- chains of operators -------------------------------------------------------------------------------------------
def _attention(case: OperatorCase, inputs: list[Array]) -> Array:
    query, key, value = inputs
    scores = np.matmul(query, np.swapaxes(key, -1, -2)) * SCALE
    powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.asarray(np.matmul(powers / powers.sum(axis=-1, keepdims=True), value))


def _gram(_case: OperatorCase, inputs: list[Array]) -> Array:
    return np.asarray(np.matmul(inputs[0], np.swapaxes(inputs[0], -1, -2)))


def _centre(case: OperatorCase, inputs: list[Array]) -> Array:
    return np.asarray(inputs[0] - inputs[0].mean(axis=case.get("axes"), keepdims=True))


def _separable(case: OperatorCase, inputs: list[Array]) -> Array:
    depthwise = relu(windows.convolution(case, inputs[:2]))
    return np.moveaxis(np.tensordot(inputs[2][:, :, 0, 0], depthwise, axes=([1], [1])), 0, 1)


def _residual_block(case: OperatorCase, inputs: list[Array]) -> Array:
    data, first, second, third = inputs

    def convolve(x: Array, weights: Array, strides: tuple[int, ...], border: int) -> Array:
        attributes = (("strides", strides), ("padding", (border,) * 4), ("dilation", (1, 1)), ("groups", (1,)))
        return windows.convolution(replace(case, attributes=attributes), [x, weights])

    value = relu(convolve(data, first, case.get("strides"), 1))
    value = value + convolve(value, second, (1, 1), 0)
    pool = (("pool_size", (3, 3)), ("strides", case.get("pool_strides")), ("padding", (1,) * 4))
    pooled = windows.max_pool(replace(case, attributes=(*pool, ("dilation", (1, 1)), ("ceil_mode", (0,)))), [value])
    return convolve(pooled, third, (1, 1), 1)


# --- element by element --------------------------------------------------------------------------------------------
def _selu(x: Array) -> Array:
    alpha, scale = 1.6732632423543772, 1.0507009873554805
    return scale * np.where(x > 0, x, alpha * (np.exp(x) - 1))


UNARY: dict[str, Callable[[Array], Array]] = {
    "abs": np.abs,
    "acos": np.arccos,
    "asin": np.arcsin,
    "asinh": np.arcsinh,
    "atan": np.arctan,
    "ceil": np.ceil,
    "cos": np.cos,
    "cosh": np.cosh,
    "erf": erf,
    "exp": np.exp,
    "floor": np.floor,
    "log": np.log,
    "negative": np.negative,
    "round": np.rint,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "sigmoid": sigmoid,
    "sign": np.sign,
    "sin": np.sin,
    "sinh": np.sinh,
    "sqrt": np.sqrt,
    "square": np.square,
    "tan": np.tan,
    "tanh": np.tanh,
    "trunc": np.trunc,
    "nn.gelu": gelu,
    "nn.gelu_tanh": lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "nn.leakyrelu": lambda x: np.where(x > 0, x, 0.01 * x),
    "nn.relu": relu,
    "nn.relu6": lambda x: np.clip(x, 0, 6),
    "nn.selu": _selu,
    "nn.silu": lambda x: x * sigmoid(x),
    "nn.softplus": lambda x: np.log1p(np.exp(x)),
}

BINARY: dict[str, Callable[[Array, Array], Array]] = {
    "add": np.add,
    "bitwise_and": np.bitwise_and,
    "bitwise_or": np.bitwise_or,
    "bitwise_xor": np.bitwise_xor,
    "divide": np.divide,
    "equal": np.equal,
    "floor_divide": np.floor_divide,
    "floor_mod": np.mod,
    "greater": np.greater,
    "greater_equal": np.greater_equal,
    "less": np.less,
    "less_equal": np.less_equal,
    "log_add_exp": np.logaddexp,
    "logical_and": np.logical_and,
    "logical_or": np.logical_or,
    "logical_xor": np.logical_xor,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "multiply": np.multiply,
    "not_equal": np.not_equal,
    "power": np.power,
    "subtract": np.subtract,
}


def _element_wise(compute: Callable[..., Any]) -> Callable[[OperatorCase, list[Array]], Array]:
    return lambda _case, inputs: np.asarray(compute(*inputs))


# --- moving elements -----------------------------------------------------------------------------------------------
PAD_MODES = ("constant", "reflect", "replicate", "circular")
_NUMPY_PAD_MODES = {"constant": "constant", "reflect": "reflect", "replicate": "edge", "circular": "wrap"}
PAD_VALUE = 0.25


def _pad(case: OperatorCase, inputs: list[Array]) -> Array:
    width = case.get("pad_width")
    pairs = list(zip(width[::2], width[1::2], strict=True))
    mode = PAD_MODES[case.get("mode")[0]]
    if mode == "constant":
        return np.pad(inputs[0], pairs, constant_values=PAD_VALUE if inputs[0].dtype == np.float64 else 0)
    return np.pad(inputs[0], pairs, mode=_NUMPY_PAD_MODES[mode])  # type: ignore[call-overload,no-any-return]


def _slice(case: OperatorCase, inputs: list[Array]) -> Array:
    at = [slice(None)] * inputs[0].ndim
    names = ("axes", "begin", "end", "strides")
    for axis, begin, end, stride in zip(*(case.get(name) for name in names), strict=True):
        at[axis] = slice(begin, end if end >= 0 else None, stride)
    return np.asarray(inputs[0][tuple(at)])


def _split(case: OperatorCase, inputs: list[Array]) -> list[Array]:
    return list(np.split(inputs[0], case.get("at"), axis=case.get("axis")[0]))


def _cast(case: OperatorCase, inputs: list[Array]) -> Array:
    assert case.out_dtype is not None
    return _widen(inputs[0].astype(case.out_dtype))


Operator = Callable[[OperatorCase, list[Array]], "Array | list[Array]"]

OPERATORS: dict[str, Operator] = {
    **windows.OPERATORS,
    **{name: _element_wise(function) for name, function in UNARY.items()},
    **{name: _element_wise(function) for name, function in BINARY.items()},
    "sum": _reduction(np.sum),
    "mean": _reduction(np.mean),
    "max": _reduction(np.max),
    "min": _reduction(np.min),
    "prod": _reduction(np.prod),
    "variance": _reduction(np.var),
    "std": _reduction(np.std),
    "argmax": _search(np.argmax),
    "argmin": _search(np.argmin),
    "chain.attention": _attention,
    "chain.gram": _gram,
    "chain.centre": _centre,
    "chain.separable": _separable,
    "chain.residual_block": _residual_block,
    "cumsum": lambda case, inputs: np.cumsum(inputs[0], axis=case.get("axis")[0]),
    "nn.softmax": _softmax,
    "nn.log_softmax": _log_softmax,
    "nn.layer_norm": _layer_norm,
    "nn.rms_norm": _rms_norm,
    "nn.group_norm": _group_norm,
    "nn.instance_norm": _instance_norm,
    "permute_dims": lambda case, inputs: np.transpose(inputs[0], case.get("axes")),
    "reshape": lambda case, inputs: inputs[0].reshape(case.get("shape")),
    "broadcast_to": lambda case, inputs: np.broadcast_to(inputs[0], case.get("shape")),
    "concat": lambda case, inputs: np.concatenate(inputs, axis=case.get("axis")[0]),
    "stack": lambda case, inputs: np.stack(inputs, axis=case.get("axis")[0]),
    "split": _split,
    "strided_slice": _slice,
    "nn.pad": _pad,
    "tile": lambda case, inputs: np.tile(inputs[0], case.get("repeats")),
    "repeat": lambda case, inputs: np.repeat(inputs[0], case.get("repeats")[0], axis=case.get("axis")[0]),
    "flip": lambda case, inputs: np.flip(inputs[0], case.get("axis")[0]),
    "take": lambda case, inputs: np.take(inputs[0], inputs[1], axis=case.get("axis")[0]),
    "gather_elements": lambda case, inputs: np.take_along_axis(inputs[0], inputs[1], axis=case.get("axis")[0]),
    "where": lambda case, inputs: np.where(inputs[0], inputs[1], inputs[2]),
    "astype": _cast,
}
