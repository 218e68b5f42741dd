"""Anchors as dot-product instructions want them: the last reduction axis is one group of neighbours."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tvm_ext._tvm import Buffer
from tvm_ext.analysis.computation_exprs import flat_stride
from tvm_ext.analysis.computation_rewrites import split_axis
from tvm_ext.analysis.computations import Computation, dtype_of, mentions
from tvm_ext.analysis.predicates import factors_of, is_in
from tvm_ext.devices.dot_instructions import TILE_INSTRUCTIONS, dot_instruction
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.ir.build_ir import accumulator_dtype


def by_groups(computation: Computation, constants: Sequence[Buffer], device: DeviceSpec) -> Computation:
    """``computation`` with a reduction axis split for the device's instruction; itself where there is nothing to gain.

    Worked example, 64 channels in groups of 4: ``sum(x[i, k] * w[k, j])`` over k becomes a sum over 16 groups of
    ``x[i, 4 * g + k] * w[4 * g + k, j]``, where k is the innermost axis. For a device with tiles, which take up to 16
    groups, a longer axis of groups is split once more.
    """
    factors = factors_of(computation) if computation.combiner == "sum" else None
    if factors is None:
        return computation
    data, weights = factors if is_in(factors[1].source, constants) else reversed(factors)
    types = (dtype_of(data), dtype_of(weights), accumulator_dtype(dtype_of(computation.target)))
    row = dot_instruction(device, *types)
    if row is None or not is_in(weights.source, constants):
        return computation
    for place, variable in reversed(list(enumerate(computation.variables))):
        if computation.kinds[place] != "reduce":
            continue
        if flat_stride(data, variable, computation) == 1 and mentions(list(weights.indices), variable):
            if computation.extent(variable) % row.group:
                return computation
            grouped = _with_last(split_axis(computation, variable, row.group), place + 1)
            tiles = dot_instruction(device, *types, TILE_INSTRUCTIONS)
            return grouped if tiles is None or tiles.tile is None else _by_rows(grouped, place, tiles.tile.groups)
    return computation


def _by_rows(computation: Computation, place: int, most: int) -> Computation:
    """``computation`` with axis number ``place``, of groups, in even rows of a tile, ``most`` groups at most.

    A longer axis is split. Worked example, 96 bytes: 24 groups are two rows of 12; 17 groups have no even rows, and
    stay. Behind a shorter one, the axis outside is split, whose rows may be copied together: 4 of 8 blocks of 4 groups.
    """
    groups = computation.extents[place]
    if groups > most:
        return _evenly(computation, place, most)
    outside = [
        outer for outer in range(place) if computation.kinds[outer] == "reduce" and computation.extents[outer] > 1
    ]
    return _evenly(computation, outside[-1], most // groups) if len(outside) == 1 else computation


def _evenly(computation: Computation, place: int, most: int) -> Computation:
    """``computation`` with axis number ``place`` split by its largest divisor up to ``most``, where that does split."""
    extent = computation.extents[place]
    even = max(size for size in range(1, most + 1) if extent % size == 0)
    return split_axis(computation, computation.variables[place], even) if 1 < even < extent else computation


def _with_last(computation: Computation, last: int) -> Computation:
    """``computation`` with its axes in order, but number ``last`` behind all others."""
    order = [*(place for place in range(len(computation.variables)) if place != last), last]
    return dataclasses.replace(
        computation,
        variables=tuple(computation.variables[place] for place in order),
        extents=tuple(computation.extents[place] for place in order),
        kinds=tuple(computation.kinds[place] for place in order),
    )
