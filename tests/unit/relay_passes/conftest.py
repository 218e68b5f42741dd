"""Builders of small ONNX models, and their meaning by ONNX Runtime without optimizations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto

from tests.support.small_models import Shape, onnx_model
from tvm_ext.relay_passes.onnx.graph import OnnxGraph, model_from_graph
from tvm_ext.relay_passes.onnx.import_model import checked_graph


def make_model(
    nodes: Sequence[onnx.NodeProto],
    inputs: Mapping[str, Shape] | None = None,
    outputs: Sequence[str] = ("y",),
    constants: Mapping[str, Any] | None = None,
    opset: int = 17,
    element_type: int = TensorProto.FLOAT,
    output_type: int = TensorProto.FLOAT,
) -> onnx.ModelProto:
    given = inputs if inputs is not None else {"x": [2, 3]}
    """`onnx_model`, by default of one input ``x``."""
    given = inputs if inputs is not None else {"x": [2, 3]}
    return onnx_model(nodes, given, outputs, constants, opset=opset, element_type=element_type, output_type=output_type)


def evaluate(graph: OnnxGraph, feeds: Mapping[str, Any]) -> list[Any]:
    # (ONNX's own reference implementation is wrong for grouped ConvTranspose and for LpNormalization with p = 1.)
    model = model_from_graph(graph, lambda _: True)
    model.ir_version = 10
    settings = onnxruntime.SessionOptions()
    settings.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    settings.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), settings, providers=["CPUExecutionProvider"])
    return list(session.run(None, dict(feeds)))


@pytest.fixture
def build_model() -> Callable[..., onnx.ModelProto]:
    return make_model


@pytest.fixture
def build_graph() -> Callable[..., OnnxGraph]:
    return lambda *arguments, **options: checked_graph(make_model(*arguments, **options))


@pytest.fixture
def same_meaning() -> Callable[..., None]:
    """Asserts that a graph before and after a step computes the same on random inputs, to 1e-5 by norm."""

    def check(before: OnnxGraph, after: OnnxGraph, shapes: Mapping[str, Sequence[int]]) -> None:
        generator = np.random.default_rng(7)
        feeds = {name: generator.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
        expected, actual = evaluate(before, feeds), evaluate(after, feeds)
        assert len(expected) == len(actual)
        for wanted, got in zip(expected, actual, strict=True):
            assert wanted.shape == got.shape
            assert wanted.dtype == got.dtype
            assert np.linalg.norm(got - wanted) <= 1e-5 * max(float(np.linalg.norm(wanted)), 1e-6)

    return check
