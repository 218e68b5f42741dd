"""wmma (``nvcuda::wmma``): a fragment is a whole matrix that a warp owns.

The ISA leaves open which lane holds which element ("wmma.load": the layout is unspecified), so a kernel can only load,
multiply, fill and store fragments, and modelling one as a matrix loses nothing.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from tvm_ext.errors import InputError
from tvm_ext.support.arrays import Array

from .fragments import round_accumulator

FragmentRole = Literal["a", "b", "accumulator"]
WMMA_SHAPES = ((16, 16, 16), (32, 8, 16), (8, 32, 16))  # PTX ISA, wmma: shapes of 16-bit floats and of bytes


def fragment_shape(role: FragmentRole, m: int, n: int, k: int) -> tuple[int, int]:
    """(rows, columns) of a fragment of ``wmma.m{m}n{n}k{k}``; raises InputError for a shape that does not exist."""
    if (m, n, k) not in WMMA_SHAPES:
        known = ", ".join(f"m{m}n{n}k{k}" for m, n, k in WMMA_SHAPES)
        raise InputError(f"wmma.m{m}n{n}k{k} does not exist", f"use one of {known}")
    return {"a": (m, k), "b": (k, n), "accumulator": (m, n)}[role]


def wmma_offsets(role: FragmentRole, m: int, n: int, k: int, *, layout: str, stride: int) -> Array:
    """(rows, columns): element offsets of a fragment from its pointer, for loads and stores alike.

    ``layout`` is ``"row_major"`` (element (i, j) at ``i * stride + j``) or ``"col_major"`` (at ``j * stride + i``).
    """
    rows, columns = np.indices(fragment_shape(role, m, n, k))
    if layout not in ("row_major", "col_major"):
        raise InputError(f"a wmma fragment in {layout} does not exist", "use row_major or col_major")
    return rows * stride + columns if layout == "row_major" else columns * stride + rows


def wmma(a: Array, b: Array, c: Array, *, accumulator: str) -> Array:
    """(..., m, n): ``a @ b + c``, rounded as `fragments.mma` does, in dtype ``accumulator``."""
    product = a.astype(np.float64) @ b.astype(np.float64)
    return round_accumulator(product, c, accumulator=accumulator)


def wmma_poison(a: Array, b: Array, c: Array) -> Array:
    """(..., m, n) booleans: which elements depend on poisoned elements of the operands."""
    return np.asarray(np.any(a, axis=-1, keepdims=True) | np.any(b, axis=-2, keepdims=True) | c)
