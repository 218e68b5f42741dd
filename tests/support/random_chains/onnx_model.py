"""The ONNX model of a chain."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from .record import ChainCase

HALVES = ("bfloat16", "float16")
OPSET = 17
IR_VERSION = 8  # of ONNX 1.12, which introduced that opset


def onnx_model(case: ChainCase, *, widen_half: bool = False) -> onnx.ModelProto:
    """The model; with ``widen_half``, every 16-bit float in it is float32: for a reference that rounds nothing."""

    def dtype(name: str) -> str:
        return "float32" if widen_half and name in HALVES else name

    def element_type(name: str) -> int:
        return int(helper.np_dtype_to_tensor_dtype(np.dtype(dtype(name))))

    def attribute(name: str, value: Any) -> Any:
        if name == "to" and widen_half and value in (onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16):
            return onnx.TensorProto.FLOAT
        return list(value) if isinstance(value, tuple) else value

    data = case.data(0)
    nodes = [
        helper.make_node(
            node.operator,
            list(node.inputs),
            list(node.outputs),
            **{name: attribute(name, value) for name, value in node.attributes},
        )
        for node in case.nodes
    ]
    graph = helper.make_graph(
        nodes,
        f"chain_{case.index}",
        [
            helper.make_tensor_value_info(item.name, element_type(item.content.dtype), list(item.content.shape))
            for item in case.variables
        ],
        [helper.make_tensor_value_info(o.name, element_type(o.dtype), list(o.shape)) for o in case.outputs],
        [
            numpy_helper.from_array(data[item.name].astype(dtype(item.content.dtype)), item.name)
            for item in case.inputs
            if item.content.constant
        ],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)
