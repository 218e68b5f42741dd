"""bfloat16 in fused kernels: stock TVM computes it in float32, but not where it is loaded inside of a binding."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tvm
from tvm import relax

from tests.support.small_modules import module_of
from tvm_ext import relay

op = relax.op
ZERO, ONE = relax.const(0.0, "float32"), relax.const(1.0, "float32")


def wide(x: Any) -> Any:
    return op.astype(x, "float32")


def narrow(x: Any) -> Any:
    return op.astype(x, "bfloat16")


def softmax(x: np.ndarray) -> np.ndarray:
    powers = np.exp(x - x.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def affine(value: float) -> Any:
    return relax.const(np.full(37, value, ml_dtypes.bfloat16), "bfloat16")


def standard(x: np.ndarray) -> np.ndarray:
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)


def gelu(x: np.ndarray) -> np.ndarray:
    return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


Case = tuple[Callable[..., Any], Callable[..., np.ndarray]]
CASES: dict[str, Case] = {
    "exp": (op.exp, np.exp),
    "exp in float32": (lambda x, _y: op.exp(wide(x)), lambda x, _y: np.exp(x)),
    "tanh and back": (lambda x, _y: narrow(op.tanh(wide(x))), lambda x, _y: np.tanh(x)),
    "elu": (
        lambda x, _y: narrow(op.where(op.greater(wide(x), ZERO), wide(x), op.subtract(op.exp(wide(x)), ONE))),
        lambda x, _y: np.where(x > 0, x, np.exp(x) - 1),
    ),
    "nested": (lambda x, _y: narrow(op.sigmoid(op.tanh(wide(x)))), lambda x, _y: 1 / (1 + np.exp(-np.tanh(x)))),
    "maximum": (op.maximum, np.maximum),
    "softmax": (lambda x, _y: op.nn.softmax(x), lambda x, _y: softmax(x)),
    "largest of a row": (lambda x, _y: op.max(x, axis=1), lambda x, _y: x.max(1)),
    "product and gelu": (lambda x, y: op.nn.gelu(op.matmul(x, op.permute_dims(y))), lambda x, y: gelu(x @ y.T)),
    "product and relu": (
        lambda x, y: op.nn.relu(op.matmul(x, op.permute_dims(y))),
        lambda x, y: np.maximum(x @ y.T, 0),
    ),
    "product and clip": (
        lambda x, y: op.clip(op.matmul(x, op.permute_dims(y)), -0.5, 0.75),
        lambda x, y: np.clip(x @ y.T, -0.5, 0.75),
    ),
    "product, clipped in float32": (
        lambda x, y: narrow(op.clip(wide(op.matmul(x, op.permute_dims(y))), -0.5, 0.75)),
        lambda x, y: np.clip(x @ y.T, -0.5, 0.75),
    ),
    "largest of a row and relu": (lambda x, _y: op.nn.relu(op.max(x, axis=1)), lambda x, _y: np.maximum(x.max(1), 0)),
    "layer norm": (
        lambda x, _y: op.nn.layer_norm(x, affine(2.0), affine(1.0), axes=[-1]),
        lambda x, _y: 2 * standard(x) + 1,
    ),
}


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("name", CASES)
def test_kernels_that_load_bfloat16_are_right(name: str) -> None:
    expression, reference = CASES[name]
    inputs = [relax.Var(letter, relax.TensorType((9, 37), "bfloat16")) for letter in "xy"]
    random = np.random.default_rng(0)
    values = [random.standard_normal((9, 37)).astype(ml_dtypes.bfloat16) for _ in inputs]
    library = relay.build(module_of(inputs, expression(*inputs) if name != "exp" else expression(inputs[0])))
    actual = library.vm()["main"](*map(tvm.runtime.tensor, values)).numpy().astype("float64")
    arguments = [value.astype("float64") for value in values]
    expected = reference(*arguments) if name != "exp" else reference(arguments[0])
    assert np.linalg.norm(actual - expected) <= 4e-3 * np.linalg.norm(expected)
    assert all(operator.choice.path in ("rtile", "rows") for operator in library.report.operators)


@pytest.mark.parametrize("function", [op.exp, op.tanh, op.sqrt, lambda x: op.power(x, relax.const(0.75, "float32"))])
def test_functions_of_float32_are_rounded_to_bfloat16(function: Callable[[Any], Any]) -> None:
    x = relax.Var("x", relax.TensorType((9, 37), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            outputs = [builder.emit_output(each) for each in (narrow(function(x)), function(x))]
        builder.emit_func_output(relax.Tuple(outputs))
    value = np.random.default_rng(0).uniform(0.1, 3, (9, 37)).astype("float32")
    halves, whole = relay.build(builder.get()).vm()["main"](tvm.runtime.tensor(value))
    np.testing.assert_array_equal(halves.numpy(), whole.numpy().astype(ml_dtypes.bfloat16))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_largest_of_truth_values(dtype: str) -> None:
    """max over conditions as numbers: the converted condition is bound to a variable, as a vector."""
    x = relax.Var("x", relax.TensorType((4, 35), dtype))
    truth = op.astype(op.greater(x, relax.const(0.0, dtype)), dtype)
    value = np.random.default_rng(0).standard_normal((4, 35)).astype(dtype)
    value[1] = -1
    actual = relay.build(module_of([x], op.max(truth, axis=1))).vm()["main"](tvm.runtime.tensor(value)).numpy()
    np.testing.assert_array_equal(actual, (value > 0).max(1).astype(dtype))
