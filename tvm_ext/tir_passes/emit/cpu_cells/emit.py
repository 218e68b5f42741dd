"""Emits one step of a recurrent cell: tiles of units with all their sums, finished in registers. ::

    parallel for task in units / tile:                  # neighbouring tasks are neighbouring units
      for rows in batch:
        acc[gate][row, vector] = init                   # registers, all indices constant
        for k in depth:
          acc[gate][row, vector] += x[row, k] * W'[task, k, gate, vector, lane]
        for row in rows:
          the element-wise part, from acc to the new states

The weights are packed at compile time in panels of one task each, in the order in which it reads them: one stream.
(Measured on Zen 5 with two streams of 45 KB, one register of units each: 130 GB/s from L2, where one stream has 250.)
Sums of several rows are copied to the stack before the loop over rows, whose number in that loop is no constant. No
tile reads or writes past a tensor: weights are padded to whole tasks, and the last registers of the element-wise part
are powers of two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tvm_ext._tvm import Buffer, Expr, ForKind, Stmt, TensorLoad
from tvm_ext.analysis.computation_exprs import axis_names
from tvm_ext.analysis.computations import dtype_of, replace_equal_loads, substitute
from tvm_ext.analysis.predicates import has_call
from tvm_ext.ir.build_ir import (
    SERIAL,
    VECTORIZED,
    accumulate,
    accumulator_dtype,
    allocate,
    bind,
    cast_to,
    if_all,
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
    vector_kind,
    vectors,
)
from tvm_ext.ir.llvm_functions import keep_rolled
from tvm_ext.records.cell import CellTiles
from tvm_ext.records.choice import ConstantPack
from tvm_ext.support.arithmetic import ceil_div

from ...plan.cell import Cell, CellProduct, CellStep, CellValue, shift_of


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Weights:
    """A product's weights with dims (task, reduction axes..., gate, vector, lane)."""

    product: CellProduct
    buffer: Buffer
    pack: ConstantPack


def emit_cell_step(
    cell: Cell, step: CellStep, tiles: CellTiles, kind: ForKind, params: Sequence[Buffer]
) -> tuple[Stmt, tuple[tuple[Buffer, ConstantPack], ...]]:
    """The loops of ``step`` in ``tiles``, the outer one of ``kind``, and which of ``params`` are to be packed how."""
    weights = tuple(_pack(product, cell.units, tiles, params) for product in step.products)
    full, rest = divmod(cell.units, tiles.units)

    def all_rows(number: Expr, widths: tuple[int, ...]) -> Stmt:
        """One task: the batch in tiles of rows, the last one smaller."""

        def tile(first: Expr, rows: int) -> Stmt:
            return _UnitTile(
                cell=cell,
                step=step,
                tiles=tiles,
                weights=weights,
                first_row=first,
                rows=rows,
                task=number,
                widths=widths,
            ).statement()

        return in_tiles(cell.rows, tiles.rows, "rows", tile)

    def task(number: Expr) -> Stmt:
        whole = all_rows(number, (tiles.lanes,) * tiles.vectors)
        if not rest:
            return whole
        cut = all_rows(number, tuple(min(tiles.lanes, rest - first) for first in range(0, rest, tiles.lanes)))
        return if_all([number < index(full)], whole, cut) if full else cut

    statement = loop(full + bool(rest), kind, "task", task)
    return statement, tuple((weight.buffer, weight.pack) for weight in weights)


def _pack(product: CellProduct, units: int, tiles: CellTiles, params: Sequence[Buffer]) -> _Weights:
    """The weights of each task; places beyond the last unit hold other weights or zeros, whose sums nobody reads."""
    computation, access = product.computation, product.access
    names = dict(zip([v.name for v in computation.variables], axis_names(computation), strict=True))
    column = access.stride(names[computation.spatial[-1].name]) or 0
    reduction = [(computation.extent(v), access.stride(names[v.name]) or 0) for v in computation.reduction]
    dims = [
        (ceil_div(units, tiles.units), column * tiles.units),
        *reduction,
        (product.gates[-1] + 1, column * product.spacing),
        (tiles.vectors, column * tiles.lanes),
        (tiles.lanes, column),
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


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Sums:
    """A product's sums in a tile: for each place a buffer of dims (row and register of units, lane)."""

    product: CellProduct
    buffers: tuple[Buffer, ...]

    @classmethod
    def of(cls, product: CellProduct, registers: int, lanes: int, name: str) -> _Sums:
        """Sums of ``registers`` registers; ``name`` has the number of the gate in it."""
        target = product.computation.target
        dtype = accumulator_dtype(dtype_of(target))
        names = [f"{target.name}_{name.format(gate)}" for gate in range(len(product.places))]
        buffers = tuple(new_buffer((registers, lanes), dtype, own, "local") for own in names)
        return cls(product=product, buffers=buffers)

    def element(self, place: int, position: Expr, lane: Expr) -> Expr:
        value = load(self.buffers[self.product.places.index(place)], [position, lane])
        return cast_to(value, dtype_of(self.product.computation.target))

    def copy_from(self, other: _Sums, position: Expr, to: Expr, lanes: int) -> list[Stmt]:
        """One register of every gate's sums as it is."""

        def copy(source: Buffer, target: Buffer) -> Stmt:
            return loop(lanes, VECTORIZED, "v", lambda v: store(target, load(source, [position, v]), [to, v]))

        return [copy(a, b) for a, b in zip(other.buffers, self.buffers, strict=True)]


def _allocate(sums: Sequence[_Sums]) -> list[Stmt]:
    return [allocate(buffer) for own in sums for buffer in own.buffers]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _UnitTile:
    """``rows`` rows from ``first_row`` on by the registers of ``task``, with ``widths`` units each."""

    cell: Cell
    step: CellStep
    tiles: CellTiles
    weights: tuple[_Weights, ...]
    first_row: Expr
    rows: int
    task: Expr
    widths: tuple[int, ...]

    def statement(self) -> Stmt:
        """All sums of the tile, then what is made of them."""
        count = self.rows * len(self.widths)
        sums, kept = (
            [_Sums.of(weight.product, count, self.tiles.lanes, name) for weight in self.weights]
            for name in ("sum{}", "kept{}")
        )
        reductions = [self._reduction(*pair) for pair in zip(self.weights, sums, strict=True)]
        if self.rows == 1:
            return sequence(*_allocate(sums), *reductions, self._finish(sums, index(0)))
        copies = [
            copied
            for own, copy in zip(sums, kept, strict=True)
            for number in range(count)
            for copied in copy.copy_from(own, index(number), index(number), self.tiles.lanes)
        ]
        rows = loop(self.rows, SERIAL, "row", lambda row: self._finish(kept, row))
        return sequence(*_allocate(sums), *_allocate(kept), *reductions, *copies, rows)

    def _reduction(self, weights: _Weights, sums: _Sums) -> Stmt:
        """The sums of one product, every register of them by itself so that all indices are constant."""
        product, computation = weights.product, weights.product.computation
        dtype = dtype_of(sums.buffers[0])
        registers = [(gate, vector) for gate in range(len(sums.buffers)) for vector in range(len(self.widths))]
        # What the innermost loop runs over stays in registers, as in `cpu_tiles`: the smaller operand.
        if len(registers) <= self.rows:
            order = [(row, *register) for row in range(self.rows) for register in registers]
        else:
            order = [(row, *register) for register in registers for row in range(self.rows)]

        def each(body: Callable[[int, int, int, Expr, list[Expr]], Stmt]) -> Stmt:
            def register(row: int, gate: int, vector: int) -> Stmt:
                position = index(row * len(self.widths) + vector)
                return loop(self.tiles.lanes, VECTORIZED, "v", lambda v: body(row, gate, vector, v, [position, v]))

            return sequence(*(register(*number) for number in order))

        def begin(_row: int, gate: int, _vector: int, _lane: Expr, at: list[Expr]) -> Stmt:
            return store(sums.buffers[gate], in_dtype(computation.init, dtype), at)

        def step(ks: tuple[Expr, ...]) -> Stmt:
            def add(row: int, gate: int, vector: int, v: Expr, at: list[Expr]) -> Stmt:
                place = [self.task, *ks, index(product.gates[gate]), index(vector), v]
                value = self._term(product, self.first_row + index(row), ks, load(weights.buffer, place))
                return accumulate(sums.buffers[gate], at, in_dtype(value, dtype), computation.combiner)

            return sequence(keep_rolled(), each(add))

        return sequence(each(begin), over(computation, computation.reduction, step))

    def _term(self, product: CellProduct, row: Expr, ks: Sequence[Expr], weight: Expr) -> Expr:
        """One term of a sum, its weight given."""
        computation = product.computation
        lead = split_index(row, self.cell.lead)
        table = bind(computation.spatial[: len(lead)], lead) + bind(computation.reduction, ks)
        moved = substitute(product.weights, table)
        return replace_equal_loads(substitute(computation.value, table), [(moved, weight)])

    def _finish(self, sums: Sequence[_Sums], row: Expr) -> Stmt:
        """The element-wise part of one row, register by register.

        Parts of a register are read from a copy of it: stock TVM aligns what is on the stack to whole registers only
        where every access is one, and a store across two cache lines costs more than all else here.
        """
        lead = split_index(self.first_row + row, self.cell.lead)
        statements: list[Stmt] = []
        for vector, width in enumerate(self.widths):
            own, at = sums, row * index(len(self.widths)) + index(vector)
            if width < self.tiles.lanes and self.rows > 1:
                own = [_Sums.of(item.product, 1, self.tiles.lanes, "kept{}_last") for item in sums]
                statements += _allocate(own)
                for whole, last in zip(sums, own, strict=True):
                    statements += last.copy_from(whole, at, index(0), self.tiles.lanes)
                at = index(0)
            unit = self.task * index(self.tiles.units) + index(vector * self.tiles.lanes)
            statements += [
                _Piece(self.step, own, lead, at, unit, *piece).statement() for piece in vectors(width, self.tiles.lanes)
            ]
        return sequence(*statements)


@dataclass(frozen=True, slots=True, eq=False)
class _Piece:
    """The element-wise part for ``length`` lanes from ``first`` on of the register whose units begin at ``unit``, in
    the row ``lead``; its sums lie at ``position``.
    """

    step: CellStep
    sums: Sequence[_Sums]
    lead: Sequence[Expr]
    position: Expr
    unit: Expr
    first: int
    length: int
    held: list[tuple[CellValue, Buffer]] = field(default_factory=list)

    def statement(self) -> Stmt:
        """The values in order: those that are used again in a buffer of one register, which LLVM keeps there."""
        for value in self.step.values:
            if not self._is_part_of_another(value):
                target = value.computation.target
                self.held.append((value, new_buffer((self.length,), dtype_of(target), target.name, "local")))
        kind = vector_kind(*(value.computation.value for value in self.step.values))
        return sequence(*(allocate(buffer) for _, buffer in self.held), loop(self.length, kind, "v", self._stores))

    def _stores(self, lane: Expr) -> Stmt:
        statements = [
            store(own.product.computation.target, self._sum(own, place, lane), self._at(place, lane))
            for own in self.sums
            for place in own.product.stored
        ]
        for value, buffer in self.held:
            statements.append(store(buffer, self._value(value, lane), [lane]))
            if value.stored:
                statements.append(store(value.computation.target, load(buffer, [lane]), self._at(value.place, lane)))
        return sequence(*statements)

    def _sum(self, sums: _Sums, place: int, lane: Expr) -> Expr:
        return sums.element(place, self.position, index(self.first) + lane)

    def _at(self, place: int, lane: Expr) -> list[Expr]:
        return [*self.lead, self.unit + index(place + self.first) + lane]

    def _value(self, value: CellValue, lane: Expr) -> Expr:
        """``value`` of the lane's unit, with what the tile holds in place of its loads."""
        computation = value.computation
        table = bind(computation.spatial, self._at(value.place, lane))
        own = [(item, self._in_tile(item, value, lane)) for item in computation.loads()]
        inside = [(substitute(item, table), held) for item, held in own if held is not None]
        return replace_equal_loads(substitute(computation.value, table), inside)

    def _in_tile(self, item: TensorLoad, reader: CellValue, lane: Expr) -> Expr | None:
        """What ``item`` loads, where the tile has it."""
        shift = shift_of(item, reader.computation)
        place = None if shift is None else reader.place + shift
        for own in self.sums:
            if item.source.same_as(own.product.computation.target) and place is not None:
                return self._sum(own, place, lane)
        for value in self.step.values:
            if item.source.same_as(value.computation.target) and value.place == place:
                buffer = next((buffer for other, buffer in self.held if other is value), None)
                return self._value(value, lane) if buffer is None else load(buffer, [lane])
        return None

    def _is_part_of_another(self, value: CellValue) -> bool:
        """Whether it is better computed where it is read: once, without calls; or a truth value, of which there are no
        registers.
        """
        if value.stored:
            return False
        readers = [
            reader
            for reader in self.step.values
            for item in reader.computation.loads()
            if item.source.same_as(value.computation.target)
            and (shift := shift_of(item, reader.computation)) is not None
            and reader.place + shift == value.place
        ]
        is_truth = dtype_of(value.computation.target) == "bool"
        return is_truth or (len(readers) == 1 and not has_call(value.computation))
