"""What one CPU core does with the tiles of a matrix unit (Intel AMX): `RegisterTiles` whose registers are tiles.

A register tile is a grid of tiles of sums: 2 x 2 of 16 rows by 16 lanes, or 1 x 4 and 4 x 1 where the operator has no
more rows or lanes. A step of the reduction loads each tile of the smaller operand once and keeps it, and streams the
other's. The rates are those of Intel's manual (`devices/dot_instructions.py: AMX_UNIT`); none was measured here.
"""

from __future__ import annotations

from math import prod
from typing import Any

from tvm_ext.analysis.tensor_expr import TensorExpr
from tvm_ext.devices.dot_instructions import TileUnit
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.support.arithmetic import ceil_div

from .access_table import Shape
from .dot_products import SHUFFLES, TILE_END_CYCLES
from .register_tiles import RegisterTiles, Step


def keeps_data(data: int, weights: int) -> bool:
    """Whether a step of so many tiles of each keeps those of data in registers, and streams those of weights."""
    return data <= weights


def streaming_registers(data: int, weights: int, *, several: bool) -> int:
    """Tile registers through which the other operand streams: two where it is data of more rows than one tile has.

    Each register has one size, and the last tile of an axis may end with a tile of fewer rows.
    """
    return 1 if keeps_data(data, weights) or not several else 2


class MatrixTiles(RegisterTiles):
    """The tiles of one expression that a matrix unit serves; ``unit`` is that, ``rows`` the axis of its tiles' rows."""

    unit: TileUnit
    rows: int

    def __init__(self, unit: TileUnit, rows: int, *operator: Any) -> None:
        super().__init__(*operator)
        self.unit, self.rows = unit, rows
        self.limit, self.latency = unit.registers, unit.latency_cycles

    def rows_at_once(self, axis: int) -> int:
        return self.unit.rows if axis == self.rows else 1

    def row_sizes(self, axis: int) -> list[int]:
        """Whole tiles, and sizes that divide an axis evenly: 100 rows by 32 are three tiles of 32 and one of 4, by 25
        four alike.
        """
        if axis != self.rows:
            return super().row_sizes(axis)
        extent, sizes = self.extents[axis], set()
        for count in range(1, self.limit + 1):
            most = min(count * self.unit.rows, extent)
            sizes |= {most, ceil_div(extent, ceil_div(extent, most))}
        return sorted(sizes)

    def _one_step(self, shape: Shape) -> Step:
        units = tuple(
            self.pieces(size)
            if i == self.vector
            else 1
            if i in self.reduction
            else ceil_div(size, self.rows_at_once(i))
            for i, size in enumerate(shape)
        )
        sums = prod(units[i] for i in self.spatial)
        counts = [prod(units[i] for i in self.spatial if table.uses(i)) for table in self.inputs]
        assert self.dot is not None
        data, weights = counts[self.dot.data], counts[self.dot.weights]
        several = units[self.rows] > 1
        return Step(
            units=units,
            loads=tuple(count * self.unit.rows for count in counts),  # row by row
            accumulators=sums,
            registers=sums + min(counts) + streaming_registers(data, weights, several=several),
        )

    def arithmetic_cycles(self, shape: Shape) -> float:
        return self.accumulators(shape) * self.unit.cycles

    def spill_cycles(self, shape: Shape) -> float:
        """Tiles are numbered by hand: none is ever spilled."""
        return 0.0

    def stored(self, shape: Shape) -> int:
        lanes = 1 if self.vector is None else self.pieces(shape[self.vector])
        return lanes * prod(size for i, size in enumerate(shape) if i in self.spatial and i != self.vector)

    def store_cycles(self, shape: Shape) -> float:
        return super().store_cycles(shape) + self.accumulators(shape) * TILE_END_CYCLES


class PairedTiles(RegisterTiles):
    """The tiles of one expression whose vector registers hold sums of two rows each (Arm's usmmla and bfmmla).

    Two registers are two rows of as many lanes. An odd last row takes what a pair takes.
    """

    def row_sizes(self, axis: int) -> list[int]:
        sizes = super().row_sizes(axis)
        pairs = self.dot is not None and axis == self.dot.rows
        return [size for size in sizes if size % 2 == 0 or size == self.extents[axis]] if pairs else sizes

    def _one_step(self, shape: Shape) -> Step:
        assert self.dot is not None and self.dot.rows is not None and self.dot.instruction.tile is not None
        at_once, place = self.dot.instruction.tile.rows, self.dot.rows
        step = super()._one_step((*shape[:place], ceil_div(shape[place], at_once) * at_once, *shape[place + 1 :]))
        loads = list(step.loads)
        loads[self.dot.weights] *= at_once
        return step._replace(loads=tuple(loads))

    def store_cycles(self, shape: Shape) -> float:
        return super().store_cycles(shape) + self.accumulators(shape) * SHUFFLES / self.device.fma_rate


def core_of(expr: TensorExpr, device: DeviceSpec, *about: Any) -> RegisterTiles:
    """The model of a core for ``expr``: of its vector registers, or of a matrix unit that serves it."""
    core = RegisterTiles(expr, device, *about)
    unit = None if core.dot is None else core.dot.instruction.tile
    if core.dot is None or core.dot.rows is None or unit is None or core.vector is None:
        return core
    if not unit.registers:
        return PairedTiles(expr, device, *about)
    return MatrixTiles(unit, core.dot.rows, expr, device, *about)
