"""Which of its rKernels each operator has in a schedule, and why: for the report."""

from __future__ import annotations

from collections.abc import Sequence

from tvm_ext.records.rtasks import RKernel, RTaskGraph, RTaskSchedule

from .kernel_choice import KernelChoices, MakeDevice
from .wavefront_policy import waves


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
