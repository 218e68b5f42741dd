"""Loops over a tensor that lies inside of a larger one: no element asks where it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm_ext._tvm import Expr, Stmt, tirx
from tvm_ext.analysis.window import Interval
from tvm_ext.ir.build_ir import SERIAL, VECTORIZED, index, loop, nest, sequence

SHORT_RUNS = (4, 8, 16)  # elements of a last dimension that LLVM would unroll to scalars, as in the layout NCHW16c

Coordinates = tuple[Expr, ...]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BoundedLoops:
    """Loops over ``extents``: ``inside`` where an element lies within ``bounds`` in every dimension, else ``outside``.

    A bound is None where all of a dimension is inside; ``inside`` is None where nothing is to be done there. ``start``
    gives for a dimension how far its elements are from those that its bound counts, where only a run knows that.
    """

    extents: Sequence[int]
    names: Sequence[str]
    bounds: Sequence[Interval | None]
    inside: Callable[[Coordinates], Stmt] | None
    outside: Callable[[Coordinates], Stmt]
    start: Callable[[int], Expr | None] = lambda _: None

    def within(self, done: Coordinates = ()) -> Stmt:
        """The loops over the dimensions behind ``done``, whose elements all are inside so far."""
        place = len(done)
        if all(bound is None for bound in self.bounds[place:]):
            return sequence() if self.inside is None else self._runs(done, self.inside)
        bound, extent, name = self.bounds[place], self.extents[place], self.names[place]
        if bound is None:
            return loop(extent, SERIAL, name, lambda v: self.within((*done, v)))
        start = self.start(place)
        if start is None:
            return self._cut(done, bound)

        def one(v: Expr) -> Stmt:
            return tirx.IfThenElse(held(bound, start + v), self.within((*done, v)), self.fill((*done, v)))

        return loop(extent, SERIAL, name, one)

    def fill(self, done: Coordinates) -> Stmt:
        return self._runs(done, self.outside)

    def _cut(self, done: Coordinates, bound: Interval) -> Stmt:
        """One dimension in three loops: before, within and behind its bound."""
        place, (low, high) = len(done), bound
        is_last = all(item is None for item in self.bounds[place + 1 :])
        within = None if is_last and self.inside is None else self.within
        pieces = [(0, low, self.fill), (low, high, within), (high, self.extents[place], self.fill)]
        return sequence(
            *(self._piece(done, *piece[:2], piece[2]) for piece in pieces if piece[2] and piece[1] > piece[0])
        )

    def _piece(self, done: Coordinates, first: int, end: int, body: Callable[[Coordinates], Stmt]) -> Stmt:
        return loop(end - first, SERIAL, self.names[len(done)], lambda v: body((*done, v + index(first))))

    def _runs(self, done: Coordinates, body: Callable[[Coordinates], Stmt]) -> Stmt:
        """Plain loops over what is behind ``done``, the last one as a vector where it is one register."""
        extents, names = self.extents[len(done) :], self.names[len(done) :]
        if not extents:
            return body(done)
        kind = VECTORIZED if extents[-1] in SHORT_RUNS else SERIAL
        return nest(
            extents[:-1],
            SERIAL,
            names[:-1],
            lambda outer: loop(extents[-1], kind, names[-1], lambda last: body((*done, *outer, last))),
        )


def held(bound: Interval, position: Expr) -> Expr:
    """Whether ``position`` lies within ``bound``."""
    return tirx.And(index(bound[0]) <= position, position < index(bound[1]))
