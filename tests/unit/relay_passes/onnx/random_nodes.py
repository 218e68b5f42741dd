"""Single nodes with random shapes and attributes, and what they mean by ONNX Runtime or ONNX's reference."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import helper
from onnx.reference import ReferenceEvaluator

from tvm_ext.relay_passes.onnx.bind_inputs import bind_inputs
from tvm_ext.relay_passes.onnx.graph import OnnxGraph, model_from_graph
from tvm_ext.relay_passes.onnx.import_model import checked_graph, clean_graph, expand_unsupported

Values = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeCase:
    """One node, its operands by name in order (None for an absent one), and which of them are known at import.

    `by_runtime`: ONNX Runtime says what is right instead of ONNX's reference (`both_by_runtime`: and what it was
    rewritten to computes); `wanted`: NumPy did.
    """

    operator: str
    operands: Values
    attributes: Values = field(default_factory=dict)
    known: tuple[str, ...] = ()
    outputs: int = 1
    opset: int = 23
    by_runtime: bool = False
    both_by_runtime: bool = False
    wanted: Any = None

    @property
    def feeds(self) -> dict[str, Any]:
        return {name: np.asarray(value) for name, value in self.operands.items() if value is not None}

    @property
    def model(self) -> onnx.ModelProto:
        """The node with every operand as a graph input."""
        names = [name if value is not None else "" for name, value in self.operands.items()]
        outputs = [f"y{index}" for index in range(self.outputs)]
        node = helper.make_node(self.operator, names, outputs, "tested", **self.attributes)
        inputs = [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
            for name, value in self.feeds.items()
        ]
        graph = helper.make_graph([node], "case", inputs, [onnx.ValueInfoProto(name=name) for name in outputs])
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", self.opset)], ir_version=10)
        inferred = onnx.shape_inference.infer_shapes(model)
        for value in inferred.graph.output:
            value.type.tensor_type.ClearField("shape")
        return inferred

    @property
    def constants(self) -> dict[str, Any]:
        return {name: value for name, value in self.feeds.items() if name in self.known}

    def expected(self) -> list[Any]:
        if self.wanted is not None:
            return [self.wanted]
        if self.by_runtime or self.both_by_runtime:
            return list(_session(self.model).run(None, self.feeds))
        with np.errstate(all="ignore"):
            return list(ReferenceEvaluator(self.model).run(None, self.feeds))


def _session(model: onnx.ModelProto) -> onnxruntime.InferenceSession:
    settings = onnxruntime.SessionOptions()
    settings.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    settings.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(model.SerializeToString(), settings, providers=["CPUExecutionProvider"])


def imported_graph(case: NodeCase) -> OnnxGraph:
    """The graph that the stock importer would get."""
    model = case.model
    graph = bind_inputs(checked_graph(model), None, None, case.constants)
    return clean_graph(expand_unsupported(graph, model))


def rewritten_result(graph: OnnxGraph, case: NodeCase) -> list[Any]:
    """What `graph` computes."""
    model = model_from_graph(graph, lambda _: True)
    feeds = {name: case.feeds[name] for name in graph.input_names}
    if case.both_by_runtime:
        model.ir_version = 10
        return list(_session(model).run(None, feeds))
    with np.errstate(all="ignore"):
        return list(ReferenceEvaluator(model).run(None, feeds))


def assert_same(actual: list[Any], expected: list[Any], *, tolerance: float, describe: str) -> None:
    """Same shapes and types; integers and bools equal, numbers to `tolerance` by norm."""
    assert len(actual) == len(expected), describe
    for got, wanted in zip(map(np.asarray, actual), map(np.asarray, expected), strict=True):
        assert got.shape == wanted.shape, f"{describe}: shape {got.shape}, not {wanted.shape}"
        assert got.dtype == wanted.dtype, f"{describe}: type {got.dtype}, not {wanted.dtype}"
        if wanted.dtype.kind in "biu":
            assert np.array_equal(got, wanted), describe
        else:
            got, wanted = got.astype(np.float64), wanted.astype(np.float64)
            finite = np.isfinite(wanted)
            assert np.array_equal(got[~finite], wanted[~finite], equal_nan=True), describe
            difference = np.linalg.norm(got[finite] - wanted[finite])
            assert difference <= tolerance * max(float(np.linalg.norm(wanted[finite])), 1e-6), (
                f"off by {difference}: {describe}"
            )
