"""The generator: chain number ``index`` of a seed, the same on every machine and version of Python."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

from ..random_operators.draw import draw_options
from ..random_operators.sizes import Unsuitable
from . import draw_indexed, draw_shapes, draw_shared, draw_values
from .chain import Chain, Value
from .draw_producers import PRODUCERS, Producer, reduced
from .record import ChainCase, ChainOutput

Step = Callable[[Chain, Value], Value]

STEPS: tuple[tuple[Step, int], ...] = (
    (draw_shapes.slice_, 10),
    (draw_shapes.pad, 8),
    (draw_shapes.split, 6),
    (draw_shapes.concat, 8),
    (draw_shapes.transpose, 6),
    (draw_shapes.reshape, 6),
    (draw_shapes.squeeze, 2),
    (draw_shapes.flatten, 1),
    (draw_shapes.gather, 4),
    (draw_shapes.expand, 4),
    (draw_shapes.tile, 3),
    (draw_shapes.resize, 3),
    (draw_shapes.depth_to_space, 3),
    (draw_shapes.space_to_depth, 3),
    (draw_values.unary, 6),
    (draw_values.clip, 2),
    (draw_values.binary, 8),
    (draw_values.residual, 6),
    (draw_values.divide, 1),
    (draw_values.cast, 5),
    (draw_values.compare, 2),
    (draw_values.logic, 1),
    (draw_values.where, 3),
    (draw_values.softmax, 4),
    (draw_values.layer_norm, 2),
    (draw_values.instance_norm, 2),
    (draw_values.argmax, 1),
    (draw_values.cumulative_sum, 1),
    (reduced, 6),
    (draw_values.product, 4),
    (draw_values.gram, 2),
    (draw_values.convolution, 6),
    (draw_values.pool, 4),
    (draw_indexed.gather_elements, 2),
    (draw_indexed.gather_nd, 2),
    (draw_indexed.scatter_elements, 2),
    (draw_indexed.scatter_nd, 2),
    (draw_shared.identity, 1),
    (draw_shared.doubled, 4),
    (draw_shared.widened, 5),
    (draw_shared.centred, 6),
    (draw_shared.fanned, 6),
    (draw_shared.quantised, 5),
    (draw_shared.masked, 4),
    (draw_shared.emptied, 2),
)
"""What follows the producer, and how often. Those that change extents or offsets come first and most often."""

LONGEST = (1, 2, 3, 4, 4, 8)
ATTEMPTS = 8
"""Steps drawn before a chain that nothing fits ends as it is."""


def draw_case(seed: int, index: int, *, precision: str = "float32", floats: str = "") -> ChainCase:
    """Case ``index`` of ``seed``; ``floats``: the type that a chain of floats begins with, instead of one drawn."""
    kind, producer, dtypes = PRODUCERS[index % len(PRODUCERS)]
    rng = random.Random(f"chain {seed}/{index}")
    case = None
    while case is None:
        dtype = rng.choice(dtypes)
        dtype = floats if floats and "float" in dtype else dtype
        case = _attempt(rng, seed, index, kind, producer, dtype, precision)
    return case


def _attempt(
    rng: random.Random, seed: int, index: int, kind: str, producer: Producer, dtype: str, precision: str
) -> ChainCase | None:
    """One attempt; None for a producer whose window does not fit its input, or that is too large."""
    chain = Chain(rng, dtype, is_exact=rng.random() < 0.5, products=precision)
    try:
        value = producer(chain)
    except Unsuitable:
        return None
    for _ in range(rng.randint(1, rng.choice(LONGEST))):
        value = _extended(chain, value)
    return ChainCase(
        seed=seed,
        index=index,
        kind=kind,
        inputs=tuple(chain.inputs),
        nodes=tuple(chain.nodes),
        outputs=tuple(_outputs(chain, value)),
        precision=precision,
        **draw_options(rng),
    )


def _extended(chain: Chain, value: Value) -> Value:
    """One step more, of those that fit ``value``; a step that was begun in vain is taken back."""
    steps, weights = [step for step, _ in STEPS], [weight for _, weight in STEPS]
    for _ in range(ATTEMPTS):
        (step,) = chain.rng.choices(steps, weights)
        before = chain.mark()
        try:
            return step(chain, value)
        except Unsuitable:
            chain.take_back(before)
    return value


def _outputs(chain: Chain, last: Value) -> list[ChainOutput]:
    """The last tensor, every one that nothing else reads, and in one chain of three another one."""
    read = {name for node in chain.nodes for name in node.inputs}
    wanted = [value for value in chain.values if value.name not in read or value.name == last.name]
    if chain.rng.random() < 0.33:
        wanted.append(chain.rng.choice(chain.values))
    names = dict.fromkeys(value.name for value in wanted)
    by_name = {value.name: value for value in chain.values}
    return [
        ChainOutput(
            name=name,
            shape=by_name[name].shape,
            dtype=by_name[name].dtype,
            exact=by_name[name].exact,
            coarsest=by_name[name].coarsest,
            finite=math.isfinite(by_name[name].most),
        )
        for name in names
    ]
