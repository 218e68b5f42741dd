"""Sums and products of all elements so far: columns side by side in registers, or a row in parts side by side.

Each sum waits for the one before it. So several are computed at once: one for each column, or, where the axis is the
last one, one for each part of a row, to which what the parts before it hold is added afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from tvm_ext._tvm import Buffer, Expr, Stmt, tirx
from tvm_ext.analysis.computation_exprs import itemsize_bytes, tensor_bytes
from tvm_ext.analysis.computations import dtype_of, static_shape
from tvm_ext.devices.machine import WARM, Machine
from tvm_ext.ir.build_ir import (
    SERIAL,
    UNROLLED,
    VECTORIZED,
    accumulate,
    allocate,
    cast_to,
    combine,
    if_all,
    index,
    lanes_of,
    load,
    loop,
    nest,
    new_buffer,
    parallel_cut,
    sequence,
    split_index,
    store,
    vector_loops,
)
from tvm_ext.records.selection import SCAN, Scan
from tvm_ext.support.arithmetic import ceil_div

from ..plan.context import KernelContext, UnscheduledOperator
from ..plan.form import Form
from .kernel_kind import KernelKind, SharedPart

REGISTERS = 8
"""A choice: of sums, side by side. An addition takes 4 cycles (Agner Fog's tables, Zen and Intel)."""

PARTS = 8
"""A choice: of a row. Two additions a cycle of 4 cycles each are 8 at once."""

LEAST_PART, LINE = 32, 16
"""Elements: a part is an odd number of lines of 64 bytes, so that parts do not share the sets of a cache."""


class CpuScans(KernelKind):
    name = "a scan"

    def of_function(self, operator: UnscheduledOperator) -> ScanPart | None:
        work = operator.attribute(SCAN, Scan)
        return None if work is None else ScanPart(work=work, context=operator.parameters_only())


@dataclass(frozen=True, kw_only=True, eq=False)
class ScanPart(SharedPart):
    """All rows and columns of one operator."""

    work: Scan
    context: KernelContext

    def forms(self, chosen: None = None) -> list[Form]:
        outer, _, lines, columns = self._extents
        if lines * columns > 1:
            note, counts = f"columns by {self._width}", [lines, ceil_div(columns, self._width)]
            shared, alone = (counts, [1, 1]) if self._divides_rows else ([1, 1], counts)

            def task(point: tuple[Expr, ...]) -> Stmt:
                return nest(
                    alone,
                    SERIAL,
                    ("line", "part"),
                    lambda at: self._part_of(point[0], point[1] + at[0], point[2] + at[1]),
                )

            statement = parallel_cut([outer, *shared], self.loop_kind, "task", task)
        else:
            note = f"rows in {PARTS if self._part else 1} parts"
            statement = parallel_cut([outer], self.loop_kind, "row", self._row)
        return [Form(path="rows", statements=(statement,), program=None, notes=(note,))]

    @property
    def _last(self) -> int:
        """The axis that is contiguous: the last one of more than one element, or the one of the sums."""
        shape = static_shape(self.context.operator.params[0])
        return max((d for d in range(self.work.axis + 1, len(shape)) if shape[d] > 1), default=self.work.axis)

    @property
    def _extents(self) -> tuple[int, int, int, int]:
        """What is before the axis, along it, between it and the last one, and along that: its columns."""
        shape, axis, last = static_shape(self.context.operator.params[0]), self.work.axis, self._last
        return prod(shape[:axis]), shape[axis], prod(shape[axis + 1 : last]), shape[last] if last > axis else 1

    @property
    def _divides_rows(self) -> bool:
        """Whether units divide what is behind the axis: half a page each. Nearer ones fetch what the other one writes.

        Sums down 2257 x 128 floats take 28 us on one core of a Zen 4, and 47 to 190 on two with 64 columns each.
        Down 500 x 1200 they take 65 us on one, and 42 on two.
        """
        device, (_, _, lines, columns) = self.context.device, self._extents
        row_bytes = lines * columns * itemsize_bytes(self._dtype)
        return row_bytes >= device.unit_count * (device.page_bytes or 4096) // 2

    @property
    def _dtype(self) -> str:
        return dtype_of(self.context.operator.params[1])

    @property
    def _lanes(self) -> int:
        return lanes_of(self._dtype, self.context.device.register_bytes)

    @property
    def _width(self) -> int:
        """Columns side by side, evenly divided: 150 are 80 and 70 where `REGISTERS` hold 128."""
        columns = self._extents[-1]
        even = ceil_div(columns, ceil_div(columns, REGISTERS * self._lanes))
        return min(columns, ceil_div(even, self._lanes) * self._lanes)

    @property
    def _part(self) -> int:
        """Elements of each of a row's `PARTS`; 0 where it is too short for them."""
        part = self._extents[1] // PARTS // LINE * LINE
        part -= 0 if part // LINE % 2 else LINE
        return part if part >= LEAST_PART else 0

    @property
    def busy_s(self) -> float:
        """On one unit: the longer of additions that wait for each other, and of moving both tensors."""
        points, columns = prod(self._extents), self._extents[-1]
        steps = REGISTERS if columns > 1 else 2 * PARTS if not self._part else 4
        per_step = self._width if columns > 1 else 1 if not self._part else 2
        cycles = points / per_step * steps
        machine = Machine(self.context.device)
        moved_bytes = sum(tensor_bytes(tensor) for tensor in self.context.operator.params)
        moved_s = moved_bytes / machine.rate(machine.holder(moved_bytes, WARM)) * self.context.device.unit_count
        return max(cycles / machine.vector_hz, moved_s)

    @property
    def task_count(self) -> int:
        outer, _, lines, columns = self._extents
        return outer * (lines * ceil_div(columns, self._width) if self._divides_rows else 1)

    def _at(self, row: Expr, place: Expr, line: Expr, column: Expr) -> list[Expr]:
        """The element's place in the tensors."""
        shape, axis, last = static_shape(self.context.operator.params[0]), self.work.axis, self._last
        behind = [*split_index(line, shape[axis + 1 : last]), column] if last > axis else []
        return [*split_index(row, shape[:axis]), place, *behind, *(index(0) for _ in shape[last + 1 :])]

    def _step(self, held: Buffer, number: Expr, at: Sequence[Expr]) -> Stmt:
        """One element: its sum, ``number`` of ``held``, is stored before or behind its own addition."""
        data, sums = self.context.operator.params
        add = accumulate(held, (number,), cast_to(load(data, at), self._dtype), self.work.combiner)
        steps = [add, store(sums, load(held, (number,)), at)]
        return sequence(*(steps[::-1] if self.work.exclusive else steps))

    @property
    def _nothing(self) -> Expr:
        return tirx.const(0 if self.work.combiner == "sum" else 1, self._dtype)

    def _part_of(self, row: Expr, line: Expr, number: Expr) -> Stmt:
        """A few columns of one line behind the axis, of one row of the outer axes."""
        whole, rest = divmod(self._extents[-1], self._width)
        columns = self._columns(row, line, number * index(self._width), self._width)
        if not rest:
            return columns
        return if_all([number < index(whole)], columns, self._columns(row, line, index(whole * self._width), rest))

    def _columns(self, row: Expr, line: Expr, first: Expr, width: int) -> Stmt:
        held = new_buffer((width,), self._dtype, "held", "local")

        def lane(place: Expr, v: Expr) -> Stmt:
            return self._step(held, v, self._at(row, place, line, first + v))

        cleared = vector_loops(width, self._lanes, VECTORIZED, lambda v: store(held, self._nothing, (v,)))
        steps = loop(
            self._extents[1],
            SERIAL,
            "k",
            lambda place: vector_loops(width, self._lanes, VECTORIZED, lambda v: lane(place, v)),
        )
        return sequence(allocate(held), cleared, steps)

    def _row(self, point: tuple[Expr, ...]) -> Stmt:
        (row,) = point
        length = self._extents[1]
        parts, part = (PARTS, self._part) if self._part else (1, 0)
        held = new_buffer((parts,), self._dtype, "held", "local")
        zero = index(0)

        def step(number: Expr, place: Expr) -> Stmt:
            return self._step(held, number, self._at(row, place, zero, zero))

        def added(number: int) -> Stmt:
            """What the parts before hold, of whose sums the first register has the whole."""
            sums = self.context.operator.params[1]

            def element(i: Expr) -> Stmt:
                at = self._at(row, index(number * part) + i, zero, zero)
                return store(sums, combine(self.work.combiner, load(held, (zero,)), load(sums, at)), at)

            total = accumulate(held, (zero,), load(held, (index(number),)), self.work.combiner)
            return sequence(loop(part, SERIAL, "i", element), total)

        cleared = loop(parts, UNROLLED, "p", lambda p: store(held, self._nothing, (p,)))
        sides = loop(
            part, SERIAL, "i", lambda i: sequence(*(step(index(p), index(p * part) + i) for p in range(parts)))
        )
        rest = length - parts * part
        tail = [loop(rest, SERIAL, "i", lambda i: step(zero, index(parts * part) + i))] if rest else []
        joined = [sides, *(added(number) for number in range(1, parts))] if part else []
        return sequence(allocate(held), cleared, *joined, *tail)
