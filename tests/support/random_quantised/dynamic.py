"""Dynamically quantised products: one operand's scale and zero point come from its own extremes at each run."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto

from ..onnx_evaluator import by_onnx_runtime
from ..random_cases import WrongResultError
from ..random_operators.record import Array
from ..random_operators.sizes import Unsuitable
from .draw_layers import Drawing, conv, matmul
from .writer import MICROSOFT, Codes, Writer

FORMS = ("MatMulInteger", "ConvInteger", "DynamicQuantizeMatMul", "MatMulIntegerToFloat")
JITTER = 0.3  # of a step, so that no rounding is in doubt
TOLERANCE = 1e-5
"""Of the largest magnitude: sums are exact, what is behind them is float32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DynamicCase:
    """``x`` by ``weights`` in the operator ``form``, with a ``bias`` in floats."""

    form: str
    x: Array
    weights: Codes
    attributes: dict[str, Any]
    bias: Array | None

    def __str__(self) -> str:
        kind = f"{self.weights.dtype}{list(self.weights.shape)} zero {self.weights.zero}"
        return f"{self.form}({list(self.x.shape)}, {kind}) {self.attributes}"


def draw(seed: int, index: int) -> DynamicCase:
    """Case ``index`` of ``seed``."""
    rng = random.Random(f"dynamic {seed}/{index}")
    drawing = Drawing(rng=rng, numbers=np.random.default_rng([seed, index]))
    form = rng.choice(FORMS)
    while True:
        image = (rng.choice((1, 2)), rng.randint(1, 33), rng.randint(2, 11), rng.randint(2, 11))
        shape = image if form == "ConvInteger" else (*(2,) * rng.choice((0, 0, 1)), rng.randint(1, 40), image[1] * 3)
        codes = Codes(name="x", shape=shape, scale=np.asarray(drawing.scale()), zero=np.array(0, "uint8"))
        try:
            layer, _ = (conv if form == "ConvInteger" else matmul)(drawing, codes, "integers")
        except Unsuitable:
            continue
        bias = None if layer.bias is None else layer.bias.astype(np.float32) * 0.01
        x = _floats(drawing, shape, float(codes.scale))
        return DynamicCase(form=form, x=x, weights=layer.operands[1], attributes=dict(layer.attributes), bias=bias)


def _floats(drawing: Drawing, shape: tuple[int, ...], scale: float) -> Array:
    """Floats that 255 steps of ``scale`` cover, each near the middle of its step."""
    zero = drawing.rng.choice((0, 1, 128, 200, 255))
    steps = drawing.numbers.integers(0, 256, shape).astype(np.float64) - zero
    steps = steps + drawing.numbers.uniform(-JITTER, JITTER, shape)
    steps = np.clip(steps, -zero, 255 - zero)
    flat = steps.reshape(-1)
    flat[0], flat[-1] = (-zero, 255 - zero) if flat.size > 1 else (255 - zero or -zero,) * 2
    return (steps * scale).astype(np.float32)


def model_of(case: DynamicCase) -> onnx.ModelProto:
    """The model under test, whose input is ``x``."""
    writer, weights = Writer(), case.weights
    zero = writer.constant(weights.zero)
    bias = [] if case.bias is None else [writer.constant(case.bias)]
    scale = writer.constant(weights.scale)
    if case.form == "DynamicQuantizeMatMul":
        inputs = ["x", writer.held(weights), scale, zero, *bias]
        return writer.model({"x": case.x}, [writer.add(case.form, *inputs, domain=MICROSOFT)])
    codes = [f"x_{stem}" for stem in ("codes", "scale", "zero")]
    writer.nodes.append(onnx.helper.make_node("DynamicQuantizeLinear", ["x"], codes))
    if case.form == "MatMulIntegerToFloat":
        inputs = [codes[0], writer.held(weights), codes[1], scale, codes[2], zero, *bias]
        return writer.model({"x": case.x}, [writer.add(case.form, *inputs, domain=MICROSOFT)])
    sums = writer.add(case.form, codes[0], writer.held(weights), codes[2], zero, **case.attributes)
    real = writer.add("Mul", writer.add("Cast", sums, to=TensorProto.FLOAT), writer.add("Mul", codes[1], scale))
    if case.bias is not None:
        real = writer.add("Add", real, writer.constant(_per_channel(case)))
    return writer.model({"x": case.x}, [real])


def _per_channel(case: DynamicCase) -> Array:
    assert case.bias is not None
    return case.bias.reshape(-1, *(1,) * (case.x.ndim - 2)) if case.form == "ConvInteger" else case.bias


def expected(case: DynamicCase) -> Array:
    """By ONNX's definition of DynamicQuantizeLinear; whole numbers below 2**24 are exact in float32."""
    low, high = min(0.0, float(case.x.min())), max(0.0, float(case.x.max()))
    scale = np.float32(np.float32(high - low) / np.float32(255))
    zero = np.clip(np.rint(np.float32(-low) / scale), 0, 255)
    codes = np.clip(np.rint(case.x / scale) + zero, 0, 255) - zero
    weights = np.asarray(case.weights.value, np.float64) - float(case.weights.zero)
    if case.form == "ConvInteger":
        upper, lower = np.divmod(weights, 16)
        sums = 16.0 * _convolved(case, codes, upper) + _convolved(case, codes, lower)
    else:
        sums = codes.astype(np.float64) @ weights
    real: Array = sums * float(scale) * float(case.weights.scale)
    return real if case.bias is None else real + _per_channel(case)


def _convolved(case: DynamicCase, codes: Array, weights: Array) -> Array:
    """By ONNX Runtime in float32, exact as long as sums are below 2**24: of 255 * 16 * 4,000 products."""
    writer, inputs = Writer(), {"x": codes.astype(np.float32)}
    name = writer.add("Conv", "x", writer.constant(weights.astype(np.float32)), **case.attributes)
    (sums,) = by_onnx_runtime(writer.model(inputs, [name]).SerializeToString(), inputs)
    return sums.astype(np.float64)


def compare(case: DynamicCase, made: Array) -> None:
    """Raises WrongResultError where ``made`` is wrong."""
    wanted = expected(case)
    error = np.abs(made - wanted).max(initial=0) if made.shape == wanted.shape else math.inf
    most = TOLERANCE * max(1e-6, float(np.abs(wanted).max(initial=0)))
    if not error <= most:
        raise WrongResultError(f"{case}: {made.shape}, {wanted.shape}, off by {error:.2e}, more than {most:.2e}")
