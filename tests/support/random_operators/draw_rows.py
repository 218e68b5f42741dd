"""Draws pools, reductions, searches and normalisations."""

from __future__ import annotations

import math
import random

from tvm_ext.support.arithmetic import ceil_div

from . import sizes
from .record import CaseInput, OperatorCase, Values
from .sizes import drawn_case, require

LAYOUTS = {1: ("NCW", "NWC"), 2: ("NCHW", "NHWC"), 3: ("NCDHW", "NDHWC")}
MOST_FACTORS = 32
"""Of a product: 0.5 to 1.5 to the power of 32 stays far from the ends of float16 on average."""


# --- pools ---------------------------------------------------------------------------------------------------------
def max_pool(rng: random.Random) -> OperatorCase:
    return _pool(rng, "max", "signed", ())


def average_pool(rng: random.Random) -> OperatorCase:
    """Of positive values, for an average of both signs may vanish, and its relative error then says nothing."""
    return _pool(rng, "avg", "positive", (("count_include_pad", (rng.randint(0, 1),)),))


def _pool(
    rng: random.Random, name: str, values: Values, flags: tuple[tuple[str, tuple[int, ...]], ...]
) -> OperatorCase:
    rank = sizes.rank(rng, 1, 3)
    layout = rng.choice(LAYOUTS[rank])
    kernel = tuple(rng.choice((1, 2, 2, 3, 3, 4, 5)) for _ in range(rank))
    strides = tuple(rng.choice((1, 2, 2, 3)) for _ in range(rank))
    dilation = tuple(rng.choice((1, 1, 1, 2)) for _ in range(rank))
    # Less than half a window, so that no window lies in padding alone.
    padding = tuple(rng.randint(0, (k - 1) // 2) for k in kernel * 2) if rng.random() < 0.6 else (0,) * (2 * rank)
    ceil_mode = rng.random() < 0.4
    batch, channels = rng.choice((1, 1, 2, 3)), sizes.size(rng, 129)
    spatial = sizes.shape(rng, rank, 64 * 64)
    output = sizes.window_steps(spatial, kernel, strides, dilation, padding)
    # A last window that ceil_mode adds must begin inside the input.
    begin = zip(output, strides, padding[:rank], spatial, strict=True)
    require(not ceil_mode or all(count * s - before < n for count, s, before, n in begin))
    require(batch * channels * math.prod(output) * math.prod(kernel) <= sizes.budget(rng))
    names = dict(zip("DHW"[-rank:], spatial, strict=True)) | {"N": batch, "C": channels}
    data = CaseInput(shape=tuple(names[letter] for letter in layout), dtype=sizes.float_dtype(rng), values=values)
    return drawn_case(
        f"nn.{name}_pool{rank}d",
        (data,),
        attributes=(
            ("pool_size", kernel),
            ("strides", strides),
            ("padding", padding),
            ("dilation", dilation),
            ("ceil_mode", (int(ceil_mode),)),
            *flags,
        ),
        layouts=(layout,),
        reduction_size=math.prod(kernel),
    )


def pool_image(rng: random.Random) -> OperatorCase:
    """NCHW, images of any height and width up to 40, windows up to 7: all that is left over beside whole registers."""
    name = rng.choice(("max", "avg"))
    kernel = (rng.choice((2, 3, 3, 5, 7)),) * 2 if rng.random() < 0.7 else (rng.randint(1, 5), rng.randint(1, 5))
    strides = (rng.randint(1, 3),) * 2 if rng.random() < 0.7 else (rng.randint(1, 3), rng.randint(1, 3))
    dilation = rng.choice(((1, 1), (1, 1), (1, 1), (2, 1), (1, 2)))
    padding = tuple(rng.randint(0, (k - 1) // 2) for k in kernel * 2) if rng.random() < 0.6 else (0,) * 4
    spatial = rng.randint(1, 40), rng.randint(1, 40)
    sizes.window_steps(spatial, kernel, strides, dilation, padding)
    shape = (rng.choice((1, 1, 2)), rng.choice((1, 3, 8, 13, 16, 37)), *spatial)
    flags = (("count_include_pad", (rng.randint(0, 1),)),) if name == "avg" else ()
    return drawn_case(
        f"nn.{name}_pool2d",
        (CaseInput(shape=shape, dtype=sizes.float_dtype(rng), values="signed" if name == "max" else "positive"),),
        attributes=(
            ("pool_size", kernel),
            ("strides", strides),
            ("padding", padding),
            ("dilation", dilation),
            ("ceil_mode", (0,)),
            *flags,
        ),
        layouts=("NCHW",),
        reduction_size=math.prod(kernel),
    )


def adaptive_pool(rng: random.Random) -> OperatorCase:
    """To any smaller size; every other one is global, to size 1."""
    rank = sizes.rank(rng, 1, 3)
    layout = rng.choice(LAYOUTS[rank])
    spatial = sizes.shape(rng, rank, 64 * 64)
    output = (1,) * rank if rng.random() < 0.5 else tuple(rng.randint(1, n) for n in spatial)
    batch, channels = rng.choice((1, 2, 3)), sizes.size(rng, 129)
    require(batch * channels * math.prod(spatial) <= sizes.WORK)
    names = dict(zip("DHW"[-rank:], spatial, strict=True)) | {"N": batch, "C": channels}
    shape = tuple(names[letter] for letter in layout)
    return drawn_case(
        f"nn.adaptive_avg_pool{rank}d",
        (CaseInput(shape=shape, dtype=sizes.float_dtype(rng), values="positive"),),
        attributes=(("output_size", output),),
        layouts=(layout,),
        reduction_size=math.prod(ceil_div(n, size) + 1 for n, size in zip(spatial, output, strict=True)),
        # Windows of different lengths have no rectangular iteration space, hence no rTile.
        must_be_constructed=all(n % size == 0 for n, size in zip(spatial, output, strict=True)),
    )


# --- reductions ----------------------------------------------------------------------------------------------------
def reduce(rng: random.Random) -> OperatorCase:
    operator = rng.choice(("sum", "sum", "mean", "max", "min", "prod", "variance", "std"))
    shape = sizes.shape(rng, sizes.rank(rng), sizes.budget(rng))
    axes = sizes.subset(rng, len(shape))
    if operator in ("variance", "std"):
        axes = tuple(axis for axis in axes if shape[axis] > 1)
        require(bool(axes))
    count = math.prod(shape[axis] for axis in axes)
    require(operator != "prod" or count <= MOST_FACTORS)
    dtype = sizes.float_dtype(rng) if rng.random() < 0.8 else "int32"
    require(dtype != "float16" or count <= sizes.MOST_SUMMED)
    if dtype == "int32":
        operator = rng.choice(("sum", "max", "min"))
        data = CaseInput(shape=shape, dtype=dtype, values="integer", limit=100)
    else:
        data = CaseInput(shape=shape, dtype=dtype, values="signed" if operator in ("max", "min") else "positive")
    return drawn_case(
        operator,
        (data,),
        attributes=(("axes", axes), ("keepdims", (rng.randint(0, 1),))),
        reduction_size=count,
        epilogue="none" if operator != "std" else "fixed",
    )


def reduce_short_rows(rng: random.Random) -> OperatorCase:
    """Many rows of 1 to 40 elements: shorter than a register, or little longer."""
    operator = rng.choice(("sum", "mean", "max", "min"))
    row, others = rng.randint(1, 40), sizes.shape(rng, rng.choice((1, 2)), 4096)
    shape = (*others, row) if rng.random() < 0.7 else (*others, rng.randint(1, 5), row)
    axes = tuple(range(len(others), len(shape)))
    data = CaseInput(
        shape=shape, dtype=sizes.float_dtype(rng), values="signed" if operator in ("max", "min") else "positive"
    )
    return drawn_case(
        operator,
        (data,),
        attributes=(("axes", axes), ("keepdims", (rng.randint(0, 1),))),
        reduction_size=math.prod(shape[axis] for axis in axes),
    )


def argument(rng: random.Random) -> OperatorCase:
    """Where the largest or smallest element is; of float32, where two random values hardly ever are equal."""
    shape = sizes.shape(rng, sizes.rank(rng), sizes.WORK // 16)
    return drawn_case(
        rng.choice(("argmax", "argmin")),
        (CaseInput(shape=shape, dtype="float32"),),
        attributes=(("axis", (rng.randrange(len(shape)),)), ("keepdims", (rng.randint(0, 1),))),
        must_be_constructed=False,  # its reduction carries a pair of values
        epilogue="fixed",
    )


def cumsum(rng: random.Random) -> OperatorCase:
    shape = sizes.shape(rng, sizes.rank(rng), sizes.WORK // 16)
    axis = rng.randrange(len(shape))
    return drawn_case(
        "cumsum",
        (CaseInput(shape=shape, dtype="float32", values="positive"),),
        attributes=(("axis", (axis,)),),
        reduction_size=shape[axis],
        must_be_constructed=False,  # each element depends on the one before
        epilogue="fixed",
    )


# --- normalisations ------------------------------------------------------------------------------------------------
def softmax(rng: random.Random) -> OperatorCase:
    return _along_axis(rng, "nn.softmax")


def log_softmax(rng: random.Random) -> OperatorCase:
    return _along_axis(rng, "nn.log_softmax")


def _along_axis(rng: random.Random, operator: str) -> OperatorCase:
    shape = sizes.shape(rng, sizes.rank(rng), sizes.budget(rng) // 8)
    axis = rng.choice((len(shape) - 1, rng.randrange(len(shape))))
    data = CaseInput(shape=shape, dtype=sizes.float_dtype(rng), scale=rng.choice((1.0, 8.0)))
    # The log of a softmax over one class is 0: what is left of rounding then has no size to be compared with.
    magnitude = 1.0 if operator == "nn.log_softmax" else 0.0
    return drawn_case(
        operator, (data,), attributes=(("axis", (axis,)),), reduction_size=shape[axis], typical_magnitude=magnitude
    )


def _affine(rng: random.Random, data: CaseInput, shape: tuple[int, ...], count: int) -> tuple[CaseInput, ...]:
    constant = rng.random() < 0.7
    item = CaseInput(shape=shape, dtype=data.dtype, constant=constant)
    return (data, *[item] * count)


def layer_norm(rng: random.Random) -> OperatorCase:
    """Over one or more trailing axes."""
    shape = sizes.shape(rng, sizes.rank(rng, 2), sizes.budget(rng) // 8)
    first = rng.choice((len(shape) - 1, rng.randrange(1, len(shape))))
    data = CaseInput(shape=shape, dtype=sizes.float_dtype(rng))
    return drawn_case(
        "nn.layer_norm",
        _affine(rng, data, shape[first:], 2),
        attributes=(("axes", tuple(range(first, len(shape)))),),
        reduction_size=math.prod(shape[first:]),
        typical_magnitude=1.0,
    )


def rms_norm(rng: random.Random) -> OperatorCase:
    shape = sizes.shape(rng, sizes.rank(rng, 2), sizes.budget(rng) // 8)
    data = CaseInput(shape=shape, dtype=sizes.float_dtype(rng))
    return drawn_case(
        "nn.rms_norm",
        _affine(rng, data, shape[-1:], 1),
        attributes=(("axes", (len(shape) - 1,)),),
        reduction_size=shape[-1],
        typical_magnitude=1.0,
    )


def _image(rng: random.Random, channels: int) -> CaseInput:
    spatial = sizes.shape(rng, sizes.rank(rng, 1, 3), 32 * 32)
    # One element per channel normalises to 0 whatever it is.
    require(math.prod(spatial) > 1)
    return CaseInput(shape=(rng.choice((1, 1, 2, 3)), channels, *spatial), dtype=sizes.float_dtype(rng))


def group_norm(rng: random.Random) -> OperatorCase:
    groups = rng.choice((1, 2, 3, 4, 8, 13))
    data = _image(rng, groups * rng.choice((1, 2, 3, 4, 8)))
    return drawn_case(
        "nn.group_norm",
        _affine(rng, data, data.shape[1:2], 2),
        attributes=(("num_groups", (groups,)),),
        reduction_size=math.prod(data.shape[1:]) // groups,
        typical_magnitude=1.0,
    )


def instance_norm(rng: random.Random) -> OperatorCase:
    data = _image(rng, sizes.size(rng, 65))
    return drawn_case(
        "nn.instance_norm",
        _affine(rng, data, data.shape[1:2], 2),
        reduction_size=math.prod(data.shape[2:]),
        typical_magnitude=1.0,
    )
