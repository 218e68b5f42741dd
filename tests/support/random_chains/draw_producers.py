"""What a chain begins with: operators that are kept in register tiles, window kernels or rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from ..random_operators.sizes import require, window_steps
from .chain import MOST_WORK, Chain, Value

Producer = Callable[[Chain], Value]
SIZES = (1, 2, 3, 4, 5, 7, 8, 9, 11, 12, 13, 15, 16, 17, 19, 23, 24, 31, 32, 33, 48, 64)
CHANNELS = (1, 2, 3, 4, 6, 7, 8, 12, 16, 17, 24, 32)


def size(chain: Chain, most: int = 64) -> int:
    return chain.rng.choice([n for n in SIZES if n <= most])


def channels(chain: Chain, most: int = 32) -> int:
    return chain.rng.choice([n for n in CHANNELS if n <= most])


def _summed(a: Value, b: Value, count: int) -> float:
    """The bound of sums of ``count`` products; continuous weights are scaled so that sums are about as large as 1."""
    exact = a.exact and b.exact
    return a.most * b.most * (count if exact else 4 * math.sqrt(count))


def product_of(chain: Chain, a: Value, columns: int, *, constant: bool) -> Value:
    """``a`` times a new matrix."""
    depth = a.shape[-1]
    require(a.size * columns <= MOST_WORK)
    b = chain.input((depth, columns), a.dtype, constant=constant, summed=depth)
    return chain.emit("MatMul", [a, b], (*a.shape[:-1], columns), most=_summed(a, b, depth))


def matmul(chain: Chain) -> Value:
    rng = chain.rng
    batch = tuple(rng.choice((1, 2, 3, 4)) for _ in range(rng.choice((0, 0, 1, 2))))
    a = chain.input((*batch, size(chain), size(chain)))
    if not batch or rng.random() < 0.5:
        return product_of(chain, a, size(chain), constant=rng.random() < 0.6)
    depth, columns = a.shape[-1], size(chain)
    require(a.size * columns <= MOST_WORK)
    kept = tuple(1 if rng.random() < 0.3 else n for n in batch)
    b = chain.input((*kept, depth, columns), constant=rng.random() < 0.4, summed=depth)
    return chain.emit("MatMul", [a, b], (*batch, a.shape[-2], columns), most=_summed(a, b, depth))


def gemm(chain: Chain) -> Value:
    rng = chain.rng
    rows, columns, depth = size(chain), size(chain), size(chain)
    across, down = rng.random() < 0.3, rng.random() < 0.5
    a = chain.input((depth, rows) if across else (rows, depth))
    b = chain.input((columns, depth) if down else (depth, columns), constant=rng.random() < 0.7, summed=depth)
    inputs: list[Value] = [a, b]
    bound = _summed(a, b, depth)
    if rng.random() < 0.7:
        inputs.append(chain.input(rng.choice(((columns,), (1, columns), (rows, columns), (rows, 1))), constant=True))
        bound += inputs[-1].most
    return chain.emit("Gemm", inputs, (rows, columns), {"transA": int(across), "transB": int(down)}, most=bound)


def matmul_integer(chain: Chain) -> Value:
    rng = chain.rng
    rows, columns, depth = size(chain), size(chain), size(chain)
    a = chain.input((rows, depth), rng.choice(("uint8", "int8")))
    b = chain.input((depth, columns), rng.choice(("uint8", "int8")), constant=rng.random() < 0.7)
    return chain.emit("MatMulInteger", [a, b], (rows, columns), dtype="int32", most=a.most * b.most * depth)


# --- windows ----------------------------------------------------------------------------------------------------------
def _window(chain: Chain, rank: int, *, largest: int = 5) -> dict[str, tuple[int, ...]]:
    rng = chain.rng
    kernel = tuple(rng.choice((1, 1, 2, 3, 3, 3, 4, largest)) for _ in range(rank))
    return {
        "kernel_shape": kernel,
        "strides": tuple(rng.choice((1, 1, 1, 2, 3)) for _ in range(rank)),
        "pads": tuple(rng.randrange(0, k) for k in kernel * 2) if rng.random() < 0.6 else (0,) * (2 * rank),
        "dilations": tuple(rng.choice((1, 1, 1, 2)) for _ in range(rank)),
    }


def _steps(sizes: Sequence[int], how: dict[str, tuple[int, ...]]) -> tuple[int, ...]:
    return window_steps(sizes, how["kernel_shape"], how["strides"], how["dilations"], how["pads"])


def _image(chain: Chain, count: int, rank: int) -> Value:
    return chain.input((chain.rng.choice((1, 1, 2)), count, *(size(chain, 33) for _ in range(rank))))


def _convolution(chain: Chain, rank: int, groups: int, inputs: int, filters: int) -> Value:
    return convolved(chain, _image(chain, inputs, rank), groups, filters)


def convolved(chain: Chain, x: Value, groups: int, filters: int) -> Value:
    """``x``, an image, convolved with ``filters`` new filters."""
    how, inputs = _window(chain, x.rank - 2), x.shape[1]
    steps = _steps(x.shape[2:], how)
    summed = inputs // groups * math.prod(how["kernel_shape"])
    require(x.shape[0] * filters * math.prod(steps) * summed <= MOST_WORK)
    w = chain.input(
        (filters, inputs // groups, *how["kernel_shape"]), x.dtype, constant=chain.rng.random() < 0.8, summed=summed
    )
    operands, bound = [x, w], _summed(x, w, summed)
    if chain.rng.random() < 0.5:
        operands.append(chain.input((filters,), x.dtype, constant=True))
        bound += operands[-1].most
    return chain.emit("Conv", operands, (x.shape[0], filters, *steps), {"group": groups, **how}, most=bound)


def conv1d(chain: Chain) -> Value:
    return _convolution(chain, 1, 1, channels(chain), channels(chain))


def conv3d(chain: Chain) -> Value:
    return _convolution(chain, 3, 1, channels(chain, 8), channels(chain, 8))


def elements(chain: Chain) -> Value:
    """Of any rank up to 6, through a function that each element goes through, so that the chain has a kernel."""
    rng = chain.rng
    shape = tuple(rng.choice((1, 1, 2, 3, 4, 5, 7, 8, 16, 17)) for _ in range(rng.randint(0, 6)))
    x = chain.input(shape)
    if rng.random() < 0.5:
        return chain.emit(rng.choice(("Abs", "Neg")), [x], shape)
    other = chain.input(tuple(n if rng.random() < 0.6 else 1 for n in shape))
    return chain.emit(rng.choice(("Add", "Mul", "Max")), [x, other], shape, most=2.0 * x.most * other.most)


def conv2d(chain: Chain) -> Value:
    return _convolution(chain, 2, 1, channels(chain), channels(chain))


def conv2d_grouped(chain: Chain) -> Value:
    groups = chain.rng.choice((2, 3, 4))
    return _convolution(chain, 2, groups, groups * chain.rng.choice((1, 2, 4)), groups * chain.rng.choice((1, 2, 3, 8)))


def depthwise(chain: Chain) -> Value:
    count = channels(chain)
    return _convolution(chain, 2, count, count, count * chain.rng.choice((1, 1, 1, 2)))


def conv_transpose(chain: Chain) -> Value:
    rng, rank = chain.rng, chain.rng.choice((1, 2, 2))
    inputs, filters = channels(chain, 16), channels(chain, 16)
    x = chain.input((1, inputs, *(size(chain, 17) for _ in range(rank))))
    kernel = tuple(rng.choice((1, 2, 3, 4)) for _ in range(rank))
    strides = tuple(rng.choice((1, 2, 2, 3)) for _ in range(rank))
    pads = tuple(rng.randrange(0, k) for k in kernel * 2) if rng.random() < 0.5 else (0,) * (2 * rank)
    ends = zip(x.shape[2:], kernel, strides, pads[:rank], pads[rank:], strict=True)
    steps = tuple((n - 1) * s + k - before - after for n, k, s, before, after in ends)
    require(all(n > 0 for n in steps) and x.size * filters * math.prod(kernel) <= MOST_WORK)
    summed = inputs * math.prod(kernel)
    w = chain.input((inputs, filters, *kernel), constant=rng.random() < 0.8, summed=summed)
    how = {"kernel_shape": kernel, "strides": strides, "pads": pads}
    return chain.emit("ConvTranspose", [x, w], (1, filters, *steps), how, most=_summed(x, w, summed))


def pooled(chain: Chain, x: Value, operator: str) -> Value:
    """``x``, an image, through "MaxPool" or "AveragePool"."""
    how = {**_window(chain, x.rank - 2), "dilations": (1,) * (x.rank - 2)}
    steps = _steps(x.shape[2:], how)
    del how["dilations"]
    if operator == "MaxPool":
        return chain.emit(operator, [x], (*x.shape[:2], *steps), how)
    counted = chain.rng.randrange(2)
    return chain.emit(operator, [x], (*x.shape[:2], *steps), {"count_include_pad": counted, **how}, exact=False)


def max_pool(chain: Chain) -> Value:
    return pooled(chain, _image(chain, channels(chain), 2), "MaxPool")


def average_pool(chain: Chain) -> Value:
    return pooled(chain, _image(chain, channels(chain), 2), "AveragePool")


def global_pool(chain: Chain) -> Value:
    x, largest = _image(chain, channels(chain), 2), chain.rng.random() < 0.5
    operator = "GlobalMaxPool" if largest else "GlobalAveragePool"
    return chain.emit(operator, [x], (*x.shape[:2], 1, 1), exact=x.exact and largest)


# --- reductions -------------------------------------------------------------------------------------------------------
def reduced(chain: Chain, x: Value) -> Value:
    """``x`` summed, or its maximum, over some axes."""
    rng = chain.rng
    require(x.rank > 0 and (x.is_float or x.dtype in ("int32", "int64")))
    axes = sorted(rng.sample(range(x.rank), rng.randint(1, rng.choice((min(2, x.rank), x.rank)))))
    keep = rng.randrange(2)
    shape = [1 if a in axes else n for a, n in enumerate(x.shape) if keep or a not in axes]
    count = math.prod(x.shape[a] for a in axes)
    if rng.random() < 0.5:
        return chain.emit("ReduceSum", [x, chain.numbers(axes)], shape, {"keepdims": keep}, most=x.most * count)
    operator = rng.choice(("ReduceMax", "ReduceMin", *(("ReduceMean", "ReduceL2") if x.is_float else ())))
    exact = x.exact and operator in ("ReduceMax", "ReduceMin")
    most = x.most * (math.sqrt(count) if operator == "ReduceL2" else 1)
    return chain.emit(operator, [x], shape, {"axes": tuple(axes), "keepdims": keep}, most=most, exact=exact)


def reduction(chain: Chain) -> Value:
    x = chain.input(tuple(size(chain, 33) for _ in range(chain.rng.choice((2, 3, 3, 4)))))
    return reduced(chain, x)


FLOATS = ("float32", "float32", "float32", "float32", "float16", "float64")
PRODUCERS: tuple[tuple[str, Producer, tuple[str, ...]], ...] = (
    ("matmul", matmul, (*FLOATS, "int32", "int64")),
    ("conv2d", conv2d, FLOATS),
    ("gemm", gemm, FLOATS),
    ("max_pool", max_pool, (*FLOATS, "int8", "uint8")),
    ("depthwise", depthwise, FLOATS),
    ("reduction", reduction, (*FLOATS, "int32", "int64")),
    ("matmul", matmul, FLOATS),
    ("conv1d", conv1d, FLOATS),
    ("conv_transpose", conv_transpose, FLOATS),
    ("average_pool", average_pool, FLOATS),
    ("conv2d", conv2d, FLOATS),
    ("matmul_integer", matmul_integer, ("int8",)),
    ("global_pool", global_pool, FLOATS),
    ("conv2d_grouped", conv2d_grouped, FLOATS),
    ("depthwise", depthwise, FLOATS),
    ("reduction", reduction, FLOATS),
    ("elements", elements, (*FLOATS, "int32", "int64")),
    ("elements", elements, FLOATS),
    ("conv3d", conv3d, FLOATS),
)
"""(kind, how it is drawn, types): they take turns, so that any so many cases in a row hold every kind."""
