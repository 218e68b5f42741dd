"""A binary heap of integers, as loops; and what makes an integer of an element and its position.

Of n keys a heap is built in O(n) steps, and its top is replaced in O(log n) (Williams 1964, Floyd 1964).
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm_ext._tvm import Buffer, Expr, Stmt, tirx
from tvm_ext.analysis.computations import dtype_of

from .build_ir import INDEX_DTYPE, SERIAL, allocate, cast_to, index, load, loop, new_buffer, sequence, store
from .float_ir import is_number

KEYED = frozenset(("float32", "float16", "int32", "int16", "int8", "uint16", "uint8"))
"""Types whose elements have keys: each fits into the upper half of an int64, in its order."""

HALF = 32
"""Bits of a key's half."""

LEVEL_CYCLES = 10.0
"""Of one level that a key sinks: loads of two children and a comparison, one after the other (Zen 4: 9 to 11)."""


def key_of(value: Expr, position: Expr, *, largest: bool = True) -> Expr:
    """An int64: the greater, the earlier ``value`` goes in descending order (``largest``) or ascending order.

    Of equal values the first one goes first, zeros of both signs are equal, and NaN is greater than all numbers. Worked
    example: 2.0 at 3 is 0x40000000 in the upper half, and -1 - 3 in the lower one.
    """
    rank = cast_to(rank_of(value, largest=largest), INDEX_DTYPE)
    return (rank << index(HALF)) + (index((1 << HALF) - 1) - position)


def rank_of(value: Expr, *, largest: bool = True) -> Expr:
    """An integer of `rank_bits` that orders as ``value`` does, or the other way round without ``largest``.

    Zeros of both signs are equal, and NaN is greater than all numbers.
    """
    bits, dtype = rank_bits(dtype_of(value)), dtype_of(value)
    whole = f"int{bits}"
    if dtype.startswith("float"):
        wide = cast_to(value, f"float{bits}")
        raw, magnitude = tirx.reinterpret(whole, wide), tirx.const((1 << (bits - 1)) - 1, whole)
        ordered = tirx.bitwise_xor(raw, tirx.bitwise_and(raw >> tirx.const(bits - 1, whole), magnitude))
        some = tirx.Select(wide.equal(tirx.const(0.0, f"float{bits}")), tirx.const(0, whole), ordered)
        rank = tirx.Select(is_number(wide), some, magnitude)
    else:
        rank = cast_to(value, whole)
    return rank if largest else tirx.bitwise_not(rank)


def rank_bits(dtype: str) -> int:
    """Of the rank of an element of ``dtype``: 32, or 64 where those cannot hold it."""
    return HALF if dtype in KEYED or dtype == "bool" else 2 * HALF


def position_of(key: Expr) -> Expr:
    """Where the element of ``key`` was."""
    all_ones = index((1 << HALF) - 1)
    return all_ones - tirx.bitwise_and(key, all_ones)


@dataclass(frozen=True, slots=True, eq=False)
class Heap:
    """Keys at the front of ``keys``, (n,) int64; at the top the greatest, or the least with ``of_least``."""

    keys: Buffer
    of_least: bool

    def key(self, place: Expr) -> Expr:
        return load(self.keys, (place,))

    @property
    def top(self) -> Expr:
        return self.key(index(0))

    def put(self, place: Expr, key: Expr) -> Stmt:
        return store(self.keys, key, (place,))

    def build(self, size: Expr) -> Stmt:
        """Orders the first ``size`` keys."""
        inner = tirx.floordiv(size, index(2))

        def sift(number: Expr) -> Stmt:
            place = inner - index(1) - number
            return self.sift(place, size, self.key(place))

        return loop(inner, SERIAL, "built", sift)

    def pop(self, size: Expr) -> Stmt:
        """Moves the top behind the other ``size - 1`` keys, of which the last one is sifted in from the top."""
        last = size - index(1)
        held = new_buffer((1,), INDEX_DTYPE, "last_key", "local")
        kept = store(held, self.key(last), _ZERO)
        return sequence(allocate(held), kept, self.put(last, self.top), self.sift(index(0), last, load(held, _ZERO)))

    def sift(self, start: Expr, size: Expr, key: Expr) -> Stmt:
        """Puts ``key`` in place ``start`` or below it: all below that are in order, and go up where they belong."""
        held, place, child = (new_buffer((1,), INDEX_DTYPE, name, "local") for name in ("held", "place", "child"))
        at, below = load(place, _ZERO), load(child, _ZERO)
        up = below + index(1)
        # No branch, which a processor could not foresee.
        goes_first = store(child, below + cast_to(self._above(self.key(up), self.key(below)), INDEX_DTYPE), _ZERO)
        goes_up = sequence(
            self.put(at, self.key(below)), store(place, below, _ZERO), store(child, at * index(2) + index(1), _ZERO)
        )
        step = sequence(
            tirx.IfThenElse(up < size, goes_first, None),
            tirx.IfThenElse(self._above(self.key(below), load(held, _ZERO)), goes_up, store(child, size, _ZERO)),
        )
        return sequence(
            *map(allocate, (held, place, child)),
            store(held, key, _ZERO),
            store(place, start, _ZERO),
            store(child, start * index(2) + index(1), _ZERO),
            tirx.While(below < size, step),
            self.put(at, load(held, _ZERO)),
        )

    def _above(self, a: Expr, b: Expr) -> Expr:
        return a < b if self.of_least else a > b


_ZERO = (index(0),)
