"""Networks of one attention as exporters write it, with any steps between its products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from tests.support.attentions import LOWEST

HEADS, QUERIES, KEYS, FEATURES = 3, 20, 24, 8


class Network:
    """ONNX nodes one after the other, as exporters write attention."""

    def __init__(self, dtype: str = "float32") -> None:
        self.nodes: list[Any] = []
        self.constants: list[Any] = []
        self.inputs: list[Any] = []
        self.dtype = np.dtype(dtype)

    def input(self, name: str, *shape: int, dtype: Any = None) -> str:
        kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype or self.dtype))
        self.inputs.append(helper.make_tensor_value_info(name, kind, shape))
        return name

    def constant(self, value: Any) -> str:
        name = f"constant{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    def number(self, value: float) -> str:
        return self.constant(self.dtype.type(value))

    def op(self, kind: str, *operands: str, **attributes: Any) -> str:
        name = f"value{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, operands, [name], **attributes))
        return name

    def heads(self, name: str, length: int, order: tuple[int, ...], heads: int = HEADS) -> str:
        source = self.input(name, 1, length, heads * FEATURES)
        shape = self.constant(np.array([1, length, heads, FEATURES], np.int64))
        return self.op("Transpose", self.op("Reshape", source, shape), perm=order)

    def model(self, *outputs: str) -> onnx.ModelProto:
        kind = helper.np_dtype_to_tensor_dtype(self.dtype)
        results = [helper.make_tensor_value_info(name, kind, None) for name in outputs]
        graph = helper.make_graph(self.nodes, "attention", self.inputs, results, self.constants)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


Steps = Callable[[Network, str], str]


def attention(steps: Steps = lambda net, scores: scores, behind: Steps = lambda net, value: value) -> onnx.ModelProto:
    """Transposed heads, ``steps`` on the scores, ``behind`` on the probabilities, and the output transposed back."""
    net = Network()
    scores = net.op("MatMul", net.heads("q", QUERIES, (0, 2, 1, 3)), net.heads("k", KEYS, (0, 2, 3, 1)))
    probabilities = behind(net, net.op("Softmax", steps(net, scores), axis=-1))
    result = net.op("MatMul", probabilities, net.heads("v", KEYS, (0, 2, 1, 3)))
    merged = net.op("Transpose", result, perm=[0, 2, 1, 3])
    shape = net.constant(np.array([1, QUERIES, HEADS * FEATURES], np.int64))
    return net.model(net.op("Reshape", merged, shape))


def causal(low: float = -np.inf) -> Any:
    return np.where(np.tril(np.ones((QUERIES, KEYS), bool)), np.float32(0), np.float32(low))


def masked(net: Network, scores: str) -> str:
    mask = net.input("mask", 1, 1, 1, KEYS)
    return net.op("Add", net.op("Mul", scores, net.number(0.25)), mask)


def chosen(net: Network, scores: str) -> str:
    keep = net.input("keep", 1, 1, QUERIES, KEYS, dtype="bool")
    bias = net.op("Where", keep, net.number(0), net.number(LOWEST))
    return net.op("Add", bias, net.op("Div", scores, net.number(3)))


def replaced(net: Network, scores: str) -> str:
    return net.op("Where", net.input("gone", 1, 1, 1, KEYS, dtype="bool"), net.number(-1e4), scores)


def windows(net: Network, scores: str) -> str:
    """As Swin adds a mask of windows: with one more axis for a while."""
    biased = net.op("Add", scores, net.constant(np.random.default_rng(0).random((1, HEADS, 1, KEYS), np.float32)))
    apart = net.op("Reshape", biased, net.constant(np.array([1, 1, HEADS, QUERIES, KEYS], np.int64)))
    added = net.op("Add", apart, net.constant(causal(-100.0).reshape(1, 1, 1, QUERIES, KEYS)))
    return net.op("Reshape", added, net.constant(np.array([1, HEADS, QUERIES, KEYS], np.int64)))


FORMS: dict[str, tuple[Steps, list[str], float]] = {
    "bare": (lambda net, scores: scores, [], 1.0),
    "a mask of the keys": (masked, ["add"], 0.25),
    "a choice as a mask": (chosen, ["choose"], 1 / 3),
    "scores replaced": (replaced, ["replace"], 1.0),
    "a causal constant": (lambda net, scores: net.op("Add", scores, net.constant(causal())), ["add"], 1.0),
    "windows": (windows, ["add", "add"], 1.0),
}
