"""Steps of a chain that read or write where numbers say: GatherElements, GatherND, ScatterElements, ScatterND."""

from __future__ import annotations

import itertools
import math

from ..random_operators.sizes import require
from .chain import Attributes, Chain, Value


def gather_elements(chain: Chain, x: Value) -> Value:
    rng = chain.rng
    require(x.rank > 0)
    axis = rng.randrange(x.rank)
    n = x.shape[axis]
    shape = [rng.randint(1, 6) if a == axis else rng.randint(1, m) for a, m in enumerate(x.shape)]
    require(math.prod(shape) <= 512)
    values = [rng.randrange(-n if rng.random() < 0.2 else 0, n) for _ in range(math.prod(shape))]
    indices = chain.numbers(values, rng.choice(("int64", "int32")), shape)
    return chain.emit("GatherElements", [x, indices], shape, {"axis": axis - rng.choice((0, x.rank))})


def gather_nd(chain: Chain, x: Value) -> Value:
    rng = chain.rng
    require(x.rank > 0)
    batch = rng.choice((0, 0, 1)) if x.rank > 1 else 0
    depth = rng.randint(1, x.rank - batch)
    extents = x.shape[batch : batch + depth]
    lead = [*x.shape[:batch], *(rng.randint(1, 4) for _ in range(rng.choice((0, 1, 1, 2)) if batch == 0 else 1))]
    require(math.prod(lead) * depth <= 512 and len(lead) + x.rank - batch - depth <= 6)
    values = [rng.randrange(n) for _ in range(math.prod(lead)) for n in extents]
    indices = chain.numbers(values, "int64", (*lead, depth))
    return chain.emit("GatherND", [x, indices], (*lead, *x.shape[batch + depth :]), {"batch_dims": batch})


def scatter_elements(chain: Chain, x: Value) -> Value:
    """Of different places along the axis, or added to what is there."""
    rng = chain.rng
    require(x.rank > 0 and x.dtype != "bool")
    axis = rng.randrange(x.rank)
    n, adds = x.shape[axis], rng.random() < 0.4
    count = rng.randint(1, min(n, 6))
    shape = [count if a == axis else rng.randint(1, m) for a, m in enumerate(x.shape)]
    require(math.prod(shape) <= 512)
    lines = math.prod(shape) // count
    drawn = [rng.choices(range(n), k=count) if adds else rng.sample(range(n), count) for _ in range(lines)]
    inner = math.prod(shape[axis + 1 :])
    values = [
        drawn[outer * inner + i][place]
        for outer in range(lines // inner) for place in range(count) for i in range(inner)
    ]  # fmt: skip
    updates = chain.input(shape, x.dtype, constant=rng.random() < 0.3)
    most = x.most + count * updates.most if adds else max(x.most, updates.most)
    how: Attributes = {"axis": axis, **({"reduction": "add"} if adds else {})}
    return chain.emit("ScatterElements", [x, chain.numbers(values, "int64", shape), updates], x.shape, how, most=most)


def scatter_nd(chain: Chain, x: Value) -> Value:
    """As `scatter_elements`, of whole slices."""
    rng = chain.rng
    require(x.rank > 0 and x.dtype != "bool")
    depth, adds = rng.randint(1, x.rank), rng.random() < 0.4
    places = list(itertools.islice(itertools.product(*map(range, x.shape[:depth])), 4096))
    count = rng.randint(1, min(len(places), 6))
    drawn = rng.choices(places, k=count) if adds else rng.sample(places, count)
    indices = chain.numbers([n for place in drawn for n in place], "int64", (count, depth))
    updates = chain.input((count, *x.shape[depth:]), x.dtype, constant=rng.random() < 0.3)
    most = x.most + count * updates.most if adds else max(x.most, updates.most)
    how = {"reduction": "add"} if adds else {}
    return chain.emit("ScatterND", [x, indices, updates], x.shape, how, most=most)
