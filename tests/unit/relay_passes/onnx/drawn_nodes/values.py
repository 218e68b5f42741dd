"""Types and random values of drawn nodes."""

from __future__ import annotations

from typing import Any

import numpy as np

Generator = np.random.Generator
FLOATS = ("float32", "float64", "float16")
NUMBERS = ("float32", "float64", "float16", "int32", "int64", "int8", "uint8")


def numbers(draw: Generator, shape: Any, dtype: str) -> Any:
    if dtype == "bool":
        return draw.integers(0, 2, shape).astype(bool)
    if np.dtype(dtype).kind in "iu":
        return draw.integers(0 if dtype.startswith("u") else -100, 100, shape).astype(dtype)
    return draw.standard_normal(shape).astype(dtype)
