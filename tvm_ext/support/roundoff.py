"""By how much a kernel's result may differ from what is right: the rules of docs/testing.md as numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from .arrays import Array

UNIT_ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
"""IEEE 754: half a unit in the last place; bfloat16: 8 bits of precision."""

ROUNDOFF_FACTORS = {"float64": (2.0, 16.0), "float32": (2.0, 16.0), "float16": (0.5, 3.0), "bfloat16": (0.5, 3.0)}
"""(a, b) of `allowed_error`, three times what is observed. In single precision b covers the polynomials of exp, tanh
and erf, which half precision's coarser unit hides."""


def allowed_error(input_dtypes: Iterable[str], out_dtype: str, depth: int) -> float:
    """The allowed relative error by norm: ``u * (a * sqrt(K) + b)`` with the coarsest type's u, and 0 for integers.

    ``depth`` is K, how many elements go into one of the result. Rounding K additions of values of either sign errs by
    about u * sqrt(K) relative to the sum's own size, each rounding being a random fraction of u. Worked example: K =
    4096 in single precision, u = 6e-8, allows 6e-8 * (2 * 64 + 16) = 8.6e-6; one forgotten product out of 4096 would be
    1 / sqrt(4096) = 1.6e-2.
    """
    floats = [dtype for dtype in (*input_dtypes, out_dtype) if dtype in UNIT_ROUNDOFF]
    if not floats or out_dtype not in UNIT_ROUNDOFF:
        return 0.0
    coarsest = max(floats, key=lambda dtype: UNIT_ROUNDOFF[dtype])
    a, b = ROUNDOFF_FACTORS[coarsest]
    return UNIT_ROUNDOFF[coarsest] * (a * math.sqrt(depth) + b)


def relative_error(actual: Array, expected: Array) -> float:
    """||actual - expected|| / ||expected||; infinite where one is not finite and the other is not equal to it."""
    if actual.shape != expected.shape:
        return math.inf
    found, right = actual.astype(np.float64).ravel(), expected.astype(np.float64).ravel()
    finite = np.isfinite(right)
    if not np.array_equal(found[~finite], right[~finite], equal_nan=True):
        return math.inf
    difference, size = float(np.linalg.norm(found[finite] - right[finite])), float(np.linalg.norm(right[finite]))
    if not math.isfinite(difference):
        return math.inf
    return difference / size if size else (0.0 if difference == 0 else math.inf)
