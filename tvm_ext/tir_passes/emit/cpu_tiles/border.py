"""Fills what lies outside in a padded tensor whose inner part the tiles store.

parallel for c in channels:
  for x in 0 ... 57: pad[c, 0, x] = 0
  for y in 1 ... 56: pad[c, y, 0] = 0; pad[c, y, 57] = 0
  for x in 0 ... 57: pad[c, 57, x] = 0
"""

from __future__ import annotations

from math import prod

from tvm_ext._tvm import Expr, Stmt
from tvm_ext.analysis.computations import Computation
from tvm_ext.cost.row_time import row_time_s
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.ir.build_ir import as_index, loop, outer_kind, split_index, store

from ...plan.padded_stores import border_of
from ..bounded_loops import BoundedLoops


def fill_border(pad: Computation, device: DeviceSpec) -> Stmt:
    """Statements that write every element of the tensor of ``pad`` outside of its bounds, and no other."""
    found = border_of(pad)
    assert found is not None
    _, outside, bounds = found

    def write(at: tuple[Expr, ...]) -> Stmt:
        return store(pad.target, outside, [as_index(i, v) for v, i in zip(pad.spatial, at, strict=True)])

    loops = BoundedLoops(
        extents=pad.extents,
        names=[variable.name for variable in pad.spatial],
        bounds=bounds,
        inside=None,
        outside=write,
    )
    sizes = [size if bound is None else bound[1] - bound[0] for size, bound in zip(pad.extents, bounds, strict=True)]
    kind = outer_kind(row_time_s((pad,), device) * (1 - prod(sizes) / prod(pad.extents)), device)
    whole = pad.extents[: next(place for place, bound in enumerate(bounds) if bound is not None)]
    return loop(prod(whole), kind, "border", lambda task: loops.within(split_index(task, whole)))
