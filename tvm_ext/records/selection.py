"""Selections that one kernel computes: the first k of an axis, boxes that overlap little, elements that are not 0."""

from __future__ import annotations

from dataclasses import dataclass

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


@dataclass(frozen=True, kw_only=True, slots=True)
class TopK:
    """The first elements along ``axis`` in descending order (``largest``) or ascending order, and their positions.

    Of equal elements the first goes first. The function's parameters are data, values, positions (int64).
    """

    axis: int
    largest: bool
