"""3x3 convolutions of step 1 in Winograd's form, where the model expects it to be faster than direct sums."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from tvm_ext.analysis.tile_workload import WINOGRAD, tile_machine
from tvm_ext.errors import IllegalRewrite
from tvm_ext.ir.build_ir import outer_kind
from tvm_ext.records.measurement import MeasuredWorkload
from tvm_ext.records.tuning import WinogradTile

from ..emit.cpu_winograd.emit import emit_winograd
from ..emit.padding import fill_border
from ..plan.context import KernelContext
from ..plan.form import Form, fused_note
from ..plan.plan_kernels import TileGroup
from ..plan.winograd_form import WinogradForm, winograd_form
from .cpu_tiles import TilePart
from .kernel_kind import Candidates, Group, KernelKind, KernelPart

MOST_CANDIDATES = 24
"""Tiles that a search tries, best predicted first: a choice."""


class CpuWinograd(KernelKind):
    name = "Winograd's form"

    def of_group(self, group: Group, context: KernelContext) -> WinogradPart | None:
        form = winograd_form(group, context) if isinstance(group, TileGroup) else None
        if form is None or not isinstance(group, TileGroup):
            return None
        part = WinogradPart(group=group, context=context, form=form)
        return part if part.pays else None


@dataclass(frozen=True, kw_only=True, eq=False)
class WinogradPart(KernelPart[WinogradTile]):
    """A 3x3 convolution with its fused epilogue."""

    tiles = WinogradTile
    group: TileGroup
    context: KernelContext
    form: WinogradForm

    @cached_property
    def _direct(self) -> TilePart:
        return TilePart(group=self.group, context=self.context)

    @property
    def pays(self) -> bool:
        """Whether the model expects more than of direct sums."""
        programs = self._direct.anchor.programs
        return bool(programs) and self.form.pays(programs[0].prediction.time_s)

    def forms(self, chosen: WinogradTile | None = None) -> list[Form]:
        """Raises IllegalRewrite for a ``chosen`` tile that the convolution cannot have."""
        ranked = dict(self.form.ranked)
        tile = chosen or self.form.ranked[0][0]
        if tile not in ranked:
            raise IllegalRewrite(f"{self.group.anchor.name} has no {tile}")
        device = self.context.device
        kind = outer_kind(ranked[tile], device)
        params, asks_ahead = self.context.operator.params, self.form.clock.asks_ahead(tile)
        kernel = emit_winograd(self.form.conv, self.group.epilogue, tile, params, kind, asks_ahead=asks_ahead)
        form = Form(
            path="rtile",
            statements=(*fill_border(self.group.border, device), kernel.statement),
            program=None,
            notes=(self._note(tile),),
            packs=(kernel.pack,),
            expected_s=ranked[tile],
        )
        return [form]

    def _note(self, tile: WinogradTile) -> str:
        direct_us = self._direct.anchor.programs[0].prediction.time_s * 1e6
        return (
            f"{self.group.anchor.name} in Winograd's form F({tile.outputs}x{tile.outputs}, 3x3), {tile.tiles} tiles a "
            f"task in register tiles of {tile.rows} tiles x {tile.vectors} vectors of filters"
            f"{fused_note(self.group.epilogue, self.group.border)}; "
            f"direct sums would take {direct_us:.0f} us by the model"
        )

    def key(self) -> MeasuredWorkload:
        """That of the convolution, and which forms are allowed."""
        context, direct = self.context, self._direct.key()
        structure = f"{context.options.winograd} {direct.structure}"
        return replace(tile_machine(context.device, WINOGRAD), structure=structure, dtype=direct.dtype)

    def candidates(self) -> Candidates[WinogradTile]:
        return Candidates(found=self.form.ranked[:MOST_CANDIDATES], depth=self.form.clock.channels)
