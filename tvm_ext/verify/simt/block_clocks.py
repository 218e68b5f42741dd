"""What a block knows of others of its launch: vector clocks, handed on by counters.

Source: PTX ISA, "Memory Consistency Model": a release and the acquire that observes it order what lies before the one
before what lies behind the other, at the scope of both; barriers of a block carry that on to its threads. Time is
counted in events, as in `shadow`. Of each other block a thread knows the latest event which all of that one's threads
had done (their last barrier before the arrival), and that of the thread which arrived. Worked example: block 0's
threads store (events 3..5) and meet (mark 5), thread 0 stores a word (6) and arrives. Who waits for it knows 5 of all
threads of block 0 and 6 of thread 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from tvm_ext.support.arrays import Array

from .lanes import Lanes

NOBODY = -1
"""Instead of a thread's identity."""


@dataclass(frozen=True, slots=True, eq=False)
class KnownEvents:
    """By block: the latest event known of ``all`` threads, and of one thread ``leader`` (its identity) ``led``."""

    all: Array
    leader: Array
    led: Array

    @staticmethod
    def nothing(blocks: int) -> KnownEvents:
        return KnownEvents(np.zeros(blocks, np.int64), np.full(blocks, NOBODY, np.int64), np.zeros(blocks, np.int64))

    def joined(self, other: KnownEvents) -> KnownEvents:
        """What either knows; of two leaders of a block, the one that is known for longer."""
        later = other.led > self.led
        return KnownEvents(
            np.maximum(self.all, other.all),
            np.where(later, other.leader, self.leader),
            np.where(later, other.led, self.led),
        )

    def has(self, place: Array, who: Array, when: Array) -> Array:
        """Whether the event ``when`` of thread ``who``, of the block at ``place``, lies before."""
        return np.asarray((when <= self.all[place]) | ((who == self.leader[place]) & (when <= self.led[place])))


class Knowledge:
    """What the threads of a block, the only one of ``lanes``, know of the other blocks.

    ``marks`` has the event of its last barrier, ``places`` numbers all blocks of the launch.
    """

    def __init__(self, lanes: Lanes, marks: Array, places: Mapping[int, int]) -> None:
        self._lanes, self._marks = lanes, marks
        self._own = places[int(lanes.blocks[0])]
        self._places = np.full(max(places) + 2, len(places), np.int64)  # the last one: nobody's
        self._places[list(places)] = list(places.values())
        self._common = KnownEvents.nothing(len(places) + 1)
        self._alone: dict[int, KnownEvents] = {}  # of lanes that have waited since the last barrier

    def meet(self, arrived: Array) -> None:
        """A barrier of the block: what one thread knows, all know."""
        for known in self._alone.values():
            self._common = self._common.joined(known)
        self._alone.clear()

    def released(self, lane: int, event: int) -> KnownEvents:
        """What the thread hands on at ``event``: what it knows, its block up to the last barrier, and itself."""
        known = self._alone.get(lane, self._common)
        everyone, leader, led = known.all.copy(), known.leader.copy(), known.led.copy()
        everyone[self._own] = self._marks[0]
        leader[self._own], led[self._own] = self._lanes.identity[lane], event
        return KnownEvents(everyone, leader, led)

    def acquire(self, lane: int, released: KnownEvents) -> None:
        self._alone[lane] = self._alone.get(lane, self._common).joined(released)

    def unordered(self, lane: Array, who: Array, when: Array) -> Array:
        """Where threads ``who`` are of other blocks, their events ``when`` not known to lie before ``lane`` (k, 1)."""
        place = self._places[who // self._lanes.padded_threads]
        before = self._common.has(place, who, when)
        for one, known in self._alone.items():
            before = np.where(lane == one, known.has(place, who, when), before)
        return np.asarray((who != NOBODY) & (place != self._own) & ~before)
