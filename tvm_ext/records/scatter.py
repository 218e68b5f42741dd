"""A scatter that one kernel computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

SCATTER = "tvm_ext.scatter"
"""PrimFunc attribute: the `Scatter` that the function computes, as JSON."""

ScatterReduction = Literal["update", "add", "mul", "min", "max"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Scatter:
    """``output = data; output[..., index, ...] = reduction(itself, update)`` for each update, in their order.

    The function's parameters are data, indices, updates, output. ``axes`` of data are indexed: with ``by_tuple`` the
    leading ones, by tuples along the last axis of indices (ONNX's ScatterND); else one, and each update has an index of
    its own (ScatterElements), its other axes being those of data.
    """

    axes: tuple[int, ...]
    by_tuple: bool
    reduction: ScatterReduction
