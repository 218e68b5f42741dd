"""Computes again what is cheaper to compute than to keep: computations' values in place of loads of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tvm_ext.analysis.computations import Computation, mentions, reads, replace_reads, substitute

from .form import position_of

if TYPE_CHECKING:
    from tvm_ext._tvm import Expr, TensorLoad


def compute_where_read(
    computations: Sequence[Computation],
    is_replaced: Callable[[Computation, Computation], bool],
    inline: Callable[[Computation, Computation], Computation],
) -> list[Computation]:
    """The computations with those before ``inline``d, of what they read, which ``is_replaced(earlier, reader)``."""
    done: list[Computation] = []
    for computation in computations:
        for earlier in done:
            if reads(computation.value, earlier.target) and is_replaced(earlier, computation):
                computation = inline(earlier, computation)
        done.append(computation)
    return done


def with_own_value(producer: Computation, consumer: Computation) -> Computation:
    """``consumer`` computing what it read of ``producer``, of a form whose computations read their own elements."""
    value = replace_reads(consumer.value, producer.target, lambda _: producer.value)
    return dataclasses.replace(consumer, value=value)


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

    def compute(item: TensorLoad) -> Expr:
        pairs = zip(producer.indices, item.indices, strict=True)
        return substitute(producer.value, [(v, x) for v, x in pairs if position_of(producer, v) is not None])

    return dataclasses.replace(consumer, value=replace_reads(consumer.value, producer.target, compute))
