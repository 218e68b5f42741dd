"""rTasks of many operators and their schedule on virtual execution units (Rammer, paper §3): all of it plain data.

A `RTaskGraph` says what there is to do, a `RTaskSchedule` who does it and in which order. Worked example, Figure 9 of
the paper: two vEUs; a product of 2 rTasks runs on vEU 0 and a ReLU of 4 on vEU 1; a convolution, which needs both, on
either. Its rTask 0, on vEU 0, waits until vEU 1 has finished its first entry, the whole ReLU:

    vEU 0   (operator 0, rTasks 0..1)   (operator 2, rTask 0, waits (1, 1))
    vEU 1   (operator 1, rTasks 0..3)   (operator 2, rTask 1, waits (0, 1))

All numbers are checked: a schedule is what native code indexes memory by, and may come from a file.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass

from . import serialise

MOST_COUNT = 2**31 - 1
"""Of rTasks, entries and the like: tables hold them in 32 bits, signed."""

LEAST_TASK_S, MOST_SECONDS = 1e-12, 1e6
"""A picosecond and eleven days: what is shorter or longer is no time that was measured or modelled."""

_NO_WAITS = -1  # no index of a list


@dataclass(frozen=True, kw_only=True, slots=True)
class Need:
    """What a vEU must have for an rTask: threads, 32-bit registers of each, and bytes of shared memory."""

    threads: int = 0
    registers: int = 0
    shared_bytes: int = 0

    def beside(self, other: Need) -> Need:
        """What a vEU must have that runs rTasks of both: the more of everything."""
        return Need(
            threads=max(self.threads, other.threads),
            registers=max(self.registers, other.registers),
            shared_bytes=max(self.shared_bytes, other.shared_bytes),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RKernel:
    """One way to compute an operator: ``task_count`` rTasks that are alike and do not need each other (paper §3.1).

    ``name`` identifies the code, which operators may share. ``task_s`` is the time of one rTask on a vEU whose cache
    holds its constants; ``constant_bytes`` is what one rTask reads of them. On a GPU, ``residents`` rTasks run beside
    each other on a unit meanwhile, and one that has its unit for itself takes ``alone_s`` (None: as long).
    ``threads``, ``registers`` (of 32 bits, a thread) and ``shared_bytes`` are what a threadblock needs that runs it; a
    CPU's need one thread.
    """

    name: str
    task_count: int
    task_s: float
    constant_bytes: int = 0
    residents: int = 1
    alone_s: float | None = None
    threads: int = 1
    registers: int = 0
    shared_bytes: int = 0

    def __post_init__(self) -> None:
        ones = {"task_count": self.task_count, "threads": self.threads, "residents": self.residents}
        _check_counts(f"kernel {self.name!r}", 1, **ones)
        _check_counts(
            f"kernel {self.name!r}",
            0,
            constant_bytes=self.constant_bytes,
            registers=self.registers,
            shared_bytes=self.shared_bytes,
        )
        _check_seconds(f"kernel {self.name!r}", LEAST_TASK_S, task_s=self.task_s)
        if self.alone_s is not None:
            _check_seconds(f"kernel {self.name!r}", LEAST_TASK_S, alone_s=self.alone_s)

    @property
    def need(self) -> Need:
        return Need(threads=self.threads, registers=self.registers, shared_bytes=self.shared_bytes)

    @property
    def work_s(self) -> float:
        """The time of all rTasks, each with its share of a unit: what the *efficient* kernel has least of."""
        return self.task_s / self.residents * self.task_count

    def task_s_beside(self, veus_per_unit: int) -> float:
        """The time of one rTask where its unit runs so many vEUs.

        They share the unit's throughput, down to what one rTask takes for itself: of 4 us with 4 residents, 2 us with
        2, and 1.5 us with 1 where ``alone_s`` is 1.5 us, for latencies that nothing hides.
        """
        if self.alone_s is None:
            return self.task_s
        return max(self.alone_s, self.task_s * veus_per_unit / self.residents)


def need_of(kernels: Iterable[RKernel]) -> Need:
    """What a vEU must have that runs rTasks of all ``kernels``."""
    return functools.reduce(Need.beside, (kernel.need for kernel in kernels), Need())


@dataclass(frozen=True, kw_only=True, slots=True)
class ROperator:
    """An operator as rTasks: its kernels, and the operators all of whose rTasks each of its own waits for.

    ``predecessors`` are places in the graph. Operators of the same ``constants`` read the same ones: an rTask then
    finds them in the cache of the vEU that ran the same rTask of the same kernel before.
    """

    name: str
    kernels: tuple[RKernel, ...]
    predecessors: tuple[int, ...] = ()
    constants: str = ""

    def __post_init__(self) -> None:
        if not self.kernels:
            raise ValueError(f"operator {self.name!r} has no kernel")
        if len(set(self.predecessors)) != len(self.predecessors):
            raise ValueError(f"operator {self.name!r} names a predecessor twice: {self.predecessors}")

    def kernel(self, index: int) -> RKernel:
        """Its kernel at ``index``; raises ValueError where there is none."""
        if not 0 <= index < len(self.kernels):
            raise ValueError(f"operator {self.name!r} has no kernel {index}: it has {len(self.kernels)}")
        return self.kernels[index]


@dataclass(frozen=True, kw_only=True, slots=True)
class RTaskGraph:
    """The data flow between operators, in topological order: whoever is needed lies before whoever needs it."""

    operators: tuple[ROperator, ...]

    def __post_init__(self) -> None:
        if not self.operators:
            raise ValueError("a graph without operators has no schedule")
        for index, operator in enumerate(self.operators):
            wrong = [predecessor for predecessor in operator.predecessors if not 0 <= predecessor < index]
            if wrong:
                raise ValueError(f"operator {index} ({operator.name!r}) comes before its predecessors {wrong}")

    def to_json(self) -> str:
        """As JSON that names a kernel once; `from_json` gives an equal record back."""
        places: dict[RKernel, int] = {}
        for operator in self.operators:
            for kernel in operator.kernels:
                places.setdefault(kernel, len(places))
        rows = ((o.name, tuple(places[k] for k in o.kernels), o.predecessors, o.constants) for o in self.operators)
        return serialise.to_json(_PackedGraph(kernels=tuple(places), operators=tuple(rows)))

    @staticmethod
    def from_json(text: str) -> RTaskGraph:
        """The graph that `to_json` wrote; raises ValueError where the text holds no sound one."""
        packed = serialise.from_json(_PackedGraph, text)
        if any(not 0 <= place < len(packed.kernels) for _, places, *_ in packed.operators for place in places):
            raise ValueError(f"an operator has a kernel that is none of the graph's {len(packed.kernels)}")
        return RTaskGraph(
            operators=tuple(
                ROperator(
                    name=name,
                    kernels=tuple(packed.kernels[place] for place in places),
                    predecessors=predecessors,
                    constants=constants,
                )
                for name, places, predecessors, constants in packed.operators
            )
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class VDevice:
    """A virtualised parallel device (paper §3.2): ``unit_count`` SMs, cores or tiles of ``veus_per_unit`` vEUs each.

    ``task_overhead_s`` is what taking an entry from its stream costs, ``barrier_s`` the time from the end of an entry
    to the start of one that waits for it on another vEU, ``launch_s`` starting an rProgram. ``cache_bytes`` is a vEU's
    own cache, filled at ``refill_gb_per_s``; 0: nothing stays with a vEU. Without ``fine_barriers`` all vEUs wait for
    all (the IPU, paper §4.2.2).
    """

    name: str
    unit_count: int
    veus_per_unit: int = 1
    task_overhead_s: float = 0.0
    barrier_s: float = 0.0
    launch_s: float = 0.0
    cache_bytes: int = 0
    refill_gb_per_s: float | None = None
    fine_barriers: bool = True

    def __post_init__(self) -> None:
        text = f"device {self.name!r}"
        _check_counts(text, 1, unit_count=self.unit_count, veus_per_unit=self.veus_per_unit, vEUs=self.veu_count)
        _check_counts(text, 0, cache_bytes=self.cache_bytes)
        times = {"task_overhead_s": self.task_overhead_s, "barrier_s": self.barrier_s, "launch_s": self.launch_s}
        _check_seconds(text, 0.0, **times)
        if self.refill_gb_per_s is None and self.cache_bytes:
            raise ValueError(f"{text} has a cache, but not the rate at which it is filled")
        if self.refill_gb_per_s is not None and not 0 < self.refill_gb_per_s < math.inf:
            raise ValueError(f"{text}: refill_gb_per_s is {self.refill_gb_per_s}")

    @property
    def veu_count(self) -> int:
        return self.unit_count * self.veus_per_unit

    def refill_s(self, size_bytes: int) -> float:
        """The time to bring ``size_bytes`` into a vEU's cache."""
        return 0.0 if self.refill_gb_per_s is None else size_bytes / (self.refill_gb_per_s * 1e9)


Waits = tuple[tuple[int, int], ...]
"""Pairs (vEU, order): the first ``order`` entries of that vEU's stream have finished.

The paper's <vEU, order> names the last of them, counted from 0: its pair is one less."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleEntry:
    """What a vEU takes from its stream: the barrier-rTask ``waits``, then rTasks ``begin`` to ``end`` - 1 in turn."""

    operator: int
    kernel: int  # which of the operator's
    begin: int
    end: int
    waits: Waits = ()

    def __post_init__(self) -> None:
        if not (0 <= self.begin < self.end <= MOST_COUNT and min(self.operator, self.kernel) >= 0):
            raise ValueError(f"an entry of no rTasks, or of none that exist: {self}")

    @property
    def task_count(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, kw_only=True, slots=True)
class RTaskProgram:
    """The paper's rProgram (§3.2): a stream of entries for each vEU of ``device``; waits stay inside a program.

    ``threads`` is what each vEU has: those of its widest rTask.
    """

    device: VDevice
    streams: tuple[tuple[ScheduleEntry, ...], ...]
    threads: int = 1

    def __post_init__(self) -> None:
        _check_counts("a program", 1, threads=self.threads)
        if len(self.streams) != self.device.veu_count:
            raise ValueError(f"{len(self.streams)} streams for the {self.device.veu_count} vEUs of {self.device.name}")
        lengths = [len(stream) for stream in self.streams]
        checked: set[int] = set()  # a barrier that many entries share is one object
        for unit, stream in enumerate(self.streams):
            for entry in stream:
                if id(entry.waits) not in checked:
                    _check_waits(unit, entry, lengths)
                    checked.add(id(entry.waits))

    def entries(self) -> Iterable[tuple[int, int, ScheduleEntry]]:
        """Each entry with its vEU and its place there."""
        return ((u, position, entry) for u, stream in enumerate(self.streams) for position, entry in enumerate(stream))


@dataclass(frozen=True, kw_only=True, slots=True)
class RTaskSchedule:
    """Programs that run one after another, each when the one before it has ended; ``policy`` made it.

    `to_json` writes what many entries wait for together once; `from_json` gives an equal record back.
    """

    policy: str
    programs: tuple[RTaskProgram, ...]

    def __post_init__(self) -> None:
        if not self.programs:
            raise ValueError("a schedule has at least one program")

    def to_json(self) -> str:
        return serialise.to_json(_Packed(policy=self.policy, programs=tuple(map(_pack, self.programs))))

    @staticmethod
    def from_json(text: str) -> RTaskSchedule:
        """The schedule that `to_json` wrote; raises ValueError where the text holds no sound one."""
        packed = serialise.from_json(_Packed, text)
        return RTaskSchedule(policy=packed.policy, programs=tuple(map(_unpack, packed.programs)))

    @property
    def digest(self) -> str:
        """Identifies the schedule: the hash of its JSON."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()


# --- JSON ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class _PackedGraph:
    """An operator is (name, places of its kernels, predecessors, constants)."""

    kernels: tuple[RKernel, ...]
    operators: tuple[tuple[str, tuple[int, ...], tuple[int, ...], str], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _PackedProgram:
    """An entry is (operator, kernel, begin, end, place of its waits in ``barriers`` or -1)."""

    device: VDevice
    threads: int
    barriers: tuple[tuple[tuple[int, int], ...], ...]
    streams: tuple[tuple[tuple[int, int, int, int, int], ...], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Packed:
    policy: str
    programs: tuple[_PackedProgram, ...]


def _pack(program: RTaskProgram) -> _PackedProgram:
    places: dict[Waits, int] = {(): _NO_WAITS}
    by_object = {id(entry.waits): entry.waits for _, _, entry in program.entries()}
    for waits in by_object.values():  # hashing one of 160 pairs for each of its 160 entries would take the time
        if waits:
            places.setdefault(waits, len(places) - 1)
    place_of = {key: places[waits] for key, waits in by_object.items()}
    streams = tuple(
        tuple((item.operator, item.kernel, item.begin, item.end, place_of[id(item.waits)]) for item in stream)
        for stream in program.streams
    )
    barriers = tuple(waits for waits in places if waits)
    return _PackedProgram(device=program.device, threads=program.threads, barriers=barriers, streams=streams)


def _unpack(packed: _PackedProgram) -> RTaskProgram:
    for stream in packed.streams:
        for *_, place in stream:
            if not _NO_WAITS <= place < len(packed.barriers):
                raise ValueError(f"an entry waits for barrier {place} of {len(packed.barriers)}")
    barriers = (*packed.barriers, ())  # -1: the last, empty one
    streams = tuple(
        tuple(
            ScheduleEntry(operator=operator, kernel=kernel, begin=begin, end=end, waits=barriers[place])
            for operator, kernel, begin, end, place in stream
        )
        for stream in packed.streams
    )
    return RTaskProgram(device=packed.device, threads=packed.threads, streams=streams)


# --- checks ----------------------------------------------------------------------------------------------------------


def _check_waits(unit: int, entry: ScheduleEntry, lengths: list[int]) -> None:
    for other, order in entry.waits:
        if not 0 <= other < len(lengths) or not 1 <= order <= lengths[other]:
            raise ValueError(f"an entry of vEU {unit} waits for {order} entries of vEU {other}, which has not so many")
    units = [other for other, _ in entry.waits]
    if len(set(units)) != len(units):
        raise ValueError(f"an entry of vEU {unit} waits twice for the same vEU: {entry.waits}")


def _check_counts(what: str, least: int, **counts: int) -> None:
    for name, count in counts.items():
        if not least <= count <= MOST_COUNT:
            raise ValueError(f"{what}: {name} is {count}, not from {least} to {MOST_COUNT}")


def _check_seconds(what: str, least: float, **times: float) -> None:
    for name, seconds in times.items():
        if not least <= seconds <= MOST_SECONDS:
            raise ValueError(f"{what}: {name} is {seconds}, not from {least:g} to {MOST_SECONDS:g} seconds")
