"""An rProgram in the making: Append and Wait (paper §3.3), with the times that policies decide by.

`ProgramPlan.append` gives vEUs their shares of an operator; each share waits for all rTasks of the operator's
predecessors, of which only what nothing else implies is written down: not what the vEU has done or waited for before,
and not what is known to have ended because something else that is waited for has.

Worked example, operator 1 behind 0, 2 behind both, each on a vEU of its own: 2 waits for 1, which waited for 0.

Up to `MOST_EXACT` vEUs, waits are the fewest that keep the order. Beyond, all shares of an operator have one list of
waits in common, which the entries share as an object: of 160 shares that each wait for 159 vEUs, 160 pairs are kept,
not 25,440.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tvm_ext.cost.constant_cache import ConstantCache
from tvm_ext.cost.schedule_simulator import key_of, last_ends, passed_s, run_s
from tvm_ext.records.rtask_order import EntryClock
from tvm_ext.records.rtasks import Need, RKernel, ROperator, RTaskGraph, RTaskProgram, ScheduleEntry, VDevice, Waits

from .known_entries import Flags, KnownEntries, KnownTogether, Units

Seconds = NDArray[np.float64]

MOST_EXACT = 32  # a choice: the clocks of entries grow with the square of the units


class Share(NamedTuple):
    """rTasks ``begin`` to ``end`` - 1 of an operator, on vEU ``unit``."""

    unit: int
    begin: int
    end: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Shares:
    """An operator's rTasks, shared out: vEU ``units[i]`` has ``begins[i]`` to ``ends[i]`` - 1.

    Numbers in arrays: of hundreds of vEUs, each has a share of nearly every operator.
    """

    units: Units
    begins: EntryClock
    ends: EntryClock

    @staticmethod
    def of(counts: EntryClock) -> Shares:
        """Ranges of rTasks, vEU after vEU, of which vEU ``u`` gets ``counts[u]``."""
        units, ends = np.flatnonzero(counts), np.cumsum(counts)
        return Shares(units=units, begins=(ends - counts)[units], ends=ends[units])

    def same_as(self, other: Shares) -> bool:
        return np.array_equal(self.units, other.units) and np.array_equal(self.ends, other.ends)

    def __iter__(self) -> Iterator[Share]:
        return map(Share, self.units.tolist(), self.begins.tolist(), self.ends.tolist())


@dataclass(frozen=True, kw_only=True, slots=True)
class _Barrier:
    """What the shares of an operator wait for: each for what ``waits`` says, or some of them all for ``shared``."""

    waits: Sequence[Waits] = ()
    shared: tuple[Units, EntryClock] | None = None
    waiting: Flags | None = None

    def of_shares(self, count: int) -> Sequence[Waits]:
        """By share, the pairs (vEU, order) that it waits for; shares that wait for the same have the same object."""
        if self.shared is None or self.waiting is None:
            return self.waits or [()] * count
        pairs = tuple(zip(*(item.tolist() for item in self.shared), strict=True))
        return [pairs if waits else () for waits in self.waiting.tolist()]


@dataclass(kw_only=True, slots=True)
class _Appended:
    """What is kept of an operator of this program.

    Of each vEU one number: ``last`` counts the entries of its stream up to the operator's last one (0: none), ``known``
    what has ended for certain when all of the operator has, ``least`` (of plans that are not exact) what has when any
    of its entries begins.
    """

    kernel: int
    shares: Shares
    barrier: _Barrier
    last: EntryClock
    known: EntryClock
    least: EntryClock | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """A plan as it was, see `ProgramPlan.rollback`."""

    lengths: EntryClock
    clock: Seconds
    known: KnownEntries | KnownTogether
    superstep: EntryClock
    caches: tuple[ConstantCache, ...]
    need: Need
    operators: int


class ProgramPlan:
    """Streams for the vEUs of ``device``; ``clock`` is when each of them has done what it was given."""

    def __init__(self, graph: RTaskGraph, device: VDevice) -> None:
        count = device.veu_count
        self.graph, self.device, self.need = graph, device, Need()
        self.clock: Seconds = np.zeros(count)
        self._known = KnownEntries(count) if count <= MOST_EXACT else KnownTogether(count)
        # What all have waited for, where all wait for all.
        self._superstep: EntryClock = np.zeros(count, dtype=np.int64)
        # By vEU, how many entries it has; and in a row each, when they end: behind those, anything.
        self._lengths: EntryClock = np.zeros(count, dtype=np.int64)
        self._ends: Seconds = np.zeros((count, 1))
        # Of entries, their own counted; of exact plans only.
        self._clocks: list[list[EntryClock]] = [[] for _ in range(count if count <= MOST_EXACT else 0)]
        self._caches = [ConstantCache(device.cache_bytes) for _ in range(count if device.cache_bytes else 0)]
        self._operators: dict[int, _Appended] = {}
        self._asked: tuple[int, EntryClock | None] | None = None  # the last answer of `_needed`

    # --- what policies ask -------------------------------------------------------------------------------------------

    @property
    def time_s(self) -> float:
        """Of the whole program, its launch included."""
        return self.device.launch_s + float(self.clock.max())

    def chosen(self) -> tuple[tuple[int, int], ...]:
        """The operators of this program in their order, each with its kernel."""
        return tuple((operator, item.kernel) for operator, item in self._operators.items())

    def end_s(self, operator: int) -> float:
        """When the last rTask of an ``operator`` of this program ends."""
        item = self._operators[operator]
        return float(self._ended_s(item.shares.units, item.last[item.shares.units]).max())

    def starts(self, operator: int) -> Seconds:
        """By vEU, when rTasks of ``operator`` could begin there."""
        needed = self._needed(operator)
        if needed is None:
            return self.clock + self.device.task_overhead_s
        units = np.flatnonzero(needed)
        ends = self._ended_s(units, needed[units])
        if isinstance(self._known, KnownEntries):
            missing = needed[units] > self._known.about(units)
            late, passed = missing.any(axis=1), np.where(missing, ends, 0.0).max(axis=1)
        else:  # one list for all: what the last of the others waits for
            last, last_unit, before = _last_ends(units, ends)
            late, passed = self._known.late(needed), np.full(len(self.clock), last)
            passed[last_unit] = before
        begins = np.where(late, np.maximum(self.clock, passed + self.device.barrier_s), self.clock)
        return begins + self.device.task_overhead_s

    def missing_s(self, operator: int, kernel: int, share: Share) -> float:
        """How long vEU ``share.unit`` would read constants before it could run its share."""
        found = self.graph.operators[operator]
        kind = found.kernels[kernel]
        if not (self.device.cache_bytes and found.constants):
            return 0.0
        missing = self._caches[share.unit].missing_bytes(
            key_of(found, kind), share.begin, share.end, kind.constant_bytes
        )
        return self.device.refill_s(missing)

    # --- Append and Wait ---------------------------------------------------------------------------------------------

    def append(self, operator: int, kernel: int, shares: Shares) -> None:
        """Give vEUs their shares of ``operator``, at most one each, behind all that it needs of this program."""
        found, units = self.graph.operators[operator], shares.units
        self.need = self.need.beside(found.kernel(kernel).need)
        barrier = self._wait(operator, units)
        least = None if isinstance(self._known, KnownEntries) else self._known.least(units)
        begins = np.maximum(self.clock[units], self._passed_s(barrier, units))
        seconds = self._run_s(found, found.kernel(kernel), shares)
        self.clock[units] = begins + self.device.task_overhead_s + seconds
        last = self._end(units)
        if isinstance(self._known, KnownEntries):
            for unit, clock in zip(units.tolist(), self._known.of(units), strict=True):
                self._clocks[unit].append(clock)
        self._asked = None
        self._operators[operator] = _Appended(
            kernel=kernel, shares=shares, barrier=barrier, last=last, known=self._known.most(units), least=least
        )

    def _end(self, units: Units) -> EntryClock:
        """Have each of ``units`` end an entry at its `clock`; by vEU, which one of its stream that was, from 1."""
        if self._lengths[units].max() == self._ends.shape[1]:
            self._ends = np.concatenate([self._ends, np.zeros_like(self._ends)], axis=1)
        self._ends[units, self._lengths[units]] = self.clock[units]
        self._lengths[units] += 1
        self._known.count_own(units)
        last = np.zeros_like(self._lengths)
        last[units] = self._lengths[units]
        return last

    def _ended_s(self, units: Units, orders: EntryClock) -> Seconds:
        """When the entries of ``units`` of these places in their streams, from 1, end."""
        ends: Seconds = self._ends[units, orders - 1]
        return ends

    def _run_s(self, operator: ROperator, kernel: RKernel, shares: Shares) -> Seconds:
        """By share, how long its rTasks run, and read constants."""
        if self.device.cache_bytes:
            ranges = ((share.unit, (share.begin, share.end)) for share in shares)
            return np.array([run_s(self.device, self._caches[unit], operator, kernel, tasks) for unit, tasks in ranges])
        counts: Seconds = (shares.ends - shares.begins).astype(np.float64)
        return counts * kernel.task_s_beside(self.device.veus_per_unit)

    def _passed_s(self, barrier: _Barrier, units: Units) -> Seconds:
        """By share, on ``units``, when ``barrier`` lets it pass; 0 where it waits for nobody else."""
        if barrier.shared is not None and barrier.waiting is not None:
            last, of_unit, before = _last_ends(barrier.shared[0], self._ended_s(*barrier.shared))
            ends = np.where(barrier.waiting, np.where(units == of_unit, before, last), 0.0)
            return np.where(ends > 0.0, ends + self.device.barrier_s, 0.0)
        found = np.zeros(len(units))
        for place, waits in enumerate(barrier.waits):
            ends_of = ((float(self._ends[other, order - 1]), other) for other, order in waits)
            found[place] = passed_s(last_ends(ends_of), int(units[place]), self.device.barrier_s)
        return found

    def _wait(self, operator: int, units: Units) -> _Barrier:
        """What the shares on ``units`` wait for, and have those vEUs know it."""
        needed = self._needed(operator)
        if needed is None:
            return _Barrier()
        if isinstance(self._known, KnownEntries):
            missing = needed > self._known.of(units)
            barrier = _Barrier(waits=[self._fewest(needed, row) for row in missing])
        else:
            late, waiting = self._known.missing(units, needed)
            barrier = _Barrier(shared=(late, needed[late]), waiting=waiting)
        if self.device.fine_barriers:
            told = np.max([self._operators[item].known for item in self._here(operator)], axis=0)
        else:
            told = self._superstep = needed
        self._known.learn(units, told)
        return barrier

    def _fewest(self, needed: EntryClock, missing: NDArray[np.bool_]) -> Waits:
        """Of the entries that are ``missing``, those that none of the others comes behind.

        Entries are ordered by happening before each other, so that what is left is the same whichever goes first.
        """
        units = np.flatnonzero(missing)
        if len(units) > 1:
            clocks = np.array([self._clocks[unit][needed[unit] - 1] for unit in units.tolist()])[:, units]
            np.fill_diagonal(clocks, 0)
            units = units[clocks.max(axis=0) < needed[units]]
        return tuple((int(unit), int(needed[unit])) for unit in units)

    def _needed(self, operator: int) -> EntryClock | None:
        """How far each vEU's stream must have come before rTasks of ``operator`` begin; None: nothing is waited for."""
        if self._asked is None or self._asked[0] != operator:
            self._asked = operator, self._needed_anew(operator)
        return self._asked[1]

    def _needed_anew(self, operator: int) -> EntryClock | None:
        here = self._here(operator)
        lasts = [self._operators[item].last for item in here]
        if not self.device.fine_barriers:
            return self._superstep_for(lasts)
        if len(here) > 1 and isinstance(self._known, KnownTogether):
            leasts = [item.least for item in map(self._operators.__getitem__, here) if item.least is not None]
            lasts = [last for last in lasts if not any((least >= last).all() for least in leasts)]
        if not lasts:
            return None
        needed: EntryClock = np.max(lasts, axis=0)
        return needed

    def _superstep_for(self, lasts: Sequence[EntryClock]) -> EntryClock | None:
        """What all wait for where all wait for all: all entries so far, if the last barrier is not behind ``lasts``."""
        if any((last > self._superstep).any() for last in lasts):
            every: EntryClock = self._lengths.copy()
            return every
        return self._superstep if self._superstep.any() else None

    def _here(self, operator: int) -> list[int]:
        """Predecessors of ``operator`` that are in this program."""
        return [
            predecessor for predecessor in self.graph.operators[operator].predecessors if predecessor in self._operators
        ]

    # --- trying out --------------------------------------------------------------------------------------------------

    def mark(self) -> Mark:
        """The plan as it is, to come back to."""
        return Mark(
            lengths=self._lengths.copy(),
            clock=self.clock.copy(),
            known=self._known.copy(),
            superstep=self._superstep,
            caches=tuple(cache.copy() for cache in self._caches),
            need=self.need,
            operators=len(self._operators),
        )

    def rollback(self, mark: Mark) -> None:
        """Forget what was appended since ``mark`` was made."""
        for clocks, length in zip(self._clocks, mark.lengths.tolist(), strict=False):
            del clocks[length:]
        self.need, self._asked, self._lengths = mark.need, None, mark.lengths.copy()
        self.clock, self._known, self._superstep = mark.clock.copy(), mark.known.copy(), mark.superstep
        self._caches = [cache.copy() for cache in mark.caches]
        while len(self._operators) > mark.operators:
            self._operators.popitem()

    def program(self) -> RTaskProgram:
        """The streams as they are."""
        streams: list[list[ScheduleEntry]] = [[] for _ in range(self.device.veu_count)]
        for operator, item in self._operators.items():
            waits = item.barrier.of_shares(len(item.shares.units))
            for share, waited in zip(item.shares, waits, strict=True):
                streams[share.unit].append(
                    ScheduleEntry(operator=operator, kernel=item.kernel, begin=share.begin, end=share.end, waits=waited)
                )
        return RTaskProgram(device=self.device, streams=tuple(map(tuple, streams)), threads=self.need.threads)


def _last_ends(units: Units, ends: Seconds) -> tuple[float, int, float]:
    """`last_ends` of arrays, ``units`` ascending; 0 where there is none."""
    if not len(units):
        return last_ends(())
    place = len(ends) - 1 - int(np.argmax(ends[::-1]))  # of those that end last, the last vEU's
    before = float(np.partition(ends, -2)[-2]) if len(ends) > 1 else 0.0
    return float(ends[place]), int(units[place]), before
