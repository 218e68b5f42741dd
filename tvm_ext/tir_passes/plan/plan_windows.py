"""Takes window operators, with the padding that feeds them, out of the kernels that `plan_kernels` has planned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm_ext.analysis.computations import Computation, OperatorBody, reads
from tvm_ext.analysis.window import Window, find_window, is_padding
from tvm_ext.errors import IllegalRewrite

from .plan_kernels import RowGroup, TileGroup


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class WindowGroup:
    """A window operator with its fused epilogue; ``border`` as `TileGroup` has it, of channels in blocks alone."""

    window: Window
    epilogue: tuple[Computation, ...]
    border: Computation | None = None

    @property
    def anchor(self) -> Computation:
        return self.window.anchor

    @property
    def computations(self) -> tuple[Computation, ...]:
        return (self.window.anchor, *self.epilogue)


CpuGroup = TileGroup | RowGroup | WindowGroup


def take_windows(groups: Sequence[TileGroup | RowGroup], operator: OperatorBody) -> tuple[list[CpuGroup], list[str]]:
    """``groups`` with window kernels for the anchors that have one, and why others that slide a window have none."""
    taken: list[CpuGroup] = []
    pads: list[Computation] = []
    refusals: list[str] = []
    for group in groups:
        window = None
        if isinstance(group, TileGroup):
            try:
                window = find_window(group.anchor, _paddings_of(group.anchor, operator))
            except IllegalRewrite as refusal:
                refusals.append(str(refusal))
        if window is None:
            taken.append(group)
            continue
        assert isinstance(group, TileGroup)
        taken.append(WindowGroup(window=window, epilogue=group.epilogue))
        pads += [window.pad] if window.pad is not None else []
    return [left for group in taken if (left := _without(group, pads)) is not None], refusals


def _paddings_of(anchor: Computation, operator: OperatorBody) -> list[Computation]:
    """The computations that pad what ``anchor`` alone reads."""
    return [
        computation
        for computation in operator.computations
        if reads(anchor.value, computation.target)
        and not operator.is_output(computation.target)
        and is_padding(computation)
        and len(operator.consumers(computation.target)) == 1
    ]


def _without(group: CpuGroup, pads: Sequence[Computation]) -> CpuGroup | None:
    """``group`` without the computations of ``pads``; None where nothing is left."""
    if not isinstance(group, RowGroup):
        return group
    left = tuple(computation for computation in group.computations if not any(computation is pad for pad in pads))
    return RowGroup(computations=left) if left else None
