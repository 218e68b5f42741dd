"""Emits stages in row form as one GPU launch: threads sweep their rows, and meet where a reduction needs all of a row.

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
from typing import Any

from tvm_ext._tvm import structural_equal, tirx
from tvm_ext.analysis.stages import Stage, dtype_of, reads, substitute
from tvm_ext.ir.build_ir import (
    SERIAL,
    UNROLLED,
    Expr,
    Stmt,
    accumulator_dtype,
    allocate,
    as_index,
    combine,
    in_dtype,
    index,
    load,
    loop,
    sequence,
    split_index,
    store,
)
from tvm_ext.ir.simt_ir import bind, gpu_buffer

from ..cpu_rows.emit import is_in
from .combine import add_initial, allreduce, meet, neutral, starts_neutral
from .form import RowForm
from .lanes import Table, distinct, evaluate, fetch, is_vector, store_values, vector_loop, vector_units
from .plan import RowPlan, passes

UNROLLED_ITEMS = 32  # items whose loop is written out although nothing is held: windows


def emit_row_kernel(form: RowForm, plan: RowPlan, *, partial: Any = None) -> Stmt:
    """One launch of ``form`` divided as in ``plan``.

    With ``partial``, of shape (splits, rows), the form's only stage leaves its partial results there.
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
    partial: Any
    allocations: list[Stmt] = field(default_factory=list)
    values: list[tuple[Any, Any]] = field(default_factory=list)  # (a stage's target, registers of a row's value)
    rows: list[tuple[Any, Any]] = field(default_factory=list)  # (a stage's target, registers of the elements)
    held: list[tuple[Any, Any]] = field(default_factory=list)  # (a unit, registers of its elements)
    last: list[Stmt] = field(default_factory=list)

    def statement(self) -> Stmt:
        parts = passes(self.form)
        body = [stmt for number, stages in enumerate(parts) for stmt in self._pass(stages, parts[number + 1 :])]
        return sequence(*self.allocations, *body, *self.last)

    def _pass(self, stages: Sequence[Stage], later: Sequence[Sequence[Stage]]) -> list[Stmt]:
        first = stages[0]
        if not first.is_reduction and not self.form.along_row(first):
            return self._row_value(first)
        return self._sweep(stages, [stage for part in later for stage in part])

    # --- coordinates ------------------------------------------------------------------------------------------------
    @property
    def _grid_chunk(self) -> Expr:
        return self.group * index(self.plan.grid_threads) + self.grid_thread

    def _row_chunk(self, item: Expr) -> Expr:
        first = self.split * index(self.plan.items * self.plan.row_threads)
        return first + item * index(self.plan.row_threads) + self.row_thread

    def _grid_table(self, lane: Expr) -> list[tuple[Any, Expr]]:
        return self._coordinates(self.form.grid, self._grid_chunk, self.plan.grid_lanes, lane)

    def _row_table(self, item: Expr, lane: Expr) -> list[tuple[Any, Expr]]:
        grid = self._grid_table(lane if not self.plan.along_row else index(0))
        return grid + self._coordinates(self.form.row, self._row_chunk(item), self.plan.row_lanes, lane)

    def _coordinates(self, axes: Sequence[Any], chunk: Expr, width: int, lane: Expr) -> list[tuple[Any, Expr]]:
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
    def _registers(self, count: int, dtype: str, name: str) -> Any:
        buffer = gpu_buffer((count,), dtype, name, "local")
        self.allocations.append(allocate(buffer))
        return buffer

    def _internal(self, item_offset: Expr, lane: Expr) -> Callable[[Any], Expr | None]:
        row_value = lane if not self.plan.along_row else index(0)

        def find(item: Any) -> Expr | None:
            for target, buffer in self.rows:
                if item.source.same_as(target):
                    return load(buffer, [item_offset + lane])
            for target, buffer in self.values:
                if item.source.same_as(target):
                    return load(buffer, [row_value])
            return None

        return find

    # --- one value for the row --------------------------------------------------------------------------------------
    def _row_value(self, stage: Stage) -> list[Stmt]:
        """A stage with one value for each row, computed by every thread that shares it."""
        width = self.plan.grid_lanes
        dtype = accumulator_dtype(dtype_of(stage.target))
        value = self._registers(width, dtype, f"{stage.target.name}_value")
        fetched, statements = self._fetch_for_rows(stage)

        def element(lane: Expr) -> Stmt:
            registers = [(unit, load(buffer, [lane])) for unit, buffer in fetched]
            result = evaluate(stage.value, registers, self._internal(index(0), lane), self._grid_table(lane))
            return store(value, in_dtype(result, dtype), [lane])

        compute = [*statements, loop(width, UNROLLED, "lane", element)]
        self.values.append((stage.target, value))
        return [self._if_in_grid(*compute), *self._store_row_value(stage, value)]

    def _fetch_for_rows(self, stage: Stage) -> tuple[list[tuple[Any, Any]], list[Stmt]]:
        """The stage's inputs that differ between a thread's rows, in registers."""
        if self.plan.along_row:
            return [], []
        units = distinct(vector_units(stage, self.form, self.plan.lanes))
        return self._fetch(units, [stage] * len(units), index(0), self._grid_table)

    def _fetch(
        self, units: Sequence[Any], owners: Sequence[Stage], offset: Expr, at: Table, count: int = 0
    ) -> tuple[list[tuple[Any, Any]], list[Stmt]]:
        lanes = self.plan.lanes
        pairs, statements = [], []
        for unit, owner in zip(units, owners, strict=True):
            buffer = self._registers(count or lanes.width, dtype_of(unit), "x")
            vector = is_vector(unit, owner, lanes)
            statements.append(fetch(unit, buffer, offset, lanes.width, is_vector=vector, at=at))
            pairs.append((unit, buffer))
        return pairs, statements

    def _store_row_value(self, stage: Stage, value: Any) -> list[Stmt]:
        if self.partial is not None:
            return [self._once_a_row(self._store_partial(value))]
        if not is_in(stage.target, self.form.kept):
            return []
        lanes = self.plan.lanes
        if self.plan.along_row:
            at = [substitute(item, self._grid_table(index(0))) for item in stage.indices]
            return [
                self._once_a_row(store(stage.target, in_dtype(load(value, [index(0)]), dtype_of(stage.target)), at))
            ]
        result = self._registers(lanes.width, dtype_of(stage.target), "y")
        return [
            self._once_a_row(*store_values(stage, lanes, lambda lane: load(value, [lane]), self._grid_table, result))
        ]

    def _store_partial(self, value: Any) -> Stmt:
        """To (part, row): rows in row-major order of the grid, whatever its axes were fused from."""
        width = self.plan.grid_lanes
        row = self._grid_chunk * index(width)
        return vector_loop(
            dtype_of(value),
            width,
            lambda lane: store(self.partial, load(value, [lane]), [self.split, row + lane]),
        )

    # --- a pass over the row ----------------------------------------------------------------------------------------
    def _sweep(self, stages: Sequence[Stage], later: Sequence[Stage]) -> list[Stmt]:
        reductions = [stage for stage in stages if stage.is_reduction]
        partials = [
            self._registers(self.plan.grid_lanes, accumulator_dtype(dtype_of(s.target)), f"{s.target.name}_part")
            for s in reductions
        ]
        start = [self._start(stage, part) for stage, part in zip(reductions, partials, strict=True)]
        units, owners = self._units(stages)
        again = [self.plan.held and self._is_read_again(unit, later) for unit in units]
        plain = [u for u, held in zip(units, again, strict=True) if not held]
        plain_owners = [o for o, held in zip(owners, again, strict=True) if not held]
        kept = [(u, o) for u, o, held in zip(units, owners, again, strict=True) if held]
        self._allocate_rows(stages, later)
        body = self._sweep_loop(
            lambda item: self._item(
                stages, list(zip(reductions, partials, strict=True)), plain, plain_owners, kept, item
            )
        )
        finish = [stmt for stage, part in zip(reductions, partials, strict=True) for stmt in self._finish(stage, part)]
        return [*start, body, *finish]

    def _sweep_loop(self, body: Callable[[Expr], Stmt]) -> Stmt:
        kind = UNROLLED if self.plan.held or self.plan.items <= UNROLLED_ITEMS // self.plan.lanes.width else SERIAL
        return loop(self.plan.items, kind, "item", lambda item: self._if_in_row(item, body(item)))

    def _units(self, stages: Sequence[Stage]) -> tuple[list[Any], list[Stage]]:
        """Inputs that these stages read first, and a stage that reads each."""
        units: list[Any] = []
        owners: list[Stage] = []
        for stage in stages:
            for unit in distinct(vector_units(stage, self.form, self.plan.lanes)):
                known = any(structural_equal(unit, other) for other in (*units, *(u for u, _ in self.held)))
                if not known:
                    units.append(unit)
                    owners.append(stage)
        return units, owners

    def _is_read_again(self, unit: Any, later: Sequence[Stage]) -> bool:
        return any(
            structural_equal(unit, other)
            for stage in later
            for other in vector_units(stage, self.form, self.plan.lanes)
        )

    def _allocate_rows(self, stages: Sequence[Stage], later: Sequence[Stage]) -> None:
        """Registers for the elements of stages that another stage reads."""
        for stage in stages:
            if stage.is_reduction:
                continue
            if any(reads(other.value, stage.target) for other in (*stages, *later)):
                dtype = accumulator_dtype(dtype_of(stage.target))
                count = self.plan.lanes.width * self.plan.items
                self.rows.append((stage.target, self._registers(count, dtype, f"{stage.target.name}_row")))

    def _item(
        self,
        stages: Sequence[Stage],
        reductions: Sequence[tuple[Stage, Any]],
        plain: Sequence[Any],
        plain_owners: Sequence[Stage],
        kept: Sequence[tuple[Any, Stage]],
        item: Expr,
    ) -> Stmt:
        width = self.plan.lanes.width
        offset = item * index(width)

        def at(lane: Expr) -> list[tuple[Any, Expr]]:
            return self._row_table(item, lane)

        held, fetch_held = self._fetch(
            [u for u, _ in kept], [o for _, o in kept], offset, at, count=width * self.plan.items
        )
        self.held.extend(held)
        fetched, statements = self._fetch(plain, plain_owners, index(0), at)

        def registers(lane: Expr) -> list[tuple[Any, Expr]]:
            return [(u, load(b, [lane])) for u, b in fetched] + [(u, load(b, [offset + lane])) for u, b in self.held]

        def value(stage: Stage, lane: Expr) -> Expr:
            return evaluate(stage.value, registers(lane), self._internal(offset, lane), at(lane))

        done = [*fetch_held, *statements]
        for stage in stages:
            part = next((buffer for own, buffer in reductions if own is stage), None)
            done += self._elements(stage, value, offset, at) if part is None else [self._accumulate(stage, part, value)]
        return sequence(*done)

    def _elements(self, stage: Stage, value: Callable[[Stage, Expr], Expr], offset: Expr, at: Table) -> list[Stmt]:
        lanes = self.plan.lanes
        row = next((buffer for target, buffer in self.rows if target.same_as(stage.target)), None)
        statements: list[Stmt] = []
        if row is not None:
            dtype = dtype_of(row)
            statements.append(
                loop(
                    lanes.width, UNROLLED, "lane", lambda v: store(row, in_dtype(value(stage, v), dtype), [offset + v])
                )
            )
        if is_in(stage.target, self.form.kept):
            result = self._registers(lanes.width, dtype_of(stage.target), "y")

            def element(lane: Expr) -> Expr:
                return value(stage, lane) if row is None else load(row, [offset + lane])

            statements += store_values(stage, lanes, element, at, result)
        return statements

    def _accumulate(self, stage: Stage, part: Any, value: Callable[[Stage, Expr], Expr]) -> Stmt:
        def element(lane: Expr) -> Stmt:
            own = index(0) if self.plan.along_row else lane
            new = in_dtype(value(stage, lane), dtype_of(part))
            return store(part, combine(stage.combiner, load(part, [own]), new), [own])

        return loop(self.plan.lanes.width, UNROLLED, "lane", element)

    # --- a reduction's start and end --------------------------------------------------------------------------------
    def _start(self, stage: Stage, part: Any) -> Stmt:
        return loop(
            self.plan.grid_lanes, UNROLLED, "lane", lambda lane: store(part, neutral(stage, dtype_of(part)), [lane])
        )

    def _finish(self, stage: Stage, part: Any) -> list[Stmt]:
        """Combine the partial results of the threads that share a row; each of them has the total then."""
        total = part
        statements: list[Stmt] = []
        if self.plan.row_threads > 1:
            total = self._registers(self.plan.grid_lanes, dtype_of(part), f"{stage.target.name}_total")
            statements = self._combine(stage, part, total)
        if self.partial is None and not starts_neutral(stage):
            statements.append(add_initial(stage, total, self.plan.grid_lanes))
        self.values.append((stage.target, total))
        return [*statements, *self._store_row_value(stage, total)]

    def _combine(self, stage: Stage, part: Any, total: Any) -> list[Stmt]:
        if self.plan.along_row:
            statement, last_use = allreduce(stage, part, total, self.row_thread)
            self.last.append(last_use)
            return [statement]
        at = (self.row_thread, self.grid_thread)
        counts = (self.plan.row_threads, self.plan.grid_threads)
        allocations, statements = meet(stage, part, total, at=at, counts=counts)
        self.allocations.extend(allocations)
        return statements
