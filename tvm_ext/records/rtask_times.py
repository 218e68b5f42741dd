"""How long rTasks took, as a store of measurements keeps it, and as a policy asks for it."""

from __future__ import annotations

import collections
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from .measurement import MOST_SAMPLES, MeasuredWorkload, Measurement, Trial, TrialStore
from .rammer import RammerRecord, RegionRecord, joined_entries
from .rtask_split import KernelCode
from .rtasks import RTaskGraph, RTaskSchedule

_MOST_SAMPLES = min(100, MOST_SAMPLES)  # a choice: enough for a quantile of the fastest half


@dataclass(frozen=True, slots=True)
class RTaskTimes:
    """Seconds of one rTask by rKernel and by how many of its iterations an rTask has."""

    seconds: Mapping[str, Mapping[int, float]]

    def of(self, code: KernelCode) -> float | None:
        """Of an rTask of ``code``; where another division was measured, in proportion; None: nothing is known.

        Worked example: 8 iterations took 6 us; an rTask of all 16 takes 12 us.
        """
        known = self.seconds.get(code.function)
        if not known:
            return None
        nearest = min(known, key=lambda count: abs(count - code.per_task))
        return known[nearest] * code.per_task / nearest


def times_of(store: TrialStore, workloads: Mapping[str, MeasuredWorkload]) -> RTaskTimes:
    """What ``store`` knows of rKernels, which ``workloads`` names."""
    found = {}
    for name, workload in workloads.items():
        verdicts = store.verdicts(workload).items()
        found[name] = {int(text): item.time_us / 1e6 for text, item in verdicts if item.time_us and text.isdigit()}
    return RTaskTimes(found)


def measurements_of(report: RammerRecord) -> tuple[Measurement, ...]:
    """What the measured runs of ``report`` say of rKernels, for a store."""
    workloads = dict(report.workloads)
    samples: collections.defaultdict[tuple[str, str], list[float]] = collections.defaultdict(list)
    for region in report.scheduled:
        for name, microseconds in _samples(region):
            function, _, iterations = name.rpartition("/")
            samples[function, iterations].append(microseconds)
    return tuple(
        Measurement(
            workload=workloads[function], trial=Trial(configuration=iterations, outcome="ok", times_us=_typical(times))
        )
        for (function, iterations), times in samples.items()
        if function in workloads
    )


def _typical(times: list[float]) -> tuple[float, ...]:
    """The shorter half: what is longer was kept from its core, or met constants that another one's cache had."""
    middle = statistics.median(times)
    return tuple(sorted(time for time in times if time <= middle)[:_MOST_SAMPLES])


def _samples(region: RegionRecord) -> Iterable[tuple[str, float]]:
    """Of each entry of the measured run the rKernel's name and the microseconds of one of its rTasks."""
    if not region.measured:
        return
    graph, streams = RTaskGraph.from_json(region.graph), joined_entries(RTaskSchedule.from_json(region.schedule))
    for unit, place, start_ns, end_ns in region.measured:
        entry = streams[unit][place]
        name = graph.operators[entry.operator].kernel(entry.kernel).name
        yield name, max(end_ns - start_ns, 1) / 1e3 / entry.task_count
