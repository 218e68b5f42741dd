"""The CPU's analytical model over many tiles at once: Roller's micro-performance model (paper §3.3) in columns.

The equations are `cost/perf_model.py`'s and `cost/access_table.py`'s, given arrays with one entry a candidate. What
depends on the register tile alone (`cost/register_tiles.py`: cycles, registers) is asked once for each register tile.
Candidates are ranked with the terms of `cost/load_ports.py`, which construction does not have.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tvm_ext.analysis.tensor_expr import TensorExpr
from tvm_ext.cost.access_table import Shape
from tvm_ext.cost.load_ports import PORTS_OVERLAP, PortTimes, set_share
from tvm_ext.cost.perf_model import REPORTED_UNITS_PER_G, PerfModel
from tvm_ext.cost.register_tiles import overlapped
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.records.tuning import CpuTile
from tvm_ext.support.quantities import Floats, Integers


@dataclass(frozen=True, kw_only=True, slots=True)
class CpuTileColumns:
    """`CpuTile`s by column: a row for each candidate, a column for each spatial axis."""

    vector: Integers
    register: Integers
    inner: Integers
    outer: Integers
    order: Integers

    def __len__(self) -> int:
        return len(self.vector)

    def __getitem__(self, index: int) -> CpuTile:
        rows = (tuple(map(int, item[index])) for item in (self.register, self.inner, self.outer, self.order))
        register, inner, outer, order = rows
        return CpuTile(vector=int(self.vector[index]), register=register, inner=inner, outer=outer, order=order)


@dataclass(frozen=True, kw_only=True, slots=True)
class CpuPredictions:
    """Seconds by candidate: all, as `load_ports.py` has it; the arithmetic with its loads from L1 and the loads of each
    cache, as construction has them; ``bottleneck_s`` is the slowest of these at the peak of arithmetic, as if all ran
    at once perfectly.

    ``registers``, ``accumulators`` and ``loads`` are those of one step of the register tile.
    """

    time_s: Floats
    compute_s: Floats
    layer_s: Floats  # a column for each cache from L1 on: loading it from the layer below
    bottleneck_s: Floats
    registers: Integers
    accumulators: Integers
    loads: Integers
    tasks: Integers
    block_bytes: Floats
    task_bytes: Floats

    @property
    def ranking(self) -> Integers:
        """Places, best predicted first; of equal ones those that load their caches less."""
        return np.lexsort((self.layer_s.sum(axis=1), self.time_s))


class ColumnModel(PerfModel):
    """`PerfModel` asked for arrays of sizes in all layers but the registers, whose answers are not remembered."""

    def footprint_bytes(self, level: int, shape: Shape, padding: object = ()) -> float:
        """MemFootprint of each, inputs by the room that they take in their sets."""
        assert level > 0
        line = self.device.layers[level].transaction_bytes
        crowded = (
            table.loaded_bytes(shape, line) * (1 / set_share(table, shape, self.device) - 1) for table in self.inputs
        )
        held: float = self._footprint_bytes(level, shape, ()) + sum(crowded)
        return held

    def resident_tile(self, level: int, shapes: Sequence[Shape], order: Sequence[int] = ()) -> Shape:
        """What each cache holds; a block that its sets do not hold is loaded for every register tile."""
        if level == 0:
            return shapes[0]
        holds = np.asarray(self.footprint_bytes(level, shapes[level]) <= self.capacity_bytes(level))
        single = [whole if axis in self.reduction else shapes[0][axis] for axis, whole in enumerate(self.extents)]
        tile: Any = tuple(np.where(holds, block, size) for block, size in zip(shapes[level], single, strict=True))
        return super().resident_tile(level, (*shapes[:level], tile, *shapes[level + 1 :]), order)

    def traffic_bytes(self, level: int, shape: Shape, *, waited: bool = False) -> float:
        """MemTraffic of each."""
        return self._traffic_bytes(level, shape, waited=waited)


def predict_cpu_tiles(expr: TensorExpr, device: DeviceSpec, tiles: CpuTileColumns) -> CpuPredictions:
    """What the model says of each of ``tiles``."""
    found: dict[str, np.ndarray] = {}
    for vector, order, members in _groups(tiles):
        name = expr.spatial[vector].name
        model = ColumnModel(expr, device, name)
        axes = [model.spatial[place] for place in order]
        shapes = _shapes(model, tiles, members)
        for key, values in _predicted(model, PerfModel(expr, device, name), shapes, axes).items():
            if key not in found:
                found[key] = np.zeros((len(tiles), *values.shape[1:]), dtype=values.dtype)
            found[key][members] = values
    return CpuPredictions(**found)


def _groups(tiles: CpuTileColumns) -> Iterator[tuple[int, tuple[int, ...], Integers]]:
    """(vector axis, order of loops, members) of the candidates that share both."""
    keys = np.concatenate([tiles.vector[:, None], tiles.order], axis=1)
    distinct, which = np.unique(keys, axis=0, return_inverse=True)
    for number, (vector, *order) in enumerate(distinct.tolist()):
        yield vector, tuple(order), np.flatnonzero(which.ravel() == number)


def _shapes(model: PerfModel, tiles: CpuTileColumns, members: Integers) -> tuple[Shape, ...]:
    """`cpu_tiles.shapes_of` in columns."""
    register, inner, outer = (item[members] for item in (tiles.register, tiles.inner, tiles.outer))
    caches = [register * inner, *(register * outer for _ in model.device.layers[2:-1])]

    def shape(sizes: Integers, whole: bool) -> tuple[Integers, ...]:
        columns = [np.full(len(members), extent if whole else 1, dtype=np.int64) for extent in model.extents]
        for position, axis in enumerate(model.spatial):
            columns[axis] = sizes[:, position]
        return tuple(columns)

    columns = [shape(register, False), *(shape(sizes, True) for sizes in caches)]
    return tuple(columns)  # type: ignore[arg-type] # a `Shape` of arrays


def _predicted(
    model: ColumnModel, scalar: PerfModel, shapes: tuple[Shape, ...], order: list[int]
) -> dict[str, np.ndarray]:
    """The fields of `CpuPredictions`; the equations of `PerfModel.predict`."""
    columns = np.stack([np.asarray(size) for size in shapes[0]], axis=1)
    tiles, which = np.unique(columns, axis=0, return_inverse=True)
    which = which.ravel()
    core = scalar.core
    alone = [tuple(row) for row in tiles.tolist()]
    tasks = np.asarray(model.partition_count(shapes))
    balance = np.asarray(model.task_balance(shapes, order))
    compute = np.array([scalar.compute_s(tile) for tile in alone])[which] / balance
    ports = PortTimes(scalar)
    arithmetic = np.array([ports.arithmetic_s(tile) for tile in alone])[which] / balance
    held_up = np.array([ports.issue_s(tile) + scalar.layer_s(1, ports.evicted_bytes(tile)) for tile in alone])
    layers = [model.moved(level, shapes, order)[1] for level in range(1, len(shapes))]
    loads = [np.asarray(layer) / balance for layer in layers]
    first = held_up[which] / balance + loads[0]
    peak = model.expr.flops / (model.max_compute_gflops() * REPORTED_UNITS_PER_G)
    issued = np.array([scalar.layer_s(0, scalar.traffic_bytes(0, tile)) for tile in alone])[which]
    return {
        "time_s": np.asarray(overlapped([arithmetic, first, *loads[1:]], PORTS_OVERLAP)) + model.machine.launch_s,
        "compute_s": compute,
        "layer_s": np.stack(loads, axis=1),
        "bottleneck_s": np.maximum(np.max([np.full(len(which), peak), issued, *loads], axis=0), 0.0),
        "registers": np.array([core.registers(tile) for tile in alone])[which],
        "accumulators": np.array([core.accumulators(tile) for tile in alone])[which],
        "loads": np.array([sum(core.operand_loads(tile)) for tile in alone])[which],
        "tasks": tasks,
        "block_bytes": np.asarray(model.footprint_bytes(1, shapes[1])),
        "task_bytes": np.asarray(model.footprint_bytes(min(2, len(shapes) - 1), shapes[min(2, len(shapes) - 1)])),
    }
