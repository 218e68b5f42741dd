"""The parts of a CPU operator's kernel whose tiles can be chosen, each with the key under which its tiles are kept.

A build asks for the keys, which say what of all chosen tiles concerns a kernel; a search makes spaces of the parts. So
both look at the same parts. What a part's kernel is made of a chosen tile: `construct_cpu_kernels.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from tvm_ext._tvm import Buffer, PrimFunc
from tvm_ext.analysis.computations import OperatorBody
from tvm_ext.analysis.tile_workload import ATTENTION as ATTENTION_KIND
from tvm_ext.analysis.tile_workload import joint_workload, tile_machine, tile_workload
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.errors import IllegalRewrite
from tvm_ext.records.attention import ATTENTION, Attention
from tvm_ext.records.measurement import MeasuredWorkload
from tvm_ext.records.persistent import CHAIN, ChainVerdict, PanelPlan
from tvm_ext.records.serialise import from_json, to_json
from tvm_ext.records.tuning import JointTiles
from tvm_ext.support.limits import timed_construction

from ..plan.anchors import canonical_anchor
from ..plan.canonical import canonical_rows
from ..plan.chain_choices import chain_workload
from ..plan.chosen_tiles import NO_CHOICES, TileChoices, choosable_groups
from ..plan.plan_kernels import RowGroup, TileGroup
from ..plan.plan_windows import WindowGroup
from .cpu_rows.choices import row_workload
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


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RowPart:
    """Computations that run row by row, as their emitter takes them."""

    rows: RowGroup

    def workload(self, device: DeviceSpec) -> MeasuredWorkload:
        return row_workload(self.rows.computations, device)


ChoosablePart: TypeAlias = TilePart | WindowPart | AttentionPart | ChainPart | RowPart


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
    # Beside products rows take little time, and what is chosen for these alone serves more kernels.
    return parts or [RowPart(rows=canonical_rows(group)) for group in groups if isinstance(group, RowGroup)]


def part_workloads(parts: Iterable[ChoosablePart], device: DeviceSpec) -> dict[str, MeasuredWorkload]:
    """The workloads of ``parts`` by their keys, each once."""
    return {workload.key: workload for workload in (part.workload(device) for part in parts)}


def own_choices(func: PrimFunc, name: str, device: DeviceSpec, tiles: TileChoices) -> TileChoices:
    """What of ``tiles`` concerns the kernel of ``func``: of many, those of its own parts.

    What was chosen for several parts together goes before what was chosen for one of them in other kernels.
    """
    if not tiles:
        return NO_CHOICES
    try:
        with timed_construction():
            own = part_workloads(choosable_parts(func, name), device)
    except IllegalRewrite:
        return NO_CHOICES  # construction does not come to them either, but where the clock ended one of both
    together = tiles.get(joint_workload(list(own.values()), device).key) if len(own) > 1 else None
    apart = {key: tiles[key] for key in own if key in tiles}
    return apart if together is None else {**apart, **_each_of(together, list(own))}


def _each_of(text: str, keys: Sequence[str]) -> TileChoices:
    """The choices of the parts of ``keys`` that ``text`` means; one that is damaged is every part's, to be refused."""
    try:
        parts = from_json(JointTiles, text).parts
        return {key: part for key, part in zip(keys, parts, strict=True) if part}
    except ValueError:
        return dict.fromkeys(keys, text)
