"""The ONNX package's own evaluator, with those of its operators replaced that are found wrong.

Its Erf (and Gelu, which is defined by it) rounds to float32 whatever the type is, and its MaxPool takes windows of
unequal padding from elsewhere, or fails on them.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
from onnx import helper
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from .onnx_runtime import onnxruntime
from .random_operators.record import Array

OPSET, IR_VERSION = 20, 9
"""What ONNX Runtime is told of a single node."""


class Erf(OpRun):
    """In the accuracy of float64."""

    def _run(self, x: Array) -> tuple[Array]:
        return (np.asarray(np.vectorize(math.erf, otypes=["d"])(x)).astype(x.dtype),)


class Gelu(OpRun):
    """A function of ONNX, whose nodes are evaluated without what replaces operators here."""

    def _run(self, x: Array, approximate: str = "none") -> tuple[Array]:
        wide = x.astype(np.float64)
        if approximate == "tanh":
            share = np.tanh(math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3))
        else:
            share = np.vectorize(math.erf, otypes=["d"])(wide / math.sqrt(2))
        return (np.asarray(0.5 * wide * (1 + share)).astype(x.dtype),)


class HardSwish(OpRun):
    """By a sixth: the function's HardSigmoid has it as an attribute, in float32."""

    def _run(self, x: Array) -> tuple[Array]:
        wide = x.astype(np.float64)
        return ((wide * np.clip(wide / 6 + 0.5, 0, 1)).astype(x.dtype),)


class MaxPool(OpRun):
    """By ONNX Runtime, which has it for every float."""

    def _run(self, x: Array, **_attributes: Any) -> tuple[Array, ...]:
        return tuple(_one_node(self.onnx_node, x))


class Pad(OpRun):
    """With pads below 0, which take elements away."""

    def _run(self, x: Array, pads: Array, value: Array | None = None, axes: Array | None = None,
             mode: str = "constant") -> tuple[Array]:  # fmt: skip
        ends = np.zeros((2, x.ndim), int)
        ends[:, range(x.ndim) if axes is None else axes] = np.reshape(pads, (2, -1))
        kept = x[tuple(slice(max(0, -b), n - max(0, -e)) for n, b, e in zip(x.shape, *ends, strict=True))]
        how = {"constant_values": 0 if value is None else value.item()} if mode == "constant" else {}
        return (np.pad(kept, np.maximum(ends, 0).T, mode=mode, **how),)  # type: ignore[call-overload]


class GatherElements(OpRun):
    """Of indices that reach over a part of the other axes."""

    def _run(self, x: Array, indices: Array, axis: int = 0) -> tuple[Array]:
        part = tuple(slice(None) if a == axis % x.ndim else slice(n) for a, n in enumerate(indices.shape))
        return (np.take_along_axis(x[part], indices, axis),)


def _one_node(node: onnx.NodeProto, x: Array) -> list[Array]:
    kind = helper.np_dtype_to_tensor_dtype(x.dtype)
    single = onnx.NodeProto()
    single.CopyFrom(node)
    del single.input[:], single.output[1:]
    single.input.append("x")
    single.output[0] = "y"
    graph = helper.make_graph(
        [single],
        "one node",
        [helper.make_tensor_value_info("x", kind, x.shape)],
        [helper.make_tensor_value_info("y", kind, None)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)
    return by_onnx_runtime(model.SerializeToString(), {"x": x})


def by_onnx_runtime(model: bytes, inputs: Mapping[str, Array]) -> list[Array]:
    """Without its graph optimisations, on one thread, silent."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    return [np.asarray(value) for value in session.run(None, dict(inputs))]


def by_evaluator(model: onnx.ModelProto | bytes, inputs: Mapping[str, Array]) -> list[Array]:
    """All outputs of ``model`` for ``inputs`` by name. Raises whatever NumPy and the evaluator raise."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = ReferenceEvaluator(model, new_ops=[Erf, GatherElements, Gelu, HardSwish, MaxPool, Pad]).run(
            None, dict(inputs)
        )
    return [np.asarray(value) for value in results]
