"""The launch of a configuration for a region: which entry point, and the numbers and pointers that it is told."""

from __future__ import annotations

from tvm_ext.records.partition import CutlassRegion

from . import emit, emit_back_to_back, emit_convolution
from .back_to_back import PairConfig, PairProblem
from .convolution import AnyConvolutionConfig, ConvolutionConfig, ConvolutionProblem
from .epilogue import Epilogue
from .gemm import GemmConfig, GemmProblem
from .host import KernelCall


def gemm_call(
    config: GemmConfig, epilogue: Epilogue, problem: GemmProblem, region: CutlassRegion, places: tuple[int, ...]
) -> KernelCall:
    """The launch of ``config`` for the region's own extents and distances."""
    a, b = problem.a, problem.b
    first, second = region.factors
    numbers = (
        problem.m, problem.n, problem.k, problem.batch, a.leading_dimension, b.leading_dimension,
        a.batch_stride, b.batch_stride, problem.m * problem.n if problem.batch > 1 else 0,
        config.split_k, config.swizzle, int(config.raster == "along_m"), 0,
    )  # fmt: skip
    pointers = f"data[{first}], data[{second}], operands, distances, data[tensors - 1]"
    return KernelCall(
        symbol=emit.symbol_of(config, epilogue, a.order, b.order, batched=problem.batch > 1),
        structure="GemmCall",
        declaration=emit.CALL,
        fields=f"{', '.join(map(str, numbers))}, {pointers}",
        numbers=numbers,
        operands=places,
        distances=tuple(operand.batch_stride for operand in region.operands),
    )


def convolution_call(
    config: AnyConvolutionConfig,
    epilogue: Epilogue,
    problem: ConvolutionProblem,
    region: CutlassRegion,
    places: tuple[int, ...],
) -> KernelCall:
    """The launch of ``config`` for the region's own extents."""
    window, tuning = problem.window, (config.split, 1, 0, 0)
    if isinstance(config, ConvolutionConfig):
        tuning = (config.split, config.tile.swizzle, int(config.tile.raster == "along_m"), 0)
    numbers = (
        *window.input_extents, problem.filters, *window.filter_extents, *window.output_extents,
        *window.padding, *window.strides, *window.dilation, window.groups, *tuning,
    )  # fmt: skip
    first, second = region.factors
    return KernelCall(
        symbol=emit_convolution.symbol_of(config, epilogue),
        structure="ConvolutionCall",
        declaration=emit_convolution.CALL,
        fields=f"{', '.join(map(str, numbers))}, data[{first}], data[{second}], operands, data[tensors - 1]",
        numbers=numbers,
        operands=places,
    )


def pair_call(
    config: PairConfig,
    first: Epilogue,
    second: Epilogue,
    problem: PairProblem,
    region: CutlassRegion,
    places: tuple[int, ...],
) -> KernelCall:
    """The launch of ``config`` for the region's own extents; of matrix products the window is zeros."""
    assert region.then is not None
    head, tail = problem.first, problem.second
    window: tuple[int, ...] = (0,) * 14
    if problem.convolution is not None:
        own = problem.convolution.window
        window = (
            *own.input_extents, *own.filter_extents, *own.output_extents, *own.padding, *own.strides, *own.dilation
        )  # fmt: skip
    numbers = (
        head.m, head.n, head.k, tail.n, head.a.leading_dimension, head.b.leading_dimension, tail.b.leading_dimension,
        *window,
    )  # fmt: skip
    factors = ", ".join(f"data[{place}]" for place in (*region.factors, region.then.factors[1]))
    return KernelCall(
        symbol=emit_back_to_back.symbol_of(config, first, second, head.b.order),
        structure="PairCall",
        declaration=emit_back_to_back.CALL,
        fields=f"{', '.join(map(str, numbers))}, {factors}, operands, data[tensors - 1]",
        numbers=numbers,
        operands=places,
    )
