"""Small constructors for TensorIR statements, so that emitters read like the loops that they make."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from math import prod
from typing import Literal

from tvm_ext._tvm import (
    Buffer,
    BufferStore,
    Expr,
    For,
    ForKind,
    IRModule,
    PrimFunc,
    Stmt,
    TensorLoad,
    Var,
    nodes_in,
    tirx,
)
from tvm_ext.analysis.computations import Computation, dtype_of, substitute
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.devices.machine import Machine
from tvm_ext.errors import IllegalRewrite
from tvm_ext.support.arithmetic import ceil_div

INDEX_DTYPE = "int64"

SERIAL, PARALLEL, UNROLLED, VECTORIZED = (ForKind.SERIAL, ForKind.PARALLEL, ForKind.UNROLLED, ForKind.VECTORIZED)


def index(value: int) -> Expr:
    return tirx.IntImm(INDEX_DTYPE, value)


STACK_BYTES = 1024  # stock TVM's limit, exclusive


def new_buffer(shape: Sequence[int], dtype: str, name: str, scope: str = "global") -> Buffer:
    """A buffer to allocate; a small "local" one becomes "global", for only those does stock TVM keep on the stack.

    All others, "local" ones too, it asks of its workspace pool at every call (0.1 us each), and LLVM must then write to
    memory what it holds in registers. Worked example: 2048 sums of 49 numbers took 9.0 us, and take 4.6 us.
    """
    if scope == "local" and prod(shape) * int(tirx.const(0, dtype).ty.dtype.bits) < STACK_BYTES * 8:
        scope = "global"
    return tirx.decl_buffer([index(size) for size in shape], dtype, name, scope=scope, data_alignment=64)


def loop(extent: int | Expr, kind: ForKind, name: str, body: Callable[[Expr], Stmt]) -> Stmt:
    """``for name in range(extent): body(name)``; an extent of 1 makes no loop."""
    if isinstance(extent, int):
        if extent == 1:
            return body(index(0))
        extent = index(extent)
    variable = Var(name, INDEX_DTYPE)
    return For(variable, index(0), extent, kind, body(variable))


def nest(
    extents: Sequence[int | Expr], kind: ForKind, names: Sequence[str], body: Callable[[tuple[Expr, ...]], Stmt]
) -> Stmt:
    """Nested loops, the first one outermost."""

    def inner(position: int, done: tuple[Expr, ...]) -> Stmt:
        if position == len(extents):
            return body(done)
        return loop(extents[position], kind, names[position], lambda v: inner(position + 1, (*done, v)))

    return inner(0, ())


def over(computation: Computation, axes: Sequence[Var], body: Callable[[tuple[Expr, ...]], Stmt]) -> Stmt:
    """Serial loops over ``axes`` of ``computation``."""
    return nest([computation.extent(v) for v in axes], SERIAL, [v.name for v in axes], body)


def parallel_cut(extents: Sequence[int], kind: ForKind, name: str, body: Callable[[tuple[Expr, ...]], Stmt]) -> Stmt:
    """One loop of ``kind`` over all points of ``extents``, for units to divide: ``body(coordinates)``."""
    return loop(prod(extents), kind, name, lambda number: body(split_index(number, extents)))


def in_tiles(extent: int, size: int, name: str, body: Callable[[Expr, int], Stmt]) -> Stmt:
    """``body(first, count)`` for each tile of ``size`` among ``extent``; the last one, where smaller, is written apart.

    Worked example: 16 in tiles of 6 are a loop over 2 of 6, and one of 4 from 12 on.
    """
    full, rest = divmod(extent, size)
    parts = [loop(full, SERIAL, name, lambda number: body(number * index(size), size))] if full else []
    return sequence(*parts, *([body(index(full * size), rest)] if rest else []))


def if_all(conditions: Iterable[Expr | None], body: Stmt, otherwise: Stmt | None = None) -> Stmt:
    """``body`` where all ``conditions`` hold, else ``otherwise``; a condition of None always holds."""
    asked = [condition for condition in conditions if condition is not None]
    return tirx.IfThenElse(reduce(tirx.And, asked), body, otherwise) if asked else body


def below(position: Expr, extent: int, tile: int) -> Expr | None:
    """Whether ``position`` is below ``extent``; None where tiles of ``tile`` end with it, so that all positions are."""
    return None if extent % tile == 0 else position < index(extent)


def tile_size(extent: int, size: int, start: Expr) -> int | Expr:
    """Elements of the tile of ``size`` that begins at ``start`` among ``extent``: the last one may have fewer."""
    return size if extent % size == 0 else tirx.min(index(size), index(extent) - start)


def tile_count(extent: int | Expr, size: int) -> int | Expr:
    """Tiles of ``size`` that cover ``extent``."""
    if isinstance(extent, int):
        return ceil_div(extent, size)
    return extent if size == 1 else tirx.floordiv(extent + index(size - 1), index(size))


def tile_start(number: Expr, size: int, extent: int | Expr) -> Expr:
    """Where tile ``number`` of ``size`` begins among ``extent``, if the last one is as large and ends with them."""
    if isinstance(extent, int):
        if extent % size == 0:
            return number * index(size)
        extent = index(extent)
    elif size == 1:
        return number
    return tirx.min(number * index(size), extent - index(size))


def split_index(flat: Expr, extents: Sequence[int]) -> tuple[Expr, ...]:
    """Row-major coordinates of ``flat`` in a grid: (flat // (e1*e2)) , (flat // e2) % e1, flat % e2."""
    parts: list[Expr] = []
    for position, extent in reversed(list(enumerate(extents))):
        if extent == 1:
            parts.append(index(0))
        elif position == 0 or all(e == 1 for e in extents[:position]):
            parts.append(flat)
        else:
            parts.append(tirx.floormod(flat, index(extent)))
        flat = tirx.floordiv(flat, index(extent)) if extent != 1 else flat
    return tuple(reversed(parts))


def flat(offsets: Sequence[Expr], extents: Sequence[int]) -> Expr:
    """Row-major number of ``offsets`` in a block of ``extents``."""
    number: Expr = index(0)
    for offset, extent in zip(offsets, extents, strict=True):
        number = number * index(extent) + offset
    return number


def load(buffer: Buffer, indices: Sequence[Expr]) -> Expr:
    return tirx.BufferLoad(buffer, list(indices))


def store(buffer: Buffer, value: Expr, indices: Sequence[Expr]) -> Stmt:
    return BufferStore(buffer, value, list(indices))


def store_point(computation: Computation, table: Sequence[tuple[Var, Expr]], value: Expr | None = None) -> Stmt:
    """Store the computation's value, or another ``value`` over its axes, at the point that ``table`` gives."""
    result = substitute(computation.value if value is None else value, table)
    return store(computation.target, result, [substitute(i, table) for i in computation.indices])


def allocate(buffer: Buffer) -> Stmt:
    return tirx.AllocBuffer(buffer, {})


def prefetch(element: Expr, offset_bytes: int = 0, cache: int = 2) -> Stmt:
    """Ask for the line ``offset_bytes`` behind what ``element``, a load, reads, and do not wait for it.

    It comes to the core's first or second ``cache``.
    """
    address = tirx.address_of(element)
    if offset_bytes:
        address = tirx.handle_add_byte_offset(address, index(offset_bytes))
    how = [tirx.const(number, "int32") for number in (0, 4 - cache, 1)]  # to be read; how near; data
    return tirx.Evaluate(tirx.call_llvm_intrin("void", "llvm.prefetch.p0", address, *how))


def sequence(*statements: Stmt) -> Stmt:
    return statements[0] if len(statements) == 1 else tirx.stmt_seq(*statements)


def as_index(expr: Expr, variable: Var) -> Expr:
    """``expr`` in the integer type of ``variable``, which it replaces: TE counts in int32, Relax in int64."""
    return cast_to(expr, dtype_of(variable))


def bind(variables: Iterable[Var], values: Iterable[Expr]) -> list[tuple[Var, Expr]]:
    """What each of ``variables`` is, in its integer type."""
    return [(v, as_index(x, v)) for v, x in zip(variables, values, strict=True)]


def bind_at(computation: Computation, points: Mapping[int, Expr]) -> list[tuple[Var, Expr]]:
    """What each axis variable of ``computation`` is, by its position among the axes."""
    return bind([computation.variables[p] for p in points], points.values())


def cast_to(value: Expr, dtype: str) -> Expr:
    """``value`` in ``dtype``: itself where it has that type already."""
    return value if dtype_of(value) == dtype else tirx.Cast(dtype, value)


def lanes_of(dtype: str, register_bytes: int) -> int:
    """Elements of ``dtype`` in one SIMD register; at least 1."""
    return max(1, register_bytes * 8 // max(8, int(tirx.const(0, dtype).ty.dtype.bits)))


def vectors(size: int, lanes: int) -> list[tuple[int, int]]:
    """(first, length) of vectors that cover ``size`` elements: full registers, then powers of two.

    Worked example: 37 elements with 16 lanes are 16 + 16 + 4 + 1. LLVM rounds an odd length's alignment up, and
    would then read it with aligned instructions at unaligned addresses.
    """
    pieces, first = [], 0
    while first < size:
        length = min(lanes, 1 << ((size - first).bit_length() - 1))
        pieces.append((first, length))
        first += length
    return pieces


def vector_loops(size: int, lanes: int, kind: ForKind, body: Callable[[Expr], Stmt]) -> Stmt:
    """``body(position)`` for ``size`` elements, in one loop over lanes for each of their `vectors`."""

    def piece(first: int, length: int) -> Stmt:
        return loop(length, kind, "v", lambda v: body(index(first) + v))

    return sequence(*(piece(first, length) for first, length in vectors(size, lanes)))


def lanes_hold(
    quantifier: Literal["and", "or"],
    holds: Callable[[Expr, Expr], Expr],
    buffer: Buffer,
    first: Sequence[Expr],
    value: Expr,
    lanes: int,
) -> Expr:
    """Whether ``holds(element, value)`` for all or one of ``lanes`` elements from ``first`` on, on the last axis."""
    if lanes == 1:
        return holds(load(buffer, first), value)
    vector = load(buffer, (*first[:-1], tirx.Ramp(first[-1], index(1), lanes)))
    mask = holds(vector, tirx.Broadcast(value, lanes))
    return tirx.call_llvm_pure_intrin("bool", f"llvm.vector.reduce.{quantifier}", mask)


def combine(combiner: str | None, a: Expr, b: Expr) -> Expr:
    """One step of a reduction; raises IllegalRewrite for a combiner that no kernel has."""
    if combiner == "sum":
        return a + b
    if combiner == "prod":
        return a * b
    if combiner == "max":
        return tirx.max(a, b)
    if combiner == "min":
        return tirx.min(a, b)
    raise IllegalRewrite(f"no kernel combines by {combiner}")


def accumulate(buffer: Buffer, at: Sequence[Expr], value: Expr, combiner: str | None = "sum") -> Stmt:
    """``buffer[at] = combine(buffer[at], value)``."""
    return store(buffer, combine(combiner, load(buffer, at), value), at)


@dataclass(frozen=True, slots=True, eq=False)
class RegisterArray:
    """Values that a tile keeps in registers: all indices of ``buffer`` are constant once its loops are unrolled.

    ``walk(body)`` writes these loops around ``body(*point)``; ``at(*point)`` is where a point lies in the buffer, which
    is the point itself where it is left out.
    """

    buffer: Buffer
    walk: Callable[[Callable[..., Stmt]], Stmt]
    at: Callable[..., Sequence[Expr]] = lambda *point: point

    def fill(self, value: Callable[..., Expr]) -> Stmt:
        """Every register becomes ``value(*point)``."""
        return self.walk(lambda *point: store(self.buffer, value(*point), self.at(*point)))

    def accumulate(self, value: Callable[..., Expr], combiner: str | None = "sum") -> Stmt:
        """Every register is combined with ``value(*point)``."""
        return self.walk(lambda *point: accumulate(self.buffer, self.at(*point), value(*point), combiner))

    def write(self, body: Callable[..., Stmt]) -> Stmt:
        """``body(*point, register)`` for every register."""
        return self.walk(lambda *point: body(*point, load(self.buffer, self.at(*point))))


FORK_PAYS = 4
"""Starting a parallel region must save at least this many times what it costs: on a busy machine it costs more."""


def outer_kind(time_s: float, device: DeviceSpec, *, alone_s: float | None = None) -> ForKind:
    """The kind of a kernel's outer loop that takes ``time_s`` on all units: SERIAL where one unit is as good.

    ``alone_s``: its time on one unit, where that is not ``time_s`` times the number of units.

    Worked example: 2 us on two units is 4 us on one; a launch of 1 us saves 2 us, twice what it costs: SERIAL.
    """
    saved_s = time_s * (device.unit_count - 1) if alone_s is None else alone_s - time_s
    cost_s = Machine(device).launch_s
    return PARALLEL if device.unit_count > 1 and saved_s > FORK_PAYS * cost_s else SERIAL


def vector_kind(*values: Expr) -> ForKind:
    """The kind of a loop over SIMD lanes that computes ``values``: UNROLLED where stock TVM would vectorise wrongly.

    Its VectorizeLoop divides a ramp by dividing base and stride, which is not truncated division: ``(1 - 2*v) / 2`` for
    v = 0, 1 is 0, 0 but becomes 0, -1. Average pooling counts its window that way.
    """
    found = nodes_in(list(values), (tirx.Div, tirx.Mod))
    return UNROLLED if any("float" not in dtype_of(node) for node in found) else VECTORIZED


HALF_TYPES = ("float16", "bfloat16")


def accumulator_dtype(dtype: str) -> str:
    """The type that a reduction to ``dtype`` is accumulated in: float32 for half precision."""
    return "float32" if dtype in HALF_TYPES else dtype


def in_dtype(value: Expr, dtype: str) -> Expr:
    """``value`` computed in ``dtype``: half-precision products are accumulated, and so must be formed, in float32."""
    if dtype_of(value) == dtype:
        return value
    kind = type(value).__name__
    if kind in ("Mul", "Add", "Sub"):
        return type(value)(in_dtype(value.a, dtype), in_dtype(value.b, dtype))
    if kind == "Cast" and isinstance(value.value, TensorLoad) and dtype_of(value.value) == dtype:
        return value.value
    return tirx.Cast(dtype, value)


def neutral(computation: Computation, dtype: str) -> Expr:
    """The value that leaves a partial result unchanged; max and min start each from the initial value."""
    if computation.combiner == "sum":
        return tirx.const(0, dtype)
    return tirx.const(1, dtype) if computation.combiner == "prod" else in_dtype(computation.init, dtype)


def rename_apart(func: PrimFunc) -> PrimFunc:
    """``func`` with a definition of its own for every variable: statements or expressions have been written twice."""
    return tirx.transform.ConvertSSA()(IRModule({"main": func}))["main"]
