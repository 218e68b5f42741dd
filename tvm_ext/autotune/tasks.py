"""A model's distinct tunable kernels: what there is to choose in each, how often it runs, its share of the time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tvm_ext.records.measurement import MeasuredWorkload

from .spaces import KernelSpace, SpaceCandidate


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TuningTask:
    """One kernel that a search can make faster.

    ``calls`` counts its call sites in a run of the model, ``predicted_us`` is of one call of the constructed kernel,
    whose configuration is ``constructed``, and ``share`` is what all its calls have of the model's time, 0 to 1.
    """

    name: str
    workload: MeasuredWorkload
    space: KernelSpace[SpaceCandidate]
    constructed: str
    calls: int
    predicted_us: float
    share: float = 0.0


def distinct(tasks: Sequence[TuningTask], other_us: float = 0.0) -> tuple[TuningTask, ...]:
    """One task for each workload of ``tasks``, with the calls of all, the one with most of the time first.

    ``other_us``: what the model's other kernels are predicted to take in one run. Worked example: two layers of the
    same convolution, called twice and once at 100 us, beside other kernels of 700 us, are one task of three calls and
    30 % of the time.
    """
    merged: dict[str, TuningTask] = {}
    for task in tasks:
        known = merged.get(task.workload.key)
        merged[task.workload.key] = task if known is None else replace(known, calls=known.calls + task.calls)
    total = other_us + sum(task.calls * task.predicted_us for task in merged.values())
    shared = [replace(task, share=task.calls * task.predicted_us / total if total else 0.0) for task in merged.values()]
    return tuple(sorted(shared, key=lambda task: (-task.share, task.workload.key)))
