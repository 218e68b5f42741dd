"""Whether a schedule of rTasks does what its graph asks, in any run."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from tvm_ext.records.rtask_order import EntryClock, ProgramOrder
from tvm_ext.records.rtasks import RTaskGraph, RTaskProgram, RTaskSchedule


def check_schedule(schedule: RTaskSchedule, graph: RTaskGraph) -> None:
    """Raises ValueError unless ``schedule`` runs every rTask of ``graph`` once, in an order that the graph allows."""
    totals = _check_coverage(schedule, graph)
    ended = [0] * len(totals)  # rTasks of each operator that this program and those before it run
    for number, program in enumerate(schedule.programs):
        for _, _, entry in program.entries():
            ended[entry.operator] += entry.task_count
        _check_dependences(program, graph, [run == total for run, total in zip(ended, totals, strict=True)], number)


def _check_coverage(schedule: RTaskSchedule, graph: RTaskGraph) -> list[int]:
    """By operator, its rTasks, each of which the schedule runs once."""
    ranges: list[list[tuple[int, int]]] = [[] for _ in graph.operators]
    chosen: dict[int, int] = {}
    for program in schedule.programs:
        for unit, _, entry in program.entries():
            if entry.operator >= len(ranges):
                raise ValueError(f"vEU {unit} runs operator {entry.operator} of {len(ranges)}")
            if chosen.setdefault(entry.operator, entry.kernel) != entry.kernel:
                raise ValueError(f"operator {entry.operator} is computed by two kernels")
            kernel = graph.operators[entry.operator].kernel(entry.kernel)
            if kernel.threads > program.threads:
                raise ValueError(f"kernel {kernel.name!r} needs {kernel.threads} threads of {program.threads}")
            ranges[entry.operator].append((entry.begin, entry.end))
    totals = [item.kernel(chosen.get(index, 0)).task_count for index, item in enumerate(graph.operators)]
    for index, (found, total) in enumerate(zip(ranges, totals, strict=True)):
        edges = [(0, 0), *sorted(found), (total, total)]
        if any(first[1] != second[0] for first, second in pairwise(edges)):
            raise ValueError(f"the {total} rTasks of operator {index} do not run once each: {sorted(found)[:8]}")
    return totals


def _check_dependences(program: RTaskProgram, graph: RTaskGraph, ended: list[bool], number: int) -> None:
    """Raises where an entry may begin before an operator that it needs; ``ended``: what all is run of by then."""
    order = ProgramOrder(program)
    last: dict[int, EntryClock] = {}  # by operator: how far each vEU's stream must have come
    for unit, place, entry in program.entries():
        needed = last.setdefault(entry.operator, np.zeros(len(program.streams), dtype=np.int64))
        needed[unit] = place + 1
    late: dict[tuple[int, int], list[int]] = {}  # by what was told, and predecessor: which vEUs may not be so far
    for unit, place, entry in program.entries():
        told = order.told((unit, place))
        for predecessor in graph.operators[entry.operator].predecessors:
            key = id(told), predecessor
            if predecessor in last and key not in late:
                late[key] = np.flatnonzero(told < last[predecessor]).tolist()
            wrong = any(item != unit or place < last[predecessor][unit] for item in late.get(key, ()))
            if wrong or not ended[predecessor]:
                what = f"operator {entry.operator} on vEU {unit} may begin before operator {predecessor} ends"
                raise ValueError(f"program {number}: {what}")
