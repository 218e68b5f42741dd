"""Recognises a padding that a tile kernel stores into: its result is written where the padded tensor has it.

Worked example, what a 3x3 convolution reads behind a 1x1 one of 56 x 56 pixels:

    pad[n, c, y, x, b] = if 1 <= y < 57 and 1 <= x < 57: relu(conv[n, c, y - 1, x - 1, b]) else 0

is the epilogue ``pad[n, c, y + 1, x + 1, b] = relu(conv[n, c, y, x, b])`` over the 56 x 56 pixels, and a border of
zeros that nothing else writes. No copy of the tensor is made.

The innermost dimension may not be padded: a register of results is stored as one vector.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tvm_ext._tvm import Analyzer, Expr, PrimFunc, TensorLoad, tirx
from tvm_ext.analysis.computation_exprs import linear_form
from tvm_ext.analysis.computations import (
    Computation,
    OperatorBody,
    dtype_of,
    read_operator,
    replace_loads,
    static_shape,
    substitute,
)
from tvm_ext.analysis.window import Interval, is_padding, padding_of
from tvm_ext.errors import IllegalRewrite
from tvm_ext.support.limits import timed_construction

from .plan_kernels import RowGroup, TileGroup, plan, simplify
from .plan_windows import CpuGroup, WindowGroup, take_windows


def cpu_groups(operator: OperatorBody) -> tuple[list[CpuGroup], list[str]]:
    """The kernels of a simplified operator over whole tensors on a CPU, in order, and why some windows have none."""
    groups, refusals = take_windows(plan(operator), operator)
    joined: list[CpuGroup] = []
    for group in groups:
        padded = _padded(joined[-1], group, operator) if joined else None
        if padded is None:
            joined.append(group)
        else:
            joined[-1] = padded
    return joined, refusals


def stores_padded(func: PrimFunc) -> bool:
    """Whether the kernel of ``func`` stores its result inside of a padding, without a copy."""
    try:
        with timed_construction():
            groups, _ = cpu_groups(simplify(read_operator(func, "operator")))
    except IllegalRewrite:
        return False
    return not isinstance(groups[-1], RowGroup) and groups[-1].border is not None


def _padded(before: CpuGroup, group: CpuGroup, operator: OperatorBody) -> TileGroup | WindowGroup | None:
    """``before`` with the only computation of ``group`` for its epilogue; None where that is no padding of its own."""
    if isinstance(before, RowGroup) or not isinstance(group, RowGroup):
        return None
    if isinstance(before, WindowGroup) and before.window.lane is None:
        return None
    if before.epilogue or len(group.computations) != 1 or operator.is_output(before.anchor.target):
        return None
    (pad,) = group.computations
    readers = operator.consumers(before.anchor.target)
    if len(readers) != 1 or readers[0] is not pad or not operator.is_output(pad.target) or not is_padding(pad):
        return None
    inner = inner_store(pad, before.anchor)
    return None if inner is None else dataclasses.replace(before, epilogue=(inner,), border=pad)


def inner_store(pad: Computation, anchor: Computation) -> Computation | None:
    """The part of ``pad`` inside its bounds, over the points of ``anchor``, all of which it reads at their own place.

    None where it reads the anchor's result in another way, or pads the innermost dimension.
    """
    found = border_of(pad)
    if found is None:
        return None
    value, _, bounds = found
    loads = [load for load in pad.loads() if load.source.same_as(anchor.target)]
    if not loads or not all(lies_inside(load, pad, bounds) for load in loads):
        return None
    starts = [0 if bound is None else bound[0] for bound in bounds]
    moved = [v + tirx.IntImm(dtype_of(v), low) if low else v for v, low in zip(pad.spatial, starts, strict=True)]
    value = substitute(value, list(zip(pad.spatial, moved, strict=True)))
    return dataclasses.replace(
        pad, extents=static_shape(anchor.target), indices=tuple(moved), value=replace_loads(value, _simplified)
    )


def border_of(pad: Computation) -> tuple[Expr, Expr, list[Interval | None]] | None:
    """As `padding_of` has it, None for a dimension that is inside as a whole; None where all are, or the last is not.

    Nobody could store a register of results across the end of an innermost dimension as one vector.
    """
    found = padding_of(pad)
    if found is None:
        return None
    inside, outside, bounds = found
    cut = [None if bound == (0, size) else bound for bound, size in zip(bounds, pad.extents, strict=True)]
    return None if cut[-1] is not None or not any(cut) else (inside, outside, cut)


def lies_inside(load: TensorLoad, pad: Computation, bounds: Sequence[Interval | None]) -> bool:
    """Whether ``load`` reads the whole of its tensor, the first element at the first place within ``bounds``."""
    if len(load.indices) != len(bounds):
        return False
    for position, (index, size, bound) in enumerate(zip(load.indices, static_shape(load.source), bounds, strict=True)):
        low, high = bound or (0, pad.extents[position])
        unit = [int(place == position) for place in range(len(bounds))]
        if high - low != size or linear_form(index, pad.spatial) != (unit, -low):
            return False
    return True


def _simplified(load: TensorLoad) -> Expr:
    """``load`` at ``y`` where the substitution left ``y + 1 - 1``."""
    analyzer = Analyzer()
    return tirx.BufferLoad(load.source, [analyzer.simplify(index) for index in load.indices])
