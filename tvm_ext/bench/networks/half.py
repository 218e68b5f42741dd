"""ONNX models in half precision: float32 weights, inputs and constants become float16, the graph stays as it is."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper


def to_half(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy of the float32 ``model`` that computes in float16: initializers, inputs, outputs, constants and casts.

    Values beyond float16's range become its largest: attention masks of -3.4e38 must not become infinite, for the
    difference of two infinities is not a number.
    """
    half = onnx.ModelProto()
    half.CopyFrom(model)
    graph = half.graph
    for position, tensor in enumerate(graph.initializer):
        graph.initializer[position].CopyFrom(_half_tensor(tensor))
    for value in (*graph.input, *graph.output):
        if value.type.tensor_type.elem_type == TensorProto.FLOAT:
            value.type.tensor_type.elem_type = TensorProto.FLOAT16
    del graph.value_info[:]
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.TENSOR:
                attribute.t.CopyFrom(_half_tensor(attribute.t))
            elif node.op_type == "Cast" and attribute.name == "to" and attribute.i == TensorProto.FLOAT:
                attribute.i = TensorProto.FLOAT16
    return half


def _half_tensor(tensor: onnx.TensorProto) -> onnx.TensorProto:
    if tensor.data_type != TensorProto.FLOAT:
        return tensor
    limit = float(np.finfo(np.float16).max)
    values = np.clip(numpy_helper.to_array(tensor), -limit, limit).astype(np.float16)
    converted = numpy_helper.from_array(values, tensor.name)
    assert converted.data_type == helper.np_dtype_to_tensor_dtype(values.dtype)
    return converted
