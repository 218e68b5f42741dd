"""How a data tile is divided among the threads that copy it."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from tvm_ext.support.arithmetic import ceil_div

from .tiling import Number, both, quotient, remainder

if TYPE_CHECKING:
    pass


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CopyShape:
    """Units of ``width`` neighbours in memory, numbered along the box.

    ``sizes`` are the box's; its last ``run`` dimensions are one run of memory. Units are numbered so that ``patch``
    neighbours of a run come first, then the rows, then the next patch. A row may be given more units than it has
    (``row_units``), so that no warp goes on in the next row: 58 columns take 64 units, 6 of them idle.

    With a ``phase`` > 1 the columns of a row are taken in the order in which shared memory keeps them: for 5 columns
    and two phases 0, 2, 4, 1, 3 (and an idle unit).

    A ``last_resort`` copies what lies apart in memory, and is worth it only where it leaves no bank conflict.
    """

    sizes: tuple[int, ...]
    run: int
    width: int
    patch: int
    row_units: int
    phase: int = 1
    last_resort: bool = False

    @property
    def run_units(self) -> int:
        """Units that a row has."""
        return prod(self.sizes[len(self.sizes) - self.run :]) // self.width

    @property
    def units(self) -> int:
        """All unit numbers, idle ones included."""
        return prod(self.sizes[: len(self.sizes) - self.run]) * self.row_units

    @property
    def has_idle_units(self) -> bool:
        return self.row_units != self.run_units

    def _parts(self, unit: Number) -> tuple[list[Number], Number]:
        """(coordinates of the row, unit in the row)."""
        rows = self.sizes[: len(self.sizes) - self.run]
        parts: list[Number] = []
        for extent in reversed([*rows, self.patch]):
            parts.insert(0, remainder(unit, extent))
            unit = quotient(unit, extent)
        if self.row_units == self.patch:  # the first row coordinate is not reduced: it is the last digit
            return parts[:-1], parts[-1]
        return parts[:-1], unit * self.patch + parts[-1]

    def _column(self, position: Number) -> Number:
        """The column that is the ``position``-th of its row to be copied."""
        if self.phase == 1:
            return position
        each = ceil_div(self.run_units, self.phase)
        return remainder(position, each) * self.phase + quotient(position, each)

    def used(self, unit: Number) -> Number:
        """Whether the unit is not idle: a bool or a condition.

        Sorted by phase, both the last column of a phase that is one shorter and what follows the last phase are idle.
        """
        position = self._parts(unit)[1]
        used = self._column(position) < self.run_units
        sorted_units = self.phase * ceil_div(self.run_units, self.phase)
        if self.phase == 1 or self.row_units <= sorted_units:
            return used
        return both(used, position < sorted_units)

    def offsets(self, unit: Number, element: Number) -> list[Number]:
        """Where in the box ``element`` of ``unit`` is; a box of a scalar has no dimensions to be somewhere in."""
        if not self.sizes:
            return []
        rows, position = self._parts(unit)
        run = self._column(position) * self.width + element
        inner: list[Number] = []
        for extent in reversed(self.sizes[len(rows) + 1 :]):
            inner.insert(0, remainder(run, extent))
            run = quotient(run, extent)
        return [*rows, run, *inner]
