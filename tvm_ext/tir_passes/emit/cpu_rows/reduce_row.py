"""One reduced element of a row: SIMD partial results over the contiguous last axis, then their sum by halving.

Worked example, sum over 100 with 16 lanes and 4 registers: one block of 64 and two vectors of 16 into the registers;
the registers are added up, the 16 lanes halved to 8 and then to 4, where the last 4 elements join, and on to 1.
Floating-point addition is thereby reordered, as every vectorising compiler may.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm_ext._tvm import Buffer, Expr, Stmt, Var
from tvm_ext.analysis.computations import Computation, dtype_of, mentions, substitute
from tvm_ext.analysis.predicates import contiguous_in
from tvm_ext.cost.row_time import is_vectorised
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.ir.build_ir import (
    SERIAL,
    UNROLLED,
    VECTORIZED,
    accumulator_dtype,
    allocate,
    bind,
    combine,
    in_dtype,
    index,
    lanes_of,
    load,
    loop,
    neutral,
    new_buffer,
    over,
    sequence,
    store,
    store_point,
    vector_kind,
    vectors,
)

PARTIAL_REGISTERS = 4  # independent partial results: the latency of an addition over its throughput


def runs_inside(producer: Computation, computation: Computation, count: int, device: DeviceSpec) -> bool:
    """Whether the row that ``producer`` writes can be written while the reduction ``computation`` runs along it.

    Worked example: ``e[k] = exp(x[k] - m)`` and ``s = sum over k of e[k]`` are one loop. ``count`` axes are the row's.
    """
    if producer.is_reduction or not computation.is_reduction or not is_vectorised(computation, device):
        return False
    if len(computation.spatial) != count or len(computation.reduction) != 1 or len(producer.spatial) != count + 1:
        return False
    own, written = computation.reduction[0], producer.spatial[-1]
    items = [item for item in computation.loads() if item.source.same_as(producer.target)]
    if not items or producer.extent(written) != computation.extent(own) or vector_kind(producer.value) != VECTORIZED:
        return False
    if len(producer.indices) == 0 or not producer.indices[-1].same_as(written) or not contiguous_in(producer, written):
        return False
    return all(item.indices[-1].same_as(own) and not mentions(list(item.indices[:-1]), own) for item in items)


def reduce_row(
    computation: Computation,
    table: list[tuple[Var, Expr]],
    device: DeviceSpec,
    producer: tuple[Computation, list[tuple[Var, Expr]]] | None = None,
    registers: int = PARTIAL_REGISTERS,
) -> Stmt:
    """Statements that store one element of the reduction ``computation``, its spatial variables given by ``table``.

    ``producer`` is a computation that `runs_inside` it, with its own table: its row is written on the way. Partial
    results are in ``registers`` at most.
    """
    dtype = accumulator_dtype(dtype_of(computation.target))
    last = computation.reduction[-1]
    extent, lanes = computation.extent(last), lanes_of(dtype, device.register_bytes)
    vectorised = is_vectorised(computation, device)
    row = _Row(
        computation=computation,
        producer=producer,
        table=tuple(table),
        dtype=dtype,
        extent=extent,
        lanes=lanes,
        registers=min(registers, extent // lanes) if vectorised else 0,
        total=new_buffer((1,), dtype, "total", "local"),
        partial=new_buffer((registers * lanes,), dtype, "partial", "local"),
    )
    return row.vectorised() if vectorised else row.scalar()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Row:
    computation: Computation
    producer: tuple[Computation, list[tuple[Var, Expr]]] | None  # runs inside
    table: tuple[tuple[Var, Expr], ...]
    dtype: str
    extent: int  # of the last reduction axis
    lanes: int
    registers: int
    total: Buffer
    partial: Buffer

    @property
    def outer(self) -> tuple[Var, ...]:
        """Reduction axes around the last one."""
        return self.computation.reduction[:-1]

    def scalar(self) -> Stmt:
        return sequence(self._start(), self._lines(lambda ks: self._elements(ks, 0)), self._finish())

    def vectorised(self) -> Stmt:
        """With a single line, what is left of it waits for the halving; with several, each ends in scalars."""
        single = not self.outer
        done = self.extent - self.extent % self.lanes
        rest = [(done + first, size) for first, size in vectors(self.extent - done, self.lanes)] if single else []

        def line(ks: tuple[Expr, ...]) -> Stmt:
            return (
                self._registers(ks)
                if single or done == self.extent
                else sequence(self._registers(ks), self._elements(ks, done))
            )

        empty = neutral(self.computation, self.dtype)
        clear = loop(self.registers * self.lanes, VECTORIZED, "v", lambda v: store(self.partial, empty, [v]))
        together = combine(self.computation.combiner, load(self.total, [index(0)]), load(self.partial, [index(0)]))
        return sequence(
            self._start(),
            allocate(self.partial),
            clear,
            self._lines(line),
            *self._fold(),
            *(step for shift in range(1, self.lanes.bit_length()) for step in self._halve(self.lanes >> shift, rest)),
            store(self.total, together, [index(0)]),
            self._finish(),
        )

    # --- pieces ----------------------------------------------------------------------------------------------------
    def _start(self) -> Stmt:
        return sequence(
            allocate(self.total), store(self.total, in_dtype(self.computation.init, self.dtype), [index(0)])
        )

    def _finish(self) -> Stmt:
        at = [substitute(i, list(self.table)) for i in self.computation.indices]
        own = dtype_of(self.computation.target)
        return store(self.computation.target, in_dtype(load(self.total, [index(0)]), own), at)

    def _lines(self, body: Callable[[tuple[Expr, ...]], Stmt]) -> Stmt:
        return over(self.computation, self.outer, body)

    def _value(self, ks: Sequence[Expr], k: Expr) -> Expr:
        variables = (*self.outer, self.computation.reduction[-1])
        return in_dtype(substitute(self.computation.value, [*self.table, *bind(variables, (*ks, k))]), self.dtype)

    def _produced(self, k: Expr) -> list[Stmt]:
        """The producer's element ``k``, which the element of the reduction then reads."""
        if self.producer is None:
            return []
        made, table = self.producer
        return [store_point(made, [*table, *bind(made.spatial[-1:], [k])])]

    def _into(self, buffer: Buffer, at: Expr, value: Expr) -> Stmt:
        return store(buffer, combine(self.computation.combiner, load(buffer, [at]), value), [at])

    def _elements(self, ks: Sequence[Expr], start: int) -> Stmt:
        """The elements of a line from ``start`` on, one by one."""
        return loop(
            self.extent - start,
            SERIAL,
            "k",
            lambda k: self._into(self.total, index(0), self._value(ks, index(start) + k)),
        )

    def _registers(self, ks: Sequence[Expr]) -> Stmt:
        """All whole registers of a line: blocks of as many as have partial results, then what is left of them."""
        block = self.registers * self.lanes
        blocks = self.extent // block
        body = [loop(blocks, SERIAL, "block", lambda b: self._vectors(ks, b * index(block), self.registers))]
        left = (self.extent - blocks * block) // self.lanes
        if left:
            body.append(self._vectors(ks, index(blocks * block), left))
        return sequence(*body)

    def _vectors(self, ks: Sequence[Expr], start: Expr, count: int) -> Stmt:
        """``count`` registers' worth of elements from ``start`` on, each into its own partial result."""

        def register(u: Expr) -> Stmt:
            first = u * index(self.lanes)
            return loop(
                self.lanes,
                VECTORIZED,
                "v",
                lambda v: sequence(
                    *self._produced(start + first + v),
                    self._into(self.partial, first + v, self._value(ks, start + first + v)),
                ),
            )

        return loop(count, UNROLLED, "u", register)

    def _fold(self) -> list[Stmt]:
        """Combine the partial registers into the first one."""
        return [
            self._onto_first(self.lanes, self._lane_from(register * self.lanes))
            for register in range(1, self.registers)
        ]

    def _halve(self, width: int, rest: Sequence[tuple[int, int]]) -> list[Stmt]:
        """Lanes ``width`` to ``2 * width`` onto the first ``width``, with the elements left over that fill as many."""
        halves = self._onto_first(width, self._lane_from(width))
        return [halves, *(self._left_over(first, size) for first, size in rest if size == width)]

    def _lane_from(self, first: int) -> Callable[[Expr], Expr]:
        return lambda v: load(self.partial, [index(first) + v])

    def _left_over(self, first: int, width: int) -> Stmt:
        """``width`` elements from ``first`` on, onto the first lanes."""

        def element(v: Expr) -> Stmt:
            k = index(first) + v
            return sequence(*self._produced(k), self._into(self.partial, v, self._value((), k)))

        return loop(width, VECTORIZED, "v", element)

    def _onto_first(self, width: int, other: Callable[[Expr], Expr]) -> Stmt:
        return loop(width, VECTORIZED, "v", lambda v: self._into(self.partial, v, other(v)))
