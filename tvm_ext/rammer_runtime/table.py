"""A schedule of rTasks as the bytes that the native runtime walks (Rammer, paper §3.3 and §4).

An `ExecutionTable` says which kernels there are, where the buffers lie, and for each virtual execution unit (vEU) what
it calls in which order. An entry starts when all its waits hold: so many entries of that vEU's stream have finished.

Worked example: kernel ``f`` of 2 rTasks doubles a vector of 8 floats, half of it in each. Both halves run side by side,
then vEU 0 doubles the result into the second argument, and waits for vEU 1's half:

    ExecutionTable(
        name="main_rtasks", arena_bytes=32, arguments=(Argument(bytes=32), Argument(bytes=32)),
        kernels=(Kernel(symbol="f", tasks=2, parameters=(Parameter(bytes=32), Parameter(bytes=32))),),
        buffers=(Buffer(argument=0, bytes=32), Buffer(bytes=32), Buffer(argument=1, bytes=32)),
        calls=(Call(name="first", kernel=0, buffers=(0, 1)), Call(name="second", kernel=0, buffers=(1, 2))),
        streams=(
            (Entry(call=0, begin=0, end=1), Entry(call=1, begin=0, end=2, waits=((1, 1),))),
            (Entry(call=0, begin=1, end=2),),
        ),
    )

A kernel is called as ``f(p0, ..., pn, begin, end)``: data pointers, then two integers. Numbers of the bytes are
little-endian, of 32 bits where nothing else is said; a list is its length and its items, a text a list of bytes:

    b"tvmxRAM\\n", version, CRC-32 of what follows the header, its size in bytes (64)
    name; size of the arena in bytes (64)
    arguments: [bytes (64), alignment]
    kernels:   [symbol, tasks, parameters: [bytes (64), alignment]]
    buffers:   [argument or 0xffffffff for the arena, offset (64), bytes (64)]
    calls:     [name, kernel, buffers: [index]]
    streams:   [entries: [call, begin, end, waits: [vEU, count]]]

The native reader trusts no number: what would read or call outside of what is there, or wait for ever, is refused.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from tvm_ext.records.rtasks import Waits

MAGIC = b"tvmxRAM\n"
VERSION = 1  # of the tables' format; `csrc/rammer` refuses others
_ARENA = 0xFFFFFFFF  # no index of an argument
_HEADER = struct.Struct("<8sIIQ")


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameter:
    """Of a kernel: how much it touches, from its first byte on, and the alignment that its code relies on."""

    bytes: int
    alignment: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernel:
    """A function of the library that the table's module imports, whose rTasks are numbered 0 to ``tasks`` - 1."""

    symbol: str
    tasks: int
    parameters: tuple[Parameter, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Argument:
    """A tensor that each run is given: its size, and the multiple of bytes at which it must start."""

    bytes: int
    alignment: int = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Buffer:
    """A stretch of an argument, or (None) of the arena, which each instance has of its own and which starts aligned."""

    argument: int | None = None
    offset: int = 0
    bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """A kernel with the places of its buffers, one for each of its parameters. ``name`` is for errors and pictures."""

    name: str
    kernel: int
    buffers: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """rTasks ``begin`` to ``end`` - 1 of a call, once ``waits`` hold."""

    call: int
    begin: int
    end: int
    waits: Waits = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecutionTable:
    """All of it. ``name`` is the function of the module, which takes the arguments as tensors in order."""

    name: str
    arena_bytes: int
    arguments: tuple[Argument, ...]
    kernels: tuple[Kernel, ...]
    buffers: tuple[Buffer, ...]
    calls: tuple[Call, ...]
    streams: tuple[tuple[Entry, ...], ...]

    def to_bytes(self) -> bytes:
        """What the native runtime reads, and refuses where the table is not sound."""
        payload = b"".join(_table(self))
        return _HEADER.pack(MAGIC, VERSION, zlib.crc32(payload), len(payload)) + payload


def one_after_another(programs: Sequence[Sequence[Sequence[Entry]]]) -> tuple[tuple[Entry, ...], ...]:
    """One stream for each vEU out of those of several programs, each of which starts when the one before has ended.

    Waits of a program count its own entries. The first entry that a vEU has in a program also waits for all others:
    two programs of one entry on each of two vEUs become ``(a0, b0 waits (1, 1))`` and ``(a1, b1 waits (0, 1))``.
    """
    units = max((len(program) for program in programs), default=0)
    joined: list[list[Entry]] = [[] for _ in range(units)]
    for program in programs:
        before = [len(stream) for stream in joined]
        for unit, stream in enumerate(program):
            shifted = [replace(item, waits=tuple((u, before[u] + n) for u, n in item.waits)) for item in stream]
            if shifted:
                others = tuple((u, count) for u, count in enumerate(before) if count and u != unit)
                shifted[0] = replace(shifted[0], waits=_latest(others + shifted[0].waits))
            joined[unit].extend(shifted)
    return tuple(map(tuple, joined))


def _latest(waits: Waits) -> Waits:
    """One wait for each vEU: the one for most entries, which implies the others."""
    latest: dict[int, int] = {}
    for unit, count in waits:
        latest[unit] = max(count, latest.get(unit, 0))
    return tuple(sorted(latest.items()))


# --- bytes ------------------------------------------------------------------------------------------------------------
def _table(table: ExecutionTable) -> Iterable[bytes]:
    yield _text(table.name)
    yield struct.pack("<Q", table.arena_bytes)
    yield _list([struct.pack("<QI", argument.bytes, argument.alignment) for argument in table.arguments])
    yield _list([_kernel(kernel) for kernel in table.kernels])
    yield _list([_buffer(buffer) for buffer in table.buffers])
    yield _list([_text(call.name) + struct.pack("<I", call.kernel) + _numbers(call.buffers) for call in table.calls])
    yield _list([_list([_entry(item) for item in stream]) for stream in table.streams])


def _kernel(kernel: Kernel) -> bytes:
    parameters = [struct.pack("<QI", parameter.bytes, parameter.alignment) for parameter in kernel.parameters]
    return _text(kernel.symbol) + struct.pack("<I", kernel.tasks) + _list(parameters)


def _buffer(buffer: Buffer) -> bytes:
    return struct.pack("<IQQ", _ARENA if buffer.argument is None else buffer.argument, buffer.offset, buffer.bytes)


def _entry(entry: Entry) -> bytes:
    numbers = [number for wait in entry.waits for number in wait]
    return struct.pack(f"<IIII{len(numbers)}I", entry.call, entry.begin, entry.end, len(entry.waits), *numbers)


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<I", len(data)) + data


def _list(items: Sequence[bytes]) -> bytes:
    return struct.pack("<I", len(items)) + b"".join(items)


def _numbers(numbers: Sequence[int]) -> bytes:
    return struct.pack(f"<I{len(numbers)}I", len(numbers), *numbers)
