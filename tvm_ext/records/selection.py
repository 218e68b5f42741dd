"""Selections that one kernel computes, as the first k of an axis or boxes that overlap little; and sums so far."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

TOP_K = "tvm_ext.top_k"
"""PrimFunc attribute: the `TopK` that the function computes, as JSON."""

SUPPRESSION = "tvm_ext.suppression"
"""PrimFunc attribute: the function computes ONNX's NonMaxSuppression of boxes that corners give, all classes apart.

Its parameters are boxes (batch, n, 4), scores (batch, classes, n), the overlap from which a box goes, the score above
which one counts (scalars, float32), then rows (m, 3) of image, class and box (int64), and how many of them are filled
(1,). Each image and class has an equal share of the rows at most.
"""

COMPACTION = "tvm_ext.compaction"
"""PrimFunc attribute: the function writes where its first parameter is not zero (n,), then how often that is (1,)."""

UNIQUE = "tvm_ext.unique"
"""PrimFunc attribute: the function computes `ir.radix_sort.unique`, whose parameters it has."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TopK:
    """The first elements along ``axis`` in descending order (``largest``) or ascending order, and their positions.

    Of equal elements the first goes first. The function's parameters are data, values, positions (int64).
    """

    axis: int
    largest: bool


SCAN = "tvm_ext.scan"
"""PrimFunc attribute: the `Scan` that the function computes, as JSON."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scan:
    """Sums, or products, of all elements of ``axis`` up to each one; with ``exclusive`` up to the one before it.

    The function's parameters are data and sums, of one shape and of the type that is summed in.
    """

    axis: int
    combiner: Literal["sum", "prod"]
    exclusive: bool
