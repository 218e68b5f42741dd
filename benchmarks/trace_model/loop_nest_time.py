"""Time of a scheduled function on a CPU, whoever scheduled it: what its loops compute, load and store.

Roller's micro-performance model (paper §3.3) asks an rProgram for footprints and traffic of its tiles. Here the tiles
are read off somebody else's loops (`loop_nests.py`): what a cache holds are the innermost loops that fit it,
and what is in registers are the innermost loops that are written out. It is there to rank candidates of one operator
before any of them was measured (ALCOP §4.3); as a time it is good for little.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import ceil, prod

from tvm_ext.cost.perf_model import MEMORY_OVERLAP, REPORTED_UNITS_PER_G
from tvm_ext.cost.register_tiles import PORT_OVERLAP, overlapped
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.devices.machine import OF_ONE_UNIT, Machine
from tvm_ext.support.arithmetic import ceil_div

from .loop_nests import LoopNest, NestAccess, NestLoop

LLVM_UNROLLS = 16
"""Stores that LLVM writes out by itself where an inner loop of few iterations has as many."""

LOOP_CYCLES = 2.0
"""Of a loop that is not written out, each iteration: count, compare, jump, and what of it the ports do not hide."""


def loop_nests_s(nests: Sequence[LoopNest], device: DeviceSpec) -> float:
    """Seconds that the nests take one after the other on all of the device's cores."""
    regions = {next((loop.number for loop in nest.loops if loop.kind == "parallel"), 0) for nest in nests} - {0}
    launches = len(regions) * Machine(device).launch_s
    return launches + sum(_nest_s(nest, device) for nest in nests)


def _nest_s(nest: LoopNest, device: DeviceSpec) -> float:
    """Computation and the loads of each cache, which overlap; a core has nothing to do where others have more."""
    parts = prod(loop.extent for loop in nest.loops if loop.kind == "parallel")
    balance = parts / (device.unit_count * ceil_div(parts, device.unit_count))
    compute_s = _cycles(nest, device) / (Machine(device).vector_hz * device.unit_count)
    caches = [_cache_s(nest, level, device) for level in range(1, len(device.layers) - 1)]
    return overlapped([compute_s, *caches], MEMORY_OVERLAP) / balance


# --- registers ----------------------------------------------------------------------------------------------------
def _cycles(nest: LoopNest, device: DeviceSpec) -> float:
    """Cycles of one core that runs all of the nest."""
    first = written_out(nest.loops)
    body = range(first, len(nest.loops))
    vector = next((place for place in body if nest.loops[place].kind == "vectorized"), None)
    lanes = device.register_bytes / nest.store.itemsize_bytes
    registers = ceil(nest.loops[vector].extent / lanes) if vector is not None else 1
    steps = prod(nest.loops[place].extent for place in body if place != vector) * registers

    def distinct(access: NestAccess) -> int:
        """Registers, broadcasts or single elements that one run of the body uses of it."""
        count = prod(nest.loops[place].extent for place in body if place != vector and access.moves_in(place))
        return count * (1 if vector is None else _pieces(access, vector, nest.loops[vector], registers))

    stored = distinct(nest.store)
    loaded = [distinct(access) for access in nest.accesses if access != nest.store]
    kept = stored + min(loaded, default=0) + max(0, len(loaded) - 1)
    stays = nest.accumulates and first > 0 and kept <= device.register_limit
    again = 1 / _runs_without(nest.store, nest.loops[:first]) if stays else 1.0
    if kept > device.register_limit:
        stored = steps  # what has no register is stored and loaded for every step
    accumulator_loads = stored * again if nest.accumulates else 0.0
    chain = steps / max(1, stored) if nest.accumulates else 0.0
    busy = [
        steps * max(1.0, nest.flops_per_point / 2) / device.fma_rate,
        (sum(loaded) + accumulator_loads) / device.load_rate,
        stored * again / device.store_rate,
        chain * (device.fma_latency_cycles or 0),
    ]
    return (overlapped(busy, PORT_OVERLAP) + LOOP_CYCLES) * prod(loop.extent for loop in nest.loops[:first])


def written_out(loops: Sequence[NestLoop]) -> int:
    """How many outer loops remain loops: vectors are none, and of the others the innermost are unrolled.

    As stock TVM does it: a serial loop is written out where all within it is, and no more stores than the limit of
    its pragma come of that. LLVM does so by itself where they are few.
    """
    steps, first = 1, len(loops)
    for place in reversed(range(len(loops))):
        loop = loops[place]
        if loop.kind == "parallel":
            break
        if loop.kind == "serial" and steps * loop.extent > max(loop.unroll_limit, LLVM_UNROLLS):
            break
        steps *= 1 if loop.kind == "vectorized" else loop.extent
        first = place
    return first


def _pieces(access: NestAccess, place: int, loop: NestLoop, registers: int) -> int:
    """Instructions for the elements along the vectorized loop: a broadcast, registers, or one for each element."""
    if not access.moves_in(place):
        return 1
    return registers if access.stride(place, loop.extent) == 1 else loop.extent


def _runs_without(access: NestAccess, around: Sequence[NestLoop]) -> int:
    """Runs of the body before ``access`` goes elsewhere."""
    runs = 1
    for place in reversed(range(len(around))):
        if access.moves_in(place) or around[place].kind == "parallel":
            break
        runs *= around[place].extent
    return runs


# --- caches -------------------------------------------------------------------------------------------------------
def _cache_s(nest: LoopNest, level: int, device: DeviceSpec) -> float:
    """Seconds of loading the cache in ``level`` from the layer below, by all cores."""
    below = device.layers[level + 1]
    if not below.bandwidth_gb_per_s:
        return 0.0
    depth = _resident_depth(nest, Machine(device).room_bytes(level, OF_ONE_UNIT), below.transaction_bytes)
    moved = sum(_traffic_bytes(item, nest.loops, depth, below.transaction_bytes, device) for item in nest.accesses)
    return moved / (below.bandwidth_gb_per_s * REPORTED_UNITS_PER_G)


def _resident_depth(nest: LoopNest, capacity_bytes: float, line_bytes: int) -> int:
    """The outermost depth from which on all loops' data fits; a core has its own part of parallel loops only."""
    own = max((place + 1 for place, loop in enumerate(nest.loops) if loop.kind == "parallel"), default=0)
    for depth in range(own, len(nest.loops)):
        if _sum_bytes(nest.accesses, depth, line_bytes) <= capacity_bytes:
            return depth
    return len(nest.loops)


def _sum_bytes(accesses: Iterable[NestAccess], depth: int, line_bytes: int) -> float:
    return sum(footprint_bytes(access, depth, line_bytes) for access in accesses)


def footprint_bytes(access: NestAccess, depth: int, line_bytes: int) -> float:
    """Bytes of whole lines that the loops from ``depth`` on touch; a buffer of the function's own lies densely.

    Worked example: 3 rows of 20 floats from a wider matrix are 3 * 128 bytes in lines of 64.
    """
    start = max(depth, access.private_depth)
    spans = [min(size, 1 + sum(row[start:])) for size, row in zip(access.shape, access.moves, strict=True)]
    if not access.is_param or not spans:
        return prod(spans) * access.itemsize_bytes
    run = spans.pop()
    shape = list(access.shape)
    while spans and run >= prod(shape[len(spans) :]):  # whole rows are one piece
        run *= spans.pop()
    return prod(spans) * ceil(run * access.itemsize_bytes / line_bytes) * line_bytes


def _traffic_bytes(
    access: NestAccess, loops: Sequence[NestLoop], depth: int, line_bytes: int, device: DeviceSpec
) -> float:
    """What a cache that holds the loops from ``depth`` on loads of it: anew in each iteration of the loops outside.

    Not in those next to it in which it stays where it is, but that each core has to load it.
    """
    times, stays = 1, True
    for place in reversed(range(min(depth, len(loops)))):
        loop = loops[place]
        stays = stays and (place < access.private_depth or not access.moves_in(place))
        if not stays:
            times *= loop.extent
        elif loop.kind == "parallel":
            times *= min(loop.extent, device.unit_count)
    return times * footprint_bytes(access, depth, line_bytes)
