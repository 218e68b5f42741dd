"""Every legal interleaving of a small schedule of rTasks: each vEU begins and ends its entries in turn, at any pace.

The states of all vEUs together are visited once each, however many interleavings lead there: what an entry may find
when it begins is the same. A schedule of 12 entries on 4 vEUs has some thousands.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tvm_ext.records.rtasks import RTaskGraph, RTaskProgram, ScheduleEntry

State = tuple[tuple[int, bool], ...]
"""By vEU: the entries that it has ended, and whether it is in the next one."""


def faults(program: RTaskProgram, graph: RTaskGraph) -> list[str]:
    """What can go wrong in some interleaving of ``program``: an entry begins too early, vEUs wait for ever."""
    found = set()
    start: State = tuple((0, False) for _ in program.streams)
    seen, waiting = {start}, [start]
    while waiting:
        state = waiting.pop()
        following = list(_steps(program, state))
        if not following and any(done < len(stream) for (done, _), stream in zip(state, program.streams, strict=True)):
            found.add(f"nothing goes on from {state}")
        for after, begun in following:
            if begun is not None and not _may_begin(program, graph, state, begun):
                found.add(f"operator {begun.operator} begins too early")
            if after not in seen:
                seen.add(after)
                waiting.append(after)
    return sorted(found)


def _steps(program: RTaskProgram, state: State) -> Iterator[tuple[State, ScheduleEntry | None]]:
    """Every state that may come next, with the entry that begins, if one does."""
    for unit, (done, is_running) in enumerate(state):
        if is_running:
            yield _changed(state, unit, (done + 1, False)), None
        elif done < len(program.streams[unit]):
            entry = program.streams[unit][done]
            if all(state[other][0] >= order for other, order in entry.waits):
                yield _changed(state, unit, (done, True)), entry


def _changed(state: State, unit: int, value: tuple[int, bool]) -> State:
    return (*state[:unit], value, *state[unit + 1 :])


def _may_begin(program: RTaskProgram, graph: RTaskGraph, state: State, entry: ScheduleEntry) -> bool:
    """Whether all rTasks of the predecessors of ``entry`` have ended."""
    needed = graph.operators[entry.operator].predecessors
    return not any(
        item.operator in needed
        for (done, _), stream in zip(state, program.streams, strict=True)
        for item in stream[done:]
    )


def without_one_wait(program: RTaskProgram) -> Iterator[RTaskProgram]:
    """The program, less one pair of one entry's waits, for every pair."""
    for unit, place, entry in program.entries():
        for pair in entry.waits:
            fewer = replace(entry, waits=tuple(item for item in entry.waits if item != pair))
            yield with_entry(program, unit, place, fewer)


def with_entry(program: RTaskProgram, unit: int, place: int, entry: ScheduleEntry) -> RTaskProgram:
    """The program with another entry at one place."""
    streams = [list(stream) for stream in program.streams]
    streams[unit][place] = entry
    return replace(program, streams=tuple(map(tuple, streams)))
