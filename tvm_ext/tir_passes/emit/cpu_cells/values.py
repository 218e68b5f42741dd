"""The element-wise part of a cell, for one register of units: from the sums to what is stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tvm_ext._tvm import Buffer, Expr, Stmt, TensorLoad, structural_equal
from tvm_ext.analysis.computations import dtype_of, replace_loads, substitute
from tvm_ext.analysis.predicates import has_call
from tvm_ext.ir.build_ir import (
    allocate,
    bind,
    cast_to,
    index,
    load,
    loop,
    new_buffer,
    sequence,
    store,
    vector_kind,
    vectors,
)

from ...plan.cell import CellProduct, CellStep, CellValue, shift_of


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Sums:
    """A product's sums in a tile: for each place a buffer of dims (row and register of units, lane)."""

    product: CellProduct
    buffers: tuple[Buffer, ...]

    def element(self, place: int, position: Expr, lane: Expr) -> Expr:
        value = load(self.buffers[self.product.places.index(place)], [position, lane])
        return cast_to(value, dtype_of(self.product.computation.target))


def write_values(
    step: CellStep,
    sums: Sequence[Sums],
    lead: Sequence[Expr],
    position: Expr,
    unit: Expr,
    width: int,
    lanes: int,
) -> list[Stmt]:
    """Statements for the ``width`` units from ``unit`` on in the row ``lead``, whose sums lie at ``position``."""
    return [
        _Piece(step, sums, lead, position, unit, first, length).statement() for first, length in vectors(width, lanes)
    ]


@dataclass(frozen=True, slots=True, eq=False)
class _Piece:
    """``length`` lanes of a register from ``first`` on."""

    step: CellStep
    sums: Sequence[Sums]
    lead: Sequence[Expr]
    position: Expr
    unit: Expr
    first: int
    length: int
    held: list[tuple[CellValue, Buffer]] = field(default_factory=list)

    def statement(self) -> Stmt:
        """The values in order: those that are used again in a buffer of one register, which LLVM keeps there."""
        kept = [value for value in self.step.values if not self._is_part_of_another(value)]
        buffers = [
            new_buffer((self.length,), dtype_of(value.computation.target), value.computation.target.name, "local")
            for value in kept
        ]
        self.held.extend(zip(kept, buffers, strict=True))
        kind = vector_kind(*(value.computation.value for value in self.step.values))
        return sequence(*map(allocate, buffers), loop(self.length, kind, "v", self._stores))

    def _stores(self, lane: Expr) -> Stmt:
        statements = [
            store(own.product.computation.target, own.element(place, self.position, self._in_register(lane)), at)
            for own in self.sums
            for place in own.product.stored
            if (at := self._at(place, lane)) is not None
        ]
        for value, buffer in self.held:
            statements.append(store(buffer, self._value(value, lane), [lane]))
            if value.stored:
                statements.append(store(value.computation.target, load(buffer, [lane]), self._at(value.place, lane)))
        return sequence(*statements)

    def _in_register(self, lane: Expr) -> Expr:
        return index(self.first) + lane

    def _at(self, place: int, lane: Expr) -> list[Expr]:
        return [*self.lead, self.unit + index(place + self.first) + lane]

    def _value(self, value: CellValue, lane: Expr) -> Expr:
        """``value`` of the lane's unit, with what the tile holds in place of its loads."""
        computation = value.computation
        table = bind(computation.spatial, self._at(value.place, lane))
        own = [(item, self._in_tile(item, value, lane)) for item in computation.loads()]
        inside = [(substitute(item, table), found) for item, found in own if found is not None]
        return _with_loads(substitute(computation.value, table), inside)

    def _in_tile(self, item: TensorLoad, reader: CellValue, lane: Expr) -> Expr | None:
        """What ``item`` loads, where the tile has it."""
        shift = shift_of(item, reader.computation)
        place = None if shift is None else reader.place + shift
        for own in self.sums:
            if item.source.same_as(own.product.computation.target) and place is not None:
                return own.element(place, self.position, self._in_register(lane))
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


def _with_loads(value: Expr, table: Sequence[tuple[TensorLoad, Expr]]) -> Expr:
    """``value`` with each load of ``table`` replaced."""

    def swap(item: TensorLoad) -> Expr:
        return next((new for old, new in table if structural_equal(item, old)), item)

    return replace_loads(value, swap)
