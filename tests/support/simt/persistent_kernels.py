"""Small persistent kernels by hand, which walk the tables of a schedule: what checks of waiting are checked with.

An rTask of operator o has one row of the arena, of an element a thread: 1 plus the sum of all rows of the operators
that o needs, each thread reading its neighbour's column. What was not waited for is poison, and a missing barrier a
race. `Tables` are arrays, to be spoilt by tests; ``KernelSteps`` leave out, or weaken, what the kernel itself does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tests.support.simt.good_kernels import argument, primitive_function
from tvm_ext._tvm import Expr, Stmt, tirx
from tvm_ext.ir import device_sync
from tvm_ext.ir.build_ir import SERIAL, allocate, cast_to, index, load, loop, sequence, store
from tvm_ext.ir.simt_ir import gpu_buffer, launch
from tvm_ext.records.rtasks import RTaskGraph, RTaskProgram
from tvm_ext.support.arrays import Array

THREADS = 4
ENTRY, WAIT, NEED = 5, 3, 2  # numbers of a row


@dataclass(frozen=True, kw_only=True, slots=True)
class Tables:
    """What the kernel walks. ``entries``: rows (operator, begin, end, its first wait, behind its last one).

    ``first``: of each block, its first entry, and behind the last one. ``waits``: (counter, its rise in a run, count).
    ``needs``: (first row of the arena, rows). ``operators``: (first row, first need, behind the last one).
    """

    entries: Array
    first: Array
    waits: Array
    operators: Array
    needs: Array
    arrivals: Array  # of each entry: the counter that it raises
    counters: int
    rows: int

    def arrays(self) -> dict[str, Array]:
        names = ("entries", "first", "waits", "operators", "needs", "arrivals")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelSteps:
    """The kernel's own steps; each that is False is left out. ``epoch_shift`` is added to the epoch of waits."""

    waits: bool = True
    meets_behind_wait: bool = True
    meets_before_arrival: bool = True
    arrives: bool = True
    ends_run: bool = True
    arrives_once: bool = True
    epoch_shift: int = 0


def _rows(rows: Sequence[Sequence[int]], width: int) -> Array:
    return np.array(rows or [[0] * width], np.int32).reshape(-1)


def _operators(graph: RTaskGraph) -> tuple[Array, Array, int]:
    """(operators, needs, rows of the arena)"""
    counts = [operator.kernels[0].task_count for operator in graph.operators]
    bases = [0, *np.cumsum(counts).tolist()]
    operators: list[tuple[int, int, int]] = []
    needs: list[tuple[int, int]] = []
    for number, operator in enumerate(graph.operators):
        begin = len(needs)
        needs += [(bases[item], counts[item]) for item in operator.predecessors]
        operators.append((bases[number], begin, len(needs)))
    return _rows(operators, 3), _rows(needs, NEED), bases[-1]


def static_tables(program: RTaskProgram, graph: RTaskGraph) -> Tables:
    """Streams as the schedule has them: block b raises counter b by one behind each of its entries."""
    operators, needs, rows = _operators(graph)
    entries: list[tuple[int, ...]] = []
    waits: list[tuple[int, int, int]] = []
    first = [0]
    for stream in program.streams:
        for entry in stream:
            begin = len(waits)
            waits += [(unit, len(program.streams[unit]), order) for unit, order in entry.waits]
            entries.append((entry.operator, entry.begin, entry.end, begin, len(waits)))
        first.append(len(entries))
    blocks = len(program.streams)
    arrivals = [block for block, stream in enumerate(program.streams) for _ in stream]
    return Tables(
        entries=_rows(entries, ENTRY), first=_rows([first], 1), waits=_rows(waits, WAIT), operators=operators,
        needs=needs, arrivals=_rows([arrivals], 1), counters=blocks, rows=rows,
    )  # fmt: skip


def ticket_tables(graph: RTaskGraph, blocks: int, order: Sequence[int] | None = None) -> Tables:
    """One list of rTasks for all blocks, operators in ``order``; an operator's counter rises with each of them."""
    operators, needs, rows = _operators(graph)
    entries: list[tuple[int, ...]] = []
    waits: list[tuple[int, int, int]] = []
    arrivals = []
    for number in order or range(len(graph.operators)):
        operator = graph.operators[number]
        begin = len(waits)
        counts = {item: graph.operators[item].kernels[0].task_count for item in operator.predecessors}
        waits += [(item, count, count) for item, count in counts.items()]
        for task in range(operator.kernels[0].task_count):
            entries.append((number, task, task + 1, begin, len(waits)))
            arrivals.append(number)
    return Tables(
        entries=_rows(entries, ENTRY), first=_rows([[0, len(entries)] + [0] * (blocks - 1)], 1),
        waits=_rows(waits, WAIT), operators=operators, needs=needs, arrivals=_rows([arrivals], 1),
        counters=len(graph.operators), rows=rows,
    )  # fmt: skip


def state(tables: Tables, blocks: int, epoch: int = 0, entries: int = 0) -> Array:
    """Counters, the ticket, the epoch of each block, as after ``epoch`` runs of ``entries`` tickets."""
    rises = np.zeros(tables.counters, np.int64)
    np.add.at(rises, tables.arrivals.astype(np.int64), 1)
    counters = [rise * epoch for rise in rises.tolist()] + [(entries + blocks) * epoch] + [epoch] * blocks
    return np.array([value % (1 << 32) for value in counters], np.uint32).view(np.int32)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PersistentKernel:
    """The kernel of tables of a shape; ``tickets``: blocks take entries instead of walking streams."""

    tables: Tables
    blocks: int
    tickets: bool = False
    steps: KernelSteps = field(default_factory=KernelSteps)
    threads: int = THREADS

    def function(self) -> Any:
        return _KernelWriter(self).function()

    @property
    def entry_count(self) -> int:
        return len(self.tables.arrivals)

    def inputs(self, epoch: int = 0) -> dict[str, Array]:
        return {**self.tables.arrays(), "state": state(self.tables, self.blocks, epoch, self.entry_count)}

    def mutant(self, **steps: Any) -> PersistentKernel:
        return replace(self, steps=replace(self.steps, **steps))


class _KernelWriter:
    """Writes the TensorIR of a kernel."""

    def __init__(self, kernel: PersistentKernel) -> None:
        self.tables, self.steps, self.tickets = kernel.tables, kernel.steps, kernel.tickets
        self.blocks, self.threads, self.entry_count = kernel.blocks, kernel.threads, kernel.entry_count
        self._buffers = {
            name: argument(name, len(array), dtype="int32") for name, array in self.tables.arrays().items()
        }
        self._state = argument("state", self.tables.counters + 1 + self.blocks, dtype="int32")
        self._arena = argument("arena", self.tables.rows * self.threads)

    def function(self) -> Any:
        parameters = [*self._buffers.values(), self._state, self._arena]
        return primitive_function(parameters, launch(self.blocks, self.threads, self._kernel))

    def _kernel(self, block: Expr, thread: Expr) -> Stmt:
        cell = index(self.tables.counters + 1) + block
        epoch = gpu_buffer((1,), "int32", "epoch", "local")
        walk = self._by_tickets if self.tickets else self._by_streams
        ends = [self._one(thread, device_sync.end_run(self._state, cell))] if self.steps.ends_run else []
        read = store(epoch, device_sync.read_epoch(self._state, cell), [index(0)])
        return sequence(allocate(epoch), read, walk(block, thread, load(epoch, [index(0)])), _meet(), *ends)

    def _by_streams(self, block: Expr, thread: Expr, epoch: Expr) -> Stmt:
        first = cast_to(self._at("first", block), "int64")
        last = cast_to(self._at("first", block + index(1)), "int64")
        return loop(last - first, SERIAL, "e", lambda e: self._entry(first + e, thread, epoch))

    def _by_tickets(self, block: Expr, thread: Expr, epoch: Expr) -> Stmt:
        shared, mine = gpu_buffer((1,), "int32", "ticket", "shared"), gpu_buffer((1,), "int32", "mine", "local")
        per_run = tirx.IntImm("int32", self.entry_count + self.blocks)
        taken = device_sync.take(self._state, index(self.tables.counters), epoch, per_run)
        fetch = sequence(
            self._one(thread, store(shared, taken, [index(0)])),
            _meet(),
            store(mine, load(shared, [index(0)]), [index(0)]),
            _meet(),
        )
        entry = cast_to(load(mine, [index(0)]), "int64")
        walk = tirx.While(entry < index(self.entry_count), sequence(self._entry(entry, thread, epoch), fetch))
        return sequence(allocate(shared), allocate(mine), fetch, walk)

    def _entry(self, entry: Expr, thread: Expr, epoch: Expr) -> Stmt:
        def row(place: int) -> Expr:
            return cast_to(self._at("entries", entry * index(ENTRY) + index(place)), "int64")

        shifted = epoch + tirx.IntImm("int32", self.steps.epoch_shift)

        def wait(w: Expr) -> Stmt:
            numbers = [self._at("waits", (row(3) + w) * index(WAIT) + index(place)) for place in range(WAIT)]
            return device_sync.wait_until(self._state, numbers[0], shifted, *numbers[1:])

        steps = []
        if self.steps.waits:
            steps.append(self._one(thread, loop(row(4) - row(3), SERIAL, "w", wait)))
        if self.steps.meets_behind_wait:
            steps.append(_meet())
        steps.append(loop(row(2) - row(1), SERIAL, "task", lambda t: self._task(row(0), row(1) + t, thread)))
        if self.steps.meets_before_arrival:
            steps.append(_meet())
        if self.steps.arrives:
            raised = device_sync.arrive(self._state, self._at("arrivals", entry), tirx.IntImm("int32", 1))
            steps.append(self._one(thread, raised) if self.steps.arrives_once else raised)
        return sequence(*steps)

    def _task(self, operator: Expr, task: Expr, thread: Expr) -> Stmt:
        def row(place: int) -> Expr:
            return cast_to(self._at("operators", operator * index(3) + index(place)), "int64")

        total = gpu_buffer((1,), "float32", "total", "local")
        neighbour = (thread + index(1)) % index(self.threads)

        def need(n: Expr) -> Stmt:
            base, count = (
                cast_to(self._at("needs", (row(1) + n) * index(NEED) + index(place)), "int64") for place in range(NEED)
            )
            return loop(count, SERIAL, "r", lambda r: add((base + r) * index(self.threads) + neighbour))

        def add(place: Expr) -> Stmt:
            return store(total, load(total, [index(0)]) + load(self._arena, [place]), [index(0)])

        return sequence(
            allocate(total),
            store(total, tirx.const(1.0, "float32"), [index(0)]),
            loop(row(2) - row(1), SERIAL, "n", need),
            store(self._arena, load(total, [index(0)]), [(row(0) + task) * index(self.threads) + thread]),
        )

    def _at(self, name: str, place: Expr) -> Expr:
        return load(self._buffers[name], [place])

    @staticmethod
    def _one(thread: Expr, statement: Stmt) -> Stmt:
        return tirx.IfThenElse(thread == index(0), statement, None)


def _meet() -> Stmt:
    return tirx.Evaluate(tirx.call_intrin("int32", "tirx.tvm_storage_sync", "shared"))


def expected(graph: RTaskGraph, threads: int = THREADS) -> Array:
    """What the arena holds in the end."""
    values: list[float] = []
    for operator in graph.operators:
        needed = ((values[item], graph.operators[item].kernels[0].task_count) for item in operator.predecessors)
        values.append(1.0 + sum(value * count for value, count in needed))
    rows = [value for value, op in zip(values, graph.operators, strict=True) for _ in range(op.kernels[0].task_count)]
    return np.repeat(np.array(rows, np.float32), threads)
