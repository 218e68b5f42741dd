"""What the streams and waits of an rProgram order: which entries have ended before another begins.

Clocks are vectors with one count for each vEU, as Mattern's: that of an entry says how many entries of every vEU have
ended for certain when it begins. With Figure 9's schedule (`rtasks`) the convolution's rTask on vEU 0 begins at (1, 1).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from .rtasks import RTaskProgram, ScheduleEntry, Waits

Place = tuple[int, int]
"""Of an entry: its vEU, and how many entries that one takes before it."""

EntryClock = NDArray[np.int64]


def walk(program: RTaskProgram) -> Iterator[tuple[int, int, ScheduleEntry]]:
    """All entries, each behind those before it in its stream and those that it waits for: vEU, place, entry.

    Raises ValueError where entries wait for each other in a circle; the message names what each vEU waits for.
    """
    done = [0] * len(program.streams)
    met: set[int] = set()  # barriers, by object, that all their entries have passed: many entries may share one
    parked: dict[int, list[int]] = {}
    # First come, first served: who is woken looks again when all others have gone on, not after each of them.
    runnable = deque(range(len(done)))
    while runnable:
        unit = runnable.popleft()
        stream = program.streams[unit]
        while done[unit] < len(stream):
            entry = stream[done[unit]]
            missing = None if id(entry.waits) in met else _missing(entry.waits, done)
            if missing is not None:
                parked.setdefault(missing, []).append(unit)
                break
            met.add(id(entry.waits))
            yield unit, done[unit], entry
            done[unit] += 1
            runnable += parked.pop(unit, [])
    stuck = [unit for unit, stream in enumerate(program.streams) if done[unit] < len(stream)]
    if stuck:
        raise ValueError(f"the schedule never ends: {'; '.join(_waiting(program, unit, done) for unit in stuck[:8])}")


def _missing(waits: Waits, done: list[int]) -> int | None:
    """The first vEU that has not done what ``waits`` asks of it."""
    return next((unit for unit, order in waits if done[unit] < order), None)


def _waiting(program: RTaskProgram, unit: int, done: list[int]) -> str:
    entry = program.streams[unit][done[unit]]
    pairs = [f"entry {order} of vEU {other}" for other, order in entry.waits if done[other] < order]
    return f"vEU {unit}, entry {done[unit] + 1} (operator {entry.operator}) waits for {', '.join(pairs[:4])}"


class ProgramOrder:
    """The order that holds in every run of ``program``; raises ValueError where it cannot run to its end.

    Of an entry, what its vEU has been told of the others is kept: what it has ended itself is the entry's place. Where
    hundreds of vEUs wait for the same, all of them have been told the same, which is one vector and not one for each.
    """

    def __init__(self, program: RTaskProgram) -> None:
        nothing: EntryClock = np.zeros(len(program.streams), dtype=np.int64)
        self._told: list[list[EntryClock]] = [[] for _ in program.streams]
        joined: dict[int, EntryClock] = {}  # by object of waits
        more: dict[tuple[int, int], EntryClock] = {}  # by objects of what was told before, and of waits
        for unit, place, entry in walk(program):
            told = self._told[unit][place - 1] if place else nothing
            if entry.waits:
                key = id(told), id(entry.waits)
                if key not in more:
                    if id(entry.waits) not in joined:
                        joined[id(entry.waits)] = self._joined(entry.waits)
                    more[key] = _more(told, joined[id(entry.waits)])
                told = more[key]
            self._told[unit].append(told)

    def clock(self, place: Place) -> EntryClock:
        """How many entries of each vEU have ended when the entry at ``place`` begins."""
        clock: EntryClock = self.told(place).copy()
        clock[place[0]] = place[1]
        return clock

    def told(self, place: Place) -> EntryClock:
        """The same of other vEUs than its own, of which it says anything; entries may share one, by object."""
        return self._told[place[0]][place[1]]

    def before(self, first: Place, second: Place) -> bool:
        """Whether the entry at ``first`` has ended, in every run, when the one at ``second`` begins."""
        ended = second[1] if first[0] == second[0] else self.told(second)[first[0]]
        return bool(ended > first[1])

    def _joined(self, waits: Waits) -> EntryClock:
        """What is known once all that ``waits`` names has ended."""
        told = [self._told[unit][order - 1] for unit, order in waits]
        found: EntryClock = np.max(list({id(item): item for item in told}.values()), axis=0)
        units, orders = np.array(waits).T
        found[units] = np.maximum(found[units], orders)
        return found


def _more(told: EntryClock, joined: EntryClock) -> EntryClock:
    """Both; ``joined`` itself where that says all."""
    return joined if (joined >= told).all() else np.maximum(joined, told)
