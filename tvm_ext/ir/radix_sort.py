"""A stable sort by bytes, as loops, and what is unique, by it.

The least byte comes first (Knuth, volume 3, 5.2.5). A byte that is the same everywhere, as the upper ones of small
integers, moves nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm_ext._tvm import Buffer, Expr, Stmt, tirx
from tvm_ext.analysis.computations import dtype_of, static_shape

from .build_ir import INDEX_DTYPE, SERIAL, allocate, cast_to, flat, index, load, loop, nest, new_buffer, sequence, store
from .heap import HALF, KEYED, rank_bits, rank_of

BYTE, VALUES = 8, 256
"""Bits of a byte, and what it can be: counts of 2 KiB for each, which L1 holds."""

SORTED = KEYED | {"bool", "int64", "float64", "uint32"}
"""Types whose elements have ranks."""

ELEMENT_CYCLES = 8.0
"""Of one element: its rank is made, and its bytes are counted."""

MOVE_CYCLES = 5.0
"""Of one element that moves by one byte: its place is loaded and stored again, which the next one may wait for."""

PASS_CYCLES = 700.0
"""Of one byte: its 256 counts are cleared and summed."""

_ZERO = (index(0),)

Enter = Callable[[Expr, Expr], Stmt]
"""Of an element's position and value."""


def sort_cycles(length: int, dtype: str) -> float:
    """Of one core, where all bytes differ."""
    passes = rank_bits(dtype) // BYTE
    return length * (ELEMENT_CYCLES + passes * MOVE_CYCLES) + passes * PASS_CYCLES


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Sorted:
    """Elements in order: ranks and positions in half ``side`` of ``columns``, each (2, n) int64.

    A rank of 32 bits and the position are one number. A rank of 64 bits has the position in a second column.
    """

    columns: tuple[Buffer, ...]
    side: Buffer

    def at(self, place: Expr, column: int = 0) -> Expr:
        return load(self.columns[column], (load(self.side, _ZERO), place))

    def position(self, place: Expr) -> Expr:
        """Where the element that is ``place``-th in order was."""
        return self.at(place, 1) if len(self.columns) > 1 else tirx.bitwise_and(self.at(place), index((1 << HALF) - 1))

    def rank(self, place: Expr) -> Expr:
        return self.at(place) if len(self.columns) > 1 else self.at(place) >> index(HALF)


def radix_sort(
    length: int,
    dtype: str,
    elements: Callable[[Enter], Stmt],
    body: Callable[[Sorted], Stmt],
    *,
    ascending: bool = True,
) -> Stmt:
    """``body`` of ``length`` elements of ``dtype`` in order; ``elements`` makes the loops that enter each once.

    Of equal ones the first goes first; NaN is the greatest.
    """
    bits = rank_bits(dtype)
    shifts = list(range(HALF, 2 * HALF, BYTE)) if bits == HALF else list(range(0, 2 * HALF, BYTE))
    columns = tuple(
        new_buffer((2, length), INDEX_DTYPE, name) for name in ("ranks", "positions")[: 2 * bits // HALF - 1]
    )
    counts, side = new_buffer((len(shifts), VALUES), INDEX_DTYPE, "counts"), new_buffer((1,), INDEX_DTYPE, "side")
    order = Sorted(columns=columns, side=side)

    def enter(position: Expr, value: Expr) -> Stmt:
        rank = cast_to(rank_of(value, largest=ascending), INDEX_DTYPE)
        values = (rank, position) if bits > HALF else (tirx.bitwise_or(rank << index(HALF), position),)
        kept = [store(column, item, (index(0), position)) for column, item in zip(columns, values, strict=True)]
        key = load(columns[0], (index(0), position))
        return sequence(*kept, *(_counted(counts, index(k), _byte(key, shift)) for k, shift in enumerate(shifts)))

    cleared = nest((len(shifts), VALUES), SERIAL, ("pass", "value"), lambda at: store(counts, index(0), at))
    moves = [_moved(order, counts, number, shift, length) for number, shift in enumerate(shifts)]
    used = map(allocate, (*columns, counts, side))
    return sequence(*used, store(side, index(0), _ZERO), cleared, elements(enter), *moves, body(order))


def _byte(key: Expr, shift: int) -> Expr:
    """Unsigned; of the last one the sign comes first."""
    byte = tirx.bitwise_and(key >> index(shift), index(VALUES - 1))
    return tirx.bitwise_xor(byte, index(VALUES // 2)) if shift == 2 * HALF - BYTE else byte


def _counted(counts: Buffer, number: Expr, value: Expr) -> Stmt:
    return store(counts, load(counts, (number, value)) + index(1), (number, value))


def _moved(order: Sorted, counts: Buffer, number: int, shift: int, length: int) -> Stmt:
    """By one byte into the other half, where not all elements have the same."""
    this, total, place = index(number), new_buffer((1,), INDEX_DTYPE, "total"), new_buffer((1,), INDEX_DTYPE, "place")

    def begin(value: Expr) -> Stmt:
        """Counts become the places of the first of each."""
        held = load(place, _ZERO)
        return sequence(
            store(place, load(counts, (this, value)), _ZERO),
            store(counts, load(total, _ZERO), (this, value)),
            store(total, load(total, _ZERO) + held, _ZERO),
        )

    def move(element: Expr) -> Stmt:
        value, there = _byte(order.at(element), shift), index(1) - load(order.side, _ZERO)
        taken = store(place, load(counts, (this, value)), _ZERO)
        moved = [
            store(column, order.at(element, k), (there, load(place, _ZERO))) for k, column in enumerate(order.columns)
        ]
        return sequence(taken, store(counts, load(place, _ZERO) + index(1), (this, value)), *moved)

    first = _byte(order.at(index(0)), shift)
    passed = sequence(
        allocate(total),
        allocate(place),
        store(total, index(0), _ZERO),
        loop(VALUES, SERIAL, "value", begin),
        loop(length, SERIAL, "element", move),
        store(order.side, index(1) - load(order.side, _ZERO), _ZERO),
    )
    return tirx.IfThenElse(load(counts, (this, first)) < index(length), passed, None)


def unique(data: Buffer, firsts: Buffer, inverse: Buffer, counts: Buffer, count: Buffer) -> Stmt:
    """Where each different value of ``data``, of n elements, is first, ascending by value, and how often it is.

    ``firsts`` and ``counts`` (n + 1,) are filled up to ``count`` (1,); ``inverse`` (n,) says which of them each element
    is. All are int64. NaN is one value, and so are zeros of both signs.
    """
    shape = static_shape(data)
    (length,) = static_shape(inverse)
    found = new_buffer((1,), INDEX_DTYPE, "found")
    held = load(found, _ZERO)

    def elements(enter: Enter) -> Stmt:
        names = [f"i{k}" for k in range(len(shape))]
        return nest(shape, SERIAL, names, lambda point: enter(flat(point, shape), load(data, point)))

    def body(order: Sorted) -> Stmt:
        def element(place: Expr) -> Stmt:
            """A value that was there before writes behind all others: no branch, which could not be foreseen."""
            before = tirx.max(place - index(1), index(0))
            is_new = tirx.Or(place.equal(index(0)), tirx.Not(order.rank(place).equal(order.rank(before))))
            slot = tirx.Select(is_new, held, index(length))
            return sequence(
                store(firsts, order.position(place), (slot,)),
                store(counts, place, (slot,)),
                store(found, held + cast_to(is_new, INDEX_DTYPE), _ZERO),
                store(inverse, held - index(1), (order.position(place),)),
            )

        def difference(number: Expr) -> Stmt:
            return store(counts, load(counts, (number + index(1),)) - load(counts, (number,)), (number,))

        return sequence(
            allocate(found),
            store(found, index(0), _ZERO),
            loop(length, SERIAL, "place", element),
            store(counts, index(length), (held,)),
            loop(held, SERIAL, "number", difference),
            store(count, held, _ZERO),
        )

    return radix_sort(length, dtype_of(data), elements, body)
