"""ONNX models in half precision: float32 weights, inputs and constants become float16, the graph stays as it is.

What an operator takes or gives in float32 alone, by its schema, stays float32: the scales of a Resize, or the boxes of
a NonMaxSuppression. Otherwise ONNX's inference ends there, and the ranks of all that follows are unknown.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableSequence

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from .graph import copied

_DTYPE = ("Bernoulli", "EyeLike", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike")
"""Operators whose attribute ``dtype`` is the type of what they make, float32 where some of them leave it out."""


def to_half(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy of the float32 ``model`` that computes in float16: initializers, inputs, outputs, constants and casts.

    So do the bodies of its loops and conditions, and its functions. Values beyond float16's range become its largest:
    attention masks of -3.4e38 must not become infinite, for the difference of two infinities is not a number.
    """
    half = copied(model)
    version = max((item.version for item in half.opset_import if item.domain in ("", "ai.onnx")), default=1)
    _convert_graph(half.graph, version, {})
    for function in half.functions:
        _convert_nodes(function.node, version, {})
    return half


Constants = dict[str, TensorProto]
"""Float32 constants by name, as they were."""


def _convert_graph(graph: onnx.GraphProto, version: int, outside: Constants) -> None:
    known = outside | {item.name: copied(item) for item in graph.initializer if item.data_type == TensorProto.FLOAT}
    for tensor in graph.initializer:
        tensor.CopyFrom(_half_tensor(tensor))
    for value in (*graph.input, *graph.output):
        _narrow(value.type)
    del graph.value_info[:]
    _convert_nodes(graph.node, version, known)


def _narrow(kind: onnx.TypeProto) -> None:
    which = kind.WhichOneof("value")
    if which == "tensor_type" and kind.tensor_type.elem_type == TensorProto.FLOAT:
        kind.tensor_type.elem_type = TensorProto.FLOAT16
    if which in ("sequence_type", "optional_type"):
        _narrow(getattr(kind, which).elem_type)


def _convert_nodes(nodes: MutableSequence[onnx.NodeProto], version: int, known: Constants) -> None:
    """Convert ``nodes`` in place; ``known`` are the constants of the graphs around, and gets those of ``nodes``."""
    done: list[onnx.NodeProto] = []
    for node in nodes:
        if node.op_type == "Constant" and (value := _float_constant(node)) is not None:
            known[node.output[0]] = value
            done.append(helper.make_node("Constant", [], list(node.output), value=_half_tensor(value)))
        else:
            _convert_attributes(node, version, known)
            done += _with_wide_ends(node, version, known)
    kept = [copied(node) for node in done]
    del nodes[:]
    nodes.extend(kept)


def _float_constant(node: onnx.NodeProto) -> TensorProto | None:
    """The value of a Constant of float32, in whichever of its attributes it is."""
    (attribute,) = node.attribute
    if attribute.name == "value" and attribute.t.data_type == TensorProto.FLOAT:
        value: TensorProto = copied(attribute.t)
        return value
    if attribute.name in ("value_float", "value_floats"):
        numbers = attribute.f if attribute.name == "value_float" else list(attribute.floats)
        return numpy_helper.from_array(np.array(numbers, np.float32))
    return None


def _convert_attributes(node: onnx.NodeProto, version: int, known: Constants) -> None:
    made = {attribute.name for attribute in node.attribute}
    if node.op_type == "ConstantOfShape" and "value" not in made:
        node.attribute.append(helper.make_attribute("value", numpy_helper.from_array(np.zeros(1, np.float32))))
    if node.op_type in ("RandomNormal", "RandomUniform") and "dtype" not in made:
        node.attribute.append(helper.make_attribute("dtype", TensorProto.FLOAT))
    for attribute in node.attribute:
        typed = (node.op_type == "Cast" and attribute.name == "to") or (
            node.op_type in _DTYPE and attribute.name == "dtype"
        )
        if attribute.type == onnx.AttributeProto.TENSOR:
            attribute.t.CopyFrom(_half_tensor(attribute.t))
        elif typed and attribute.i == TensorProto.FLOAT:
            attribute.i = TensorProto.FLOAT16
        for graph in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
            _convert_graph(graph, version, known)


def _with_wide_ends(node: onnx.NodeProto, version: int, known: Constants) -> Iterator[onnx.NodeProto]:
    """``node``, before it what its inputs of float32 are, behind it casts of its outputs of float32."""
    inputs, outputs = _wide_ends(node, version, known)
    for position in inputs:
        name = node.input[position]
        wide = f"{name}_float32_of_{node.output[0]}_{position}"
        if name in known:
            yield helper.make_node("Constant", [], [wide], value=known[name])
        else:
            yield helper.make_node("Cast", [name], [wide], to=TensorProto.FLOAT)
        node.input[position] = wide
    names = [(node.output[position], f"{node.output[position]}_float32") for position in outputs]
    for position, (_, wide) in zip(outputs, names, strict=True):
        node.output[position] = wide
    yield node
    for name, wide in names:
        yield helper.make_node("Cast", [wide], [name], to=TensorProto.FLOAT16)


def _wide_ends(node: onnx.NodeProto, version: int, known: Constants) -> tuple[list[int], list[int]]:
    """Which inputs and outputs of ``node`` cannot be float16, and are float32 in the model as it was."""
    if node.domain not in ("", "ai.onnx") or not onnx.defs.has(node.op_type, version, ""):
        return [], []
    schema = onnx.defs.get_schema(node.op_type, version, "")
    allowed = {constraint.type_param_str: set(constraint.allowed_type_strs) for constraint in schema.type_constraints}
    floats = any(name in known for name in node.input)

    def wide(names: MutableSequence[str], formals: list[onnx.defs.OpSchema.FormalParameter]) -> list[int]:
        kinds = [allowed.get(formal.type_str, {formal.type_str}) for formal in formals]
        return [
            position
            for position, name in enumerate(names)
            if name and formals and _is_wide(kinds[min(position, len(kinds) - 1)], floats)
        ]

    return wide(node.input, list(schema.inputs)), wide(node.output, list(schema.outputs))


def _is_wide(kinds: set[str], floats: bool) -> bool:
    """Whether an end of one of ``kinds`` is float32; ``floats``: its node, which may be one of integers, has some."""
    if "tensor(float)" not in kinds or "tensor(float16)" in kinds:
        return False
    return floats or not any("int" in kind for kind in kinds)


def _half_tensor(tensor: onnx.TensorProto) -> onnx.TensorProto:
    if tensor.data_type != TensorProto.FLOAT:
        return tensor
    limit = float(np.finfo(np.float16).max)
    values = np.clip(numpy_helper.to_array(tensor), -limit, limit).astype(np.float16)
    converted = numpy_helper.from_array(values, tensor.name)
    assert converted.data_type == helper.np_dtype_to_tensor_dtype(values.dtype)
    return converted
