"""Open dimensions as data: which axis of a tensor is the batch, which sizes are built, how others are divided."""

from __future__ import annotations

from collections.abc import Mapping
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

    * ``name``: its name in the model.
    * ``sizes``: the sizes that have a variant, ascending.
    * ``largest``: the largest size that a run may have.
    * ``axes``: with `BatchAxes` any size up to ``largest`` runs, by some of ``sizes``; without, ``sizes`` alone do.
    * ``reason``: why sizes are not divided; empty where they are.
    """

    name: str
    sizes: tuple[int, ...]
    largest: int
    axes: BatchAxes | None = None
    reason: str = ""


def powers_of_two(largest: int) -> tuple[int, ...]:
    """1, 2, 4, ... up to ``largest``."""
    return tuple(1 << place for place in range(largest.bit_length()))


def cheapest(size: int, costs: Mapping[int, float]) -> tuple[int, ...]:
    """The buckets that run ``size`` for the least sum of ``costs``, by bucket, the largest first; few where equal.

    Their sum is ``size`` or more: the last one's further places are padding.

    >>> cheapest(13, {1: 1.0, 2: 2.0, 4: 3.9, 8: 7.5, 16: 15.0}), cheapest(15, {1: 2.0, 4: 3.0, 8: 5.0, 16: 9.0})
    ((8, 4, 1), (16,))
    """
    best: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    for rest in range(1, size + 1):
        before = ((bucket, best[max(0, rest - bucket)]) for bucket in costs)
        choices = [(costs[bucket] + cost, (*parts, bucket)) for bucket, (cost, parts) in before]
        best.append(min(choices, key=lambda choice: (choice[0], len(choice[1]))))
    return tuple(sorted(best[size][1], reverse=True))
