"""Convolutions, transposed ones and pools of one to three axes, with all their attributes."""

from __future__ import annotations

import random
from collections.abc import Mapping
from functools import partial
from typing import Any

from .definitions import global_pool as global_pool_definition
from .definitions import pool as pool_definition
from .definitions import transposed_convolution as transposed_definition
from .record import Operand, Recipe

Drawn = tuple[str, Mapping[str, str], Recipe]

FLOATS = ("float32", "float32", "float32", "float16", "float64")


def numbers(chance: random.Random, count: int, low: int, high: int) -> list[int]:
    return [chance.randint(low, high) for _ in range(count)]


def flip(chance: random.Random, probability: float = 0.5) -> bool:
    return chance.random() < probability


def followers(chance: random.Random) -> tuple[str, ...]:
    return tuple(chance.sample(("Sign", "Abs", "Identity"), chance.choice((0, 0, 1, 2))))


def transposed_convolution(chance: random.Random) -> Drawn:
    rank, group = chance.randint(1, 3), chance.choice((1, 1, 2, 3))
    channels, filters = group * chance.choice((1, 2, 4)), chance.choice((1, 2, 3, 8))
    kernel, strides, dilations = numbers(chance, rank, 1, 4), numbers(chance, rank, 1, 3), [1] * rank
    if flip(chance, 0.3):
        dilations = numbers(chance, rank, 1, 2)
    extents = [chance.choice((1, 2, 4, 5, 9)) for _ in range(rank)]
    attributes: dict[str, Any] = {"group": group, "strides": strides, "dilations": dilations}
    extra = [chance.randrange(max(pair)) if flip(chance) else 0 for pair in zip(strides, dilations, strict=True)]
    attributes["output_padding"] = extra
    whole = [
        (n - 1) * s + (k - 1) * d + 1 + e
        for n, s, k, d, e in zip(extents, strides, kernel, dilations, extra, strict=True)
    ]
    way = chance.randrange(4)
    if way == 0:
        attributes["output_shape"] = [max(1, size + chance.randint(-3, 1)) for size in whole]
    if way == 1 or (way == 0 and flip(chance)):
        attributes["auto_pad"] = chance.choice(("SAME_UPPER", "SAME_LOWER", "VALID"))
    if way == 1 and any((k - 1) * d + 1 < s for k, d, s in zip(kernel, dilations, strides, strict=True)):
        attributes["auto_pad"] = "VALID"  # ONNX's text and its inference have another shape each
    if way == 2:
        attributes["pads"] = _pads_that_leave_some(chance, whole)
    weight = Operand(shape=(channels, filters, *kernel), is_known=flip(chance))
    bias = Operand(shape=(group * filters,), is_known=flip(chance)) if flip(chance) else None
    return (
        "ConvTranspose",
        {"T": chance.choice(FLOATS)},
        Recipe(
            operands=(Operand(shape=(chance.randint(1, 2), channels, *extents)), weight, bias),
            attributes=attributes,
            followers=followers(chance),
            definition=partial(transposed_definition, attributes),
        ),
    )


def _pads_that_leave_some(chance: random.Random, whole: list[int]) -> list[int]:
    before = [chance.randint(0, min(3, (size - 1) // 2)) for size in whole]
    behind = [chance.randint(0, min(3, (size - 1) // 2)) for size in whole]
    return before + behind


def convolution(chance: random.Random) -> Drawn:
    rank, group = chance.randint(1, 3), chance.choice((1, 1, 2, 4))
    channels, filters = group * chance.choice((1, 2, 3)), group * chance.choice((1, 2, 5))
    kernel, strides = numbers(chance, rank, 1, 3), numbers(chance, rank, 1, 3)
    attributes: dict[str, Any] = {"group": group, "strides": strides}
    if flip(chance, 0.4):
        attributes["dilations"] = numbers(chance, rank, 1, 3)
    if flip(chance, 0.3):
        attributes["auto_pad"] = chance.choice(("SAME_UPPER", "SAME_LOWER", "VALID"))
    elif flip(chance):
        attributes["pads"] = numbers(chance, 2 * rank, 0, 3)
    extents = numbers(chance, rank, 7, 10)
    return (
        "Conv",
        {"T": chance.choice(FLOATS)},
        Recipe(
            operands=(
                Operand(shape=(chance.randint(1, 3), channels, *extents)),
                Operand(shape=(filters, channels // group, *kernel), is_known=flip(chance, 0.7)),
                Operand(shape=(filters,), is_known=flip(chance, 0.7)) if flip(chance) else None,
            ),
            attributes=attributes,
            followers=followers(chance),
        ),
    )


def pool(chance: random.Random) -> Drawn:
    """Padding of dilated windows up to their reach, so that some have no element."""
    operator, rank = chance.choice(("MaxPool", "AveragePool", "LpPool")), chance.randint(1, 3)
    kernel, strides = numbers(chance, rank, 1, 4), numbers(chance, rank, 1, 4)
    dilations = numbers(chance, rank, 1, 3) if flip(chance, 0.4) else [1] * rank
    attributes: dict[str, Any] = {"kernel_shape": kernel, "strides": strides, "dilations": dilations}
    attributes["ceil_mode"] = chance.randrange(2)
    reach = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
    pads = [0] * (2 * rank)
    if flip(chance, 0.25):
        attributes["auto_pad"] = chance.choice(("SAME_UPPER", "SAME_LOWER", "VALID"))
    elif flip(chance, 0.8):
        pads = [chance.randrange(n) for n in (reach if flip(chance, 0.2) else kernel) * 2]
        attributes["pads"] = pads
    extents = [
        max(1, n - pads[axis] - pads[axis + rank]) + chance.randint(0, 6 if rank < 3 else 4)
        for axis, n in enumerate(reach)
    ]
    types, outputs = list(FLOATS), 1
    if operator == "AveragePool":
        attributes["count_include_pad"] = chance.randrange(2)
    if operator == "LpPool":
        attributes["p"] = chance.choice((1, 2, 2, 3))
    if operator == "MaxPool":
        types += ["int8", "uint8"]
        if flip(chance, 0.3):
            attributes["storage_order"], outputs = chance.randrange(2), 2
    return (
        operator,
        {"T": chance.choice(types)},
        Recipe(
            operands=(Operand(shape=(chance.randint(1, 2), chance.randint(1, 3), *extents)),),
            attributes=attributes,
            outputs=outputs,
            followers=followers(chance) if attributes.get("storage_order") is None else (),
            definition=partial(pool_definition, operator, attributes),
        ),
    )


def global_pool(chance: random.Random) -> Drawn:
    operator = chance.choice(("GlobalMaxPool", "GlobalAveragePool", "GlobalLpPool"))
    shape = (*numbers(chance, 2, 1, 5), *numbers(chance, chance.randint(1, 3), 1, 7))
    attributes = {"p": chance.choice((1, 2, 3))} if operator == "GlobalLpPool" else {}
    recipe = Recipe(
        operands=(Operand(shape=shape),),
        attributes=attributes,
        followers=followers(chance),
        definition=partial(global_pool_definition, operator, attributes),
    )
    return operator, {"T": chance.choice(FLOATS)}, recipe
