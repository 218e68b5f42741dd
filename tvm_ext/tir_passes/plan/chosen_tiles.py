"""Tiles that were chosen from outside, by measurements say, in place of construction's; and what takes one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias, TypeVar

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
from .padded_stores import cpu_groups
from .plan_kernels import TileGroup, simplify
from .plan_windows import CpuGroup

TileChoices: TypeAlias = Mapping[str, str]
"""Configurations of `CpuTile`s, `WindowTile`s, `AttentionTiles`, `PanelTiles`, `RowTiles` by their workload's key."""

NO_CHOICES: TileChoices = {}

ChosenRecord = TypeVar("ChosenRecord")
Taken = TypeVar("Taken")

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


def chosen_for(
    kind: type[ChosenRecord],
    tiles: TileChoices,
    workload: Callable[[], MeasuredWorkload],
    take: Callable[[ChosenRecord], Taken],
) -> tuple[Taken | None, tuple[str, ...]]:
    """What ``take`` makes of the configuration that is chosen for ``workload``, and what to say of it.

    None where nothing is chosen, or where ``take`` refuses it by IllegalRewrite: the text then says why.
    """
    text = tiles.get(workload().key) if tiles else None
    if text is None:
        return None, ()
    try:
        return take(from_json(kind, text)), (f"{CHOSEN}{text}",)
    except (IllegalRewrite, ValueError) as refusal:
        return None, (f"{LEFT_OUT}{refusal}",)


def refuse_left_out(notes: Iterable[str]) -> None:
    """Raise IllegalRewrite where one of ``notes`` says that a chosen tile is left out."""
    refused = next((note for note in notes if note.startswith(LEFT_OUT)), None)
    if refused is not None:
        raise IllegalRewrite(refused)


def program_for(
    expr: TensorExpr, construction: Construction, device: DeviceSpec, tiles: TileChoices
) -> tuple[RProgram | None, tuple[str, ...]]:
    """The rProgram to emit for ``expr``, and what to say of a chosen tile; None where no rTile suits an emitter."""
    constructed = next(iter(_with_spatial_vectors(construction, expr)), None)
    if constructed is None:
        return None, ()
    chosen, said = chosen_for(
        CpuTile, tiles, lambda: tile_workload(expr, device), lambda tile: program_of(tile, expr, device)
    )
    return chosen or constructed, said


def _with_spatial_vectors(construction: Construction, expr: TensorExpr) -> tuple[RProgram, ...]:
    spatial = [axis.name for axis in expr.spatial]
    return tuple(program for program in construction.programs if program.vector_axis in spatial)


def choosable_groups(func: PrimFunc, name: str) -> tuple[OperatorBody, list[Buffer], list[CpuGroup]]:
    """``func``, an unscheduled operator for a CPU, with its constants and the groups that become its kernels.

    Chains in panels have none: their panels do. Raises IllegalRewrite as construction does.
    """
    read = read_operator(func, name)
    marked = func.attrs[CONSTANT_PARAMS] if func.attrs and CONSTANT_PARAMS in func.attrs else []
    constants = [read.params[int(i)] for i in marked]
    operator = simplify(read)
    if func.attrs and CHAIN in func.attrs:
        return operator, constants, []
    return operator, constants, cpu_groups(operator)[0]


def tunable_anchors(func: PrimFunc, name: str, device: DeviceSpec, options: BuildOptions) -> tuple[TunableAnchor, ...]:
    """The computations of ``func``, an unscheduled operator for a CPU, that become kernels in tiles of an rProgram.

    Raises IllegalRewrite as construction does.
    """
    if func.attrs and ATTENTION in func.attrs:
        return ()
    operator, constants, groups = choosable_groups(func, name)
    found = [
        tunable_anchor(group, operator, constants, device, options) for group in groups if isinstance(group, TileGroup)
    ]
    return tuple(item for item in found if item is not None)


def tunable_anchor(
    group: TileGroup, operator: OperatorBody, constants: Sequence[Buffer], device: DeviceSpec, options: BuildOptions
) -> TunableAnchor | None:
    """None where no rProgram suits the emitter."""
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
