"""Which memory may be shared by values of a schedule that several units run at once: what happens before what.

A value lives from the start of the first operator that touches it to the end of the last. Two values may share bytes
where the schedule itself, by the order of a stream and by waits, has one's last operator end before the other's first
one starts: an order in which they merely would run on an idle machine is none.

Worked example: vEU 0 runs A then C, vEU 1 runs B, which waits for A. B and C run at the same time, so that what C
writes may not lie where B reads A's result, though A is before both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tvm_ext.records.rtask_order import ProgramOrder
from tvm_ext.records.rtasks import RTaskProgram, RTaskSchedule, ScheduleEntry, VDevice
from tvm_ext.support.arrays import Array

ALIGNMENT = 64
"""Bytes: of a cache line, so that no two vEUs write the same one, and of the widest vector register."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class OperatorSpans:
    """By operator and vEU, in entries of the vEU's stream: ``starts``, what has ended for certain when its first rTask
    begins; ``ends``, what must have ended for its last rTask to have.
    """

    starts: Array
    ends: Array


def spans_of(schedule: RTaskSchedule, operator_count: int) -> OperatorSpans:
    """The spans of a schedule's operators; raises ValueError where entries wait for each other in a circle."""
    units = max(len(program.streams) for program in schedule.programs)
    far = np.iinfo(np.int64).max
    starts = np.full((operator_count, units), far, np.int64)
    ends = np.zeros((operator_count, units), np.int64)
    base = np.zeros(units, np.int64)
    for program in schedule.programs:
        order, lengths = ProgramOrder(program), np.zeros(units, np.int64)
        lengths[: len(program.streams)] = [len(stream) for stream in program.streams]
        for unit, place, entry in program.entries():
            clock = base.copy()
            clock[: len(program.streams)] += order.clock((unit, place))
            starts[entry.operator] = np.minimum(starts[entry.operator], clock)
            ends[entry.operator, unit] = max(ends[entry.operator, unit], base[unit] + place + 1)
        base += lengths
    return OperatorSpans(starts=starts, ends=ends)


def in_order_of_data(predecessors: Sequence[Sequence[int]]) -> RTaskSchedule:
    """A schedule that orders operators as their data does and no more: each has a vEU of its own."""
    device = VDevice(name="one vEU an operator", unit_count=len(predecessors))
    streams = tuple(
        (ScheduleEntry(operator=operator, kernel=0, begin=0, end=1, waits=tuple((item, 1) for item in before)),)
        for operator, before in enumerate(predecessors)
    )
    return RTaskSchedule(policy="data", programs=(RTaskProgram(device=device, streams=streams),))


def place_values(sizes: Sequence[int], touched: Sequence[Sequence[int]], spans: OperatorSpans) -> tuple[list[int], int]:
    """Offsets of values of ``sizes`` bytes, value i being touched by operators ``touched[i]``; the bytes of all.

    The largest come first, each at the lowest offset that no value beside it in time has.
    """
    if not sizes:
        return [], 0
    starts = np.stack([spans.starts[list(operators)].min(axis=0) for operators in touched])
    ends = np.stack([spans.ends[list(operators)].max(axis=0) for operators in touched])
    rounded = [max(1, -(-size // ALIGNMENT)) * ALIGNMENT for size in sizes]
    offsets, total = [-1] * len(sizes), 0
    placed: list[int] = []
    lives = _SingleLives(starts, ends) if int(ends.max()) <= 1 else _Lives(starts, ends)
    for value in sorted(range(len(sizes)), key=lambda item: (-rounded[item], item)):
        beside = lives.beside(value, np.array(placed, np.int64))
        taken = sorted((offsets[int(item)], offsets[int(item)] + rounded[int(item)]) for item in beside)
        offsets[value] = _first_gap(taken, rounded[value])
        total = max(total, offsets[value] + rounded[value])
        placed.append(value)
    return offsets, total


class _Lives:
    """From what each value's life begins behind (``starts``) to what it ends with (``ends``), as rows."""

    def __init__(self, starts: Array, ends: Array) -> None:
        self._starts, self._ends = starts, ends

    def beside(self, value: int, others: Array) -> Array:
        """Those of ``others`` that may live at the same time as ``value``."""
        before = (self._starts[others] >= self._ends[value]).all(axis=1)
        after = (self._starts[value] >= self._ends[others]).all(axis=1)
        found: Array = others[~(before | after)]
        return found


class _SingleLives:
    """The same where each vEU has one entry, as in an order of data.

    A row of starts is bits, of 4000 operators 500 bytes instead of 32,000. Of the ends, which are few, the vEUs are
    kept, so that starts are looked at there alone.
    """

    def __init__(self, starts: Array, ends: Array) -> None:
        self._open = np.packbits(starts < 1, axis=1)  # what may not have ended when a value's life begins
        values, self._last = np.nonzero(ends > 0)
        self._first = np.searchsorted(values, np.arange(len(ends) + 1))  # of a value, in the vEUs of its ends

    def beside(self, value: int, others: Array) -> Array:
        """Those of ``others`` that may live at the same time as ``value``."""
        own = self._last[self._first[value] : self._first[value + 1]]
        early = (self._open[np.ix_(others, own // 8)] & (128 >> own % 8)).any(axis=1)
        late = np.logical_or.reduceat(np.unpackbits(self._open[value])[self._last] > 0, self._first[:-1])
        found: Array = others[early & late[others]]
        return found


def _first_gap(taken: Sequence[tuple[int, int]], size: int) -> int:
    """The lowest offset at which ``size`` bytes lie beside no interval of ``taken``, which is sorted."""
    offset = 0
    for begin, end in taken:
        if offset + size <= begin:
            break
        offset = max(offset, end)
    return offset
