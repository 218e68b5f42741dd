"""Writes a panel of a padded tensor: rows inside are copied, what lies outside is filled, no element asks where it is.

Where the panel lies is known at run time only, so that whether a row is inside is asked once a row. Dimensions in which
every panel has all elements are cut into what is before, inside and behind instead.

    for y in panel's rows:
      if 1 <= base + y < 57:
        pad[y, 0] = 0;  pad[y, 1 .. 56] = in[y, 0 .. 55];  pad[y, 57] = 0
      else:
        pad[y, 0 .. 57] = 0
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tvm_ext._tvm import Expr, Stmt, tirx
from tvm_ext.analysis.computations import substitute
from tvm_ext.ir.build_ir import SERIAL, VECTORIZED, as_index, index, loop, nest, sequence, store

from ...plan.panel import Panel, PanelPadding

SHORT_RUNS = (4, 8, 16)  # elements of a last dimension that LLVM would unroll to scalars, as in the layout NCHW16c


def emit_padding(padding: PanelPadding, panel: Panel) -> Stmt:
    """Statements that fill the panel's part of the padded tensor."""
    computation = padding.computation
    extents = [part.extent for part in padding.parts]
    names = [variable.name for variable in computation.spatial]

    def write(at: Sequence[Expr], value: Expr) -> Stmt:
        table = [(v, as_index(i, v)) for v, i in zip(computation.spatial, at, strict=True)]
        return store(computation.target, substitute(value, table), [substitute(i, table) for i in computation.indices])

    def fill(done: tuple[Expr, ...]) -> Stmt:
        return _loops(extents[len(done) :], names[len(done) :], lambda rest: write((*done, *rest), padding.outside))

    def inside(done: tuple[Expr, ...]) -> Stmt:
        dimension = len(done)
        if all(bound is None for bound in padding.bounds[dimension:]):
            return _loops(extents[dimension:], names[dimension:], lambda rest: write((*done, *rest), padding.inside))
        bound, name = padding.bounds[dimension], names[dimension]
        if bound is None:
            return loop(extents[dimension], SERIAL, name, lambda v: inside((*done, v)))
        if not padding.parts[dimension].moves:
            return _cut(bound, extents[dimension], name, lambda v: inside((*done, v)), lambda v: fill((*done, v)))
        start = panel.start_of(padding.parts[dimension])

        def row(v: Expr) -> Stmt:
            held = tirx.And(index(bound[0]) <= start + v, start + v < index(bound[1]))
            return tirx.IfThenElse(held, inside((*done, v)), fill((*done, v)))

        return loop(extents[dimension], SERIAL, name, row)

    return inside(())


def _cut(
    bound: tuple[int, int], extent: int, name: str, inside: Callable[[Expr], Stmt], fill: Callable[[Expr], Stmt]
) -> Stmt:
    low, high = bound
    pieces = [(0, low, fill), (low, high, inside), (high, extent, fill)]
    return sequence(*(_piece(first, end, name, body) for first, end, body in pieces if end > first))


def _piece(first: int, end: int, name: str, body: Callable[[Expr], Stmt]) -> Stmt:
    return loop(end - first, SERIAL, name, lambda v: body(v + index(first)))


def _loops(extents: Sequence[int], names: Sequence[str], body: Callable[[tuple[Expr, ...]], Stmt]) -> Stmt:
    if not extents:
        return body(())
    kind = VECTORIZED if extents[-1] in SHORT_RUNS else SERIAL
    return nest(
        extents[:-1],
        SERIAL,
        names[:-1],
        lambda outer: loop(extents[-1], kind, names[-1], lambda last: body((*outer, last))),
    )
