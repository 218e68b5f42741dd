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

from tvm_ext._tvm import Buffer, Expr, Stmt, TensorLoad, Var, structural_equal, tirx
from tvm_ext.analysis.computations import Computation, dtype_of, reads, substitute
from tvm_ext.analysis.predicates import is_in
from tvm_ext.ir.build_ir import (
    SERIAL,
    UNROLLED,
    accumulator_dtype,
    allocate,
    as_index,
    combine,
    in_dtype,
    index,
    load,
    loop,
    neutral,
    sequence,
    split_index,
    store,
)
from tvm_ext.ir.simt_ir import bind, gpu_buffer

from .combine import add_initial, allreduce, meet, starts_neutral
from .form import LoopAxis, RowForm
from .lanes import TableAt, distinct, evaluate, fetch, is_vector, store_values, vector_loop, vector_units
from .plan import RowPlan, passes

UNROLLED_ITEMS = 32  # items whose loop is written out although nothing is held: windows


def emit_row_kernel(form: RowForm, plan: RowPlan, *, partial: Buffer | None = None) -> Stmt:
    """One launch of ``form`` divided as in ``plan``.

    With ``partial``, of shape (splits, rows), the form's only computation leaves its partial results there.
    """

    def block(number: Expr) -> Stmt:
        group, split = split_index(number, (plan.grid_blocks, plan.splits))

        def thread(x: Expr, y: Expr) -> Stmt:
            row, grid = (x, y) if plan.along_row else (y, x)
            kernel = _RowKernel(
                form=form, plan=plan, row_thread=row, grid_thread=grid, group=group, split=split, partial=partial
            )
            return kernel.statement()

        counts = (plan.row_threads, plan.grid_threads) if plan.along_row else (plan.grid_threads, plan.row_threads)
        return bind("threadIdx.y", counts[1], lambda y: bind("threadIdx.x", counts[0], lambda x: thread(x, y)))

    return bind("blockIdx.x", plan.blocks, block)


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
    # A computation's target, registers of a row's value or of the elements; a unit, registers of its elements.
    values: list[tuple[Buffer, Buffer]] = field(default_factory=list)
    rows: list[tuple[Buffer, Buffer]] = field(default_factory=list)
    held: list[tuple[Expr, Buffer]] = field(default_factory=list)
    last: list[Stmt] = field(default_factory=list)

    def statement(self) -> Stmt:
        parts = passes(self.form)
        body = [
            stmt for number, computations in enumerate(parts) for stmt in self._pass(computations, parts[number + 1 :])
        ]
        return sequence(*self.allocations, *body, *self.last)

    def _pass(self, computations: Sequence[Computation], later: Sequence[Sequence[Computation]]) -> list[Stmt]:
        first = computations[0]
        if not first.is_reduction and not self.form.along_row(first):
            return self._row_value(first)
        return self._sweep(computations, [computation for part in later for computation in part])

    # --- coordinates ------------------------------------------------------------------------------------------------
    @property
    def _grid_chunk(self) -> Expr:
        return self.group * index(self.plan.grid_threads) + self.grid_thread

    def _row_chunk(self, item: Expr) -> Expr:
        first = self.split * index(self.plan.items * self.plan.row_threads)
        return first + item * index(self.plan.row_threads) + self.row_thread

    def _grid_table(self, lane: Expr) -> list[tuple[Var, Expr]]:
        return self._coordinates(self.form.grid, self._grid_chunk, self.plan.grid_lanes, lane)

    def _row_table(self, item: Expr, lane: Expr) -> list[tuple[Var, Expr]]:
        grid = self._grid_table(lane if not self.plan.along_row else index(0))
        return grid + self._coordinates(self.form.row, self._row_chunk(item), self.plan.row_lanes, lane)

    def _coordinates(self, axes: Sequence[LoopAxis], chunk: Expr, width: int, lane: Expr) -> list[tuple[Var, Expr]]:
        if not axes:
            return []
        extents = [axis.extent for axis in axes[:-1]] + [axes[-1].extent // width]
        at = list(split_index(chunk, extents))
        if width > 1:
            at[-1] = at[-1] * index(width) + lane
        return [(axis.variable, as_index(x, axis.variable)) for axis, x in zip(axes, at, strict=True)]

    def _if_in_grid(self, *statements: Stmt) -> Stmt:
        body = sequence(*statements)
        if self.plan.covers_grid:
            return body
        return tirx.IfThenElse(self._grid_chunk < index(self.plan.grid_chunks), body, None)

    def _if_in_row(self, item: Expr, *statements: Stmt) -> Stmt:
        body = sequence(*statements)
        if not self.plan.covers_rows:
            body = tirx.IfThenElse(self._row_chunk(item) < index(self.plan.row_chunks), body, None)
        return self._if_in_grid(body)

    def _once_a_row(self, *statements: Stmt) -> Stmt:
        """By the first of the threads that share a row."""
        body = self._if_in_grid(*statements)
        return body if self.plan.row_threads == 1 else tirx.IfThenElse(self.row_thread == index(0), body, None)

    # --- registers --------------------------------------------------------------------------------------------------
    def _registers(self, count: int, dtype: str, name: str) -> Buffer:
        buffer = gpu_buffer((count,), dtype, name, "local")
        self.allocations.append(allocate(buffer))
        return buffer

    def _internal(self, item_offset: Expr, lane: Expr) -> Callable[[TensorLoad], Expr | None]:
        row_value = lane if not self.plan.along_row else index(0)

        def find(item: TensorLoad) -> Expr | None:
            for target, buffer in self.rows:
                if item.source.same_as(target):
                    return load(buffer, [item_offset + lane])
            for target, buffer in self.values:
                if item.source.same_as(target):
                    return load(buffer, [row_value])
            return None

        return find

    # --- one value for the row --------------------------------------------------------------------------------------
    def _row_value(self, computation: Computation) -> list[Stmt]:
        """A computation with one value for each row, computed by every thread that shares it."""
        width = self.plan.grid_lanes
        dtype = accumulator_dtype(dtype_of(computation.target))
        value = self._registers(width, dtype, f"{computation.target.name}_value")
        fetched, statements = self._fetch_for_rows(computation)

        def element(lane: Expr) -> Stmt:
            registers = [(unit, load(buffer, [lane])) for unit, buffer in fetched]
            result = evaluate(computation.value, registers, self._internal(index(0), lane), self._grid_table(lane))
            return store(value, in_dtype(result, dtype), [lane])

        compute = [*statements, loop(width, UNROLLED, "lane", element)]
        self.values.append((computation.target, value))
        return [self._if_in_grid(*compute), *self._store_row_value(computation, value)]

    def _fetch_for_rows(self, computation: Computation) -> tuple[list[tuple[Expr, Buffer]], list[Stmt]]:
        """The computation's inputs that differ between a thread's rows, in registers."""
        if self.plan.along_row:
            return [], []
        units = distinct(vector_units(computation, self.form, self.plan.lanes))
        return self._fetch(units, [computation] * len(units), index(0), self._grid_table)

    def _fetch(
        self, units: Sequence[Expr], owners: Sequence[Computation], offset: Expr, at: TableAt, count: int = 0
    ) -> tuple[list[tuple[Expr, Buffer]], list[Stmt]]:
        lanes = self.plan.lanes
        pairs, statements = [], []
        for unit, owner in zip(units, owners, strict=True):
            buffer = self._registers(count or lanes.width, dtype_of(unit), "x")
            vector = is_vector(unit, owner, lanes)
            statements.append(fetch(unit, buffer, offset, lanes.width, is_vector=vector, at=at))
            pairs.append((unit, buffer))
        return pairs, statements

    def _store_row_value(self, computation: Computation, value: Expr) -> list[Stmt]:
        if self.partial is not None:
            return [self._once_a_row(self._store_partial(value))]
        if not is_in(computation.target, self.form.kept):
            return []
        lanes = self.plan.lanes
        if self.plan.along_row:
            at = [substitute(item, self._grid_table(index(0))) for item in computation.indices]
            return [
                self._once_a_row(
                    store(computation.target, in_dtype(load(value, [index(0)]), dtype_of(computation.target)), at)
                )
            ]
        result = self._registers(lanes.width, dtype_of(computation.target), "y")
        return [
            self._once_a_row(
                *store_values(computation, lanes, lambda lane: load(value, [lane]), self._grid_table, result)
            )
        ]

    def _store_partial(self, value: Expr) -> Stmt:
        """To (part, row): rows in row-major order of the grid, whatever its axes were fused from."""
        width = self.plan.grid_lanes
        row = self._grid_chunk * index(width)
        return vector_loop(
            dtype_of(value),
            width,
            lambda lane: store(self.partial, load(value, [lane]), [self.split, row + lane]),
        )

    # --- a pass over the row ----------------------------------------------------------------------------------------
    def _sweep(self, computations: Sequence[Computation], later: Sequence[Computation]) -> list[Stmt]:
        reductions = [computation for computation in computations if computation.is_reduction]
        partials = [
            self._registers(self.plan.grid_lanes, accumulator_dtype(dtype_of(s.target)), f"{s.target.name}_part")
            for s in reductions
        ]
        start = [self._start(computation, part) for computation, part in zip(reductions, partials, strict=True)]
        units, owners = self._units(computations)
        again = [self.plan.held and self._is_read_again(unit, later) for unit in units]
        plain = [u for u, held in zip(units, again, strict=True) if not held]
        plain_owners = [o for o, held in zip(owners, again, strict=True) if not held]
        kept = [(u, o) for u, o, held in zip(units, owners, again, strict=True) if held]
        self._allocate_rows(computations, later)
        body = self._sweep_loop(
            lambda item: self._item(
                computations, list(zip(reductions, partials, strict=True)), plain, plain_owners, kept, item
            )
        )
        finish = [
            stmt
            for computation, part in zip(reductions, partials, strict=True)
            for stmt in self._finish(computation, part)
        ]
        return [*start, body, *finish]

    def _sweep_loop(self, body: Callable[[Expr], Stmt]) -> Stmt:
        kind = UNROLLED if self.plan.held or self.plan.items <= UNROLLED_ITEMS // self.plan.lanes.width else SERIAL
        return loop(self.plan.items, kind, "item", lambda item: self._if_in_row(item, body(item)))

    def _units(self, computations: Sequence[Computation]) -> tuple[list[Expr], list[Computation]]:
        """Inputs that these computations read first, and a computation that reads each."""
        units: list[Expr] = []
        owners: list[Computation] = []
        for computation in computations:
            for unit in distinct(vector_units(computation, self.form, self.plan.lanes)):
                known = any(structural_equal(unit, other) for other in (*units, *(u for u, _ in self.held)))
                if not known:
                    units.append(unit)
                    owners.append(computation)
        return units, owners

    def _is_read_again(self, unit: Expr, later: Sequence[Computation]) -> bool:
        return any(
            structural_equal(unit, other)
            for computation in later
            for other in vector_units(computation, self.form, self.plan.lanes)
        )

    def _allocate_rows(self, computations: Sequence[Computation], later: Sequence[Computation]) -> None:
        """Registers for the elements of computations that another computation reads."""
        for computation in computations:
            if computation.is_reduction:
                continue
            if any(reads(other.value, computation.target) for other in (*computations, *later)):
                dtype = accumulator_dtype(dtype_of(computation.target))
                count = self.plan.lanes.width * self.plan.items
                self.rows.append((computation.target, self._registers(count, dtype, f"{computation.target.name}_row")))

    def _item(
        self,
        computations: Sequence[Computation],
        reductions: Sequence[tuple[Computation, Buffer]],
        plain: Sequence[Computation],
        plain_owners: Sequence[Computation],
        kept: Sequence[tuple[Expr, Computation]],
        item: Expr,
    ) -> Stmt:
        width = self.plan.lanes.width
        offset = item * index(width)

        def at(lane: Expr) -> list[tuple[Var, Expr]]:
            return self._row_table(item, lane)

        held, fetch_held = self._fetch(
            [u for u, _ in kept], [o for _, o in kept], offset, at, count=width * self.plan.items
        )
        self.held.extend(held)
        fetched, statements = self._fetch(plain, plain_owners, index(0), at)

        def registers(lane: Expr) -> list[tuple[Expr, Expr]]:
            return [(u, load(b, [lane])) for u, b in fetched] + [(u, load(b, [offset + lane])) for u, b in self.held]

        def value(computation: Computation, lane: Expr) -> Expr:
            return evaluate(computation.value, registers(lane), self._internal(offset, lane), at(lane))

        done = [*fetch_held, *statements]
        for computation in computations:
            part = next((buffer for own, buffer in reductions if own is computation), None)
            done += (
                self._elements(computation, value, offset, at)
                if part is None
                else [self._accumulate(computation, part, value)]
            )
        return sequence(*done)

    def _elements(
        self, computation: Computation, value: Callable[[Computation, Expr], Expr], offset: Expr, at: TableAt
    ) -> list[Stmt]:
        lanes = self.plan.lanes
        row = next((buffer for target, buffer in self.rows if target.same_as(computation.target)), None)
        statements: list[Stmt] = []
        if row is not None:
            dtype = dtype_of(row)
            statements.append(
                loop(
                    lanes.width,
                    UNROLLED,
                    "lane",
                    lambda v: store(row, in_dtype(value(computation, v), dtype), [offset + v]),
                )
            )
        if is_in(computation.target, self.form.kept):
            result = self._registers(lanes.width, dtype_of(computation.target), "y")

            def element(lane: Expr) -> Expr:
                return value(computation, lane) if row is None else load(row, [offset + lane])

            statements += store_values(computation, lanes, element, at, result)
        return statements

    def _accumulate(self, computation: Computation, part: Buffer, value: Callable[[Computation, Expr], Expr]) -> Stmt:
        def element(lane: Expr) -> Stmt:
            own = index(0) if self.plan.along_row else lane
            new = in_dtype(value(computation, lane), dtype_of(part))
            return store(part, combine(computation.combiner, load(part, [own]), new), [own])

        return loop(self.plan.lanes.width, UNROLLED, "lane", element)

    # --- a reduction's start and end --------------------------------------------------------------------------------
    def _start(self, computation: Computation, part: Buffer) -> Stmt:
        return loop(
            self.plan.grid_lanes,
            UNROLLED,
            "lane",
            lambda lane: store(part, neutral(computation, dtype_of(part)), [lane]),
        )

    def _finish(self, computation: Computation, part: Buffer) -> list[Stmt]:
        """Combine the partial results of the threads that share a row; each of them has the total then."""
        total = part
        statements: list[Stmt] = []
        if self.plan.row_threads > 1:
            total = self._registers(self.plan.grid_lanes, dtype_of(part), f"{computation.target.name}_total")
            statements = self._combine(computation, part, total)
        if self.partial is None and not starts_neutral(computation):
            statements.append(add_initial(computation, total, self.plan.grid_lanes))
        self.values.append((computation.target, total))
        return [*statements, *self._store_row_value(computation, total)]

    def _combine(self, computation: Computation, part: Buffer, total: Buffer) -> list[Stmt]:
        if self.plan.along_row:
            statement, last_use = allreduce(computation, part, total, self.row_thread)
            self.last.append(last_use)
            return [statement]
        at = (self.row_thread, self.grid_thread)
        counts = (self.plan.row_threads, self.plan.grid_threads)
        allocations, statements = meet(computation, part, total, at=at, counts=counts)
        self.allocations.extend(allocations)
        return statements
