"""The state of one batch of blocks while its kernel runs: lanes, mask, variables, barriers, and what was noticed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.devices.occupancy import max_block_threads, shared_limit_bytes
from tvm_ext.support.arrays import Array

from .async_copy import AsyncCopyQueue
from .counters import AccessCount, global_request, shared_request
from .findings import Finding, Findings, Kind, Loops
from .lanes import Lanes, Mask
from .shadow import Clock, Conflict
from .values import NEVER_WRITTEN, Tainted, Value, scattered

WORD_BYTES = 4  # a bank's, where the row has none (CUDA C++ Programming Guide)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Site:
    """One access (or call) in the source: its number in the kernel, the buffer's name and what prints its statement."""

    number: int
    buffer: str
    text: Callable[[], str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """What counting needs to know of a device."""

    warp_lanes: int
    banks: int
    bank_bytes: int
    sector_bytes: int
    name: str
    max_threads: int | None
    shared_bytes: int | None

    @classmethod
    def of(cls, device: DeviceSpec) -> Hardware:
        shared = device.layer("L1")
        return cls(
            warp_lanes=device.teu_lanes,
            banks=shared.bank_count or 32,
            bank_bytes=shared.bank_bytes or WORD_BYTES,
            sector_bytes=device.lowest_layer.transaction_bytes,
            name=device.name,
            max_threads=max_block_threads(device),
            shared_bytes=shared_limit_bytes(device),
        )


class Record:
    """What is noticed over all batches of one kernel: findings, counters, and the log of accesses for messages."""

    def __init__(self, kernel: str, hardware: Hardware, findings: Findings, *, strict_alignment: bool = True) -> None:
        self.kernel, self.hardware, self.findings = kernel, hardware, findings
        self.strict_alignment = strict_alignment  # whether vector accesses must be aligned to their size
        self.events: list[tuple[Site, tuple[tuple[int, str, int], ...]]] = []
        self.origins: list[tuple[Site, Loops, int, int]] = []  # reads of unwritten memory: (.., element, thread)
        self.counts: dict[tuple[int, bool], AccessCount] = {}  # their statements are filled in at the end
        self.sites: dict[int, Site] = {}
        self.known_costs: dict[tuple[Any, ...], tuple[int, int, int]] = {}
        self.barriers = self.mma_count = self.flops = 0


class Engine:
    """Runs closures made by `compile_statement`; they read and change what is public here."""

    def __init__(self, record: Record, lanes: Lanes, variable_count: int, memory_count: int) -> None:
        self.record, self.lanes = record, lanes
        self.mask = lanes.valid
        self.env: list[Value] = [None] * variable_count
        self.memory: list[Any] = [None] * memory_count
        self.loops: list[tuple[int, str, int]] = []
        self.queue: AsyncCopyQueue[Any] = AsyncCopyQueue((lanes.count,))
        self.mbarriers: Any = None  # `mbarrier.Mbarriers`, once there are some
        self.launch: Any = None  # `sync_calls.SyncLaunch`, where blocks wait for each other
        self.at_barrier: list[Callable[[Array], None]] = []  # called with which blocks meet, before they do
        self.at_end: list[Callable[[Engine], None]] = []
        now = len(record.events)
        warps = lanes.count // lanes.warp_lanes
        self.clock = Clock(
            lanes=lanes, block_marks=np.full(len(lanes.blocks), now), warp_marks=np.zeros(warps, np.int64)
        )

    # --- control flow ---------------------------------------------------------------------------------------------
    @contextmanager
    def masked(self, mask: Mask) -> Iterator[None]:
        before, self.mask = self.mask, mask
        try:
            yield
        finally:
            self.mask = before

    def restrict(self, condition: Array) -> Mask:
        """The active lanes for which ``condition`` holds."""
        return Mask(self.mask.flags & condition)

    def active_lanes(self) -> Array:
        return self.lanes.number if self.mask.index is None else self.mask.index

    def decided(self, value: Value, site: Site, what: str) -> Value:
        """The plain value, which is about to decide ``what``: reports it where active lanes' values are tainted."""
        if type(value) is not Tainted:
            return value
        origin = value.origin
        if origin.ndim and origin.shape[0] == self.lanes.count:
            origin = origin[self.active_lanes()]
        if origin.any():
            self.tell_tainted(int(origin[origin != 0].flat[0]), int((origin != 0).sum()), site, what)
        return value.value

    # --- barriers -------------------------------------------------------------------------------------------------
    def barrier(self, site: Site) -> None:
        """All threads of a block meet; those that are missing are reported."""
        lanes, active = self.lanes, self.mask.flags.reshape(len(self.lanes.blocks), -1)
        arrived = active.sum(axis=1)
        for notice in self.at_barrier:
            notice(arrived > 0)
        self.clock.block_marks[arrived > 0] = len(self.record.events)
        self.record.barriers += int((arrived > 0).sum())
        divergent = (arrived > 0) & (arrived < lanes.threads)
        if divergent.any():
            row = int(np.flatnonzero(divergent)[0])
            missing = int(np.flatnonzero(~active[row, : lanes.threads])[0])
            block = int(lanes.blocks[row])
            threads = (lanes.name(block * lanes.padded_threads + missing),)
            detail = f"{arrived[row]} of {lanes.threads} threads of block {block} arrive, {threads[0]} does not"
            self.tell("barrier divergence", site, threads=threads, detail=detail, count=int(divergent.sum()))

    def warp_barrier(self) -> None:
        """The active lanes of each warp meet (``__syncwarp``)."""
        active = self.mask.flags.reshape(-1, self.lanes.warp_lanes).any(axis=1)
        self.clock.warp_marks[active] = len(self.record.events)

    def whole_warps(self, site: Site, what: str) -> None:
        """Report warps where only some lanes execute an instruction that all must execute."""
        valid = self.lanes.valid.flags.reshape(-1, self.lanes.warp_lanes)
        active = self.mask.flags.reshape(-1, self.lanes.warp_lanes)
        partial = active.any(axis=1) & ((active != valid).any(axis=1) | ~valid.all(axis=1))
        if partial.any():
            self.tell("warp divergence", site, detail=f"{what} by some lanes of a warp only", count=int(partial.sum()))

    # --- noticing -------------------------------------------------------------------------------------------------
    def event(self, site: Site) -> int:
        self.record.events.append((site, tuple(self.loops)))
        return len(self.record.events)

    def loop_values(self) -> Loops:
        return tuple((name, value) for _, name, value in self.loops)

    def tell(
        self,
        kind: Kind,
        site: Site,
        *,
        element: int | None = None,
        threads: tuple[str, ...] = (),
        detail: str = "",
        count: int = 1,
        other: tuple[Site, Loops] | None = None,
    ) -> None:
        """Add a finding at ``site``; ``other`` is the earlier access of a race."""

        def make() -> Finding:
            return Finding(
                kind=kind, kernel=self.record.kernel, buffer=site.buffer, element=element, threads=threads,
                loops=self.loop_values(), statement=site.text(), other=other[0].text() if other else "",
                other_loops=other[1] if other else (), detail=detail,
            )  # fmt: skip

        key = (self.record.kernel, kind, site.buffer, site.number, other[0].number if other else None)
        self.record.findings.add(key, count, make)

    def tell_tainted(self, origin: int, count: int, site: Site, what: str) -> None:
        """An uninitialised value decides ``what`` at ``site``; the finding is at the read that it came from."""
        if origin <= NEVER_WRITTEN:
            self.tell("uninitialised read", site, detail=f"decides {what}", count=count)
            return
        source, loops, element, identity = self.record.origins[origin - NEVER_WRITTEN - 1]
        detail = f"never written, read in {source.text()}; the value decides {what}"
        threads = (self.lanes.name(identity),)
        key = (self.record.kernel, "uninitialised read", source.buffer, source.number, site.number)
        self.record.findings.add(key, count, lambda: Finding(
            kind="uninitialised read", kernel=self.record.kernel, buffer=source.buffer, element=element,
            threads=threads, loops=loops, statement=site.text(), detail=detail,
        ))  # fmt: skip

    def new_origin(self, site: Site, element: int, lane: int) -> int:
        """The number of a read of memory that was never written, to mark what it gave."""
        self.record.origins.append((site, self.loop_values(), element, int(self.lanes.identity[lane])))
        return NEVER_WRITTEN + len(self.record.origins)

    def tell_race(self, conflict: Conflict, site: Site, element: int, who: int, other: int, event: int, n: int) -> None:
        """Two threads' accesses that no barrier orders; a loop-carried hazard if they are of different iterations."""
        source, then = self.record.events[event - 1]
        kind: Kind = "write-write race" if conflict == "write after write" else "read-write race"
        detail: str = conflict
        size = self.lanes.padded_threads
        carried = [a[1] for a, b in zip(then, self.loops, strict=False) if a[0] == b[0] and a[2] != b[2]]
        if who // size != other // size:
            kind, detail = "cross-block race", f"{conflict} by another block of the same launch"
        elif carried:
            kind, detail = "loop-carried hazard", f"{conflict} of another iteration of {carried[0]}, no barrier between"
        threads = (self.lanes.name(who), self.lanes.name(other))
        loops = tuple((name, value) for _, name, value in then)
        self.tell(kind, site, element=element, threads=threads, detail=detail, count=n, other=(source, loops))

    # --- counting -------------------------------------------------------------------------------------------------
    def count(self, site: Site, scope: str, addresses: Array, width_bytes: int, *, store: bool) -> None:
        """Add one executed access of the active lanes at byte ``addresses`` (k,) of ``width_bytes`` each."""
        record, hardware = self.record, self.record.hardware
        total = record.counts.get((site.number, store))
        if total is None:
            record.sites[site.number] = site
            total = record.counts[site.number, store] = AccessCount(
                statement="", buffer=site.buffer, scope=scope, store=store, width_bytes=width_bytes
            )
        period = 128 if hardware.banks * hardware.bank_bytes <= 128 else 256
        relative = addresses - int(addresses.min()) // period * period
        key = (scope, width_bytes, self.lanes.count, None if self.mask.index is None else self.mask.index.tobytes())
        known = (*key, relative.tobytes())
        cost = record.known_costs.get(known)
        if cost is None:
            every = relative if self.mask.index is None else self._spread(relative)
            rows = every.reshape(-1, hardware.warp_lanes)
            if scope == "shared":
                cost = shared_request(rows, width_bytes, hardware.banks, hardware.bank_bytes)
            else:
                cost = global_request(rows, width_bytes, hardware.sector_bytes)
            record.known_costs[known] = cost
        total.lanes += len(addresses)
        total.requests += cost[0]
        if scope == "shared":
            total.wavefronts += cost[1]
            total.least_wavefronts += cost[2]
        else:
            total.sectors += cost[1]
            total.useful_bytes += cost[2]

    def _spread(self, addresses: Array) -> Array:
        every = np.full(self.lanes.count, -1, np.int64)
        every[self.mask.index] = addresses
        return every

    def as_lanes(self, value: Array) -> Array:
        """Values of the active lanes as an array over all lanes."""
        return scattered(value, self.mask.index, self.lanes.count)


Closure = Callable[[Engine], Value]
"""Gives the value of an expression in all active lanes."""

Run = Callable[[Engine], None]
"""Runs a statement."""
