"""Seeded values of a network's weights, scaled so that wrong answers are visible."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]

IR_VERSION = 8
"""Late enough that initializers need not be listed as graph inputs, so that every importer sees them as constants."""


def generator(seed: int, name: str) -> np.random.Generator:
    """A generator that depends on the seed and the tensor's name alone, not on the order of creation."""
    return np.random.default_rng([seed, zlib.crc32(name.encode())])


def he_normal(seed: int, name: str, shape: Sequence[int], fan_in: int) -> FloatArray:
    """Float32 weights of variance 2 / fan_in, which keeps the scale of activations through ReLU layers (He et al.)."""
    values = generator(seed, name).standard_normal(tuple(shape), dtype=np.float32)
    values *= np.float32(np.sqrt(2.0 / fan_in))
    return values


def small_normal(seed: int, name: str, shape: Sequence[int], deviation: float = 0.1) -> FloatArray:
    """Float32 values around 0: biases and BatchNormalization means."""
    values = generator(seed, name).standard_normal(tuple(shape), dtype=np.float32)
    values *= np.float32(deviation)
    return values


def near_one(seed: int, name: str, shape: Sequence[int], spread: float) -> FloatArray:
    """Float32 values in [1 - spread, 1 + spread]: scales and variances."""
    low, high = 1.0 - spread, 1.0 + spread
    return generator(seed, name).uniform(low, high, tuple(shape)).astype(np.float32)
