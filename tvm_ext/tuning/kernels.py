"""The kernels of a model that have a choice of tiles: as tasks of a search, and as jobs to be measured.

`tunable_part` says what can be searched of an operator's kernel: the part with a choice of tiles, and its space.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from itertools import product

from tvm_ext._tvm import GlobalVar, IRModule, PrimFunc, Sequential, Target, save_json
from tvm_ext.analysis.computations import read_operator
from tvm_ext.analysis.tile_workload import joint_workload
from tvm_ext.autotune.cpu_space import CpuTileSpace
from tvm_ext.autotune.gpu_space import MatrixTileSpace, product_of, vector_space
from tvm_ext.autotune.spaces import FieldLevel, KernelSpace, ListedSpace, SpaceCandidate, TuningTask, distinct
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.errors import IllegalRewrite
from tvm_ext.options import BuildOptions
from tvm_ext.records.choice import CHOICE, KernelChoice
from tvm_ext.records.kernel_job import JobArgument, KernelJob
from tvm_ext.records.measurement import MeasuredWorkload
from tvm_ext.records.serialise import from_json
from tvm_ext.records.tuning import JointTiles
from tvm_ext.support.kernel_cache import params_of
from tvm_ext.tir_passes.construct_kernels import construct_kernel
from tvm_ext.tir_passes.kinds.kernel_kind import NO_CHOICE, AnyPart
from tvm_ext.tir_passes.kinds.registry import own_choices, tunable_parts, workloads_of
from tvm_ext.tir_passes.plan.chosen_tiles import CHOSEN, refuse_left_out
from tvm_ext.tir_passes.plan.context import UnscheduledOperator
from tvm_ext.tir_passes.plan.form import unscheduled
from tvm_ext.tir_passes.serialise_loops import SerialiseLoops

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
    """Of ``func``, an unscheduled operator; where several parts of a CPU's have a choice, of all of them together.

    Of a GPU's, the part of most work. Raises IllegalRewrite, with the reason, where there is nothing to choose.
    """
    if params_of(func) is None:
        raise IllegalRewrite("its shapes are not fixed")
    operator = UnscheduledOperator(func=func, name=name, device=device, options=options)
    if device.kind != "cpu":
        return _gpu_part(operator)
    parts = {part.key().key: part for part in tunable_parts(operator)}
    made = {key: _tunable_or_why(part) for key, part in parts.items()}
    found = [item for item in made.values() if isinstance(item, TunablePart)]
    if not found:
        raise IllegalRewrite(next((item for item in made.values() if isinstance(item, str)), NO_CHOICE))
    return found[0] if len(found) == 1 else _joint(made, workloads_of(parts.values()), device)


def _gpu_part(operator: UnscheduledOperator) -> TunablePart:
    """The part whose tile the constructed kernel's record names; raises IllegalRewrite where that has none."""
    device, options = operator.device, operator.options
    choice = _choice_of(construct_kernel(operator.func, operator.name, device, options))
    part = next((part for part in tunable_parts(operator) if part.key().key == choice.workload), None)
    if choice.tile is None or part is None:
        raise IllegalRewrite(f"{NO_CHOICE}: {choice.reason}")
    offered = part.candidates()
    assert offered.expr is not None
    tiles = [choice.tile, *(tile for tile, _ in offered.found if tile != choice.tile)]
    space: KernelSpace[SpaceCandidate]
    if choice.tile.matrix:
        space = MatrixTileSpace(product_of(offered.expr), device, tiles)
    else:
        space = vector_space(offered.expr, device, tiles)
    return TunablePart(workload=part.key(), space=space, constructed=choice.tile.configuration, depth=offered.depth)


def measured_as(func: PrimFunc, kernel: PrimFunc, name: str, device: DeviceSpec) -> tuple[MeasuredWorkload, str] | None:
    """Under which workload and configuration builds look for times of ``kernel``, a GPU's of the unscheduled ``func``.

    None where nothing of it can be chosen.
    """
    choice = _choice_of(kernel)
    if choice.tile is None:
        return None
    operator = UnscheduledOperator(func=func, name=name, device=device, options=BuildOptions())
    workload = workloads_of(tunable_parts(operator)).get(choice.workload)
    return None if workload is None else (workload, choice.tile.configuration)


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


FUNCTION = "kernel"
"""The name of the function in every job."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TunableKernel:
    """An operator of a model, unscheduled, with the one part whose tile is searched."""

    func: PrimFunc
    name: str
    part: TunablePart


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TunableModel:
    """What of a model can be tuned: tasks, their kernels by the workload's key, and why other operators have none."""

    tasks: tuple[TuningTask, ...]
    kernels: Mapping[str, TunableKernel]
    untuned: tuple[tuple[str, str], ...]


def tunable_model(
    operators: IRModule, calls: Mapping[str, int], device: DeviceSpec, options: BuildOptions
) -> TunableModel:
    """Of ``operators``, unscheduled functions with their constant parameters marked, called so often in one run."""
    tasks: list[TuningTask] = []
    kernels: dict[str, TunableKernel] = {}
    untuned: list[tuple[str, str]] = []
    other_us = 0.0
    for variable, func in unscheduled(operators):
        name = str(variable.name_hint)
        count = calls.get(name, 0)
        try:
            part = tunable_part(func, name, device, options)
            choice = _choice_with(part, part.constructed, func, name, device, options)[1]
        except IllegalRewrite as refusal:
            untuned.append((name, refusal.problem))
            other_us += count * _predicted_us(_choice_of(construct_kernel(func, name, device, options)))
            continue
        kernels.setdefault(part.workload.key, TunableKernel(func=func, name=name, part=part))
        task = TuningTask(
            name=name, workload=part.workload, space=part.space, constructed=part.constructed,
            calls=count, predicted_us=_predicted_us(choice),
        )  # fmt: skip
        tasks.append(task)
    return TunableModel(tasks=distinct(tasks, other_us), kernels=kernels, untuned=tuple(untuned))


def _choice_with(
    part: TunablePart, configuration: str, func: PrimFunc, name: str, device: DeviceSpec, options: BuildOptions
) -> tuple[PrimFunc, KernelChoice]:
    """The kernel with the tile ``configuration``; raises IllegalRewrite where it is not made with that."""
    operator = UnscheduledOperator(func=func, name=name, device=device, options=options)
    tiles = own_choices(operator, {part.workload.key: configuration})
    made = construct_kernel(func, name, device, options, tiles)
    choice = _choice_of(made)
    refuse_left_out(choice.notes)
    if choice.tile is not None and choice.tile.configuration != configuration:
        raise IllegalRewrite(f"it is made as {choice.tile}: {choice.reason}")
    if not any(note.startswith(CHOSEN) for note in choice.notes):
        raise IllegalRewrite(f"it is not made in tiles that can be chosen: {choice.reason}")
    return made, choice


def _choice_of(kernel: PrimFunc) -> KernelChoice:
    return from_json(KernelChoice, str(kernel.attrs[CHOICE]))


def _predicted_us(choice: KernelChoice) -> float:
    """Of one call, microseconds; 0 where it has no prediction."""
    if choice.expected_s is not None:
        return 1e6 * choice.expected_s
    return 0.0 if choice.program is None else 1e6 * choice.program.prediction.time_s


def job_of(
    kernel: TunableKernel, configuration: str, device: DeviceSpec, target: Target, options: BuildOptions
) -> KernelJob:
    """The kernel with the tile ``configuration``; raises IllegalRewrite where it cannot have it.

    What it computes is compared with the unscheduled operator.
    """
    made, choice = _choice_with(kernel.part, configuration, kernel.func, kernel.name, device, options)
    operator = read_operator(kernel.func, kernel.name)
    packs = {pack.param_index: pack for pack in choice.packs}
    params = params_of(kernel.func) or ()
    return KernelJob(
        workload=kernel.part.workload,
        configuration=configuration,
        module=_module_of(made, device),
        function=FUNCTION,
        target=str(target),
        arguments=tuple(
            JobArgument(shape=param.shape, dtype=param.dtype, pack=packs.get(position))
            for position, param in enumerate(params)
        ),
        outputs=len(operator.outputs),
        reference=_text_of(kernel.func),
        depth=kernel.part.depth,
    )


def _module_of(kernel: PrimFunc, device: DeviceSpec) -> str:
    """As the build has it: on one core no kernel starts threads."""
    module = IRModule({GlobalVar(FUNCTION): _named(kernel)})
    return str(save_json(Sequential([SerialiseLoops()])(module) if device.unit_count == 1 else module))


def _text_of(func: PrimFunc) -> str:
    return str(save_json(IRModule({GlobalVar(FUNCTION): _named(func)})))


def _named(func: PrimFunc) -> PrimFunc:
    return func.with_attr("global_symbol", FUNCTION)
