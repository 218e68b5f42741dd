"""The kernel that runs a schedule of rTasks in one launch (Rammer, §4.1): persistent blocks, each with a loop.

A block takes entries: from its own stream, or one after another by tickets. Of each it waits for the counters that the
entry names, runs the rTasks by the body that the entry names, and adds one to the entry's counter:

    for e in its stream, or: while (ticket = take()) < entries: e = order[ticket]
        if thread == 0: for w in waits of e: wait until counter >= (epoch + 1) * entries of its operator
        barrier
        for task in range(begin, end):
            if body == 0: ...  elif body == 1: ...
            barrier
        if thread == 0: fence; counter += 1

A ticket is only waited for by who took a later one, and whoever has taken one runs: that needs no more blocks to be
resident than one. Streams need all of them, which the compiler's count promises for the units of the device's row. The
device that runs the kernel may have fewer, or others may use them: so the blocks of a run look first whether all are
there (`settle`), and take tickets where they are not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm_ext._tvm import Buffer, Expr, For, ForKind, IterVar, PrimFunc, Stmt, Var, tirx
from tvm_ext.ir.build_ir import sequence
from tvm_ext.ir.device_sync import arrive, end_run, read_epoch, settle, take, wait_until
from tvm_ext.ir.simt_ir import MIN_BLOCKS_PER_UNIT
from tvm_ext.records.merged import (
    ARRIVED,
    BEGIN,
    BODY,
    BODY_SCOPE,
    COUNTER,
    END,
    ENTRY_WORDS,
    FIRST_WAIT,
    HEAD_WORDS,
    LAST_WAIT,
    OPERANDS,
    TICKET,
    WAIT_WORDS,
    MergeLevel,
)

from .guard import BARRIER
from .relocate import SHARED_ALIGNMENT, Memory, moved_body
from .tables import LaunchTable

_INT = "int32"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Body:
    """A lowered kernel, and in which of the merged kernel's tensors each of its parameters lies."""

    function: PrimFunc
    bases: tuple[Buffer, ...]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LaunchForm:
    """What one launch is made of. ``least_resident``: how many blocks of it a unit must have room for; 0: any."""

    level: MergeLevel
    blocks: int
    threads: int
    shared_bytes: int
    shared_scope: str
    bodies: tuple[Body, ...]
    table: LaunchTable
    state_at: int
    least_resident: int = 0


def launch_statement(launch: LaunchForm, table: Buffer, state: Buffer) -> Stmt:
    """The launch as a root nest over ``table`` and ``state``."""
    return _LaunchWriter(launch, table, state).statement()


class _LaunchWriter:
    """Writes a launch; its blocks are 1-D."""

    def __init__(self, launch: LaunchForm, table: Buffer, state: Buffer) -> None:
        self.launch, self.table, self.state = launch, table, state
        self.block, self.thread = (
            IterVar(None, Var(tag.replace(".", "_"), _INT), IterVar.ThreadIndex, tag)
            for tag in ("blockIdx.x", "threadIdx.x")
        )
        self.epoch = Var("epoch", _INT)
        self.pool = self._shared("pool", launch.shared_bytes, "uint8") if launch.shared_bytes else None

    def statement(self) -> Stmt:
        launch = self.launch
        parts: list[Stmt] = [] if self.pool is None else [tirx.AllocBuffer(self.pool, {})]
        walk = {"static": self._streams, "ticket": self._tickets, "waves": self._own_entry}[launch.level]
        parts += walk()
        body = sequence(*parts)
        if launch.least_resident:
            body = _attribute(MIN_BLOCKS_PER_UNIT, launch.least_resident, body)
        for thread, extent in ((self.thread, launch.threads), (self.block, launch.blocks)):
            body = tirx.AttrStmt(thread, "thread_extent", _number(extent), body)
        return body

    # --- what a block takes -------------------------------------------------------------------------------------------

    def _streams(self) -> list[Stmt]:
        """Its own stream where all blocks are there, else by tickets; one loop, so that each body is there once."""
        launch, table, by_stream, last = self.launch, self.launch.table, Var("by_stream", _INT), Var("last", _INT)
        first, behind = (self._word(self.block.var + (table.streams_at + more)) for more in (0, 1))
        entry, ticket, declared = self._entry_and_ticket()
        there = settle(self.state, _number(launch.state_at + ARRIVED), self.epoch, _number(launch.blocks))
        ranked = tirx.IfThenElse(
            _get(entry) < table.entry_count,
            _put(entry, self._word(_get(entry) + table.order_at)),
            _put(entry, _number(table.entry_count)),  # which is none, and ends the walk
        )
        taken = sequence(self._take(ticket, entry), ranked)

        def advance(own: Expr) -> Stmt:
            return tirx.IfThenElse(by_stream > 0, _put(entry, own), taken)

        # The tickets of a run that takes none.
        unused = arrive(self.state, _number(launch.state_at + TICKET), self._tickets_each_run())
        return [
            *declared,
            *self._told(ticket, there, lambda value: tirx.Bind(by_stream, value)),
            tirx.Bind(last, tirx.Select(by_stream > 0, behind, _number(table.entry_count))),
            advance(first),
            self._walk(entry, last, advance(_get(entry) + 1)),
            tirx.IfThenElse(tirx.all(by_stream > 0, self.block.var.equal(0)), self._first_thread(unused), None),
            self._leave(),
        ]

    def _tickets(self) -> list[Stmt]:
        """Entries in the table's order, each taken by whichever block is free."""
        entry, ticket, declared = self._entry_and_ticket()
        taken = self._take(ticket, entry)
        return [*declared, taken, self._walk(entry, _number(self.launch.table.entry_count), taken), self._leave()]

    def _entry_and_ticket(self) -> tuple[Buffer, Buffer, list[Stmt]]:
        """The entry at which a thread is, where a block shares what its first thread was told, and both declared."""
        entry = tirx.decl_buffer([1], _INT, "entry", scope="local")
        ticket = self._shared("ticket", 1, _INT)
        epoch = tirx.Bind(self.epoch, read_epoch(self.state, self._epoch_cell()))
        return entry, ticket, [*(tirx.AllocBuffer(buffer, {}) for buffer in (entry, ticket)), epoch]

    def _take(self, ticket: Buffer, entry: Buffer) -> Stmt:
        """``entry`` becomes the block's next ticket."""
        state_at = _number(self.launch.state_at + TICKET)
        taken = take(self.state, state_at, self.epoch, self._tickets_each_run())
        return sequence(*self._told(ticket, taken, lambda value: _put(entry, value)))

    def _walk(self, entry: Buffer, last: Expr, advance: Stmt) -> Stmt:
        """``entry`` and those to which it is advanced, until one is no less than ``last``."""
        number = Var("e", _INT)
        return tirx.While(
            _get(entry) < last, sequence(tirx.Bind(number, _get(entry)), self._waiting_entry(number), advance)
        )

    def _told(self, ticket: Buffer, value: Expr, use: Callable[[Expr], Stmt]) -> list[Stmt]:
        """The first thread's ``value``, for all threads."""
        return [self._first_thread(_put(ticket, value)), _barrier(), use(_get(ticket)), _barrier()]

    def _tickets_each_run(self) -> Expr:
        return _number(self.launch.table.entry_count + self.launch.blocks)  # every block takes one that is none

    def _own_entry(self) -> list[Stmt]:
        """The one entry that has the block's number: nothing in the launch waits."""
        return [self._tasks(self.block.var)]

    # --- an entry -----------------------------------------------------------------------------------------------------

    def _waiting_entry(self, entry: Expr) -> Stmt:
        first, last = Var("first_wait", _INT), Var("last_wait", _INT)
        count = tirx.floordiv(last - first, _number(WAIT_WORDS))
        waits = sequence(self._first_thread(_loop("w", _number(0), count, lambda w: self._wait(first, w))), _barrier())
        return sequence(
            tirx.Bind(first, self._field(entry, FIRST_WAIT)),
            tirx.Bind(last, self._field(entry, LAST_WAIT)),
            tirx.IfThenElse(first < last, waits, None),
            self._tasks(entry),
            self._first_thread(arrive(self.state, self._counter(self._field(entry, COUNTER)), _number(1))),
        )

    def _wait(self, first: Expr, number: Expr) -> Stmt:
        counter, each_run = (self._word(first + number * WAIT_WORDS + word) for word in range(WAIT_WORDS))
        return wait_until(self.state, self._counter(counter), self.epoch, each_run, each_run)

    def _tasks(self, entry: Expr) -> Stmt:
        body, operands = Var("body", _INT), Var("operands", _INT)
        run = _loop(
            "task",
            self._field(entry, BEGIN),
            self._field(entry, END),
            lambda task: sequence(self._dispatched(body, operands, task), _barrier()),
        )
        fields = [tirx.Bind(body, self._field(entry, BODY)), tirx.Bind(operands, self._field(entry, OPERANDS))]
        return sequence(*fields, run)

    def _dispatched(self, number: Expr, operands: Expr, task: Expr) -> Stmt:
        """The body that the entry names, as a chain of conditions that all threads of the block decide alike."""
        bodies = self.launch.bodies
        result = self._body(bodies[-1], operands, task)
        for place in reversed(range(len(bodies) - 1)):
            result = tirx.IfThenElse(number.equal(place), self._body(bodies[place], operands, task), result)
        return result

    def _body(self, body: Body, operands: Expr, task: Expr) -> Stmt:
        places = [Var(f"place{number}", _INT) for number in range(len(body.bases))]
        binds = [tirx.Bind(place, self._word(operands + number)) for number, place in enumerate(places)]
        memory = [Memory(base=base, units=place) for base, place in zip(body.bases, places, strict=True)]
        thread = self.thread.var
        moved = moved_body(body.function, memory, self.pool, thread, task, self.launch.threads)
        return _attribute(BODY_SCOPE, 1, sequence(*binds, moved))

    # --- parts --------------------------------------------------------------------------------------------------------

    def _leave(self) -> Stmt:
        return sequence(_barrier(), self._first_thread(end_run(self.state, self._epoch_cell())))

    def _epoch_cell(self) -> Expr:
        return self.block.var + _number(self.launch.state_at + HEAD_WORDS + self.launch.table.counters)

    def _first_thread(self, statement: Stmt) -> Stmt:
        return tirx.IfThenElse(self.thread.var.equal(0), statement, None)

    def _counter(self, number: Expr) -> Expr:
        return number + _number(self.launch.state_at + HEAD_WORDS)

    def _field(self, entry: Expr, word: int) -> Expr:
        return self._word(entry * ENTRY_WORDS + (self.launch.table.entries_at + word))

    def _word(self, place: Expr) -> Expr:
        return tirx.BufferLoad(self.table, [place])

    def _shared(self, name: str, size: int, dtype: str) -> Buffer:
        scope = self.launch.shared_scope if name == "pool" else "shared"
        return tirx.decl_buffer([size], dtype, name, scope=scope, data_alignment=SHARED_ALIGNMENT)


def _loop(name: str, first: Expr, behind: Expr, body: Callable[[Expr], Stmt]) -> Stmt:
    """``body`` for each number from ``first`` to ``behind`` - 1, which it finds in a variable."""
    step, number, start = Var(f"{name}_step", _INT), Var(name, _INT), Var(f"{name}_begin", _INT)
    inner = sequence(tirx.Bind(number, start + step), body(number))
    return sequence(tirx.Bind(start, first), For(step, _number(0), behind - start, ForKind.SERIAL, inner))


def _get(scalar: Buffer) -> Expr:
    return tirx.BufferLoad(scalar, [_number(0)])


def _put(scalar: Buffer, value: Expr) -> Stmt:
    return tirx.BufferStore(scalar, value, [_number(0)])


def _barrier() -> Stmt:
    return tirx.Evaluate(tirx.call_intrin("int32", BARRIER, "shared"))


def _attribute(key: str, value: int, body: Stmt) -> Stmt:
    return tirx.AttrStmt(_number(0), key, _number(value), body)


def _number(value: int) -> Expr:
    return tirx.IntImm(_INT, value)
