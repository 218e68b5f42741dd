"""Steps in which a tensor has several readers, goes through bytes, or holds what is no number for a while."""

from __future__ import annotations

import math

from ..random_operators.sizes import Unsuitable, require
from . import draw_indexed, draw_shapes, draw_values
from .chain import Attributes, Chain, Value
from .draw_producers import pooled, reduced

BYTES = {"uint8": (0, 255), "int8": (-128, 127)}


def identity(chain: Chain, x: Value) -> Value:
    return chain.emit("Identity", [x], x.shape)


def doubled(chain: Chain, x: Value) -> Value:
    """The same tensor as both operands."""
    rng = chain.rng
    require(x.dtype != "bool")
    if rng.random() < 0.2:
        return chain.emit("Where", [draw_values.condition(chain, x), x, x], x.shape, dtype=x.dtype, exact=x.exact)
    if x.is_float and x.rank > 1 and x.shape[-1] == x.shape[-2] and rng.random() < 0.6:
        return chain.emit("MatMul", [x, x], x.shape, most=x.most**2 * x.shape[-1])
    return draw_values.combined(chain, rng.choice(("Add", "Sub", "Mul", "Max", "Min")), x, x)


def widened(chain: Chain, x: Value) -> Value:
    """With a new operand: both are broadcast, each along axes of its own."""
    rng = chain.rng
    require(x.dtype != "bool")
    shape = [rng.choice((2, 3, 5)) if n == 1 else rng.choice((1, n)) for n in x.shape]
    shape = [rng.choice((1, 2, 3)) for _ in range(rng.randint(0, min(2, 6 - x.rank)))] + shape
    other = chain.input(shape, x.dtype, constant=rng.random() < 0.4)
    pair = [x, other] if rng.random() < 0.5 else [other, x]
    return draw_values.combined(chain, rng.choice(("Add", "Sub", "Mul", "Max")), pair[0], pair[1])


def centred(chain: Chain, x: Value) -> Value:
    """A statistic over some axes, broadcast back to what it was taken of: a norm by hand, or a part of one."""
    rng = chain.rng
    require(x.is_float and x.rank > 0)
    axes = tuple(sorted(rng.sample(range(x.rank), rng.randint(1, x.rank))))
    kept = tuple(1 if a in axes else n for a, n in enumerate(x.shape))

    def statistic(operator: str, of: Value, *, most: float, exact: bool) -> Value:
        keep = rng.random() < 0.6
        shape = kept if keep else tuple(n for a, n in enumerate(x.shape) if a not in axes)
        how: Attributes = {"axes": axes, "keepdims": int(keep)}
        found = chain.emit(operator, [of], shape, how, most=most, exact=exact)
        return found if keep else chain.emit("Unsqueeze", [found, chain.numbers(axes)], kept)

    operator = rng.choice(("ReduceMax", "ReduceMin", "ReduceMean", "ReduceMean"))
    exact = x.exact and operator != "ReduceMean"
    middle = statistic(operator, x, most=x.most, exact=exact)
    if operator != "ReduceMean" or rng.random() < 0.4:
        return draw_values.combined(chain, rng.choice(("Sub", "Add", "Mul", "Max")), x, middle)
    off = draw_values.combined(chain, "Sub", x, middle)
    square = chain.emit("Mul", [off, off], x.shape, most=off.most**2, exact=False)
    variance = statistic("ReduceMean", square, most=square.most, exact=False)
    raised = chain.emit("Add", [variance, chain.scalar(1, x.dtype)], kept, most=square.most + 1, exact=False)
    spread = chain.emit("Sqrt", [raised], kept, most=max(1.0, off.most), exact=False)
    return chain.emit("Div", [off, spread], x.shape, most=off.most, exact=False)


def fanned(chain: Chain, x: Value) -> Value:
    """Three readers of ``x``; those of one shape meet again, the others are outputs."""
    rng = chain.rng
    steps = (
        draw_values.unary, draw_values.clip, draw_values.binary, draw_values.softmax, draw_values.product,
        draw_values.convolution, draw_values.pool, reduced, centred, draw_shapes.slice_, draw_shapes.transpose,
        draw_shapes.pad, draw_shapes.reshape, draw_values.cast, draw_indexed.gather_elements,
    )  # fmt: skip
    found = []
    for _ in range(3):
        before = chain.mark()
        try:
            found.append(rng.choice(steps)(chain, x))
        except Unsuitable:
            chain.take_back(before)
    require(len(found) > 1)
    result = found[0]
    for other in found[1:]:
        if other.dtype == result.dtype != "bool" and draw_values.fits(other.shape, result.shape):
            result = draw_values.combined(chain, rng.choice(("Add", "Max")), result, other)
    return result


def quantised(chain: Chain, x: Value) -> Value:
    """Into bytes, a move or two there, and back. Whole numbers by powers of two leave no rounding in doubt."""
    rng = chain.rng
    require(x.exact and x.dtype == "float32" and x.rank > 0)
    dtype, axis = rng.choice(tuple(BYTES)), rng.randrange(x.rank)
    low, high = BYTES[dtype]
    count = x.shape[axis] if rng.random() < 0.3 else 0
    scales = [rng.choice((0.5, 1.0, 1.0, 2.0)) for _ in range(max(1, count))]
    points = [rng.choice((0, (low + high + 1) // 2, rng.randint(low, high))) for _ in range(max(1, count))]
    shape = (count,) if count else ()
    parameters = [chain.numbers(scales, "float32", shape), chain.numbers(points, dtype, shape)]
    how = {"axis": axis} if count else {}
    most = float(max(scales) * 255)
    kept = chain.emit("QuantizeLinear", [x, *parameters], x.shape, how, dtype=dtype, most=255.0, exact=True)
    for _ in range(0 if count else rng.randint(0, 2)):
        before = chain.mark()
        try:
            kept = rng.choice((draw_shapes.slice_, draw_shapes.transpose, draw_shapes.reshape, _byte_pool))(chain, kept)
        except Unsuitable:
            chain.take_back(before)
    return chain.emit(
        "DequantizeLinear", [kept, *parameters], kept.shape, how, dtype="float32", most=most, exact=0.5 not in scales
    )


def _byte_pool(chain: Chain, x: Value) -> Value:
    require(x.rank == 4)
    return pooled(chain, x, "MaxPool")


def masked(chain: Chain, x: Value) -> Value:
    """Infinities or NaN take the place of some elements, go through a step or two, and are replaced again."""
    rng = chain.rng
    require(x.dtype in ("float32", "float16") and x.rank > 0)
    taken = rng.choice((math.inf, -math.inf, -math.inf, math.nan))
    pair: list[Value | str] = [x, chain.scalar(taken, x.dtype)]
    rng.shuffle(pair)
    bounds = [chain.scalar(sign * (math.floor(x.most) + 1), x.dtype) for sign in (-1, 1)]
    with chain.beyond_numbers():
        y = chain.emit(
            "Where", [draw_values.condition(chain, x), *pair], x.shape, dtype=x.dtype, most=math.inf, exact=False
        )
        steps = [draw_shapes.slice_, draw_shapes.transpose, draw_shapes.concat, draw_shapes.reshape, _each]
        steps += [] if math.isnan(taken) else [_over_rows, _over_rows]
        for _ in range(rng.randint(0, 2)):
            before = chain.mark()
            step = rng.choice(steps)
            try:
                y = step(chain, y)
            except Unsuitable:
                chain.take_back(before)
            if step is _over_rows:  # makes NaN of infinities, and ONNX Runtime's maxima drop NaN
                steps = steps[:-2]
        within = chain.emit("Clip", [y, *bounds], y.shape)
    gone = chain.emit("IsNaN", [y], y.shape, dtype="bool", most=1.0, exact=True)
    most = x.most + 1
    return chain.emit("Where", [gone, bounds[1], within], y.shape, dtype=x.dtype, most=most, exact=False)


def _each(chain: Chain, y: Value) -> Value:
    operator = chain.rng.choice(("Neg", "Abs", "Sigmoid", "Relu", "Add", "Mul"))
    if operator in ("Add", "Mul"):
        return chain.emit(operator, [y, chain.scalar(2, y.dtype)], y.shape)
    return chain.emit(operator, [y], y.shape)


def _over_rows(chain: Chain, y: Value) -> Value:
    require(y.rank > 0)
    axis = chain.rng.randrange(y.rank)
    if chain.rng.random() < 0.5:
        return chain.emit("Softmax", [y], y.shape, {"axis": axis})
    shape = [1 if a == axis else n for a, n in enumerate(y.shape)]
    return chain.emit(chain.rng.choice(("ReduceMax", "ReduceMin")), [y], shape, {"axes": (axis,)})


def emptied(chain: Chain, x: Value) -> Value:
    """A part of no elements, which is joined to ``x``, is summed to zeros, or stays what it is."""
    rng = chain.rng
    require(x.rank > 0 and x.dtype != "bool")
    axis = rng.randrange(x.rank)
    at = rng.randint(0, x.shape[axis])
    none = [0 if a == axis else n for a, n in enumerate(x.shape)]
    with chain.beyond_numbers():
        part = chain.emit("Slice", [x, *(chain.numbers([n]) for n in (at, at, axis))], none)
        if x.is_float and rng.random() < 0.5:
            part = chain.emit(rng.choice(("Neg", "Abs")), [part], none)
    if rng.random() < 0.4:
        pair = [x, part]
        rng.shuffle(pair)
        return chain.emit("Concat", pair, x.shape, {"axis": axis})
    require(x.dtype not in ("int8", "uint8"))
    zeros = [1 if a == axis else n for a, n in enumerate(x.shape)]
    total = chain.emit("ReduceSum", [part, chain.numbers([axis])], zeros, {"keepdims": 1}, most=0.0, exact=True)
    return draw_values.combined(chain, "Add", x, total)
