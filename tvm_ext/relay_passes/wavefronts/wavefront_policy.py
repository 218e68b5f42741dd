"""The wavefront policy (paper §3.3, Algorithm 1), line by line.

Operators are scheduled wave by wave, a wave being those whose predecessors are all in earlier waves. Each wave's
kernels are selected together, its rTasks go where they end first, and it joins the current rProgram unless that takes
longer than running it as an rProgram of its own: where a wave's rTasks need so much of a unit that fewer vEUs are left
for all others, it does.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tvm_ext.records.rtasks import RTaskGraph, RTaskProgram, need_of

from .earliest_finish import append_earliest
from .kernel_choice import Chosen, KernelChoices, MakeDevice
from .program_plan import Mark, ProgramPlan


def waves(graph: RTaskGraph) -> list[list[int]]:
    """The fringes of a breadth-first search: operators that all predecessors lie before, by how many waves they do."""
    depth: list[int] = []
    for operator in graph.operators:
        depth.append(max((depth[predecessor] + 1 for predecessor in operator.predecessors), default=0))
    found: list[list[int]] = [[] for _ in range(max(depth) + 1)]
    for index, level in enumerate(depth):
        found[level].append(index)
    return found


def schedule_waves(graph: RTaskGraph, make: MakeDevice) -> list[RTaskProgram]:
    """Function Schedule of Algorithm 1, by as many vEUs of a unit as are quickest."""
    return [plan.program() for plan in quickest_waves(graph, KernelChoices(graph, make))]


def quickest_waves(graph: RTaskGraph, choices: KernelChoices) -> list[ProgramPlan]:
    """The quicker of `plan_waves` by all vEUs that a unit has room for, and by one."""
    found = [plan_waves(graph, item) for item in choices.by_room()]
    return min(found, key=lambda plans: sum(plan.time_s for plan in plans))


def plan_waves(graph: RTaskGraph, choices: KernelChoices) -> list[ProgramPlan]:
    """The rPrograms of Algorithm 1, which other policies start from."""
    plans: list[ProgramPlan] = []
    current: ProgramPlan | None = None
    for wave in separable(waves(graph), choices):
        alone = _schedule_wave(graph, choices, None, wave)
        assert alone is not None
        apart_s = alone.time_s + (0.0 if current is None else current.time_s)
        merged = None if current is None else _schedule_wave(graph, choices, current, wave)
        if merged is not None and merged.time_s <= apart_s:
            current = merged.plan
            continue
        if merged is not None:
            merged.undo()
        plans += [] if current is None else [current]
        current = alone.plan
    assert current is not None
    return [*plans, current]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Trial:
    """A ``plan`` that ends with ``wave``, and takes ``time_s``; ``before``: as it was, if the plan was there before."""

    plan: ProgramPlan
    wave: Chosen
    time_s: float
    before: Mark | None

    def undo(self) -> None:
        """Have the plan as it was before."""
        if self.before is not None:
            self.plan.rollback(self.before)

    def redo(self) -> None:
        """Have the wave in the plan again."""
        if self.before is not None:
            _append(self.plan, self.wave)


def _append(plan: ProgramPlan, wave: Iterable[tuple[int, int]]) -> None:
    for pair in wave:
        append_earliest(plan, *pair)


def separable(found: list[list[int]], choices: KernelChoices) -> list[list[int]]:
    """Waves whose fastest kernels fit a unit together; of another, each operator becomes a wave of its own."""
    parts = []
    for wave in found:
        fits = choices.fits(need_of(choices.kernel(item, choices.fastest(item)) for item in wave))
        parts += [wave] if fits else [[item] for item in wave]
    return parts


def _schedule_wave(
    graph: RTaskGraph, choices: KernelChoices, program: ProgramPlan | None, wave: list[int]
) -> _Trial | None:
    """Function ScheduleWave; None where the wave does not fit a unit beside what the program runs.

    ``program`` ends with the wave from then on, unless that is undone, or is left as it is for a new plan of both.
    SelectRKernels: the fastest kernels, or the most efficient where there is work for all vEUs and they end earlier.
    """
    fastest = _try(graph, choices, program, tuple((item, choices.fastest(item)) for item in wave))
    tasks = sum(choices.kernel(item, choices.fastest(item)).task_count for item in wave)
    if fastest is not None and tasks < fastest.plan.device.veu_count:
        return fastest
    efficient = tuple((item, choices.most_efficient(item)) for item in wave)
    if fastest is not None and efficient == fastest.wave:
        return fastest
    if fastest is not None:
        fastest.undo()
    other = _try(graph, choices, program, efficient)
    if fastest is None or (other is not None and other.time_s < fastest.time_s):
        return other
    if other is not None:
        other.undo()
    fastest.redo()
    return fastest


def _try(graph: RTaskGraph, choices: KernelChoices, program: ProgramPlan | None, wave: Chosen) -> _Trial | None:
    """``wave`` behind ``program``: on the same vEUs where it leaves as many, else all of it on fewer, in a new plan."""
    need = need_of([choices.kernel(*pair) for pair in wave])
    need = need if program is None else need.beside(program.need)
    if not choices.fits(need):
        return None
    device = choices.device(need)
    if program is not None and device == program.device:
        before = program.mark()
        _append(program, wave)
        return _Trial(plan=program, wave=wave, time_s=program.time_s, before=before)
    plan = ProgramPlan(graph, device)
    _append(plan, (*(() if program is None else program.chosen()), *wave))
    return _Trial(plan=plan, wave=wave, time_s=plan.time_s, before=None)
