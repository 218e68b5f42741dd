"""Computes again what is cheaper to compute than to keep: computations' values in place of loads of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tvm_ext.analysis.computations import Computation, mentions, reads, replace_loads, substitute

from .form import position_of

if TYPE_CHECKING:
    from tvm_ext._tvm import Expr, TensorLoad


def own_values(computations: Sequence[Computation], is_replaced: Callable[[Computation], bool]) -> list[Computation]:
    """The computations with loads of those that ``is_replaced`` by their values: computed again where they are read."""
    done: list[Computation] = []
    for computation in computations:
        gone = [earlier for earlier in done if is_replaced(earlier) and reads(computation.value, earlier.target)]

        def value_of(item: TensorLoad, gone: Sequence[Computation] = gone) -> Expr | None:
            return next((earlier.value for earlier in gone if earlier.target.same_as(item.source)), item)

        done.append(dataclasses.replace(computation, value=replace_loads(computation.value, value_of)))
    return done


def may_inline(computation: Computation) -> bool:
    """Whether every axis of a plain computation is one index of its target: it can be computed where it is read."""
    written = [p for item in computation.indices if (p := position_of(computation, item)) is not None]
    rest = [item for item in computation.indices if position_of(computation, item) is None]
    return (
        not computation.is_reduction
        and sorted(written) == list(range(len(computation.variables)))
        and not any(mentions(item, *computation.variables) for item in rest)
    )


def inlined(producer: Computation, consumer: Computation) -> Computation:
    """``consumer`` computing what it read of ``producer``, which `may_inline`."""
    assert may_inline(producer)

    def compute(item: TensorLoad) -> Expr:
        if not item.source.same_as(producer.target):
            return item
        pairs = zip(producer.indices, item.indices, strict=True)
        return substitute(producer.value, [(v, x) for v, x in pairs if position_of(producer, v) is not None])

    return dataclasses.replace(consumer, value=replace_loads(consumer.value, compute))
