"""A window operator's kernel: the steps of this folder in order, from the recognised window to statements."""

from __future__ import annotations

from collections.abc import Sequence

from tvm_ext._tvm import Stmt
from tvm_ext.analysis.computations import Computation
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.ir.build_ir import outer_kind
from tvm_ext.records.rprogram import RProgram

from ...plan.window import Window
from .division import multiply_by_reciprocals
from .emit import emit_window, may_overrun
from .layout import lay_out_window
from .program import window_program


def window_kernel(
    window: Window, epilogue: Sequence[Computation], device: DeviceSpec
) -> tuple[list[Stmt], RProgram, str]:
    """The statements of a window operator, what the model expects of them, and how it is done in words."""
    divided = multiply_by_reciprocals(window, epilogue)
    layout = lay_out_window(window, device, may_overrun=may_overrun(window, divided.epilogue))
    program = window_program(layout, divided.epilogue, device)
    kind = outer_kind(program.prediction.busy_s, device)
    return [*divided.tables, emit_window(layout, divided.epilogue, kind)], program, layout.describe()
