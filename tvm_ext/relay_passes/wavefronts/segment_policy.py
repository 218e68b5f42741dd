"""Waves with the best cuts between rPrograms: a policy of our own beside Algorithm 1 (paper §3.3) and list scheduling.

Algorithm 1 decides at each wave whether the current rProgram goes on, and all of an rProgram has as many vEUs a unit as
its most demanding rTask allows. Here cuts and vEUs are chosen together by dynamic programming: the least time of the
first j waves is that of the first i, and that of the waves from i to j - 1 as one rProgram, for the best i and the best
number of vEUs. Each segment is then scheduled anew in the ways of the list policy.

Worked example, 80 units, a launch of 2 us, three operators in a row. The first and the last have 80 rTasks of 10 us
that need a unit each. The middle one has 640, of which a unit runs one in 2 us and 8 together in 4 us. One rProgram
has one vEU a unit and takes 10 + 16 + 10 us, three take 10 + 4 + 10 us and two more launches.

Of open segments with equally many vEUs the one that ends first goes on, so that the search grows with the number of
waves alone. A segment is begun anew only where it could begin before that one has ended, and a barrier later.

Builds take this policy. Cuts are not looked for where they gain nothing: where every kernel has a unit for itself. Nor
are they in graphs of more than `MOST_CUT` operators: recurrent ones, whose steps wait for each other in any case.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tvm_ext.records.rtasks import RTaskGraph, RTaskProgram, VDevice, need_of

from .earliest_finish import close_shares
from .kernel_choice import Chosen, KernelChoices, MakeDevice
from .list_policy import list_plans, plans_of, quickest, several_plans
from .program_plan import ProgramPlan
from .simple_policies import plan_launches
from .wavefront_policy import separable, waves

MOST_CUT = 1200
"""Operators; a choice: the cuts of NASNet's 670 take 6 s of one core (Ice Lake)."""


def schedule_segments(graph: RTaskGraph, make: MakeDevice) -> list[RTaskProgram]:
    """The quicker of the best segments and of the list policy's programs, by their own times."""
    return _quicker(graph, make, list_plans(graph, make))


def schedule_several(graph: RTaskGraph, make: MakeDevice) -> list[RTaskProgram]:
    """`schedule_segments` for who has a schedule by the fastest kernels alone, and takes it where that is quicker."""
    return _quicker(graph, make, several_plans(graph, make))


def _quicker(graph: RTaskGraph, make: MakeDevice, listed: list[ProgramPlan]) -> list[RTaskProgram]:
    choices = KernelChoices(graph, make)
    may_gain = len(graph.operators) <= MOST_CUT and len(choices.by_room()) > 1
    found = [listed, _Cuts(graph, choices).found()] if may_gain else [listed]
    return [plan.program() for plan in quickest(found)]


@dataclass(kw_only=True, slots=True)
class _Segment:
    """An rProgram behind ``before_s``, of the waves from ``begin`` on."""

    begin: int
    before_s: float
    plan: ProgramPlan

    @property
    def time_s(self) -> float:
        return self.before_s + self.plan.time_s


@dataclass(frozen=True, kw_only=True, slots=True)
class _Way:
    """The quickest way to the end of a wave: the way to the end of wave ``begin`` - 1, then the last segment's plans.

    Of a ``segment`` that went on, the first ``count`` operators; ``launches``: an rProgram for each operator instead.
    """

    time_s: float
    begin: int
    segment: ProgramPlan | None = None
    count: int = 0
    launches: Sequence[ProgramPlan] = ()


class _Cuts:
    """The search for the best cuts between the waves of ``graph``."""

    def __init__(self, graph: RTaskGraph, choices: KernelChoices) -> None:
        self._graph, self._choices = graph, choices
        self._ways = [_Way(time_s=0.0, begin=0)]
        self._open: dict[int, _Segment] = {}  # by vEUs of a unit

    def found(self) -> list[ProgramPlan]:
        """The rPrograms of the quickest way to the end of the last wave."""
        for place, wave in enumerate(separable(waves(self._graph), self._choices)):
            self._pass(place, wave)
        plans: list[ProgramPlan] = []
        way = self._ways[-1]
        while way.segment is not None or way.launches:
            plans = [*self._anew(way), *plans]
            way = self._ways[way.begin]
        return plans

    def _pass(self, place: int, wave: list[int]) -> None:
        """Find the quickest way to the end of ``wave``, the one numbered ``place``."""
        before_s = self._ways[-1].time_s
        going: list[_Segment] = []
        ended_s: dict[int, float] = {}
        for count, segment in self._open.items():
            end_s = segment.time_s
            if self._extended(segment.plan, wave):
                going.append(segment)
                ended_s[count] = end_s
        for device in self._devices(wave):
            if ended_s.get(device.veus_per_unit, math.inf) + device.barrier_s <= before_s + device.launch_s:
                continue  # what goes on is as far
            fresh = _Segment(begin=place, before_s=before_s, plan=ProgramPlan(self._graph, device))
            if self._extended(fresh.plan, wave):
                going.append(fresh)
        self._open = {}
        for segment in sorted(going, key=lambda item: item.time_s):
            self._open.setdefault(segment.plan.device.veus_per_unit, segment)
        launches = plan_launches(self._graph, self._choices, self._fastest(wave))
        ways = [_Way(time_s=before_s + sum(plan.time_s for plan in launches), begin=place, launches=launches)]
        for segment in self._open.values():
            count = len(segment.plan.chosen())
            ways.append(_Way(time_s=segment.time_s, begin=segment.begin, segment=segment.plan, count=count))
        self._ways.append(min(ways, key=lambda way: way.time_s))

    def _fastest(self, wave: list[int]) -> Chosen:
        return tuple((item, self._choices.fastest(item)) for item in wave)

    def _devices(self, wave: list[int]) -> list[VDevice]:
        """With 1, 2, 4 ... vEUs a unit, and with as many as there is room for of the fastest kernels."""
        device = self._choices.device(need_of(self._choices.kernel(*pair) for pair in self._fastest(wave)))
        most = device.veus_per_unit
        counts = {most, *(1 << power for power in range(most.bit_length()))}
        return [replace(device, veus_per_unit=count) for count in sorted(counts)]

    def _extended(self, plan: ProgramPlan, wave: list[int]) -> bool:
        """Append ``wave`` to ``plan`` by its fastest or most efficient kernels; False where a unit has no room."""
        efficient = tuple((item, self._choices.most_efficient(item)) for item in wave)
        ended: list[tuple[float, Chosen]] = []
        before = plan.mark()
        for chosen in dict.fromkeys((self._fastest(wave), efficient)):
            need = need_of(self._choices.kernel(*pair) for pair in chosen).beside(plan.need)
            if self._choices.fits(need) and self._choices.device(need).veus_per_unit >= plan.device.veus_per_unit:
                self._append(plan, chosen)
                ended.append((plan.time_s, chosen))
                plan.rollback(before)
        if ended:
            self._append(plan, min(ended)[1])
        return bool(ended)

    def _append(self, plan: ProgramPlan, chosen: Chosen) -> ProgramPlan:
        for pair in chosen:
            plan.append(*pair, close_shares(plan, *pair))
        return plan

    def _anew(self, way: _Way) -> Sequence[ProgramPlan]:
        """The last segment of ``way`` as it was found, or in a quicker order."""
        if way.segment is None:
            return way.launches
        chosen, device = way.segment.chosen()[: way.count], way.segment.device
        again = self._append(ProgramPlan(self._graph, device), chosen)
        return quickest([[again], *plans_of(self._graph, self._choices, device, chosen)])
