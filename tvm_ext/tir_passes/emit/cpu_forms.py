"""How a CPU runs a group of computations that needs no rProgram first: window kernels, and row by row."""

from __future__ import annotations

from tvm_ext.analysis.computations import OperatorBody
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.ir.build_ir import outer_kind
from tvm_ext.records.tuning import WindowTile

from ..plan.anchors import kept_buffers, row_program
from ..plan.chosen_tiles import TileChoices, chosen_for
from ..plan.form import Form, fused_note
from ..plan.plan_kernels import RowGroup
from ..plan.plan_windows import WindowGroup
from ..plan.row_time import row_time_s
from .cpu_choices import WindowPart
from .cpu_rows.emit import emit_rows
from .cpu_windows.kernel import window_kernel


def window_form(group: WindowGroup, device: DeviceSpec, tiles: TileChoices) -> Form:
    made, said = chosen_for(
        WindowTile,
        tiles,
        lambda: WindowPart(group=group).workload(device),
        lambda chosen: window_kernel(group.window, group.epilogue, device, chosen),
    )
    statements, program, how = made or window_kernel(group.window, group.epilogue, device)
    note = how + fused_note(group.epilogue)
    return Form(path="rtile", statements=tuple(statements), program=program, notes=(note, *said))


def row_form(rows: RowGroup, operator: OperatorBody, device: DeviceSpec) -> Form:
    kind = outer_kind(row_time_s(rows.computations, device), device)
    return Form(
        path="rows",
        statements=tuple(emit_rows(rows.computations, device, kept_buffers(rows, operator), kind)),
        program=row_program(rows, operator, device),
        notes=(f"{' + '.join(computation.name for computation in rows.computations)} row by row",),
    )
