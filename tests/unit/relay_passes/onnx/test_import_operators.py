"""Operators that are rewritten: random shapes, attributes and types against ONNX Runtime or ONNX's reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tvm

from tests.unit.relay_passes.onnx.random_nodes import NodeCase, assert_same, imported_graph, rewritten_result
from tvm_ext import relay
from tvm_ext.errors import ModelError
from tvm_ext.relay_passes.onnx.operators.tables import REPLACED

Generator = np.random.Generator
SEEDS = 8

FUNCTIONS = ("Asinh", "Atan", "Celu", "Cosh", "Elu", "Gelu", "Mish", "Selu", "Sinh", "Softplus", "ThresholdedRelu")
FLOATS = ("float32", "float64", "float16")
NUMBERS = ("float32", "float64", "float16", "int32", "int64", "int8", "uint8")


def _numbers(draw: Generator, shape: Any, dtype: str) -> Any:
    if dtype == "bool":
        return draw.integers(0, 2, shape).astype(bool)
    if np.dtype(dtype).kind in "iu":
        return draw.integers(0 if dtype.startswith("u") else -100, 100, shape).astype(dtype)
    return draw.standard_normal(shape).astype(dtype)


def _dft(draw: Generator) -> NodeCase:
    rank, opset = int(draw.integers(2, 5)), int(draw.choice([17, 20]))
    inverse, onesided = bool(draw.integers(2)), bool(draw.integers(2))
    axis = int(draw.integers(0, rank - 1))
    shape = [*draw.integers(2, 8, rank - 1), 1 if onesided and not inverse else int(draw.integers(1, 3))]
    if inverse and onesided:
        shape[-1] = 2
    length = np.int64(draw.integers(1, 12)) if draw.integers(2) else None
    operands: dict[str, Any] = {"x": _numbers(draw, shape, str(draw.choice(FLOATS))), "dft_length": length}
    attributes = {"inverse": int(inverse), "onesided": int(onesided)}
    written = axis - rank if draw.integers(2) else axis
    if opset == 17:
        attributes["axis"] = written
    else:
        operands["axis"] = np.int64(written)
    return NodeCase(operator="DFT", operands=operands, attributes=attributes, known=("dft_length", "axis"), opset=opset)


def _stft(draw: Generator) -> NodeCase:
    dtype = str(draw.choice(["float32", "float64"]))
    length, onesided = int(draw.integers(2, 9)), int(draw.integers(2))
    parts = 1 if onesided else int(draw.integers(1, 3))
    signal = _numbers(draw, [2, length + int(draw.integers(0, 20)), parts], dtype)
    window = _numbers(draw, [length], dtype) if draw.integers(2) else None
    operands = {
        "x": signal,
        "step": np.int64(draw.integers(1, 5)),
        "window": window,
        "length": np.int64(length) if window is None or draw.integers(2) else None,
    }
    known = ("step", "length", *(["window"] if draw.integers(2) else []))
    return NodeCase(operator="STFT", operands=operands, attributes={"onesided": onesided}, known=known)


def _window(draw: Generator) -> NodeCase:
    return NodeCase(
        operator=str(draw.choice(["HannWindow", "HammingWindow", "BlackmanWindow"])),
        operands={"size": np.asarray(draw.integers(2, 30), str(draw.choice(["int32", "int64"])))},
        attributes={"periodic": int(draw.integers(2)), "output_datatype": int(draw.choice([1, 10, 11]))},
        known=("size",),
    )


def _mel_weights(draw: Generator) -> NodeCase:
    operands = {
        "bins": np.int64(draw.integers(2, 12)),
        "length": np.int64(2 ** draw.integers(4, 9)),
        "rate": np.int64(8000),
        "low": np.float32(draw.uniform(0, 100)),
        "high": np.float32(draw.uniform(1000, 4000)),
    }
    return NodeCase(operator="MelWeightMatrix", operands=operands, known=tuple(operands))


def _one_hot(draw: Generator) -> NodeCase:
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


def _reverse_sequence(draw: Generator) -> NodeCase:
    batch_axis = int(draw.integers(2))
    shape = draw.integers(1, 6, int(draw.integers(2, 5)))
    lengths = draw.integers(1, shape[1 - batch_axis] + 1, shape[batch_axis])
    data = _numbers(draw, shape, str(draw.choice([*NUMBERS, "bool"])))
    return NodeCase(
        operator="ReverseSequence",
        operands={"x": data, "lengths": lengths.astype(np.int64)},
        attributes={"batch_axis": batch_axis, "time_axis": 1 - batch_axis},
        opset=int(draw.choice([10, 23])),
    )


def _tensor_scatter(draw: Generator) -> NodeCase:
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
        operands={"x": _numbers(draw, shape, dtype), "update": _numbers(draw, update, dtype), "places": given},
        attributes={"axis": axis - rank * int(draw.integers(2)), "mode": "circular" if circular else "linear"},
        opset=24,
    )


def _col2im(draw: Generator) -> NodeCase:
    rank = int(draw.integers(1, 4))
    block, strides, dilations = (draw.integers(1, 4, rank) for _ in range(3))
    pads = draw.integers(0, 2, 2 * rank)
    image = (block - 1) * dilations + 1 + draw.integers(0, 5, rank)
    counts = (image + pads[:rank] + pads[rank:] - (block - 1) * dilations - 1) // strides + 1
    channels = int(draw.integers(1, 3))
    columns = _numbers(
        draw, [2, channels * block.prod(), counts.prod()], str(draw.choice(["float32", "float64", "int32"]))
    )
    return NodeCase(
        operator="Col2Im",
        operands={"x": columns, "image": image.astype(np.int64), "block": block.astype(np.int64)},
        attributes={"strides": strides.tolist(), "dilations": dilations.tolist(), "pads": pads.tolist()},
        known=("image", "block"),
    )


def _eye_like(draw: Generator) -> NodeCase:
    data = _numbers(draw, draw.integers(1, 6, 2), str(draw.choice(["float32", "int32", "float64"])))
    attributes = {"k": int(draw.integers(-3, 4))}
    if draw.integers(2):
        attributes["dtype"] = int(draw.choice([1, 6, 7, 9, 10, 11]))
    return NodeCase(operator="EyeLike", operands={"x": data}, attributes=attributes, opset=int(draw.choice([9, 23])))


def _pool(draw: Generator) -> tuple[dict[str, Any], Any, str]:
    rank = int(draw.integers(1, 4))
    kernel, strides = (draw.integers(1, 4, rank) for _ in range(2))
    dtype = str(draw.choice(["float32", "float64", "int8", "uint8"]))
    attributes: dict[str, Any] = {"kernel_shape": kernel.tolist(), "strides": strides.tolist()}
    x = _numbers(draw, [2, 3, *(kernel * 2 + draw.integers(0, 6, rank))], dtype)
    return attributes, x, dtype


def _max_pool(draw: Generator) -> NodeCase:
    attributes, x, _ = _pool(draw)
    kernel = np.asarray(attributes["kernel_shape"])
    if draw.integers(3) == 0:
        attributes["auto_pad"] = str(draw.choice(["SAME_UPPER", "SAME_LOWER", "VALID"]))
    else:
        attributes["pads"] = [*draw.integers(0, kernel), *draw.integers(0, kernel)]
        attributes["ceil_mode"] = int(draw.integers(2))
        attributes["dilations"] = draw.integers(1, 3, kernel.size).tolist()
    attributes["storage_order"] = int(draw.integers(2))
    opset = int(draw.choice([12, 22]))
    return NodeCase(
        operator="MaxPool", operands={"x": x}, attributes=attributes, outputs=2, opset=opset, both_by_runtime=True
    )


def _max_unpool(draw: Generator) -> NodeCase:
    rank = int(draw.integers(1, 4))
    kernel = draw.integers(1, 4, rank)
    strides = draw.integers(1, 4, rank)
    shape = draw.integers(2, 5, rank)
    # (No pads wider than what is left of one window.)
    pads = [int(draw.integers(0, 2)) if kernel[axis % rank] == 3 else 0 for axis in range(2 * rank)]
    inferred = (shape - 1) * strides + kernel - np.asarray(pads[:rank]) - np.asarray(pads[rank:])
    places = draw.permutation(2 * inferred.prod())
    x = _numbers(draw, [2, 1, *shape], str(draw.choice(["float32", "float64"])))
    wide = np.asarray([2, 1, *(inferred + draw.integers(0, 3, rank))], np.int64) if draw.integers(2) else None
    while places.size < x.size:
        places = np.concatenate([places, places])
    operands = {"x": x, "index": places[: x.size].reshape(x.shape).astype(np.int64), "shape": wide}
    attributes = {"kernel_shape": kernel.tolist(), "strides": strides.tolist(), "pads": pads}
    return NodeCase(operator="MaxUnpool", operands=operands, attributes=attributes, known=("shape",), opset=22)


def _quantised(draw: Generator, shape: Any) -> Any:
    return _numbers(draw, shape, str(draw.choice(["int8", "uint8"])))


def _conv_shapes(draw: Generator) -> tuple[list[int], list[int], dict[str, Any]]:
    rank, groups = int(draw.integers(1, 3)), int(draw.integers(1, 3))
    kernel = draw.integers(1, 4, rank)
    channels, filters = groups * int(draw.integers(1, 4)), groups * int(draw.integers(1, 4))
    attributes: dict[str, Any] = {"group": groups, "strides": draw.integers(1, 3, rank).tolist()}
    if draw.integers(3) == 0:
        attributes["auto_pad"] = str(draw.choice(["SAME_UPPER", "VALID"]))
    else:
        attributes["pads"] = draw.integers(0, 2, 2 * rank).tolist()
        attributes["dilations"] = draw.integers(1, 3, rank).tolist()
    if draw.integers(2):
        attributes["kernel_shape"] = kernel.tolist()
    return [2, channels, *draw.integers(6, 9, rank)], [filters, channels // groups, *kernel], attributes


def _conv_integer(draw: Generator) -> NodeCase:
    data, weight, attributes = _conv_shapes(draw)
    x, w = _numbers(draw, data, "uint8"), _quantised(draw, weight)
    operands = {
        "x": x,
        "w": w,
        "x_zero": _numbers(draw, (), "uint8") if draw.integers(2) else None,
        "w_zero": _numbers(draw, (), str(w.dtype)) if draw.integers(2) else None,
    }
    known = ("w", "w_zero") if draw.integers(2) else ()
    return NodeCase(operator="ConvInteger", operands=operands, attributes=attributes, known=known, by_runtime=True)


def _qlinear_conv(draw: Generator) -> NodeCase:
    data, weight, attributes = _conv_shapes(draw)
    x, w = _numbers(draw, data, "uint8"), _numbers(draw, weight, "int8")
    each = [weight[0]] if draw.integers(2) else []
    operands = {
        "x": x,
        "x_scale": np.float32(0.02),
        "x_zero": _numbers(draw, (), "uint8"),
        "w": w,
        "w_scale": draw.uniform(0.01, 0.03, each).astype(np.float32),
        "w_zero": np.zeros(each, np.int8),
        "y_scale": np.float32(draw.uniform(0.1, 0.5)),
        "y_zero": _numbers(draw, (), "uint8"),
        "b": _numbers(draw, [weight[0]], "int32") if draw.integers(2) else None,
    }
    known = ("w", "w_scale", "w_zero", "x_scale", "y_scale") if draw.integers(2) else ()
    return NodeCase(operator="QLinearConv", operands=operands, attributes=attributes, known=known, by_runtime=True)


def _qlinear_matmul(draw: Generator) -> NodeCase:
    rows, inner, columns = (int(size) for size in draw.integers(2, 7, 3))
    batch = draw.integers(1, 4, int(draw.integers(0, 3))).tolist()
    a, b = _quantised(draw, [*batch, rows, inner]), _quantised(draw, [*batch, inner, columns])
    each = [columns] if draw.integers(2) else []
    operands = {
        "a": a,
        "a_scale": np.float32(0.02),
        "a_zero": _numbers(draw, (), str(a.dtype)),
        "b": b,
        "b_scale": draw.uniform(0.01, 0.03, each).astype(np.float32),
        "b_zero": _numbers(draw, each, str(b.dtype)),
        "y_scale": np.float32(draw.uniform(0.05, 0.5)),
        "y_zero": _numbers(draw, (), str(a.dtype)),
    }
    return NodeCase(operator="QLinearMatMul", operands=operands, opset=21, outputs=1)


def _by_blocks(draw: Generator) -> NodeCase:
    rank, block = int(draw.integers(1, 4)), int(draw.integers(2, 5))
    shape = draw.integers(1, 4, rank)
    axis = int(draw.integers(rank))
    scales = shape.copy()
    shape[axis] *= block
    kind = str(draw.choice(["int8", "uint8", "int16", "uint16"]))
    scale = draw.uniform(0.1, 2, scales).astype(np.float32)
    zero = _numbers(draw, scales, kind)
    attributes = {"axis": axis, "block_size": block}
    quantise = bool(draw.integers(2))
    x = (draw.standard_normal(shape) * 30).astype(np.float32) if quantise else _numbers(draw, shape, kind)
    operands = {"x": x, "scale": scale, "zero": zero}
    operator = "QuantizeLinear" if quantise else "DequantizeLinear"
    return NodeCase(operator=operator, operands=operands, attributes=attributes)


def _det(draw: Generator) -> NodeCase:
    size = int(draw.integers(1, 7))
    x = _numbers(draw, [*draw.integers(1, 4, int(draw.integers(0, 3))), size, size], str(draw.choice(FLOATS[:2])))
    if draw.integers(3) == 0:
        x[..., 0] = 0
    if draw.integers(2):
        x.reshape(-1, size, size)[0] = np.roll(np.eye(size), 1, axis=0)
    # (ONNX's reference gives float64 for a single matrix.)
    wanted = np.asarray(np.linalg.det(x.astype(np.float64)), x.dtype)
    return NodeCase(operator="Det", operands={"x": x}, opset=int(draw.choice([11, 22])), wanted=wanted)


def _cum_prod(draw: Generator) -> NodeCase:
    rank = int(draw.integers(1, 4))
    shape = draw.integers(1, 9, rank)
    x = draw.uniform(0.5, 2, shape).astype(str(draw.choice(["float32", "float64", "int32", "int64"])))
    axis = np.asarray(draw.integers(-rank, rank), str(draw.choice(["int32", "int64"])))
    attributes = {"exclusive": int(draw.integers(2)), "reverse": int(draw.integers(2))}
    return NodeCase(
        operator="CumProd", operands={"x": x, "axis": axis}, attributes=attributes, known=("axis",), opset=26
    )


def _deform_conv(draw: Generator) -> NodeCase:
    kernel, strides, dilations = (draw.integers(1, 4, 2), draw.integers(1, 3, 2), draw.integers(1, 3, 2))
    pads, groups, offsets = draw.integers(0, 2, 4), int(draw.integers(1, 3)), int(draw.integers(1, 3))
    channels, filters = groups * offsets, groups * int(draw.integers(1, 3))
    image = (kernel - 1) * dilations + 2 + draw.integers(0, 3, 2)
    counts = (image + pads[:2] + pads[2:] - (kernel - 1) * dilations - 1) // strides + 1
    lead = [2, offsets * kernel.prod()]
    operands = {
        "x": _numbers(draw, [2, channels, *image], "float32"),
        "w": _numbers(draw, [filters, channels // groups, *kernel], "float32"),
        "offset": _numbers(draw, [lead[0], lead[1] * 2, *counts], "float32"),
        "b": _numbers(draw, [filters], "float32") if draw.integers(2) else None,
        "mask": _numbers(draw, [*lead, *counts], "float32") if draw.integers(2) else None,
    }
    attributes = {
        "strides": strides.tolist(),
        "dilations": dilations.tolist(),
        "pads": pads.tolist(),
        "group": groups,
        "offset_group": offsets,
    }
    return NodeCase(operator="DeformConv", operands=operands, attributes=attributes, opset=22)


def _normalization(draw: Generator) -> NodeCase:
    rank, layer = int(draw.integers(1, 5)), bool(draw.integers(2))
    shape, axis = draw.integers(1, 5, rank), int(draw.integers(-rank, rank))
    dtype = str(draw.choice(FLOATS))
    operands = {"x": _numbers(draw, shape, dtype), "scale": _numbers(draw, shape[axis % rank :], dtype)}
    if layer:
        operands["b"] = _numbers(draw, shape[axis % rank :], dtype) if draw.integers(2) else None
    operator = "LayerNormalization" if layer else "RMSNormalization"
    attributes = {"axis": axis, "epsilon": float(draw.choice([1e-5, 0.1]))}
    opset = int(draw.choice([17, 23])) if layer else 23
    return NodeCase(operator=operator, operands=operands, attributes=attributes, opset=opset)


def _floor_mod(draw: Generator) -> NodeCase:
    dtype = str(draw.choice(FLOATS))
    x, y = (np.asarray(draw.choice([-7, -2.5, -0.0, 0, 1.5, 3, 8, np.inf], [4, 5]), dtype) for _ in range(2))
    return NodeCase(operator="Mod", operands={"x": x, "y": np.where(y == 0, 2, y).astype(dtype)}, opset=13)


def _integer_power(draw: Generator) -> NodeCase:
    base, exponent = (str(draw.choice(["int32", "int64"])) for _ in range(2))
    operands = {"x": draw.integers(-5, 6, [3, 4]).astype(base), "n": draw.integers(0, 9, [4]).astype(exponent)}
    return NodeCase(operator="Pow", operands=operands, opset=15)


def _function(draw: Generator) -> NodeCase:
    operator = str(draw.choice(FUNCTIONS))
    attributes = {"alpha": float(draw.uniform(0.5, 2))} if operator in ("Celu", "Elu", "ThresholdedRelu") else {}
    x = _numbers(draw, [3, 5], str(draw.choice(FLOATS)))
    return NodeCase(operator=operator, operands={"x": x}, attributes=attributes, opset=23)


DRAWS: dict[str, Callable[[Generator], NodeCase]] = {
    name.removeprefix("_"): draw
    for name, draw in {
        "_by_blocks": _by_blocks,
        "_col2im": _col2im,
        "_conv_integer": _conv_integer,
        "_cum_prod": _cum_prod,
        "_deform_conv": _deform_conv,
        "_det": _det,
        "_dft": _dft,
        "_eye_like": _eye_like,
        "_floor_mod": _floor_mod,
        "_function": _function,
        "_integer_power": _integer_power,
        "_max_pool": _max_pool,
        "_max_unpool": _max_unpool,
        "_mel_weights": _mel_weights,
        "_normalization": _normalization,
        "_one_hot": _one_hot,
        "_qlinear_conv": _qlinear_conv,
        "_qlinear_matmul": _qlinear_matmul,
        "_reverse_sequence": _reverse_sequence,
        "_stft": _stft,
        "_tensor_scatter": _tensor_scatter,
        "_window": _window,
    }.items()
}
# Of an element: half precision's unit roundoff times a sum of a dozen terms.
TOLERANCE = {"float16": 4e-3, "float32": 3e-6, "float64": 1e-7}


def _tolerance(case: NodeCase) -> float:
    return max(TOLERANCE.get(str(value.dtype), 0.0) for value in (*case.feeds.values(), *case.expected()))


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("name", DRAWS)
def test_means_the_same_after_rewriting(name: str, seed: int) -> None:
    case = DRAWS[name](np.random.default_rng([seed, *map(ord, name)]))
    graph = imported_graph(case)
    assert not {node.op_type for node in graph.nodes} & REPLACED
    actual = rewritten_result(graph, case)
    assert_same(actual, case.expected(), tolerance=_tolerance(case), describe=str(case))


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAWS)
def test_means_the_same_when_built(name: str) -> None:
    """The kernels too, on one case of each operator."""
    case = DRAWS[name](np.random.default_rng([1, *map(ord, name)]))
    mod, params = relay.frontend.from_onnx(case.model, constants=case.constants)
    machine = relay.build(mod, "llvm", params=params).vm(tvm.cpu())
    given = [tvm.runtime.tensor(value) for key, value in case.feeds.items() if key not in case.constants]
    result = machine["main"](*given)
    actual = [result] if isinstance(result, tvm.runtime.Tensor) else list(result)
    expected = case.expected()
    assert_same([value.numpy() for value in actual], expected, tolerance=_tolerance(case), describe=str(case))


REFUSED: dict[str, tuple[NodeCase, str]] = {
    "unknown axis": (
        NodeCase(operator="DFT", operands={"x": np.ones((2, 4, 1), "f"), "n": None, "axis": np.int64(0)}, opset=20),
        "needs the value of 'axis'",
    ),
    "matrix too big": (
        NodeCase(operator="DFT", operands={"x": np.ones((1, 9000, 1), "f")}, attributes={"axis": 1}, opset=17),
        "MiB",
    ),
    "no step": (
        NodeCase(operator="STFT", operands={"x": np.ones((1, 9, 1), "f"), "s": np.int64(0)}, known=("s",), opset=17),
        "0 apart",
    ),
    "window of unknown size": (NodeCase(operator="HannWindow", operands={"size": np.int64(5)}), "needs the value"),
    "unpooled to less": (
        NodeCase(
            operator="MaxUnpool",
            operands={
                "x": np.ones((1, 1, 2), "f"),
                "i": np.zeros((1, 1, 2), np.int64),
                "shape": np.asarray([1, 1, 3]),
            },
            attributes={"kernel_shape": [2], "strides": [2]},
            known=("shape",),
        ),
        "inferred",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_is_refused_by_name(name: str) -> None:
    case, reason = REFUSED[name]
    with pytest.raises(ModelError, match=reason) as error:
        relay.frontend.from_onnx(case.model, constants=case.constants)
    assert case.operator in str(error.value)
