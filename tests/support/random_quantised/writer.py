"""ONNX models of quantised layers: as under test, and the same layer between DequantizeLinear and QuantizeLinear."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from ..onnx_evaluator import by_onnx_runtime
from ..random_operators.record import Array

OPSET, IR_VERSION = 17, 8
MICROSOFT = "com.microsoft"
FORMS = ("qdq", "operators", "integers")


@dataclass(frozen=True, kw_only=True, slots=True)
class Codes:
    """A tensor of bytes: ``(value - zero) * scale``, both along ``axis`` where they have several elements.

    ``value`` is None of what is computed.
    """

    name: str
    shape: tuple[int, ...]
    scale: Array
    zero: Array
    axis: int = 0
    value: Array | None = None

    @property
    def dtype(self) -> str:
        return str(self.zero.dtype)

    def like(self, shape: Sequence[int]) -> Codes:
        """Another tensor of the same scale, not made yet."""
        return replace(self, name="", shape=tuple(shape), value=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """An operator over ``operands``, its ``plain`` inputs behind (shapes and such), and an activation.

    ``bias`` are int32 in units of the first two operands' scales. ``exact``: what moves bytes leaves them as they are.
    """

    operator: str
    operands: tuple[Codes, ...]
    plain: tuple[Array | None, ...] = ()
    bias: Array | None = None
    attributes: Mapping[str, Any]
    activation: str = ""
    exact: bool = False
    form: str = "qdq"


class Writer:
    """Collects nodes and constants."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, onnx.TensorProto] = {}

    def constant(self, value: Any, name: str = "") -> str:
        name = name or f"c{len(self.constants)}"
        self.constants[name] = numpy_helper.from_array(np.asarray(value), name)
        return name

    def add(self, operator: str, *inputs: str, out: str = "", **attributes: Any) -> str:
        out = out or f"t{len(self.nodes)}"
        node = helper.make_node(operator, inputs, [out], f"node_{out}", **attributes)
        self.nodes.append(node)
        return out

    def parameters(self, codes: Codes) -> list[str]:
        return [self.constant(codes.scale), self.constant(codes.zero)]

    def held(self, codes: Codes) -> str:
        if codes.value is not None and codes.name not in self.constants:
            self.constant(codes.value, codes.name)
        return codes.name

    def real(self, codes: Codes) -> str:
        return self.add("DequantizeLinear", self.held(codes), *self.parameters(codes), axis=codes.axis)

    def model(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> onnx.ModelProto:
        graph = helper.make_graph(
            self.nodes,
            "quantised",
            [
                helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
                for name, value in inputs.items()
            ],
            [onnx.ValueInfoProto(name=name) for name in outputs],
            list(self.constants.values()),
        )
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(MICROSOFT, 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION)
        del model.graph.output[:]
        types = _types(model, outputs)
        model.graph.output.extend(helper.make_tensor_value_info(name, types[name], None) for name in outputs)
        return model


def _types(model: onnx.ModelProto, outputs: Sequence[str]) -> dict[str, int]:
    """Element types of ``outputs``: of the zero point that made them, of the operand that was moved, or floats."""
    makers = {node.output[0]: node for node in model.graph.node}
    constants = {item.name: item.data_type for item in model.graph.initializer}
    given = {item.name: item.type.tensor_type.elem_type for item in model.graph.input} | constants

    def type_of(name: str) -> int:
        if name in given:
            return int(given[name])
        node = makers[name]
        if node.op_type == "QLinearConcat":
            return int(constants[node.input[1]])
        if node.op_type.startswith(("QLinear", "QGemm", "QuantizeLinear")):
            return int(constants[node.input[7 if node.op_type == "QLinearConv" else -1]])
        if node.op_type in ("ConvInteger", "MatMulInteger"):
            return int(TensorProto.INT32)
        moves = ("MaxPool", "Reshape", "Transpose", "Slice", "Squeeze", "Unsqueeze", "Flatten")
        return type_of(node.input[0]) if node.op_type in moves else int(TensorProto.FLOAT)

    return {name: type_of(name) for name in outputs}


def real_result(writer: Writer, layer: Layer) -> str:
    """The layer in float32, before it is quantised."""
    inputs = [writer.real(codes) for codes in layer.operands]
    inputs += ["" if value is None else writer.constant(value) for value in layer.plain]
    if layer.bias is not None:
        scale = (layer.operands[0].scale * layer.operands[1].scale).astype(np.float32)
        zero = np.zeros(scale.shape, np.int32)
        operands = [writer.constant(value) for value in (layer.bias, scale, zero)]
        bias = writer.add("DequantizeLinear", *operands, axis=0)
        if layer.operator == "MatMul":
            return _activated(writer, layer, writer.add("Add", writer.add("MatMul", *inputs), bias))
        inputs.append(bias)
    return _activated(writer, layer, writer.add(layer.operator, *inputs, **layer.attributes))


def _activated(writer: Writer, layer: Layer, real: str) -> str:
    return writer.add(layer.activation, real) if layer.activation else real


def write_plain(writer: Writer, layer: Layer, result: Codes) -> None:
    """The reference's form: floats between bytes."""
    writer.add("QuantizeLinear", real_result(writer, layer), *writer.parameters(result), out=result.name)


def write(writer: Writer, layer: Layer, result: Codes) -> None:
    """The form under test."""
    if layer.form == "integers":
        _write_integers(writer, layer, result)
    elif layer.form == "operators":
        _write_operator(writer, layer, result)
    else:
        write_plain(writer, layer, result)


def _write_integers(writer: Writer, layer: Layer, result: Codes) -> None:
    """ConvInteger and MatMulInteger, as dynamic quantisation writes them; one zero point of weights for all."""
    left, right = layer.operands
    zeros = [writer.constant(left.zero), writer.constant(right.zero.reshape(-1)[:1].reshape(()))]
    operands = [writer.held(left), writer.held(right), *zeros]
    sums = writer.add(f"{layer.operator}Integer", *operands, **layer.attributes)
    scale = (left.scale * right.scale).astype(np.float32)
    behind = (1,) * (len(result.shape) - 2) if layer.operator == "Conv" else ()
    real = writer.add("Cast", sums, to=TensorProto.FLOAT)
    real = writer.add("Mul", real, writer.constant(scale.reshape(-1, *behind) if scale.ndim else scale))
    if layer.bias is not None:
        bias = (layer.bias * scale).astype(np.float32).reshape(-1, *behind)
        real = writer.add("Add", real, writer.constant(bias))
    real = _activated(writer, layer, real)
    writer.add("QuantizeLinear", real, *writer.parameters(result), out=result.name)


def _write_operator(writer: Writer, layer: Layer, result: Codes) -> None:
    """QLinearConv and such; what moves bytes stands as it is."""
    triples = [[writer.held(codes), *writer.parameters(codes)] for codes in layer.operands]
    flat = [name for triple in triples for name in triple]
    made, operator, attributes = writer.parameters(result), layer.operator, dict(layer.attributes)
    bias = [] if layer.bias is None else [writer.constant(layer.bias)]
    if layer.exact:
        plain = ["" if value is None else writer.constant(value) for value in layer.plain]
        writer.add(operator, flat[0], *plain, out=result.name, **attributes)
    elif operator in ("Conv", "MatMul"):
        writer.add(f"QLinear{operator}", *flat, *made, *bias, out=result.name, **attributes)
    elif operator == "Gemm":
        inputs = [*flat, *(bias or [""]), *made]
        writer.add("QGemm", *inputs, out=result.name, domain=MICROSOFT, **attributes)
    elif operator == "Concat":
        writer.add("QLinearConcat", *made, *flat, out=result.name, domain=MICROSOFT, **attributes)
    else:
        if operator == "Softmax":
            attributes["opset"] = OPSET
        writer.add(f"QLinear{operator}", *flat, *made, out=result.name, domain=MICROSOFT, **attributes)


def evaluate_plain(layer: Layer, given: Mapping[str, Array], result: Codes | None) -> Array:
    """What ONNX Runtime makes of the layer in float32, for the values ``given`` of computed operands by name.

    With ``result`` the bytes, else the real numbers before.
    """
    writer = Writer()
    inputs = {codes.name: given[codes.name] for codes in layer.operands if codes.value is None}
    if result is None:
        outputs = [real_result(writer, layer)]
    else:
        write_plain(writer, layer, result)
        outputs = [result.name]
    (value,) = by_onnx_runtime(writer.model(inputs, outputs).SerializeToString(), inputs)
    return value
