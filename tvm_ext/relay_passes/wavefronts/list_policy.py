"""List scheduling along the critical path, with affinity to caches: a policy of our own, after HEFT.

Operators are taken one by one from those whose predecessors have been taken: whichever could begin first, and of these
the one with the longest way to the end of the graph (its *rank*). Waves are not waited for: an operator of a later wave
may begin before all of an earlier one have. rTasks go where they end first, those of a short operator to one vEU
(`close_shares`), or to the vEUs that ran the same rTasks for the same constants the last time, whose caches may still
hold them, whichever ends earlier.

In order of beginning, constants count or not (`_Order`). Worked example, 10 layers of LSTM cells over 100 steps, two
rTasks a cell of 512 KiB of weights each, a cache of 1 MiB: by rank, a step of layer 1 comes in turn with one of layer
0, and each reads its weights anew, 35 us for 10 us of work. Where a cold operator counts as beginning later by what it
reads, layer 0 is run to its last step first, then layer 1: its weights are read once.

Several orders and choices of kernels are tried for each rProgram of Algorithm 1, and for the whole graph as one; the
quickest by the plan's own times is taken, Algorithm 1's schedule where nothing is quicker.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Literal

from tvm_ext.records.rtasks import RKernel, RTaskGraph, RTaskProgram, VDevice, need_of

from .earliest_finish import close_shares
from .kernel_choice import Chosen, KernelChoices, MakeDevice
from .program_plan import ProgramPlan, Share, Shares
from .simple_policies import plan_launches
from .wavefront_policy import quickest_waves

_Order = Literal["rank", "warm", "given"]
"""Of operators that could begin together: the longest way first; what finds its constants first; the graph's order."""

_WINDOW = 8
"""Operators that are looked at before one is taken: the first of those that could begin earliest."""


def schedule_list(graph: RTaskGraph, make: MakeDevice) -> list[RTaskProgram]:
    """The quickest of Algorithm 1's rPrograms, each scheduled anew, and of the whole graph as one rProgram.

    It is never slower than if each operator had its fastest kernel alone: that is tried as well.
    """
    return [plan.program() for plan in list_plans(graph, make)]


def list_plans(graph: RTaskGraph, make: MakeDevice) -> list[ProgramPlan]:
    """What `schedule_list` makes its programs of, for policies that start from it."""
    choices = KernelChoices(graph, make)
    tried: set[Chosen] = set()
    found = [_scheduled(graph, choices, tried)]
    if choices.has_several:
        found.append(_scheduled(graph, KernelChoices(graph, make, fastest_alone=True), tried))
    return quickest(found)


def several_plans(graph: RTaskGraph, make: MakeDevice) -> list[ProgramPlan]:
    """`list_plans` for who has a schedule by the fastest kernels alone, and takes it where that is quicker."""
    return _scheduled(graph, KernelChoices(graph, make), set())


def _scheduled(graph: RTaskGraph, choices: KernelChoices, tried: set[Chosen]) -> list[ProgramPlan]:
    """The quickest by ``choices``; kernels for the whole graph that were ``tried`` before are not tried again."""
    waves = quickest_waves(graph, choices)
    parts: list[ProgramPlan] = []
    for plan in waves:
        parts += quickest([[plan], *plans_of(graph, choices, plan.device, plan.chosen())])
    selections = [selection for selection in _selections(graph, choices, waves) if selection not in tried]
    tried.update(selections)
    whole = [plans for chosen in selections for plans in _whole(graph, choices, chosen)]
    return quickest([parts, *whole])


def quickest(found: Iterable[list[ProgramPlan]]) -> list[ProgramPlan]:
    """Of rPrograms one after another."""
    return min(found, key=lambda plans: sum(plan.time_s for plan in plans))


def _selections(graph: RTaskGraph, choices: KernelChoices, waves: Sequence[ProgramPlan]) -> list[Chosen]:
    """Kernels for the whole graph: Algorithm 1's where it made several rPrograms, all fastest, all most efficient."""
    operators = range(len(graph.operators))
    found: dict[Chosen, None] = {}
    if len(waves) > 1:
        found[tuple(sorted(pair for plan in waves for pair in plan.chosen()))] = None
    single = {tuple(sorted(waves[0].chosen()))} if len(waves) == 1 else set()
    for select in (choices.fastest, choices.most_efficient):
        chosen = tuple((index, select(index)) for index in operators)
        if chosen not in single:
            found[chosen] = None
    return list(found)


def _whole(graph: RTaskGraph, choices: KernelChoices, chosen: Chosen) -> list[list[ProgramPlan]]:
    need = need_of(choices.kernel(*pair) for pair in chosen)
    return list(plans_of(graph, choices, choices.device(need), chosen)) if choices.fits(need) else []


def plans_of(graph: RTaskGraph, choices: KernelChoices, device: VDevice, chosen: Chosen) -> Iterator[list[ProgramPlan]]:
    """``chosen`` as one rProgram in several ways, and launched one by one where that leaves a unit more vEUs for some.

    A unit may run fewer vEUs than it has room for: each rTask then has more of it, and fewer wait for each other.
    """
    yield [_ListSchedule(graph, device, chosen).plan("rank")]
    for count in sorted({1, device.veus_per_unit // 2} - {0, device.veus_per_unit}):
        yield [_ListSchedule(graph, replace(device, veus_per_unit=count), chosen).plan("rank")]
    if any(choices.device(choices.kernel(*pair).need) != device for pair in chosen):
        yield plan_launches(graph, choices, sorted(chosen))
    has_constants = any(graph.operators[operator].constants for operator, _ in chosen)
    if device.cache_bytes and has_constants:
        yield [_ListSchedule(graph, device, chosen).plan("warm")]
        yield [_ListSchedule(graph, device, chosen).plan("given")]


class _ListSchedule:
    """Operators of ``chosen`` as one rProgram on ``device``."""

    def __init__(self, graph: RTaskGraph, device: VDevice, chosen: Chosen) -> None:
        self._graph, self._device, self._kernels = graph, device, dict(chosen)
        self._plan = ProgramPlan(graph, device)
        self._ready: dict[int, float] = {}  # operators that could be taken, and when their predecessors end
        self._shares: dict[tuple[str, RKernel], Shares] = {}  # who ran the rTasks for these constants last
        self._successors = self._inner_successors()
        self._rank = self._ranks()

    def plan(self, order: _Order) -> ProgramPlan:
        """The plan of all operators; to be called once."""
        missing = {
            index: sum(predecessor in self._kernels for predecessor in self._graph.operators[index].predecessors)
            for index in self._kernels
        }
        ends: dict[int, float] = {}
        self._ready = {index: 0.0 for index, count in missing.items() if not count}
        while self._ready:
            operator = self._next(order)
            del self._ready[operator]
            self._append(operator)
            ends[operator] = self._plan.end_s(operator)
            for successor in self._successors[operator]:
                missing[successor] -= 1
                if not missing[successor]:
                    inner = [
                        predecessor
                        for predecessor in self._graph.operators[successor].predecessors
                        if predecessor in self._kernels
                    ]
                    self._ready[successor] = max(ends[item] for item in inner)
        return self._plan

    def _next(self, order: _Order) -> int:
        """Which of the operators that are ready is taken."""
        if order == "given":
            return min(self._ready)
        free = float(self._plan.clock.min())
        begins = {index: max(free, ready) for index, ready in self._ready.items()}
        near = heapq.nsmallest(_WINDOW, begins, key=lambda index: (begins[index], -self._rank[index]))
        if order == "rank" or len(near) == 1:
            return near[0]
        return min(near, key=lambda index: (begins[index] + self._cold_s(index), -self._rank[index]))

    def _cold_s(self, operator: int) -> float:
        """How long constants are read for ``operator`` at best: on the vEUs that ran it for the same ones before."""
        kernel = self._kernels[operator]
        shares: Iterable[Share] | None = self._shares.get(self._key(operator))
        if shares is None:
            kind = self._graph.operators[operator].kernels[kernel]
            tasks = -(-kind.task_count // self._device.veu_count)
            shares = [Share(unit=0, begin=0, end=tasks)]
        return max(self._plan.missing_s(operator, kernel, share) for share in shares)

    def _append(self, operator: int) -> None:
        kernel = self._kernels[operator]
        shares = close_shares(self._plan, operator, kernel)
        if self._device.cache_bytes and self._graph.operators[operator].constants:
            before = self._shares.get(self._key(operator))
            if before is not None and not before.same_as(shares):
                shares = min((before, shares), key=lambda found: self._end_s(operator, found))
            self._shares[self._key(operator)] = shares
        self._plan.append(operator, kernel, shares)

    def _end_s(self, operator: int, shares: Shares) -> float:
        kernel = self._kernels[operator]
        task_s = self._graph.operators[operator].kernels[kernel].task_s_beside(self._device.veus_per_unit)
        starts = self._plan.starts(operator)
        return max(
            float(starts[share.unit])
            + (share.end - share.begin) * task_s
            + self._plan.missing_s(operator, kernel, share)
            for share in shares
        )

    def _key(self, operator: int) -> tuple[str, RKernel]:
        found = self._graph.operators[operator]
        return found.constants, found.kernels[self._kernels[operator]]

    def _inner_successors(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {index: [] for index in self._kernels}
        for index in self._kernels:
            for predecessor in self._graph.operators[index].predecessors:
                if predecessor in found:
                    found[predecessor].append(index)
        return found

    def _ranks(self) -> dict[int, float]:
        """Of each operator, the time from its beginning to the end of the program, vEUs being no limit to what runs."""
        ranks: dict[int, float] = {}
        for index in sorted(self._kernels, reverse=True):
            kernel = self._graph.operators[index].kernels[self._kernels[index]]
            rounds = -(-kernel.task_count // self._device.veu_count)
            behind = max((ranks[item] + self._device.barrier_s for item in self._successors[index]), default=0.0)
            ranks[index] = rounds * kernel.task_s_beside(self._device.veus_per_unit) + behind
        return ranks
