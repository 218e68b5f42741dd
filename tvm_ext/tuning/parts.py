"""What can be searched of an operator's kernel: its parts with a choice of tiles, and the space of these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from itertools import product

from tvm_ext._tvm import PrimFunc
from tvm_ext.analysis.tile_workload import joint_workload
from tvm_ext.autotune.cpu_space import CpuTileSpace
from tvm_ext.autotune.listed_space import FieldLevel, ListedSpace
from tvm_ext.autotune.spaces import KernelSpace, SpaceCandidate
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.errors import IllegalRewrite
from tvm_ext.options import BuildOptions
from tvm_ext.records.measurement import MeasuredWorkload
from tvm_ext.records.tuning import JointTiles
from tvm_ext.support.kernel_cache import params_of
from tvm_ext.tir_passes.kinds.kernel_kind import NO_CHOICE, AnyPart
from tvm_ext.tir_passes.kinds.registry import tunable_parts, workloads_of
from tvm_ext.tir_passes.plan.context import UnscheduledOperator

MOST_COMBINATIONS = 1024
"""Of a kernel of several parts; each part has as many candidates as leave that."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TunablePart:
    """``constructed`` is construction's own configuration, ``depth`` how many elements go into one of a result."""

    workload: MeasuredWorkload
    space: KernelSpace[SpaceCandidate]
    constructed: str
    depth: int


def tunable_part(func: PrimFunc, name: str, device: DeviceSpec, options: BuildOptions) -> TunablePart:
    """Of ``func``, an unscheduled operator for a CPU; where several parts have a choice, of all of them together.

    Raises IllegalRewrite, with the reason, where there is nothing to choose.
    """
    if params_of(func) is None:
        raise IllegalRewrite("its shapes are not fixed")
    operator = UnscheduledOperator(func=func, name=name, device=device, options=options)
    parts = {part.key().key: part for part in tunable_parts(operator)}
    made = {key: _tunable_or_why(part) for key, part in parts.items()}
    found = [item for item in made.values() if isinstance(item, TunablePart)]
    if not found:
        raise IllegalRewrite(next((item for item in made.values() if isinstance(item, str)), NO_CHOICE))
    return found[0] if len(found) == 1 else _joint(made, workloads_of(parts.values()), device)


def _tunable_or_why(part: AnyPart) -> TunablePart | str:
    """Or why there is nothing to choose: construction has other kernels than in tiles, say."""
    try:
        return _tunable(part)
    except IllegalRewrite as refusal:
        return refusal.problem


def _tunable(part: AnyPart) -> TunablePart:
    """Raises IllegalRewrite where there is nothing to choose."""
    offered, workload = part.candidates(), part.key()
    if offered.expr is None:
        return _listed(offered.found, workload, offered.depth, offered.levels)
    space = CpuTileSpace(offered.expr, part.context.device, [tile for tile, _ in offered.found])
    if len(space) < 2:
        raise IllegalRewrite("one tile alone is legal")
    constructed = offered.found[0][0].configuration
    return TunablePart(workload=workload, space=space, constructed=constructed, depth=offered.depth)


def _joint(
    parts: Mapping[str, TunablePart | str], workloads: Mapping[str, MeasuredWorkload], device: DeviceSpec
) -> TunablePart:
    """Combinations of what is predicted best for each part."""
    found = [part for part in parts.values() if isinstance(part, TunablePart)]
    most = max(2, int(MOST_COMBINATIONS ** (1 / len(found))))
    columns = [_best(part, most) if isinstance(part, TunablePart) else [("", 0.0, ())] for part in parts.values()]
    candidates, levels = [], []
    for combination in product(*columns):
        texts, seconds, numbers = zip(*combination, strict=True)
        candidates.append((JointTiles(parts=texts), sum(seconds)))
        levels.append([number for own in numbers for number in own])
    workload = joint_workload(list(workloads.values()), device)
    return _listed(candidates, workload, max(item.depth for item in found), levels)


def _best(part: TunablePart, most: int) -> list[tuple[str, float, tuple[FieldLevel, ...]]]:
    """Configurations with their seconds and their numbers: construction's, then those that are predicted best."""
    own, predicted = part.space.index(part.constructed), part.space.predictions
    assert own is not None
    places = dict.fromkeys([own, *predicted.ranking[:most].tolist()])
    items = [(part.space[place], float(predicted.time_s[place])) for place in list(places)[:most]]
    return [(item.configuration, seconds, numbers_of(item)) for item, seconds in items]


def numbers_of(record: object) -> tuple[FieldLevel, ...]:
    """All numbers, truths and words of a record, those inside its fields in their place."""
    if is_dataclass(record):
        return tuple(number for field in fields(record) for number in numbers_of(getattr(record, field.name)))
    if isinstance(record, tuple):
        return tuple(number for item in record for number in numbers_of(item))
    assert isinstance(record, int | float | str)
    return (record,)


def _listed(
    found: Sequence[tuple[SpaceCandidate, float]],
    workload: MeasuredWorkload,
    depth: int,
    levels: Sequence[Sequence[FieldLevel]] | None = None,
) -> TunablePart:
    """Of candidates with their seconds, construction's own first."""
    space = ListedSpace([candidate for candidate, _ in found], [seconds for _, seconds in found], levels)
    return TunablePart(workload=workload, space=space, constructed=space[0].configuration, depth=depth)
