"""What the blocks of a merged kernel walk: entries, their waits, and where their operands lie, as 32-bit integers.

Worked example: operator 2 waits for 0 and 1, and 1 for 0. An entry of 2 waits for the counter of 1 alone: who has seen
that all of 1 has ended knows that all of 0 had. Counters grow by the same number in each run, one for each entry.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from tvm_ext.records.merged import ENTRY_WORDS, WAIT_WORDS
from tvm_ext.records.rtasks import RTaskProgram, ScheduleEntry

Streams = list[list[ScheduleEntry]]


@dataclass(frozen=True, kw_only=True, slots=True)
class EntryCode:
    """What an operator's entries run: body ``body``, on operands at the places ``operands``, in the body's order."""

    body: int
    operands: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchTable:
    """A launch's part of the table: where in it the first words of streams, entries and their order are.

    ``counters`` is how many operators there are, each with one.
    """

    words: tuple[int, ...]
    streams_at: int
    entries_at: int
    order_at: int
    entry_count: int
    counters: int


def needed_waits(operators: Sequence[int], predecessors: Sequence[Sequence[int]]) -> dict[int, tuple[int, ...]]:
    """By operator of a launch, those of the same launch that it waits for, without what another wait implies.

    ``operators`` are in topological order; ``predecessors`` are those of all operators of the graph.
    """
    here, before, found = set(operators), dict[int, int](), dict[int, tuple[int, ...]]()
    for operator in operators:
        direct = [item for item in predecessors[operator] if item in here]
        implied = 0
        for item in direct:
            implied |= before[item]
        found[operator] = tuple(item for item in direct if not implied >> item & 1)
        before[operator] = implied | sum(1 << item for item in set(direct))
    return found


def waves_of(operators: Sequence[int], waits: dict[int, tuple[int, ...]]) -> list[list[int]]:
    """Operators that wait for nothing but earlier waves."""
    depth: dict[int, int] = {}
    for operator in operators:
        depth[operator] = max((depth[item] + 1 for item in waits[operator]), default=0)
    found: list[list[int]] = [[] for _ in range(max(depth.values()) + 1)]
    for operator, level in depth.items():
        found[level].append(operator)
    return found


def in_one_order(program: RTaskProgram, waits: dict[int, tuple[int, ...]]) -> list[tuple[int, int]]:
    """All entries, as (stream, place in it), so that each comes behind what it waits for; among those that could, by
    their places.
    """
    total: dict[int, int] = {}
    for _, _, entry in program.entries():
        total[entry.operator] = total.get(entry.operator, 0) + 1
    done = dict.fromkeys(total, 0)
    ready = [(0, unit) for unit, stream in enumerate(program.streams) if stream]
    blocked: list[tuple[int, int]] = []
    order: list[tuple[int, int]] = []
    while ready or blocked:
        if not ready:
            raise ValueError("entries wait for each other in a circle")
        place, unit = heapq.heappop(ready)
        entry = program.streams[unit][place]
        if any(done[item] < total[item] for item in waits[entry.operator]):
            blocked.append((place, unit))
            continue
        order.append((unit, place))
        done[entry.operator] += 1
        if place + 1 < len(program.streams[unit]):
            heapq.heappush(ready, (place + 1, unit))
        if done[entry.operator] == total[entry.operator]:
            for item in blocked:
                heapq.heappush(ready, item)
            blocked = []
    return order


def launch_table(
    streams: Streams, codes: dict[int, EntryCode], waits: dict[int, tuple[int, ...]], at: int, order: Sequence[int] = ()
) -> LaunchTable:
    """The table of a launch whose blocks run ``streams``, to lie at word ``at``.

    In this order: the first entry of each stream and that behind the last, entries, waits, operands; then ``order``,
    numbers of entries such that each comes behind what it waits for.
    """
    operators = list(dict.fromkeys(entry.operator for stream in streams for entry in stream))
    counter = {operator: number for number, operator in enumerate(sorted(operators))}
    total = dict.fromkeys(operators, 0)
    for stream in streams:
        for entry in stream:
            total[entry.operator] += 1
    count = sum(total.values())
    streams_at, entries_at = at, at + len(streams) + 1
    tail_at = entries_at + ENTRY_WORDS * count
    tail: list[int] = []
    rows: dict[int, tuple[int, int, int]] = {}
    for operator in sorted(operators):
        first = tail_at + len(tail)
        for item in waits[operator]:
            tail += [counter[item], total[item]]
        last = tail_at + len(tail)
        rows[operator] = (first, (last - first) // WAIT_WORDS, last)
        tail += codes[operator].operands
    starts, entries = [0], list[int]()
    for stream in streams:
        for entry in stream:
            first, waited, operands = rows[entry.operator]
            entries += [codes[entry.operator].body, operands, entry.begin, entry.end]
            entries += [first, first + WAIT_WORDS * waited, counter[entry.operator], 0]
        starts.append(len(entries) // ENTRY_WORDS)
    return LaunchTable(
        words=(*starts, *entries, *tail, *order),
        streams_at=streams_at,
        entries_at=entries_at,
        order_at=tail_at + len(tail),
        entry_count=count,
        counters=len(counter),
    )
