"""Draws element-wise operators and operators that move elements."""

from __future__ import annotations

import math
import random

from . import reference, sizes
from .record import CaseInput, OperatorCase
from .sizes import drawn_case, require

ELEMENTS = sizes.WORK // 4
DTYPES = ("float32", "float32", "float32", "float16", "int32", "int8", "int64")


def _tensor(rng: random.Random, shape: tuple[int, ...], dtype: str | None = None) -> CaseInput:
    dtype = dtype or rng.choice(DTYPES)
    if "float" in dtype:
        return CaseInput(shape=shape, dtype=dtype)
    return CaseInput(shape=shape, dtype=dtype, values="integer", limit=100)


def _shape(rng: random.Random, least_rank: int = 1) -> tuple[int, ...]:
    return sizes.shape(rng, sizes.rank(rng, least_rank), ELEMENTS)


# --- element by element --------------------------------------------------------------------------------------------
POSITIVE = ("log", "sqrt", "rsqrt")
STEPS = ("ceil", "floor", "round", "sign", "trunc")
BOUNDED = ("acos", "asin", "tan")
"""Not defined, or with a pole, beyond the [-1, 1] that is drawn: nothing may be added to their input."""

SINGLE_PRECISION = ("acos", "asin", "asinh", "atan", "cosh", "sinh")
"""Stock TVM has no code for these in half precision ("unknown intrinsic tirx.acos"); for atan2 it has none at all."""


def unary(rng: random.Random) -> OperatorCase:
    operator = rng.choice(sorted(reference.UNARY))
    data = CaseInput(
        shape=_shape(rng),
        dtype="float32" if operator in SINGLE_PRECISION else sizes.float_dtype(rng),
        values="positive" if operator in POSITIVE else "signed",
        scale=8.0 if operator in STEPS or operator.startswith("nn.") else 1.0,
    )
    # A logarithm near 1 is near 0.
    return drawn_case(operator, (data,), typical_magnitude=1.0, epilogue="fixed" if operator in BOUNDED else "none")


FLOAT_BINARY = ("add", "divide", "log_add_exp", "maximum", "minimum", "multiply", "power", "subtract")
INTEGER_BINARY = (
    "add", "bitwise_and", "bitwise_or", "bitwise_xor", "floor_divide", "floor_mod", "maximum", "minimum", "multiply",
    "subtract",
)  # fmt: skip
COMPARISONS = ("equal", "greater", "greater_equal", "less", "less_equal", "not_equal")
LOGICAL = ("logical_and", "logical_or", "logical_xor")


def binary(rng: random.Random) -> OperatorCase:
    """With broadcasting: either side may have ones, or fewer dimensions."""
    shape = _shape(rng)
    left, right = _broadcasting(rng, shape), shape if rng.random() < 0.7 else _broadcasting(rng, shape)
    group = rng.choice(("float", "float", "integer", "comparison", "logical"))
    if group == "integer":
        operator = rng.choice(INTEGER_BINARY)
        first, second = (_tensor(rng, s, "int32") for s in (left, right))
        if operator in ("floor_divide", "floor_mod"):
            second = CaseInput(shape=right, dtype="int32", values="divisor", limit=9)
            return drawn_case(operator, (first, second))
    elif group == "logical":
        operator = rng.choice(LOGICAL)
        first, second = (CaseInput(shape=s, dtype="bool", values="bool") for s in (left, right))
    else:
        operator = rng.choice(FLOAT_BINARY if group == "float" else COMPARISONS)
        dtype = sizes.float_dtype(rng) if group == "float" else rng.choice(("float32", "int32"))
        values = "positive" if operator in ("divide", "power") else "signed"
        first, second = (
            CaseInput(shape=s, dtype=dtype, values=values)  # type: ignore[arg-type]
            if dtype != "int32"
            else CaseInput(shape=s, dtype=dtype, values="integer", limit=3)
            for s in (left, right)
        )
    if rng.random() < 0.5:
        first, second = second, first
    return drawn_case(
        operator,
        (first, second),
        typical_magnitude=1.0,
        epilogue="fixed" if group in ("comparison", "logical") else "none",
    )


def _broadcasting(rng: random.Random, shape: tuple[int, ...]) -> tuple[int, ...]:
    ones = tuple(1 if rng.random() < 0.3 else n for n in shape)
    return ones if rng.random() < 0.7 else ones[rng.randrange(len(ones)) :]


def where(rng: random.Random) -> OperatorCase:
    shape = _shape(rng)
    dtype = rng.choice(DTYPES)
    condition = CaseInput(shape=_broadcasting(rng, shape), dtype="bool", values="bool")
    return drawn_case("where", (condition, _tensor(rng, shape, dtype), _tensor(rng, _broadcasting(rng, shape), dtype)))


def cast(rng: random.Random) -> OperatorCase:
    """To integers from whole numbers or towards zero; to bool; between precisions."""
    data = _tensor(rng, _shape(rng))
    if "float" in data.dtype:
        data = CaseInput(shape=data.shape, dtype=data.dtype, scale=100.0)
    targets = [dtype for dtype in ("float32", "float16", "int32", "int8", "int64", "bool") if dtype != data.dtype]
    return drawn_case("astype", (data,), out_dtype=rng.choice(targets), epilogue="fixed")


# --- moving elements -----------------------------------------------------------------------------------------------
def permute_dims(rng: random.Random) -> OperatorCase:
    shape = _shape(rng, 2)
    axes = list(range(len(shape)))
    rng.shuffle(axes)
    return drawn_case("permute_dims", (_tensor(rng, shape),), attributes=(("axes", tuple(axes)),))


def reshape(rng: random.Random) -> OperatorCase:
    """The factors of the sizes, dealt out anew."""
    shape = _shape(rng)
    left, result = math.prod(shape), []
    for _ in range(rng.randint(0, 3)):
        divisors = [d for d in range(1, min(left, 4096) + 1) if left % d == 0]
        result.append(rng.choice(divisors))
        left //= result[-1]
    return drawn_case(
        "reshape",
        (_tensor(rng, shape),),
        attributes=(("shape", (*result, left)),),
        must_be_constructed=False,  # a view
    )


def broadcast(rng: random.Random) -> OperatorCase:
    shape = _shape(rng)
    return drawn_case("broadcast_to", (_tensor(rng, _broadcasting(rng, shape)),), attributes=(("shape", shape),))


def concat(rng: random.Random) -> OperatorCase:
    shape = sizes.shape(rng, sizes.rank(rng), ELEMENTS // 4)
    axis, dtype = rng.randrange(len(shape)), rng.choice(DTYPES)
    if rng.random() < 0.3:
        inputs = tuple(_tensor(rng, shape, dtype) for _ in range(rng.randint(1, 3)))
        return drawn_case("stack", inputs, attributes=(("axis", (axis,)),))
    lengths = [shape[axis], *[sizes.size(rng, max(1, shape[axis])) for _ in range(rng.randint(1, 3))]]
    inputs = tuple(_tensor(rng, (*shape[:axis], length, *shape[axis + 1 :]), dtype) for length in lengths)
    return drawn_case("concat", inputs, attributes=(("axis", (axis,)),))


def split(rng: random.Random) -> OperatorCase:
    shape = _shape(rng)
    axis = rng.randrange(len(shape))
    require(shape[axis] > 1)
    at = sorted(rng.sample(range(1, shape[axis]), rng.randint(1, min(3, shape[axis] - 1))))
    return drawn_case(
        "split", (_tensor(rng, shape),), attributes=(("at", tuple(at)), ("axis", (axis,))), epilogue="fixed"
    )


def strided_slice(rng: random.Random) -> OperatorCase:
    """With steps of either sign; an end of -1 after a negative step means that element 0 is included."""
    shape = _shape(rng)
    axes = sizes.subset(rng, len(shape))
    begins, ends, strides = [], [], []
    for axis in axes:
        low, high = sorted((rng.randrange(shape[axis]), rng.randrange(shape[axis])))
        stride = rng.choice((1, 1, 2, 3, -1, -2))
        begins.append(low if stride > 0 else high)
        ends.append(high + 1 if stride > 0 else low - 1)
        strides.append(stride)
    attributes = (("axes", axes), ("begin", tuple(begins)), ("end", tuple(ends)), ("strides", tuple(strides)))
    return drawn_case("strided_slice", (_tensor(rng, shape),), attributes=attributes)


def pad(rng: random.Random) -> OperatorCase:
    mode = rng.choice((0, 0, 1, 2, 3))
    shape = sizes.shape(rng, 4 if mode else sizes.rank(rng), ELEMENTS // 4)
    width = []
    for position, n in enumerate(shape):
        # Reflection and wrapping need that many elements; the batch and channels are left alone, as networks do.
        most = min(3, n - 1) if mode else 3
        width += [rng.randint(0, most), rng.randint(0, most)] if not mode or position >= 2 else [0, 0]
    return drawn_case("nn.pad", (_tensor(rng, shape),), attributes=(("pad_width", tuple(width)), ("mode", (mode,))))


def tile(rng: random.Random) -> OperatorCase:
    shape = sizes.shape(rng, sizes.rank(rng), ELEMENTS // 32)
    repeats = tuple(rng.randint(1, 3) for _ in range(rng.choice((len(shape), len(shape), 1, len(shape) + 1))))
    return drawn_case("tile", (_tensor(rng, shape),), attributes=(("repeats", repeats),))


def repeat(rng: random.Random) -> OperatorCase:
    shape = sizes.shape(rng, sizes.rank(rng), ELEMENTS // 4)
    attributes = (("repeats", (rng.randint(1, 4),)), ("axis", (rng.randrange(len(shape)),)))
    return drawn_case("repeat", (_tensor(rng, shape),), attributes=attributes)


def flip(rng: random.Random) -> OperatorCase:
    shape = _shape(rng)
    return drawn_case("flip", (_tensor(rng, shape),), attributes=(("axis", (rng.randrange(len(shape)),)),))


def take(rng: random.Random) -> OperatorCase:
    """Indices of one or two dimensions, as an embedding has."""
    shape = sizes.shape(rng, sizes.rank(rng, 1, 3), ELEMENTS // 4)
    axis = rng.randrange(len(shape))
    counts = sizes.shape(rng, rng.choice((1, 1, 2)), 64)
    require(math.prod(shape) // shape[axis] * math.prod(counts) <= ELEMENTS)
    index = CaseInput(shape=counts, dtype=rng.choice(("int32", "int64")), values="index", limit=shape[axis])
    return drawn_case("take", (_tensor(rng, shape), index), attributes=(("axis", (axis,)),))


def gather(rng: random.Random) -> OperatorCase:
    shape = sizes.shape(rng, sizes.rank(rng, 1, 3), ELEMENTS // 4)
    axis = rng.randrange(len(shape))
    counts = tuple(sizes.size(rng, 65) if position == axis else n for position, n in enumerate(shape))
    require(math.prod(counts) <= ELEMENTS)
    index = CaseInput(shape=counts, dtype="int64", values="index", limit=shape[axis])
    return drawn_case("gather_elements", (_tensor(rng, shape), index), attributes=(("axis", (axis,)),))
