"""Every order in which the blocks of a persistent kernel can take their steps, on the tables of a small schedule.

Blocks begin (where they find room), take a ticket or the next entry of their stream, pass their waits, run and arrive;
what each sees of the counters is by the functions' arithmetic, modulo 2^32. States that can be reached are visited once
each. Threads of a block, and what stores are visible, are the subject of the interpreter and of the memory model.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

from tests.support.simt.persistent_kernels import ENTRY, WAIT, Tables, state
from tvm_ext.records.rtasks import RTaskGraph
from tvm_ext.verify.simt.between_blocks import WRAP, has_come

BEFORE, FETCH, AT, RUN, OVER = range(5)
Block = tuple[int, int]
"""What it does, and the entry."""

Reached = tuple[tuple[Block, ...], int, int]
"""Blocks, entries that have ended (a bit each), tickets taken."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockWalk:
    """A kernel of ``tables`` in run ``epoch``, with room for ``resident`` blocks (0: all) at a time."""

    tables: Tables
    graph: RTaskGraph
    blocks: int
    tickets: bool = False
    resident: int = 0
    epoch: int = 0
    epoch_shift: int = 0

    def faults(self) -> set[str]:
        """What can go wrong in some order."""
        start: Reached = (((BEFORE, 0),) * self.blocks, 0, 0)
        found, seen, todo = set[str](), {start}, [start]
        conditions, needs = self._conditions(), self._needs()
        while todo:
            reached = todo.pop()
            following = list(self._steps(reached, conditions, needs))
            if not following and any(what != OVER for what, _ in reached[0]):
                found.add("stuck")
            for after, fault in following:
                if fault:
                    found.add(fault)
                if after not in seen:
                    seen.add(after)
                    todo.append(after)
        return found

    def _steps(
        self, reached: Reached, conditions: list[list[tuple[int, frozenset[int]]]], needs: list[int]
    ) -> Iterator[tuple[Reached, str]]:
        blocks, ended, taken = reached
        room = (self.resident or self.blocks) - sum(what not in (BEFORE, OVER) for what, _ in blocks)
        for number, (what, entry) in enumerate(blocks):
            if what == BEFORE and room > 0:
                first = 0 if self.tickets else int(self.tables.first[number])
                yield (_put(blocks, number, (FETCH, first)), ended, taken), ""
            elif what == FETCH:
                yield self._fetched(reached, number, entry), ""
            elif what == AT and all((ended & bits).bit_count() in some for bits, some in conditions[entry]):
                fault = "too early" if needs[entry] & ~ended else ""
                yield (_put(blocks, number, (RUN, entry)), ended, taken), fault
            elif what == RUN:
                yield (_put(blocks, number, (FETCH, entry + 1)), ended | 1 << entry, taken), ""

    def _fetched(self, reached: Reached, number: int, entry: int) -> Reached:
        blocks, ended, taken = reached
        if self.tickets:
            entry, last, taken = taken, len(self.tables.arrivals), taken + 1
        else:
            last = int(self.tables.first[number + 1])
        return _put(blocks, number, (AT, entry) if entry < last else (OVER, 0)), ended, taken

    def rows_of(self, entry: int) -> range:
        """The rows of waits that are before an entry."""
        return range(int(self.tables.entries[entry * ENTRY + 3]), int(self.tables.entries[entry * ENTRY + 4]))

    def _passing(self, row: int) -> frozenset[int]:
        """After how many of its arrivals a counter lets this wait go on."""
        counter, per_run, count = (int(self.tables.waits[row * WAIT + place]) for place in range(WAIT))
        first = int(state(self.tables, self.blocks, self.epoch)[counter])
        target = ((self.epoch + self.epoch_shift) * per_run + count) % WRAP
        rises = range(len(self.tables.arrivals) + 1)
        return frozenset(rise for rise in rises if has_come((first + rise) % WRAP, target))

    def _conditions(self) -> list[list[tuple[int, frozenset[int]]]]:
        """Of each entry: (arrivals at a counter, a bit each; how many of them let it go on)."""
        bits: dict[int, int] = {}
        for at, counter in enumerate(self.tables.arrivals.tolist()):
            bits[counter] = bits.get(counter, 0) | 1 << at
        rows = [self.rows_of(entry) for entry in range(len(self.tables.arrivals))]
        row = functools.cache(lambda n: (bits.get(int(self.tables.waits[n * WAIT]), 0), self._passing(n)))
        return [[row(number) for number in some] for some in rows]

    def _needs(self) -> list[int]:
        """Of each entry: those that must have ended before it, a bit each."""
        operators = self.tables.entries.reshape(-1, ENTRY)[:, 0].tolist()
        needed = [self.graph.operators[operator].predecessors for operator in operators]
        return [sum(1 << at for at, operator in enumerate(operators) if operator in some) for some in needed]


def _put(blocks: tuple[Block, ...], place: int, block: Block) -> tuple[Block, ...]:
    return (*blocks[:place], block, *blocks[place + 1 :])
