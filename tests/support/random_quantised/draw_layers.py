"""Draws one layer behind tensors of bytes: shapes, strides, groups, paddings, scales and zero points of all kinds."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..random_operators.record import Array
from ..random_operators.sizes import Unsuitable, require, window_steps
from .writer import Codes, Layer

MOST_WORK = 2**19
CHANNELS = (1, 2, 3, 4, 5, 7, 8, 12, 15, 16, 17, 20, 24, 31, 32, 33, 40, 48, 64)
WIDTHS = (1, 2, 3, 4, 5, 7, 8, 13, 16, 21, 31, 32, 33, 48, 64, 96, 100, 128)
ZEROS = ("lowest", "highest", "middle", "any")
ACTIVATIONS = ("", "", "", "Relu", "Relu", "Sigmoid", "HardSwish")


@dataclass(kw_only=True)
class Drawing:
    """What the chain has so far. ``inputs`` are further inputs of the model, with their codes' type and scale."""

    rng: random.Random
    numbers: np.random.Generator
    inputs: list[Codes] = field(default_factory=list)
    count: int = 0

    def name(self, stem: str) -> str:
        self.count += 1
        return f"{stem}{self.count}"

    def scale(self) -> Array:
        scale = self.rng.choice((1.0, 0.5, 0.02, 0.0078125, 0.003921569, 0.1))
        return np.asarray(scale * self.rng.uniform(0.5, 1), np.float32)

    def zero(self, kind: str) -> Array:
        limits = np.iinfo(kind)
        places = {"lowest": limits.min, "highest": limits.max, "middle": (limits.min + limits.max + 1) // 2}
        place = self.rng.choice(ZEROS)
        return np.array(places.get(place, self.rng.randint(limits.min, limits.max)), kind)

    def bytes(self, shape: tuple[int, ...], kind: str) -> Array:
        limits = np.iinfo(kind)
        return self.numbers.integers(limits.min, limits.max + 1, shape).astype(kind)

    def input(self, shape: tuple[int, ...], kind: str) -> Codes:
        """A further input of the model."""
        codes = Codes(name=self.name("x"), shape=shape, scale=np.asarray(self.scale()), zero=self.zero(kind))
        self.inputs.append(codes)
        return codes

    def weights(self, shape: tuple[int, ...], axis: int, *, form: str, per_channel: bool = True) -> Codes:
        """Constant bytes, with a scale for each index of ``axis`` or one, unsigned ones with a zero point."""
        kind = self.rng.choice(("int8", "int8", "int8", "uint8"))
        channels = shape[axis] if per_channel and self.rng.random() < 0.6 else 0
        if channels and form != "integers":
            scale = self.numbers.uniform(0.001, 0.02, channels).astype(np.float32)
            zero = np.zeros(channels, kind) if kind == "int8" else np.full(channels, 128, kind)
        else:
            scale = np.asarray(np.float32(self.rng.uniform(0.001, 0.02)))
            zero = self.zero(kind) if self.rng.random() < 0.3 else np.array(0 if kind == "int8" else 128, kind)
        return Codes(name=self.name("w"), shape=shape, scale=scale, zero=zero, axis=axis, value=self.bytes(shape, kind))

    def bias(self, count: int) -> Array | None:
        return self.numbers.integers(-5000, 5000, count).astype(np.int32) if self.rng.random() < 0.6 else None


Draw = Callable[[Drawing, Codes, str], tuple[Layer, tuple[int, ...]]]
"""(drawing, what is there, form) -> the layer and its result's shape; raises Unsuitable."""


def conv(drawing: Drawing, x: Codes, form: str) -> tuple[Layer, tuple[int, ...]]:
    rng = drawing.rng
    require(len(x.shape) in (3, 4, 5))
    channels, space = x.shape[1], x.shape[2:]
    groups = rng.choice([1, 1, channels, *(n for n in (2, 4) if channels % n == 0)])
    filters = groups * rng.choice((1, 1, 2, 3)) if groups > 1 else rng.choice(CHANNELS)
    taps = tuple(rng.choice((1, 1, 2, 3, 3, 5)) for _ in space)
    strides, dilations = (tuple(rng.choice((1, 1, 1, 2, 3)) for _ in space) for _ in range(2))
    pads = tuple(rng.choice((0, 0, 1, 1, 2)) for _ in range(2 * len(space)))
    require(all(pad < (tap - 1) * own + 1 for pad, tap, own in zip(pads, taps * 2, dilations * 2, strict=True)))
    steps = window_steps(space, taps, strides, dilations, pads)
    shape = (x.shape[0], filters, *steps)
    require(math.prod(shape) * channels // groups * math.prod(taps) <= MOST_WORK)
    weight = drawing.weights((filters, channels // groups, *taps), 0, form=form)
    attributes = {
        "kernel_shape": taps, "strides": strides, "dilations": dilations, "pads": pads, "group": groups
    }  # fmt: skip
    return _layer(drawing, "Conv", (x, weight), form, attributes, drawing.bias(filters)), shape


def matmul(drawing: Drawing, x: Codes, form: str) -> tuple[Layer, tuple[int, ...]]:
    require(len(x.shape) >= 2)
    columns = drawing.rng.choice(WIDTHS)
    require(math.prod(x.shape) * columns <= MOST_WORK)
    weight = drawing.weights((x.shape[-1], columns), 1, form=form)
    bias = drawing.bias(columns) if form != "operators" else None
    return _layer(drawing, "MatMul", (x, weight), form, {}, bias), (*x.shape[:-1], columns)


def product_of_activations(drawing: Drawing, x: Codes, form: str) -> tuple[Layer, tuple[int, ...]]:
    require(len(x.shape) >= 2)
    columns = drawing.rng.choice(WIDTHS)
    require(math.prod(x.shape) * columns <= MOST_WORK)
    batch = x.shape[:-2] if drawing.rng.random() < 0.6 else ()
    other = drawing.input((*batch, x.shape[-1], columns), drawing.rng.choice(("uint8", "int8")))
    return _layer(drawing, "MatMul", (x, other), form, {}, None), (*x.shape[:-1], columns)


def gemm(drawing: Drawing, x: Codes, form: str) -> tuple[Layer, tuple[int, ...]]:
    require(len(x.shape) == 2)
    columns, turned = drawing.rng.choice(WIDTHS), drawing.rng.random() < 0.5
    require(math.prod(x.shape) * columns <= MOST_WORK)
    shape = (columns, x.shape[1]) if turned else (x.shape[1], columns)
    weight = drawing.weights(shape, 1 - turned, form=form)
    form = "qdq" if form == "integers" else form
    layer = _layer(drawing, "Gemm", (x, weight), form, {"transB": int(turned)}, drawing.bias(columns))
    return layer, (x.shape[0], columns)


def binary(drawing: Drawing, x: Codes, form: str) -> tuple[Layer, tuple[int, ...]]:
    rng = drawing.rng
    operator, form = rng.choice(("Add", "Add", "Mul")), "qdq" if form == "integers" else form
    if rng.random() < 0.2:
        return _layer(drawing, operator, (x, x), form, {}, None), x.shape
    shape = tuple(1 if rng.random() < 0.2 else n for n in x.shape)
    other = drawing.input(shape, x.dtype)
    pair = (x, other) if rng.random() < 0.5 else (other, x)
    return _layer(drawing, operator, pair, form, {}, None), x.shape


def concat(drawing: Drawing, x: Codes, form: str) -> tuple[Layer, tuple[int, ...]]:
    axis = drawing.rng.randrange(len(x.shape))
    shape = tuple(drawing.rng.randint(1, 9) if place == axis else n for place, n in enumerate(x.shape))
    operands = [x, drawing.input(shape, x.dtype)]
    drawing.rng.shuffle(operands)
    total = tuple(n + shape[axis] if place == axis else n for place, n in enumerate(x.shape))
    form = "qdq" if form == "integers" else form
    return Layer(operator="Concat", operands=tuple(operands), attributes={"axis": axis}, form=form), total


def pool(drawing: Drawing, x: Codes, form: str) -> tuple[Layer, tuple[int, ...]]:
    rng = drawing.rng
    require(len(x.shape) in (3, 4))
    space, operator = x.shape[2:], rng.choice(("MaxPool", "MaxPool", "AveragePool", "GlobalAveragePool"))
    form = "qdq" if form == "integers" else form
    if operator == "GlobalAveragePool":
        return Layer(operator=operator, operands=(x,), attributes={}, form=form), (*x.shape[:2], *(1 for _ in space))
    taps, strides = (tuple(rng.choice((1, 2, 3)) for _ in space) for _ in range(2))
    pads = tuple(rng.randrange(tap) for tap in taps) * 2
    steps = window_steps(space, taps, strides, (1,) * len(space), pads)
    attributes: dict[str, Any] = {"kernel_shape": taps, "strides": strides, "pads": pads}
    if operator == "AveragePool":
        attributes["count_include_pad"] = int(rng.random() < 0.5)
    exact = operator == "MaxPool"
    layer = Layer(operator=operator, operands=(x,), attributes=attributes, exact=exact, form=form)
    return layer, (*x.shape[:2], *steps)


def activation(drawing: Drawing, x: Codes, form: str) -> tuple[Layer, tuple[int, ...]]:
    operator = drawing.rng.choice(("Sigmoid", "LeakyRelu", "Softmax", "Relu", "HardSwish", "Tanh"))
    form = form if form == "operators" and operator in ("Sigmoid", "LeakyRelu", "Softmax") else "qdq"
    known: dict[str, dict[str, Any]] = {"LeakyRelu": {"alpha": 0.1}, "Softmax": {"axis": len(x.shape) - 1}}
    return Layer(operator=operator, operands=(x,), attributes=known.get(operator, {}), form=form), x.shape


def move(drawing: Drawing, x: Codes, form: str) -> tuple[Layer, tuple[int, ...]]:
    rng = drawing.rng
    form = "qdq" if form == "integers" else form
    if rng.random() < 0.5:
        order = list(range(len(x.shape)))
        rng.shuffle(order)
        shape = tuple(x.shape[place] for place in order)
        return Layer(operator="Transpose", operands=(x,), attributes={"perm": order}, exact=True, form=form), shape
    require(len(x.shape) >= 2)
    place = rng.randrange(len(x.shape) - 1)
    shape = (*x.shape[:place], x.shape[place] * x.shape[place + 1], *x.shape[place + 2 :])
    plain = (np.asarray(shape, np.int64),)
    return Layer(operator="Reshape", operands=(x,), plain=plain, attributes={}, exact=True, form=form), shape


def _layer(
    drawing: Drawing, operator: str, operands: tuple[Codes, ...], form: str, attributes: dict[str, Any],
    bias: Array | None,
) -> Layer:  # fmt: skip
    activation = drawing.rng.choice(ACTIVATIONS) if form != "operators" else ""
    return Layer(
        operator=operator, operands=operands, attributes=attributes, bias=bias, activation=activation, form=form
    )


FIRST: tuple[tuple[Draw, int], ...] = (
    (conv, 10), (matmul, 6), (product_of_activations, 4), (gemm, 3), (binary, 3), (concat, 1), (pool, 2),
    (activation, 1),
)  # fmt: skip
"""What a chain may begin with, and how often."""
LATER: tuple[tuple[Draw, int], ...] = (*FIRST, (move, 2))


def draw_layer(drawing: Drawing, x: Codes, form: str, *, first: bool) -> tuple[Layer, tuple[int, ...]] | None:
    """A layer that fits ``x``; None where none was found."""
    draws = FIRST if first else LATER
    for _ in range(40):
        (draw,) = drawing.rng.choices([item for item, _ in draws], [weight for _, weight in draws])
        before = len(drawing.inputs)
        try:
            return draw(drawing, x, form)
        except Unsuitable:
            del drawing.inputs[before:]
    return None
