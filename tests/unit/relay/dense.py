"""relu(data @ w + b) as an ONNX file, and what it gives."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

RNG = np.random.default_rng(0)
X = RNG.standard_normal((4, 32)).astype("float32")
W = RNG.standard_normal((32, 24)).astype("float32")
B = RNG.standard_normal(24).astype("float32")
EXPECTED = np.maximum(X.astype("float64") @ W.astype("float64") + B.astype("float64"), 0)


def dense_model(batch: int | str = 4, name: str = "data") -> onnx.ModelProto:
    """relu(data @ w + b)."""
    nodes = [
        helper.make_node("MatMul", [name, "w"], ["product"]),
        helper.make_node("Add", ["product", "b"], ["sum"]),
        helper.make_node("Relu", ["sum"], ["result"]),
    ]
    graph = helper.make_graph(
        nodes,
        "dense",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, [batch, 32])],
        [helper.make_tensor_value_info("result", TensorProto.FLOAT, [batch, 24])],
        [numpy_helper.from_array(W, "w"), numpy_helper.from_array(B, "b")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def assert_right(actual: np.ndarray, expected: np.ndarray = EXPECTED) -> None:
    assert np.linalg.norm(actual - expected) <= 1e-5 * np.linalg.norm(expected)
