"""Draws mutated models: the same seed and number give the same bytes."""

from __future__ import annotations

import functools
import random
import warnings
from collections.abc import Sequence

import onnx

from .mutate import NODE_MUTATIONS
from .mutate_graph import GRAPH_MUTATIONS, damage_bytes
from .record import HostileCase
from .seeds import SEEDS

_LIGHT = ("squeezenet", "shufflenet")
# What a change of the changed cannot do: no such attribute, a number beyond a field, a type that NumPy lacks.
_IMPOSSIBLE = (ValueError, TypeError, KeyError, IndexError, onnx.defs.SchemaError)


def draw_case(seed: int, index: int, *, suite: bool = False) -> HostileCase:
    """Mutated model ``index``: one to three changes of one sound model, or every sixth time of its bytes.

    ``suite``: models of the ONNX package are sound models as well (every operator of its tests, two networks), which
    takes 15 s to load.
    """
    draw = random.Random(f"{seed}:{index}")
    models = [*_small_models(), *(_suite_models() if suite and index % 2 else ())]
    origin, data = draw.choice(models)
    if index % 6 == 5:
        return HostileCase(kind="bytes", name=f"{index} {origin}", data=damage_bytes(data, draw))
    model = onnx.ModelProto.FromString(data)
    done = [_mutate(model, draw) for _ in range(draw.choice((1, 1, 2, 3)))]
    return HostileCase(kind="mutated", name=f"{index} {origin}: {', '.join(done)}", data=model.SerializeToString())


def _mutate(model: onnx.ModelProto, draw: random.Random) -> str:
    change = draw.choice((*NODE_MUTATIONS, *GRAPH_MUTATIONS))
    try:
        change(model, draw)
    except _IMPOSSIBLE:
        return f"({change.__name__})"
    return change.__name__


@functools.cache
def _small_models() -> Sequence[tuple[str, bytes]]:
    return [(seed.name, seed.model().SerializeToString()) for seed in SEEDS]


@functools.cache
def _suite_models() -> Sequence[tuple[str, bytes]]:
    """The first test of every operator alone, of those that are small, and small networks."""
    from onnx.backend.test.loader import load_model_tests

    from tvm_ext.bench.light import build_light

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cases = load_model_tests(kind="node")
    found: dict[str, tuple[str, bytes]] = {}
    for case in cases:
        if case.model is not None and len(case.model.graph.node) == 1:
            found.setdefault(case.model.graph.node[0].op_type, (case.name, case.model.SerializeToString()))
    networks = [(name, build_light(name, batch=1, seed=0, logits=True).SerializeToString()) for name in _LIGHT]
    return [*found.values(), *networks]
