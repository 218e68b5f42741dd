"""What is told of a region's schedule: times by the simulator, and who runs what, by which kernel, and why."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from tvm_ext.cost.schedule_simulator import ScheduleTimes
from tvm_ext.cost.virtual_device import virtual_device
from tvm_ext.records.rammer import OperatorSchedule, RegionRecord
from tvm_ext.records.rtasks import RKernel, RTaskGraph, RTaskSchedule

from .rtask_graphs import RTaskRegion
from .wavefronts.kernel_choice import KernelChoices, MakeDevice
from .wavefronts.wavefront_policy import waves


def region_record(
    symbol: str,
    region: RTaskRegion,
    graph: RTaskGraph,
    schedule: RTaskSchedule,
    times: ScheduleTimes,
    sequential_s: float,
    arena_bytes: int,
    constructed_s: float | None,
) -> RegionRecord:
    """The record of ``schedule``; ``constructed_s``: the time by the constructed kernels alone, if there are others."""
    entries = [entry for program in schedule.programs for entry in program.entries()]
    units: dict[int, set[int]] = {}
    for unit, _, entry in entries:
        units.setdefault(entry.operator, set()).add(unit)
    kernel = chosen_kernels(schedule)
    chosen = [operator.kernels[kernel[position]] for position, operator in enumerate(graph.operators)]
    functions = [len(operator.kernels) for operator in region.operators]
    texts = selections(graph, schedule, partial(virtual_device, region.device), functions)
    return RegionRecord(
        symbol=symbol,
        policy=schedule.policy,
        veu_count=max(len(program.streams) for program in schedule.programs),
        entries=len(entries),
        operators=tuple(
            OperatorSchedule(
                name=operator.name,
                task_count=chosen[position].task_count,
                veu_count=len(units[position]),
                work_us=chosen[position].work_s * 1e6,
                selection=texts[position],
            )
            for position, operator in enumerate(graph.operators)
        ),
        predicted_us=times.makespan_s * 1e6,
        sequential_us=sequential_s * 1e6,
        utilisation=times.utilisation,
        arena_bytes=arena_bytes,
        schedule=schedule.to_json(),
        graph=graph.to_json(),
        constructed_us=None if constructed_s is None else constructed_s * 1e6,
    )


def chosen_kernels(schedule: RTaskSchedule) -> dict[int, int]:
    """By operator, which of its kernels ``schedule`` runs."""
    return {entry.operator: entry.kernel for program in schedule.programs for _, _, entry in program.entries()}


def selections(graph: RTaskGraph, schedule: RTaskSchedule, make: MakeDevice, functions: Sequence[int]) -> list[str]:
    """By operator, which kernel it has, and what the choice was; "" where it had none.

    ``functions`` is of how many functions an operator's kernels are: one function divided in several ways is no choice
    worth a word.
    """
    choices, chosen = KernelChoices(graph, make), chosen_kernels(schedule)
    found = [""] * len(graph.operators)
    for wave in waves(graph):
        if all(functions[operator] < 2 for operator in wave):
            continue
        tasks = sum(choices.kernel(operator, choices.fastest(operator)).task_count for operator in wave)
        why = f"its wave has {tasks} rTasks by the fastest kernels, for {schedule.programs[0].device.veu_count} vEUs"
        for operator in wave:
            if functions[operator] > 1:
                found[operator] = f"{_which(choices, operator, chosen[operator])}; {why}"
    return found


def _which(choices: KernelChoices, operator: int, taken: int) -> str:
    fastest, efficient = choices.fastest(operator), choices.most_efficient(operator)
    kernels = [choices.kernel(operator, index) for index in (taken, fastest, efficient)]
    if fastest == efficient:
        return f"the fastest kernel, {_size(kernels[0])}, is also the most efficient"
    if taken == efficient:
        return f"the most efficient kernel, {_size(kernels[0])}, not the fastest, {_size(kernels[1])}"
    if taken == fastest:
        return f"the fastest kernel, {_size(kernels[0])}, not the most efficient, {_size(kernels[2])}"
    return f"a kernel of {_size(kernels[0])}, not the fastest, {_size(kernels[1])}"


def _size(kernel: RKernel) -> str:
    return f"{kernel.task_count} rTask{'s' * (kernel.task_count > 1)} of {kernel.task_s * 1e6:.3g} us"
