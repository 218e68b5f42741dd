"""Steps of a chain that compute: element by element, over rows, and a second product."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from onnx import helper

from ..random_operators.sizes import require
from .chain import EXACT_BELOW, Chain, Value
from .draw_producers import convolved, pooled, product_of, size

INTEGERS = ("int8", "uint8", "int32", "int64")


def unary(chain: Chain, x: Value) -> Value:
    """A function of each element. Those with a pole or a jump are drawn where they are exact, or not at all."""
    rng = chain.rng
    require(x.dtype not in ("bool", "uint8"))
    exact = ["Abs", "Neg", *(("Relu",) if x.is_float else ())]
    if not x.is_float or rng.random() < 0.4:
        return chain.emit(rng.choice(exact), [x], x.shape)
    if rng.random() < 0.2:
        return chain.emit("LeakyRelu", [x], x.shape, {"alpha": 0.25}, exact=False)
    operator = rng.choice(("Sigmoid", "Tanh", "Erf", "Softplus", "HardSigmoid", "Elu", "Sqrt", "Exp"))
    if operator == "Sqrt":
        return chain.emit("Sqrt", [chain.emit("Abs", [x], x.shape)], x.shape, exact=False, most=max(1.0, x.most))
    require(operator != "Exp" or x.most <= 4)
    most = math.exp(4) if operator == "Exp" else max(1.0, x.most + 1)
    return chain.emit(operator, [x], x.shape, exact=False, most=most)


def clip(chain: Chain, x: Value) -> Value:
    require(x.dtype not in ("bool", "uint8"))
    low, high = chain.scalar(-1, x.dtype), chain.scalar(2, x.dtype)
    return chain.emit("Clip", [x, low, high], x.shape, most=min(x.most, 2.0))


def _broadcastable(chain: Chain, x: Value) -> tuple[int, ...]:
    rng = chain.rng
    shape = tuple(1 if rng.random() < 0.4 else n for n in x.shape)
    return shape[rng.randint(0, x.rank) :] if rng.random() < 0.3 else shape


def _result_shape(a: Value, b: Value) -> tuple[int, ...]:
    return tuple(np.broadcast_shapes(a.shape, b.shape))


def combined(chain: Chain, operator: str, a: Value, b: Value) -> Value:
    """``a`` and ``b``, whose shapes fit each other, element by element."""
    most = {"Add": a.most + b.most, "Sub": a.most + b.most, "Mul": a.most * b.most}.get(operator, max(a.most, b.most))
    require(operator != "Sub" or a.dtype != "uint8")
    return chain.emit(operator, [a, b], _result_shape(a, b), most=most)


def binary(chain: Chain, x: Value) -> Value:
    """With a new operand that is broadcast, or that widens ``x``, on either side."""
    rng = chain.rng
    require(x.dtype != "bool")
    other = chain.input(_broadcastable(chain, x), x.dtype, constant=rng.random() < 0.5)
    pair = [x, other] if rng.random() < 0.7 else [other, x]
    return combined(chain, rng.choice(("Add", "Sub", "Mul", "Max", "Min")), pair[0], pair[1])


def residual(chain: Chain, x: Value) -> Value:
    """With an earlier tensor of the chain of a shape that fits."""
    fitting = [v for v in chain.values if v.dtype == x.dtype and v.name != x.name and fits(v.shape, x.shape)]
    require(bool(fitting) and x.dtype != "bool")
    other = chain.rng.choice(fitting)
    return combined(chain, chain.rng.choice(("Add", "Add", "Mul", "Sub", "Max")), x, other)


def fits(a: Sequence[int], b: Sequence[int]) -> bool:
    """Whether tensors of these shapes broadcast to one."""
    pairs = zip(reversed(a), reversed(b), strict=False)
    return all(n == m or 1 in (n, m) for n, m in pairs)


def divide(chain: Chain, x: Value) -> Value:
    require(x.is_float)
    return chain.emit("Div", [x, chain.scalar(chain.rng.choice((2, 3, 8)), x.dtype)], x.shape, exact=False)


def cast(chain: Chain, x: Value) -> Value:
    """To a type that holds all its values; to integers only what is whole."""
    rng = chain.rng
    floats = [t for t in ("float32", "float16", "float64") if t != "float16" or x.most <= 1000]
    floats += ["bfloat16"] if chain.dtype == "bfloat16" or rng.random() < 0.1 else []
    whole = [t for t in INTEGERS if x.exact and x.most <= EXACT_BELOW[t] and (t != "uint8" or _is_unsigned(x))]
    to = rng.choice([t for t in (*floats, *whole, *(("bool",) if x.exact else ())) if t != x.dtype])
    exact = x.exact and ("float" not in to or x.most <= EXACT_BELOW[to])
    return chain.emit(
        "Cast", [x], x.shape, {"to": _code(to)}, dtype=to, exact=exact, most=1.0 if to == "bool" else None
    )


def _is_unsigned(x: Value) -> bool:
    return x.dtype in ("uint8", "bool")


def _code(dtype: str) -> int:
    return int(helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))


def condition(chain: Chain, x: Value) -> Value:
    """A bool of the shape of ``x``: a comparison where its values are exact, else a new input."""
    if x.exact and x.dtype not in ("bool", "uint8"):
        other = chain.input(_broadcastable(chain, x), x.dtype, constant=chain.rng.random() < 0.5)
        operator = chain.rng.choice(("Less", "Greater", "Equal", "GreaterOrEqual", "LessOrEqual"))
        return chain.emit(operator, [x, other], x.shape, dtype="bool", most=1.0, exact=True)
    return chain.input(_broadcastable(chain, x), "bool", constant=chain.rng.random() < 0.3)


def compare(chain: Chain, x: Value) -> Value:
    require(x.exact and x.dtype not in ("bool", "uint8"))
    found = condition(chain, x)
    return chain.emit("Not", [found], found.shape) if chain.rng.random() < 0.3 else found


def logic(chain: Chain, x: Value) -> Value:
    require(x.dtype == "bool")
    other = chain.input(_broadcastable(chain, x), "bool", constant=chain.rng.random() < 0.5)
    return chain.emit(chain.rng.choice(("And", "Or", "Xor")), [x, other], x.shape)


def where(chain: Chain, x: Value) -> Value:
    require(x.dtype != "bool")
    where_x = condition(chain, x)
    other = chain.input(_broadcastable(chain, x), x.dtype, constant=chain.rng.random() < 0.5)
    pair = [x, other] if chain.rng.random() < 0.6 else [other, x]
    most, exact = max(x.most, other.most), x.exact and other.exact
    return chain.emit("Where", [where_x, *pair], x.shape, dtype=x.dtype, most=most, exact=exact)


# --- over rows ------------------------------------------------------------------------------------------------------
def softmax(chain: Chain, x: Value) -> Value:
    require(x.is_float and x.rank > 0)
    axis = chain.rng.choice((-1, -1, chain.rng.randrange(x.rank)))
    operator = chain.rng.choice(("Softmax", "Softmax", "LogSoftmax"))
    most = 1.0 if operator == "Softmax" else 2 * x.most + math.log(x.shape[axis]) + 1
    return chain.emit(operator, [x], x.shape, {"axis": axis}, exact=False, most=most)


def layer_norm(chain: Chain, x: Value) -> Value:
    require(x.dtype in ("bfloat16", "float32") and x.rank > 1 and x.shape[-1] > 1)
    scale, bias = (chain.input((x.shape[-1],), x.dtype, constant=True) for _ in range(2))
    most = math.sqrt(x.shape[-1]) * scale.most + bias.most
    return chain.emit(
        "LayerNormalization", [x, scale, bias], x.shape, {"epsilon": 0.01, "axis": -1}, exact=False, most=most
    )


def instance_norm(chain: Chain, x: Value) -> Value:
    require(x.dtype in ("bfloat16", "float32") and x.rank in (3, 4) and math.prod(x.shape[2:]) > 1)
    scale, bias = (chain.input((x.shape[1],), x.dtype, constant=True) for _ in range(2))
    most = math.sqrt(math.prod(x.shape[2:])) * scale.most + bias.most
    return chain.emit("InstanceNormalization", [x, scale, bias], x.shape, {"epsilon": 0.01}, exact=False, most=most)


def argmax(chain: Chain, x: Value) -> Value:
    require(x.exact and x.is_float and x.rank > 0)
    rng = chain.rng
    axis, keep = rng.randrange(x.rank), rng.randrange(2)
    shape = [1 if a == axis else n for a, n in enumerate(x.shape) if keep or a != axis]
    operator = rng.choice(("ArgMax", "ArgMin"))
    return chain.emit(operator, [x], shape, {"axis": axis, "keepdims": keep}, dtype="int64", most=float(x.shape[axis]))


def cumulative_sum(chain: Chain, x: Value) -> Value:
    require(x.dtype in ("float32", "float64", "int32", "int64") and x.rank > 0)
    axis = chain.rng.randrange(x.rank)
    how = {"exclusive": chain.rng.randrange(2), "reverse": chain.rng.randrange(2)}
    most = x.most * x.shape[axis]
    return chain.emit("CumSum", [x, chain.scalar(axis, "int64")], x.shape, how, most=most)


# --- a second product -----------------------------------------------------------------------------------------------
def product(chain: Chain, x: Value) -> Value:
    require(x.rank >= 2 and x.dtype in ("bfloat16", "float16", "float32", "float64", "int32", "int64"))
    return product_of(chain, x, size(chain, 33), constant=chain.rng.random() < 0.7)


def gram(chain: Chain, x: Value) -> Value:
    """``x`` times its own transpose: attention's scores."""
    require(x.rank >= 2 and x.is_float)
    depth = x.shape[-1]
    order = (*range(x.rank - 2), x.rank - 1, x.rank - 2)
    turned = chain.emit("Transpose", [x], [x.shape[a] for a in order], {"perm": order})
    require(x.size * x.shape[-2] <= 2**20)
    return chain.emit("MatMul", [x, turned], (*x.shape[:-1], x.shape[-2]), most=x.most**2 * depth)


def convolution(chain: Chain, x: Value) -> Value:
    """An image convolved: all channels with each other, by groups, or each by itself."""
    require(x.rank in (3, 4, 5) and x.is_float and x.shape[1] <= 64)
    rng, count = chain.rng, x.shape[1]
    groups = rng.choice([g for g in (1, 1, 2, count, count) if count % g == 0])
    return convolved(chain, x, groups, rng.choice((1, 3, 16, 17)) if groups == 1 else groups * rng.choice((1, 1, 2)))


def pool(chain: Chain, x: Value) -> Value:
    require(x.rank in (3, 4, 5) and x.is_float)
    return pooled(chain, x, chain.rng.choice(("MaxPool", "AveragePool")))
