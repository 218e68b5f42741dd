"""The generator: case number ``index`` of a seed. Scales of results follow from their range in ONNX Runtime."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import numpy as np

from ..random_operators.record import Array
from .draw_layers import CHANNELS, WIDTHS, Drawing, draw_layer
from .writer import FORMS, Codes, Layer, evaluate_plain

LONGEST = 4
TARGETS = ("llvm", "llvm", "llvm", "x86-64-v4", "x86-64-v3", "cpu-sse2")
"""This machine's CPU; its instruction set without dot products, wide and narrow; one without either."""


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantisedCase:
    """``layers`` with their results, each behind the one before. ``inputs`` with ``data`` are the model's, as bytes.

    ``floats``: inputs are given as floats. ``exposed``: the result of every layer is an output, else that of the last.
    """

    seed: int
    index: int
    layers: tuple[tuple[Layer, Codes], ...]
    inputs: tuple[Codes, ...]
    data: dict[str, Array]
    floats: bool
    exposed: bool
    target: str
    guarded: bool

    @property
    def kind(self) -> str:
        return f"{self.layers[0][0].form} {self.layers[0][0].operator}"

    def __str__(self) -> str:
        lines = [f"#{self.index} for {self.target}{', floats' if self.floats else ''}"]
        lines += [
            f"  {item.name}: {item.dtype}{list(item.shape)}, scale {item.scale:g}, zero {item.zero}"
            for item in self.inputs
        ]
        for layer, result in self.layers:
            operands = ", ".join(
                f"{own.name} {own.dtype}{list(own.shape)}{' by channel' if own.scale.size > 1 else ''}"
                for own in layer.operands
            )
            facts = [*(f"{key}={value}" for key, value in layer.attributes.items()), layer.activation]
            facts += ["bias"] if layer.bias is not None else []
            made = f"{result.dtype}{list(result.shape)}, scale {float(result.scale):g}, zero {result.zero}"
            lines.append(f"  {result.name} = {layer.form} {layer.operator}({operands}) {' '.join(facts)} -> {made}")
        return "\n".join(lines)


def draw_case(seed: int, index: int) -> QuantisedCase:
    """Case ``index`` of ``seed``."""
    rng = random.Random(f"quantised {seed}/{index}")
    while True:
        case = _attempt(rng, seed, index)
        if case is not None:
            return case


def _attempt(rng: random.Random, seed: int, index: int) -> QuantisedCase | None:
    drawing = Drawing(rng=rng, numbers=np.random.default_rng([seed, index, rng.randrange(1 << 30)]))
    form = FORMS[index % len(FORMS)]
    x = drawing.input(_shape(rng), rng.choice(("uint8", "uint8", "int8")))
    data: dict[str, Array] = {}
    layers: list[tuple[Layer, Codes]] = []
    for position in range(rng.choice((1, 1, 1, 2, 3, LONGEST))):
        drawn = draw_layer(drawing, x, form, first=position == 0)
        if drawn is None:
            break
        layer, shape = drawn
        for item in drawing.inputs:
            data.setdefault(item.name, drawing.bytes(item.shape, item.dtype))
        x = _result(drawing, layer, shape, data)
        data[x.name] = evaluate_plain(layer, data, x)
        assert data[x.name].shape == shape, (layer, shape, data[x.name].shape)
        layers.append((layer, x))
    if not layers:
        return None
    return QuantisedCase(
        seed=seed, index=index, layers=tuple(layers), inputs=tuple(drawing.inputs),
        data={item.name: data[item.name] for item in drawing.inputs}, floats=rng.random() < 0.5,
        exposed=rng.random() < 0.5, target=TARGETS[index // len(FORMS) % len(TARGETS)], guarded=rng.random() < 0.4,
    )  # fmt: skip


def _shape(rng: random.Random) -> tuple[int, ...]:
    kind = rng.random()
    if kind < 0.55:
        return (rng.choice((1, 1, 1, 2)), rng.choice(CHANNELS), rng.randint(1, 14), rng.randint(1, 14))
    if kind < 0.65:
        return (rng.choice((1, 2)), rng.choice(CHANNELS), rng.randint(1, 60))
    if kind < 0.7:
        return (1, rng.choice((1, 3, 8, 16)), rng.randint(1, 5), rng.randint(1, 7), rng.randint(1, 7))
    batch = [rng.randint(1, 6) for _ in range(rng.choice((0, 0, 1, 2)))]
    return (*batch, rng.choice((1, 2, 3, 5, 8, 16, 33)), rng.choice(WIDTHS))


def _result(drawing: Drawing, layer: Layer, shape: tuple[int, ...], data: dict[str, Array]) -> Codes:
    """The codes of the layer's result: its range is covered, or a part of it, from a zero point of any kind."""
    first, rng = layer.operands[0], drawing.rng
    if layer.exact:
        return replace(first, name=drawing.name("y"), shape=shape)
    real = evaluate_plain(layer, data, None)
    kind = first.dtype if layer.form == "operators" else rng.choice(("uint8", "uint8", "int8"))
    limits = np.iinfo(kind)
    low, high = min(0.0, float(real.min())), max(0.0, float(real.max()))
    scale = np.float32(max(high - low, 1e-3) / 255 * rng.choice((1.0, 1.0, 0.6, 1.3)))
    middle = round(limits.min - low / float(scale))
    zero = drawing.zero(kind) if rng.random() < 0.2 else np.array(np.clip(middle, limits.min, limits.max), kind)
    return Codes(name=drawing.name("y"), shape=shape, scale=np.asarray(scale), zero=zero)
