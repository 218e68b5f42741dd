"""Runs of a batch in parts: inputs cut along the batch, outputs joined."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tvm_ext.records.batching import BatchAxes, BatchAxis
from tvm_ext.support.arrays import Array, aligned_empty


def cut(values: Sequence[Array], axes: BatchAxes, parts: Sequence[int]) -> list[list[Array]]:
    """The inputs of each part: of ``parts`` (8, 4, 1) elements 0 to 7, 8 to 11, and 12. Views where they are rows."""
    starts = np.concatenate(([0], np.cumsum(parts)[:-1])).tolist()
    return [
        [_section(value, batch, start, size) for value, batch in zip(values, axes.inputs, strict=True)]
        for start, size in zip(starts, parts, strict=True)
    ]


def _section(value: Array, batch: BatchAxis | None, start: int, size: int) -> Array:
    if batch is None:
        return value
    places = slice(start * batch.inner, (start + size) * batch.inner)
    return np.ascontiguousarray(value[(slice(None),) * batch.axis + (places,)])


def join(results: Sequence[Sequence[Array]], axes: BatchAxes) -> list[Array]:
    """The outputs of the whole batch, of the ``results`` of its parts in order."""
    return [
        np.array(pieces[0]) if batch is None else _joined(pieces, batch.axis)
        for pieces, batch in zip(zip(*results, strict=True), axes.outputs, strict=True)
    ]


def _joined(pieces: Sequence[Array], axis: int) -> Array:
    shape = list(pieces[0].shape)
    shape[axis] = sum(piece.shape[axis] for piece in pieces)
    return np.concatenate(pieces, axis, out=aligned_empty(shape, pieces[0].dtype))
