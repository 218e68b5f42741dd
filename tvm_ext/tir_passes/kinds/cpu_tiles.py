"""Reductions with data reuse, in the register tiles of an rProgram."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from tvm_ext.analysis.computations import Computation
from tvm_ext.analysis.live_taps import live_taps
from tvm_ext.analysis.tensor_expr import TensorExpr
from tvm_ext.analysis.tile_workload import tile_workload
from tvm_ext.analysis.window import is_padding
from tvm_ext.cost.cpu_tiles import program_of, tile_of, usual_order
from tvm_ext.cost.dot_products import dot_product
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.errors import IllegalRewrite
from tvm_ext.records.choice import KernelChoice
from tvm_ext.records.measurement import MeasuredWorkload
from tvm_ext.records.rprogram import RProgram
from tvm_ext.records.serialise import to_json
from tvm_ext.records.tuning import CpuTile
from tvm_ext.support.arithmetic import ceil_div

from ..emit.cpu_tiles.emit import emit_tile_kernel
from ..emit.padding import fill_border
from ..plan.alternatives import frugal_programs
from ..plan.anchors import Anchor, canonical_anchor, construct_anchor
from ..plan.canonical import canonical_rows
from ..plan.chosen_tiles import TileChoices
from ..plan.context import KernelContext
from ..plan.form import Form, fused_note
from ..plan.panel import PanelView, check_runs, check_strides
from ..plan.plan_kernels import RowGroup, TileGroup
from .cpu_rows import RowPart
from .kernel_kind import NO_CHOICE, Candidates, Group, KernelKind, KernelPart


class CpuTiles(KernelKind):
    name = "register tiles"

    def of_group(self, group: Group, context: KernelContext) -> TilePart | None:
        if not isinstance(group, TileGroup):
            return None
        return TilePart(group=group, context=context, pads=tuple(filter(is_padding, context.operator.computations)))


@dataclass(frozen=True, kw_only=True, eq=False)
class TilePart(KernelPart[CpuTile]):
    """An anchor with its fused epilogue.

    ``views`` are those of a panel, where it is one, and ``usual`` goes before what is best for the product alone.
    ``pads`` are the paddings of whole tensors: what meets them alone is left out.
    """

    tiles = CpuTile
    group: TileGroup
    context: KernelContext
    views: tuple[PanelView, ...] = ()
    usual: RProgram | None = None
    pads: tuple[Computation, ...] = ()

    @cached_property
    def anchor(self) -> Anchor:
        return construct_anchor(self.group, self.context)

    def forms(self, chosen: CpuTile | None = None) -> list[Form]:
        anchor, device = self.anchor, self.context.device
        check_runs(anchor.computation, self.views)
        dot = dot_product(anchor.expr, device)
        if dot is not None and dot.rows is not None and not dot.pieces:
            own = [anchor.computation.variables[place] for place in (dot.rows, *dot.axes)]
            check_strides(anchor.computation, self.views, own)
        constructed = next(iter(anchor.programs), None)
        if constructed is None:
            if chosen is not None:
                raise IllegalRewrite(f"{self.group.anchor.name} has no register tiles")
            return self._row_by_row()
        program = program_of(chosen, anchor.expr, device) if chosen else self.usual or constructed
        group, params = self.group, self.context.operator.params
        live = live_taps(anchor.computation, self.pads)
        kernel = emit_tile_kernel(anchor.computation, anchor.expr, group.epilogue, program, device, params, live)
        note = f"{group.anchor.name} in register tiles {program.tile('L0')}" + fused_note(group.epilogue, group.border)
        note += ", by the taps that meet an element" if live else ""
        note += f", by {dot.instruction.name}" if dot is not None and dot.rows is not None else ""
        form = Form(
            path="rtile",
            statements=(*fill_border(group.border, device), *kernel.statements),
            program=program,
            notes=(*anchor.construction.notes, note),
            packs=kernel.packs,
        )
        return [form]

    def _row_by_row(self) -> list[Form]:
        """An anchor that no rTile suits (of a single point, say) comes before its epilogue."""
        behind = self.group.epilogue if self.group.border is None else (self.group.border,)
        single = [canonical_rows(RowGroup(computations=(alone,))) for alone in (self.group.anchor, *behind)]
        first, *rest = [form for rows in single for form in RowPart(rows=rows, context=self.context).forms()]
        return [replace(first, notes=(*self.anchor.construction.notes, *first.notes)), *rest]

    def key(self) -> MeasuredWorkload:
        expr = canonical_anchor(self.group, self.context.operator, self.context.constants, self.context.device)[1]
        return tile_workload(expr, self.context.device)

    def candidates(self) -> Candidates[CpuTile]:
        expr = self.anchor.expr
        if not self.anchor.programs:
            raise IllegalRewrite(NO_CHOICE)
        found = [(tile_of(program, expr), program.prediction.time_s) for program in self.anchor.programs]
        return Candidates(found=found, depth=prod(axis.extent for axis in expr.reduction), expr=expr)

    def less_work(self, own: KernelChoice, least_tasks: int) -> Iterator[TileChoices]:
        """Constants are packed in panels as wide as register tiles, and a schedule may choose either kernel for the
        same constants: where there are any, that width stays.
        """
        assert own.program is not None
        anchor = self.anchor
        if not anchor.programs or anchor.expr.digest != own.program.expr_digest:
            return
        tile, device = tile_of(own.program, anchor.expr), self.context.device
        programs = _programs_of(anchor, tile, bool(own.packs), device)
        for program in frugal_programs(sorted(programs, key=_most_partitions_first), own.program, least_tasks):
            yield {self.key().key: to_json(programs[program])}


def _most_partitions_first(program: RProgram) -> tuple[int, float]:
    return -program.partition_count, program.prediction.time_s


def _programs_of(anchor: Anchor, own: CpuTile, is_packed: bool, device: DeviceSpec) -> dict[RProgram, CpuTile]:
    """The narrower rPrograms of ``anchor``, and the tasks of these in the ``own`` register tiles."""
    found: dict[RProgram, CpuTile] = {}
    vector = anchor.programs[0].vector_axis
    for narrower in (program for program in anchor.construction.narrower if program.vector_axis == vector):
        tile = tile_of(narrower, anchor.expr)
        for one in (_as_wide(tile, own, anchor.expr) if is_packed else tile, _with_tasks(own, tile, anchor.expr)):
            program = _program_or_none(one, anchor.expr, device)
            found |= {} if program is None else {program: one}
    return found


def _program_or_none(tile: CpuTile, expr: TensorExpr, device: DeviceSpec) -> RProgram | None:
    """None where ``tile`` takes too many registers in the width that it was given."""
    try:
        return program_of(tile, expr, device)
    except IllegalRewrite:
        return None


def _with_tasks(tile: CpuTile, other: CpuTile, expr: TensorExpr) -> CpuTile:
    """``tile`` with tasks about as large as those of ``other``, in whole blocks of its own."""
    outer = []
    for position, axis in enumerate(expr.spatial):
        count, inner = ceil_div(axis.extent, tile.register[position]), tile.inner[position]
        wanted = other.outer[position] * other.register[position] // tile.register[position]
        outer.append(count if wanted >= count else max(inner, wanted // inner * inner))
    return replace(tile, outer=tuple(outer))


def _as_wide(tile: CpuTile, other: CpuTile, expr: TensorExpr) -> CpuTile:
    """``tile`` with registers as wide as those of ``other``, of about as many elements in blocks and tasks."""
    place, width = tile.vector, other.register[tile.vector]
    count = ceil_div(expr.spatial[place].extent, width)
    inner = min(count, max(1, tile.inner[place] * tile.register[place] // width))
    outer = tile.outer[place] * tile.register[place] // width
    outer = count if outer >= count else max(inner, outer // inner * inner)
    register = _put(tile.register, place, width)
    order = usual_order(expr, register)
    return replace(
        tile, register=register, inner=_put(tile.inner, place, inner), outer=_put(tile.outer, place, outer), order=order
    )


def _put(sizes: tuple[int, ...], place: int, size: int) -> tuple[int, ...]:
    return (*sizes[:place], size, *sizes[place + 1 :])
