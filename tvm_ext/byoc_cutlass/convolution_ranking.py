"""How long a configuration of a convolution takes: `ranking`'s model of its implicit matrix product, and what differs.

The product's depth is what the template steps over, zeros included. Activations are moved once, not once for each
position of the filter. An iterator that computes coordinates for each access costs the vector units' instructions,
which overlap with multiplying: narrow accesses and few channels make them the limit.
"""

from __future__ import annotations

from math import prod

from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.devices.machine import Machine
from tvm_ext.devices.occupancy import blocks_per_unit
from tvm_ext.support.arithmetic import ceil_div

from .convolution import AnyConvolutionConfig, ConvolutionConfig, ConvolutionProblem, DepthwiseConfig
from .convolution import Iterator as Reader
from .convolution_legality import depthwise_use, depthwise_window
from .epilogue import Epilogue
from .ranking import (
    BUSY_WARPS,
    PredictedTime,
    global_gb_per_s,
    l2_gb_per_s,
    latency_us,
    operand_bytes,
    predict_product,
)
from .reductions import stored_elements

_INSTRUCTIONS: dict[Reader, int] = {
    "plain": 4, "optimized": 6, "analytic": 24, "few_channels": 40, "fixed_channels": 30, "bulk": 0
}  # fmt: skip
"""Of a thread for one access, counted in the iterators' sources: pointers stepped under a mask, or coordinates divided
out, compared with the extents and multiplied by the strides."""


def predict_convolution(
    config: AnyConvolutionConfig, problem: ConvolutionProblem, device: DeviceSpec, epilogue: Epilogue
) -> PredictedTime:
    """Predicted time of one launch; raises as `predict_product`."""
    moved = _moved_bytes(config, problem, epilogue)
    if isinstance(config, DepthwiseConfig):
        time_us = _depthwise_time_us(config, problem, device, moved)
        return PredictedTime(time_us=time_us, full_clock_us=time_us)
    product, issue = config.product(problem), _issue_us(config, device)
    return predict_product(config.tile, product, device, epilogue, moved_bytes=moved, issue_us=issue)


def _moved_bytes(config: AnyConvolutionConfig, problem: ConvolutionProblem, epilogue: Epilogue) -> float:
    """Each tensor once, and the sums of slices there and back."""
    bits = problem.multiplier.bits
    read = (prod(problem.window.input_extents) + problem.filters * problem.positions * problem.channels) * bits
    stored = stored_elements(epilogue.reduction, problem.pixels, problem.filters) * problem.out.bits
    split = 1 if isinstance(config, DepthwiseConfig) else config.tile.split_k
    sums = 2 * problem.pixels * problem.filters * 32 * split if split > 1 else 0
    return (read + stored + sums) / 8 + operand_bytes(epilogue, problem.pixels, problem.filters)


def _issue_us(config: ConvolutionConfig, device: DeviceSpec) -> float:
    """Instructions that find what one step of a threadblock loads, on its unit's vector units."""
    peak = device.emitted_gflops_of("float32")
    if peak is None:
        return 0.0
    m, n, k = config.tile.threadblock
    accesses = m * k / config.tile.alignment_a + n * k / config.tile.alignment_b
    return accesses * _INSTRUCTIONS[config.iterator] / (peak / 2 / device.unit_count * 1e3)


def _depthwise_time_us(
    config: DepthwiseConfig, problem: ConvolutionProblem, device: DeviceSpec, moved_bytes: float
) -> float:
    """Waves of threadblocks, each of which works through its share of the pixels; the filters are reordered before."""
    resident = max(1, blocks_per_unit(depthwise_use(config, problem, device), device))
    held = ceil_div(ceil_div(config.blocks(problem), device.unit_count), resident) * resident
    tiles = ceil_div(config.tiles(problem), config.split)
    busy = min(1.0, resident * config.warps / BUSY_WARPS)
    peak = device.emitted_gflops_of("float32") or 0.0
    flops = 2 * prod(config.pixels) * config.channels * problem.positions
    multiply_us = flops / (peak / device.unit_count * busy * 1e3) if peak else 0.0
    loaded = depthwise_window(config, problem) * config.channels * problem.multiplier.bits / 8
    load_us = loaded / (l2_gb_per_s(device) / device.unit_count * 1e3)
    arrival_us = latency_us(device) / ((config.stages - 1) * resident)
    units_us = held * tiles * max(multiply_us, load_us, arrival_us) + latency_us(device)
    return max(units_us, moved_bytes / (global_gb_per_s(device) * 1e3)) + 2 * Machine(device).launch_us
