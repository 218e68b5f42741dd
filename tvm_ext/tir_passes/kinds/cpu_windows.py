"""Depthwise convolutions and poolings, plane by plane: what slides a window over single planes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tvm_ext._tvm import ForKind, Stmt
from tvm_ext.analysis.computations import Computation
from tvm_ext.analysis.tensor_expr import TensorExpr
from tvm_ext.analysis.tile_workload import WINDOWS, tile_machine, without_names
from tvm_ext.analysis.window import Window, WindowAxis
from tvm_ext.cost.window_layouts import WindowLayout, lay_out_window, layouts_of_band, scratch_bytes, usual_bands
from tvm_ext.cost.window_time import predict_window, window_expr, window_program, window_seconds
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.devices.machine import Machine
from tvm_ext.errors import IllegalRewrite
from tvm_ext.ir.build_ir import PARALLEL, SERIAL, outer_kind
from tvm_ext.records.measurement import MeasuredWorkload
from tvm_ext.records.rprogram import RProgram
from tvm_ext.records.serialise import to_json
from tvm_ext.records.tuning import WindowTile
from tvm_ext.support.arithmetic import ceil_div

from ..emit.cpu_windows.division import multiply_by_reciprocals
from ..emit.cpu_windows.emit import emit_window, may_overrun
from ..plan.context import KernelContext
from ..plan.form import Form, fused_note
from ..plan.plan_windows import WindowGroup
from .kernel_kind import Candidates, Group, KernelKind, KernelPart

BAND_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Bands of a plane, beside those that construction considers."""

SERIAL_WITHIN = 1.5
"""One core alone is a candidate where the model has it at most so many times slower than all of them."""


class CpuWindows(KernelKind):
    name = "a window"

    def of_group(self, group: Group, context: KernelContext) -> WindowPart | None:
        return WindowPart(group=group, context=context) if isinstance(group, WindowGroup) else None


@dataclass(frozen=True, kw_only=True, eq=False)
class WindowPart(KernelPart[WindowTile]):
    """A depthwise convolution or a pooling with its fused epilogue."""

    tiles = WindowTile
    group: WindowGroup
    context: KernelContext

    def forms(self, chosen: WindowTile | None = None) -> list[Form]:
        window, epilogue = self.group.window, self.group.epilogue
        statements, program, how = window_kernel(window, epilogue, self.context.device, chosen)
        note = how + fused_note(epilogue)
        return [Form(path="rtile", statements=tuple(statements), program=program, notes=(note,))]

    def key(self) -> MeasuredWorkload:
        return window_workload(self.group.window, self.group.epilogue, self.context.device)

    def candidates(self) -> Candidates[WindowTile]:
        window = self.group.window
        found = window_candidates(window, self.group.epilogue, self.context.device)
        return Candidates(found=found, depth=window.y.taps * window.x.taps)


def window_kernel(
    window: Window, epilogue: Sequence[Computation], device: DeviceSpec, chosen: WindowTile | None = None
) -> tuple[list[Stmt], RProgram, str]:
    """The statements of a window operator, what the model expects of them, and how it is done in words.

    Raises IllegalRewrite for a ``chosen`` tile that does not fit; None is construction's own.
    """
    divided, tables = multiply_by_reciprocals(window, epilogue)
    overruns = may_overrun(window, divided)
    if chosen is None:
        layout = lay_out_window(window, device, may_overrun=overruns)
        program = window_program(layout, divided, device)
        kind = outer_kind(program.prediction.busy_s, device)
    else:
        layout, kind = chosen_layout(window, chosen, device, overruns=overruns)
        program = window_program(layout, divided, device)
    return [*tables, emit_window(layout, divided, kind)], program, layout.describe()


@dataclass(frozen=True, kw_only=True, slots=True)
class _WindowStructure:
    """All that decides how fast a layout is."""

    expression: TensorExpr
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    padding: str
    overruns: bool


def window_workload(window: Window, epilogue: Sequence[Computation], device: DeviceSpec) -> MeasuredWorkload:
    """The key of a window operator with its fused ``epilogue``; names do not count."""
    epilogue, _ = multiply_by_reciprocals(window, epilogue)
    expr = window_expr(window, epilogue)
    structure = _WindowStructure(
        expression=without_names(expr),
        rows=_numbers(window.y),
        columns=_numbers(window.x),
        padding="" if window.pad is None else str(float(window.pad_value.value)),
        overruns=may_overrun(window, epilogue),
    )
    dtype = ",".join((*(access.dtype for access in expr.inputs), expr.output.dtype))
    return replace(tile_machine(device, WINDOWS), structure=to_json(structure), dtype=dtype)


def _numbers(axis: WindowAxis) -> tuple[int, ...]:
    return (axis.extent, axis.taps, axis.stride, axis.dilation, axis.before, axis.first, axis.size)


def chosen_layout(
    window: Window, tile: WindowTile, device: DeviceSpec, *, overruns: bool
) -> tuple[WindowLayout, ForKind]:
    """The layout that ``tile`` means and the kind of its outer loop; raises IllegalRewrite where there is none."""
    name = window.anchor.name
    if tile.band not in _bands(window, device):
        raise IllegalRewrite(f"{name}: tasks of {tile.band} of {window.y.extent} rows, which {tile} wants, do not fit")
    if tile.forks and device.unit_count == 1:
        raise IllegalRewrite(f"{name}: there is one core alone, and {tile} wants several")
    for layout in layouts_of_band(window, tile.band, device, may_overrun=overruns):
        if _tile(layout, forks=tile.forks) == tile:
            return layout, PARALLEL if tile.forks else SERIAL
    raise IllegalRewrite(f"{name}: {tile} is no register tile of bands of {tile.band} x {window.x.extent}")


def window_candidates(
    window: Window, epilogue: Sequence[Computation], device: DeviceSpec
) -> list[tuple[WindowTile, float]]:
    """All choices with the seconds that the model expects of each, construction's own first."""
    epilogue, _ = multiply_by_reciprocals(window, epilogue)
    expr, overruns = window_expr(window, epilogue), may_overrun(window, epilogue)
    usual = lay_out_window(window, device, may_overrun=overruns)
    forks = outer_kind(predict_window(usual, expr, device).busy_s, device) == PARALLEL
    found = {_tile(usual, forks=forks): window_seconds(usual, expr, device, forks=forks)}
    for band in _bands(window, device):
        for layout in layouts_of_band(window, band, device, may_overrun=overruns):
            for tile, seconds in _cuts(layout, expr, device):
                found.setdefault(tile, seconds)
    return list(found.items())


def _cuts(layout: WindowLayout, expr: TensorExpr, device: DeviceSpec) -> Iterator[tuple[WindowTile, float]]:
    """A layout on one core, and on all where there are several: each where it may pay."""
    alone = window_seconds(layout, expr, device, forks=False)
    several = device.unit_count > 1 and layout.task_count > 1
    shared = window_seconds(layout, expr, device, forks=True) if several else None
    if shared is None or alone <= SERIAL_WITHIN * shared:
        yield _tile(layout, forks=False), alone
    if shared is not None:
        yield _tile(layout, forks=True), shared


def _tile(layout: WindowLayout, *, forks: bool) -> WindowTile:
    return WindowTile(
        band=layout.band,
        rows=layout.rows,
        vectors=layout.vectors,
        width=layout.width,
        flat=layout.is_flat,
        forks=forks,
    )


def _bands(window: Window, device: DeviceSpec) -> list[int]:
    """Output rows of a task: those that construction considers, and others whose scratch memory fits a core's L2."""
    extent, room = window.y.extent, Machine(device).own_bytes
    bands = {ceil_div(extent, min(count, extent)) for count in BAND_COUNTS}
    return sorted({*usual_bands(window, device), *(b for b in bands if scratch_bytes(window, b, device) <= room)})
