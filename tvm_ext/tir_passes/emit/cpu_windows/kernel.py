"""A window operator's kernel: the steps of this folder in order, from the recognised window to statements."""

from __future__ import annotations

from collections.abc import Sequence

from tvm_ext._tvm import Stmt
from tvm_ext.analysis.computations import Computation
from tvm_ext.analysis.window import Window
from tvm_ext.cost.window_layouts import lay_out_window
from tvm_ext.cost.window_time import window_program
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.ir.build_ir import outer_kind
from tvm_ext.records.rprogram import RProgram
from tvm_ext.records.tuning import WindowTile

from .choices import chosen_layout
from .division import multiply_by_reciprocals
from .emit import emit_window, may_overrun


def window_kernel(
    window: Window, epilogue: Sequence[Computation], device: DeviceSpec, chosen: WindowTile | None = None
) -> tuple[list[Stmt], RProgram, str]:
    """The statements of a window operator, what the model expects of them, and how it is done in words.

    Raises IllegalRewrite for a ``chosen`` tile that does not fit; None is construction's own.
    """
    divided = multiply_by_reciprocals(window, epilogue)
    overruns = may_overrun(window, divided.epilogue)
    if chosen is None:
        layout = lay_out_window(window, device, may_overrun=overruns)
        program = window_program(layout, divided.epilogue, device)
        kind = outer_kind(program.prediction.busy_s, device)
    else:
        layout, kind = chosen_layout(window, chosen, device, overruns=overruns)
        program = window_program(layout, divided.epilogue, device)
    return [*divided.tables, emit_window(layout, divided.epilogue, kind)], program, layout.describe()
