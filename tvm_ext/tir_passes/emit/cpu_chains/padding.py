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

from collections.abc import Sequence

from tvm_ext._tvm import Expr, Stmt
from tvm_ext.ir.build_ir import bind, store_point

from ...plan.panel import Panel, PanelPadding
from ..bounded_loops import BoundedLoops


def emit_padding(padding: PanelPadding, panel: Panel) -> Stmt:
    """Statements that fill the panel's part of the padded tensor."""
    computation = padding.computation

    def write(at: Sequence[Expr], value: Expr) -> Stmt:
        return store_point(computation, bind(computation.spatial, at), value)

    return BoundedLoops(
        extents=[part.extent for part in padding.parts],
        names=[variable.name for variable in computation.spatial],
        bounds=padding.bounds,
        inside=lambda at: write(at, padding.inside),
        outside=lambda at: write(at, padding.outside),
        start=lambda place: panel.start_of(padding.parts[place]) if padding.parts[place].moves else None,
    ).within()
