"""How sizes are drawn: small numbers, primes, ones and the neighbours of powers of two, within a bound on the work."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

from .record import CaseInput, OperatorCase

Draw = Callable[[random.Random], OperatorCase]
"""Draws an operator; `draw_case` fills in seed, index and kind, and adds what goes before and after."""

SIZES = (
    1, 1, 2, 3, 4, 5, 7, 8, 11, 13, 16, 17, 19, 23, 31, 32, 33, 37, 47, 49, 56, 63, 64, 65, 83, 96, 97, 127, 128, 129,
    191, 255, 256, 257, 383, 509, 512, 768, 1000, 1021,
)  # fmt: skip

WORK = 2**20
"""Multiply-adds of most cases: a millisecond."""

LARGE_WORK = 2**24
"""Of one case in eight: large enough for several L2 tiles and for every core."""

MOST_SUMMED = 2**14
"""Values of about 1 in a half-precision sum: far below 65504, the largest number, which a mean's divisor is too."""

UNSET = -1
"""Seed and index of a case until `draw_case` sets them."""


def drawn_case(operator: str, inputs: tuple[CaseInput, ...], **others: Any) -> OperatorCase:
    """A case before `draw_case` numbers it: of as many operands as ``inputs`` unless ``others`` has ``arity``."""
    settings = {"arity": len(inputs), **others}
    return OperatorCase(seed=UNSET, index=UNSET, kind="", operator=operator, inputs=inputs, **settings)


class Unsuitable(Exception):  # noqa: N818 - no error: the generator draws again
    """What was drawn describes no operator, or too large a one."""


def size(rng: random.Random, most: int) -> int:
    return rng.choice([value for value in SIZES if value <= most])


def budget(rng: random.Random) -> int:
    return LARGE_WORK if rng.random() < 0.125 else WORK


def shape(rng: random.Random, rank: int, most: int) -> tuple[int, ...]:
    """``rank`` sizes with a product of at most ``most``; the largest are drawn again, smaller, until that holds."""
    sizes = [size(rng, most) for _ in range(rank)]
    while math.prod(sizes) > most:
        largest = max(range(rank), key=lambda position: sizes[position])
        sizes[largest] = size(rng, sizes[largest] - 1)
    return tuple(sizes)


def rank(rng: random.Random, least: int = 1, most: int = 4) -> int:
    return rng.randint(least, most)


def float_dtype(rng: random.Random) -> str:
    return rng.choice(("float32", "float32", "float16"))


def require(condition: bool) -> None:
    if not condition:
        raise Unsuitable


def subset(rng: random.Random, count: int) -> tuple[int, ...]:
    """Some of 0 .. count - 1, at least one, in order."""
    return tuple(sorted(rng.sample(range(count), rng.randint(1, count))))


def window_steps(
    sizes: Sequence[int], kernel: Sequence[int], strides: Sequence[int], dilation: Sequence[int], padding: Sequence[int]
) -> tuple[int, ...]:
    """Output sizes of a convolution or pool, rounded down; raises Unsuitable where a window does not fit."""
    half = len(padding) // 2
    steps = []
    for n, k, s, d, before, after in zip(sizes, kernel, strides, dilation, padding[:half], padding[half:], strict=True):
        left = n + before + after - ((k - 1) * d + 1)
        require(left >= 0)
        steps.append(left // s + 1)
    return tuple(steps)
