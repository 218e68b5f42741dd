"""Which configurations of convolutions compile and run: the static assertions and run-time checks of CUTLASS 4.2.0.

What tiles alone decide, `legality` says. Each function says which header it mirrors.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.devices.occupancy import registers_left
from tvm_ext.support.arithmetic import ceil_div

from .convolution import WINDOWED, ConvolutionConfig, ConvolutionProblem
from .convolution import Iterator as Reader
from .elements import MULTIPLIERS
from .epilogue import Epilogue
from .gemm import ACCESS_BITS
from .legality import block_threads, product_reasons, thread_registers

MASK_POSITIONS = 32
"""Positions of a filter each way that the optimized iterator's masks have bits for."""
_ITERATOR_REGISTERS: dict[Reader, int] = {"optimized": 20, "analytic": 24, "few_channels": 40, "fixed_channels": 32}
"""Pointers, masks and coordinates of both operands, about, by ptxas' counts for the kernels of the tests."""
_MOST_BYTES = 2**31  # of a tensor: device/implicit_gemm_convolution.h, can_implement
_MOST_PADDING, _LEAST_CORNER, _MOST_CORNER, _MOST_OFFSET = 256, -128, 127, 255
_MOST_STRIDE = 8  # cuTensorMapEncodeIm2col's elementStrides


def convolution_reasons(
    config: ConvolutionConfig, problem: ConvolutionProblem, device: DeviceSpec, epilogue: Epilogue
) -> Iterator[str | None]:
    """Rule by rule, why ``config`` does not compile or run."""
    yield why_too_many_bytes(problem)
    yield _why_wrong_generation(config)
    yield _why_wrong_groups(config, problem)
    yield _why_wrong_iterator(config, problem)
    if config.iterator == "bulk":
        yield _why_not_im2col(problem, epilogue)
    yield _why_wrong_split(config, problem)
    yield from product_reasons(config.tile, problem.product(), device, epilogue)
    if config.tile.generation == "2.x" and config.iterator != "plain":
        yield why_too_many_registers(_registers(config, device), block_threads(config.tile, device), device)


def why_too_many_bytes(problem: ConvolutionProblem) -> str | None:
    """device/implicit_gemm_convolution.h: each tensor has fewer than 2^31 bytes."""
    bits = problem.multiplier.bits
    sizes = (
        prod(problem.window.input_extents) * bits,
        problem.filters * problem.positions * problem.channels * bits,
        problem.pixels * problem.filters * problem.out.bits,
    )
    if max(sizes) // 8 >= _MOST_BYTES:
        return f"a tensor of {max(sizes) // 8} bytes is too large for templates, which count {_MOST_BYTES}"
    return None


def _why_wrong_generation(config: ConvolutionConfig) -> str | None:
    """conv/dispatch_policy.hpp: "Persistent schedules not support for conv yet"."""
    if config.iterator == "bulk":
        return (
            None if config.tile.schedule == "single" else "bulk copies of windows have one warp group that multiplies"
        )
    if config.tile.schedule == "single":
        return "a single warp group multiplies in convolutions alone"
    if config.tile.generation == "3.x" and config.iterator != "plain":
        return f"the iterator {config.iterator} is for 2.x templates"
    return None


def _why_wrong_groups(config: ConvolutionConfig, problem: ConvolutionProblem) -> str | None:
    """device/implicit_gemm_convolution.h, can_implement."""
    if (config.grouping == "none") != (problem.window.groups == 1):
        return "templates without groups are for one group, those with groups for several"
    if config.grouping == "none":
        return None
    tile_n, filters = config.tile.threadblock[1], problem.group_filters
    if config.iterator not in ("optimized", "analytic") or config.tile.is_simt:
        return "groups are for the optimized and the analytic iterator on matrix units"
    if config.grouping == "single":
        return None if filters % tile_n == 0 else f"a group's {filters} filters are no whole tiles of {tile_n}"
    if config.iterator != "analytic":
        return "several groups in one tile are for the analytic iterator"
    return None if tile_n % filters == 0 else f"a tile of {tile_n} is no whole groups of {filters} filters"


def _why_wrong_iterator(config: ConvolutionConfig, problem: ConvolutionProblem) -> str | None:
    """conv2d_fprop_activation_tile_access_iterator_*.h."""
    if config.iterator == "plain" and not problem.is_plain:
        return "only filters of one position, with neither strides nor padding, are plain matrix products"
    if config.iterator == "optimized" and max(problem.window.filter_extents) > MASK_POSITIONS:
        return f"the optimized iterator has masks for {MASK_POSITIONS} positions of a filter each way"
    if config.iterator in WINDOWED and config.tile.is_simt:
        return "templates for few channels are on matrix units"
    if config.iterator == "fixed_channels":
        if config.tile.alignment_a != problem.channels or config.tile.alignment_b != problem.channels:
            return "fixed channels are those of one access"
        if config.tile.threadblock[2] % problem.channels:
            return "a tile's depth is no whole number of positions"
    return None


def _why_not_im2col(problem: ConvolutionProblem, epilogue: Epilogue) -> str | None:
    """sm90_implicit_gemm_gmma_ss_warpspecialized.hpp, can_implement; what cuTensorMapEncodeIm2col takes."""
    window, upper = problem.window, problem.upper_padding()
    if window.groups > 1:
        return "collectives have no groups"
    if sum(operand.role == "matrix" for operand in epilogue.operands) > 1:
        return "a collective loads one whole matrix for its epilogue, as its rows are windows"
    for lower, behind, extent, step, stride in zip(
        window.padding, upper, window.filter_extents, window.dilation, window.strides, strict=True
    ):
        offset = (extent - 1) * step
        if max(lower, behind) > _MOST_PADDING or offset >= _MOST_OFFSET or stride > _MOST_STRIDE:
            return "bulk copies of windows have no such padding, stride or dilation"
        if not (_LEAST_CORNER <= -lower <= _MOST_CORNER and _LEAST_CORNER <= behind - offset <= _MOST_CORNER):
            return "bulk copies of windows have no such padding, stride or dilation"
    return None


def _why_wrong_split(config: ConvolutionConfig, problem: ConvolutionProblem) -> str | None:
    """conv2d_problem_size.h: it is the channels that are split, in whole tiles."""
    split = config.tile.split_k
    if split == 1 or config.iterator == "plain":
        return None
    if config.iterator in WINDOWED or config.grouping != "none" or config.iterator == "bulk":
        return "this template has no slices of channels"
    if split > ceil_div(problem.channels, config.tile.threadblock[2]):
        return f"{problem.channels} channels are no {split} slices of whole tiles"
    return None


def _registers(config: ConvolutionConfig, device: DeviceSpec) -> int:
    """Of a thread: its tile's, its iterators', and without asynchronous copies what it loads for the next step.

    The optimized iterator has two masks for each of a thread's accesses. Worked example: of 256 x 32 halves each of 128
    threads has 8 pieces of 16 bytes, 16 masks; read two halves at a time, 64.
    """
    m, n, k = config.tile.threadblock
    bits, threads = MULTIPLIERS[config.tile.arithmetic].bits, block_threads(config.tile, device)
    staged = (m + n) * k * bits // 32 // threads if config.tile.stages == 2 else 0
    pieces, narrower = m * k * bits // ACCESS_BITS // threads, ACCESS_BITS // bits // config.tile.alignment_a
    masks = 2 * pieces * (narrower - 1) if config.iterator == "optimized" and not config.tile.is_simt else 0
    return thread_registers(config.tile) + _ITERATOR_REGISTERS[config.iterator] + staged + masks


def why_too_many_registers(needed: int, threads: int, device: DeviceSpec) -> str | None:
    """What would be spilled: ptxas' counts for the kernels of the tests."""
    most = registers_left(threads, device)
    return f"{needed} registers of a thread are more than its {most}" if needed > most else None
