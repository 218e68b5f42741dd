"""What policies are measured against: a launch for each operator."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from tvm_ext.records.rtasks import RTaskGraph, RTaskProgram

from .earliest_finish import append_earliest
from .kernel_choice import KernelChoices, MakeDevice
from .program_plan import ProgramPlan


def schedule_launches(graph: RTaskGraph, make: MakeDevice) -> list[RTaskProgram]:
    """Each operator an rProgram of its own, of its fastest kernel: kernels launched one by one (RammerBase, §5.2.1)."""
    choices = KernelChoices(graph, make)
    chosen = [(index, choices.fastest(index)) for index in range(len(graph.operators))]
    return [plan.program() for plan in plan_launches(graph, choices, chosen)]


def plan_launches(graph: RTaskGraph, choices: KernelChoices, chosen: Iterable[tuple[int, int]]) -> list[ProgramPlan]:
    """Each of ``chosen`` as an rProgram of its own.

    The hardware hands out the blocks of a launched kernel: it reads no schedule, and spreads few blocks over as many
    units as there are.
    """
    plans = []
    for index, kernel in chosen:
        device = choices.device(choices.kernel(index, kernel).need)
        used = min(device.veus_per_unit, -(-choices.kernel(index, kernel).task_count // device.unit_count))
        plans.append(ProgramPlan(graph, replace(device, veus_per_unit=used, task_overhead_s=0.0)))
        append_earliest(plans[-1], index, kernel)
    return plans
