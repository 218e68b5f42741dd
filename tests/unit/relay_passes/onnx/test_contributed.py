"""Quantised operators of com.microsoft: what they are written as, run by ONNX Runtime, beside its own kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import tvm
from onnx import helper

from tests.unit.relay_passes.onnx.single_nodes import bare_model_of, floats
from tvm_ext import relay
from tvm_ext.errors import ModelError
from tvm_ext.relay_passes.onnx.graph import model_from_graph
from tvm_ext.relay_passes.onnx.import_model import checked_graph, clean_graph, expand_unsupported
from tvm_ext.relay_passes.onnx.operators.tables import CONTRIBUTED

_RNG = np.random.default_rng(2)
_OPSET = 17
"""What ONNX Runtime's quantisers write by default lies between 11 and 21."""


def _codes(*shape: int, dtype: Any = np.uint8) -> Any:
    limits = np.iinfo(dtype)
    return _RNG.integers(limits.min, limits.max, shape, dtype, endpoint=True)


def _weights(*shape: int, dtype: Any = np.uint8) -> Any:
    """Of 7 bits: ONNX Runtime's products of bytes saturate on processors without VNNI, where pairs pass 16 bits."""
    return _codes(*shape, dtype=dtype) // 2 + (64 if dtype == np.uint8 else 0)


def _float(value: float) -> Any:
    return np.float32(value)


def _pair(scale: float, zero: int, dtype: Any = np.uint8) -> list[Any]:
    return [_float(scale), dtype(zero)]


def _untyped(op_type: str, operands: Sequence[Any], outputs: int = 1, **attributes: Any) -> tuple[onnx.ModelProto, Any]:
    """A model of one node, and its inputs: the first tensor, conditions and caches; other operands are constants."""
    names = [f"t{place}" if operand is not None else "" for place, operand in enumerate(operands)]
    given = {name: np.asarray(value) for name, value in zip(names, operands, strict=True) if name}
    first = "t2" if op_type == "QLinearConcat" else "t0"
    inputs = {name: value for name, value in given.items() if name == first or value.dtype == bool or value.ndim == 5}
    constants = {name: value for name, value in given.items() if name not in inputs}
    results = [f"y{place}" for place in range(outputs)]
    node = helper.make_node(op_type, names, results, "node", domain="com.microsoft", **attributes)
    model = bare_model_of(node, inputs, constants, _OPSET)
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    return model, inputs


def _model(op_type: str, operands: Sequence[Any], outputs: int = 1, **attributes: Any) -> tuple[onnx.ModelProto, Any]:
    """`_untyped` with the types of outputs that ONNX Runtime finds."""
    model, inputs = _untyped(op_type, operands, outputs, **attributes)
    for declared, value in zip(model.graph.output, _by_onnxruntime(model, inputs), strict=True):
        code = helper.np_dtype_to_tensor_dtype(value.dtype)
        declared.CopyFrom(helper.make_tensor_value_info(declared.name, code, value.shape))
    return model, inputs


def _expanded(model: onnx.ModelProto) -> onnx.ModelProto:
    graph = clean_graph(expand_unsupported(checked_graph(model), model))
    result = model_from_graph(graph, lambda _: True)
    result.ir_version = 10
    return result


def _by_onnxruntime(model: onnx.ModelProto, inputs: Mapping[str, Any]) -> list[Any]:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return list(session.run(None, dict(inputs)))


def _assert_within_a_step(got: Sequence[Any], wanted: Sequence[Any], tolerance: float = 1e-5) -> None:
    for mine, theirs in zip(got, wanted, strict=True):
        assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype)
        if theirs.dtype.kind == "f":
            np.testing.assert_allclose(mine, theirs, rtol=tolerance, atol=tolerance * np.abs(theirs).max())
        else:
            assert len(np.unique(theirs)) > 1
            assert np.abs(mine.astype(np.int32) - theirs.astype(np.int32)).max() <= 1


_A, _B = _codes(2, 6, 5), _codes(6, 5)
_IMAGE = _codes(1, 4, 6, 6)
_SIGNED = _codes(1, 4, 6, 6, dtype=np.int8)
_INT8 = np.int8
_SMALL = _pair(0.3, 5, _INT8)
_PRODUCT_SCALES = [_float(0.02), np.uint8(120)]
_SIZES = {"N": 4, "K": 8, "block_size": 32}
_BIAS = np.arange(7, dtype=np.int32)
_ZEROS = np.arange(-3, 4).astype(_INT8)
_PER_COLUMN = np.linspace(0.01, 0.03, 7, dtype=np.float32)
_QUANTISED_CASES: dict[str, tuple[str, list[Any], dict[str, Any]]] = {
    "sum": ("QLinearAdd", [_A, *_pair(0.1, 7), _B, *_pair(0.2, 130), *_pair(0.25, 90)], {}),
    "sum of int8": ("QLinearAdd", [_SIGNED, *_SMALL, _SIGNED, *_pair(0.2, -3, _INT8), *_SMALL], {}),
    "product": ("QLinearMul", [_A, *_pair(0.1, 100), _B, *_pair(0.2, 130), *_pair(2.0, 128)], {}),
    "sigmoid": ("QLinearSigmoid", [_A, *_pair(0.05, 128), *_pair(1 / 256, 0)], {}),
    "leaky": ("QLinearLeakyRelu", [_A, *_pair(0.05, 128), *_pair(0.04, 100)], {"alpha": 0.2}),
    "global mean": ("QLinearGlobalAveragePool", [_SIGNED, *_pair(0.1, 3, _INT8), *_pair(0.02, 1, _INT8)], {}),
    "means": (
        "QLinearAveragePool",
        [_IMAGE, *_pair(0.1, 3), *_pair(0.06, 1)],
        {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]},
    ),
    "softmax": ("QLinearSoftmax", [_A, *_pair(0.05, 128), *_pair(1 / 256, 0)], {"axis": -1, "opset": 13}),
    "choice": ("QLinearWhere", [_B > 100, _B, *_pair(0.1, 7), _codes(6, 5), *_pair(0.2, 130), *_pair(0.25, 90)], {}),
    "join": (
        "QLinearConcat",
        [*_pair(0.25, 90), _A, *_pair(0.1, 7), _codes(2, 1, 5), *_pair(0.25, 90), _codes(2, 3, 5), *_pair(0.3, 80)],
        {"axis": 1},
    ),
    "gemm": ("QGemm", [_B, *_PRODUCT_SCALES, _weights(5, 7), *_pair(0.01, 128), _BIAS, *_pair(0.1, 9)], {}),
    "gemm by columns": (
        "QGemm",
        [_codes(5, 6), *_PRODUCT_SCALES, _weights(7, 5, dtype=_INT8), _PER_COLUMN, _ZEROS, None, *_pair(0.1, 9)],
        {"transA": 1, "transB": 1, "alpha": 0.5},
    ),
    "gemm of floats": ("QGemm", [_B, *_PRODUCT_SCALES, _weights(5, 7), _float(0.01), np.uint8(128)], {}),
    "quantised": ("QuantizeLinear", [floats(3, 4), *_pair(0.02, 100)], {}),
    "dequantised": ("DequantizeLinear", [_codes(3, 4), *_pair(0.02, 100)], {}),
}
"""Name -> operator, operands, attributes."""


@pytest.mark.parametrize("name", list(_QUANTISED_CASES))
def test_it_is_right_to_a_step(name: str) -> None:
    op_type, operands, attributes = _QUANTISED_CASES[name]
    model, inputs = _model(op_type, operands, **attributes)
    _assert_within_a_step(_by_onnxruntime(_expanded(model), inputs), _by_onnxruntime(model, inputs))


@pytest.mark.parametrize("zero", [None, np.arange(7).astype(np.uint8)], ids=["symmetric", "by columns"])
@pytest.mark.parametrize("bias", [None, floats(7)], ids=["plain", "bias"])
def test_products_that_give_floats(zero: Any, bias: Any) -> None:
    weights = _weights(5, 7)
    dynamic = _model("DynamicQuantizeMatMul", [floats(2, 6, 5), weights, _PER_COLUMN, zero, bias])
    static = _model("MatMulIntegerToFloat", [_A, weights, _float(0.1), _PER_COLUMN, np.uint8(9), zero, bias])
    for model, inputs in (dynamic, static):
        _assert_within_a_step(_by_onnxruntime(_expanded(model), inputs), _by_onnxruntime(model, inputs))


@pytest.mark.parametrize(("bits", "zero"), [(2, ""), (4, ""), (8, ""), (4, "codes"), (8, "codes"), (4, "floats")])
def test_weights_of_few_bits_become_floats(bits: int, zero: str) -> None:
    rows, depth, block = 12, 80, 32  # the last block is half full
    blocks = 3
    packed = _codes(rows, blocks, block * bits // 8)
    scales = floats(rows * blocks) * np.float32(0.1)
    zeros = {"codes": _codes(rows * -(-blocks * bits // 8)), "floats": floats(rows * blocks)}.get(zero)
    sizes = {"N": rows, "K": depth, "block_size": block, "bits": bits}
    model, inputs = _model("MatMulNBits", [floats(3, depth), packed, scales, zeros], **sizes)
    _assert_within_a_step(_by_onnxruntime(_expanded(model), inputs), _by_onnxruntime(model, inputs))


@pytest.mark.parametrize(
    ("mask", "past", "unidirectional"),
    [
        (None, 0, 0),
        (np.array([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]], np.int32), 0, 0),
        (np.array([3, 5], np.int32), 0, 0),
        (None, 0, 1),
        (None, 3, 1),
    ],
    ids=["plain", "keys", "lengths", "causal", "cached"],
)
def test_attention(mask: Any, past: int, unidirectional: int) -> None:
    heads, features = 2, 4
    width = heads * features
    joint = [
        _codes(2, 5, width),
        _weights(width, 3 * width, dtype=_INT8),
        floats(3 * width),
        _float(0.02),
        _float(0.01),
    ]
    cache = floats(2, 2, heads, past, features) if past else None
    operands = [*joint, mask, np.uint8(128), _INT8(0), cache]
    model, inputs = _model("QAttention", operands, 2 if past else 1, num_heads=heads, unidirectional=unidirectional)
    _assert_within_a_step(_by_onnxruntime(_expanded(model), inputs), _by_onnxruntime(model, inputs), 1e-4)


def test_attention_of_bytes_is_two_kernels() -> None:
    """The joint product is of bytes, and what follows one kernel of attention."""
    heads, width = 2, 32
    joint = [_codes(1, 24, width), _weights(width, 3 * width, dtype=_INT8), floats(3 * width), _float(0.02)]
    operands = [*joint, _float(0.01), None, np.uint8(128), _INT8(0)]
    model, inputs = _model("QAttention", operands, num_heads=heads)
    mod, params = relay.frontend.from_onnx(model)
    lib = relay.build(mod, "llvm", params=params)
    kernels = [kernel for kernel in lib.report.operators if kernel.choice.flops]
    assert [kernel.choice.reason.split()[0] for kernel in kernels] == ["matmul", "attention"]
    got = lib.vm(tvm.cpu())["main"](*map(tvm.runtime.tensor, inputs.values()))
    _assert_within_a_step([got.numpy()], _by_onnxruntime(model, inputs), 1e-4)


def test_a_layer_of_floats_is_as_near_as_eight_bits_allow() -> None:
    """ONNX Runtime rounds each step's operand to 8 bits: half a step of 1 / 127 of its range."""
    steps, size, hidden = 4, 6, 5
    weights = [_weights(1, extent, 4 * hidden, dtype=_INT8) for extent in (size, hidden)]
    parameters = [_float(0.01).reshape(1), np.zeros(1, _INT8)]
    operands = [floats(steps, 1, size), *weights, None, None, None, None, None, *parameters, *parameters]
    model, inputs = _model("DynamicQuantizeLSTM", operands, 3, hidden_size=hidden)
    for mine, theirs in zip(_by_onnxruntime(_expanded(model), inputs), _by_onnxruntime(model, inputs), strict=True):
        assert mine.shape == theirs.shape
        assert np.linalg.norm(mine - theirs) <= 2e-2 * np.linalg.norm(theirs)


@pytest.mark.parametrize(
    ("op_type", "operands", "attributes", "match"),
    [
        (
            "QLinearGlobalAveragePool",
            [_SIGNED, *_pair(0.1, 3, _INT8), *_pair(0.02, 1, _INT8)],
            {"channels_last": 1},
            "channels last",
        ),
        ("QLinearSoftmax", [_A, *_pair(0.05, 128), *_pair(1 / 256, 0)], {"axis": 1, "opset": 12}, "operator set 13"),
        (
            "MatMulNBits",
            [floats(3, 8), _codes(4, 1, 16), floats(4)],
            {"N": 4, "K": 8, "block_size": 32, "bits": 3},
            "3 bits",
        ),
        ("MatMulNBits", [floats(3, 8), _codes(5, 1, 16), floats(4)], _SIZES, "do not fit"),
        (
            "MatMulNBits",
            [floats(3, 8), _codes(4, 1, 16), floats(4), _codes(4, 1), np.array([0, 0, 0, 0, 0, 0, 0, -1], np.int32)],
            _SIZES,
            "name one of 1 blocks",
        ),
        ("QAttention", [_codes(2, 5, 8), _codes(8, 24), floats(24), _float(1), _float(1)], {"num_heads": 5}, "5 heads"),
    ],
    ids=["channels last", "older softmax", "odd bits", "sizes", "groups", "heads"],
)
def test_a_form_without_a_rule_is_refused_by_name(
    op_type: str, operands: list[Any], attributes: Any, match: str
) -> None:
    model, _ = _untyped(op_type, operands, **attributes)
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info("y0", onnx.TensorProto.FLOAT, None))
    with pytest.raises(ModelError, match=f"(?s){op_type} node 'node'.*{match}"):
        expand_unsupported(checked_graph(model), model)


def test_every_rule_is_tried() -> None:
    tried = {case[0] for case in _QUANTISED_CASES.values()}
    others = {"DynamicQuantizeMatMul", "MatMulIntegerToFloat", "MatMulNBits", "QAttention", "DynamicQuantizeLSTM"}
    assert tried | others == set(CONTRIBUTED)


def test_a_chain_is_built_and_right_to_a_step() -> None:
    """Inference knows no type behind a node of com.microsoft, and there are several in a row."""
    shape, scales = (1, 4, 6, 6), _pair(0.1, 128)
    names = ["scale", "zero"]
    nodes = [
        helper.make_node("QLinearAdd", ["x", *names, "x", *names, *names], ["a"], "a", domain="com.microsoft"),
        helper.make_node("QLinearSigmoid", ["a", *names, *names], ["b"], "b", domain="com.microsoft"),
        helper.make_node(
            "QLinearConcat", [*names, "a", *names, "b", *names], ["y"], "c", domain="com.microsoft", axis=1
        ),
    ]
    model = bare_model_of(nodes[0], {"x": _codes(*shape)}, dict(zip(names, scales, strict=True)), _OPSET)
    del model.graph.node[:], model.graph.output[:]
    model.graph.node.extend(nodes)
    model.graph.output.append(helper.make_tensor_value_info("y", onnx.TensorProto.UINT8, (1, 8, 6, 6)))
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    x = _codes(*shape)
    mod, params = relay.frontend.from_onnx(model)
    result = relay.build(mod, "llvm", params=params).vm(tvm.cpu())["main"](tvm.runtime.tensor(x))
    _assert_within_a_step([result.numpy()], _by_onnxruntime(model, {"x": x}))
