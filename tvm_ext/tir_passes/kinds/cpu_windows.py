"""Depthwise convolutions and poolings, plane by plane: what slides a window over single planes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from tvm_ext._tvm import ForKind, Stmt
from tvm_ext.analysis.computations import Computation
from tvm_ext.analysis.tensor_expr import TensorExpr
from tvm_ext.analysis.tile_workload import WINDOWS, tile_machine, without_names
from tvm_ext.analysis.window import WindowAxis
from tvm_ext.cost.blocked_window_time import BlockedWindowClock
from tvm_ext.cost.window_layouts import WindowLayout
from tvm_ext.cost.window_time import WindowClock
from tvm_ext.errors import IllegalRewrite
from tvm_ext.ir.build_ir import PARALLEL, SERIAL, outer_kind
from tvm_ext.records.measurement import MeasuredWorkload
from tvm_ext.records.serialise import to_json
from tvm_ext.records.tuning import WindowTile
from tvm_ext.support.arithmetic import ceil_div

from ..emit.cpu_windows.blocked import emit_blocked_window
from ..emit.cpu_windows.division import multiply_by_reciprocals
from ..emit.cpu_windows.emit import emit_window, may_overrun
from ..emit.padding import fill_border
from ..plan.anchors import packable_constants
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

    def of_group(self, group: Group, context: KernelContext) -> WindowPart | BlockedWindowPart | None:
        if not isinstance(group, WindowGroup):
            return None
        part = WindowPart if group.window.lane is None else BlockedWindowPart
        return part(group=group, context=context)


@dataclass(frozen=True, kw_only=True, eq=False)
class WindowPart(KernelPart[WindowTile]):
    """A depthwise convolution or a pooling with its fused epilogue."""

    tiles = WindowTile
    group: WindowGroup
    context: KernelContext

    @cached_property
    def _divided(self) -> tuple[tuple[Computation, ...], tuple[Stmt, ...]]:
        """The epilogue as it is emitted, divisions by window sizes being multiplications, and their tables."""
        return multiply_by_reciprocals(self.group.window, self.group.epilogue)

    @cached_property
    def clock(self) -> WindowClock:
        window, epilogue = self.group.window, self._divided[0]
        return WindowClock(window, epilogue, self.context.device, may_overrun=may_overrun(window, epilogue))

    def forms(self, chosen: WindowTile | None = None) -> list[Form]:
        """Raises IllegalRewrite for a ``chosen`` tile that does not fit; None is construction's own."""
        layout, kind = self._usual if chosen is None else self.layout_of(chosen)
        epilogue, tables = self._divided
        statements = (*tables, emit_window(layout, epilogue, kind))
        note = layout.describe() + fused_note(self.group.epilogue)
        return [Form(path="rtile", statements=statements, program=self.clock.program(layout), notes=(note,))]

    @cached_property
    def _usual(self) -> tuple[WindowLayout, ForKind]:
        layout = self.clock.usual_layout()
        return layout, outer_kind(self.clock.predict(layout).busy_s, self.context.device)

    def key(self) -> MeasuredWorkload:
        """Names do not count."""
        window, expr = self.group.window, self.clock.expr
        structure = _WindowStructure(
            expression=without_names(expr),
            rows=_numbers(window.y),
            columns=_numbers(window.x),
            padding="" if window.pad is None else str(float(window.pad_value.value)),
            overruns=self.clock.may_overrun,
        )
        dtype = ",".join((*(access.dtype for access in expr.inputs), expr.output.dtype))
        return replace(tile_machine(self.context.device, WINDOWS), structure=to_json(structure), dtype=dtype)

    def candidates(self) -> Candidates[WindowTile]:
        """All choices with the seconds that the model expects of each, construction's own first."""
        window, (usual, kind) = self.group.window, self._usual
        forks = kind == PARALLEL
        found = {_tile(usual, forks=forks): self.clock.seconds(usual, forks=forks)}
        for band in self._bands():
            for layout in self.clock.layouts(band):
                for tile, seconds in self._cuts(layout):
                    found.setdefault(tile, seconds)
        return Candidates(found=list(found.items()), depth=window.y.taps * window.x.taps)

    def layout_of(self, tile: WindowTile) -> tuple[WindowLayout, ForKind]:
        """The layout that ``tile`` means and the kind of its outer loop; raises IllegalRewrite where there is none."""
        window = self.group.window
        name = window.anchor.name
        if tile.band not in self._bands():
            rows = f"tasks of {tile.band} of {window.y.extent} rows"
            raise IllegalRewrite(f"{name}: {rows}, which {tile} wants, do not fit")
        if tile.forks and self.context.device.unit_count == 1:
            raise IllegalRewrite(f"{name}: there is one core alone, and {tile} wants several")
        for layout in self.clock.layouts(tile.band):
            if _tile(layout, forks=tile.forks) == tile:
                return layout, PARALLEL if tile.forks else SERIAL
        raise IllegalRewrite(f"{name}: {tile} is no register tile of bands of {tile.band} x {window.x.extent}")

    def _cuts(self, layout: WindowLayout) -> Iterator[tuple[WindowTile, float]]:
        """A layout on one core, and on all where there are several: each where it may pay."""
        alone = self.clock.seconds(layout, forks=False)
        several = self.context.device.unit_count > 1 and layout.task_count > 1
        shared = self.clock.seconds(layout, forks=True) if several else None
        if shared is None or alone <= SERIAL_WITHIN * shared:
            yield _tile(layout, forks=False), alone
        if shared is not None:
            yield _tile(layout, forks=True), shared

    def _bands(self) -> list[int]:
        """Output rows of a task: construction's, and others whose scratch memory fits a core's L2."""
        extent, clock = self.group.window.y.extent, self.clock
        bands = {ceil_div(extent, min(count, extent)) for count in BAND_COUNTS}
        return sorted({*clock.usual_bands(), *(b for b in bands if clock.scratch_bytes(b) <= clock.machine.own_bytes)})


@dataclass(frozen=True, kw_only=True, slots=True)
class _WindowStructure:
    """All that decides how fast a layout is."""

    expression: TensorExpr
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    padding: str
    overruns: bool


def _numbers(axis: WindowAxis) -> tuple[int, ...]:
    return (axis.extent, axis.taps, axis.stride, axis.dilation, axis.before, axis.first, axis.size)


def _tile(layout: WindowLayout, *, forks: bool) -> WindowTile:
    return WindowTile(
        band=layout.band, rows=layout.rows, vectors=layout.vectors, width=layout.width, flat=layout.is_flat, forks=forks
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class BlockedWindowPart(KernelPart[None]):
    """A depthwise convolution or a pooling of channel blocks with its fused epilogue."""

    group: WindowGroup
    context: KernelContext

    def forms(self, chosen: None = None) -> list[Form]:
        window, device = self.group.window, self.context.device
        epilogue, tables = multiply_by_reciprocals(window, self.group.epilogue)
        clock = BlockedWindowClock(window, epilogue, device)
        tile = clock.usual_tile()
        seconds = clock.seconds(tile)
        constants = packable_constants(self.context.operator, self.context.constants)
        kernel = emit_blocked_window(
            window, epilogue, tile, outer_kind(seconds, device), self.context.operator.params, constants
        )
        note = f"{window.anchor.name} in register tiles of {tile.columns} columns, bands of {tile.band} rows"
        form = Form(
            path="rtile",
            statements=(*fill_border(self.group.border, device), *tables, kernel.statement),
            program=None,
            notes=(f"{note}, channels in blocks{fused_note(self.group.epilogue, self.group.border)}",),
            packs=kernel.packs,
            expected_s=seconds,
        )
        return [form]
