"""Emits computations in row form as one GPU launch: threads sweep their rows, and meet where a reduction needs all of a
row.

    softmax, 32 threads to a row of 256:           # lanes of 4 along the row, 2 items a thread
      for i: x[i] = 16-byte load;  m = max(m, x[i])           # pass 1; x stays in registers
      m = allreduce(m)
      for i: e[i] = exp(x[i] - m);  s += e[i]                 # pass 2
      s = allreduce(s)
      for i: 16-byte store of e[i] * (1 / s)                  # pass 3

Threads of one row along the lanes exchange by `tvm_thread_allreduce`, which stock TVM lowers to shuffles where the
target has them and to a tree in shared memory where not (OpenCL). Warps that divide a row across the lanes write
their partial results to shared memory, and each thread adds them up in the same order: every thread has the same
bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tvm_ext._tvm import Buffer, Expr, Stmt, TensorLoad, Var, structural_equal
from tvm_ext.analysis.computations import Computation, dtype_of, reads, substitute
from tvm_ext.analysis.predicates import is_in
from tvm_ext.ir.build_ir import (
    SERIAL,
    UNROLLED,
    accumulate,
    accumulator_dtype,
    allocate,
    if_all,
    in_dtype,
    index,
    load,
    loop,
    neutral,
    sequence,
    split_index,
    store,
)
from tvm_ext.ir.simt_ir import gpu_buffer, launch_2d

from .combine import add_initial, allreduce, meet, starts_neutral
from .form import LoopAxis, RowForm, table_of
from .lanes import TableAt, distinct, evaluate, vector_loop
from .plan import RowPlan, passes

UNROLLED_ITEMS = 32
"""Items whose loop is written out although nothing is held: windows. Assumed, not measured."""


def emit_row_kernel(form: RowForm, plan: RowPlan, *, partial: Buffer | None = None) -> Stmt:
    """One launch of ``form`` divided as in ``plan``.

    With ``partial``, of shape (splits, rows), the form's only computation leaves its partial results there.
    """

    def thread(number: Expr, x: Expr, y: Expr) -> Stmt:
        group, split = split_index(number, (plan.grid_blocks, plan.splits))
        row, grid = (x, y) if plan.along_row else (y, x)
        return _RowKernel(
            form=form, plan=plan, row_thread=row, grid_thread=grid, group=group, split=split, partial=partial
        ).statement()

    counts = (plan.row_threads, plan.grid_threads) if plan.along_row else (plan.grid_threads, plan.row_threads)
    return launch_2d(plan.blocks, *counts, thread)


Registers = list[tuple[Expr, Buffer]]
"""What is held, a computation's target or a unit of its inputs, and where."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _RowKernel:
    """The statements of one thread, and its registers: one list entry for each buffer."""

    form: RowForm
    plan: RowPlan
    row_thread: Expr
    grid_thread: Expr
    group: Expr
    split: Expr
    partial: Buffer | None
    allocations: list[Stmt] = field(default_factory=list)
    values: Registers = field(default_factory=list)  # of computations with one value for a row
    rows: Registers = field(default_factory=list)  # of computations with one for each element
    held: Registers = field(default_factory=list)  # of units
    last: list[Stmt] = field(default_factory=list)

    def statement(self) -> Stmt:
        parts, body = passes(self.form), []
        for number, (first, *others) in enumerate(parts):
            if not first.is_reduction and not self.form.along_row(first):
                body += self._row_value(first)
            else:
                body += self._sweep([first, *others], [later for part in parts[number + 1 :] for later in part])
        return sequence(*self.allocations, *body, *self.last)

    # --- coordinates ------------------------------------------------------------------------------------------------
    @property
    def _grid_chunk(self) -> Expr:
        return self.group * index(self.plan.grid_threads) + self.grid_thread

    def _row_chunk(self, number: Expr) -> Expr:
        first = self.split * index(self.plan.items * self.plan.row_threads)
        return first + number * index(self.plan.row_threads) + self.row_thread

    def _grid_table(self, lane: Expr) -> list[tuple[Var, Expr]]:
        return _coordinates(self.form.grid, self._grid_chunk, self.plan.grid_lanes, lane)

    def _row_table(self, number: Expr, lane: Expr) -> list[tuple[Var, Expr]]:
        grid = self._grid_table(self._row_lane(lane))
        return grid + _coordinates(self.form.row, self._row_chunk(number), self.plan.row_lanes, lane)

    def _row_lane(self, lane: Expr) -> Expr:
        """Of a thread's rows, the one that ``lane`` is in."""
        return index(0) if self.plan.along_row else lane

    def _if_in_grid(self, *statements: Stmt) -> Stmt:
        inside = None if self.plan.covers_grid else self._grid_chunk < index(self.plan.grid_chunks)
        return if_all([inside], sequence(*statements))

    def _if_in_row(self, number: Expr, *statements: Stmt) -> Stmt:
        inside = None if self.plan.covers_rows else self._row_chunk(number) < index(self.plan.row_chunks)
        return self._if_in_grid(if_all([inside], sequence(*statements)))

    def _once_a_row(self, *statements: Stmt) -> Stmt:
        """By the first of the threads that share a row."""
        is_first = None if self.plan.row_threads == 1 else self.row_thread == index(0)
        return if_all([is_first], self._if_in_grid(*statements))

    # --- registers --------------------------------------------------------------------------------------------------
    def _registers(self, count: int, dtype: str, name: str) -> Buffer:
        buffer = gpu_buffer((count,), dtype, name, "local")
        self.allocations.append(allocate(buffer))
        return buffer

    def _new_registers(self, count: int, computation: Computation, suffix: str) -> Buffer:
        """Registers for results of ``computation``, in the type that it accumulates in."""
        target = computation.target
        return self._registers(count, accumulator_dtype(dtype_of(target)), f"{target.name}_{suffix}")

    def _grid_lanes(self, body: Callable[[Expr], Stmt]) -> Stmt:
        """``body`` for each of a thread's rows."""
        return loop(self.plan.grid_lanes, UNROLLED, "lane", body)

    def _internal(self, offset: Expr, lane: Expr) -> Callable[[TensorLoad], Expr | None]:
        """Where the thread holds what one of the form's computations has made: None where it does not."""

        def held(item: TensorLoad) -> Expr | None:
            for registers, at in ((self.rows, offset + lane), (self.values, self._row_lane(lane))):
                for target, buffer in registers:
                    if item.source.same_as(target):
                        return load(buffer, [at])
            return None

        return held

    def _fetch(
        self, units: Sequence[tuple[Expr, Computation]], offset: Expr, at: TableAt, count: int
    ) -> tuple[Registers, list[Stmt]]:
        """Registers for ``count`` elements of each unit, and what fills those from ``offset`` on."""
        held = [(unit, self._registers(count, dtype_of(unit), "x")) for unit, _ in units]
        fetched = [
            self.plan.lanes.fetch(unit, owner, buffer, offset, at)
            for (unit, owner), (_, buffer) in zip(units, held, strict=True)
        ]
        return held, fetched

    # --- one value for the row --------------------------------------------------------------------------------------
    def _row_value(self, computation: Computation) -> list[Stmt]:
        """A computation with one value for each row, computed by every thread that shares it."""
        value = self._new_registers(self.plan.grid_lanes, computation, "value")
        # of its inputs, those that differ between a thread's rows are in registers
        units = [] if self.plan.along_row else distinct(self.plan.lanes.units(computation, self.form))
        own = [(unit, computation) for unit in units]
        fetched, statements = self._fetch(own, index(0), self._grid_table, self.plan.lanes.width)

        def element(lane: Expr) -> Stmt:
            registers = [(unit, load(buffer, [lane])) for unit, buffer in fetched]
            result = evaluate(computation.value, registers, self._internal(index(0), lane), self._grid_table(lane))
            return store(value, in_dtype(result, dtype_of(value)), [lane])

        computed = self._if_in_grid(*statements, self._grid_lanes(element))
        self.values.append((computation.target, value))
        return [computed, *self._store_row_value(computation, value)]

    def _store_row_value(self, computation: Computation, value: Buffer) -> list[Stmt]:
        target, lanes = computation.target, self.plan.lanes
        if self.partial is not None:
            return [self._once_a_row(self._store_partial(value))]
        if not is_in(target, self.form.kept):
            return []
        if self.plan.along_row:
            at = [substitute(item, self._grid_table(index(0))) for item in computation.indices]
            return [self._once_a_row(store(target, in_dtype(load(value, [index(0)]), dtype_of(target)), at))]
        result = self._registers(lanes.width, dtype_of(target), "y")
        stored = lanes.store(computation, lambda lane: load(value, [lane]), self._grid_table, result)
        return [self._once_a_row(*stored)]

    def _store_partial(self, value: Buffer) -> Stmt:
        """To (part, row): rows in row-major order of the grid, whatever its axes were fused from."""
        width = self.plan.grid_lanes
        row = self._grid_chunk * index(width)

        def lane(v: Expr) -> Stmt:
            return store(self.partial, load(value, [v]), [self.split, row + v])

        return vector_loop(dtype_of(value), width, lane)

    # --- a pass over the row ----------------------------------------------------------------------------------------
    def _sweep(self, computations: Sequence[Computation], later: Sequence[Computation]) -> list[Stmt]:
        plan, width = self.plan, self.plan.lanes.width
        partials = [
            (computation, self._new_registers(plan.grid_lanes, computation, "part"))
            for computation in computations
            if computation.is_reduction
        ]
        units = self._first_units(computations)
        again = [plan.held and self._is_read_again(unit, later) for unit, _ in units]
        kept, plain = (
            [pair for pair, held in zip(units, again, strict=True) if held is want] for want in (True, False)
        )
        for computation in computations:
            is_read = any(reads(other.value, computation.target) for other in (*computations, *later))
            if not computation.is_reduction and is_read:
                row = self._new_registers(width * plan.items, computation, "row")
                self.rows.append((computation.target, row))

        def item(number: Expr) -> Stmt:
            offset = number * index(width)

            def at(lane: Expr) -> list[tuple[Var, Expr]]:
                return self._row_table(number, lane)

            held, fetch_held = self._fetch(kept, offset, at, width * plan.items)
            self.held.extend(held)
            fetched, statements = self._fetch(plain, index(0), at, width)

            def value(computation: Computation, lane: Expr) -> Expr:
                registers = [(u, load(b, [lane])) for u, b in fetched]
                registers += [(u, load(b, [offset + lane])) for u, b in self.held]
                return evaluate(computation.value, registers, self._internal(offset, lane), at(lane))

            done = [*fetch_held, *statements]
            for computation in computations:
                part = next((buffer for own, buffer in partials if own is computation), None)
                if part is None:
                    done += self._elements(computation, value, offset, at)
                else:
                    done.append(self._accumulate(computation, part, value))
            return self._if_in_row(number, *done)

        kind = UNROLLED if plan.held or plan.items <= UNROLLED_ITEMS // width else SERIAL
        start = [self._start(*pair) for pair in partials]
        body = loop(plan.items, kind, "item", item)
        return [*start, body, *(statement for pair in partials for statement in self._finish(*pair))]

    def _start(self, computation: Computation, part: Buffer) -> Stmt:
        return self._grid_lanes(lambda lane: store(part, neutral(computation, dtype_of(part)), [lane]))

    def _first_units(self, computations: Sequence[Computation]) -> list[tuple[Expr, Computation]]:
        """Inputs that these computations read first, and a computation that reads each."""
        units: list[tuple[Expr, Computation]] = []
        for computation in computations:
            for unit in distinct(self.plan.lanes.units(computation, self.form)):
                if not any(structural_equal(unit, other) for other, _ in (*units, *self.held)):
                    units.append((unit, computation))
        return units

    def _is_read_again(self, unit: Expr, later: Sequence[Computation]) -> bool:
        return any(
            structural_equal(unit, other)
            for computation in later
            for other in self.plan.lanes.units(computation, self.form)
        )

    def _elements(
        self, computation: Computation, value: Callable[[Computation, Expr], Expr], offset: Expr, at: TableAt
    ) -> list[Stmt]:
        lanes = self.plan.lanes
        row = next((buffer for target, buffer in self.rows if target.same_as(computation.target)), None)

        def keep(lane: Expr) -> Stmt:
            return store(row, in_dtype(value(computation, lane), dtype_of(row)), [offset + lane])

        def element(lane: Expr) -> Expr:
            return value(computation, lane) if row is None else load(row, [offset + lane])

        statements = [] if row is None else [lanes.each(keep)]
        if is_in(computation.target, self.form.kept):
            result = self._registers(lanes.width, dtype_of(computation.target), "y")
            statements += lanes.store(computation, element, at, result)
        return statements

    def _accumulate(self, computation: Computation, part: Buffer, value: Callable[[Computation, Expr], Expr]) -> Stmt:
        def element(lane: Expr) -> Stmt:
            new = in_dtype(value(computation, lane), dtype_of(part))
            return accumulate(part, [self._row_lane(lane)], new, computation.combiner)

        return self.plan.lanes.each(element)

    def _finish(self, computation: Computation, part: Buffer) -> list[Stmt]:
        """Combine the partial results of the threads that share a row; each of them has the total then."""
        total, plan = part, self.plan
        statements: list[Stmt] = []
        if plan.row_threads > 1:
            total = self._registers(plan.grid_lanes, dtype_of(part), f"{computation.target.name}_total")
            if plan.along_row:
                statement, last_use = allreduce(computation, part, total, self.row_thread)
                statements.append(statement)
                self.last.append(last_use)
            else:
                at, counts = (self.row_thread, self.grid_thread), (plan.row_threads, plan.grid_threads)
                allocations, statements = meet(computation, part, total, at=at, counts=counts)
                self.allocations.extend(allocations)
        if self.partial is None and not starts_neutral(computation):
            statements.append(add_initial(computation, total, plan.grid_lanes))
        self.values.append((computation.target, total))
        return [*statements, *self._store_row_value(computation, total)]


def _coordinates(axes: Sequence[LoopAxis], chunk: Expr, width: int, lane: Expr) -> list[tuple[Var, Expr]]:
    if not axes:
        return []
    extents = [axis.extent for axis in axes[:-1]] + [axes[-1].extent // width]
    return table_of(axes, split_index(chunk, extents), width, lane)
