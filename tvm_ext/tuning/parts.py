"""What can be searched of an operator's kernel: its one part with a choice of tiles, and the space of these."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from tvm_ext._tvm import PrimFunc
from tvm_ext.autotune.cpu_space import CpuTileSpace
from tvm_ext.autotune.listed_space import FieldLevel, ListedSpace
from tvm_ext.autotune.spaces import KernelSpace, SpaceCandidate
from tvm_ext.cost.attention_choices import attention_candidates
from tvm_ext.cost.cpu_tiles import tile_of
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.errors import IllegalRewrite
from tvm_ext.options import BuildOptions
from tvm_ext.records.measurement import MeasuredWorkload
from tvm_ext.support.kernel_cache import params_of
from tvm_ext.tir_passes.emit.cpu_choices import ChainPart, ChoosablePart, TilePart, WindowPart, choosable_parts
from tvm_ext.tir_passes.emit.cpu_windows.choices import window_candidates
from tvm_ext.tir_passes.plan.chain_choices import chain_candidates
from tvm_ext.tir_passes.plan.chosen_tiles import tunable_anchor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TunablePart:
    """``constructed`` is construction's own configuration, ``depth`` how many elements go into one of a result."""

    workload: MeasuredWorkload
    space: KernelSpace[SpaceCandidate]
    constructed: str
    depth: int


def tunable_part(func: PrimFunc, name: str, device: DeviceSpec, options: BuildOptions) -> TunablePart:
    """Of ``func``, an unscheduled operator for a CPU.

    Raises IllegalRewrite, with the reason, where there is nothing to choose, or more than one choice.
    """
    if params_of(func) is None:
        raise IllegalRewrite("its shapes are not fixed")
    found = [made for part in choosable_parts(func, name) if (made := _tunable(part, device, options)) is not None]
    if len(found) != 1:
        raise IllegalRewrite("it has no tiles to choose" if not found else f"{len(found)} products in one kernel")
    return found[0]


def _tunable(part: ChoosablePart, device: DeviceSpec, options: BuildOptions) -> TunablePart | None:
    """None where construction has other kernels than in tiles."""
    if isinstance(part, TilePart):
        return _tiles(part, device, options)
    if isinstance(part, WindowPart):
        window = part.group.window
        depth = window.y.taps * window.x.taps
        return _listed(window_candidates(window, part.group.epilogue, device), part.workload(device), depth)
    if isinstance(part, ChainPart):
        return _chain(part, device, options)
    return _listed(attention_candidates(part.work, device), part.workload(device), part.work.keys + part.work.features)


def _tiles(part: TilePart, device: DeviceSpec, options: BuildOptions) -> TunablePart | None:
    anchor = tunable_anchor(part.group, part.operator, part.constants, device, options)
    if anchor is None:
        return None
    space = CpuTileSpace(anchor.expr, device, [tile_of(program, anchor.expr) for program in anchor.programs])
    if len(space) < 2:
        raise IllegalRewrite("one tile alone is legal")
    depth = prod(axis.extent for axis in anchor.expr.reduction)
    return TunablePart(workload=anchor.workload, space=space, constructed=anchor.constructed.configuration, depth=depth)


def _chain(part: ChainPart, device: DeviceSpec, options: BuildOptions) -> TunablePart:
    found = chain_candidates(part.operator, part.constants, part.panels, device, options)
    sums = [computation for computation in part.operator.computations if computation.is_reduction]
    depth = sum(prod(item.extent(variable) for variable in item.reduction) for item in sums)
    return _listed(found, part.workload(device), max(1, depth), [tiles.levels for tiles, _ in found])


def _listed(
    found: Sequence[tuple[SpaceCandidate, float]],
    workload: MeasuredWorkload,
    depth: int,
    levels: Sequence[Sequence[FieldLevel]] | None = None,
) -> TunablePart:
    """Of candidates with their seconds, construction's own first."""
    space = ListedSpace([candidate for candidate, _ in found], [seconds for _, seconds in found], levels)
    return TunablePart(workload=workload, space=space, constructed=space[0].configuration, depth=depth)
