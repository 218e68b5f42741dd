"""Random NHWC graphs with odd channels, for padding: chains, residuals, gates, groups, joined channels, heads.

Worked example of what a draw may hold: a 3x3 convolution of 5 to 11 channels, its sigmoid, a depthwise convolution of
that, both joined (22 channels, padded they are 16 and 16), a 1x1 convolution of that, its logarithm.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tvm_ext._tvm import BlockBuilder, DataflowVar, Expr, IRModule, relax

op = relax.op
DTYPE = "float16"
LAYOUT = {"data_layout": "NHWC", "kernel_layout": "OHWI"}


class PaddingGraph:
    """Draws one graph; ``values`` are those that may be read on."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.builder = BlockBuilder()
        self.input = relax.Var("x", relax.TensorType((2, 6, 5, self._channels()), DTYPE))
        self.values: list[Any] = [self.input]

    def _channels(self) -> int:
        return int(self.random.choice([1, 2, 3, 5, 6, 7, 8, 11, 12, 16, 19]))

    def number(self, *shape: int, low: float = -0.5, high: float = 0.5) -> Expr:
        return relax.const(self.random.uniform(low, high, shape).astype(DTYPE), DTYPE)

    def _any(self) -> Any:
        return self.values[-1] if self.random.random() < 0.7 else self.values[self.random.integers(len(self.values))]

    def _emit(self, call: Expr) -> DataflowVar:
        value = self.builder.emit(call)
        self.values.append(value)
        return value

    # ---- operators ---------------------------------------------------------------------------------------------------

    def convolution(self) -> None:
        source = self._any()
        size = int(self.random.choice([1, 3]))
        weight = self.number(self._channels(), size, size, extents(source)[3])
        stride = int(self.random.choice([1, 1, 1, 2]))
        value = self._emit(op.nn.conv2d(source, weight, strides=stride, padding=size // 2, **LAYOUT))
        if self.random.random() < 0.6:
            self._emit(op.add(value, self.number(extents(value)[3])))

    def product(self) -> None:
        """Of two values, neither a constant: the rows of one with the rows of the other, or of itself."""
        source = self._any()
        batch, height, width, channels = extents(source)
        rows = self.builder.emit(op.reshape(source, (batch, height * width, channels)))
        turned = op.permute_dims(rows, [0, 2, 1])
        scores = self.builder.emit(op.nn.softmax(op.matmul(rows, turned)))
        self._emit(op.reshape(op.matmul(scores, rows), (batch, height, width, channels)))

    def depthwise(self) -> None:
        source = self._any()
        channels = extents(source)[3]
        weight = self.number(channels, 3, 3, 1)
        self._emit(op.nn.conv2d(source, weight, padding=1, groups=channels, **LAYOUT))

    def grouped(self) -> None:
        source = self._any()
        channels = extents(source)[3]
        if channels % 2 == 0:
            weight = self.number(2 * int(self.random.integers(1, 5)), 1, 1, channels // 2)
            self._emit(op.nn.conv2d(source, weight, groups=2, **LAYOUT))

    def function(self) -> None:
        """One operator on each element; some make numbers of zeros, and some infinities."""
        source = self._any()
        row = self.number(extents(source)[3], low=0.5, high=1.5)
        functions: list[Callable[[], Expr]] = [
            lambda: op.nn.relu(source),
            lambda: op.sigmoid(source),
            lambda: op.tanh(source),
            lambda: op.exp(op.minimum(source, relax.const(np.float16(1)))),
            lambda: op.log(op.abs(source)),
            lambda: op.nn.silu(source),
            lambda: op.nn.gelu(source),
            lambda: op.nn.leakyrelu(source, 0.1),
            lambda: op.clip(source, -1, 1),
            lambda: op.divide(source, row),
            lambda: op.divide(row, source),
            lambda: op.multiply(source, row),
            lambda: op.astype(op.astype(source, "float32"), DTYPE),
            lambda: op.where(op.greater(source, row), source, row),
        ]
        self._emit(functions[self.random.integers(len(functions))]())

    def residual(self) -> None:
        first = self._any()
        alike = [item for item in self.values if extents(item) == extents(first)]
        second = alike[self.random.integers(len(alike))]
        self._emit((op.add, op.multiply, op.maximum)[self.random.integers(3)](first, second))

    def joined(self) -> None:
        first = self._any()
        alike = [item for item in self.values if extents(item)[:3] == extents(first)[:3]]
        second = alike[self.random.integers(len(alike))]
        if extents(first)[3] + extents(second)[3] <= 40:
            self._emit(op.concat([first, second], axis=3))

    def gate(self) -> None:
        """Squeeze and excite, or a gate of one channel."""
        source = self._any()
        channels = extents(source)[3]
        if self.random.random() < 0.5:
            mean = self.builder.emit(op.mean(source, [1, 2], keepdims=True))
            factor = op.sigmoid(op.nn.conv2d(mean, self.number(channels, 1, 1, channels), **LAYOUT))
        else:
            factor = op.sigmoid(op.nn.conv2d(source, self.number(1, 1, 1, channels), **LAYOUT))
        self._emit(op.multiply(source, self.builder.emit(factor)))

    def pooling(self) -> None:
        source = self._any()
        pool = (op.nn.max_pool2d, op.nn.avg_pool2d)[self.random.integers(2)]
        self._emit(pool(source, pool_size=3, strides=1, padding=1, layout="NHWC"))

    # ---- the whole ---------------------------------------------------------------------------------------------------

    def module(self, operators: int) -> IRModule:
        draws = [self.convolution] * 5 + [self.function] * 3 + [self.residual, self.joined, self.gate] * 2
        draws += [self.depthwise, self.grouped, self.pooling, self.product]
        with self.builder.function("main", [self.input]):
            with self.builder.dataflow():
                for _ in range(operators):
                    draws[self.random.integers(len(draws))]()
                last = self.values[-1]
                pooled = op.reshape(op.nn.adaptive_avg_pool2d(last, 1, layout="NHWC"), (2, extents(last)[3]))
                head = op.matmul(pooled, self.number(extents(last)[3], self._channels()))
                outputs = [self.builder.emit_output(op.nn.softmax(head)), self.builder.emit_output(op.abs(self._any()))]
            self.builder.emit_func_output(relax.Tuple(outputs))
        return self.builder.get()


def extents(value: Expr) -> tuple[int, ...]:
    return tuple(int(item) for item in value.ty.shape.values)


def padding_graph(seed: int, operators: int = 12) -> tuple[IRModule, np.ndarray[Any, Any]]:
    """A graph, and values of its input."""
    drawn = PaddingGraph(seed)
    mod = drawn.module(operators)
    return mod, drawn.random.uniform(-1, 1, extents(drawn.input)).astype(DTYPE)
