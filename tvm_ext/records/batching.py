"""Open dimensions as data: which axis of a tensor is the batch, which sizes are built, how others are divided."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchAxis:
    """The batch of a tensor lies on ``axis``, whose extent is ``outer`` times the batch size times ``inner``.

    Element ``i`` of the batch of ``size`` are the places ``(u * size + i) * inner + j``. Inputs and outputs of a model
    have an ``outer`` of 1.
    """

    axis: int
    inner: int = 1
    outer: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchAxes:
    """Where the batch lies in each input and output of a model; None for a tensor that has none.

    Proven: element ``i`` of an output depends on elements ``i`` of the inputs alone, by one function for all sizes.
    """

    inputs: tuple[BatchAxis | None, ...]
    outputs: tuple[BatchAxis | None, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenDimension:
    """A dimension that stays open in a library.

    Attributes
    ----------
    name
        Its name in the model.
    sizes
        The sizes that have a variant, ascending.
    largest
        The largest size that a run may have.
    axes
        With `BatchAxes` any size up to ``largest`` runs, divided into ``sizes``; without, ``sizes`` alone do.
    reason
        Why sizes are not divided; empty where they are.
    """

    name: str
    sizes: tuple[int, ...]
    largest: int
    axes: BatchAxes | None = None
    reason: str = ""

    def parts(self, size: int) -> tuple[int, ...]:
        """The variants that run ``size``, the largest first; empty where it cannot run. 13 is 8 + 4 + 1.

        >>> OpenDimension(name="n", sizes=(1, 2, 4, 8), largest=20, axes=BatchAxes(inputs=(), outputs=())).parts(13)
        (8, 4, 1)
        """
        if size in self.sizes:
            return (size,)
        if self.axes is None or not 1 <= size <= self.largest:
            return ()
        return divided(size, self.sizes)


def powers_of_two(largest: int) -> tuple[int, ...]:
    """1, 2, 4, ... up to ``largest``."""
    return tuple(1 << place for place in range(largest.bit_length()))


def divided(size: int, buckets: Sequence[int]) -> tuple[int, ...]:
    """``size`` as a sum of ``buckets``, of which 1 is one, the largest first."""
    parts: list[int] = []
    for bucket in sorted(buckets, reverse=True):
        count, size = divmod(size, bucket)
        parts += [bucket] * count
    assert not size, "1 is a bucket"
    return tuple(parts)
