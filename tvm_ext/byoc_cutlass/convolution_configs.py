"""Which templates fit a convolution on a device: the tiles of `configs`, each with the iterators that read its windows.

A convolution whose filters have one position and no stride is a matrix product as it lies: the matrix product's
templates are candidates beside its own, and the model chooses. `why_no_convolution` says why there is none.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

from tvm_ext.devices.capabilities import BULK_COPIES_SINCE, has
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.support.arithmetic import ceil_div

from . import configs
from .configs import MOST_CONFIGS, check_device, most_frequent
from .convolution import AnyConvolutionConfig, ConvolutionConfig, ConvolutionProblem, DepthwiseConfig
from .convolution import Iterator as Reader
from .convolution_legality import DEPTHWISE_TILES, MASK_POSITIONS, why_illegal_convolution
from .convolution_ranking import predict_convolution
from .epilogue import Epilogue
from .gemm import GemmConfig
from .legality import SMALLEST_ASYNC_COPY_BITS
from .ranking import Ranked

_SPLITS = (1, 2, 4, 8)
_FEW = 8
_DEPTHWISE_PIXELS = ((4, 8), (8, 8), (8, 16))
_DEPTHWISE_CHANNELS = (32, 64)
_DEPTHWISE_STAGES = (2, 3, 4)
_MOST_FIXED_STRIDE = 2


def propose_convolution(
    problem: ConvolutionProblem, device: DeviceSpec, epilogue: Epilogue, *, count: int = MOST_CONFIGS
) -> tuple[Ranked[AnyConvolutionConfig], ...]:
    """The best ``count`` legal configurations for ``problem``, fastest first by the model; empty where there is none.

    Raises TargetError as `configs.propose`.
    """
    check_device(device)
    found = legal_convolutions(problem, device, epilogue)
    split = [item for config in found for item in _splits(config, problem, device, epilogue)]
    ranked = [Ranked.of(c, predict_convolution(c, problem, device, epilogue)) for c in split]
    return tuple(sorted(ranked, key=_place)[:count])


def legal_convolutions(
    problem: ConvolutionProblem, device: DeviceSpec, epilogue: Epilogue
) -> Iterator[AnyConvolutionConfig]:
    """All of them, in the order in which they are looked at, without splits."""
    for config in candidates(problem, device):
        if why_illegal_convolution(config, problem, device, epilogue) is None:
            yield config


def why_no_convolution(problem: ConvolutionProblem, device: DeviceSpec, epilogue: Epilogue) -> str | None:
    """Why no configuration is legal, as the most candidates were refused; None where one is. Raises as `propose`."""
    check_device(device)
    reasons = (why_illegal_convolution(item, problem, device, epilogue) for item in candidates(problem, device))
    return most_frequent(reasons, f"{device.name} has no template that convolves {problem.arithmetic}")


def _place(item: Ranked[AnyConvolutionConfig]) -> tuple[tuple[float, float], int, int, str]:
    """Of equals, the one whose warps have the largest tiles, and then that with most stages to spare."""
    if isinstance(item.config, DepthwiseConfig):
        return item.order, -item.config.warp_pixels, -item.config.stages, item.config.name
    warp = item.config.tile.warp or item.config.tile.threadblock
    return item.order, -warp[0] * warp[1], -item.config.tile.stages, item.config.name


def candidates(problem: ConvolutionProblem, device: DeviceSpec) -> Iterator[AnyConvolutionConfig]:
    """Configurations worth a look, legal or not."""
    if problem.is_depthwise:
        yield from _direct_candidates(problem)
        return
    product = problem.product()
    narrow = product.a.alignment * problem.multiplier.bits < SMALLEST_ASYNC_COPY_BITS
    staged = configs.two_stage_candidates(product, device) if narrow else ()
    for tile in (*configs.candidates(product, device), *staged):
        if tile.generation == "2.x":
            yield from _windowed(tile, problem)
        if problem.is_plain:
            yield ConvolutionConfig(tile=tile, iterator="plain")
    if has(device, BULK_COPIES_SINCE):
        for tile in configs.single_group_candidates(product):
            yield ConvolutionConfig(tile=tile, iterator="bulk")


def _windowed(tile: GemmConfig, problem: ConvolutionProblem) -> Iterator[ConvolutionConfig]:
    """2.x templates on ``tile``. Stepped pointers are never slower than coordinates where both are possible."""
    stepped: Reader = "optimized" if max(problem.window.filter_extents) <= MASK_POSITIONS else "analytic"
    if problem.window.groups > 1:
        yield ConvolutionConfig(tile=tile, iterator=stepped, grouping="single")
        yield ConvolutionConfig(tile=tile, iterator="analytic", grouping="multiple")
        return
    yield ConvolutionConfig(tile=tile, iterator=stepped)
    if problem.channels <= _FEW:
        yield ConvolutionConfig(tile=tile, iterator="few_channels")
        yield ConvolutionConfig(tile=tile, iterator="fixed_channels")


def _direct_candidates(problem: ConvolutionProblem) -> Iterator[DepthwiseConfig]:
    window = problem.window
    warps = sorted({pixels for pixels, _ in DEPTHWISE_TILES})
    shapes = itertools.product(_DEPTHWISE_PIXELS, _DEPTHWISE_CHANNELS, warps, _DEPTHWISE_STAGES)
    for pixels, channels, warp, stages in shapes:
        for strides, dilation in ((window.strides, window.dilation), (None, None)):
            if strides is not None and max(*window.strides, *window.dilation) > _MOST_FIXED_STRIDE:
                continue
            yield DepthwiseConfig(
                arithmetic=problem.arithmetic,
                pixels=pixels,
                channels=channels,
                warp_pixels=warp,
                filter_extents=window.filter_extents,
                strides=strides,
                dilation=dilation,
                stages=stages,
            )


def _splits(
    config: AnyConvolutionConfig, problem: ConvolutionProblem, device: DeviceSpec, epilogue: Epilogue
) -> Iterator[AnyConvolutionConfig]:
    """``config``, and in slices where its tiles leave units idle and every slice keeps its stages filled."""
    if isinstance(config, DepthwiseConfig):
        yield from _shares(config, problem, device)
        return
    tile = config.tile
    tiles = tile.tiles(problem.product())

    def is_legal(item: ConvolutionConfig) -> bool:
        return why_illegal_convolution(item, problem, device, epilogue) is None

    for split in _SPLITS:
        sliced = config.with_split(split)
        if split == 1:
            yield config
        elif tile.is_simt or tile.schedule in ("pingpong", "single") or tiles * split > device.unit_count * 2:
            return
        elif sliced.steps(problem) >= tile.stages and is_legal(sliced):
            yield sliced


def runtime_convolution_variants(
    config: AnyConvolutionConfig, problem: ConvolutionProblem, device: DeviceSpec, epilogue: Epilogue
) -> Iterator[AnyConvolutionConfig]:
    """Other values of what the very same program takes at run time: slices of channels, shares of pixels."""
    if isinstance(config, DepthwiseConfig):
        yield from (item for item in _shares(config, problem, device) if item != config)
    elif config.iterator == "plain":
        for tile in configs.runtime_variants(config.tile, problem.product()):
            yield dataclasses.replace(config, tile=tile)
    elif config.iterator != "bulk" and not config.tile.is_simt:
        for split in _SPLITS:
            sliced = config.with_split(split)
            legal = why_illegal_convolution(sliced, problem, device, epilogue) is None
            if sliced != config and legal and (split == 1 or sliced.steps(problem) >= config.tile.stages):
                yield sliced


def _shares(config: DepthwiseConfig, problem: ConvolutionProblem, device: DeviceSpec) -> Iterator[DepthwiseConfig]:
    """As many threadblocks to the pixels as fill the units once, twice or four times."""
    ranges = ceil_div(problem.filters, config.channels)
    for times in (1, 2, 4, 8):
        yield dataclasses.replace(config, split=max(1, min(config.tiles(problem), device.unit_count * times // ranges)))
