"""What can be chosen of a window kernel: its layouts as `WindowTile`s, how fast each is expected to be, and its key."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tvm_ext._tvm import ForKind
from tvm_ext.analysis.computations import Computation
from tvm_ext.analysis.tensor_expr import TensorExpr
from tvm_ext.analysis.tile_workload import WINDOWS, tile_machine, without_names
from tvm_ext.analysis.window import Window, WindowAxis
from tvm_ext.cost.window_layouts import WindowLayout, lay_out_window, layouts_of_band, scratch_bytes, usual_bands
from tvm_ext.cost.window_time import predict_window, window_expr, window_seconds
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.devices.machine import Machine
from tvm_ext.errors import IllegalRewrite
from tvm_ext.ir.build_ir import PARALLEL, SERIAL, outer_kind
from tvm_ext.records.measurement import MeasuredWorkload
from tvm_ext.records.serialise import to_json
from tvm_ext.records.tuning import WindowTile
from tvm_ext.support.arithmetic import ceil_div

from .division import multiply_by_reciprocals
from .emit import may_overrun

BAND_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Bands of a plane, beside those that construction considers."""

SERIAL_WITHIN = 1.5
"""One core alone is a candidate where the model has it at most so many times slower than all of them."""


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
    epilogue = multiply_by_reciprocals(window, epilogue).epilogue
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
    epilogue = multiply_by_reciprocals(window, epilogue).epilogue
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
