"""The parts of a CPU operator's kernel whose tiles can be chosen, each with the key under which its tiles are kept.

A build asks for the keys, which say what of all chosen tiles concerns a kernel; a search makes spaces of the parts. So
both look at the same parts. What a part's kernel is made of a chosen tile: `construct_cpu_kernels.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from tvm_ext._tvm import Buffer, PrimFunc
from tvm_ext.analysis.computations import OperatorBody
from tvm_ext.analysis.tile_workload import ATTENTION as ATTENTION_KIND
from tvm_ext.analysis.tile_workload import tile_machine, tile_workload
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.errors import IllegalRewrite
from tvm_ext.records.attention import ATTENTION, Attention
from tvm_ext.records.measurement import MeasuredWorkload
from tvm_ext.records.persistent import CHAIN, ChainVerdict, PanelPlan
from tvm_ext.records.serialise import from_json, to_json
from tvm_ext.support.limits import timed_construction

from ..plan.anchors import canonical_anchor
from ..plan.chain_choices import chain_workload
from ..plan.chosen_tiles import NO_CHOICES, TileChoices, choosable_groups
from ..plan.plan_kernels import TileGroup
from ..plan.plan_windows import WindowGroup
from .cpu_windows.choices import window_workload


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TilePart:
    """An anchor in the tiles of an rProgram; ``constants`` are the operator's."""

    group: TileGroup
    operator: OperatorBody
    constants: Sequence[Buffer]

    def workload(self, device: DeviceSpec) -> MeasuredWorkload:
        return tile_workload(canonical_anchor(self.group, self.operator, self.constants)[1], device)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class WindowPart:
    """A depthwise convolution or a pooling, plane by plane."""

    group: WindowGroup

    def workload(self, device: DeviceSpec) -> MeasuredWorkload:
        return window_workload(self.group.window, self.group.epilogue, device)


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionPart:
    """An attention as one kernel."""

    work: Attention

    def workload(self, device: DeviceSpec) -> MeasuredWorkload:
        dtype = ",".join(operand.dtype for operand in self.work.operands)
        return replace(tile_machine(device, ATTENTION_KIND), structure=to_json(self.work), dtype=dtype)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ChainPart:
    """A chain that one kernel computes, in construction's case in ``panels``."""

    operator: OperatorBody
    constants: Sequence[Buffer]
    panels: PanelPlan

    def workload(self, device: DeviceSpec) -> MeasuredWorkload:
        return chain_workload(self.operator, self.constants, device)


ChoosablePart: TypeAlias = TilePart | WindowPart | AttentionPart | ChainPart


def choosable_parts(func: PrimFunc, name: str) -> list[ChoosablePart]:
    """Of ``func``, an unscheduled operator for a CPU; raises IllegalRewrite as construction does."""
    if func.attrs and ATTENTION in func.attrs:
        return [AttentionPart(work=from_json(Attention, str(func.attrs[ATTENTION])))]
    operator, constants, groups = choosable_groups(func, name)
    parts: list[ChoosablePart] = []
    if func.attrs and CHAIN in func.attrs:
        panels = from_json(ChainVerdict, str(func.attrs[CHAIN])).plan
        return [] if panels is None else [ChainPart(operator=operator, constants=constants, panels=panels)]
    for group in groups:
        if isinstance(group, TileGroup):
            parts.append(TilePart(group=group, operator=operator, constants=constants))
        elif isinstance(group, WindowGroup):
            parts.append(WindowPart(group=group))
    return parts


def own_choices(func: PrimFunc, name: str, device: DeviceSpec, tiles: TileChoices) -> TileChoices:
    """What of ``tiles`` concerns the kernel of ``func``: of many, those of its own parts."""
    if not tiles:
        return NO_CHOICES
    try:
        with timed_construction():
            keys = [part.workload(device).key for part in choosable_parts(func, name)]
    except IllegalRewrite:
        return NO_CHOICES  # construction does not come to them either, but where the clock ended one of both
    return {key: tiles[key] for key in keys if key in tiles}
