"""Steps of a chain that move elements: slices, paddings, permutations, and what changes the number of elements."""

from __future__ import annotations

import itertools
import math
import random

from tvm_ext.support.arithmetic import ceil_div

from ..random_operators.sizes import require
from .chain import Chain, Value

HIGHEST_RANK = 6
STOCK_RESIZE = ("float32",)
_LEAST, _GREATEST = -(2**31), 2**31 - 1


def _axis(chain: Chain, x: Value, least: int = 1) -> int:
    fitting = [a for a, n in enumerate(x.shape) if n >= least]
    require(bool(fitting))
    return chain.rng.choice(fitting)


def _or_negative(rng: random.Random, axis: int, rank: int) -> int:
    return axis - rank if rng.random() < 0.3 else axis


def slice_(chain: Chain, x: Value) -> Value:
    """From 0 as often as not: what then reads its own element has another extent than its producer."""
    rng = chain.rng
    require(x.rank > 0)
    axes = rng.sample(range(x.rank), rng.randint(1, min(2, x.rank)))
    starts, ends, steps, shape = [], [], [], list(x.shape)
    for a in axes:
        n, step = x.shape[a], rng.choice((1, 1, 1, 2, 3, 5))
        first = 0 if rng.random() < 0.5 else rng.randrange(n)
        last = rng.randint(first + 1, n)
        shape[a] = ceil_div(last - first, step)
        if rng.random() < 0.15:  # backwards over the same elements
            first, last, step = n - 1, _LEAST, -step
            shape[a] = ceil_div(n, -step)
        starts.append(first - n if step > 0 and first and rng.random() < 0.2 else first)  # counted from the end
        ends.append(_GREATEST if last == n and step > 0 and rng.random() < 0.5 else last)
        steps.append(step)
    parts = [chain.numbers(values) for values in (starts, ends, axes, steps)]
    return chain.emit("Slice", [x, *parts], shape)


def pad(chain: Chain, x: Value) -> Value:
    rng = chain.rng
    require(x.rank > 0 and x.dtype != "bool")
    mode = rng.choice(("constant", "constant", "constant", "edge", "reflect"))
    most = [min(4, n - 1) if mode == "reflect" else 4 for n in x.shape]
    padded = rng.sample(range(x.rank), rng.randint(1, min(2, x.rank)))
    ends = [rng.randint(0, most[a]) if a in padded else 0 for a in range(x.rank)]
    if mode == "constant" and rng.random() < 0.25:  # below 0: elements go
        ends = [
            rng.randint(1 - n, -1) if a in padded and n > 1 else end
            for a, (n, end) in enumerate(zip(x.shape, ends, strict=True))
        ]
    begins = [rng.choice((0, rng.randint(0, most[a]))) if a in padded else 0 for a in range(x.rank)]
    shape = [begin + n + end for begin, n, end in zip(begins, x.shape, ends, strict=True)]
    fill = [chain.scalar(rng.choice((0, 0, 2)), x.dtype)] if mode == "constant" else []
    return chain.emit("Pad", [x, chain.numbers([*begins, *ends]), *fill], shape, {"mode": mode}, most=max(x.most, 2.0))


def split(chain: Chain, x: Value) -> Value:
    """Two or three parts, and the chain goes on with one; or two that are joined in the other order."""
    rng = chain.rng
    axis = _axis(chain, x, 2)
    n, count = x.shape[axis], rng.choice((2, 2, 3))
    require(n >= count)
    cuts = [0, *sorted(rng.sample(range(1, n), count - 1)), n]
    sizes = [b - a for a, b in itertools.pairwise(cuts)]
    shapes = [[size if a == axis else m for a, m in enumerate(x.shape)] for size in sizes]
    at = _or_negative(rng, axis, x.rank)
    parts = chain.emit_all("Split", [x, chain.numbers(sizes)], shapes, {"axis": at})
    if rng.random() < 0.4:
        return chain.emit("Concat", list(reversed(parts)), x.shape, {"axis": at})
    return rng.choice(parts)


def concat(chain: Chain, x: Value) -> Value:
    """With itself, an earlier tensor of the chain, or a new input, before or behind."""
    rng = chain.rng
    axis = _axis(chain, x)

    def fits(value: Value) -> bool:
        same = value.dtype == x.dtype and value.rank == x.rank
        return same and all(a == axis or n == m for a, (n, m) in enumerate(zip(value.shape, x.shape, strict=True)))

    earlier = [value for value in chain.values if fits(value) and (math.isfinite(value.most) or value is x)]
    if rng.random() < 0.5:
        other = rng.choice(earlier)
    else:
        other_shape = [rng.randint(1, 5) if a == axis else n for a, n in enumerate(x.shape)]
        other = chain.input(other_shape, x.dtype, constant=rng.random() < 0.3)
    parts = [x, other]
    rng.shuffle(parts)
    shape = [n if a != axis else sum(part.shape[axis] for part in parts) for a, n in enumerate(x.shape)]
    return chain.emit("Concat", parts, shape, {"axis": _or_negative(rng, axis, x.rank)})


def transpose(chain: Chain, x: Value) -> Value:
    require(x.rank > 1)
    order = list(range(x.rank))
    chain.rng.shuffle(order)
    return chain.emit("Transpose", [x], [x.shape[a] for a in order], {"perm": tuple(order)})


def reshape(chain: Chain, x: Value) -> Value:
    """Neighbouring axes joined, an axis divided, or both."""
    rng, shape = chain.rng, list(x.shape)
    if len(shape) > 1 and rng.random() < 0.7:
        first = rng.randrange(len(shape) - 1)
        shape[first : first + 2] = [shape[first] * shape[first + 1]]
    if not shape or rng.random() < 0.6:
        at = rng.randrange(len(shape)) if shape else 0
        n = shape[at] if shape else 1
        factor = rng.choice([f for f in range(1, n + 1) if n % f == 0])
        shape[at : at + 1] = [factor, n // factor]
    require(len(shape) <= HIGHEST_RANK)
    target = list(shape)
    if target and rng.random() < 0.3:
        target[rng.randrange(len(target))] = -1
    elif target and x.rank and target[0] == x.shape[0] and rng.random() < 0.3:
        target[0] = 0  # as the input's
    return chain.emit("Reshape", [x, chain.numbers(target)], shape)


def squeeze(chain: Chain, x: Value) -> Value:
    rng = chain.rng
    ones = [a for a, n in enumerate(x.shape) if n == 1]
    if ones and rng.random() < 0.5:
        gone = rng.choice(ones)
        return chain.emit("Squeeze", [x, chain.numbers([gone])], [n for a, n in enumerate(x.shape) if a != gone])
    require(x.rank < HIGHEST_RANK)
    at = rng.randint(0, x.rank)
    return chain.emit("Unsqueeze", [x, chain.numbers([at])], [*x.shape[:at], 1, *x.shape[at:]])


def gather(chain: Chain, x: Value) -> Value:
    rng = chain.rng
    axis = _axis(chain, x)
    n = x.shape[axis]
    shape = tuple(rng.randint(1, 6) for _ in range(rng.choice((0, 1, 1, 1, 2))))
    values = [rng.randrange(-n if rng.random() < 0.2 else 0, n) for _ in range(math.prod(shape))]
    indices = chain.numbers(values, rng.choice(("int64", "int64", "int32")), shape)
    require(x.rank - 1 + len(shape) <= HIGHEST_RANK)
    return chain.emit("Gather", [x, indices], (*x.shape[:axis], *shape, *x.shape[axis + 1 :]), {"axis": axis})


def expand(chain: Chain, x: Value) -> Value:
    rng = chain.rng
    shape = [rng.choice((1, 2, 5)) if n == 1 else n for n in x.shape]
    if len(shape) < HIGHEST_RANK and rng.random() < 0.6:
        shape = [rng.choice((1, 2, 3)), *shape]
    require(bool(shape))
    return chain.emit("Expand", [x, chain.numbers(shape)], shape)


def tile(chain: Chain, x: Value) -> Value:
    require(x.rank > 0)
    repeats = [chain.rng.choice((1, 1, 2, 3)) for _ in x.shape]
    return chain.emit("Tile", [x, chain.numbers(repeats)], [n * r for n, r in zip(x.shape, repeats, strict=True)])


def resize(chain: Chain, x: Value) -> Value:
    """Whole factors along the last two axes: how fractions are rounded is the node suite's matter.

    Stock TVM computes it in float32 whatever the type.
    """
    require(x.rank == 4 and x.is_float)
    rng = chain.rng
    factors = [1, 1, rng.choice((1, 2, 3)), rng.choice((1, 2, 2, 3))]
    shape = [n * f for n, f in zip(x.shape, factors, strict=True)]
    if rng.random() < 0.6:
        how = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
        return chain.emit("Resize", [x, "", chain.numbers(factors, "float32")], shape, how, passed=STOCK_RESIZE)
    how = {"mode": "linear", "coordinate_transformation_mode": rng.choice(("half_pixel", "asymmetric"))}
    return chain.emit(
        "Resize", [x, "", chain.numbers(factors, "float32")], shape, how, exact=False, passed=STOCK_RESIZE
    )


def depth_to_space(chain: Chain, x: Value) -> Value:
    require(x.rank == 4)
    n, c, h, w = x.shape
    fitting = [b for b in (2, 3) if c % (b * b) == 0]
    require(bool(fitting))
    block = chain.rng.choice(fitting)
    mode = chain.rng.choice(("DCR", "CRD"))
    return chain.emit("DepthToSpace", [x], (n, c // block**2, h * block, w * block), {"blocksize": block, "mode": mode})


def space_to_depth(chain: Chain, x: Value) -> Value:
    require(x.rank == 4)
    n, c, h, w = x.shape
    fitting = [b for b in (2, 3) if h % b == 0 and w % b == 0]
    require(bool(fitting))
    block = chain.rng.choice(fitting)
    return chain.emit("SpaceToDepth", [x], (n, c * block**2, h // block, w // block), {"blocksize": block})


def flatten(chain: Chain, x: Value) -> Value:
    axis = chain.rng.randint(0, x.rank)
    return chain.emit("Flatten", [x], (math.prod(x.shape[:axis]), math.prod(x.shape[axis:])), {"axis": axis})
