"""Which panels a chain could be divided into: few, of sizes that stay in a core's own cache and occupy every core."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import prod

from tvm_ext._tvm import Buffer
from tvm_ext.analysis.computation_exprs import itemsize_bytes
from tvm_ext.analysis.computations import Computation, OperatorBody, dtype_of
from tvm_ext.cost.persistent import PANEL_SHARE
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.devices.machine import Machine
from tvm_ext.errors import IllegalRewrite
from tvm_ext.records.persistent import PanelPlan
from tvm_ext.support.arithmetic import ceil_div

from .panel import Panel, divide, obstacles, outside_parts, panel_axes, panel_parts
from .plan_kernels import RowGroup, TileGroup, plan

FILLS = (1 / 16, 1 / 4, 1.0)
"""Panels are considered that fill these shares of what a panel may have."""

MOST_REPEATED = 0.05
"""Share of an axis that may be computed twice, because its last panel begins earlier to be as large as the others."""


def panel_plans(operator: OperatorBody, device: DeviceSpec, fills: Sequence[float] = FILLS) -> list[PanelPlan]:
    """Ways to divide the result, small panels first, each the largest that fills one of ``fills``.

    Outer axes come first: panels are of one image until whole images fit. None where `check_smallest` raises.
    """
    plans = _by_size(operator, device.unit_count)
    ends = [
        bisect_right(plans, fill * _capacity(device), key=lambda made: panel_bytes(operator, made)) for fill in fills
    ]
    return list(dict.fromkeys(plans[end - 1] for end in ends if end > 0))


def check_smallest(operator: OperatorBody, device: DeviceSpec) -> None:
    """Raise IllegalRewrite where the result cannot be divided, or not even the smallest panel stays in L2."""
    smallest = _by_size(operator, device.unit_count)[0]
    divide(operator, smallest.by_axis)
    needed, capacity = panel_bytes(operator, smallest), _capacity(device)
    if needed <= capacity:
        return
    size = f"the smallest panel takes {needed:.0f} bytes, of which {capacity:.0f} may stay in L2"
    others = list(dict.fromkeys(filter(None, obstacles(operator).values())))
    raise IllegalRewrite(f"{size}; there is none smaller, since {' and '.join(others)}" if others else size)


def _capacity(device: DeviceSpec) -> float:
    return Machine(device).own_bytes * PANEL_SHARE


@lru_cache(maxsize=16)
def judged_panel(operator: OperatorBody, made: PanelPlan) -> tuple[Panel, tuple[TileGroup | RowGroup, ...]]:
    """A panel and its groups, remembered while a chain is judged; what is emitted is divided anew."""
    panel = divide(operator, made.by_axis)
    return panel, tuple(plan(panel.operator))


@lru_cache(maxsize=1)
def _by_size(operator: OperatorBody, units: int) -> list[PanelPlan]:
    """All panels, the smallest first."""
    axes = panel_axes(operator)
    result = operator.computations[-1]
    extents = [result.extent(result.spatial[axis]) for axis in axes]
    sizes = list(_all_sizes(extents, units))
    return [PanelPlan(axes=axes[: len(size)], sizes=size) for size in reversed(sizes)]


def _all_sizes(extents: Sequence[int], units: int) -> Iterator[tuple[int, ...]]:
    """Panel sizes from the largest that occupies every unit down, each smaller than the one before it.

    Those are left out of which the last panel would do much again. Worked example, 4 images of 56 x 56 on two units:
    2, 1 images; 28, 19, 14, 7, 4, 2, 1 rows; 28 ... columns.
    """
    for position, extent in enumerate(extents):
        outer, last = prod(extents[:position]), extent + (position == 0)
        for rounds in _rounds():
            count = ceil_div(rounds * units, outer)
            size = ceil_div(extent, min(extent, count))
            repeated = ceil_div(extent, size) * size - extent
            if size < last and (position == 0 or count > 1) and repeated <= MOST_REPEATED * extent:
                yield (*(1,) * position, size)
                last = size
            if size == 1:
                break


def _rounds() -> Iterator[int]:
    """1, 2, 3, 4, 6, 8, 12, 16 ...: how many panels each unit gets."""
    yield 1
    power = 2
    while True:
        yield power
        yield power * 3 // 2
        power *= 2


@lru_cache(maxsize=32)
def panel_bytes(operator: OperatorBody, made: PanelPlan) -> float:
    """Bytes of all values that a panel reads, keeps and writes; what it reads whole (weights) is none of them."""
    parts = panel_parts(operator, made.by_axis)
    kept = [(buffer, parts[buffer]) for buffer in between(operator) if any(part.moves for part in parts[buffer])]
    return sum(
        itemsize_bytes(dtype_of(buffer)) * prod(part.extent for part in own)
        for buffer, own in (*outside_parts(operator, parts), *kept)
    )


@lru_cache(maxsize=1)
def between(operator: OperatorBody) -> list[Buffer]:
    """The tensors that one group writes and another reads."""
    return [buffer for buffer in stored(plan(operator)) if not operator.is_output(buffer)]


def stored(groups: Sequence[TileGroup | RowGroup]) -> list[Buffer]:
    """The tensors that groups write: those of an epilogue in place of its anchor's."""
    written: list[Computation] = []
    for group in groups:
        written += group.computations if isinstance(group, RowGroup) else group.epilogue or (group.anchor,)
    return [computation.target for computation in written]
