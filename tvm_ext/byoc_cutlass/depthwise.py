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
from tvm_ext.support.arithmetic import ceil_div

from .convolution import DepthwiseConfig
from .convolutions import WindowFamily
from .elements import ELEMENTS
from .emit_convolution import EPILOGUE_INCLUDES, FITS, PROBLEM, convolution_text
from .epilogue import Epilogue
from .epilogue_function import epilogue_function
from .evt import OWN_FUNCTIONS
from .family import PredictedTime
from .gemm import ACCESS_BITS
from .host import own_header
from .kernel_text import gemm_shape
from .legality import REGISTERS_BESIDE_SUMS, why_too_large
from .ranking import BUSY_WARPS, global_gb_per_s, l2_gb_per_s, latency_us

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

    def candidates(self) -> Iterator[DepthwiseConfig]:
        window = self.window
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
        yield self._why_not_depthwise(config)
        yield _why_wrong_tile(config)
        use = self.use(config)
        yield self.why_too_many_registers(use.registers, use.threads)
        yield why_too_large(use.shared_bytes, self.device)

    def predict(self, config: DepthwiseConfig) -> PredictedTime:
        """Waves of threadblocks, each with its share of the pixels; the filters are reordered before."""
        window, device = self.window, self.device
        resident = max(1, blocks_per_unit(self.use(config), device))
        held = ceil_div(ceil_div(self._ranges(config) * config.split, device.unit_count), resident) * resident
        tiles = ceil_div(self.tiles(config), config.split)
        busy = min(1.0, resident * config.warps / BUSY_WARPS)
        peak = device.emitted_gflops_of("float32") or 0.0
        flops = 2 * prod(config.pixels) * config.channels * window.positions
        multiply_us = flops / (peak / device.unit_count * busy * 1e3) if peak else 0.0
        loaded = prod(window.read_extents(config.pixels)) * config.channels * self.multiplier.bits / 8
        load_us = loaded / (l2_gb_per_s(device) / device.unit_count * 1e3)
        arrival_us = latency_us(device) / ((config.stages - 1) * resident)
        units_us = held * tiles * max(multiply_us, load_us, arrival_us) + latency_us(device)
        moved_us = self.moved_bytes() / (global_gb_per_s(device) * 1e3)
        time_us = max(units_us, moved_us) + 2 * Machine(device).launch_us
        return PredictedTime(time_us=time_us, full_clock_us=time_us)

    def use(self, config: DepthwiseConfig) -> BlockUse:
        """What a threadblock takes of its unit.

        Compiled-in strides keep a thread's whole window in registers, of two channels at a time, and the next one's.
        """
        registers = config.warp_pixels * config.channels // 32 + REGISTERS_BESIDE_SUMS
        if config.strides is not None:
            thread = DEPTHWISE_TILES[config.warp_pixels, 32 // min(config.channels // _GROUPS_PER_THREAD, 32)]
            registers += 2 * prod(self.window.read_extents(thread)) + self.window.positions
        shared = self._shared_bytes(config)
        return BlockUse(threads=config.warps * self.device.teu_lanes, registers=registers, shared_bytes=shared)

    def preference(self, config: DepthwiseConfig) -> tuple[int, int]:
        return -config.warp_pixels, -config.stages

    def splits(self, config: DepthwiseConfig) -> Iterator[DepthwiseConfig]:
        """As many threadblocks to the pixels as fill the units once, twice, four or eight times."""
        for times in (1, 2, 4, 8):
            share = min(self.tiles(config), self.device.unit_count * times // self._ranges(config))
            yield dataclasses.replace(config, split=max(1, share))

    def variants(self, config: DepthwiseConfig) -> Iterator[DepthwiseConfig]:
        """Shares of the pixels."""
        return (other for other in self.splits(config) if other != config)

    def source(self, config: DepthwiseConfig) -> str:
        return emit_depthwise(config, self.epilogue)

    def numbers(self, config: DepthwiseConfig) -> tuple[int, ...]:
        return *self.extents(), config.split, 1, 0, 0

    def tiles(self, config: DepthwiseConfig) -> int:
        """Of the result's pixels: what the threadblocks of one range of channels share."""
        p, q = self.window.output_extents
        return self.window.input_extents[0] * ceil_div(p, config.pixels[0]) * ceil_div(q, config.pixels[1])

    def _ranges(self, config: DepthwiseConfig) -> int:
        return ceil_div(self.problem.columns, config.channels)

    def _why_not_depthwise(self, config: DepthwiseConfig) -> str | None:
        """default_depthwise_fprop.h, depthwise_fprop_activation_tile_access_iterator_direct_conv_*.h, can_implement."""
        problem, window = self.problem, self.window
        if problem.anchor != "conv2d_depthwise" or problem.arithmetic not in DEPTHWISE_ARITHMETICS:
            return f"the direct template is for depthwise convolutions of {' and '.join(DEPTHWISE_ARITHMETICS)}"
        if config.filter_extents != window.filter_extents:
            return "the filter's extents are others than the template's"
        if config.strides is not None and (config.strides, config.dilation) != (window.strides, window.dilation):
            return "strides or dilation are others than the template's"
        access = ACCESS_BITS // self.multiplier.bits
        if problem.columns % access:
            return f"{problem.columns} channels are no whole accesses: pad them to a multiple of {access}"
        return None

    def _shared_bytes(self, config: DepthwiseConfig) -> int:
        """direct_convolution.h: the stages' pixels, whose places the sums take in the end, and the filters."""
        width = self.multiplier.bits // 8
        loaded = prod(self.window.read_extents(config.pixels)) * config.channels * width
        stored = config.pixels[0] * config.pixels[1] * config.channels * 4
        return max(loaded, stored) * config.stages + prod(config.filter_extents) * config.channels * width


# --- legality --------------------------------------------------------------------------------------------------------
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


# --- text ------------------------------------------------------------------------------------------------------------
_INCLUDES = (
    "cutlass/conv/kernel/default_depthwise_fprop.h",
    "cutlass/conv/device/direct_convolution.h",
    *EPILOGUE_INCLUDES[2:],
)
_STORES = own_header("direct")  # the stores of the depthwise template, which apply an epilogue's function


def emit_depthwise(config: DepthwiseConfig, epilogue: Epilogue) -> str:
    """The source of ``config`` with ``epilogue``; raises as `kernel_text`."""
    functions = OWN_FUNCTIONS + _STORES
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
