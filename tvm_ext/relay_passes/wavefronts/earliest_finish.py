"""SelectvEU by earliest finish (paper §3.3) for rTasks that are alike: how many each vEU gets, not one by one.

One by one, every rTask goes where it ends first. That takes the earliest slots of all, where vEU ``u`` offers slots
that end at ``start[u] + t, start[u] + 2 t, ...``; so each vEU gets as many as it has slots among the first ``count`` of
all, and which rTask has which of them makes no difference. They are numbered so that each vEU's are neighbours.

Worked example: 5 rTasks of 2 us, vEUs free from 0, 3 and 9 us. Slots end at 2, 4, 5, 6, 7, 8, ...: vEU 0 has those of
2, 4 and 6, vEU 1 those of 5 and 7, vEU 2 none.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .program_plan import ProgramPlan, Seconds, Shares

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


def close_shares(plan: ProgramPlan, operator: int, kernel: int) -> Shares:
    """rTasks where they end first; on one vEU if they take less than a barrier one after another.

    What needs them may then follow there without a barrier: 100 pieces that are split off in turn, each by 4 rTasks of
    0.02 us, wait for none.
    """
    chosen, starts = plan.graph.operators[operator].kernel(kernel), plan.starts(operator)
    task_s = chosen.task_s_beside(plan.device.veus_per_unit)
    if (chosen.task_count - 1) * task_s >= plan.device.barrier_s:
        return Shares.of(earliest_counts(starts, task_s, chosen.task_count))
    counts = np.zeros(len(starts), dtype=np.int64)
    counts[np.argmin(starts)] = chosen.task_count
    return Shares.of(counts)


def append_earliest(plan: ProgramPlan, operator: int, kernel: int) -> None:
    """SelectvEU, Wait and Append (lines 15 to 18 of Algorithm 1) for all rTasks of ``operator``."""
    chosen = plan.graph.operators[operator].kernel(kernel)
    task_s = chosen.task_s_beside(plan.device.veus_per_unit)
    counts = earliest_counts(plan.starts(operator), task_s, chosen.task_count)
    plan.append(operator, kernel, Shares.of(counts))
