"""A thin writer of ONNX graphs over `onnx.helper`, shared by the models that our own code builds."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

FloatArray = npt.NDArray[np.float32]

IR_VERSION = 8
"""Late enough that initializers need not be listed as graph inputs, so that every importer sees them as constants."""


def generator(seed: int, name: str) -> np.random.Generator:
    """A generator that depends on the seed and the tensor's name alone, not on the order of creation."""
    return np.random.default_rng([seed, zlib.crc32(name.encode())])


def he_normal(seed: int, name: str, shape: Sequence[int], fan_in: int) -> FloatArray:
    """Float32 weights of variance 2 / fan_in, which keeps the scale of activations through ReLU layers (He et al.)."""
    values = generator(seed, name).standard_normal(tuple(shape), dtype=np.float32)
    values *= np.float32(np.sqrt(2.0 / fan_in))
    return values


def small_normal(seed: int, name: str, shape: Sequence[int], deviation: float = 0.1) -> FloatArray:
    """Float32 values around 0: biases and BatchNormalization means."""
    values = generator(seed, name).standard_normal(tuple(shape), dtype=np.float32)
    values *= np.float32(deviation)
    return values


def near_one(seed: int, name: str, shape: Sequence[int], spread: float) -> FloatArray:
    """Float32 values in [1 - spread, 1 + spread]: scales and variances."""
    low, high = 1.0 - spread, 1.0 + spread
    return generator(seed, name).uniform(low, high, tuple(shape)).astype(np.float32)


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
