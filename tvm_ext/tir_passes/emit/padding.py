"""Padded tensors: loops over a tensor that lies inside of a larger one, in which no element asks where it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

from tvm_ext._tvm import Expr, Stmt, tirx
from tvm_ext.analysis.computations import Computation
from tvm_ext.analysis.window import Interval
from tvm_ext.cost.row_time import RowClock
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.ir.build_ir import (
    SERIAL,
    VECTORIZED,
    bind,
    index,
    loop,
    nest,
    outer_kind,
    parallel_cut,
    sequence,
    store,
    store_point,
)
from tvm_ext.records.tuning import RowTiles

from ..plan.padded_stores import border_of
from ..plan.panel import Panel, PanelPadding


def fill_border(pad: Computation | None, device: DeviceSpec) -> tuple[Stmt, ...]:
    """Statements that write every element of the tensor of ``pad`` outside of its bounds, and no other: what lies
    outside in a padded tensor whose inner part the tiles store. None where there is no ``pad``. ::

        parallel for c in channels:
          for x in 0 ... 57: pad[c, 0, x] = 0
          for y in 1 ... 56: pad[c, y, 0] = 0; pad[c, y, 57] = 0
          for x in 0 ... 57: pad[c, 57, x] = 0
    """
    if pad is None:
        return ()
    found = border_of(pad)
    assert found is not None
    _, outside, bounds = found

    def write(at: tuple[Expr, ...]) -> Stmt:
        return store(pad.target, outside, [value for _, value in bind(pad.spatial, at)])

    loops = _BoundedLoops(
        extents=pad.extents,
        names=[variable.name for variable in pad.spatial],
        bounds=bounds,
        inside=None,
        outside=write,
    )
    sizes = [size if bound is None else bound[1] - bound[0] for size, bound in zip(pad.extents, bounds, strict=True)]
    whole_s = RowClock((pad,), device).predict(RowTiles(forks=True, registers=1)).busy_s
    kind = outer_kind(whole_s * (1 - prod(sizes) / prod(pad.extents)), device)
    whole = pad.extents[: next(position for position, bound in enumerate(bounds) if bound is not None)]
    return (parallel_cut(whole, kind, "border", loops.within),)


def emit_panel_padding(padding: PanelPadding, panel: Panel) -> Stmt:
    """Statements that fill the panel's part of a padded tensor.

    Where the panel lies is known at run time only, so that whether a row is inside is asked once a row. Dimensions in
    which every panel has all elements are cut into what is before, inside and behind instead. ::

        for y in panel's rows:
          if 1 <= base + y < 57:
            pad[y, 0] = 0;  pad[y, 1 .. 56] = in[y, 0 .. 55];  pad[y, 57] = 0
          else:
            pad[y, 0 .. 57] = 0
    """
    computation = padding.computation

    def write(at: Sequence[Expr], value: Expr) -> Stmt:
        return store_point(computation, bind(computation.spatial, at), value)

    return _BoundedLoops(
        extents=[part.extent for part in padding.parts],
        names=[variable.name for variable in computation.spatial],
        bounds=padding.bounds,
        inside=lambda at: write(at, padding.inside),
        outside=lambda at: write(at, padding.outside),
        start=lambda place: panel.start_of(padding.parts[place]) if padding.parts[place].moves else None,
    ).within()


# --- loops ------------------------------------------------------------------------------------------------------------
SHORT_RUNS = (4, 8, 16)  # elements of a last dimension that LLVM would unroll to scalars, as in the layout NCHW16c

Coordinates = tuple[Expr, ...]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _BoundedLoops:
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
        is_last = all(bound is None for bound in self.bounds[place + 1 :])
        within = None if is_last and self.inside is None else self.within
        pieces = [(0, low, self.fill), (low, high, within), (high, self.extents[place], self.fill)]

        def piece(first: int, end: int, body: Callable[[Coordinates], Stmt]) -> Stmt:
            return loop(end - first, SERIAL, self.names[place], lambda v: body((*done, v + index(first))))

        return sequence(*(piece(first, end, body) for first, end, body in pieces if body and end > first))

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
