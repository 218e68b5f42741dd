"""What each vEU of a plan knows of the others: how many entries of theirs have ended for certain."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tvm_ext.records.rtask_order import EntryClock

Units = NDArray[np.intp]
"""Numbers of vEUs, each once, ascending."""

Flags = NDArray[np.bool_]


class KnownEntries:
    """A count for each pair of ``count`` vEUs, 0 at first: for a few of them."""

    def __init__(self, count: int) -> None:
        self._rows: EntryClock = np.zeros((count, count), dtype=np.int64)

    def copy(self) -> KnownEntries:
        """One that goes its own way from here."""
        other = KnownEntries(0)
        other._rows = self._rows.copy()
        return other

    def of(self, units: Units) -> EntryClock:
        """A row for each of ``units``."""
        rows: EntryClock = self._rows[units]
        return rows

    def about(self, units: Units) -> EntryClock:
        """Of every vEU, what it knows of ``units``."""
        columns: EntryClock = self._rows[:, units]
        return columns

    def learn(self, units: Units, told: EntryClock) -> None:
        """Let ``units`` know what ``told`` says, too."""
        self._rows[units] = np.maximum(self._rows[units], told)

    def count_own(self, units: Units) -> None:
        """Let each of ``units`` know that it has ended one more of its own."""
        self._rows[units, units] += 1

    def most(self, units: Units) -> EntryClock:
        """What is known if all that ``units`` know is put together."""
        found: EntryClock = self._rows[units].max(axis=0)
        return found


class KnownTogether:
    """The same for many vEUs: those that have been told the same share a row, and what a vEU did itself is apart.

    Worked example: of 640 vEUs that all run rTasks of each operator, all know that all have ended those of the one
    before the last: one row of 640 numbers and 640 numbers of their own, not a square of 409,600. Rows are replaced and
    never written to, so that a copy is made in no time.
    """

    def __init__(self, count: int) -> None:
        self._own: EntryClock = np.zeros(count, dtype=np.int64)
        self._row: NDArray[np.intp] = np.zeros(count, dtype=np.intp)  # by vEU, its row
        self._rows: EntryClock = np.zeros((1, count), dtype=np.int64)
        self._told: EntryClock = np.zeros(count, dtype=np.int64)  # by vEU, what its row says of itself

    def copy(self) -> KnownTogether:
        """One that goes its own way from here."""
        other = KnownTogether(0)
        other._own, other._row, other._told = self._own.copy(), self._row.copy(), self._told.copy()
        other._rows = self._rows
        return other

    def late(self, needed: EntryClock) -> Flags:
        """By vEU, whether it does not know of all others that they have ended as many as ``needed`` says."""
        missing = (needed > self._rows).sum(axis=1)
        late: Flags = missing[self._row] > (needed > self._told)
        return late

    def missing(self, units: Units, needed: EntryClock) -> tuple[Units, Flags]:
        """Of which vEUs any of ``units`` does not know what is ``needed``, and which of ``units`` that are."""
        rows, sizes = self._rows_of(units)
        missing = needed > self._rows
        waiting = missing.sum(axis=1)[rows] > missing[rows, units]
        alone = sizes[rows] == 1
        missing[rows[alone], units[alone]] = False  # nobody else of them has its row, and it knows of itself
        return np.flatnonzero(missing[sizes > 0].any(axis=0)), waiting

    def learn(self, units: Units, told: EntryClock) -> None:
        """Let ``units`` know what ``told`` says, too."""
        joined = np.maximum(self._rows, told)
        knew_more = (joined > told).any(axis=1)
        rows = np.concatenate([self._rows, told[np.newaxis], joined[knew_more]])
        self._row[units] = (len(self._rows) + knew_more * np.cumsum(knew_more))[self._row[units]]
        used = np.bincount(self._row, minlength=len(rows)) > 0
        self._rows, self._row = rows[used], (np.cumsum(used) - 1)[self._row]
        self._told[units] = self._rows[self._row[units], units]

    def count_own(self, units: Units) -> None:
        """Let each of ``units`` know that it has ended one more of its own."""
        self._own[units] += 1

    def least(self, units: Units) -> EntryClock:
        """What all of ``units`` know."""
        rows, sizes = self._rows_of(units)
        known, alone = self._rows.copy(), sizes[rows] == 1
        known[rows[alone], units[alone]] = self._own[units[alone]]
        found: EntryClock = known[sizes > 0].min(axis=0)
        return found

    def most(self, units: Units) -> EntryClock:
        """What is known if all that ``units`` know is put together."""
        _, sizes = self._rows_of(units)
        found: EntryClock = self._rows[sizes > 0].max(axis=0)
        found[units] = self._own[units]
        return found

    def _rows_of(self, units: Units) -> tuple[Units, Units]:
        """The rows of ``units``, and by row, how many of them have it."""
        rows = self._row[units]
        return rows, np.bincount(rows, minlength=len(self._rows))
