"""Tiles that were chosen from outside, by measurements say, in place of construction's; and which kernels take one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from tvm_ext._tvm import Buffer, PrimFunc
from tvm_ext.analysis.computations import OperatorBody, read_operator
from tvm_ext.analysis.tensor_expr import TensorExpr
from tvm_ext.analysis.tile_workload import tile_workload
from tvm_ext.cost.cpu_tiles import program_of, tile_of, usual_order
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.errors import IllegalRewrite
from tvm_ext.options import BuildOptions
from tvm_ext.records.attention import ATTENTION
from tvm_ext.records.choice import CONSTANT_PARAMS, KernelChoice
from tvm_ext.records.measurement import MeasuredWorkload
from tvm_ext.records.persistent import CHAIN
from tvm_ext.records.rprogram import RProgram
from tvm_ext.records.serialise import from_json, to_json
from tvm_ext.records.tuning import CpuTile
from tvm_ext.support.arithmetic import ceil_div

from ..roller.construct import Construction
from .alternatives import frugal_programs
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
    narrower: tuple[RProgram, ...] = ()

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
    narrower = tuple(program for program in construction.narrower if program.vector_axis == programs[0].vector_axis)
    return TunableAnchor(expr=expr, workload=tile_workload(expr, device), programs=programs, narrower=narrower)


def frugal_choices(
    func: PrimFunc, name: str, own: KernelChoice, least_tasks: int, device: DeviceSpec, options: BuildOptions
) -> Iterator[TileChoices]:
    """Tiles for ``func`` of less work than those of its ``own`` kernel, the least first.

    Constants are packed in panels as wide as register tiles, and a schedule may choose either kernel for the same
    constants: where there are any, that width stays.
    """
    assert own.program is not None
    for anchor in tunable_anchors(func, name, device, options):
        if anchor.expr.digest == own.program.expr_digest:
            programs = _programs_of(anchor, tile_of(own.program, anchor.expr), bool(own.packs), device)
            for program in frugal_programs(sorted(programs, key=_most_partitions_first), own.program, least_tasks):
                yield {anchor.workload.key: to_json(programs[program])}


def _most_partitions_first(program: RProgram) -> tuple[int, float]:
    return -program.partition_count, program.prediction.time_s


def _programs_of(anchor: TunableAnchor, own: CpuTile, is_packed: bool, device: DeviceSpec) -> dict[RProgram, CpuTile]:
    """The narrower rPrograms of ``anchor``, and the tasks of these in the ``own`` register tiles."""
    found: dict[RProgram, CpuTile] = {}
    for item in anchor.narrower:
        tile = tile_of(item, anchor.expr)
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
    for place, axis in enumerate(expr.spatial):
        count, inner = ceil_div(axis.extent, tile.register[place]), tile.inner[place]
        wanted = other.outer[place] * other.register[place] // tile.register[place]
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
