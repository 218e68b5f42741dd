"""ONNX models of a few nodes, for tests that import one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

Shape = Sequence[int | str | None]


def onnx_model(
    nodes: Sequence[onnx.NodeProto],
    inputs: Mapping[str, Shape],
    outputs: Sequence[str] = ("y",),
    constants: Mapping[str, Any] | None = None,
    *,
    opset: int = 17,
    element_type: int = TensorProto.FLOAT,
    output_type: int = TensorProto.FLOAT,
    domains: Mapping[str, int] | None = None,
) -> onnx.ModelProto:
    """A model of ``nodes`` whose outputs have no declared shape; ``domains`` are others than ONNX's, with versions."""
    graph = helper.make_graph(
        list(nodes),
        "test",
        [helper.make_tensor_value_info(name, element_type, shape) for name, shape in inputs.items()],
        [helper.make_tensor_value_info(name, output_type, None) for name in outputs],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in (constants or {}).items()],
    )
    opsets = [helper.make_opsetid(domain, version) for domain, version in {"": opset, **(domains or {})}.items()]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)
