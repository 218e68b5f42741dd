"""Depthwise convolutions: the direct template, on the vector units.

It stores pixels one by one, so that its epilogue is a function of C++ (`epilogue_function`) and no visitor tree.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from math import prod

from tvm_ext.devices.machine import Machine
from tvm_ext.devices.occupancy import BlockUse, blocks_per_unit
from tvm_ext.records.partition import CutlassRegion
from tvm_ext.support.arithmetic import ceil_div

from .convolution import ConvolutionProblem, DepthwiseConfig
from .convolution_kernels import DIRECT
from .convolutions import WindowFamily
from .elements import ELEMENTS, MULTIPLIERS
from .emit_convolution import EPILOGUE_INCLUDES, FITS, PROBLEM, convolution_text
from .epilogue import Epilogue
from .epilogue_function import epilogue_function
from .evt import OWN_FUNCTIONS
from .family import PredictedTime
from .gemm import ACCESS_BITS
from .host import once
from .kernel_text import gemm_shape
from .legality import REGISTERS_BESIDE_SUMS, why_too_large
from .ranking import BUSY_WARPS, global_gb_per_s, l2_gb_per_s, latency_us, moved_bytes

DEPTHWISE_TILES = {(8, 1): (2, 4), (8, 2): (2, 2), (16, 1): (4, 4), (16, 2): (2, 4)}
"""A warp's pixels and its threads along them, to a thread's pixels (SimtWarpShape)."""
DEPTHWISE_ARITHMETICS = ("float16",)
# The tiles that are looked at: whole warps of `DEPTHWISE_TILES`, and what of their stages fits shared memory.
_PIXELS = ((4, 8), (8, 8), (8, 16))
_CHANNELS = (32, 64)
_STAGES = (2, 3, 4)
_MOST_FIXED_STRIDE = 2  # a thread keeps its window in registers (`use`), which grows by the stride's square
_GROUPS_PER_THREAD = 2  # depthwise_mma_core_with_lane_access_size.h: channels of a thread, of 16 and of 32 bits


class DepthwiseFamily(WindowFamily[DepthwiseConfig]):
    """One depthwise convolution."""

    @staticmethod
    def serves(region: CutlassRegion) -> bool:
        return region.then is None and region.problem.anchor == "conv2d_depthwise"

    def candidates(self) -> Iterator[DepthwiseConfig]:
        window = self.problem.window
        warps = sorted({pixels for pixels, _ in DEPTHWISE_TILES})
        shapes = itertools.product(_PIXELS, _CHANNELS, warps, _STAGES)
        for pixels, channels, warp, stages in shapes:
            for strides, dilation in ((window.strides, window.dilation), (None, None)):
                if strides is not None and max(*window.strides, *window.dilation) > _MOST_FIXED_STRIDE:
                    continue
                yield DepthwiseConfig(
                    arithmetic=self.problem.arithmetic,
                    pixels=pixels,
                    channels=channels,
                    warp_pixels=warp,
                    filter_extents=window.filter_extents,
                    strides=strides,
                    dilation=dilation,
                    stages=stages,
                )

    def reasons(self, config: DepthwiseConfig) -> Iterator[str | None]:
        yield self.why_too_many_bytes()
        if self.epilogue.reduction is not None:
            yield "the depthwise template stores pixels one by one, and adds up no rows or columns"
        yield _why_not_depthwise(config, self.problem)
        yield _why_wrong_tile(config)
        use = self.use(config)
        yield self.why_too_many_registers(use.registers, use.threads)
        yield why_too_large(use.shared_bytes, self.device)

    def predict(self, config: DepthwiseConfig) -> PredictedTime:
        """Waves of threadblocks, each with its share of the pixels; the filters are reordered before."""
        problem, device = self.problem, self.device
        resident = max(1, blocks_per_unit(self.use(config), device))
        held = ceil_div(ceil_div(config.blocks(problem), device.unit_count), resident) * resident
        tiles = ceil_div(config.tiles(problem), config.split)
        busy = min(1.0, resident * config.warps / BUSY_WARPS)
        peak = device.emitted_gflops_of("float32") or 0.0
        flops = 2 * prod(config.pixels) * config.channels * problem.positions
        multiply_us = flops / (peak / device.unit_count * busy * 1e3) if peak else 0.0
        loaded = _window(config.pixels, problem) * config.channels * problem.multiplier.bits / 8
        load_us = loaded / (l2_gb_per_s(device) / device.unit_count * 1e3)
        arrival_us = latency_us(device) / ((config.stages - 1) * resident)
        units_us = held * tiles * max(multiply_us, load_us, arrival_us) + latency_us(device)
        moved_us = moved_bytes(problem.read_bits, problem.product(), self.epilogue) / (global_gb_per_s(device) * 1e3)
        time_us = max(units_us, moved_us) + 2 * Machine(device).launch_us
        return PredictedTime(time_us=time_us, full_clock_us=time_us)

    def use(self, config: DepthwiseConfig) -> BlockUse:
        """What a threadblock takes of its unit.

        Compiled-in strides keep a thread's whole window in registers, of two channels at a time, and the next one's.
        """
        registers = config.warp_pixels * config.channels // 32 + REGISTERS_BESIDE_SUMS
        if config.strides is not None:
            thread = DEPTHWISE_TILES[config.warp_pixels, 32 // min(config.channels // _GROUPS_PER_THREAD, 32)]
            registers += 2 * _window(thread, self.problem) + self.problem.positions
        shared = _shared_bytes(config, self.problem)
        return BlockUse(threads=config.warps * self.device.teu_lanes, registers=registers, shared_bytes=shared)

    def preference(self, config: DepthwiseConfig) -> tuple[int, int]:
        return -config.warp_pixels, -config.stages

    def splits(self, config: DepthwiseConfig) -> Iterator[DepthwiseConfig]:
        """As many threadblocks to the pixels as fill the units once, twice, four or eight times."""
        ranges = ceil_div(self.problem.filters, config.channels)
        for times in (1, 2, 4, 8):
            share = min(config.tiles(self.problem), self.device.unit_count * times // ranges)
            yield dataclasses.replace(config, split=max(1, share))

    def variants(self, config: DepthwiseConfig) -> Iterator[DepthwiseConfig]:
        """Shares of the pixels."""
        return (other for other in self.splits(config) if other != config)

    def source(self, config: DepthwiseConfig) -> str:
        return emit_depthwise(config, self.epilogue)

    def numbers(self, config: DepthwiseConfig) -> tuple[int, ...]:
        return *self.problem.numbers, config.split, 1, 0, 0


# --- legality --------------------------------------------------------------------------------------------------------
def _why_not_depthwise(config: DepthwiseConfig, problem: ConvolutionProblem) -> str | None:
    """default_depthwise_fprop.h, depthwise_fprop_activation_tile_access_iterator_direct_conv_*.h, can_implement."""
    window = problem.window
    if not problem.is_depthwise or problem.arithmetic not in DEPTHWISE_ARITHMETICS:
        return f"the direct template is for depthwise convolutions of {' and '.join(DEPTHWISE_ARITHMETICS)}"
    if config.filter_extents != window.filter_extents:
        return "the filter's extents are others than the template's"
    if config.strides is not None and (config.strides, config.dilation) != (window.strides, window.dilation):
        return "strides or dilation are others than the template's"
    access = ACCESS_BITS // problem.multiplier.bits
    if problem.filters % access:
        return f"{problem.filters} channels are no whole accesses: pad them to a multiple of {access}"
    return None


def _why_wrong_tile(config: DepthwiseConfig) -> str | None:
    """depthwise_mma_core_with_lane_access_size.h."""
    threads_n = min(config.channels // _GROUPS_PER_THREAD, 32)
    thread = DEPTHWISE_TILES.get((config.warp_pixels, 32 // threads_n))
    if thread is None:
        return "warps have no such tile"
    if config.pixels[0] % thread[0] or config.pixels[1] % thread[1] or config.warps < 1 or config.stages < 2:
        return "a threadblock's pixels are no whole number of its threads'"
    if config.pixels[0] * config.pixels[1] % config.warp_pixels:
        return "a threadblock's pixels are no whole number of warps"
    return None


def _shared_bytes(config: DepthwiseConfig, problem: ConvolutionProblem) -> int:
    """direct_convolution.h: the stages' pixels, whose places the sums take in the end, and the filters."""
    width = MULTIPLIERS[config.arithmetic].bits // 8
    loaded = _window(config.pixels, problem) * config.channels * width
    stored = config.pixels[0] * config.pixels[1] * config.channels * 4
    return max(loaded, stored) * config.stages + prod(config.filter_extents) * config.channels * width


def _window(pixels: tuple[int, int], problem: ConvolutionProblem) -> int:
    """Pixels of the activations that a tile of ``pixels`` reads."""
    window = problem.window
    return prod(
        (tile - 1) * stride + (extent - 1) * step + 1
        for tile, stride, extent, step in zip(
            pixels, window.strides, window.filter_extents, window.dilation, strict=True
        )
    )


# --- text ------------------------------------------------------------------------------------------------------------
_INCLUDES = (
    "cutlass/conv/kernel/default_depthwise_fprop.h",
    "cutlass/conv/device/direct_convolution.h",
    *EPILOGUE_INCLUDES[2:],
)


def emit_depthwise(config: DepthwiseConfig, epilogue: Epilogue) -> str:
    """The source of ``config`` with ``epilogue``; raises as `kernel_text`."""
    functions = OWN_FUNCTIONS + once("DIRECT", DIRECT)
    return convolution_text(
        config, epilogue, includes=_INCLUDES, functions=functions, body=_direct(config, epilogue), fits=FITS
    )


def _direct(config: DepthwiseConfig, epilogue: Epilogue) -> str:
    p, q = config.pixels
    r, s = config.filter_extents
    fixed = config.strides is not None
    algorithm = f"cutlass::conv::IteratorAlgorithm::{'kFixedStrideDilation' if fixed else 'kOptimized'}"
    function = epilogue_function(epilogue, "float32")
    operands = ", ".join(
        f"static_cast<{ELEMENTS[operand.dtype].cpp} const*>(call.operands[{i}])"
        for i, operand in enumerate(epilogue.operands)
    )
    return f"""{function}
using Tile = cutlass::conv::TensorNHWCShape<1, {p}, {q}, {config.channels}>;
using FilterShape = cutlass::MatrixShape<{r}, {s}>;
using ThreadblockShape = {gemm_shape((p * q, config.channels, r * s))};
using WarpShape = {gemm_shape((config.warp_pixels, config.channels, r * s))};
using StrideShape = cutlass::MatrixShape<{_extents(config.strides)}>;
using DilationShape = cutlass::MatrixShape<{_extents(config.dilation)}>;
using Swizzle = cutlass::conv::threadblock::DepthwiseDirect2dConvIdentityThreadblockSwizzle<1, 1, {p}, {q}>;
using OutputOp = tvm_ext::UnchangedSums<ElementSum, 128 / cutlass::sizeof_bits<ElementA>::value>;

using Default = cutlass::conv::kernel::DefaultDepthwiseDirect2dConvFprop<
    ElementA, Layout, ElementB, Layout, ElementOut, Layout, ElementSum, cutlass::arch::OpClassSimt,
    cutlass::arch::Sm80, ThreadblockShape, Tile, FilterShape, WarpShape, cutlass::gemm::GemmShape<1, 1, 1>, OutputOp,
    Swizzle, {config.stages}, Operator, {algorithm},
    cutlass::conv::StrideSupport::{"kFixed" if fixed else "kStrided"}, StrideShape, DilationShape>;
using Kernel = typename tvm_ext::DepthwiseWithFunction<Default, Tile, Swizzle, {algorithm}, EpilogueFunction>::Kernel;
using Convolution = tvm_ext::DepthwiseLaunch<Kernel, typename Default::Kernel, EpilogueFunction>;

{PROBLEM}
typename Convolution::Arguments make_arguments(ConvolutionCall const& call) {{
  EpilogueFunction const function{{static_cast<ElementOut*>(call.d){", " + operands if operands else ""}}};
  return {{problem_of(call), static_cast<ElementA const*>(call.a), static_cast<ElementB const*>(call.b), function}};
}}
"""


def _extents(extents: tuple[int, int] | None) -> str:
    return "-1, -1" if extents is None else f"{extents[0]}, {extents[1]}"
