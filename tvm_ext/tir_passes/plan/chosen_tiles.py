"""Tiles that were chosen from outside, by measurements say, in place of construction's; and which kernels take one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from tvm_ext._tvm import Buffer, PrimFunc
from tvm_ext.analysis.computations import OperatorBody, read_operator
from tvm_ext.analysis.tensor_expr import TensorExpr
from tvm_ext.analysis.tile_workload import tile_workload
from tvm_ext.cost.cpu_tiles import program_of, tile_of
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.errors import IllegalRewrite
from tvm_ext.options import BuildOptions
from tvm_ext.records.attention import ATTENTION
from tvm_ext.records.choice import CONSTANT_PARAMS
from tvm_ext.records.measurement import MeasuredWorkload
from tvm_ext.records.persistent import CHAIN
from tvm_ext.records.rprogram import RProgram
from tvm_ext.records.serialise import from_json
from tvm_ext.records.tuning import CpuTile

from ..roller.construct import Construction
from .anchors import construct_anchor
from .plan_kernels import TileGroup, plan, simplify
from .plan_windows import take_windows

TileChoices: TypeAlias = Mapping[str, str]
"""Configurations of `CpuTile`s by the key of their `tile_workload`."""

NO_CHOICES: TileChoices = {}

CHOSEN, LEFT_OUT = "tile chosen by measurement: ", "a chosen tile is left out: "
"""How a kernel's notes say it."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TunableAnchor:
    """A kernel's computation whose tile can be chosen, and what Roller constructs for it, best predicted first."""

    expr: TensorExpr
    workload: MeasuredWorkload
    programs: tuple[RProgram, ...]

    @property
    def constructed(self) -> CpuTile:
        """The tile that is taken where nothing is chosen."""
        return tile_of(self.programs[0], self.expr)


def program_for(
    expr: TensorExpr, construction: Construction, device: DeviceSpec, tiles: TileChoices
) -> tuple[RProgram | None, tuple[str, ...]]:
    """The rProgram to emit for ``expr``, and what to say of a chosen tile; None where no rTile suits an emitter."""
    constructed = next(iter(_with_spatial_vectors(construction, expr)), None)
    text = tiles.get(tile_workload(expr, device).key) if tiles and constructed is not None else None
    if text is None:
        return constructed, ()
    try:
        return program_of(from_json(CpuTile, text), expr, device), (f"{CHOSEN}{text}",)
    except (IllegalRewrite, ValueError) as refusal:
        return constructed, (f"{LEFT_OUT}{refusal}",)


def _with_spatial_vectors(construction: Construction, expr: TensorExpr) -> tuple[RProgram, ...]:
    spatial = [axis.name for axis in expr.spatial]
    return tuple(program for program in construction.programs if program.vector_axis in spatial)


def tunable_anchors(func: PrimFunc, name: str, device: DeviceSpec, options: BuildOptions) -> tuple[TunableAnchor, ...]:
    """The computations of ``func``, an unscheduled operator for a CPU, whose tiles can be chosen.

    Attention and chains in panels have none: their own emitters fix the tiles. Raises IllegalRewrite as
    construction does.
    """
    if func.attrs and (ATTENTION in func.attrs or CHAIN in func.attrs):
        return ()
    read = read_operator(func, name)
    marked = func.attrs[CONSTANT_PARAMS] if func.attrs and CONSTANT_PARAMS in func.attrs else []
    constants = [read.params[int(i)] for i in marked]
    operator = simplify(read)
    groups, _ = take_windows(plan(operator), operator)
    found = [_anchor(group, operator, constants, device, options) for group in groups if isinstance(group, TileGroup)]
    return tuple(item for item in found if item is not None)


def _anchor(
    group: TileGroup, operator: OperatorBody, constants: Sequence[Buffer], device: DeviceSpec, options: BuildOptions
) -> TunableAnchor | None:
    _, expr, construction = construct_anchor(group, operator, constants, device, options)
    programs = _with_spatial_vectors(construction, expr)
    if not programs:
        return None
    return TunableAnchor(expr=expr, workload=tile_workload(expr, device), programs=programs)
