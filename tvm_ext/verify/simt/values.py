"""Values of expressions: a Python or NumPy scalar where all lanes agree, an array over lanes where they do not.

A scalar of the program is 0-dimensional (uniform) or ``(lanes,)``; a vector (float32x4) is ``(lanes or 1, elements)``.
`Tainted` wraps a value that depends on memory never written: as in Valgrind's memcheck, it may be moved and computed
with, and is an error only where it decides something: an address, a condition, what is stored to global memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tvm_ext.support.arrays import Array

Value = Any  # int | bool | np.generic | Array | Tainted
NEVER_WRITTEN = 1
"""The origin of memory's initial state; 0 is sound, higher numbers are reads of such memory (see `Engine.origins`)."""


class Tainted:
    """``value`` and where it came from: ``origin`` (int32, broadcast against value) is 0 where it is sound."""

    __slots__ = ("origin", "value")

    def __init__(self, value: Value, origin: Array) -> None:
        self.value = value
        self.origin = origin

    def __add__(self, other: Value) -> Tainted:
        return Tainted(self.value + strip(other), np.maximum(self.origin, origin_of(other)))

    __radd__ = __add__

    def __mul__(self, factor: int) -> Tainted:
        return Tainted(self.value * factor, self.origin)


def strip(value: Value) -> Value:
    """The plain value."""
    return value.value if type(value) is Tainted else value


def origin_of(value: Value) -> Array | int:
    """Its origin; 0 where all of it is sound."""
    return value.origin if type(value) is Tainted else 0


def is_uniform(value: Value) -> bool:
    """Whether all lanes agree on this plain scalar."""
    return getattr(value, "ndim", 0) == 0


def apply(function: Callable[..., Any], *values: Value) -> Value:
    """``function`` of the plain values; tainted where one of them is."""
    if not any(type(value) is Tainted for value in values):
        return function(*values)
    result = function(*map(strip, values))
    shape = np.shape(result)
    origin = np.zeros((1,) * len(shape), np.int32)
    for value in values:
        origin = np.maximum(origin, aligned(origin_of(value), len(shape)))
    return Tainted(result, origin)


def aligned(array: Value, dimensions: int) -> Value:
    """A scalar's array made broadcastable against a vector's: (lanes,) becomes (lanes, 1)."""
    if dimensions == 2 and getattr(array, "ndim", 0) == 1:
        return array[:, None]
    return array


def choose(condition: Array, yes: Value, no: Value) -> Value:
    """Lane-wise ``yes`` where ``condition``, else ``no``."""
    dimensions = max(np.ndim(strip(yes)), np.ndim(strip(no)), condition.ndim)
    where = aligned(condition, dimensions)
    result = np.where(where, strip(yes), strip(no))
    if type(yes) is not Tainted and type(no) is not Tainted:
        return result
    origins = (aligned(origin_of(value), dimensions) for value in (yes, no))
    return Tainted(result, np.where(where, *origins))


def in_lanes(value: Value, count: int, elements: int) -> Array:
    """A plain value spread out to ``(count,)``, or ``(count, elements)`` for a vector."""
    array = np.asarray(value)
    shape = (count,) if elements == 1 and array.ndim < 2 else (count, elements)
    return np.broadcast_to(aligned(array, len(shape)), shape)


def scattered(value: Array, index: Array | None, count: int) -> Array:
    """``value`` of the lanes ``index`` as an array over all ``count`` lanes (zero elsewhere)."""
    if index is None:
        return value
    result = np.zeros((count, *value.shape[1:]), value.dtype)
    result[index] = value
    return result
