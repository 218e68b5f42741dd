"""A register tile in the tiles of a matrix unit (Intel AMX): 16 rows of data by 16 lanes of sums each.

    ldtilecfg whole                                   # at the head of a task
    for tile in task:
      tilezero sums                                   # 2 x 2 of them, say
      for k in reduction / 64 bytes:
        tileloadd data, weights                       # rows of the tensor as it lies; weights packed in groups of 4
        tdpbusd sums, data, weights
      tilestored sums -> memory                       # which the fused epilogue reads, as it reads vectors of sums
      out[...] = epilogue(memory)
    tilerelease

Tiles are numbered by hand, so that nothing is spilled. A last tile of fewer rows has a configuration of its own, where
its tiles differ from those of whole ones; that is set before it and undone behind it. Sums are complete then, for
setting it clears all tiles.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar

from tvm_ext._tvm import Buffer, Expr, ForKind, Stmt, TensorLoad
from tvm_ext.analysis.computation_exprs import itemsize_bytes
from tvm_ext.analysis.computations import dtype_of, static_shape, substitute
from tvm_ext.cost.matrix_tiles import keeps_data
from tvm_ext.devices.dot_instructions import AMX_UNIT
from tvm_ext.ir.build_ir import SERIAL, allocate, flat, if_all, index, sequence
from tvm_ext.ir.tile_ir import (
    TileShapes,
    clear_tile,
    configure,
    load_sums,
    load_tile,
    multiply_tiles,
    release,
    store_sums,
    tiles_of,
)
from tvm_ext.support.arithmetic import ceil_div

from .layout import DotStep, TileLayout
from .packing import RowPack
from .register_tile import RegisterTile

TilePlace = tuple[int, ...]
"""Of a tile: its number along each of the layout's rows, and along the vector axis."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TileGrid:
    """The tiles of a register tile of ``sizes``, numbered as those of a whole one, of which there are ``counts``.

    ``data_axes`` and ``weight_axes`` are the positions in a `TilePlace` along which each operand has other tiles.
    """

    layout: TileLayout
    step: DotStep
    sizes: dict[int, int]
    counts: TilePlace
    data_axes: TilePlace
    weight_axes: TilePlace

    @classmethod
    def of(cls, layout: TileLayout, step: DotStep, sizes: dict[int, int]) -> TileGrid:
        axes = [*layout.rows, layout.vector]
        inputs, product = layout.expr.inputs, step.product
        used = [
            tuple(place for place, axis in enumerate(axes) if inputs[operand].uses(layout.names[axis]))
            for operand in (product.data, product.weights)
        ]
        counts = _counts(layout, step, layout.tile)
        return cls(layout=layout, step=step, sizes=sizes, counts=counts, data_axes=used[0], weight_axes=used[1])

    @property
    def places(self) -> list[TilePlace]:
        return list(itertools.product(*map(range, _counts(self.layout, self.step, self.sizes))))

    @property
    def keeps_data(self) -> bool:
        return keeps_data(*(prod(self.counts[i] for i in axes) for axes in (self.data_axes, self.weight_axes)))

    # --- where a tile lies ------------------------------------------------------------------------------------------
    def offsets(self, place: TilePlace) -> tuple[Expr, ...]:
        """Of a tile's first point along the rows."""
        return tuple(index(first) for first in self._first(place))

    def _first(self, place: TilePlace) -> list[int]:
        rows = self.step.product.rows
        return [
            number * (AMX_UNIT.rows if axis == rows else 1)
            for axis, number in zip(self.layout.rows, place, strict=False)
        ]

    def lane(self, place: TilePlace) -> Expr:
        return index(place[-1] * self.layout.lanes)

    def rows_of(self, place: TilePlace) -> int:
        """Points of a tile along its rows' axis."""
        rows = self.layout.rows.index(self._rows_axis)
        return min(AMX_UNIT.rows, self.sizes[self._rows_axis] - self._first(place)[rows])

    @property
    def _rows_axis(self) -> int:
        assert self.step.product.rows is not None
        return self.step.product.rows

    def row_step(self) -> int:
        """Rows of the sums' buffer from one row of a tile to the next."""
        rows = self.layout.rows.index(self._rows_axis)
        return prod(self.sizes[axis] for axis in self.layout.rows[rows + 1 :])

    # --- which register it has --------------------------------------------------------------------------------------
    def sums_register(self, place: TilePlace) -> int:
        return _number(place, self.counts)

    def data_register(self, place: TilePlace) -> int:
        number = self._among(place, self.data_axes)
        if not self.keeps_data:
            number = self._streaming(number, int(self.rows_of(place) < self.rows_of((0,) * len(place))))
        return prod(self.counts) + number

    def weights_register(self, place: TilePlace) -> int:
        number = self._among(place, self.weight_axes)
        return prod(self.counts) + (self._streaming(number, 0) if self.keeps_data else number)

    def _streaming(self, number: int, size: int) -> int:
        """Behind the kept operand: a register for each tile, where there are enough, else one for each size."""
        data, weights = (prod(self.counts[i] for i in axes) for axes in (self.data_axes, self.weight_axes))
        has_room = prod(self.counts) + data + weights <= AMX_UNIT.registers
        return min(data, weights) + (number if has_room else size)

    def _among(self, place: TilePlace, axes: TilePlace) -> int:
        return _number([place[i] for i in axes], [self.counts[i] for i in axes])

    @property
    def row_bytes(self) -> int:
        """Of a tile of data: what one step of the reduction takes."""
        product, computation = self.step.product, self.layout.computation
        return prod(computation.extents[axis] for axis in product.axes) * _item_bytes(self.step.data)

    @property
    def shapes(self) -> TileShapes:
        instruction = self.step.product.instruction
        word_bytes = instruction.group * _item_bytes(self.step.data)
        shapes: dict[int, tuple[int, int]] = {}
        for place in self.places:
            shapes[self.sums_register(place)] = self.rows_of(place), instruction.register_bytes
            shapes[self.data_register(place)] = self.rows_of(place), self.row_bytes
            shapes[self.weights_register(place)] = self.row_bytes // word_bytes, instruction.register_bytes
        return tiles_of(shapes, AMX_UNIT.registers)


def _counts(layout: TileLayout, step: DotStep, sizes: dict[int, int]) -> TilePlace:
    tile_rows = step.product.rows
    rows = [ceil_div(sizes[axis], AMX_UNIT.rows) if axis == tile_rows else sizes[axis] for axis in layout.rows]
    return (*rows, ceil_div(sizes[layout.vector], layout.lanes))


def _item_bytes(element: TensorLoad | Buffer) -> int:
    return int(itemsize_bytes(dtype_of(element)))


def _number(place: Sequence[int], counts: Sequence[int]) -> int:
    number = 0
    for own, count in zip(place, counts, strict=True):
        number = number * count + own
    return number


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MatrixTile(RegisterTile):
    """A register tile whose sums are in tiles until they are complete, then in memory, for the epilogue to read."""

    row_kind: ClassVar[ForKind] = SERIAL

    @property
    def grid(self) -> TileGrid:
        assert self.layout.matrix is not None
        return TileGrid.of(self.layout, self.layout.matrix, self.sizes)

    def whole(self) -> Stmt:
        memory = self.sums.buffer
        computed = [*self._begin(), self.reduce(), *self._move_sums(store_sums, memory)]
        return sequence(allocate(memory), *self._ask_for_reads(), *self._in_own_tiles(computed), *self.stores())

    def part(self, kept: Buffer, number: Expr, chunk: Expr, first: Expr, count: int | Expr) -> Stmt:
        loaded, stored = (self._move_sums(move, kept, number) for move in (load_sums, store_sums))
        begin = if_all([chunk > 0], sequence(*loaded), sequence(*self._begin()))
        return sequence(*self._in_own_tiles([begin, self.reduce(first, count), *stored]))

    def _begin(self) -> list[Stmt]:
        """All sums are 0, as those of products are."""
        return [clear_tile(self.grid.sums_register(place)) for place in self.grid.places]

    def _move_sums(
        self, move: Callable[[int, Buffer, Expr, int], Stmt], memory: Buffer, number: Expr | None = None
    ) -> list[Stmt]:
        """``move`` all sums between their tiles and ``memory``, whose first axis is the tile's ``number`` if given."""
        grid, shape = self.grid, static_shape(memory)
        row_bytes = shape[-1] * _item_bytes(memory)
        before = index(0) if number is None else number * index(prod(shape[1:]))
        return [
            move(
                grid.sums_register(place),
                memory,
                before + flat(grid.offsets(place), self.rows) * index(shape[-1]) + grid.lane(place),
                grid.row_step() * row_bytes,
            )
            for place in grid.places
        ]

    def _in_own_tiles(self, statements: Sequence[Stmt]) -> list[Stmt]:
        """``statements`` under this tile's configuration, which is a whole tile's outside."""
        own, whole = self.grid.shapes, _whole(self.layout)
        return list(statements) if whole.serve(own) else [configure(own), *statements, configure(whole)]

    def _step(self, ks: tuple[Expr, ...]) -> Stmt:
        """One step: the kept tiles, then each of the others with all sums that it goes into."""
        grid, instruction = self.grid, self.grid.step.product.instruction
        kept, streamed = (self._data, self._weights) if grid.keeps_data else (self._weights, self._data)
        axes = grid.weight_axes if grid.keeps_data else grid.data_axes
        held: dict[int, Stmt] = {}
        turns: dict[TilePlace, list[TilePlace]] = {}
        for place in grid.places:
            number, statement = kept(place, ks)
            held.setdefault(number, statement)
            turns.setdefault(tuple(place[i] for i in axes), []).append(place)
        statements = list(held.values())
        for places in turns.values():
            statements.append(streamed(places[0], ks)[1])
            statements += [
                multiply_tiles(instruction.name, grid.sums_register(p), grid.data_register(p), grid.weights_register(p))
                for p in places
            ]
        return sequence(*statements)

    def _data(self, place: TilePlace, ks: tuple[Expr, ...]) -> tuple[int, Stmt]:
        """Rows of the data, as they lie or as they were copied: its tile register, and the load."""
        grid = self.grid
        first = substitute(grid.step.data, self.layout.element(self.at, grid.offsets(place), index(0), ks))
        number = grid.data_register(place)
        return number, load_tile(number, first, self._row_stride() * _item_bytes(first))

    def _row_stride(self) -> int:
        """Elements from one row of the data to the next."""
        layout, product = self.layout, self.grid.step.product
        assert product.rows is not None
        for item in layout.packed:
            if isinstance(item, RowPack):
                return prod(static_shape(item.buffer)[item.axes.index(product.rows) + 1 :])
        return layout.expr.inputs[product.data].stride(layout.names[product.rows]) or 0

    def _weights(self, place: TilePlace, ks: tuple[Expr, ...]) -> tuple[int, Stmt]:
        """Groups of the packed weights, each with its lanes."""
        grid = self.grid
        first = substitute(grid.step.weights, self.layout.element(self.at, grid.offsets(place), grid.lane(place), ks))
        lanes, group = static_shape(grid.step.weights.source)[-2:]
        number = grid.weights_register(place)
        return number, load_tile(number, first, lanes * group * _item_bytes(first))


def configured(layout: TileLayout, body: Stmt) -> Stmt:
    """A task's ``body``, whose thread has the tiles of whole register tiles meanwhile."""
    return sequence(configure(_whole(layout)), body, release())


def _whole(layout: TileLayout) -> TileShapes:
    assert layout.matrix is not None
    return TileGrid.of(layout, layout.matrix, layout.tile).shapes
