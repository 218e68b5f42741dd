"""What policies are measured against, rTasks dealt out without a thought; and where the next ones end first."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from tvm_ext.records.rtasks import Need, RKernel, RTaskGraph, RTaskProgram, need_of

from .kernel_choice import KernelChoices, MakeDevice
from .program_plan import ProgramPlan, Seconds, Shares

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


_ROUNDING = 1e-9  # a choice: above the rounding of sums of times, below any task's share
_FEW = 32  # a choice: rTasks times vEUs, below which NumPy's calls take longer than the sums


def earliest_counts(starts: Seconds, task_s: float, count: int) -> NDArray[np.int64]:
    """By vEU, how many of ``count`` rTasks of ``task_s`` each it gets; of slots that end together, the first vEU's."""
    if count * len(starts) <= _FEW:
        return _one_by_one(starts, task_s, count)
    counts = _slots_until(_level(starts, task_s, count), starts, task_s)
    while (more := count - int(counts.sum())) > 0:  # once, but for rounding: each vEU's next slot is behind the level
        nearest = np.argsort(starts + (counts + 1) * task_s, kind="stable")[:more]
        counts[nearest] += 1
    return counts


def _one_by_one(starts: Seconds, task_s: float, count: int) -> NDArray[np.int64]:
    """`earliest_counts` for a handful, for which arrays take longer than the numbers in them."""
    counts, ends = [0] * len(starts), [start + task_s for start in starts.tolist()]
    for _ in range(count):
        unit = ends.index(min(ends))
        counts[unit] += 1
        ends[unit] += task_s
    return np.array(counts)


def _level(starts: Seconds, task_s: float, count: int) -> float:
    """When all would have ended together if rTasks could be cut: no slot up to then is missed, none too many is there.

    With the k vEUs that are free first, ``k * level = count * task_s + their starts``; k is the fewest that are done
    before the next one is free.
    """
    free = np.sort(starts)
    levels = (count * task_s + np.cumsum(free)) / np.arange(1, len(free) + 1)
    return float(levels[np.argmax(levels <= np.append(free[1:], np.inf))])


def _slots_until(level: float, starts: Seconds, task_s: float) -> NDArray[np.int64]:
    """By vEU, the slots that end by ``level``; one that ends just there may be left out, for rounding."""
    slots = np.maximum(level - starts, 0.0) / task_s
    return np.floor(slots * (1 - _ROUNDING)).astype(np.int64)


def append_earliest(plan: ProgramPlan, operator: int, kernel: int) -> None:
    """SelectvEU, Wait and Append (lines 15 to 18 of Algorithm 1) for all rTasks of ``operator``."""
    chosen = plan.graph.operators[operator].kernel(kernel)
    task_s = chosen.task_s_beside(plan.device.veus_per_unit)
    counts = earliest_counts(plan.starts(operator), task_s, chosen.task_count)
    plan.append(operator, kernel, Shares.of(counts))
