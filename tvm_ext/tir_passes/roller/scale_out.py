"""Scale-out of a single-unit program (paper §3.2): even partitions, and smaller tiles where there are too few."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, prod

from tvm_ext.cost.access_table import Shape
from tvm_ext.cost.perf_model import REPORTED_UNITS_PER_G, PerfModel
from tvm_ext.devices.occupancy import BlockUse, blocks_per_unit
from tvm_ext.support.arithmetic import ceil_div

from .align import tensor_core_steps, transaction_step
from .rtile import reuse_score

WANTED_BALANCE = 0.9
"""Share of the units' time in use above which a partition counts as even: 81 tiles on 80 units use 0.51."""


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
    return SCATTER_SHARE * lost / (layer.bandwidth_gb_per_s * REPORTED_UNITS_PER_G) if layer.bandwidth_gb_per_s else 0.0


def shrink(model: PerfModel, shapes: tuple[Shape, ...]) -> tuple[Shape, ...] | None:
    """Shrink the partitioned tile, along the axis with the smallest data reuse score first, until all units have work.

    Returns None where the units are in even use already or nothing can be shrunk. Upper tiles shrink with it where
    they would not fit inside any more.
    """
    if model.balance(model.partition_count(shapes)) >= WANTED_BALANCE:
        return None
    best = shapes
    while model.balance(model.partition_count(best)) < WANTED_BALANCE:
        smaller = _shrunk_once(model, best)
        if smaller is None:
            break
        best = smaller
    return best if model.balance(model.partition_count(best)) > model.balance(model.partition_count(shapes)) else None


def _shrunk_once(model: PerfModel, shapes: tuple[Shape, ...]) -> tuple[Shape, ...] | None:
    """The program with one spatial axis at the next smaller aligned size, or None where all are at their smallest."""
    level = model.partition_level
    tile = shapes[level]
    options: list[tuple[float, tuple[Shape, ...]]] = []
    for axis in model.spatial:
        smaller = _with_smaller_axis(model, shapes, axis)
        if smaller is not None:
            options.append((reuse_score(model, level, smaller[level], tile), smaller))
    return min(options, key=lambda option: option[0])[1] if options else None


def _with_smaller_axis(model: PerfModel, shapes: tuple[Shape, ...], axis: int) -> tuple[Shape, ...] | None:
    """About half the partitioned tile along ``axis``, or None where it is at its smallest.

    It stays a whole number of the tiles above; where they would not fit inside, or (GPU) would not fill whole warps,
    they are halved too. 1000 columns of 25 threads x 40: no multiple of 40 up to 500 gives whole warps, nor one of 20;
    32 threads x 10 = 320 does.
    """
    level = model.partition_level
    size = min(shapes[level][axis], model.extents[axis])
    smallest = _smallest(model, axis)
    limit = max(smallest, size // 2)
    if limit >= size:
        return None
    for upper in _halvings(shapes[level - 1][axis] if level > 0 else limit, smallest):
        for count in range(limit // upper, 0, -1):
            shrunk = tuple(
                _cut(shape, axis, upper if at < level else count * upper, at <= level)
                for at, shape in enumerate(shapes)
            )
            if _legal(model, shrunk):
                return shrunk
            if model.is_cpu:
                break
    return None


def _smallest(model: PerfModel, axis: int) -> int:
    """A vector register of the vector axis, a fragment of a tensor core's axis, one point of any other."""
    if model.tensor_core:
        return (tensor_core_steps(model.expr, model.device) or {}).get(model.names[axis], 1)
    return model.lanes if axis == model.vector else 1


def _halvings(size: int, smallest: int) -> list[int]:
    """``size`` and its halves, in whole steps of ``smallest``: 40, 20, 10, 5, 3, 2, 1."""
    sizes = [size]
    while sizes[-1] > smallest:
        sizes.append(max(smallest, ceil_div(sizes[-1], 2 * smallest) * smallest))
        if sizes[-1] == sizes[-2]:
            break
    return sizes


def _cut(shape: Shape, axis: int, size: int, owned: bool) -> Shape:
    """``shape`` with at most ``size`` along ``axis``; layers that the units share (not ``owned``) keep theirs."""
    return (*shape[:axis], min(shape[axis], size), *shape[axis + 1 :]) if owned else shape


def _legal(model: PerfModel, shapes: tuple[Shape, ...]) -> bool:
    """Whole transactions and whole warps on a GPU; a CPU's smaller tiles are as legal as larger ones."""
    if model.is_cpu or len(shapes) < 2:
        return True
    tile = shapes[model.partition_level]
    starts_on_transactions = all(
        tile[axis] % transaction_step(model, model.partition_level, axis) == 0 or tile[axis] >= model.extents[axis]
        for axis in model.spatial
    )
    return starts_on_transactions and model.threads(shapes[0], shapes[1]) % model.device.teu_lanes == 0
