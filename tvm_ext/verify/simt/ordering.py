"""What orders the accesses of a block's threads besides barriers: mbarriers that were waited for, and proxy fences.

Source: PTX ISA, "Memory Consistency Model" (release and acquire patterns) and "Proxies": bulk copies go through the
async proxy, all other accesses through the generic one. Time is counted in events, as in `shadow`.
"""

from __future__ import annotations

import numpy as np

from tvm_ext.support.arrays import Array

from .lanes import Lanes


class Acquired:
    """Vector clocks: for each lane, the latest event of each thread of its block that is known to lie before it.

    A thread that arrives at an mbarrier hands on what it did and what it knows (`released`); one that has waited for
    the phase takes it over (`acquire`). Columns beyond the block's threads are mbarriers: the latest event at which
    bulk copies that complete there have landed. Worked example: thread 1 reads a slot (event 7) and arrives, thread 0
    waits and then loads into the slot: 7 is in thread 0's column 1, the two accesses are ordered without a barrier.
    """

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self._events = np.zeros((lanes.count, lanes.padded_threads), np.int64)

    def add_column(self) -> int:
        """The number of a new column, for an mbarrier."""
        self._events = np.concatenate([self._events, np.zeros((len(self._events), 1), np.int64)], axis=1)
        return self._events.shape[1] - 1

    def released(self, lane: Array, event: int) -> Array:
        """What the lanes ``lane`` of one block hand on at ``event``: one event a column."""
        known = self._events[lane].max(axis=0)
        known[self._lanes.thread[lane]] = event
        return np.asarray(known)

    def acquire(self, lane: Array, released: Array) -> None:
        """The lanes ``lane`` now know what was ``released`` (maybe before columns were added)."""
        width = len(released)
        self._events[lane, :width] = np.maximum(self._events[lane, :width], released)

    def ordered(self, who: Array, other: Array, when: Array) -> Array:
        """Whether the event ``when`` of thread ``other`` lies before thread ``who``; both by identity, broadcast."""
        size = self._lanes.padded_threads
        same_block = who // size == other // size
        known = self._events[lane_of(self._lanes, who), np.where(same_block, other % size, 0)]
        return np.asarray(same_block & (when <= known))

    def knows(self, lane: Array, column: Array, when: Array) -> Array:
        """Whether lanes have waited for what landed at event ``when`` at the mbarrier of ``column``."""
        return np.asarray(when <= self._events[lane, column])


def lane_of(lanes: Lanes, identity: Array) -> Array:
    """The lanes of threads of this batch."""
    block, thread = np.divmod(identity, lanes.padded_threads)
    order = np.argsort(lanes.blocks)
    row = order[np.searchsorted(lanes.blocks, block, sorter=order)]
    return np.asarray(row * lanes.padded_threads + thread)


class ProxyFences:
    """Which generic accesses a bulk copy may build on: those behind a fence (``fence.proxy.async``) on the way to it.

    An access of thread x is on the right side for a copy that thread w issues if x fenced after it and then met w, or
    met w who then fenced, or met anybody who fenced before another barrier. ``marks`` has each block's last barrier.
    """

    def __init__(self, lanes: Lanes, marks: Array) -> None:
        self._lanes, self._marks = lanes, marks
        self._latest = np.zeros(lanes.count, np.int64)  # each lane's last fence
        self._before_barrier = np.zeros(lanes.count, np.int64)  # its last one before the block's last barrier
        self._covered = np.zeros(len(lanes.blocks), np.int64)  # events up to here are fenced for the whole block

    def fence(self, lane: Array, event: int) -> None:
        """The lanes execute a fence."""
        self._latest[lane] = event

    def at_barrier(self, arrived: Array) -> None:
        """The blocks ``arrived`` (bool) meet; called before the barrier moves ``marks``."""
        latest = self._latest.reshape(len(arrived), -1)
        fenced = (latest > self._marks[:, None]).any(axis=1) & arrived
        self._covered[fenced] = self._marks[fenced]
        np.copyto(self._before_barrier.reshape(latest.shape), latest, where=arrived[:, None])

    def covers(self, issuer: Array, author: Array, when: Array) -> Array:
        """Whether accesses at events ``when`` by lanes ``author`` are fenced for copies of lanes ``issuer``.

        All three broadcast; author and issuer are of one block.
        """
        row = self._lanes.row[issuer]
        mark, own = self._marks[row], self._latest[issuer]
        by_issuer = np.where(author == issuer, own > when, (when <= mark) & (own > mark))
        return np.asarray((when <= self._covered[row]) | (self._before_barrier[author] > when) | by_issuer)
