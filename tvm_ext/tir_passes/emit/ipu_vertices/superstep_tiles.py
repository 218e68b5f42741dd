"""Fits Roller's rPrograms to a bulk-synchronous machine: fewer, larger supersteps while a tile's memory holds them.

An rProgram's tile in local memory says what to load at once so that loads keep up (Figure 8). It does not count that
all tiles wait for each other after each load. Here a tile grows by whole rTiles along one axis after the other, as long
as the predicted time falls: along a reduction the same bytes come in fewer supersteps, along other axes partitions that
one tile would compute in rounds become one. Worked example, (130, 67) x (67, 93): [2, 1, 1] on 6045 partitions in five
rounds of 67 steps becomes a tile of several rows and columns and the whole reduction, one superstep.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from tvm_ext.analysis.computation_exprs import itemsize_bytes
from tvm_ext.cost.perf_model import PerfModel
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.devices.machine import Machine
from tvm_ext.errors import IllegalRewrite
from tvm_ext.records.rprogram import RProgram
from tvm_ext.support.arithmetic import ceil_div

from ...roller.construct_once import construct_once
from .stages import VertexStage

SOURCED = (
    "peak_gflops.float32",
    "layers.L1.bandwidth_gb_per_s",
    "layers.L2.bandwidth_gb_per_s",
    "handoff_ns",
    "dispatch_ns",
)
"""The facts of a row that times here come from."""


@dataclass(frozen=True, slots=True)
class TileRates:
    """What one tile of ``device`` does in a second, by its row; all tiles share its rates evenly."""

    device: DeviceSpec

    @property
    def exchange_bytes_per_s(self) -> float:
        return Machine(self.device).rate("L2") / self.device.unit_count

    @property
    def superstep_s(self) -> float:
        """All tiles wait for each other and begin an exchange."""
        return (self.device.handoff_ns or 0.0) * 1e-9

    @property
    def vertex_s(self) -> float:
        return (self.device.dispatch_ns or 0.0) * 1e-9

    def point_s(self, stage: VertexStage, register_tile: Mapping[str, int]) -> float:
        """Of one point of the iteration space: its arithmetic, or what registers load from local memory for it."""
        model = PerfModel(stage.expr, self.device)
        shape = tuple(register_tile[name] for name in model.names)
        points = prod(ceil_div(e, t) * t for e, t in zip(model.extents, shape, strict=True))
        arithmetic = max(1.0, stage.expr.flops_per_point) / (model.max_compute_gflops() * 1e9)
        once = sum(access.itemsize_bytes for access in stage.expr.accesses)  # also where an index is not affine
        loads = min(model.traffic_bytes(0, shape) / points, once) / Machine(self.device).rate("L1")
        return max(arithmetic, loads) * self.device.unit_count

    def sources(self) -> tuple[str, ...]:
        facts = [fact for fact in self.device.facts if fact.used and fact.field in SOURCED]
        return tuple(f"{fact.field} = {fact.value} {fact.unit}: {fact.source}" for fact in facts)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TileProgram:
    """The ``sizes`` of a vertex to which the tile of ``program`` in local memory has grown; None: a point has."""

    program: RProgram | None
    sizes: Mapping[str, int]
    registers: Mapping[str, int]
    expected_s: float


def tile_program(stage: VertexStage, device: DeviceSpec, room_bytes: float, k: int) -> TileProgram:
    """The program with the least predicted time whose inputs and results take ``room_bytes`` of a tile at most.

    Raises IllegalRewrite where the smallest vertex takes more.
    """
    programs = construct_once(stage.expr, device, k=k).programs or (None,)  # none where an index is not affine
    made = [_grown(stage, program, TileRates(device), room_bytes) for program in programs]
    found = [tile for tile in made if tile is not None]
    if not found:
        raise IllegalRewrite(f"{stage.computation.name} needs more than {room_bytes / 1024:.0f} KiB of a tile at once")
    return min(found, key=lambda tile: tile.expected_s)


def _grown(stage: VertexStage, program: RProgram | None, rates: TileRates, room_bytes: float) -> TileProgram | None:
    extents = stage.expr.extents
    sizes = registers = units = dict.fromkeys(extents, 1)
    if program is not None:
        sizes = units = {axis: min(size, extents[axis]) for axis, size in program.tile("L1").sizes.items()}
        registers = {axis: min(size, sizes[axis]) for axis, size in program.tile("L0").sizes.items()}
    point_s = rates.point_s(stage, registers)
    best = _expected_s(stage, sizes, point_s, rates, room_bytes)
    while best is not None:
        larger = [
            {**sizes, axis: _with_fewer(sizes[axis], units[axis], extents[axis])}
            for axis in sizes
            if sizes[axis] < extents[axis]
        ]
        timed = [(_expected_s(stage, grown, point_s, rates, room_bytes), grown) for grown in larger]
        fitting = [(time_s, grown) for time_s, grown in timed if time_s is not None and time_s < best]
        if not fitting:
            return TileProgram(program=program, sizes=sizes, registers=registers, expected_s=best)
        best, sizes = min(fitting, key=lambda pair: pair[0])
    return None


def _with_fewer(size: int, unit: int, extent: int) -> int:
    """The size in whole units that takes half as many tiles: 67 in tiles of 16 are five, then two of 34."""
    return min(extent, ceil_div(ceil_div(extent, ceil_div(extent, size) // 2), unit) * unit)


def _expected_s(
    stage: VertexStage, sizes: Mapping[str, int], point_s: float, rates: TileRates, room_bytes: float
) -> float | None:
    """Seconds of the stage in vertices of ``sizes``; None where they do not fit. Every tile does as the fullest."""
    counts = {axis.name: ceil_div(axis.extent, sizes[axis.name]) for axis in stage.expr.axes}
    rounds = ceil_div(prod(counts[axis.name] for axis in stage.expr.spatial), rates.device.unit_count)
    steps = prod(counts[axis.name] for axis in stage.expr.reduction)
    box = {axis: (0, size) for axis, size in sizes.items()}
    tensors = stage.reads
    loaded = [
        min(region.elements, prod(accesses[0].shape)) * accesses[0].itemsize_bytes
        for region, (_, _, accesses) in zip(stage.regions(box), tensors, strict=True)
    ]
    dtype = stage.expr.output.dtype
    kept = rounds * prod(sizes[axis.name] for axis in stage.expr.spatial) * itemsize_bytes(dtype)
    if sum(loaded) + kept > room_bytes:
        return None
    compute_s = prod(sizes.values()) * point_s + rates.vertex_s
    return rounds * steps * (compute_s + sum(loaded) / rates.exchange_bytes_per_s + rates.superstep_s)
