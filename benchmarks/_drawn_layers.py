"""Layers of networks as models of one node: products, windows, rows, element-wise operators and movements."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

import numpy as np
from _drawn_irregular import IRREGULAR, Draw, DrawnOperator

from tvm_ext.support.arrays import Array

MOST_FLOPS = 6e8
"""Of a drawn operator: 300 of them then run in a minute."""

MOST_ELEMENTS = 2_000_000
"""Of a drawn operand."""

WIDTHS = (16, 24, 32, 40, 48, 64, 80, 96, 112, 128, 144, 160, 192, 240, 256, 320, 384, 480, 512, 576, 672, 768, 960,
          1024, 1152, 1280, 1536, 2048)  # fmt: skip
SIDES = (4, 7, 8, 10, 12, 13, 14, 16, 20, 24, 26, 28, 32, 35, 40, 52, 56, 64, 80, 96, 112, 128, 160, 224)
LENGTHS = (7, 16, 32, 49, 64, 77, 100, 128, 196, 197, 256, 384, 512, 1000, 1500)
UNARY = ("Relu", "Sigmoid", "Tanh", "Exp", "Sqrt", "Erf", "HardSwish", "HardSigmoid", "LeakyRelu", "Elu", "Abs", "Neg",
         "Softplus", "Gelu", "Mish", "Reciprocal", "Floor", "Sin", "Cos", "Selu", "Softsign", "Log")  # fmt: skip
BINARY = ("Add", "Sub", "Mul", "Div", "Max", "Min", "Pow", "Less")
REDUCTIONS = ("ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceL2", "ReduceProd", "ReduceLogSumExp")

Item = TypeVar("Item")


def _of(draw: np.random.Generator, values: Sequence[Item]) -> Item:
    return values[int(draw.integers(len(values)))]


def _floats(draw: np.random.Generator, *shape: int) -> Array:
    return draw.standard_normal(shape).astype("float32")


def _weights(draw: np.random.Generator, *shape: int) -> Array:
    return _floats(draw, *shape) / np.float32(np.prod(shape[1:]) ** 0.5)


def _ints(*values: int) -> Array:
    return np.array(values, np.int64)


def _image(draw: np.random.Generator) -> Array:
    while True:
        side, channels = _of(draw, SIDES), _of(draw, WIDTHS)
        if side * side * channels <= MOST_ELEMENTS:
            return _floats(draw, 1, channels, side, side)


def _sequence(draw: np.random.Generator) -> Array:
    while True:
        length, width = _of(draw, LENGTHS), _of(draw, WIDTHS)
        if length * width <= MOST_ELEMENTS:
            return _floats(draw, 1, length, width)


def _tensor(draw: np.random.Generator) -> Array:
    return _image(draw) if draw.random() < 0.6 else _sequence(draw)


def _conv(draw: np.random.Generator) -> DrawnOperator:
    while True:
        side, channels, filters = _of(draw, SIDES), _of(draw, (3, *WIDTHS)), _of(draw, WIDTHS)
        kernel, stride = _of(draw, (1, 1, 3, 3, 3, 5, 7)), _of(draw, (1, 1, 2))
        dilation, groups = _of(draw, (1, 1, 1, 1, 2)), _of(draw, (1, 1, 1, 1, 1, 1, 4, 32))
        span = (kernel - 1) * dilation + 1
        flops = 2 * (side // stride) ** 2 * channels * filters * kernel**2 / groups
        if channels % groups == filters % groups == 0 and span <= side and flops <= MOST_FLOPS:
            break
    operands = _floats(draw, 1, channels, side, side), _weights(draw, filters, channels // groups, kernel, kernel)
    return DrawnOperator(
        operator="Conv", operands=(*operands, _floats(draw, filters)), constants=(1, 2),
        attributes={"strides": [stride] * 2, "pads": [span // 2] * 4, "dilations": [dilation] * 2, "group": groups},
    )  # fmt: skip


def _depthwise(draw: np.random.Generator) -> DrawnOperator:
    x, kernel, stride = _image(draw), _of(draw, (3, 3, 3, 5, 7)), _of(draw, (1, 1, 2))
    return DrawnOperator(
        operator="Conv", operands=(x, _weights(draw, x.shape[1], 1, kernel, kernel)), constants=(1,),
        attributes={"strides": [stride] * 2, "pads": [kernel // 2] * 4, "group": x.shape[1]},
    )  # fmt: skip


def _conv_1d(draw: np.random.Generator) -> DrawnOperator:
    while True:
        length, channels, filters = _of(draw, LENGTHS), _of(draw, WIDTHS), _of(draw, WIDTHS)
        kernel, stride = _of(draw, (1, 3, 3, 5, 7)), _of(draw, (1, 1, 2))
        if 2 * length * channels * filters * kernel <= MOST_FLOPS:
            break
    return DrawnOperator(
        operator="Conv", operands=(_floats(draw, 1, channels, length), _weights(draw, filters, channels, kernel)),
        constants=(1,), attributes={"strides": [stride], "pads": [kernel // 2] * 2},
    )  # fmt: skip


def _conv_transposed(draw: np.random.Generator) -> DrawnOperator:
    while True:
        side, channels, filters = _of(draw, SIDES), _of(draw, WIDTHS), _of(draw, WIDTHS)
        kernel, stride, pad = _of(draw, ((2, 2, 0), (4, 2, 1), (3, 1, 1), (3, 2, 1)))
        if 2 * side**2 * channels * filters * kernel**2 <= MOST_FLOPS:
            break
    return DrawnOperator(
        operator="ConvTranspose",
        operands=(_floats(draw, 1, channels, side, side), _weights(draw, channels, filters, kernel, kernel)),
        constants=(1,), attributes={"strides": [stride] * 2, "pads": [pad] * 4},
    )  # fmt: skip


def _gemm(draw: np.random.Generator) -> DrawnOperator:
    rows, inner, columns = _of(draw, (1, 1, 2, 4, 8, 16, 32)), _of(draw, WIDTHS), _of(draw, (10, 100, 1000, *WIDTHS))
    return DrawnOperator(
        operator="Gemm", operands=(_floats(draw, rows, inner), _weights(draw, columns, inner), _floats(draw, columns)),
        constants=(1, 2), attributes={"transB": 1},
    )  # fmt: skip


def _matmul(draw: np.random.Generator) -> DrawnOperator:
    """A sequence and a constant matrix."""
    while True:
        x, columns = _sequence(draw), _of(draw, WIDTHS)
        if 2 * x.size * columns <= MOST_FLOPS:
            return DrawnOperator(
                operator="MatMul", operands=(x, _weights(draw, columns, x.shape[2]).T.copy()), constants=(1,)
            )


def _batched(draw: np.random.Generator) -> DrawnOperator:
    """What attention multiplies: heads of queries and keys, or of probabilities and values."""
    while True:
        heads, size, length = (
            _of(draw, (1, 2, 3, 4, 6, 8, 12, 16)),
            _of(draw, (16, 24, 32, 40, 64, 80)),
            _of(draw, LENGTHS),
        )
        shapes = ((length, size), (size, length)) if draw.random() < 0.5 else ((length, length), (length, size))
        if 2 * heads * length * length * size <= MOST_FLOPS:
            return DrawnOperator(operator="MatMul", operands=tuple(_floats(draw, 1, heads, *item) for item in shapes))


def _pool(draw: np.random.Generator) -> DrawnOperator:
    kernel, stride = _of(draw, ((2, 2), (3, 2), (3, 1), (5, 1), (7, 7)))
    attributes = {"kernel_shape": [kernel] * 2, "strides": [stride] * 2}
    if kernel % 2 and stride < kernel:
        attributes["pads"] = [kernel // 2] * 4
    x = _image(draw)
    while x.shape[2] < kernel:
        x = _image(draw)
    return DrawnOperator(operator=_of(draw, ("MaxPool", "AveragePool")), operands=(x,), attributes=attributes)


def _global_pool(draw: np.random.Generator) -> DrawnOperator:
    return DrawnOperator(operator=_of(draw, ("GlobalAveragePool", "GlobalMaxPool")), operands=(_image(draw),))


def _softmax(draw: np.random.Generator) -> DrawnOperator:
    heads, length = _of(draw, (1, 4, 12)), _of(draw, LENGTHS)
    x = _tensor(draw) if draw.random() < 0.4 else _floats(draw, 1, heads, min(length, 400), length)
    name, axis = _of(draw, (("Softmax", -1), ("Softmax", -1), ("Softmax", 1), ("LogSoftmax", -1)))
    return DrawnOperator(operator=name, operands=(x,), attributes={"axis": axis})


def _layer_norm(draw: np.random.Generator) -> DrawnOperator:
    x = _sequence(draw)
    return DrawnOperator(
        operator="LayerNormalization", operands=(x, _floats(draw, x.shape[2]), _floats(draw, x.shape[2])),
        constants=(1, 2), attributes={"axis": -1},
    )  # fmt: skip


def _channel_norm(draw: np.random.Generator) -> DrawnOperator:
    x = _image(draw)
    scale, bias, mean = (_floats(draw, x.shape[1]) for _ in range(3))
    if draw.random() < 0.5:
        return DrawnOperator(operator="InstanceNormalization", operands=(x, scale, bias), constants=(1, 2))
    return DrawnOperator(
        operator="BatchNormalization", operands=(x, scale, bias, mean, np.abs(mean) + 1), constants=(1, 2, 3, 4)
    )


def _reduction(draw: np.random.Generator) -> DrawnOperator:
    x = _tensor(draw)
    axes = _of(draw, ((-1,), (1,), (-1, -2)))
    return DrawnOperator(
        operator=_of(draw, REDUCTIONS), operands=(x, _ints(*axes)), constants=(1,),
        attributes={"keepdims": int(draw.integers(2))},
    )  # fmt: skip


def _unary(draw: np.random.Generator) -> DrawnOperator:
    name, x = _of(draw, UNARY), _tensor(draw)
    return DrawnOperator(operator=name, operands=(np.abs(x) + 0.1 if name in ("Sqrt", "Log") else x,))


def _binary(draw: np.random.Generator) -> DrawnOperator:
    """Two tensors, of which the second may be a channel's, a row's, a column's or a scalar."""
    name, x = _of(draw, BINARY), np.abs(_tensor(draw))
    ways = [x.shape, (*x.shape[:2], *(1,) * (x.ndim - 2)), x.shape[-1:], (*x.shape[:-1], 1), (1,)]
    other = np.abs(_floats(draw, *_of(draw, ways))) + np.float32(0.1)
    return DrawnOperator(operator=name, operands=(x, other))


def _prelu(draw: np.random.Generator) -> DrawnOperator:
    x = _image(draw)
    return DrawnOperator(operator="PRelu", operands=(x, _floats(draw, x.shape[1], 1, 1)), constants=(1,))


def _where(draw: np.random.Generator) -> DrawnOperator:
    x = _tensor(draw)
    return DrawnOperator(operator="Where", operands=(draw.random(x.shape) < 0.5, x, _floats(draw, 1)))


def _transpose(draw: np.random.Generator) -> DrawnOperator:
    x = _tensor(draw)
    if x.ndim == 3 and x.shape[2] % 8 == 0 and draw.random() < 0.6:  # heads
        x, orders = x.reshape(1, x.shape[1], 8, x.shape[2] // 8), [[0, 2, 1, 3], [0, 2, 3, 1]]
    else:
        orders = [[0, 2, 1]] if x.ndim == 3 else [[0, 2, 3, 1], [0, 3, 1, 2], [0, 1, 3, 2], [0, 2, 1, 3]]
    return DrawnOperator(operator="Transpose", operands=(x,), attributes={"perm": _of(draw, orders)})


def _concat(draw: np.random.Generator) -> DrawnOperator:
    x, axis = _tensor(draw), _of(draw, (1, 1, -1))
    others = [_floats(draw, *x.shape) for _ in range(int(draw.integers(1, 4)))]
    return DrawnOperator(operator="Concat", operands=(x, *others), attributes={"axis": axis})


def _slice(draw: np.random.Generator) -> DrawnOperator:
    x, axis, step = _tensor(draw), int(draw.integers(1, 3)), _of(draw, (1, 1, 2, -1))
    start, end = (x.shape[axis] // 4, x.shape[axis]) if step > 0 else (-1, -(2**31))
    return DrawnOperator(
        operator="Slice", operands=(x, _ints(start), _ints(end), _ints(axis), _ints(step)), constants=(1, 2, 3, 4)
    )


def _split(draw: np.random.Generator) -> DrawnOperator:
    x, parts = _tensor(draw), _of(draw, (2, 2, 4))
    axis = 1 if x.shape[1] % parts == 0 else x.ndim - 1
    if x.shape[axis] % parts:
        x = _floats(draw, 1, 64, 28, 28)
    return DrawnOperator(
        operator="Split", operands=(x,), results=parts, attributes={"axis": axis, "num_outputs": parts}
    )


def _pad(draw: np.random.Generator) -> DrawnOperator:
    x, mode, size = _image(draw), _of(draw, ("constant", "constant", "reflect", "edge")), _of(draw, (1, 1, 2, 3))
    pads = _ints(0, 0, size, size, 0, 0, size, size)
    return DrawnOperator(operator="Pad", operands=(x, pads), constants=(1,), attributes={"mode": mode})


def _expand(draw: np.random.Generator) -> DrawnOperator:
    x = _sequence(draw)
    repeats = max(1, min(16, MOST_ELEMENTS // x.size))
    if draw.random() < 0.5:
        return DrawnOperator(operator="Tile", operands=(x, _ints(1, repeats, 1)), constants=(1,))
    return DrawnOperator(operator="Expand", operands=(x[:, :, None], _ints(1, 1, repeats, 1)), constants=(1,))


def _depth_to_space(draw: np.random.Generator) -> DrawnOperator:
    while True:
        x, name = _image(draw), _of(draw, ("DepthToSpace", "SpaceToDepth"))
        if (x.shape[1] % 4 if name == "DepthToSpace" else x.shape[2] % 2) == 0:
            return DrawnOperator(operator=name, operands=(x,), attributes={"blocksize": 2})


def _recurrent(draw: np.random.Generator) -> DrawnOperator:
    gates, name = _of(draw, ((4, "LSTM"), (3, "GRU")))
    steps, width, hidden = _of(draw, (8, 16, 32, 64, 100)), _of(draw, WIDTHS[:16]), _of(draw, WIDTHS[2:16])
    operands = (
        _floats(draw, steps, 1, width), _weights(draw, 1, gates * hidden, width),
        _weights(draw, 1, gates * hidden, hidden), _floats(draw, 1, 2 * gates * hidden),
    )  # fmt: skip
    extra = {"linear_before_reset": 1} if name == "GRU" else {}
    return DrawnOperator(
        operator=name, operands=operands, constants=(1, 2, 3), attributes={"hidden_size": hidden, **extra}
    )


def _einsum(draw: np.random.Generator) -> DrawnOperator:
    heads, length, size = _of(draw, (2, 4, 8)), _of(draw, LENGTHS[:12]), _of(draw, (16, 32, 64))
    operands = (_floats(draw, 1, length, heads, size), _floats(draw, 1, length, heads, size))
    return DrawnOperator(operator="Einsum", operands=operands, attributes={"equation": "bqhd,bkhd->bhqk"})


LAYERS: dict[str, Draw] = {
    "Conv": _conv, "Conv 1-D": _conv_1d, "depthwise": _depthwise, "ConvTranspose": _conv_transposed, "Gemm": _gemm,
    "MatMul": _matmul, "batched": _batched, "pool": _pool, "global pool": _global_pool, "Softmax": _softmax,
    "LayerNormalization": _layer_norm, "channel norm": _channel_norm, "reduction": _reduction, "unary": _unary,
    "binary": _binary, "PRelu": _prelu, "Where": _where, "Transpose": _transpose, "Concat": _concat, "Slice": _slice,
    "Split": _split, "Pad": _pad, "Expand": _expand, "DepthToSpace": _depth_to_space, "recurrent": _recurrent,
    "Einsum": _einsum,
}  # fmt: skip

SOME: Sequence[str] = ("Conv", "Conv", "MatMul", "unary", "binary")
"""Drawn more often, as networks have them."""

TYPES: dict[str, Draw] = {**LAYERS, **IRREGULAR}
ALL: Sequence[str] = (*SOME, *TYPES)


def draw_operators(types: Sequence[str], count: int, seed: int) -> Iterator[DrawnOperator]:
    """``count`` operators, of ``types`` in turn; operator n of a seed is the same in every run."""
    for number in range(count):
        name = types[number % len(types)]
        yield TYPES[name](np.random.default_rng([seed, number, *name.encode()]))
