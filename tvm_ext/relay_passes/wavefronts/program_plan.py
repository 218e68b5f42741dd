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

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tvm_ext.cost.constant_cache import ConstantCache
from tvm_ext.cost.schedule_simulator import key_of, last_ends, passed_s, run_s
from tvm_ext.records.rtask_order import EntryClock
from tvm_ext.records.rtasks import Need, RTaskGraph, RTaskProgram, ScheduleEntry, VDevice, Waits

from .known_entries import KnownEntries

Seconds = NDArray[np.float64]

MOST_EXACT = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """rTasks ``begin`` to ``end`` - 1 of an operator, on vEU ``unit``."""

    unit: int
    begin: int
    end: int


@dataclass(kw_only=True, slots=True)
class _Appended:
    """What is kept of an operator of this program, one number for each vEU.

    ``last`` counts the entries of its stream up to the operator's last one (0: none), ``known`` what has ended for
    certain when all of the operator has, ``least`` what has when any of its entries begins.
    """

    kernel: int
    last: EntryClock
    known: EntryClock
    least: EntryClock


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """A plan as it was, see `ProgramPlan.rollback`."""

    lengths: Mapping[int, int]
    clock: Seconds
    known: KnownEntries
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
        self._exact = count <= MOST_EXACT
        self._known = KnownEntries(count)
        # What all have waited for, where all wait for all.
        self._superstep: EntryClock = np.zeros(count, dtype=np.int64)
        # By vEU, those that have any.
        self._streams: defaultdict[int, list[ScheduleEntry]] = defaultdict(list)
        self._ends: defaultdict[int, list[float]] = defaultdict(list)
        # Of entries, their own counted; of exact plans only.
        self._clocks: defaultdict[int, list[EntryClock]] = defaultdict(list)
        self._caches = [ConstantCache(device.cache_bytes) for _ in range(count if device.cache_bytes else 1)]
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
        last = self._operators[operator].last
        units: list[int] = np.flatnonzero(last).tolist()
        return max(self._ends[unit][int(last[unit]) - 1] for unit in units)

    def starts(self, operator: int) -> Seconds:
        """By vEU, when rTasks of ``operator`` could begin there."""
        needed = self._needed(operator)
        if needed is None:
            return self.clock + self.device.task_overhead_s
        units = np.flatnonzero(needed)
        ends = [self._ends[unit][order - 1] for unit, order in zip(units.tolist(), needed[units].tolist(), strict=True)]
        missing = needed[units] > self._known.about(units)
        if self._exact:
            passed = np.where(missing, np.array(ends), 0.0).max(axis=1)
        else:  # one list for all: what the last of the others waits for
            last, last_unit, before = last_ends(zip(ends, units.tolist(), strict=True))
            passed = np.full(len(self.clock), last)
            passed[last_unit] = before
        begins = np.where(missing.any(axis=1), np.maximum(self.clock, passed + self.device.barrier_s), self.clock)
        return begins + self.device.task_overhead_s

    def missing_s(self, operator: int, kernel: int, share: Share) -> float:
        """How long vEU ``share.unit`` would read constants before it could run its share."""
        found = self.graph.operators[operator]
        kind = found.kernels[kernel]
        if not (self.device.cache_bytes and found.constants):
            return 0.0
        missing = self._cache(share.unit).missing_bytes(
            key_of(found, kind), share.begin, share.end, kind.constant_bytes
        )
        return self.device.refill_s(missing)

    # --- Append and Wait ---------------------------------------------------------------------------------------------

    def append(self, operator: int, kernel: int, shares: Sequence[Share]) -> None:
        """Give vEUs their shares of ``operator``, at most one each, behind all that it needs of this program."""
        found, units = self.graph.operators[operator], [share.unit for share in shares]
        self.need = self.need.beside(found.kernel(kernel).need)
        waits = self._wait(operator, units)
        least = self._known.of(units).min(axis=0)
        last = np.zeros(self.device.veu_count, dtype=np.int64)
        passed: dict[int, tuple[float, int, float]] = {}
        for share, waited in zip(shares, waits, strict=True):
            unit = share.unit
            if id(waited) not in passed:
                passed[id(waited)] = last_ends((self._ends[other][order - 1], other) for other, order in waited)
            begin = max(self.clock[unit], passed_s(passed[id(waited)], unit, self.device.barrier_s))
            seconds = run_s(self.device, self._cache(unit), found, found.kernel(kernel), (share.begin, share.end))
            self.clock[unit] = begin + self.device.task_overhead_s + seconds
            self._ends[unit].append(float(self.clock[unit]))
            self._streams[unit].append(
                ScheduleEntry(operator=operator, kernel=kernel, begin=share.begin, end=share.end, waits=waited)
            )
            last[unit] = len(self._streams[unit])
        self._known.count_own(units, last[units])
        if self._exact:
            for unit, clock in zip(units, self._known.of(units), strict=True):
                self._clocks[unit].append(clock)
        self._asked = None
        self._operators[operator] = _Appended(
            kernel=kernel, last=last, known=self._known.of(units).max(axis=0), least=least
        )

    def _cache(self, unit: int) -> ConstantCache:
        """That of vEU ``unit``; one for all where none keeps anything."""
        return self._caches[unit if self.device.cache_bytes else 0]

    def _wait(self, operator: int, units: Sequence[int]) -> list[Waits]:
        """What the shares on ``units`` wait for, and have those vEUs know it."""
        needed = self._needed(operator)
        if needed is None:
            return [()] * len(units)
        missing = needed > self._known.of(units)
        if self._exact:
            waits = [self._fewest(needed, row) for row in missing]
        else:
            late = np.flatnonzero(missing.any(axis=0))
            shared = tuple(zip(late.tolist(), needed[late].tolist(), strict=True))
            waits = [shared if row.any() else () for row in missing]
        if self.device.fine_barriers:
            told = np.max([self._operators[item].known for item in self._here(operator)], axis=0)
        else:
            told = self._superstep = needed
        self._known.learn(units, told)
        return waits

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
        if len(here) > 1 and not self._exact:
            leasts = [self._operators[item].least for item in here]
            lasts = [last for last in lasts if not any((least >= last).all() for least in leasts)]
        return np.max(lasts, axis=0) if lasts else None

    def _superstep_for(self, lasts: Sequence[EntryClock]) -> EntryClock | None:
        """What all wait for where all wait for all: all entries so far, if the last barrier is not behind ``lasts``."""
        if any((last > self._superstep).any() for last in lasts):
            return np.array(self._lengths())
        return self._superstep if self._superstep.any() else None

    def _here(self, operator: int) -> list[int]:
        """Predecessors of ``operator`` that are in this program."""
        return [item for item in self.graph.operators[operator].predecessors if item in self._operators]

    # --- trying out --------------------------------------------------------------------------------------------------

    def mark(self) -> Mark:
        """The plan as it is, to come back to."""
        return Mark(
            lengths={unit: len(stream) for unit, stream in self._streams.items()},
            clock=self.clock.copy(),
            known=self._known.copy(),
            superstep=self._superstep,
            caches=tuple(cache.copy() for cache in self._caches),
            need=self.need,
            operators=len(self._operators),
        )

    def rollback(self, mark: Mark) -> None:
        """Forget what was appended since ``mark`` was made."""
        for unit in self._streams:
            length = mark.lengths.get(unit, 0)
            del self._streams[unit][length:], self._ends[unit][length:], self._clocks[unit][length:]
        self.need, self._asked = mark.need, None
        self.clock, self._known, self._superstep = mark.clock.copy(), mark.known.copy(), mark.superstep
        self._caches = [cache.copy() for cache in mark.caches]
        for operator in list(self._operators)[mark.operators :]:
            del self._operators[operator]

    def program(self) -> RTaskProgram:
        """The streams as they are."""
        streams = tuple(tuple(self._streams.get(unit, ())) for unit in range(self.device.veu_count))
        return RTaskProgram(device=self.device, streams=streams, threads=self.need.threads)

    def _lengths(self) -> list[int]:
        """By vEU, how many entries it has."""
        return [len(self._streams.get(unit, ())) for unit in range(self.device.veu_count)]
