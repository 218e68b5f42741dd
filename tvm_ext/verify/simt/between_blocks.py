"""Memory that blocks of one launch share while they wait for each other: a shadow that knows of counters, and counters.

All accesses of two blocks that no counter orders (`block_clocks`) are a race, in whatever order the blocks happen to
run, so that a store that nobody waited for is found also where it came early. A wait takes over no more than the
arrivals that it needed: had the counter risen further in the meantime, on a device it might not have.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from tvm_ext.support.arrays import Array

from .block_clocks import NOBODY, KnownEvents
from .shadow import Clock, Conflict, Report, Shadow

WRAP = 1 << 32
"""Counters have 32 bits."""


class BlocksShadow:
    """The shadow of global memory in a launch whose blocks synchronise: `Shadow`'s questions and answers.

    A `Shadow` for each block finds races of its threads. Between blocks, the last store of each cell and all blocks'
    last loads are asked for; what lies before these is ordered by them, or a race that was told.
    """

    def __init__(self, cells: int) -> None:
        self._cells = cells
        self._blocks: dict[int, Shadow] = {}
        self.writer = np.full(cells, NOBODY, np.int64)
        self.write_event = np.zeros(cells, np.int64)
        self._atomic = np.zeros(cells, bool)

    def read(self, cells: Array, lane: Array, event: int, clock: Clock, report: Report) -> None:
        """`Shadow.read`."""
        self._check("read after write", self.writer, self.write_event, cells, lane, clock, report)
        self._of(clock).read(cells, lane, event, clock, report)

    def write(self, cells: Array, lane: Array, event: int, clock: Clock, report: Report, equal: Array) -> None:
        """`Shadow.write`; equal values of two blocks are a race, too."""
        self._check("write after write", self.writer, self.write_event, cells, lane, clock, report)
        self._check_readers(cells, lane, clock, report)
        self._of(clock).write(cells, lane, event, clock, report, equal)
        self._note_write(cells, lane, event, clock, atomic=False)

    def settle(self, cells: Array, lane: Array, event: int, clock: Clock, report: Report, equal: Array) -> None:
        """`Shadow.settle`."""
        self._of(clock).settle(cells, lane, event, clock, report, equal)

    def forget_writer(self, cells: Array) -> None:
        """`Shadow.forget_writer`."""
        self.writer[cells], self.write_event[cells] = NOBODY, 0
        for shadow in self._blocks.values():
            shadow.forget_writer(cells)

    def change(self, cells: Array, lane: Array, event: int, clock: Clock, report: Report) -> None:
        """An atomic access: it races with plain ones only."""
        if not self._atomic[cells].all():
            self._check("write after write", self.writer, self.write_event, cells, lane, clock, report)
        self._check_readers(cells, lane, clock, report)
        self._note_write(cells, lane, event, clock, atomic=True)

    def _of(self, clock: Clock) -> Shadow:
        block = int(clock.lanes.blocks[0])
        if block not in self._blocks:
            self._blocks[block] = Shadow(self._cells, shared_by_blocks=False)
        return self._blocks[block]

    def _note_write(self, cells: Array, lane: Array, event: int, clock: Clock, *, atomic: bool) -> None:
        self.writer[cells], self.write_event[cells] = clock.lanes.identity[lane][:, None], event
        self._atomic[cells] = atomic

    def _check_readers(self, cells: Array, lane: Array, clock: Clock, report: Report) -> None:
        own = self._of(clock)
        for other in [shadow for shadow in self._blocks.values() if shadow is not own]:
            for reader, when in ((other.reader, other.read_event), (other.other_reader, other.other_read_event)):
                self._check("write after read", reader, when, cells, lane, clock, report)

    @staticmethod
    def _check(
        conflict: Conflict, other: Array, when: Array, cells: Array, lane: Array, clock: Clock, report: Report
    ) -> None:
        who = other[cells]
        if clock.between is None or not (who != NOBODY).any():
            return
        bad = clock.between.unordered(lane[:, None], who, when[cells])
        if bad.any():
            cell = int(cells[bad][0])
            mine = np.broadcast_to(clock.lanes.identity[lane][:, None], bad.shape)
            report(conflict, cell, int(mine[bad][0]), int(other[cell]), int(when[cell]), int(bad.sum()))


@dataclass(slots=True, eq=False)
class Counter:
    """One int32 that blocks raise: all its values of this launch, each with what arrivals up to it released."""

    first: int
    blocks: int
    values: list[tuple[int, KnownEvents]] = field(default_factory=list)

    @property
    def value(self) -> int:
        return self.values[-1][0] if self.values else self.first

    def add(self, amount: int, released: KnownEvents | None) -> int:
        """Raise it, by an arrival that releases or one that does not; what it was before."""
        before = self.value
        known = self.values[-1][1] if self.values else KnownEvents.nothing(self.blocks)
        self.values.append(((before + amount) % WRAP, known if released is None else known.joined(released)))
        return before

    def reached(self, target: int) -> KnownEvents | None:
        """What the first value that lets a wait for ``target`` go on has to give; None where there is none yet."""
        if has_come(self.first, target):
            return KnownEvents.nothing(self.blocks)
        return next((known for value, known in self.values if has_come(value, target)), None)


def has_come(value: int, target: int) -> bool:
    """Whether a counter of 32 bits at ``value`` has passed ``target``, which is less than 2^31 away."""
    return (value - target) % WRAP < WRAP // 2
