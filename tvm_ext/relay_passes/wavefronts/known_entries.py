"""What each vEU of a plan knows of the others: how many entries of theirs have ended for certain."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tvm_ext.records.rtask_order import EntryClock


class KnownEntries:
    """A count for each pair of ``count`` vEUs, 0 at first.

    Only vEUs that know something have a row: thousands of plans are made for a few operators each, on devices of
    thousands of vEUs, and a square of zeros for each of them took most of the time.
    """

    def __init__(self, count: int) -> None:
        self._row = np.zeros(count, dtype=np.int64)  # by vEU, its row; the first one is of all that know nothing
        self._rows: EntryClock = np.zeros((1, count), dtype=np.int64)

    def copy(self) -> KnownEntries:
        """One that goes its own way from here."""
        other = KnownEntries(0)
        other._row, other._rows = self._row.copy(), self._rows.copy()
        return other

    def of(self, units: Sequence[int]) -> EntryClock:
        """A row for each of ``units``."""
        rows: EntryClock = self._rows[self._row[units]]
        return rows

    def about(self, units: EntryClock) -> EntryClock:
        """Of every vEU, what it knows of ``units``."""
        columns: EntryClock = self._rows[:, units][self._row]
        return columns

    def learn(self, units: Sequence[int], told: EntryClock) -> None:
        """Let ``units`` know what ``told`` says, too."""
        self._keep(units)
        rows = self._row[units]
        self._rows[rows] = np.maximum(self._rows[rows], told)

    def count_own(self, units: Sequence[int], entries: EntryClock) -> None:
        """Let each of ``units`` know that it has ended so many of its own."""
        self._keep(units)
        self._rows[self._row[units], units] = entries

    def _keep(self, units: Sequence[int]) -> None:
        """Have a row for each of ``units``."""
        new = [unit for unit in units if not self._row[unit]]
        if new:
            first = len(self._rows)
            self._row[new] = np.arange(first, first + len(new))
            self._rows = np.concatenate([self._rows, np.zeros((len(new), self._rows.shape[1]), dtype=np.int64)])
