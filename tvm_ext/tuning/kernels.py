"""The kernels of a model that have a choice of tiles: as tasks of a search, and as jobs to be measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tvm_ext._tvm import GlobalVar, IRModule, PrimFunc, Sequential, Target, save_json
from tvm_ext.analysis.computations import read_operator
from tvm_ext.autotune.cpu_space import CpuTileSpace
from tvm_ext.autotune.tasks import TuningTask, distinct
from tvm_ext.cost.cpu_tiles import tile_of
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.errors import IllegalRewrite
from tvm_ext.options import BuildOptions
from tvm_ext.records.choice import CHOICE, KernelChoice
from tvm_ext.records.kernel_job import JobArgument, KernelJob
from tvm_ext.records.serialise import from_json
from tvm_ext.support.kernel_cache import params_of
from tvm_ext.tir_passes.construct_cpu_kernels import construct_cpu_kernel
from tvm_ext.tir_passes.plan.chosen_tiles import LEFT_OUT, TunableAnchor, tunable_anchors
from tvm_ext.tir_passes.plan.form import unscheduled
from tvm_ext.tir_passes.serialise_loops import SerialiseLoops

FUNCTION = "kernel"
"""The name of the function in every job."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TunableKernel:
    """An operator of a model, unscheduled, with the one computation whose tile is searched."""

    func: PrimFunc
    name: str
    anchor: TunableAnchor


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
        count, predicted_us = calls.get(name, 0), _predicted_us(func, name, device, options)
        try:
            anchor = _only_anchor(func, name, device, options)
            space = _space_of(anchor, device)
        except IllegalRewrite as refusal:
            untuned.append((name, refusal.problem))
            other_us += count * predicted_us
            continue
        kernels.setdefault(anchor.workload.key, TunableKernel(func=func, name=name, anchor=anchor))
        task = TuningTask(
            name=name, workload=anchor.workload, space=space, constructed=anchor.constructed.configuration,
            calls=count, predicted_us=predicted_us,
        )  # fmt: skip
        tasks.append(task)
    return TunableModel(tasks=distinct(tasks, other_us), kernels=kernels, untuned=tuple(untuned))


def _space_of(anchor: TunableAnchor, device: DeviceSpec) -> CpuTileSpace:
    """With construction's own tiles; raises IllegalRewrite where there is but one candidate."""
    space = CpuTileSpace(anchor.expr, device, [tile_of(program, anchor.expr) for program in anchor.programs])
    if len(space) < 2:
        raise IllegalRewrite("one tile alone is legal")
    return space


def _only_anchor(func: PrimFunc, name: str, device: DeviceSpec, options: BuildOptions) -> TunableAnchor:
    """Raises IllegalRewrite, with the reason, where there is nothing to choose, or more than one choice."""
    if params_of(func) is None:
        raise IllegalRewrite("its shapes are not fixed")
    anchors = tunable_anchors(func, name, device, options)
    if len(anchors) != 1:
        raise IllegalRewrite("it has no tiles to choose" if not anchors else f"{len(anchors)} products in one kernel")
    return anchors[0]


def _predicted_us(func: PrimFunc, name: str, device: DeviceSpec, options: BuildOptions) -> float:
    """Of one call of the constructed kernel, microseconds; 0 where it has no prediction."""
    choice = from_json(KernelChoice, str(construct_cpu_kernel(func, name, device, options).attrs[CHOICE]))
    if choice.expected_s is not None:
        return 1e6 * choice.expected_s
    return 0.0 if choice.program is None else 1e6 * choice.program.prediction.time_s


def job_of(
    kernel: TunableKernel, configuration: str, device: DeviceSpec, target: Target, options: BuildOptions
) -> KernelJob:
    """The kernel with the tile ``configuration``; raises IllegalRewrite where it cannot have it.

    What it computes is compared with the unscheduled operator.
    """
    tiles = {kernel.anchor.workload.key: configuration}
    made = construct_cpu_kernel(kernel.func, kernel.name, device, options, tiles)
    choice = from_json(KernelChoice, str(made.attrs[CHOICE]))
    refused = next((note for note in choice.notes if note.startswith(LEFT_OUT)), None)
    if refused is not None or choice.path != "rtile":
        raise IllegalRewrite(refused or f"{kernel.name} became no kernel in tiles: {choice.reason}")
    operator = read_operator(kernel.func, kernel.name)
    packs = {pack.param_index: pack for pack in choice.packs}
    params = params_of(kernel.func) or ()
    return KernelJob(
        workload=kernel.anchor.workload,
        configuration=configuration,
        module=_module_of(made, device),
        function=FUNCTION,
        target=str(target),
        arguments=tuple(
            JobArgument(shape=item.shape, dtype=item.dtype, pack=packs.get(place)) for place, item in enumerate(params)
        ),
        outputs=len(operator.outputs),
        reference=_text_of(kernel.func),
        depth=_depth_of(kernel.anchor),
    )


def _depth_of(anchor: TunableAnchor) -> int:
    """Elements that go into one of the result."""
    depth = 1
    for axis in anchor.expr.reduction:
        depth *= axis.extent
    return depth


def _module_of(kernel: PrimFunc, device: DeviceSpec) -> str:
    """As the build has it: on one core no kernel starts threads."""
    module = IRModule({GlobalVar(FUNCTION): _named(kernel)})
    return str(save_json(Sequential([SerialiseLoops()])(module) if device.unit_count == 1 else module))


def _text_of(func: PrimFunc) -> str:
    return str(save_json(IRModule({GlobalVar(FUNCTION): _named(func)})))


def _named(func: PrimFunc) -> PrimFunc:
    return func.with_attr("global_symbol", FUNCTION)
