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
from tvm_ext.cost.row_time import is_vectorised, reduction_lanes
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.ir.build_ir import (
    SERIAL,
    UNROLLED,
    VECTORIZED,
    accumulate,
    accumulator_dtype,
    allocate,
    bind,
    in_dtype,
    index,
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
    registers: int = PARTIAL_REGISTERS,
    producer: tuple[Computation, list[tuple[Var, Expr]]] | None = None,
) -> Stmt:
    """Statements that store one element of the reduction ``computation``, its spatial variables given by ``table``.

    Partial results are in ``registers`` at most. ``producer`` is a computation that `runs_inside` it, with its own
    table: its row is written on the way.
    """
    dtype = accumulator_dtype(dtype_of(computation.target))
    extent, lanes = computation.extent(computation.reduction[-1]), reduction_lanes(computation, device)
    row = _ReducedRow(
        computation=computation,
        producer=producer,
        table=tuple(table),
        extent=extent,
        lanes=lanes,
        registers=min(registers, extent // lanes),
        total=new_buffer((1,), dtype, "total", "local"),
        partial=new_buffer((registers * lanes,), dtype, "partial", "local"),
    )
    statements = row.vectorised() if is_vectorised(computation, device) else [row.lines(lambda ks: row.elements(ks, 0))]
    zero = [index(0)]
    return sequence(
        allocate(row.total),
        store(row.total, in_dtype(computation.init, dtype), zero),
        *statements,
        store(
            computation.target,
            in_dtype(load(row.total, zero), dtype_of(computation.target)),
            [substitute(i, table) for i in computation.indices],
        ),
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _ReducedRow:
    """The reduction along one row: ``partial`` has ``registers`` SIMD registers of partial results."""

    computation: Computation
    producer: tuple[Computation, list[tuple[Var, Expr]]] | None  # runs inside
    table: tuple[tuple[Var, Expr], ...]
    extent: int  # of the last reduction axis
    lanes: int
    registers: int
    total: Buffer
    partial: Buffer

    def vectorised(self) -> list[Stmt]:
        """With a single line, what is left of it waits for the halving; with several, each ends in scalars."""
        is_single = len(self.computation.reduction) == 1
        done = self.extent - self.extent % self.lanes
        rest = [(done + first, size) for first, size in vectors(self.extent - done, self.lanes)] if is_single else []
        empty = neutral(self.computation, dtype_of(self.partial))

        def line(ks: tuple[Expr, ...]) -> Stmt:
            left = [] if is_single or done == self.extent else [self.elements(ks, done)]
            return sequence(*self._whole_registers(ks), *left)

        halved: list[Stmt] = []
        for width in (self.lanes >> shift for shift in range(1, self.lanes.bit_length())):
            # the upper lanes onto the lower ones, with the elements left over that fill as many
            halved.append(self._add_lanes(width, width))
            halved += [self._vector(size, (), index(first), index(0)) for first, size in rest if size == width]
        return [
            allocate(self.partial),
            loop(self.registers * self.lanes, VECTORIZED, "v", lambda v: store(self.partial, empty, [v])),
            self.lines(line),
            *(self._add_lanes(self.lanes, register * self.lanes) for register in range(1, self.registers)),
            *halved,
            self._into(self.total, index(0), load(self.partial, [index(0)])),
        ]

    def lines(self, body: Callable[[tuple[Expr, ...]], Stmt]) -> Stmt:
        """The reduction axes around the last one."""
        return over(self.computation, self.computation.reduction[:-1], body)

    def elements(self, ks: Sequence[Expr], start: int) -> Stmt:
        """The elements of a line from ``start`` on, one by one."""

        def element(k: Expr) -> Stmt:
            return self._into(self.total, index(0), self._value(ks, index(start) + k))

        return loop(self.extent - start, SERIAL, "k", element)

    def _value(self, ks: Sequence[Expr], k: Expr) -> Expr:
        table = [*self.table, *bind(self.computation.reduction, (*ks, k))]
        return in_dtype(substitute(self.computation.value, table), dtype_of(self.total))

    def _into(self, buffer: Buffer, at: Expr, value: Expr) -> Stmt:
        return accumulate(buffer, [at], value, self.computation.combiner)

    def _vector(self, width: int, ks: Sequence[Expr], start: Expr, into: Expr) -> Stmt:
        """``width`` elements from ``start`` on, onto as many lanes from ``into`` on; the producer's come first."""

        def element(v: Expr) -> Stmt:
            reduced = self._into(self.partial, into + v, self._value(ks, start + v))
            if self.producer is None:
                return reduced
            made, table = self.producer
            return sequence(store_point(made, [*table, *bind(made.spatial[-1:], [start + v])]), reduced)

        return loop(width, VECTORIZED, "v", element)

    def _whole_registers(self, ks: Sequence[Expr]) -> list[Stmt]:
        """All whole registers of a line: blocks of as many as have partial results, then what is left of them."""

        def registers(start: Expr, count: int) -> Stmt:
            lanes = index(self.lanes)
            return loop(count, UNROLLED, "u", lambda u: self._vector(self.lanes, ks, start + u * lanes, u * lanes))

        block = self.registers * self.lanes
        blocks = self.extent // block
        whole = loop(blocks, SERIAL, "block", lambda b: registers(b * index(block), self.registers))
        left = (self.extent - blocks * block) // self.lanes
        return [whole, *([registers(index(blocks * block), left)] if left else [])]

    def _add_lanes(self, width: int, first: int) -> Stmt:
        """``width`` lanes from ``first`` on onto the first ones."""
        return loop(
            width, VECTORIZED, "v", lambda v: self._into(self.partial, v, load(self.partial, [index(first) + v]))
        )
