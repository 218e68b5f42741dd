"""Scatters: the data copied, then updated in the order of the updates, each core in a block of its own.

Blocks divide an axis that no index names, or the rows that indices name: then each core looks at all indices and takes
those of its rows. So no two cores write the same element, nor the same line of a cache, and sums do not depend on how
many cores there are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod

from tvm_ext._tvm import Buffer, Expr, Stmt
from tvm_ext.analysis.computation_exprs import itemsize_bytes, tensor_bytes
from tvm_ext.analysis.computations import dtype_of, static_shape
from tvm_ext.devices.machine import WARM, Machine
from tvm_ext.ir.build_ir import (
    INDEX_DTYPE,
    PARALLEL,
    SERIAL,
    VECTORIZED,
    cast_to,
    combine,
    if_all,
    in_tiles,
    index,
    lanes_of,
    load,
    loop,
    nest,
    outer_kind,
    sequence,
    store,
    tile_size,
    vector_loops,
)
from tvm_ext.records.choice import KernelChoice
from tvm_ext.records.scatter import SCATTER, Scatter
from tvm_ext.support.arithmetic import ceil_div

from ..plan.context import KernelContext, UnscheduledOperator
from ..plan.form import Form
from .kernel_kind import KernelKind, KernelPart

COMBINERS = {"add": "sum", "mul": "prod", "min": "min", "max": "max"}

UPDATE_CYCLES = 6.0
"""Of an update of one element by its own index, or of one vector of a slice: an address, a load, a store behind it.

On one core of an EPYC (Zen 4, AVX2) they took 0.8 to 1.3 ns, 3 to 5 cycles, in caches; assumed to be somewhat more.
"""

LINE_BYTES, LONG_RUN_BYTES = 64, 4096
"""A block that is no whole number of lines in memory, or no page of them, shares lines with the next one: of 16 floats
a row, halves on two cores took 32 us where one core takes a fifth (EPYC Zen 3)."""

SKIP_CYCLES = 12.0
"""Of an update of another core's row: a comparison that cannot be foreseen."""


class CpuScatters(KernelKind):
    name = "a scatter"

    def of_function(self, operator: UnscheduledOperator) -> ScatterPart | None:
        work = operator.attribute(SCATTER, Scatter)
        return None if work is None else ScatterPart(work=work, context=operator.parameters_only())


@dataclass(frozen=True, kw_only=True, eq=False)
class ScatterPart(KernelPart[None]):
    """A scatter as one kernel; its context has parameters alone, for ``work`` says what is computed."""

    work: Scatter
    context: KernelContext

    def forms(self, chosen: None = None) -> list[Form]:
        axis, tasks = self._division
        kind = PARALLEL if tasks > 1 else SERIAL

        def task(number: Expr) -> Stmt:
            block = self._block(axis, tasks, number) if tasks > 1 else None
            return sequence(self._copy(block), self._update(block))

        blocks = f", axis {axis} in {tasks} blocks" if tasks > 1 else ""
        note = f"a scatter of {list(static_shape(self._updates))} into {list(self._shape)}{blocks}"
        return [Form(path="rows", statements=(loop(tasks, kind, "task", task),), program=None, notes=(note,))]

    def describe(self, choice: KernelChoice, forms: Sequence[Form]) -> KernelChoice:
        """With the model's time: on one core, or divided."""
        launch_s = Machine(self.context.device).launch_s
        return replace(choice, expected_s=self._busy_s / self._division[1] + launch_s)

    @property
    def _updates(self) -> Buffer:
        return self.context.operator.params[2]

    @property
    def _shape(self) -> tuple[int, ...]:
        return static_shape(self.context.operator.params[0])

    @property
    def _lanes(self) -> int:
        """Elements of a slice that are updated at once; 1 where each has an index of its own."""
        if not self.work.by_tuple or len(self.work.axes) == len(self._shape) or dtype_of(self._updates) == "bool":
            return 1
        return lanes_of(dtype_of(self._updates), self.context.device.register_bytes)

    def _block(self, axis: int, tasks: int, number: Expr) -> _ScatterBlock:
        extent = self._shape[axis]
        size = ceil_div(extent, tasks)
        first = number * index(size)
        return _ScatterBlock(axis=axis, first=first, size=tile_size(extent, size, first))

    @property
    def _division(self) -> tuple[int, int]:
        """The axis that is divided among the cores, and into how many blocks; 1 if none pays."""
        axis, tasks = self._free_division
        skipped_s = 0.0
        if tasks == 1 and self._has_wide_rows:
            axis, tasks = 0, min(self.context.device.unit_count, self._shape[0])
            updates = prod(static_shape(self.context.operator.params[1])[:-1])
            skipped_s = updates * SKIP_CYCLES / Machine(self.context.device).vector_hz
        busy_s = self._busy_s / tasks + skipped_s
        return (
            (axis, tasks) if outer_kind(busy_s, replace(self.context.device, unit_count=tasks)) == PARALLEL else (0, 1)
        )

    @property
    def _has_wide_rows(self) -> bool:
        """Whether each index, of the leading axis first, names several vectors."""
        return self.work.by_tuple and prod(self._shape[len(self.work.axes) :]) >= 2 * self._lanes > 2

    @property
    def _free_division(self) -> tuple[int, int]:
        """The axis without indices that gives most blocks, each of whole lines."""
        last, units = len(self._shape) - 1, self.context.device.unit_count
        found = (0, 1)
        updates = self._shape if self.work.by_tuple else static_shape(self._updates)
        free = [axis for axis in reversed(range(last + 1)) if axis not in self.work.axes]
        for axis in (axis for axis in free if updates[axis] == self._shape[axis]):
            whole = self._shape[axis] // (self._lanes if axis == last else 1)
            tasks = max((count for count in range(1, units + 1) if whole % count == 0), default=1)
            if self._shape[axis] % tasks == 0 and tasks > found[1] and self._has_own_lines(axis, tasks):
                found = axis, tasks
        return found

    def _has_own_lines(self, axis: int, tasks: int) -> bool:
        run = prod(self._shape[axis:]) // tasks * itemsize_bytes(dtype_of(self._updates))
        return run % LINE_BYTES == 0 or run >= LONG_RUN_BYTES

    @property
    def _busy_s(self) -> float:
        """Seconds of one core."""
        machine, params = Machine(self.context.device), self.context.operator.params
        moved = sum(tensor_bytes(param) for param in params) + tensor_bytes(params[0])
        updates = prod(static_shape(self._updates)) / self._lanes
        rate = machine.held_rate(moved, WARM) / self.context.device.unit_count
        return moved / rate + updates * UPDATE_CYCLES / machine.vector_hz

    def _copy(self, block: _ScatterBlock | None) -> Stmt:
        data, _, _, output = self.context.operator.params
        return _over(self._shape, 0, block, self._lanes, lambda point: store(output, load(data, point), point))

    def _update(self, block: _ScatterBlock | None) -> Stmt:
        """Slice by slice, or element by element where each has an index."""
        _, indices, updates, output = self.context.operator.params
        work = self.work

        def write(at: Sequence[Expr], value: Expr) -> Stmt:
            combiner = COMBINERS.get(work.reduction)
            return store(output, value if combiner is None else combine(combiner, load(output, at), value), at)

        if not work.by_tuple:
            (axis,) = work.axes

            def element(point: tuple[Expr, ...]) -> Stmt:
                row = cast_to(load(indices, point), INDEX_DTYPE)
                return write([*point[:axis], row, *point[axis + 1 :]], load(updates, point))

            return _over(static_shape(updates), 0, block, 1, element)
        *counts, length = static_shape(indices)

        def tuple_at(number: tuple[Expr, ...]) -> Stmt:
            rows = [cast_to(load(indices, (*number, index(k))), INDEX_DTYPE) for k in range(length)]
            named = block is not None and block.axis in work.axes
            update = _over(
                self._shape[length:], length, None if named else block, self._lanes,
                lambda point: write([*rows, *point], load(updates, (*number, *point))),
            )  # fmt: skip
            return if_all(block.holds(rows[block.axis]), update) if block is not None and named else update

        return nest(counts, SERIAL, [f"u{k}" for k in range(len(counts))], tuple_at)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _ScatterBlock:
    """``size`` places of ``axis`` from ``first`` on."""

    axis: int
    first: Expr
    size: int | Expr

    def holds(self, place: Expr) -> list[Expr]:
        return [place >= self.first, place < self.first + self.size]


def _over(
    shape: Sequence[int],
    leading: int,
    block: _ScatterBlock | None,
    lanes: int,
    body: Callable[[tuple[Expr, ...]], Stmt],
) -> Stmt:
    """``body`` at every point of ``shape``, whose first axis is axis ``leading`` of the data, within ``block``."""
    extents: list[int | Expr] = list(shape)
    inside = None
    if block is not None:
        inside = block.axis - leading
        extents[inside] = block.size

    def at(point: tuple[Expr, ...]) -> Stmt:
        return body(tuple(block.first + p if block and k == inside else p for k, p in enumerate(point)))

    if lanes == 1 or not extents:
        return nest(extents, SERIAL, [f"i{k}" for k in range(len(extents))], at)
    *outer, last = extents
    names = [f"i{k}" for k in range(len(outer))]

    assert isinstance(last, int), "the axis of a tuple's own rows is not their last one"

    def row(point: tuple[Expr, ...]) -> Stmt:
        def vectors(first: Expr, size: int) -> Stmt:
            return vector_loops(size, lanes, VECTORIZED, lambda v: at((*point, first + v)))

        return in_tiles(last, lanes, "i", vectors)

    return nest(outer, SERIAL, names, row)
