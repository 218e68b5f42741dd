"""Runs of a batch in parts: inputs cut along the batch, outputs joined."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tvm_ext.records.batching import BatchAxes, BatchAxis
from tvm_ext.support.arrays import Array, aligned_empty


def cut(values: Sequence[Array], axes: BatchAxes, parts: Sequence[int]) -> list[list[Array]]:
    """The inputs of each part: of ``parts`` (8, 4, 1) elements 0 to 7, 8 to 11, and 12. Views where they are rows.

    A last part that reaches beyond the batch has its last element again and again: a value that the model takes.
    """
    starts = np.concatenate(([0], np.cumsum(parts)[:-1])).tolist()
    return [
        [_section(value, batch, start, size) for value, batch in zip(values, axes.inputs, strict=True)]
        for start, size in zip(starts, parts, strict=True)
    ]


def _section(value: Array, batch: BatchAxis | None, start: int, size: int) -> Array:
    if batch is None:
        return value
    axis, inner = batch.axis, batch.inner
    section = value[_places(batch, start * inner, (start + size) * inner)]
    missing = size - section.shape[axis] // inner
    if not missing:
        return np.ascontiguousarray(section)
    last = section[_places(batch, section.shape[axis] - inner, None)]
    return _joined([section, *[last] * missing], axis)


def _places(batch: BatchAxis, start: int, end: int | None) -> tuple[slice, ...]:
    return (*(slice(None),) * batch.axis, slice(start, end))


def join(results: Sequence[Sequence[Array]], axes: BatchAxes, size: int) -> list[Array]:
    """The outputs of a batch of ``size``, of the ``results`` of its parts in order, without padding."""
    return [
        np.array(pieces[0]) if batch is None else _joined(_without_padding(pieces, batch, size), batch.axis)
        for pieces, batch in zip(zip(*results, strict=True), axes.outputs, strict=True)
    ]


def _without_padding(pieces: Sequence[Array], batch: BatchAxis, size: int) -> list[Array]:
    *full, last = pieces
    left = size * batch.inner - sum(piece.shape[batch.axis] for piece in full)
    return [*full, last[_places(batch, 0, left)]]


def _joined(pieces: Sequence[Array], axis: int) -> Array:
    shape = list(pieces[0].shape)
    shape[axis] = sum(piece.shape[axis] for piece in pieces)
    return np.concatenate(pieces, axis, out=aligned_empty(shape, pieces[0].dtype))
