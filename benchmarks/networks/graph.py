"""A thin writer of ONNX graphs over `onnx.helper`, shared by the models that our own code builds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

from tvm_ext.bench.light import IR_VERSION, FloatArray, generator, he_normal, near_one, small_normal

__all__ = ["IR_VERSION", "FloatArray", "GraphWriter", "generator", "he_normal", "near_one", "small_normal"]


class GraphWriter:
    """Collects nodes and initializers; every method returns the name of the tensor that it made."""

    def __init__(self, name: str, opset: int = 17) -> None:
        self._name = name
        self._opset = opset
        self._nodes: list[onnx.NodeProto] = []
        self._initializers: dict[str, onnx.TensorProto] = {}
        self._inputs: list[onnx.ValueInfoProto] = []
        self._outputs: list[onnx.ValueInfoProto] = []

    def input(self, name: str, shape: Sequence[int], dtype: int = TensorProto.FLOAT) -> str:
        self._inputs.append(helper.make_tensor_value_info(name, dtype, list(shape)))
        return name

    def output(self, name: str, shape: Sequence[int], dtype: int = TensorProto.FLOAT) -> str:
        self._outputs.append(helper.make_tensor_value_info(name, dtype, list(shape)))
        return name

    def constant(self, name: str, value: npt.ArrayLike) -> str:
        """An initializer; asking again for a name keeps the first value, so small shared constants need no care."""
        if name not in self._initializers:
            self._initializers[name] = numpy_helper.from_array(np.asarray(value), name)
        return name

    def op(self, kind: str, *inputs: str, name: str = "", **attributes: Any) -> str:
        """Append a node of one output, which is called ``name`` or else after its kind and position."""
        result = name or f"{kind.lower()}_{len(self._nodes)}"
        self._nodes.append(helper.make_node(kind, list(inputs), [result], name=result, **attributes))
        return result

    def ops(self, kind: str, *inputs: str, results: int, name: str, **attributes: Any) -> tuple[str, ...]:
        """Append a node of several outputs, which are called ``name_0``, ``name_1``, ..."""
        outputs = tuple(f"{name}_{index}" for index in range(results))
        self._nodes.append(helper.make_node(kind, list(inputs), list(outputs), name=name, **attributes))
        return outputs

    def model(self, metadata: Mapping[str, str] | None = None) -> onnx.ModelProto:
        graph = helper.make_graph(
            self._nodes, self._name, self._inputs, self._outputs, list(self._initializers.values())
        )
        model = helper.make_model(
            graph, opset_imports=[helper.make_opsetid("", self._opset)], ir_version=IR_VERSION, producer_name="tvm_ext"
        )
        helper.set_model_props(model, dict(metadata or {}))
        return model
