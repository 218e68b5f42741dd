"""Takes window operators, with the padding that feeds them, out of the kernels that `plan_kernels` has planned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm_ext._tvm import Stmt
from tvm_ext.analysis.computations import Computation, OperatorBody, reads
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.errors import IllegalRewrite
from tvm_ext.ir.build_ir import outer_kind
from tvm_ext.records.rprogram import RProgram

from ..emit.cpu_windows.division import multiply_by_reciprocals
from ..emit.cpu_windows.emit import emit_window, may_overrun
from ..emit.cpu_windows.layout import lay_out_window
from ..emit.cpu_windows.program import window_program
from ..emit.cpu_windows.window import Window, find_window, is_padding
from .plan_kernels import RowGroup, TileGroup


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class WindowGroup:
    """A window operator with its fused epilogue."""

    window: Window
    epilogue: tuple[Computation, ...]


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


def window_kernel(group: WindowGroup, device: DeviceSpec) -> tuple[list[Stmt], RProgram, str]:
    """The statements of a window operator, what the model expects of them, and how it is done in words."""
    divided = multiply_by_reciprocals(group.window, group.epilogue)
    layout = lay_out_window(group.window, device, may_overrun=may_overrun(group.window, divided.epilogue))
    program = window_program(layout, divided.epilogue, device)
    kind = outer_kind(program.prediction.busy_s, device)
    return [*divided.tables, emit_window(layout, divided.epilogue, kind)], program, layout.describe()
