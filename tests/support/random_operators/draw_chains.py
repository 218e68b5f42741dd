"""Draws short chains of operators, in which kernels meet: what one leaves, the next one finds."""

from __future__ import annotations

import math
import random

from tvm_ext.support.arithmetic import ceil_div

from . import sizes
from .record import CaseInput, OperatorCase
from .sizes import drawn_case, require


def attention(rng: random.Random) -> OperatorCase:
    """softmax(Q K^T / 2) V for (heads, length, width) tensors; keys and values may have another length."""
    dtype = sizes.float_dtype(rng)
    heads, width = rng.choice((1, 2, 3, 4, 12)), rng.choice((1, 5, 8, 16, 31, 32, 64))
    queries, keys = sizes.size(rng, 129), sizes.size(rng, 129)
    require(heads * queries * keys * width <= sizes.budget(rng))
    scale = math.sqrt(3 / math.sqrt(width))
    return drawn_case(
        operator="chain.attention",
        inputs=(
            CaseInput(shape=(heads, queries, width), dtype=dtype, scale=scale),
            CaseInput(shape=(heads, keys, width), dtype=dtype, scale=scale),
            CaseInput(shape=(heads, keys, width), dtype=dtype, values="positive"),
        ),
        arity=3,
        reduction_size=width * keys,
    )


def gram(rng: random.Random) -> OperatorCase:
    """X X^T: both operands are the same tensor."""
    shape = (*sizes.shape(rng, rng.choice((0, 1)), 8), *sizes.shape(rng, 2, 128 * 128)) if rng.random() < 0.5 else ()
    shape = shape or sizes.shape(rng, 2, 128 * 128)
    require(math.prod(shape) * shape[-2] <= sizes.budget(rng))
    return drawn_case(
        operator="chain.gram",
        inputs=(CaseInput(shape=shape, dtype=sizes.float_dtype(rng), scale=math.sqrt(3) / shape[-1] ** 0.25),),
        reduction_size=shape[-1],
        typical_magnitude=1.0,
    )


def centre(rng: random.Random) -> OperatorCase:
    """x - mean(x): a tensor read by a reduction and again beside its result."""
    shape = sizes.shape(rng, sizes.rank(rng), sizes.budget(rng) // 8)
    axes = sizes.subset(rng, len(shape))
    dtype, count = sizes.float_dtype(rng), math.prod(shape[axis] for axis in axes)
    require(dtype != "float16" or count <= sizes.MOST_SUMMED)
    return drawn_case(
        operator="chain.centre",
        inputs=(CaseInput(shape=shape, dtype=dtype),),
        attributes=(("axes", axes),),
        reduction_size=count,
        typical_magnitude=1.0,
    )


def separable(rng: random.Random) -> OperatorCase:
    """A depthwise 3x3 or 5x5 convolution, ReLU, a 1x1 convolution."""
    dtype = sizes.float_dtype(rng)
    batch, channels, filters = rng.choice((1, 1, 2)), sizes.size(rng, 97), sizes.size(rng, 129)
    height, width = sizes.shape(rng, 2, 32 * 32)
    kernel, stride = rng.choice((3, 5)), rng.choice((1, 2))
    output = sizes.window_steps((height, width), (kernel,) * 2, (stride,) * 2, (1, 1), (kernel // 2,) * 4)
    require(batch * channels * filters * math.prod(output) <= sizes.budget(rng))
    return drawn_case(
        operator="chain.separable",
        inputs=(
            CaseInput(shape=(batch, channels, height, width), dtype=dtype),
            CaseInput(shape=(channels, 1, kernel, kernel), dtype=dtype, constant=True, scale=3 / kernel),
            CaseInput(shape=(filters, channels, 1, 1), dtype=dtype, constant=True, scale=3 / math.sqrt(channels)),
        ),
        attributes=(
            ("strides", (stride, stride)),
            ("padding", (kernel // 2,) * 4),
            ("dilation", (1, 1)),
            ("groups", (channels,)),
        ),
        layouts=("NCHW", "OIHW"),
        arity=3,
        reduction_size=kernel * kernel * channels,
        typical_magnitude=1.0,
    )


def residual_block(rng: random.Random) -> OperatorCase:
    """A 3x3 convolution with ReLU, a 1x1 convolution of it added to it, 3x3 max pooling, a 3x3 convolution.

    Long enough for a chain in a channel-blocked layout to pay, with channels that fill blocks and some that do not.
    """
    channels, middle, filters = (rng.choice((8, 13, 16, 24, 32, 48, 64)) for _ in range(3))
    batch, dtype = rng.choice((1, 1, 2)), "float32"
    height, width = rng.randint(4, 24), rng.randint(4, 24)
    stride, pool_stride = rng.choice((1, 1, 2)), rng.choice((1, 2))
    points = batch * ceil_div(height, stride) * ceil_div(width, stride)
    require(points * middle * (9 * channels + middle + 9 * filters) <= sizes.LARGE_WORK)

    def weight(outputs: int, inputs: int, window: int) -> CaseInput:
        scale = 3 / math.sqrt(inputs * window * window)
        return CaseInput(shape=(outputs, inputs, window, window), dtype=dtype, constant=True, scale=scale)

    return drawn_case(
        operator="chain.residual_block",
        inputs=(
            CaseInput(shape=(batch, channels, height, width), dtype=dtype),
            weight(middle, channels, 3),
            weight(middle, middle, 1),
            weight(filters, middle, 3),
        ),
        attributes=(("strides", (stride,) * 2), ("pool_strides", (pool_stride,) * 2)),
        layouts=("NCHW", "OIHW"),
        arity=4,
        reduction_size=9 * channels + middle + 9 * middle,
        typical_magnitude=1.0,
    )
