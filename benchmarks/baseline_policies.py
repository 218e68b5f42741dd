"""Policies that others are measured against: rTasks dealt out without a thought. Importing them registers them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from tvm_ext.records.rtasks import Need, RKernel, RTaskGraph, RTaskProgram, need_of
from tvm_ext.relay_passes.wavefronts.earliest_finish import earliest_counts
from tvm_ext.relay_passes.wavefronts.kernel_choice import KernelChoices, MakeDevice
from tvm_ext.relay_passes.wavefronts.policies import register_policy
from tvm_ext.relay_passes.wavefronts.program_plan import ProgramPlan, Shares

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


BASELINES = {"round-robin": schedule_round_robin, "zig-zag": schedule_zigzag, "shared-queue": schedule_shared_queue}
for _name, _policy in BASELINES.items():
    register_policy(_name, _policy)
