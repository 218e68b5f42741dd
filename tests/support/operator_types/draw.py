"""Nodes drawn at random, with every attribute that their operators have: case ``index`` of a seed, always the same."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import replace

from .draw_attributes import reduction, selection, shape_change
from .draw_layers import attention, recurrent
from .draw_windows import convolution, global_pool, pool, transposed_convolution
from .record import Recipe, TypeCase

Draw = Callable[[random.Random], tuple[str, Mapping[str, str], Recipe]]

KINDS: Mapping[str, Draw] = {
    item.__name__: item
    for item in (
        transposed_convolution,
        pool,
        recurrent,
        convolution,
        attention,
        shape_change,
        reduction,
        selection,
        global_pool,
    )
}

EMPTY_EVERY = 8
"""Every eighth round has an axis of 0 elements in the first operand."""


def draw_case(seed: int, index: int) -> TypeCase:
    """Kinds take turns."""
    chance = random.Random(f"{seed} {index}")
    operator, types, recipe = list(KINDS.values())[index % len(KINDS)](chance)
    if index // len(KINDS) % EMPTY_EVERY == EMPTY_EVERY - 1:
        recipe = _emptied(chance, operator, recipe)
    return TypeCase(operator=operator, types=tuple(types.items()), tried=tuple(types), drawn=(index, recipe))


def _emptied(chance: random.Random, operator: str, recipe: Recipe) -> Recipe:
    first, *others = recipe.operands
    if first is None or first.is_known or not first.shape:
        return recipe
    axis = chance.randrange(len(first.shape))
    shape = tuple(0 if position == axis else extent for position, extent in enumerate(first.shape))
    values = None if first.values is None else ()
    definition = recipe.definition if operator.endswith("Pool") else None  # of the others, whose operands must agree
    return replace(recipe, operands=(replace(first, shape=shape, values=values), *others), definition=definition)
