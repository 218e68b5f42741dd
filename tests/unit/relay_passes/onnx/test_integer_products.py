"""Models as ONNX Runtime's quantisers write them ("QDQ"), beside ONNX Runtime, to one step of their results."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from tests.support.dot_rows import row_of, use_models_of_missing_instructions
from tvm_ext import relay
from tvm_ext._tvm import Call, nodes_in
from tvm_ext.analysis.relax_values import dtype_of, operator_name
from tvm_ext.devices.device_db import lookup
from tvm_ext.errors import ModelError
from tvm_ext.relay_passes.narrow_products import NarrowProducts

OPSET = 17


class Writer:
    """Nodes and constants of a model whose input is ``x``."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.constants: list[Any] = []

    def constant(self, value: Any) -> str:
        name = f"c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    def add(self, operator: str, *inputs: str, **attributes: Any) -> str:
        out = f"t{len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, inputs, [out], out, **attributes))
        return out

    def through_bytes(self, x: str, scale: float, zero: Any) -> str:
        operands = [self.constant(np.float32(scale)), self.constant(zero)]
        return self.add("DequantizeLinear", self.add("QuantizeLinear", x, *operands), *operands)

    def dequantised(self, codes: Any, scale: Any, axis: int) -> str:
        operands = [self.constant(scale), self.constant(np.zeros(scale.shape, codes.dtype))]
        return self.add("DequantizeLinear", self.constant(codes), *operands, axis=axis)

    def model(self, shape: tuple[int, ...], out: str) -> onnx.ModelProto:
        graph = helper.make_graph(
            self.nodes,
            "quantised",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
            [helper.make_tensor_value_info(out, TensorProto.FLOAT, None)],
            self.constants,
        )
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=8)


def run_both(model: onnx.ModelProto, x: Any, **options: Any) -> tuple[Any, Any]:
    """Our result and ONNX Runtime's, which computes node by node: its own fusion would round otherwise."""
    settings = onnxruntime.SessionOptions()
    settings.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), settings)
    module, params = relay.frontend.from_onnx(model)
    lib = relay.build(module, "llvm", params=params, **options)
    ours = relay.GraphModule(lib["default"](relay.tvm.cpu()))
    ours.run(x=x)
    return ours.get_output(0).numpy(), session.run(None, {"x": x})[0]


@pytest.mark.sampled(every=7)
@pytest.mark.parametrize("kind", ["uint8", "int8"])
@pytest.mark.parametrize("zero", ["lowest", "highest", "middle"])
@pytest.mark.parametrize(
    ("channels", "filters", "taps", "stride", "group"),
    [(3, 16, 3, 2, 1), (16, 32, 3, 1, 1), (32, 16, 1, 1, 1), (24, 40, 1, 1, 1), (5, 7, 3, 1, 1), (16, 16, 3, 1, 16)],
)
def test_convolutions(
    kind: str, zero: str, channels: int, filters: int, taps: int, stride: int, group: int, monkeypatch: Any
) -> None:
    """Padding stands for zero points; what is not a multiple of a block or a group is right, too."""
    use_models_of_missing_instructions(monkeypatch)
    rng = np.random.default_rng([channels, filters, taps])
    limits = np.iinfo(kind)
    point = {"lowest": limits.min, "highest": limits.max, "middle": (limits.min + limits.max) // 2}[zero]
    first, second = np.array(point, kind), np.array(limits.max // 2, kind)
    writer = Writer()
    x = writer.through_bytes("x", 0.02, first)
    weight = rng.integers(-128, 128, (filters, channels // group, taps, taps)).astype("int8")
    scale = rng.uniform(0.001, 0.002, filters).astype("float32")
    bias = rng.integers(-1000, 1000, filters).astype("int32")
    operands = [writer.dequantised(weight, scale, 0), writer.dequantised(bias, np.float32(0.02) * scale, 0)]
    pads, strides = [taps // 2] * 4, [stride] * 2
    y = writer.add("Conv", x, *operands, pads=pads, strides=strides, group=group, kernel_shape=[taps] * 2)
    step = 0.1
    y = writer.through_bytes(writer.add("Relu", y) if zero == "lowest" else y, step, second)
    model = writer.model((1, channels, 9, 11), y)
    data = rng.uniform(-4, 4, (1, channels, 9, 11)).astype("float32")
    ours, runtime = run_both(model, data)
    assert np.abs(ours - runtime).max() <= step * 1.001
    assert (ours == runtime).mean() > 0.99


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("depth", [1, 2, 3, 4, 5, 6, 7, 8, 9, 64])
@pytest.mark.parametrize("kind", ["uint8", "int8"])
def test_products(depth: int, kind: str, monkeypatch: Any) -> None:
    use_models_of_missing_instructions(monkeypatch)
    rng = np.random.default_rng(depth)
    writer = Writer()
    x = writer.through_bytes("x", 0.03, np.array(100, kind))
    weight = rng.integers(-128, 128, (depth, 21)).astype("int8")
    scale = rng.uniform(0.001, 0.002, 21).astype("float32")
    y = writer.add("MatMul", x, writer.dequantised(weight, scale, 1))
    y = writer.through_bytes(
        writer.add("Add", y, writer.constant(rng.standard_normal(21).astype("float32"))), 0.05, np.array(3, kind)
    )
    model = writer.model((6, depth), y)
    ours, runtime = run_both(model, rng.uniform(-4, 4, (6, depth)).astype("float32"))
    assert np.abs(ours - runtime).max() <= 0.05 * 1.001


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("kinds", [("uint8", "uint8"), ("int8", "int8"), ("uint8", "int8"), ("int8", "uint8")])
@pytest.mark.parametrize(("rows", "depth"), [(32, 16), (19, 7), (1, 4), (48, 33)])
@pytest.mark.parametrize("in_bytes", [False, True])
def test_products_of_two_that_a_run_computes(
    kinds: tuple[str, str], rows: int, depth: int, in_bytes: bool, monkeypatch: Any
) -> None:
    """Heads of an attention by their transpose, with and without whole groups and registers."""
    use_models_of_missing_instructions(monkeypatch)
    writer, points = Writer(), {"uint8": 130, "int8": 0 if rows == 32 else -3}
    turned = writer.add("Transpose", "x", perm=[0, 2, 1])
    sides = [
        writer.through_bytes(name, scale, np.array(points[kind], kind))
        for name, scale, kind in zip(("x", turned), (0.03, 0.04), kinds, strict=True)
    ]
    y = writer.add("MatMul", *sides)
    model = writer.model((3, rows, depth), writer.through_bytes(y, 0.5, np.array(3, "int8")) if in_bytes else y)
    data = np.random.default_rng([rows, depth]).uniform(-4, 4, (3, rows, depth)).astype("float32")
    ours, runtime = run_both(model, data)
    assert np.abs(ours - runtime).max() <= (0.5005 if in_bytes else 1e-3)


def test_heads_are_multiplied_by_the_instruction(monkeypatch: Any) -> None:
    use_models_of_missing_instructions(monkeypatch)
    writer = Writer()
    sides = [writer.through_bytes(name, 0.03, np.uint8(130)) for name in ("x", "x")]
    model = writer.model((2, 16, 16), writer.add("MatMul", *sides))
    mod = relay.bind_params(*relay.frontend.from_onnx(model))
    device = row_of("cpu-epyc-zen5")
    text = str(NarrowProducts(device)(mod).script())
    assert "by_groups" in text
    assert "R.matmul" not in text


def _bytes_model(operator: str, kind: str) -> tuple[onnx.ModelProto, tuple[int, ...]]:
    writer, rng = Writer(), np.random.default_rng(3)
    shape = (1, 5, 9, 11) if operator == "Conv" else (3, 12, 12)
    x = writer.through_bytes("x", 0.03, np.array(100 if kind == "int8" else 0, kind))
    if operator == "heads":
        y = writer.add("MatMul", x, writer.through_bytes("x", 0.04, np.array(17, kind)))
    else:
        weight = rng.integers(-128, 128, (7, 5, 3, 3) if operator == "Conv" else (12, 21)).astype("int8")
        scale = rng.uniform(0.001, 0.002, 7 if operator == "Conv" else 21).astype("float32")
        given = writer.dequantised(weight, scale, 0 if operator == "Conv" else 1)
        y = writer.add(operator, x, given, **({"pads": [1, 0, 2, 1], "strides": [2, 1]} if operator == "Conv" else {}))
    return writer.model(shape, writer.through_bytes(y, 0.1, np.array(3, kind))), shape


@pytest.mark.parametrize(("operator", "kind"), [("Conv", "uint8"), ("MatMul", "int8"), ("heads", "uint8")])
def test_matrix_units_take_signed_bytes(operator: str, kind: str) -> None:
    model, shape = _bytes_model(operator, kind)
    mod = relay.bind_params(*relay.frontend.from_onnx(model))
    data = np.random.default_rng(0).uniform(-4, 4, shape).astype("float32")
    results = []
    for each in (mod, NarrowProducts(lookup("amd-mi300x"))(mod)):
        ours = relay.GraphModule(relay.build(each, "llvm", enable_roller=False)["default"](relay.tvm.cpu()))
        ours.run(x=data)
        results.append(ours.get_output(0).numpy())
        products = [call for call in nodes_in(each, Call) if operator_name(call) in ("relax.matmul", "relax.nn.conv2d")]
        types = {dtype_of(argument) for argument in products[0].args}
        assert types == ({"int32"} if each is mod else {"int8"})
    np.testing.assert_array_equal(*results)


def test_a_residual_block_stays_in_bytes(monkeypatch: Any) -> None:
    """Two convolutions and the sum of a branch: one kernel each, and one for the input."""
    use_models_of_missing_instructions(monkeypatch)
    rng = np.random.default_rng(5)
    writer, zero = Writer(), np.array(0, "uint8")
    x = writer.through_bytes("x", 0.02, zero)
    y = x
    for last in (False, True):
        weight = rng.integers(-128, 128, (16, 16, 3, 3)).astype("int8")
        scale = np.full(16, 0.001, "float32")
        y = writer.add("Conv", y, writer.dequantised(weight, scale, 0), pads=[1] * 4, kernel_shape=[3, 3])
        y = writer.through_bytes(y if last else writer.add("Relu", y), 0.02, np.array(128 if last else 0, "uint8"))
    y = writer.through_bytes(writer.add("Relu", writer.add("Add", x, y)), 0.04, zero)
    model = writer.model((1, 16, 12, 12), y)
    ours, runtime = run_both(model, rng.uniform(0, 5, (1, 16, 12, 12)).astype("float32"))
    assert np.abs(ours - runtime).max() <= 0.04 * 1.001


@pytest.mark.parametrize(
    ("scale", "zero", "axis", "match"),
    [
        (np.float32(0.5), np.zeros(3, "int8"), 0, "has 3 zero points for 1 scales"),
        (np.full(5, 0.5, "float32"), np.zeros(5, "int8"), 1, r"has 5 scales along axis 1 of shape \[6, 8\]"),
        (np.full(8, 0.5, "float32"), np.zeros(8, "int8"), 7, r"has 8 scales along axis 7 of shape \[6, 8\]"),
        (np.full(6, 0.5, "float32"), np.zeros(6, "int8"), -3, r"has 6 scales along axis -3 of shape \[6, 8\]"),
    ],
)
@pytest.mark.parametrize("quantises", [False, True])
def test_scales_that_do_not_fit_are_refused_by_the_node(
    scale: Any, zero: Any, axis: int, match: str, quantises: bool
) -> None:
    """Of weights that meet bytes, and of a tensor that is quantised."""
    writer = Writer()
    good, middle = writer.constant(np.float32(0.5)), writer.constant(np.uint8(3))
    pair = writer.constant(scale), writer.constant(zero)
    if quantises:
        y = writer.add("DequantizeLinear", writer.add("QuantizeLinear", "x", *pair, axis=axis), good)
    else:
        x = writer.add("DequantizeLinear", writer.add("QuantizeLinear", "x", good, middle), good, middle)
        weight = writer.constant(np.ones((6, 8), "int8"))
        y = writer.add("MatMul", x, writer.add("DequantizeLinear", weight, *pair, axis=axis))
    with pytest.raises(ModelError, match=f"(?s)uantizeLinear node .*{match}"):
        relay.frontend.from_onnx(writer.model((6, 8) if quantises else (4, 6), y))


@pytest.mark.parametrize(
    ("place", "operand", "match"),
    [
        (4, np.full(5, 0.5, "float32"), r"5 scales of shape \[2, 4, 1, 1\]"),
        (5, np.zeros(5, "uint8"), "5 zero points for 1 scales"),
        (2, np.int8(3), "types UINT8 and INT8"),
        (6, np.full(2, 0.5, "float32"), r"2 scales of shape \[\]"),
    ],
    ids=["weights", "zero points", "types", "result"],
)
def test_operands_of_a_convolution_that_do_not_fit_are_refused(place: int, operand: Any, match: str) -> None:
    writer = Writer()
    good, zero = writer.constant(np.float32(0.5)), writer.constant(np.uint8(3))
    weight = writer.constant(np.ones((2, 4, 1, 1), "uint8"))
    operands = [writer.add("QuantizeLinear", "x", good, zero), good, zero, weight, good, zero, good, zero]
    operands[place] = writer.constant(operand)
    y = writer.add("DequantizeLinear", writer.add("QLinearConv", *operands), good, zero)
    with pytest.raises(ModelError, match=f"(?s)QLinearConv node .*{match}"):
        relay.frontend.from_onnx(writer.model((1, 4, 5, 6), y))


@pytest.mark.parametrize("scale", [0.0, -0.5, np.nan, np.inf])
@pytest.mark.parametrize("operator", ["QuantizeLinear", "DequantizeLinear", "QLinearConv", "QLinearAdd", "QGemm"])
def test_scales_that_make_no_sense_are_refused_by_the_node(operator: str, scale: float) -> None:
    writer = Writer()
    good, bad, zero = (writer.constant(value) for value in (np.float32(0.5), np.float32(scale), np.uint8(3)))
    x = writer.add("QuantizeLinear", "x", good, zero)
    if operator == "QuantizeLinear":
        y = writer.add(operator, "x", bad, zero)
    elif operator == "DequantizeLinear":
        y = writer.add(operator, x, bad, zero)
    elif operator == "QLinearConv":
        weight = writer.constant(np.ones((2, 4, 1, 1), "uint8"))
        y = writer.add(operator, x, good, zero, weight, good, zero, bad, zero)
    elif operator == "QLinearAdd":
        y = writer.add(operator, x, good, zero, x, good, zero, bad, zero, domain="com.microsoft")
    else:
        flat = writer.add("Reshape", x, writer.constant(np.array([4, -1], "int64")))
        weight = writer.constant(np.ones((30, 2), "uint8"))
        y = writer.add(operator, flat, good, zero, weight, good, zero, "", bad, zero, domain="com.microsoft")
    name = y
    if operator != "DequantizeLinear":
        y = writer.add("DequantizeLinear", y, good, zero)
    model = writer.model((1, 4, 5, 6), y)
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    if operator == "DequantizeLinear" and scale == 0:  # a channel of weights without any: zeros
        relay.frontend.from_onnx(model)
        return
    with pytest.raises(ModelError, match=f"{operator} node '{name}'.*has a scale of"):
        relay.frontend.from_onnx(model)


def test_a_zero_point_of_another_type_is_refused() -> None:
    writer = Writer()
    x = writer.add("QuantizeLinear", "x", writer.constant(np.float32(0.5)), writer.constant(np.uint8(3)))
    y = writer.add("DequantizeLinear", x, writer.constant(np.float32(0.5)), writer.constant(np.int8(-3)))
    with pytest.raises(ModelError, match=f"node '{y}'.*UINT8 and INT8"):
        relay.frontend.from_onnx(writer.model((1, 4, 5, 6), y))
