"""mbarrier objects in shared memory: arrivals, announced bytes, phases; and waits that make bulk copies land.

Source: PTX ISA, "mbarrier". A phase of an mbarrier completes when all expected arrivals have come and the bytes that
were announced (expect_tx) have been copied (complete_tx). A wait by parity ends once the phase of that parity is
complete. Copies land when a wait demands it and not before, so that what is read too early is caught; a wait that
nothing can end is a finding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from tvm_ext.ir.bulk_ir import MBARRIER_BYTES
from tvm_ext.support.arrays import Array
from tvm_ext.verify.simt.values import Value

from .local_memory import View
from .machine import Engine, Site
from .memory import AddressableMemory, Request
from .ordering import Acquired, ProxyFences

MOST_ARRIVALS = MOST_BYTES = (1 << 20) - 1
"""Limits of a phase (PTX ISA, "mbarrier object")."""


@dataclass(slots=True, eq=False)
class BulkCopy:
    """Copies of several lanes on their way: the destination's place, and the data."""

    memory: AddressableMemory
    view: View
    request: Request
    values: Array
    origin: Array

    @property
    def bytes(self) -> int:
        return int(self.values.nbytes)


@dataclass(slots=True, eq=False)
class Mbarrier:
    """One object: ``pending`` arrivals and ``announced`` bytes (less those landed) of the phase number ``phase``.

    ``author`` is the lane that initialised it at ``event``, in ``memory`` at ``place``. ``handed_on`` is what this
    phase's arrivals released, ``last_handed_on`` that of the phase before; ``column`` is its own in `Acquired`.
    """

    expected: int
    author: int
    event: int
    column: int
    memory: AddressableMemory
    view: View
    place: Request
    pending: int = 0
    announced: int = 0
    phase: int = 0
    handed_on: Array | None = None
    last_handed_on: Array | None = None
    in_flight: list[BulkCopy] = field(default_factory=list)

    def is_overwritten(self, m: Engine) -> bool:
        """Whether something was stored where it is."""
        return bool((self.memory.last_writes(m, self.view, self.place)[1] != self.event).any())

    def collect(self, released: Array) -> None:
        """Arrivals of this phase release what they know."""
        self.handed_on = _latest(self.handed_on, released)

    def complete(self) -> None:
        """The phase is over, the next one begins."""
        self.phase += 1
        self.pending, self.announced = self.expected, 0
        self.last_handed_on, self.handed_on = self.handed_on, None


def _latest(first: Array | None, second: Array) -> Array:
    if first is None:
        return second
    width = max(len(first), len(second))
    padded = (np.pad(clock, (0, width - len(clock))) for clock in (first, second))
    return np.asarray(np.maximum(*padded))


class Mbarriers:
    """All mbarriers of a batch of blocks, and what they order."""

    def __init__(self, m: Engine) -> None:
        self.acquired = m.clock.acquired = Acquired(m.lanes)
        self.shared_fences, self.global_fences, self.init_fences = (
            ProxyFences(m.lanes, m.clock.block_marks) for _ in range(3)
        )
        self._objects: dict[tuple[int, int, int], Mbarrier] = {}  # (memory slot, block's row, byte)
        self._columns: dict[tuple[int, int], int] = {}  # (memory slot, byte)
        m.at_barrier.append(self._at_barrier)
        m.at_end.append(self._at_end)

    @classmethod
    def of(cls, m: Engine) -> Mbarriers:
        """Those of ``m``, made at the first call."""
        if m.mbarriers is None:
            m.mbarriers = cls(m)
        found: Mbarriers = m.mbarriers
        return found

    def _at_barrier(self, arrived: Array) -> None:
        for fences in (self.shared_fences, self.global_fences, self.init_fences):
            fences.at_barrier(arrived)

    def _at_end(self, m: Engine) -> None:
        for barrier in self._objects.values():
            for copy in barrier.in_flight:
                m.tell("unlanded copy", copy.view.site, detail="still on its way when its block ends")
            if barrier.is_overwritten(m):
                detail = "its memory was used for something else, without mbarrier.inval"
                m.tell("mbarrier misuse", barrier.view.site, detail=detail)

    # --- the instructions -----------------------------------------------------------------------------------------
    def initialise(self, m: Engine, slot: int, view: View, index: Value, count: Value) -> None:
        """``mbarrier.init``: phase 0 begins, ``count`` arrivals are expected in every phase."""
        memory: AddressableMemory = m.memory[slot]
        request = memory.request(m, view, index)
        memory.put(m, view, request, np.zeros(request.element.shape, view.dtype), 0)
        event = len(m.record.events)
        for key, chosen in _grouped(m, slot, request, view):
            lanes = request.lane[chosen]
            expected = int(np.broadcast_to(count, (m.lanes.count,))[lanes[0]])
            if len(lanes) > 1:
                m.tell("mbarrier misuse", view.site, detail=f"{len(lanes)} threads initialise one mbarrier at once")
            if not 0 < expected <= MOST_ARRIVALS:
                m.tell("mbarrier misuse", view.site, detail=f"it cannot expect {expected} arrivals")
            column = self._columns.get((slot, key[2]))
            if column is None:
                column = self._columns[slot, key[2]] = self.acquired.add_column()
            fresh = Mbarrier(
                expected=expected, author=int(lanes[0]), event=event, column=column, pending=expected,
                memory=memory, view=view, place=_first(request, chosen),
            )  # fmt: skip
            old = self._objects.get(key)
            if old is not None:
                m.tell("mbarrier misuse", view.site, detail="initialised again, without mbarrier.inval in between")
            self._objects[key] = fresh

    def invalidate(self, m: Engine, slot: int, view: View, index: Value, _count: Value) -> None:
        """``mbarrier.inval``: the memory is no mbarrier any more."""
        for barrier, _ in self.used(m, slot, view, index):
            if barrier.in_flight:
                m.tell("mbarrier misuse", view.site, detail="invalidated while copies to it are on their way")
            self._objects = {key: other for key, other in self._objects.items() if other is not barrier}

    def announce(self, m: Engine, slot: int, view: View, index: Value, size_bytes: Value) -> None:
        """``expect_tx``: the phase also waits for ``size_bytes``."""
        sizes = np.broadcast_to(size_bytes, (m.lanes.count,))
        for barrier, lanes in self.used(m, slot, view, index):
            barrier.announced += int(sizes[lanes].sum())
            if not 0 <= barrier.announced <= MOST_BYTES:
                detail = f"{barrier.announced} bytes are announced, a phase can count {MOST_BYTES}"
                m.tell("wrong byte count", view.site, detail=detail)

    def arrive(self, m: Engine, slot: int, view: View, index: Value, count: Value = 1) -> None:
        """``arrive``: ``count`` of the expected arrivals for each active lane; what the lane did is released."""
        counts = np.broadcast_to(count, (m.lanes.count,))
        event = m.event(view.site)
        for barrier, lanes in self.used(m, slot, view, index):
            barrier.pending -= int(counts[lanes].sum())
            barrier.collect(self.acquired.released(lanes, event))
            if barrier.pending < 0:
                detail = (
                    f"{-barrier.pending} arrivals more than the {barrier.expected} expected in phase {barrier.phase}"
                )
                m.tell("mbarrier misuse", view.site, detail=detail)
            if barrier.pending <= 0 and not barrier.announced and not barrier.in_flight:
                barrier.complete()

    def wait(self, m: Engine, slot: int, view: View, index: Value, parity: Value) -> None:
        """``try_wait.parity`` until it is true; the copies of the phase land now, in the order of their issue."""
        parities = np.broadcast_to(parity, (m.lanes.count,))
        for barrier, lanes in self.used(m, slot, view, index):
            for value in (0, 1):
                chosen = lanes[parities[lanes] % 2 == value]
                if not len(chosen):
                    continue
                if barrier.phase % 2 == value:
                    self._finish(m, view.site, barrier, chosen)
                if barrier.last_handed_on is not None:
                    self.acquired.acquire(chosen, barrier.last_handed_on)

    def _finish(self, m: Engine, site: Site, barrier: Mbarrier, waiting: Array) -> None:
        """Let the current phase complete: all of its copies land. Tells what makes the wait endless, and goes on."""
        for copy in barrier.in_flight:
            barrier.announced -= copy.bytes
            event = m.event(copy.view.site)
            land(m, copy, barrier.column, event)
            barrier.collect(_one_column(barrier.column, event))
        barrier.in_flight = []
        threads = (m.lanes.name(int(m.lanes.identity[waiting[0]])),)
        if barrier.pending > 0:
            detail = f"waits for ever: {barrier.pending} of {barrier.expected} arrivals are missing"
            if barrier.announced > 0:
                detail += f", and {barrier.announced} bytes"
            m.tell("mbarrier deadlock", site, threads=threads, detail=detail, count=len(waiting))
        elif barrier.announced > 0:
            detail = f"waits for ever: {barrier.announced} of the bytes announced are never copied"
            m.tell("wrong byte count", site, threads=threads, detail=detail, count=len(waiting))
        elif barrier.announced < 0:
            detail = f"{-barrier.announced} bytes more are copied than were announced: it may end before they land"
            m.tell("wrong byte count", site, threads=threads, detail=detail, count=len(waiting))
        barrier.complete()

    # --- finding the object ---------------------------------------------------------------------------------------
    def used(self, m: Engine, slot: int, view: View, index: Value) -> Iterator[tuple[Mbarrier, Array]]:
        """(mbarrier, active lanes that name it), each one checked: initialised, aligned, and not overwritten since.

        Naming one is a read of its memory: a missing barrier after the initialisation is a race like any other.
        """
        memory: AddressableMemory = m.memory[slot]
        request = memory.request(m, view, index)
        memory.peek(m, view, request)
        written = memory.last_writes(m, view, request)[1]
        for key, chosen in _grouped(m, slot, request, view):
            lanes = request.lane[chosen]
            barrier = self._objects.get(key)
            if barrier is None:
                m.tell("mbarrier misuse", view.site, element=key[2] // view.dtype.itemsize, detail="never initialised")
                column = self._columns.get((slot, key[2])) or self.acquired.add_column()
                self._columns[slot, key[2]] = column
                barrier = Mbarrier(
                    expected=1, author=int(lanes[0]), event=int(written[chosen].max()), column=column, pending=1,
                    memory=memory, view=view, place=_first(request, chosen),
                )  # fmt: skip
                self._objects[key] = barrier
            elif barrier.is_overwritten(m):
                m.tell("mbarrier misuse", view.site, detail="its memory was overwritten after mbarrier.init")
            yield barrier, lanes


def _one_column(column: int, event: int) -> Array:
    clock = np.zeros(column + 1, np.int64)
    clock[column] = event
    return clock


def _first(request: Request, chosen: Array) -> Request:
    """The first of the chosen accesses."""
    place = np.flatnonzero(chosen)[:1]
    return Request(lane=request.lane[place], element=request.element[place], vector=request.vector)


def _grouped(m: Engine, slot: int, request: Request, view: View) -> Iterator[tuple[tuple[int, int, int], Array]]:
    """((memory slot, row of the block, byte), which of the request's lanes) for each mbarrier that they name."""
    byte = request.element[:, 0] * view.dtype.itemsize
    rows = m.lanes.row[request.lane]
    misplaced = byte % MBARRIER_BYTES != 0
    if misplaced.any():
        m.tell("misaligned access", view.site, detail=f"an mbarrier at byte {int(byte[misplaced][0])}")
    pairs, place = np.unique(np.stack([rows, byte], axis=1), axis=0, return_inverse=True)
    for number, (row, start) in enumerate(pairs.tolist()):
        yield (slot, row, start), place.reshape(-1) == number


def land(m: Engine, copy: BulkCopy, column: int, event: int) -> None:
    """The data arrives: there for every thread that has waited for it, and for those that meet such a thread."""
    copy.memory.land_bulk(m, copy.view, copy.request, copy.values, copy.origin, column, event)
