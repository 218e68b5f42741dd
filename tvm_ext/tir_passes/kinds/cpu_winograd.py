"""3x3 convolutions of step 1 in Winograd's form, where the model expects it to be faster than direct sums."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from tvm_ext.analysis.predicates import is_in
from tvm_ext.analysis.tile_workload import WINOGRAD, tile_machine
from tvm_ext.analysis.winograd import Convolution, find_convolution
from tvm_ext.cost.winograd_time import WinogradClock
from tvm_ext.errors import IllegalRewrite
from tvm_ext.ir.build_ir import lanes_of, outer_kind
from tvm_ext.records.measurement import MeasuredWorkload
from tvm_ext.records.tuning import WinogradTile

from ..emit.cpu_winograd.emit import emit_winograd
from ..emit.padding import fill_border
from ..plan.anchors import packable_constants
from ..plan.context import KernelContext
from ..plan.form import Form, fused_note
from ..plan.plan_kernels import TileGroup
from .cpu_tiles import TilePart
from .kernel_kind import Candidates, Group, KernelKind, KernelPart

OUTPUTS = {"auto": (2,), "fast": (2, 4)}
"""Outputs of a tile along an axis, by the option ``winograd``: F(4x4) errs more (docs/numerics.md)."""

GAIN = 1.15
"""How many times faster than direct sums by the model. A choice: on a Zen 4 the model is 1.1 to 1.25 times too slow
for direct sums, and within 1.1 for this form."""

MOST_CANDIDATES = 24
"""Tiles that a search tries, best predicted first: a choice."""


class CpuWinograd(KernelKind):
    name = "Winograd's form"

    def of_group(self, group: Group, context: KernelContext) -> WinogradPart | None:
        if not isinstance(group, TileGroup) or context.options.winograd == "off":
            return None
        conv = find_convolution(group.anchor)
        lanes = lanes_of("float32", context.device.register_bytes)
        if conv is None or conv.extents(conv.filters[1], conv.channels[1]) != [lanes, lanes]:
            return None
        if not is_in(conv.weights.source, packable_constants(context.operator, context.constants)):
            return None
        part = WinogradPart(group=group, context=context, conv=conv)
        return part if part.pays else None


@dataclass(frozen=True, kw_only=True, eq=False)
class WinogradPart(KernelPart[WinogradTile]):
    """A 3x3 convolution with its fused epilogue."""

    tiles = WinogradTile
    group: TileGroup
    context: KernelContext
    conv: Convolution

    @cached_property
    def clock(self) -> WinogradClock:
        return WinogradClock(self.conv, self.context.device)

    @cached_property
    def _ranked(self) -> list[tuple[WinogradTile, float]]:
        """All tiles, each with the model's seconds, the fastest first."""
        allowed = OUTPUTS[self.context.options.winograd]
        timed = [(tile, self.clock.seconds(tile)) for outputs in allowed for tile in self.clock.tiles(outputs)]
        return sorted(timed, key=lambda item: item[1])

    @cached_property
    def _direct(self) -> TilePart:
        return TilePart(group=self.group, context=self.context)

    @property
    def pays(self) -> bool:
        """Whether the model expects `GAIN`."""
        programs = self._direct.anchor.programs
        return bool(programs) and self._ranked[0][1] * GAIN < programs[0].prediction.time_s

    def forms(self, chosen: WinogradTile | None = None) -> list[Form]:
        """Raises IllegalRewrite for a ``chosen`` tile that the convolution cannot have."""
        ranked = dict(self._ranked)
        tile = chosen or self._ranked[0][0]
        if tile not in ranked:
            raise IllegalRewrite(f"{self.group.anchor.name} has no {tile}")
        device = self.context.device
        kind = outer_kind(ranked[tile], device)
        params, asks_ahead = self.context.operator.params, self.clock.asks_ahead(tile)
        kernel = emit_winograd(self.conv, self.group.epilogue, tile, params, kind, asks_ahead=asks_ahead)
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
        return Candidates(found=self._ranked[:MOST_CANDIDATES], depth=self.clock.channels)
