"""Recurrent layers and attention with all their attributes and operands."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import numpy as np

from ..recurrent_nodes import attributes_of, drawn, expected, operands
from .definitions import attention as attention_definition
from .definitions import recurrent as recurrent_definition
from .draw_windows import FLOATS, Drawn, flip
from .record import Operand, Recipe

TAME = 100.0
"""Draws of growing activations reach what float32 does not hold."""


def recurrent(chance: random.Random) -> Drawn:
    while True:
        seed = chance.randrange(1 << 30)
        node = drawn(seed)
        values = operands(node, seed)
        with np.errstate(all="ignore"):
            if max(float(np.abs(one).max()) for one in expected(node, values)) < TAME:
                break
    names = ["x", "w", "r", "b", "lengths", "h0", *(["c0", "p"] if node.kind == "LSTM" else [])]
    given = [None if name not in values else _like(name, values[name], node.are_weights_inputs) for name in names]
    recipe = Recipe(
        operands=tuple(given),
        attributes=attributes_of(node),
        outputs=len(node.results),
        definition=partial(recurrent_definition, node),
    )
    types = {"T": chance.choice(FLOATS)}
    return node.kind, types | ({"T1": "int32"} if node.lengths else {}), recipe


def _like(name: str, value: Any, are_inputs: bool) -> Operand:
    if name == "lengths":
        return Operand(shape=value.shape, values=tuple(value.tolist()))
    return Operand(shape=value.shape, low=-1.0, high=1.0, is_known=name != "x" and not are_inputs)


def attention(chance: random.Random) -> Drawn:
    """Three or four axes, shared heads, masks of either kind, a past or valid lengths, all outputs."""
    batch, key_heads, groups = chance.randint(1, 2), chance.choice((1, 2, 3)), chance.choice((1, 1, 2))
    queries, keys, features, width = (chance.choice((1, 2, 3, 5, 8)) for _ in range(4))
    heads, past = key_heads * groups, chance.choice((0, 0, 2)) if flip(chance) else 0
    attributes: dict[str, Any] = {"is_causal": chance.randrange(2), "qk_matmul_output_mode": chance.randrange(4)}
    if flip(chance, 0.3):
        attributes["softcap"] = chance.choice((0.5, 2.0))
    if flip(chance, 0.3):
        attributes["scale"] = chance.choice((0.1, 0.7))
    shapes = [(heads, queries, features), (key_heads, keys, features), (key_heads, keys, width)]
    if flip(chance):
        made = [Operand(shape=(batch, *shape)) for shape in shapes]
    else:
        attributes |= {"q_num_heads": heads, "kv_num_heads": key_heads}
        made = [Operand(shape=(batch, rows, count * size)) for count, rows, size in shapes]
    types = {"T1": chance.choice(FLOATS)}
    types["T2"] = types["T1"]
    mask = None
    if flip(chance, 0.6):
        types["U"] = chance.choice(("bool", types["T1"]))
        ahead = [chance.choice(((), (1,), (heads,))), chance.choice(((1,), (batch,)))]
        mask = Operand(shape=((*ahead[1], *ahead[0]) if ahead[0] else ()) + (queries, keys + past))
    held: list[Operand | None] = [None, None]
    if past:
        held = [Operand(shape=(batch, key_heads, past, size)) for size in (features, width)]
    if not past and flip(chance):
        lengths = tuple(chance.randint(0, keys) for _ in range(batch))
        held.append(Operand(shape=(batch,), values=lengths, is_known=flip(chance, 0.3)))
    outputs = 4 if past else 1
    recipe = Recipe(
        operands=(*made, mask, *held),
        attributes=attributes,
        outputs=outputs,
        definition=partial(attention_definition, attributes, outputs),
    )
    return "Attention", types, recipe
