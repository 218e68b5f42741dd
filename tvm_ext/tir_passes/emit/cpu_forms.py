"""How a CPU runs a group of computations that needs no rProgram first: window kernels, and row by row."""

from __future__ import annotations

from tvm_ext.analysis.computations import OperatorBody
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.ir.build_ir import PARALLEL, SERIAL
from tvm_ext.records.tuning import RowTiles, WindowTile

from ..plan.anchors import kept_buffers, row_program
from ..plan.chosen_tiles import NO_CHOICES, TileChoices, chosen_for
from ..plan.form import Form, fused_note
from ..plan.plan_kernels import RowGroup
from ..plan.plan_windows import WindowGroup
from .cpu_choices import WindowPart
from .cpu_rows.choices import row_kind, row_workload, usual_rows
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


def row_form(rows: RowGroup, operator: OperatorBody, device: DeviceSpec, tiles: TileChoices = NO_CHOICES) -> Form:
    """``rows`` are canonical."""
    computations = rows.computations
    usual = usual_rows(computations, device)
    made, said = chosen_for(
        RowTiles,
        tiles,
        lambda: row_workload(computations, device),
        lambda chosen: (row_kind(computations, chosen, device), chosen.registers),
    )
    kind, registers = made or (PARALLEL if usual.forks else SERIAL, usual.registers)
    return Form(
        path="rows",
        statements=tuple(emit_rows(computations, device, kept_buffers(rows, operator), kind, registers)),
        program=row_program(rows, operator, device),
        notes=(f"{' + '.join(computation.name for computation in computations)} row by row", *said),
    )
