"""Draws matrix products and convolutions."""

from __future__ import annotations

import math
import random

from . import sizes
from .record import CaseInput, OperatorCase
from .sizes import drawn_case, require

INTEGER_LIMIT = 127


def _operand(shape: tuple[int, ...], dtype: str, *, constant: bool = False, scale: float = 1.0) -> CaseInput:
    if dtype == "int8":
        return CaseInput(shape=shape, dtype=dtype, constant=constant, values="integer", limit=INTEGER_LIMIT)
    return CaseInput(shape=shape, dtype=dtype, constant=constant, scale=scale)


def _dtypes(rng: random.Random) -> tuple[str, str | None]:
    """(input dtype, output dtype where it differs): half precision comes with either precision of results."""
    dtype = sizes.float_dtype(rng)
    return dtype, "float32" if dtype == "float16" and rng.random() < 0.3 else None


# --- matrix products -----------------------------------------------------------------------------------------------
def matmul(rng: random.Random) -> OperatorCase:
    """(M, K) @ (K, N), each operand stored as it is or transposed."""
    return _matmul(rng, (), (), *_dtypes(rng))


def matmul_int8(rng: random.Random) -> OperatorCase:
    return _matmul(rng, (), (), "int8", "int32")


def batched_matmul(rng: random.Random) -> OperatorCase:
    """Leading dimensions which broadcast: each is there in both operands, 1 in one of them, or missing in one."""
    batch = sizes.shape(rng, sizes.rank(rng, 1, 3), 64)
    a = tuple(1 if rng.random() < 0.2 else n for n in batch)
    b = tuple(1 if rng.random() < 0.2 and a[i] != 1 else n for i, n in enumerate(batch))
    if rng.random() < 0.3:
        b = b[rng.randint(1, len(b)) :]
    return _matmul(rng, a, b, *_dtypes(rng))


def _matmul(
    rng: random.Random, batch_a: tuple[int, ...], batch_b: tuple[int, ...], dtype: str, out_dtype: str | None
) -> OperatorCase:
    work = sizes.budget(rng) // max(math.prod(batch_a), math.prod(batch_b), 1)
    m, n, k = sizes.shape(rng, 3, max(work, 1))
    transpose_a, transpose_b = rng.random() < 0.25, rng.random() < 0.4
    a = (*batch_a, *((k, m) if transpose_a else (m, k)))
    b = (*batch_b, *((n, k) if transpose_b else (k, n)))
    return drawn_case(
        operator="matmul",
        inputs=(_operand(a, dtype), _operand(b, dtype, constant=rng.random() < 0.6, scale=3 / math.sqrt(k))),
        attributes=(("transpose_a", (int(transpose_a),)), ("transpose_b", (int(transpose_b),))),
        arity=2,
        out_dtype=out_dtype,
        reduction_size=k,
        typical_magnitude=1.0,
    )


def gemv(rng: random.Random) -> OperatorCase:
    """One to eight rows times a large matrix: bound by reading the matrix once."""
    dtype, out_dtype = _dtypes(rng)
    m, k = rng.choice((1, 1, 1, 2, 3, 4, 5, 7, 8)), sizes.size(rng, 1021) * rng.choice((1, 1, 4))
    n = min(sizes.size(rng, 1021) * rng.choice((1, 1, 4)), max(1, sizes.WORK // k))
    transpose_b = rng.random() < 0.5
    weights = (n, k) if transpose_b else (k, n)
    return drawn_case(
        operator="matmul",
        inputs=(_operand((m, k), dtype), _operand(weights, dtype, constant=rng.random() < 0.7, scale=3 / math.sqrt(k))),
        attributes=(("transpose_a", (0,)), ("transpose_b", (int(transpose_b),))),
        arity=2,
        out_dtype=out_dtype,
        reduction_size=k,
        typical_magnitude=1.0,
    )


# --- convolutions --------------------------------------------------------------------------------------------------
LAYOUTS = {
    1: (("NCW", "OIW"), ("NWC", "WIO")),
    2: (("NCHW", "OIHW"), ("NHWC", "HWIO"), ("NHWC", "OHWI")),
    3: (("NCDHW", "OIDHW"), ("NDHWC", "DHWIO")),
}


def conv1d(rng: random.Random) -> OperatorCase:
    return _convolution(rng, 1, 1, *_dtypes(rng))


def conv2d(rng: random.Random) -> OperatorCase:
    return _convolution(rng, 2, 1, *_dtypes(rng))


def conv3d(rng: random.Random) -> OperatorCase:
    return _convolution(rng, 3, 1, *_dtypes(rng))


def conv2d_int8(rng: random.Random) -> OperatorCase:
    return _convolution(rng, 2, 1, "int8", "int32")


def conv2d_grouped(rng: random.Random) -> OperatorCase:
    return _convolution(rng, 2, rng.choice((2, 3, 4, 8)), *_dtypes(rng))


def conv2d_depthwise(rng: random.Random) -> OperatorCase:
    """One input channel per group, one or two output channels."""
    channels = rng.choice((2, 3, 7, 8, 13, 16, 24, 31, 32, 33, 64, 96))
    return _convolution(rng, 2, channels, *_dtypes(rng), per_group=(1, rng.choice((1, 1, 1, 2))))


def depthwise_image(rng: random.Random) -> OperatorCase:
    """NCHW, images of any height and width up to 40: all that is left over beside whole registers."""
    channels, batch = rng.choice((1, 2, 3, 5, 8, 13, 16, 32, 37)), rng.choice((1, 1, 2))
    spatial = rng.randint(1, 40), rng.randint(1, 40)
    kernel = _kernel(rng, 2)
    strides = (rng.choice((1, 1, 2, 3)),) * 2 if rng.random() < 0.7 else (rng.randint(1, 3), rng.randint(1, 3))
    dilation = rng.choice(((1, 1), (1, 1), (1, 1), (2, 2), (1, 3), (2, 1)))
    padding = _padding(rng, kernel, dilation)
    sizes.window_steps(spatial, kernel, strides, dilation, padding)
    dtype, out_dtype = _dtypes(rng)
    taps = math.prod(kernel)
    return drawn_case(
        operator="nn.conv2d",
        inputs=(
            _operand((batch, channels, *spatial), dtype),
            _operand((channels, 1, *kernel), dtype, constant=rng.random() < 0.8, scale=3 / math.sqrt(taps)),
        ),
        attributes=(("strides", strides), ("padding", padding), ("dilation", dilation), ("groups", (channels,))),
        layouts=("NCHW", "OIHW"),
        arity=2,
        out_dtype=out_dtype,
        reduction_size=taps,
        typical_magnitude=1.0,
    )


def _convolution(
    rng: random.Random,
    rank: int,
    groups: int,
    dtype: str,
    out_dtype: str | None,
    per_group: tuple[int, int] | None = None,
) -> OperatorCase:
    data_layout, weight_layout = rng.choice(LAYOUTS[rank])
    channels, filters = per_group or (sizes.size(rng, 129 // groups), sizes.size(rng, 129 // groups))
    batch = rng.choice((1, 1, 1, 2, 3))
    kernel = _kernel(rng, rank)
    strides = tuple(rng.choice((1, 1, 1, 2, 3)) for _ in range(rank))
    dilation = tuple(rng.choice((1, 1, 1, 2)) for _ in range(rank))
    padding = _padding(rng, kernel, dilation)
    spatial = sizes.shape(rng, rank, 128 * 128)
    output = sizes.window_steps(spatial, kernel, strides, dilation, padding)
    k = channels * math.prod(kernel)
    require(batch * groups * filters * math.prod(output) * k <= sizes.budget(rng))
    require(batch * groups * channels * math.prod(spatial) <= sizes.WORK)
    names = dict(zip("DHW"[-rank:], spatial, strict=True)) | {"N": batch, "C": groups * channels}
    weights = dict(zip("DHW"[-rank:], kernel, strict=True)) | {"O": groups * filters, "I": channels}
    return drawn_case(
        operator=f"nn.conv{rank}d",
        inputs=(
            _operand(tuple(names[letter] for letter in data_layout), dtype),
            _operand(
                tuple(weights[letter] for letter in weight_layout),
                dtype,
                constant=rng.random() < 0.8,
                scale=3 / math.sqrt(k),
            ),
        ),
        attributes=(("strides", strides), ("padding", padding), ("dilation", dilation), ("groups", (groups,))),
        layouts=(data_layout, weight_layout),
        arity=2,
        out_dtype=out_dtype,
        reduction_size=k,
        typical_magnitude=1.0,
    )


def _kernel(rng: random.Random, rank: int) -> tuple[int, ...]:
    if rng.random() < 0.7:
        return (rng.choice((1, 3, 3, 3, 5, 7)),) * rank
    return tuple(rng.choice((1, 2, 3, 4, 5)) for _ in range(rank))


def _padding(rng: random.Random, kernel: tuple[int, ...], dilation: tuple[int, ...]) -> tuple[int, ...]:
    """None, half of the window on both sides, or anything narrower than the window."""
    spans = [(k - 1) * d for k, d in zip(kernel, dilation, strict=True)]
    style = rng.choice(("none", "same", "same", "any"))
    if style == "none":
        return (0,) * (2 * len(kernel))
    if style == "same":
        return tuple(span // 2 for span in spans) * 2
    return tuple(rng.randint(0, span) for span in spans * 2)


def conv1d_transpose(rng: random.Random) -> OperatorCase:
    return _transposed(rng, 1)


def conv2d_transpose(rng: random.Random) -> OperatorCase:
    return _transposed(rng, 2)


def conv3d_transpose(rng: random.Random) -> OperatorCase:
    return _transposed(rng, 3)


def _transposed(rng: random.Random, rank: int) -> OperatorCase:
    """A transposed convolution; each output element sums about K = channels * kernel / strides products."""
    groups = rng.choice((1, 1, 1, 2))
    channels, filters = sizes.size(rng, 64), sizes.size(rng, 64)
    batch = rng.choice((1, 1, 2))
    kernel = _kernel(rng, rank)
    strides = tuple(rng.choice((1, 2, 2, 3)) for _ in range(rank))
    extra = tuple(rng.randint(0, s - 1) if rng.random() < 0.3 else 0 for s in strides)
    padding = _padding(rng, kernel, (1,) * rank)
    spatial = sizes.shape(rng, rank, 32 * 32)
    half = rank
    spans = [
        (n - 1) * s + k + e - padding[i] - padding[half + i]
        for i, (n, s, k, e) in enumerate(zip(spatial, strides, kernel, extra, strict=True))
    ]
    require(min(spans) >= 1)
    # Cropping more than the kernel adds would be a convolution with negative padding: stock TVM's does not allow it.
    require(all(padding[i] < kernel[i % rank] for i in range(2 * rank)))
    require(all(e <= k - 1 for e, k in zip(extra, kernel, strict=True)))
    k = channels * math.prod(kernel)
    require(batch * groups * filters * math.prod(spans) * k <= sizes.WORK * 2)
    dtype = sizes.float_dtype(rng)
    data_layout, weight_layout = {1: ("NCW", "IOW"), 2: ("NCHW", "IOHW"), 3: ("NCDHW", "IODHW")}[rank]
    density = k / math.prod(strides)
    return drawn_case(
        operator=f"nn.conv{rank}d_transpose",
        inputs=(
            _operand((batch, groups * channels, *spatial), dtype),
            _operand(
                (groups * channels, filters, *kernel),
                dtype,
                constant=rng.random() < 0.8,
                scale=3 / math.sqrt(max(density, 1)),
            ),
        ),
        attributes=(("strides", strides), ("padding", padding), ("output_padding", extra), ("groups", (groups,))),
        layouts=(data_layout, weight_layout),
        arity=2,
        reduction_size=k,
        typical_magnitude=1.0,
    )
