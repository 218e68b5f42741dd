"""Emits one step of a recurrent cell: tiles of units with all their sums, finished in registers. ::

    parallel for task in units / tile:                  # neighbouring tasks are neighbouring units
      for rows in batch:
        acc[gate][row, vector] = init                   # registers, all indices constant
        for k in depth:
          acc[gate][row, vector] += x[row, k] * W'[panel, k, gate, lane]
        for row in rows:
          the element-wise part, from acc to the new states

The weights are packed at compile time in panels of one register of units, each in the order in which it is read, so
that a task of several panels follows that many streams, and tasks of any size read the same copy. Sums of several rows
are copied to the stack before the loop over rows, whose number in that loop is no constant. No tile reads or writes
past a tensor: weights are padded to whole registers, and the last registers of the element-wise part are powers of two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tvm_ext._tvm import Buffer, Expr, ForKind, Stmt, structural_equal, tirx
from tvm_ext.analysis.computation_exprs import axis_names
from tvm_ext.analysis.computations import dtype_of, replace_loads, substitute
from tvm_ext.ir.build_ir import (
    SERIAL,
    VECTORIZED,
    accumulator_dtype,
    allocate,
    bind,
    combine,
    in_dtype,
    in_tiles,
    index,
    load,
    loop,
    new_buffer,
    over,
    sequence,
    split_index,
    store,
)
from tvm_ext.records.cell import CellTiles
from tvm_ext.records.choice import ConstantPack
from tvm_ext.support.arithmetic import ceil_div

from ...plan.cell import Cell, CellProduct, CellStep
from .values import Sums, write_values


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Weights:
    """A product's weights with dims (panel, reduction axes..., gate, lane)."""

    product: CellProduct
    buffer: Buffer
    pack: ConstantPack


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _UnitTile:
    """``rows`` rows from ``first_row`` on by the panels from ``panel`` on, with ``widths`` units each."""

    first_row: Expr
    rows: int
    panel: Expr
    widths: tuple[int, ...]

    def position(self, row: int, vector: int) -> int:
        """Of an accumulator among those of its gate."""
        return row * len(self.widths) + vector


def emit_cell_step(
    cell: Cell, step: CellStep, tiles: CellTiles, kind: ForKind, params: Sequence[Buffer]
) -> tuple[Stmt, tuple[tuple[Buffer, ConstantPack], ...]]:
    """The loops of ``step`` in ``tiles``, the outer one of ``kind``, and which of ``params`` are to be packed how."""
    weights = [_pack(product, cell.units, tiles.lanes, params) for product in step.products]
    full, rest = divmod(cell.units, tiles.units)
    last = tuple(min(tiles.lanes, rest - first) for first in range(0, rest, tiles.lanes))

    def task(number: Expr) -> Stmt:
        panel = number * index(tiles.vectors)
        whole = _all_rows(cell, step, tiles, weights, panel, (tiles.lanes,) * tiles.vectors)
        if not rest:
            return whole
        cut = _all_rows(cell, step, tiles, weights, panel, last)
        return tirx.IfThenElse(number < index(full), whole, cut) if full else cut

    statement = loop(full + bool(rest), kind, "task", task)
    return statement, tuple((item.buffer, item.pack) for item in weights)


def _pack(product: CellProduct, units: int, lanes: int, params: Sequence[Buffer]) -> _Weights:
    """The weights' panels; places beyond the last unit hold other weights or zeros, whose sums nobody reads."""
    computation, access = product.computation, product.access
    names = dict(zip([v.name for v in computation.variables], axis_names(computation), strict=True))
    column = access.stride(names[computation.spatial[-1].name]) or 0
    reduction = [(computation.extent(v), access.stride(names[v.name]) or 0) for v in computation.reduction]
    dims = [
        (ceil_div(units, lanes), column * lanes),
        *reduction,
        (product.gates[-1] + 1, column * product.spacing),
        (lanes, column),
    ]
    source = product.weights.source
    pack = ConstantPack(
        param_index=next(i for i, param in enumerate(params) if param.same_as(source)),
        extents=tuple(extent for extent, _ in dims),
        strides=tuple(stride for _, stride in dims),
        offset=access.origin + column * product.places[0],
    )
    return _Weights(
        product=product, buffer=new_buffer(pack.extents, dtype_of(source), f"{source.name}_packed"), pack=pack
    )


def _all_rows(
    cell: Cell,
    step: CellStep,
    tiles: CellTiles,
    weights: Sequence[_Weights],
    panel: Expr,
    widths: tuple[int, ...],
) -> Stmt:
    """One task: the batch in tiles of rows, the last one smaller."""

    def tile(first: Expr, rows: int) -> Stmt:
        return _tile(cell, step, tiles, weights, _UnitTile(first_row=first, rows=rows, panel=panel, widths=widths))

    return in_tiles(cell.rows, tiles.rows, "rows", tile)


def _tile(cell: Cell, step: CellStep, tiles: CellTiles, weights: Sequence[_Weights], tile: _UnitTile) -> Stmt:
    """All sums of one tile, then what is made of them."""
    sums = [_new_sums(item, tiles.lanes, tile, "sum") for item in weights]
    reductions = [_reduction(cell, item, own, tiles.lanes, tile) for item, own in zip(weights, sums, strict=True)]
    allocations = [allocate(buffer) for own in sums for buffer in own.buffers]
    if tile.rows == 1:
        return sequence(*allocations, *reductions, _finish(cell, step, tiles, sums, tile, index(0)))
    kept = [_new_sums(item, tiles.lanes, tile, "kept") for item in weights]
    return sequence(
        *allocations,
        *(allocate(buffer) for own in kept for buffer in own.buffers),
        *reductions,
        *(
            statement
            for a, b in zip(sums, kept, strict=True)
            for number in range(tile.rows * len(tile.widths))
            for statement in _copies(a, index(number), b, index(number), tiles.lanes)
        ),
        loop(tile.rows, SERIAL, "row", lambda row: _finish(cell, step, tiles, kept, tile, row)),
    )


def _new_sums(weights: _Weights, lanes: int, tile: _UnitTile, name: str) -> Sums:
    computation = weights.product.computation
    dtype = accumulator_dtype(dtype_of(computation.target))
    shape = (tile.rows * len(tile.widths), lanes)
    return Sums(
        product=weights.product,
        buffers=tuple(
            new_buffer(shape, dtype, f"{computation.target.name}_{name}{gate}", "local")
            for gate in range(len(weights.product.places))
        ),
    )


def _reduction(cell: Cell, weights: _Weights, sums: Sums, lanes: int, tile: _UnitTile) -> Stmt:
    """The sums of one product, every register of them by itself so that all indices are constant."""
    computation = weights.product.computation
    dtype = dtype_of(sums.buffers[0])
    initial = in_dtype(computation.init, dtype)
    registers = [(gate, vector) for gate in range(len(sums.buffers)) for vector in range(len(tile.widths))]
    # What the innermost loop runs over stays in registers, as in `cpu_tiles`: the smaller operand.
    if len(registers) <= tile.rows:
        order = [(row, *register) for row in range(tile.rows) for register in registers]
    else:
        order = [(row, *register) for register in registers for row in range(tile.rows)]

    def each(body: Callable[[int, int, int, Expr, Sequence[Expr]], Expr]) -> Stmt:
        def one(row: int, gate: int, vector: int) -> Stmt:
            def lane(v: Expr) -> Stmt:
                at = [index(tile.position(row, vector)), v]
                return store(sums.buffers[gate], body(row, gate, vector, v, at), at)

            return loop(lanes, VECTORIZED, "v", lane)

        return sequence(*(one(*item) for item in order))

    def step(ks: tuple[Expr, ...]) -> Stmt:
        def term(row: int, gate: int, vector: int, v: Expr, at: Sequence[Expr]) -> Expr:
            number = weights.product.gates[gate]
            weight = load(weights.buffer, [tile.panel + index(vector), *ks, index(number), v])
            value = _term(cell, weights.product, tile.first_row + index(row), ks, weight)
            return combine(computation.combiner, load(sums.buffers[gate], at), in_dtype(value, dtype))

        return each(term)

    return sequence(each(lambda *_: initial), over(computation, computation.reduction, step))


def _term(cell: Cell, product: CellProduct, row: Expr, ks: Sequence[Expr], weight: Expr) -> Expr:
    """One term of a sum, its weight given."""
    computation = product.computation
    lead = split_index(row, cell.lead)
    table = bind(computation.spatial[: len(lead)], lead) + bind(computation.reduction, ks)
    moved = substitute(product.weights, table)
    return replace_loads(
        substitute(computation.value, table), lambda item: weight if structural_equal(item, moved) else item
    )


def _copies(source: Sums, position: Expr, target: Sums, to: Expr, lanes: int) -> list[Stmt]:
    """One register of every gate's sums as it is."""

    def copy(a: Buffer, b: Buffer) -> Stmt:
        return loop(lanes, VECTORIZED, "v", lambda v: store(b, load(a, [position, v]), [to, v]))

    return [copy(a, b) for a, b in zip(source.buffers, target.buffers, strict=True)]


def _finish(cell: Cell, step: CellStep, tiles: CellTiles, sums: Sequence[Sums], tile: _UnitTile, row: Expr) -> Stmt:
    """The element-wise part of one row, register by register.

    Parts of a register are read from a copy of it: stock TVM aligns what is on the stack to whole registers only where
    every access is one, and a store across two cache lines costs more than all else here.
    """
    lead = split_index(tile.first_row + row, cell.lead)
    statements = []
    for vector, width in enumerate(tile.widths):
        position = row * index(len(tile.widths)) + index(vector)
        unit = (tile.panel + index(vector)) * index(tiles.lanes)
        own, at = sums, position
        if width < tiles.lanes and tile.rows > 1:
            own, at = [replace(item, buffers=_registers(item, tiles.lanes)) for item in sums], index(0)
            statements += [allocate(buffer) for item in own for buffer in item.buffers]
            for a, b in zip(sums, own, strict=True):
                statements += _copies(a, position, b, at, tiles.lanes)
        statements += write_values(step, own, lead, at, unit, width, tiles.lanes)
    return sequence(*statements)


def _registers(sums: Sums, lanes: int) -> tuple[Buffer, ...]:
    return tuple(new_buffer((1, lanes), dtype_of(buffer), f"{buffer.name}_last", "local") for buffer in sums.buffers)
