"""Nodes drawn at random: spectra, places, sums along an axis and single elements."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.unit.relay_passes.onnx.drawn_nodes.values import FLOATS, NUMBERS, Generator, numbers
from tests.unit.relay_passes.onnx.random_nodes import NodeCase

FUNCTIONS = ("Asinh", "Atan", "Celu", "Cosh", "Elu", "Gelu", "Mish", "Selu", "Sinh", "Softplus", "ThresholdedRelu")


def dft(draw: Generator) -> NodeCase:
    rank, opset = int(draw.integers(2, 5)), int(draw.choice([17, 20]))
    inverse, onesided = bool(draw.integers(2)), bool(draw.integers(2))
    axis = int(draw.integers(0, rank - 1))
    shape = [*draw.integers(2, 8, rank - 1), 1 if onesided and not inverse else int(draw.integers(1, 3))]
    if inverse and onesided:
        shape[-1] = 2
    length = np.int64(draw.integers(1, 12)) if draw.integers(2) else None
    operands: dict[str, Any] = {"x": numbers(draw, shape, str(draw.choice(FLOATS))), "dft_length": length}
    attributes = {"inverse": int(inverse), "onesided": int(onesided)}
    written = axis - rank if draw.integers(2) else axis
    if opset == 17:
        attributes["axis"] = written
    else:
        operands["axis"] = np.int64(written)
    return NodeCase(operator="DFT", operands=operands, attributes=attributes, known=("dft_length", "axis"), opset=opset)


def stft(draw: Generator) -> NodeCase:
    dtype = str(draw.choice(["float32", "float64"]))
    length, onesided = int(draw.integers(2, 9)), int(draw.integers(2))
    parts = 1 if onesided else int(draw.integers(1, 3))
    signal = numbers(draw, [2, length + int(draw.integers(0, 20)), parts], dtype)
    window = numbers(draw, [length], dtype) if draw.integers(2) else None
    operands = {
        "x": signal,
        "step": np.int64(draw.integers(1, 5)),
        "window": window,
        "length": np.int64(length) if window is None or draw.integers(2) else None,
    }
    known = ("step", "length", *(["window"] if draw.integers(2) else []))
    return NodeCase(operator="STFT", operands=operands, attributes={"onesided": onesided}, known=known)


def window(draw: Generator) -> NodeCase:
    return NodeCase(
        operator=str(draw.choice(["HannWindow", "HammingWindow", "BlackmanWindow"])),
        operands={"size": np.asarray(draw.integers(2, 30), str(draw.choice(["int32", "int64"])))},
        attributes={"periodic": int(draw.integers(2)), "output_datatype": int(draw.choice([1, 10, 11]))},
        known=("size",),
    )


def mel_weights(draw: Generator) -> NodeCase:
    operands = {
        "bins": np.int64(draw.integers(2, 12)),
        "length": np.int64(2 ** draw.integers(4, 9)),
        "rate": np.int64(8000),
        "low": np.float32(draw.uniform(0, 100)),
        "high": np.float32(draw.uniform(1000, 4000)),
    }
    return NodeCase(operator="MelWeightMatrix", operands=operands, known=tuple(operands))


def one_hot(draw: Generator) -> NodeCase:
    rank, depth = int(draw.integers(0, 4)), int(draw.integers(1, 6))
    indices = draw.integers(-depth - 1, depth + 1, draw.integers(1, 5, rank))
    values = str(draw.choice(["float32", "int64", "int8", "bool", "float16", "uint8"]))
    given_as = str(draw.choice(["int64", "int32", "float32", "int8"]))
    depth_value = np.asarray(depth, draw.choice(["int64", "float32"]))
    pair = np.asarray([False, True]) if values == "bool" else np.asarray([3, 7], values)
    axis = int(draw.integers(-rank - 1, rank + 1))
    # (ONNX's reference subtracts the values, which bools cannot, and wants a depth of rank 0.)
    is_on = np.where(indices < 0, indices + depth, indices)[..., None] == np.arange(depth)
    return NodeCase(
        operator="OneHot",
        operands={
            "x": np.asarray(indices, given_as),
            "depth": depth_value.reshape([1] * int(draw.integers(2))),
            "values": pair,
        },
        attributes={"axis": axis},
        known=("depth", *(["values"] if draw.integers(2) else [])),
        wanted=np.where(np.moveaxis(is_on, -1, axis), pair[1], pair[0]),
        opset=int(draw.choice([9, 11, 23])),
    )


def reverse_sequence(draw: Generator) -> NodeCase:
    batch_axis = int(draw.integers(2))
    shape = draw.integers(1, 6, int(draw.integers(2, 5)))
    lengths = draw.integers(1, shape[1 - batch_axis] + 1, shape[batch_axis])
    data = numbers(draw, shape, str(draw.choice([*NUMBERS, "bool"])))
    return NodeCase(
        operator="ReverseSequence",
        operands={"x": data, "lengths": lengths.astype(np.int64)},
        attributes={"batch_axis": batch_axis, "time_axis": 1 - batch_axis},
        opset=int(draw.choice([10, 23])),
    )


def tensor_scatter(draw: Generator) -> NodeCase:
    rank = int(draw.integers(2, 6))
    axis = int(draw.integers(1, rank))
    shape = draw.integers(1, 5, rank)
    shape[axis] += 3
    update = shape.copy()
    update[axis] = draw.integers(1, shape[axis] + 1)
    circular = bool(draw.integers(2))
    limit = shape[axis] if circular else shape[axis] - update[axis] + 1
    dtype = str(draw.choice([*NUMBERS, "bool"]))
    given = draw.integers(0, limit, shape[0]) if draw.integers(4) else None
    return NodeCase(
        operator="TensorScatter",
        operands={"x": numbers(draw, shape, dtype), "update": numbers(draw, update, dtype), "places": given},
        attributes={"axis": axis - rank * int(draw.integers(2)), "mode": "circular" if circular else "linear"},
        opset=24,
    )


def eye_like(draw: Generator) -> NodeCase:
    data = numbers(draw, draw.integers(1, 6, 2), str(draw.choice(["float32", "int32", "float64"])))
    attributes = {"k": int(draw.integers(-3, 4))}
    if draw.integers(2):
        attributes["dtype"] = int(draw.choice([1, 6, 7, 9, 10, 11]))
    return NodeCase(operator="EyeLike", operands={"x": data}, attributes=attributes, opset=int(draw.choice([9, 23])))


def det(draw: Generator) -> NodeCase:
    size = int(draw.integers(1, 7))
    x = numbers(draw, [*draw.integers(1, 4, int(draw.integers(0, 3))), size, size], str(draw.choice(FLOATS[:2])))
    if draw.integers(3) == 0:
        x[..., 0] = 0
    if draw.integers(2):
        x.reshape(-1, size, size)[0] = np.roll(np.eye(size), 1, axis=0)
    # (ONNX's reference gives float64 for a single matrix.)
    wanted = np.asarray(np.linalg.det(x.astype(np.float64)), x.dtype)
    return NodeCase(operator="Det", operands={"x": x}, opset=int(draw.choice([11, 22])), wanted=wanted)


def cum_prod(draw: Generator) -> NodeCase:
    rank = int(draw.integers(1, 4))
    shape = draw.integers(1, 9, rank)
    x = draw.uniform(0.5, 2, shape).astype(str(draw.choice(["float32", "float64", "int32", "int64"])))
    axis = np.asarray(draw.integers(-rank, rank), str(draw.choice(["int32", "int64"])))
    attributes = {"exclusive": int(draw.integers(2)), "reverse": int(draw.integers(2))}
    return NodeCase(
        operator="CumProd", operands={"x": x, "axis": axis}, attributes=attributes, known=("axis",), opset=26
    )


def normalization(draw: Generator) -> NodeCase:
    rank, layer = int(draw.integers(1, 5)), bool(draw.integers(2))
    shape, axis = draw.integers(1, 5, rank), int(draw.integers(-rank, rank))
    dtype = str(draw.choice(FLOATS))
    operands = {"x": numbers(draw, shape, dtype), "scale": numbers(draw, shape[axis % rank :], dtype)}
    if layer:
        operands["b"] = numbers(draw, shape[axis % rank :], dtype) if draw.integers(2) else None
    operator = "LayerNormalization" if layer else "RMSNormalization"
    attributes = {"axis": axis, "epsilon": float(draw.choice([1e-5, 0.1]))}
    opset = int(draw.choice([17, 23])) if layer else 23
    return NodeCase(operator=operator, operands=operands, attributes=attributes, opset=opset)


def floor_mod(draw: Generator) -> NodeCase:
    dtype = str(draw.choice(FLOATS))
    x, y = (np.asarray(draw.choice([-7, -2.5, -0.0, 0, 1.5, 3, 8, np.inf], [4, 5]), dtype) for _ in range(2))
    return NodeCase(operator="Mod", operands={"x": x, "y": np.where(y == 0, 2, y).astype(dtype)}, opset=13)


def integer_power(draw: Generator) -> NodeCase:
    base, exponent = (str(draw.choice(["int32", "int64"])) for _ in range(2))
    operands = {"x": draw.integers(-5, 6, [3, 4]).astype(base), "n": draw.integers(0, 9, [4]).astype(exponent)}
    return NodeCase(operator="Pow", operands=operands, opset=15)


def function(draw: Generator) -> NodeCase:
    operator = str(draw.choice(FUNCTIONS))
    attributes = {"alpha": float(draw.uniform(0.5, 2))} if operator in ("Celu", "Elu", "ThresholdedRelu") else {}
    x = numbers(draw, [3, 5], str(draw.choice(FLOATS)))
    return NodeCase(operator=operator, operands={"x": x}, attributes=attributes, opset=23)


DRAWN = (
    cum_prod,
    det,
    dft,
    eye_like,
    floor_mod,
    function,
    integer_power,
    mel_weights,
    normalization,
    one_hot,
    reverse_sequence,
    stft,
    tensor_scatter,
    window,
)
