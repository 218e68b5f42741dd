"""Convolutions that the tests of their templates share."""

from __future__ import annotations

import random

from tvm_ext.byoc_cutlass.convolution import ConvolutionConfig, DepthwiseConfig
from tvm_ext.byoc_cutlass.convolutions import ConvolutionFamily
from tvm_ext.byoc_cutlass.depthwise import DepthwiseFamily
from tvm_ext.byoc_cutlass.elements import MULTIPLIERS
from tvm_ext.byoc_cutlass.epilogue import Epilogue
from tvm_ext.byoc_cutlass.gemm import widest_access
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.records.partition import AnchorKind, CutlassProblem, ImplicitWindow, MatrixLayout

KINDS = ("windows", "first layer", "groups", "depthwise", "plain")
AnyConfig = ConvolutionConfig | DepthwiseConfig


def convolution_family(
    problem: CutlassProblem, device: DeviceSpec, epilogue: Epilogue
) -> ConvolutionFamily | DepthwiseFamily:
    """The family that serves the problem."""
    return (DepthwiseFamily if problem.anchor == "conv2d_depthwise" else ConvolutionFamily)(problem, device, epilogue)


def convolution_of(
    *,
    batch: int = 8,
    extents: tuple[int, int] = (28, 28),
    channels: int = 64,
    filters: int = 64,
    window: tuple[int, int] = (3, 3),
    stride: int = 1,
    padding: tuple[int, int] | None = None,
    dilation: int = 1,
    groups: int = 1,
    dtype: str = "float16",
    out_dtype: str | None = None,
) -> CutlassProblem:
    """Padded to keep the extents where ``padding`` is None."""
    pads = padding if padding is not None else ((window[0] - 1) * dilation // 2, (window[1] - 1) * dilation // 2)
    p, q = ((extents[i] + 2 * pads[i] - (window[i] - 1) * dilation - 1) // stride + 1 for i in (0, 1))
    anchor: AnchorKind = "conv2d" if groups == 1 else "conv2d_grouped"
    operand, each = MULTIPLIERS[dtype].operand, channels // groups
    alignment = widest_access(each, MULTIPLIERS[dtype].bits)
    layout = MatrixLayout(order="row", leading_dimension=each, batch_stride=0, alignment=alignment)
    return CutlassProblem(
        anchor="conv2d_depthwise" if groups == channels == filters and groups > 1 else anchor,
        batch=1,
        rows=batch * p * q,
        columns=filters,
        depth=window[0] * window[1] * each,
        dtypes=(operand, operand, out_dtype or dtype),
        operands=(layout, layout),
        simt=dtype == "float32",
        window=ImplicitWindow(
            input_extents=(batch, *extents, channels),
            filter_extents=window,
            output_extents=(p, q),
            padding=pads,
            strides=(stride, stride),
            dilation=(dilation, dilation),
            groups=groups,
        ),
    )


def random_problem(rng: random.Random, kind: str, capability: tuple[int, int]) -> CutlassProblem:
    """Of ``kind``, in a type that the kind's templates take on devices of ``capability``."""
    window = rng.choice(((3, 3), (5, 5), (7, 7), (3, 5)))
    common = {"stride": rng.choice((1, 2)), "dilation": rng.choice((1, 1, 2)), "window": window}
    if kind == "depthwise":
        channels = rng.choice((32, 144, 512))
        return convolution_of(**common, channels=channels, filters=channels, groups=channels)  # type: ignore[arg-type]
    if kind == "groups":
        groups, size = rng.choice(((32, 4), (32, 8), (2, 64), (4, 32), (2, 256)))
        return convolution_of(**common, channels=groups * size, filters=groups * size, groups=groups)  # type: ignore[arg-type]
    if kind == "first layer":
        channels = rng.choice((1, 2, 3, 4, 8))
        return convolution_of(**common, channels=channels, filters=rng.choice((48, 64, 96)))  # type: ignore[arg-type]
    dtypes = ["float16", "float32", "int8"] + (["bfloat16", "tfloat32"] if capability >= (8, 0) else [])
    dtype = rng.choice(dtypes)
    out = {"int8": rng.choice(("int8", "int32")), "tfloat32": "float32"}.get(dtype, dtype)
    channels = rng.choice((16, 64, 100, 256)) if dtype != "int8" else rng.choice((64, 256))
    filters = rng.choice((32, 60, 128))
    if kind == "plain":
        return convolution_of(window=(1, 1), channels=channels, filters=filters, dtype=dtype, out_dtype=out)
    return convolution_of(**common, channels=channels, filters=filters, dtype=dtype, out_dtype=out)  # type: ignore[arg-type]
