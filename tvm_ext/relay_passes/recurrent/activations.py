"""The activations that recurrent operators name, as Relax expressions."""

from __future__ import annotations

from collections.abc import Callable

from tvm_ext._tvm import BlockBuilder, Expr, relax
from tvm_ext.records.recurrent import ActivationName, GateActivation

_Function = Callable[[Expr, GateActivation, str], Expr]


def activated(builder: BlockBuilder, x: Expr, activation: GateActivation, dtype: str) -> Expr:
    """``activation`` of ``x``, emitted."""
    return builder.emit(_FUNCTIONS[activation.name](x, activation, dtype))


def _affine(x: Expr, activation: GateActivation, dtype: str) -> Expr:
    scaled = relax.op.multiply(x, relax.const(activation.alpha, dtype))
    return relax.op.add(scaled, relax.const(activation.beta, dtype))


def _hard_sigmoid(x: Expr, activation: GateActivation, dtype: str) -> Expr:
    return relax.op.clip(_affine(x, activation, dtype), 0.0, 1.0)


def _scaled_tanh(x: Expr, activation: GateActivation, dtype: str) -> Expr:
    inner = relax.op.tanh(relax.op.multiply(x, relax.const(activation.beta, dtype)))
    return relax.op.multiply(inner, relax.const(activation.alpha, dtype))


def _thresholded_relu(x: Expr, activation: GateActivation, dtype: str) -> Expr:
    is_over = relax.op.greater_equal(x, relax.const(activation.alpha, dtype))
    return relax.op.where(is_over, x, relax.op.zeros_like(x))  # a constant would be a tensor beside the function


def _elu(x: Expr, activation: GateActivation, dtype: str) -> Expr:
    """The exponential of what is not positive: of large numbers it would be infinite, where it is not even chosen."""
    zero, one = relax.const(0.0, dtype), relax.const(1.0, dtype)
    curve = relax.op.subtract(relax.op.exp(relax.op.minimum(x, zero)), one)
    below = relax.op.multiply(curve, relax.const(activation.alpha, dtype))
    return relax.op.where(relax.op.greater_equal(x, zero), x, below)


def _softsign(x: Expr, _activation: GateActivation, dtype: str) -> Expr:
    return relax.op.divide(x, relax.op.add(relax.op.abs(x), relax.const(1.0, dtype)))


def _softplus(x: Expr, _activation: GateActivation, dtype: str) -> Expr:
    """log(1 + e^x) = max(x, 0) + log(1 + e^-|x|), whose exponential is at most 1."""
    small = relax.op.exp(relax.op.negative(relax.op.abs(x)))
    rest = relax.op.log(relax.op.add(small, relax.const(1.0, dtype)))
    return relax.op.add(relax.op.maximum(x, relax.const(0.0, dtype)), rest)


_FUNCTIONS: dict[ActivationName, _Function] = {
    "Affine": _affine,
    "Elu": _elu,
    "HardSigmoid": _hard_sigmoid,
    "LeakyRelu": lambda x, activation, dtype: relax.op.nn.leakyrelu(x, activation.alpha),
    "Relu": lambda x, activation, dtype: relax.op.nn.relu(x),
    "ScaledTanh": _scaled_tanh,
    "Sigmoid": lambda x, activation, dtype: relax.op.sigmoid(x),
    "Softplus": _softplus,
    "Softsign": _softsign,
    "Tanh": lambda x, activation, dtype: relax.op.tanh(x),
    "ThresholdedRelu": _thresholded_relu,
}
