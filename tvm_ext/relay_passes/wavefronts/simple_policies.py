"""What policies are measured against: rTasks dealt out without a thought, and a launch for each operator."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from tvm_ext.records.rtasks import Need, RKernel, RTaskGraph, RTaskProgram, need_of

from .earliest_finish import append_earliest, earliest_counts
from .kernel_choice import KernelChoices, MakeDevice
from .program_plan import ProgramPlan, Shares

_Deal = Callable[[ProgramPlan, RKernel], NDArray[np.int64]]
"""How many rTasks of a kernel each vEU gets, the plan being as it is."""


def schedule_round_robin(graph: RTaskGraph, make: MakeDevice) -> list[RTaskProgram]:
    """rTask after rTask to the next vEU, from the last to the first again."""
    return _deal_out(graph, make, _Turns(zigzag=False))


def schedule_zigzag(graph: RTaskGraph, make: MakeDevice) -> list[RTaskProgram]:
    """rTask after rTask to the next vEU, and from the last on back again."""
    return _deal_out(graph, make, _Turns(zigzag=True))


def schedule_shared_queue(graph: RTaskGraph, make: MakeDevice) -> list[RTaskProgram]:
    """rTasks in the graph's order; a vEU that is free takes the next, and waits until it may begin.

    What a queue does that all vEUs share at run time, if times are those of the model.
    """
    return _deal_out(graph, make, _earliest_free)


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


def _earliest_free(plan: ProgramPlan, kernel: RKernel) -> NDArray[np.int64]:
    return earliest_counts(plan.clock, kernel.task_s_beside(plan.device.veus_per_unit), kernel.task_count)


def _deal_out(graph: RTaskGraph, make: MakeDevice, deal: _Deal) -> list[RTaskProgram]:
    """The fastest kernels in the graph's order: one rProgram, or as many as it takes for each to fit a unit."""
    choices = KernelChoices(graph, make)
    programs = []
    for chosen in _fitting(choices, [(index, choices.fastest(index)) for index in range(len(graph.operators))]):
        plan = ProgramPlan(graph, choices.device(need_of(choices.kernel(*pair) for pair in chosen)))
        for pair in chosen:
            plan.append(*pair, Shares.of(deal(plan, choices.kernel(*pair))))
        programs.append(plan.program())
    return programs


def _fitting(choices: KernelChoices, chosen: list[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """``chosen``, cut where the next kernel would not fit a unit beside those since the last cut."""
    parts: list[list[tuple[int, int]]] = [[]]
    need = Need()
    for pair in chosen:
        need = need.beside(choices.kernel(*pair).need)
        if not choices.fits(need):
            parts.append([])
            need = choices.kernel(*pair).need
        parts[-1].append(pair)
    return parts


class _Turns:
    """Deals rTasks out in turns, going on where the last operator's ended."""

    def __init__(self, *, zigzag: bool) -> None:
        self._zigzag, self._place = zigzag, 0

    def __call__(self, plan: ProgramPlan, kernel: RKernel) -> NDArray[np.int64]:
        count = len(plan.clock)
        period = 2 * count if self._zigzag else count
        turns, rest = divmod(kernel.task_count, period)
        places = (self._place + np.arange(rest)) % period
        self._place = (self._place + rest) % period
        units = np.where(places < count, places, period - 1 - places)
        return turns * (period // count) + np.bincount(units, minlength=count)
