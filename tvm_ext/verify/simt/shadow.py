"""The shadow of a memory: who wrote and read each cell, and when, since threads last met at a barrier.

Time is counted in events: each executed access has a number, and a barrier notes the latest one for its block. Two
accesses of a cell by different threads, one of them a write, conflict if the earlier came after the last barrier of
their block, or if they are of different blocks. Worked example: thread 0 writes cell 5 (event 7), thread 1 reads it
(event 9). Without a barrier in between the block's mark is below 7: a race; with one it is 7 or 8: ordered.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from tvm_ext.support.arrays import Array

from .block_clocks import NOBODY, Knowledge
from .lanes import Lanes
from .ordering import Acquired


@dataclass(kw_only=True, slots=True, eq=False)
class Clock:
    """The barriers so far: ``block_marks`` (one event a block of the batch), ``warp_marks`` (one a warp).

    ``acquired`` is what waits at mbarriers order, ``between`` what waits for other blocks do; None in a kernel that has
    none.
    """

    lanes: Lanes
    block_marks: Array
    warp_marks: Array
    acquired: Acquired | None = None
    between: Knowledge | None = None

    def marks(self, lane: Array) -> Array:
        """The event of the last barrier of each lane's block."""
        return np.asarray(self.block_marks[self.lanes.row[lane]])

    def met_in_warp(self, who: Array, other: Array, event: Array) -> Array:
        """Whether both threads are of one warp that has synchronised since ``event``."""
        size, warps = self.lanes.padded_threads, self.lanes.warp_lanes
        rows = {int(block): row for row, block in enumerate(self.lanes.blocks)}
        row = np.array([rows[block] for block in (who // size).ravel().tolist()]).reshape(who.shape)
        since = event <= self.warp_marks[(row * size + who % size) // warps]
        return np.asarray((who // warps == other // warps) & since)


Conflict = Literal["read after write", "write after read", "write after write"]
Report = Callable[[Conflict, int, int, int, int, int], None]
"""Called with (conflict, cell, thread, other thread, event of the other, how many cells conflict)."""


class Shadow:
    """The state of ``cells`` cells. ``shared_by_blocks``: of global memory, where blocks meet without any barrier."""

    def __init__(self, cells: int, *, shared_by_blocks: bool) -> None:
        self.shared_by_blocks = shared_by_blocks
        self.writer = np.full(cells, NOBODY, np.int64)
        self.write_event = np.zeros(cells, np.int64)
        self.reader = np.full(cells, NOBODY, np.int64)
        self.read_event = np.zeros(cells, np.int64)
        self.other_reader = np.full(cells, NOBODY, np.int64)
        self.other_read_event = np.zeros(cells, np.int64)
        self._equal_writes: list[tuple[int, Array, Array]] = []  # (event, cells, threads): wrote what another wrote

    def read(self, cells: Array, lane: Array, event: int, clock: Clock, report: Report) -> None:
        """Threads of ``lane`` (k,) read ``cells`` (k, c)."""
        who, mark = clock.lanes.identity[lane][:, None], clock.marks(lane)[:, None]
        written = self.write_event[cells]
        if written.any():
            bad = self._conflicts(self.writer[cells], written, who, mark, clock)
            if bad.any():
                bad = bad & ~self._wrote_the_same(cells, who, mark)
            self._tell("read after write", bad, cells, who, self.writer, self.write_event, report)
        self._note_readers(cells, who, mark, event)

    def write(self, cells: Array, lane: Array, event: int, clock: Clock, report: Report, equal: Array) -> None:
        """Threads of ``lane`` write ``cells``; ``equal`` (k, c) says where what is there already."""
        who, mark = clock.lanes.identity[lane][:, None], clock.marks(lane)[:, None]
        for reader, when in ((self.reader, self.read_event), (self.other_reader, self.other_read_event)):
            bad = self._conflicts(reader[cells], when[cells], who, mark, clock)
            self._tell("write after read", bad, cells, who, reader, when, report)
        bad = self._conflicts(self.writer[cells], self.write_event[cells], who, mark, clock)
        if bad.any():
            before = self.writer[cells]
            same_block = before // clock.lanes.padded_threads == who // clock.lanes.padded_threads
            harmless = bad & equal & same_block
            self._note_equal(event, cells, before, np.broadcast_to(who, cells.shape), harmless)
            self._tell("write after write", bad & ~harmless, cells, who, self.writer, self.write_event, report)
        self.writer[cells] = who
        self.write_event[cells] = event

    def forget_writer(self, cells: Array) -> None:
        """The cells hold what no thread wrote."""
        self.writer[cells], self.write_event[cells] = NOBODY, 0

    def settle(self, cells: Array, lane: Array, event: int, clock: Clock, report: Report, equal: Array) -> None:
        """After the values are stored: threads whose cell another thread wrote in the same statement.

        ``equal`` says where the value that stayed is the one that this thread wrote.
        """
        who = clock.lanes.identity[lane][:, None]
        winner = self.writer[cells]
        lost = winner != who
        if lost.any():
            size = clock.lanes.padded_threads
            harmless = lost & equal & (winner // size == who // size)
            self._note_equal(event, cells, winner, np.broadcast_to(who, cells.shape), harmless)
            self._tell("write after write", lost & ~harmless, cells, who, self.writer, self.write_event, report)

    def _conflicts(self, other: Array, when: Array, who: Array, mark: Array, clock: Clock) -> Array:
        bad: Array = (when > mark) & (other != who)
        if self.shared_by_blocks:
            size = clock.lanes.padded_threads
            bad |= (other != NOBODY) & (other // size != who // size)
        if bad.any() and clock.warp_marks.any():
            bad &= ~clock.met_in_warp(np.broadcast_to(who, bad.shape), other, when)
        if bad.any() and clock.acquired is not None:
            bad &= ~clock.acquired.ordered(np.broadcast_to(who, bad.shape), other, when)
        return bad

    def _note_readers(self, cells: Array, who: Array, mark: Array, event: int) -> None:
        fresh = self.read_event[cells] <= mark
        if self.shared_by_blocks:  # a reader of another block stays on record
            fresh &= (self.reader[cells] == NOBODY) | (self.reader[cells] == who)
        everyone = np.broadcast_to(who, cells.shape)
        chosen = cells if fresh.all() else cells[fresh]
        self.reader[chosen] = everyone if chosen is cells else everyone[fresh]
        self.read_event[chosen] = event
        another = self.reader[cells] != who
        if another.any():
            self.other_reader[cells[another]] = everyone[another]
            self.other_read_event[cells[another]] = event

    def _note_equal(self, event: int, cells: Array, first: Array, second: Array, where: Array) -> None:
        if where.any():
            both = np.concatenate([first[where], second[where]])
            self._equal_writes.append((event, np.tile(cells[where], 2), both))

    def _wrote_the_same(self, cells: Array, who: Array, mark: Array) -> Array:
        """Whether a reader is itself one of those who wrote this value since the barrier."""
        since = int(mark.min())
        self._equal_writes = [entry for entry in self._equal_writes if entry[0] > since]
        pairs = {pair for _, c, t in self._equal_writes for pair in zip(c.tolist(), t.tolist(), strict=True)}
        if not pairs:
            return np.zeros(cells.shape, bool)
        everyone = np.broadcast_to(who, cells.shape)
        found = [pair in pairs for pair in zip(cells.ravel().tolist(), everyone.ravel().tolist(), strict=True)]
        return np.array(found).reshape(cells.shape)

    @staticmethod
    def _tell(
        conflict: Conflict, bad: Array, cells: Array, who: Array, other: Array, when: Array, report: Report
    ) -> None:
        if not bad.any():
            return
        cell = int(cells[bad][0])
        thread = int(np.broadcast_to(who, bad.shape)[bad][0])
        report(conflict, cell, thread, int(other[cell]), int(when[cell]), int(bad.sum()))


def same_bits(first: Any, second: Any) -> Array:
    """Element by element, whether two arrays of one dtype are equal bit for bit (so that NaN equals itself)."""
    unsigned = f"u{first.dtype.itemsize}"
    return np.asarray(np.ascontiguousarray(first).view(unsigned) == np.ascontiguousarray(second).view(unsigned))
