"""What a GPU's program loses beside the model of its layers: too few threads to hide latency, and scattered stores."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, prod

from tvm_ext.devices.occupancy import BlockUse, blocks_per_unit
from tvm_ext.support.arithmetic import ceil_div

from .access_table import Shape
from .perf_model import PerfModel

WARPS_TO_HIDE_LATENCY = 1
"""Warps that each scheduler of a GPU should have at least, so that none is idle."""

SCATTER_SHARE = 0.25
"""Share of the time that partial transactions of a store cost although the cache of the lowest layer joins them."""

OTHER_REGISTERS = 24
"""Registers of a thread beside accumulators and operands: addresses, loop counters, what a copy has in flight."""


def resident_share(model: PerfModel, shapes: Sequence[Shape], padding: Sequence[int]) -> float:
    """Share of the threads that hide latency which a GPU's unit holds at a time, at most 1; 1 on a CPU.

    (Where there are too few blocks, the emitter divides their reduction among more threads.) Worked example, V100:
    blocks of 32 threads with 40 KiB of shared memory: 96 KiB hold 2, that is 64 threads; wanted is a warp for each of
    4 schedulers, 128 threads: 0.5.
    """
    device = model.device
    if model.is_cpu or model.tensor_core or len(shapes) < 2:
        return 1.0
    threads = model.threads(shapes[0], shapes[1])
    registers = ceil(model.footprint_bytes(0, shapes[0]) / device.register_bytes) + OTHER_REGISTERS
    shared = ceil(model.footprint_bytes(1, shapes[1], padding))
    held = blocks_per_unit(BlockUse(threads=threads, registers=registers, shared_bytes=shared), device)
    wanted = WARPS_TO_HIDE_LATENCY * device.teus_per_unit * device.teu_lanes
    return min(1.0, max(1, held) * threads / wanted)


def scattered_store_s(model: PerfModel, shapes: Sequence[Shape]) -> float:
    """Time lost by storing parts of transactions: too few of a GPU's threads lie along the output's contiguous axis.

    Worked example: each of 96 threads holds a whole row of 42 floats. A warp stores 32 floats that are 168 bytes apart,
    each in a transaction of 32 bytes: 7/8 of what it sends is lost, and the cache makes good most of that.
    """
    if model.is_cpu or model.tensor_core or model.vector is None or len(shapes) < 2:
        return 0.0
    layer = model.device.lowest_layer
    lanes = ceil_div(shapes[1][model.vector], shapes[0][model.vector])
    whole = min(layer.transaction_bytes, model.extents[model.vector] * model.output.itemsize_bytes)
    stored = prod(model.extents[i] for i in model.spatial) * model.output.itemsize_bytes
    lost = stored * max(0.0, whole / (lanes * model.output.itemsize_bytes) - 1.0)
    return SCATTER_SHARE * lost / model.machine.rate(layer)
