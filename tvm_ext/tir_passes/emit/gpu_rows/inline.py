"""Computes again what is cheaper to compute than to keep: stages' values in place of loads of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from tvm_ext.analysis.stages import Stage, mentions, reads, replace_loads, substitute

from .form import position_of


def own_values(stages: Sequence[Stage], is_replaced: Callable[[Stage], bool]) -> list[Stage]:
    """The stages with loads of those that ``is_replaced`` by their values: computed again where they are read."""
    done: list[Stage] = []
    for stage in stages:
        gone = [earlier for earlier in done if is_replaced(earlier) and reads(stage.value, earlier.target)]

        def value_of(item: Any, gone: Sequence[Stage] = gone) -> Any:
            return next((earlier.value for earlier in gone if earlier.target.same_as(item.source)), item)

        done.append(dataclasses.replace(stage, value=replace_loads(stage.value, value_of)))
    return done


def may_inline(stage: Stage) -> bool:
    """Whether every axis of a plain stage is one index of its target: its value can be computed where it is read."""
    written = [p for item in stage.indices if (p := position_of(stage, item)) is not None]
    rest = [item for item in stage.indices if position_of(stage, item) is None]
    return (
        not stage.is_reduction
        and sorted(written) == list(range(len(stage.variables)))
        and not any(mentions(item, *stage.variables) for item in rest)
    )


def inlined(producer: Stage, consumer: Stage) -> Stage:
    """``consumer`` computing what it read of ``producer``, which `may_inline`."""
    assert may_inline(producer)

    def compute(item: Any) -> Any:
        if not item.source.same_as(producer.target):
            return item
        pairs = zip(producer.indices, item.indices, strict=True)
        return substitute(producer.value, [(v, x) for v, x in pairs if position_of(producer, v) is not None])

    return dataclasses.replace(consumer, value=replace_loads(consumer.value, compute))
