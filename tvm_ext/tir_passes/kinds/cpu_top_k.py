"""The first k elements along an axis: a heap of the best so far, whose top is the worst of them, then sorted.

An element that is no better than the top costs a comparison, and vectors of them one comparison together. ONNX
Runtime's kernels do the same for a small k. For a large one all elements are sorted by bytes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from math import log, log2, prod

from tvm_ext._tvm import Expr, ForKind, Stmt, tirx
from tvm_ext.analysis.computations import dtype_of, static_shape
from tvm_ext.devices.machine import Machine
from tvm_ext.ir.build_ir import (
    INDEX_DTYPE,
    SERIAL,
    allocate,
    if_all,
    in_tiles,
    index,
    lanes_hold,
    lanes_of,
    load,
    loop,
    new_buffer,
    parallel_cut,
    sequence,
    store,
)
from tvm_ext.ir.heap import KEYED, LEVEL_CYCLES, Heap, key_of, position_of
from tvm_ext.ir.radix_sort import SORTED, Enter, Sorted, radix_sort, sort_cycles
from tvm_ext.records.selection import TOP_K, TopK

from ..plan.context import KernelContext, UnscheduledOperator
from ..plan.form import Form
from .kernel_kind import KernelKind, SharedPart


class CpuTopK(KernelKind):
    name = "the first k"

    def of_function(self, operator: UnscheduledOperator) -> TopKPart | None:
        work = operator.attribute(TOP_K, TopK)
        if work is None:
            return None
        part = TopKPart(work=work, context=operator.parameters_only(2))
        return part if part.dtype in SORTED else None


@dataclass(frozen=True, kw_only=True, eq=False)
class TopKPart(SharedPart):
    """All rows of one operator, a task each."""

    work: TopK
    context: KernelContext

    def forms(self, chosen: None = None) -> list[Form]:
        way = "sorted by bytes" if self._sorts else "in a heap"
        note = f"the first {self._k} of {self._length} {way}, {prod(self._rows)} rows"
        return [Form(path="rows", statements=(self.statement(self.loop_kind),), program=None, notes=(note,))]

    def statement(self, kind: ForKind) -> Stmt:
        return parallel_cut(self._rows, kind, "row", self._row)

    @property
    def dtype(self) -> str:
        return dtype_of(self.context.operator.params[0])

    @property
    def _shape(self) -> tuple[int, ...]:
        return static_shape(self.context.operator.params[0])

    @property
    def _length(self) -> int:
        return self._shape[self.work.axis]

    @property
    def _k(self) -> int:
        return static_shape(self.context.operator.params[1])[self.work.axis]

    @property
    def _rows(self) -> list[int]:
        return [extent for axis, extent in enumerate(self._shape) if axis != self.work.axis]

    @property
    def _lanes(self) -> int:
        """Elements that are compared with the top at once: of rows whose elements lie one behind the other."""
        is_last = self.work.axis == len(self._shape) - 1
        return lanes_of(self.dtype, self.context.device.register_bytes) if is_last else 1

    @property
    def _heap_cycles(self) -> float:
        """For a row in random order, of which k ln(n/k) elements enter a full heap."""
        k, length = self._k, self._length
        sifted = k * (1 + log(length / k)) * log2(k) + 2 * k
        return length / self._lanes * 2 + sifted * LEVEL_CYCLES

    @property
    def _sorts(self) -> bool:
        return self.dtype not in KEYED or self._sort_cycles < self._heap_cycles

    @property
    def _sort_cycles(self) -> float:
        return sort_cycles(self._length, self.dtype)

    @property
    def busy_s(self) -> float:
        """Seconds of one core."""
        cycles = self._sort_cycles if self._sorts else self._heap_cycles
        return prod(self._rows) * cycles / Machine(self.context.device).vector_hz

    @property
    def task_count(self) -> int:
        return prod(self._rows)

    def _row(self, point: tuple[Expr, ...]) -> Stmt:
        return self._sorted_row(point) if self._sorts else self._heap_row(point)

    def _element(self, point: tuple[Expr, ...], place: Expr) -> Expr:
        return load(self.context.operator.params[0], self._at(point, place))

    def _at(self, point: tuple[Expr, ...], place: Expr) -> list[Expr]:
        return [*point[: self.work.axis], place, *point[self.work.axis :]]

    def _written(self, point: tuple[Expr, ...], position: Callable[[Expr], Expr]) -> Stmt:
        """The first elements and their positions, of which ``position`` gives each."""
        _, values, positions = self.context.operator.params

        def write(place: Expr) -> Stmt:
            found, at = position(place), self._at(point, place)
            return sequence(store(positions, found, at), store(values, self._element(point, found), at))

        return loop(self._k, SERIAL, "j", write)

    def _heap_row(self, point: tuple[Expr, ...]) -> Stmt:
        k, data = self._k, self.context.operator.params[0]
        heap = Heap(new_buffer((k,), INDEX_DTYPE, "best"), of_least=True)

        def key(place: Expr) -> Expr:
            return key_of(self._element(point, place), place, largest=self.work.largest)

        def insert(place: Expr) -> Stmt:
            return if_all([key(place) > heap.top], heap.sift(index(0), index(k), key(place)))

        def several(first: Expr, count: int) -> Stmt:
            one_by_one = loop(count, SERIAL, "j", lambda j: insert(index(k) + first + j))
            if count == 1 or count != self._lanes:
                return one_by_one
            worst = self._element(point, position_of(heap.top))
            is_worse = operator.le if self.work.largest else operator.ge  # or equal; never NaN
            all_worse = lanes_hold("and", is_worse, data, self._at(point, index(k) + first), worst, count)
            return if_all([tirx.Not(all_worse)], one_by_one)

        first = loop(k, SERIAL, "j", lambda j: heap.put(j, key(j)))
        rest = [in_tiles(self._length - k, self._lanes, "i", several)] if self._length > k else []
        order = [loop(k - 1, SERIAL, "sorted", lambda s: heap.pop(index(k) - s))] if k > 1 else []
        written = self._written(point, lambda place: position_of(heap.key(place)))
        return sequence(allocate(heap.keys), first, heap.build(index(k)), *rest, *order, written)

    def _sorted_row(self, point: tuple[Expr, ...]) -> Stmt:
        def elements(enter: Enter) -> Stmt:
            return loop(self._length, SERIAL, "i", lambda i: enter(i, self._element(point, i)))

        def first(order: Sorted) -> Stmt:
            return self._written(point, order.position)

        return radix_sort(self._length, self.dtype, elements, first, ascending=not self.work.largest)
