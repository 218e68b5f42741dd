"""A second, slow execution of device functions, to judge mutants by: one thread after another, in plain Python.

It shares nothing with the SIMT interpreter. Each thread is a Python generator translated from the function; it runs
alone until a barrier or an instruction of its whole warp. Conflicts are found by brute force: every access is written
down, and at each barrier all pairs of accesses to an element are compared. Numbers are Python's floats; what was never
written is NaN, or an integer too large for any array.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

NAN = float("nan")
NEVER = 1 << 40  # an integer that was never written: out of every array's bounds
WARP = 32
Place = tuple[str, int]


@dataclass
class Verdict:
    """Outputs by name, and what was wrong.

    "race", "bounds", "divergence", "misaligned", "early" (a copy's target touched while the copy is in flight).
    """

    outputs: dict[str, np.ndarray]
    problems: set[str] = field(default_factory=set)


@dataclass
class Pending:
    """An asynchronous copy of one thread."""

    thread: int
    group: int
    places: list[Place]
    values: list[float]


class Memory:
    """Arrays by name, and all accesses since the last barrier (shared) or kernel start (global)."""

    def __init__(self, problems: set[str]) -> None:
        self.arrays: dict[str, list[Any]] = {}
        self.problems = problems
        self.shared: set[str] = set()
        self.log: dict[Place, set[tuple[int, bool, Any]]] = defaultdict(set)
        self.pending: list[Pending] = []
        self.in_flight: dict[Place, int] = defaultdict(int)
        self.written: set[str] = set()  # global arrays that the kernel writes
        self.traffic: dict[Place, set[tuple[int, int, int, bool, Any]]] = defaultdict(set)
        self.block = self.interval = 0

    def note(self, thread: int, place: Place, *, write: bool, value: Any) -> None:
        name = place[0]
        if name in self.shared:
            self.log[place].add((thread, write, value))
            if self.in_flight and self.in_flight.get(place):
                self.problems.add("early")
        elif name in self.written:
            self.traffic[place].add((self.block, self.interval, thread, write, value))

    def read(self, thread: int, name: str, index: int) -> Any:
        array = self.arrays[name]
        if not 0 <= index < len(array):
            self.problems.add("bounds")
            return NAN
        self.note(thread, (name, index), write=False, value=None)
        return array[index]

    def write(self, thread: int, name: str, index: int, value: Any) -> None:
        array = self.arrays[name]
        if not 0 <= index < len(array):
            self.problems.add("bounds")
            return
        self.note(thread, (name, index), write=True, value=value)
        array[index] = value

    def issue(self, thread: int, group: int, target: tuple[str, int], source: tuple[str, int], count: int) -> None:
        if target[1] % count or source[1] % count:
            self.problems.add("misaligned")
        copy = Pending(thread=thread, group=group, places=[], values=[])
        for offset in range(count):
            value = self.read(thread, source[0], source[1] + offset)
            self.write(thread, target[0], target[1] + offset, NAN)
            place = (target[0], target[1] + offset)
            self.in_flight[place] += 1
            copy.places.append(place)
            copy.values.append(value)
        self.pending.append(copy)

    def land(self, thread: int, before_group: int) -> None:
        left = []
        for copy in self.pending:
            if copy.thread != thread or copy.group >= before_group:
                left.append(copy)
                continue
            for place, value in zip(copy.places, copy.values, strict=True):
                self.in_flight[place] -= 1
                self.write(thread, *place, value)
        self.pending = left

    def barrier(self) -> None:
        """Compare all pairs of accesses to an element in the interval that ends; copies in flight go on in the next."""
        for accesses in self.log.values():
            if _conflicting(accesses):
                self.problems.add("race")
        self.log.clear()
        self.interval += 1
        for copy in self.pending:
            for place in copy.places:
                self.log[place].add((copy.thread, True, NAN))

    def end_of_block(self) -> None:
        self.barrier()
        self.log.clear()
        self.pending.clear()
        self.in_flight.clear()
        self.block += 1
        self.interval = 0

    def end_of_kernel(self) -> None:
        for accesses in self.traffic.values():
            for block, interval, thread, write, value in accesses:
                for other_block, other_interval, other, also, seen in accesses:
                    apart = block != other_block or (interval == other_interval and thread != other)
                    if apart and (write or also) and not (write and also and value == seen):
                        self.problems.add("race")
        self.traffic.clear()
        self.block = 0


def _conflicting(accesses: set[tuple[int, bool, Any]]) -> bool:
    return any(
        thread != other and (write or also) and not (write and also and value == seen)
        for thread, write, value in accesses
        for other, also, seen in accesses
    )


@dataclass
class Kernel:
    """A device function translated to a generator function ``run(memory, thread, block, lane)``."""

    run: Callable[..., Iterator[Any]]
    blocks: dict[str, int]
    threads: dict[str, int]
    shared: dict[str, int]
    parameters: list[str]
    written: set[str]


def execute(kernels: list[Kernel], arrays: dict[str, np.ndarray], *, reverse: bool = False) -> Verdict:
    """Run ``kernels`` one after the other on ``arrays`` (name of parameter to values), threads forward or backward."""
    verdict = Verdict(outputs={})
    memory = Memory(verdict.problems)
    for name, values in arrays.items():
        memory.arrays[name] = values.astype(np.float64).ravel().tolist()
    for kernel in kernels:
        memory.written = kernel.written
        memory.shared = set(kernel.shared)
        for block in _grid(kernel.blocks):
            for name, size in kernel.shared.items():
                memory.arrays[name] = [NAN] * size
            _run_block(kernel, memory, block, reverse=reverse)
            memory.end_of_block()
        memory.end_of_kernel()
    verdict.outputs = {name: np.array(memory.arrays[name]) for name in arrays}
    return verdict


def _grid(extents: dict[str, int]) -> Iterator[dict[str, int]]:
    tags = sorted(extents, reverse=True)  # z, y, x: x is the innermost
    for place in np.ndindex(*(extents[tag] for tag in tags)):
        yield dict(zip(tags, map(int, place), strict=True))


def _run_block(kernel: Kernel, memory: Memory, block: dict[str, int], *, reverse: bool) -> None:
    threads = [kernel.run(memory, number, {**block, **place}) for number, place in enumerate(_grid(kernel.threads))]
    order = range(len(threads))[::-1] if reverse else range(len(threads))
    waiting: dict[int, Any] = {}  # thread to what it waits for; absent: it has ended
    for number in order:
        _advance(threads, waiting, number, None)
    while waiting:
        collective = sorted(number for number, (kind, *_) in waiting.items() if kind != "barrier")
        if collective:
            _resolve(threads, waiting, collective[0], memory)
            continue
        sites = {site for _, site, *_ in waiting.values()}
        if len(sites) > 1 or len(waiting) < len(threads):
            memory.problems.add("divergence")
        memory.barrier()
        for number in [n for n in order if n in waiting]:
            _advance(threads, waiting, number, None)


def _advance(threads: list[Iterator[Any]], waiting: dict[int, Any], number: int, value: Any) -> None:
    try:
        waiting[number] = threads[number].send(value)  # type: ignore[attr-defined]
    except StopIteration:
        waiting.pop(number, None)


def _resolve(threads: list[Iterator[Any]], waiting: dict[int, Any], first: int, memory: Memory) -> None:
    """Carry out the instruction that thread ``first`` waits for, with all lanes of its warp that wait for the same."""
    kind, site, *_ = waiting[first]
    start = first // WARP * WARP
    warp = range(start, start + WARP)
    lanes = {n - start: waiting[n][2:] for n in warp if waiting.get(n, ("", -1))[:2] == (kind, site)}
    if kind not in ("active", "shuffle") and len(lanes) < WARP:
        memory.problems.add("divergence")
    results = COLLECTIVES[kind](lanes, memory, start)
    for lane in lanes:
        _advance(threads, waiting, start + lane, results.get(lane))


Lanes = dict[int, tuple[Any, ...]]


def _active(lanes: Lanes, _memory: Memory, _start: int) -> dict[int, Any]:
    mask = sum(1 << lane for lane in lanes)
    return dict.fromkeys(lanes, mask)


def _shuffle(lanes: Lanes, _memory: Memory, _start: int) -> dict[int, Any]:
    """CUDA guide, "Warp Shuffle Functions": an inactive lane gives nothing, beyond the segment is one's own."""
    received = {}
    for lane, (name, mask, value, operand, width) in lanes.items():
        first = lane // width * width
        source = first + operand % width if name == "__shfl_sync" else lane + operand
        if name == "__shfl_down_sync" and source >= first + width:
            source = lane
        known = source in lanes and mask == mask and int(mask) >> source & 1 and int(mask) >> lane & 1
        received[lane] = (value if source == lane else lanes[source][2]) if known else NAN
    return received


def _ldmatrix(lanes: Lanes, memory: Memory, start: int) -> dict[int, Any]:
    for lane, (transposed, count, registers, offset, _name, _row) in lanes.items():
        for matrix in range(count):
            for half in range(2):
                i, j = lane // 4, lane % 4 * 2 + half
                row, column = (j, i) if transposed else (i, j)
                given = lanes.get(8 * matrix + row)
                value = NAN if given is None else memory.read(start + lane, given[4], given[5] + column)
                _put(registers, offset + 2 * matrix + half, value, memory)
    return {}


def _put(registers: list[Any], index: int, value: Any, memory: Memory) -> None:
    if 0 <= index < len(registers):
        registers[index] = value
    else:
        memory.problems.add("bounds")


def _get(registers: list[Any], index: int, memory: Memory) -> Any:
    if 0 <= index < len(registers):
        return registers[index]
    memory.problems.add("bounds")
    return NAN


def _mma(lanes: Lanes, memory: Memory, _start: int) -> dict[int, Any]:
    """mma.m16n8k16: the formulas of the ISA, "Matrix Fragments for mma.m16n8k16 with floating point type"."""
    a, b = np.full((16, 16), NAN), np.full((16, 8), NAN)
    for lane, (a_registers, a_offset, b_registers, b_offset, *_) in lanes.items():
        group, thread = lane // 4, lane % 4
        for i in range(8):
            row = group if i in (0, 1, 4, 5) else group + 8
            a[row, thread * 2 + i % 2 + (8 if i >= 4 else 0)] = _get(a_registers, a_offset + i, memory)
        for i in range(4):
            b[thread * 2 + i % 2 + (8 if i >= 2 else 0), group] = _get(b_registers, b_offset + i, memory)
    product = a @ b
    for lane, (*_, c_registers, c_offset) in lanes.items():
        for i in range(4):
            old = _get(c_registers, c_offset + i, memory)
            row, column = lane // 4 + (8 if i >= 2 else 0), lane % 4 * 2 + i % 2
            _put(c_registers, c_offset + i, old + float(product[row, column]), memory)
    return {}


def _mma_store(lanes: Lanes, memory: Memory, start: int) -> dict[int, Any]:
    """Two accumulators of mma.m16n8k16 side by side to a tile of 16x16, as TVM's code generation does."""
    for lane, (name, first, registers, offset, stride) in lanes.items():
        for i in range(8):
            row, column = lane // 4 + (8 if i % 4 >= 2 else 0), lane % 4 * 2 + i % 2 + (8 if i >= 4 else 0)
            memory.write(start + lane, name, first + row * stride + column, _get(registers, offset + i, memory))
    return {}


def _wmma_load(lanes: Lanes, memory: Memory, start: int) -> dict[int, Any]:
    for lane, (fragment, index, name, first, stride) in lanes.items():
        reader = start + lane if lane == 0 else None
        matrix = [[_element(memory, reader, name, first + i * stride + j) for j in range(16)] for i in range(16)]
        fragment[index] = np.array(matrix)
    return {}


def _element(memory: Memory, reader: int | None, name: str, index: int) -> Any:
    if reader is not None:
        return memory.read(reader, name, index)
    array = memory.arrays[name]
    return array[index] if 0 <= index < len(array) else NAN


def _wmma_multiply(lanes: Lanes, _memory: Memory, _start: int) -> dict[int, Any]:
    for d, a, b, c in lanes.values():
        d[0] = _matrix(a[0]) @ _matrix(b[0]) + _matrix(c[0])
    return {}


def _matrix(value: Any) -> np.ndarray:
    return value if isinstance(value, np.ndarray) else np.full((16, 16), NAN)


def _wmma_store(lanes: Lanes, memory: Memory, start: int) -> dict[int, Any]:
    lane = min(lanes)
    fragment, index, name, first, stride = lanes[lane]
    values = _matrix(fragment[index])
    for i, j in np.ndindex(16, 16):
        memory.write(start + lane, name, first + i * stride + j, float(values[i, j]))
    return {}


COLLECTIVES: dict[str, Callable[[Lanes, Memory, int], dict[int, Any]]] = {
    "active": _active, "shuffle": _shuffle, "ldmatrix": _ldmatrix, "mma": _mma,
    "mma_store": _mma_store, "wmma_load": _wmma_load, "wmma_multiply": _wmma_multiply, "wmma_store": _wmma_store,
}  # fmt: skip


# What translated code calls, besides `Memory`.


def local_read(memory: Memory, array: list[Any], index: int) -> Any:
    return _get(array, index, memory)


def local_write(memory: Memory, array: list[Any], index: int, value: Any) -> None:
    _put(array, index, value, memory)


def maximum(a: float, b: float) -> float:
    return NAN if a != a or b != b else max(a, b)


def minimum(a: float, b: float) -> float:
    return -maximum(-a, -b)


def exponential(a: float) -> float:
    return math.exp(a) if a < 700 else a


def divide(a: float, b: float) -> float:
    return a / b if b else NAN


def truncated_quotient(a: int, b: int) -> int:
    return int(a / b) if b else NEVER


def truncated_remainder(a: int, b: int) -> int:
    return a - b * truncated_quotient(a, b)
