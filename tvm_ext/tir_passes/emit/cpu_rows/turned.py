"""An element-wise operator that reads across the rows which it writes: square by square, turned in registers.

Worked example, ``y[j, i] = f(x[i, j])`` of 3136 x 256 floats. Along the rows of ``y`` each element of ``x`` lies in a
line of its own, and LLVM loads lane by lane. Here 16 rows of ``x`` are loaded as 16 registers, which 64 shuffles turn
into 16 rows of ``y``:

    for a, b in squares of a patch, for patches in parallel:
      turned = transposed(x[16 * a + 0 .. 15, 16 * b + 0 .. 15])
      for r in 0 .. 15: y[16 * b + r, 16 * a + 0 .. 15] = f(turned[r])

The last square of an axis ends with it and computes some elements a second time: no square is cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd, prod

from tvm_ext._tvm import (
    IF_THEN_ELSE,
    Buffer,
    Call,
    Expr,
    ForKind,
    Stmt,
    TensorLoad,
    Var,
    nodes_in,
    structural_equal,
    tirx,
)
from tvm_ext.analysis.computation_exprs import flat_form, flat_stride, itemsize_bytes
from tvm_ext.analysis.computations import Computation, dtype_of, replace_equal_loads, substitute
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.ir.build_ir import (
    SERIAL,
    VECTORIZED,
    allocate,
    bind,
    index,
    lanes_of,
    load,
    loop,
    nest,
    new_buffer,
    parallel_cut,
    sequence,
    store,
    store_point,
    tile_size,
    tile_start,
    vector_kind,
)
from tvm_ext.ir.transpose_registers import transpose_registers
from tvm_ext.support.arithmetic import ceil_div

HELD_WAYS = 8
"""Lines in one place of a first cache that stay there for sure, of those that a square's rows write."""

TASKS_PER_UNIT = 8
"""A choice: enough that the last, uneven round of tasks is short."""

LEAST_SIDE = 4
"""Elements along a square's side: of fewer, a shuffle saves nothing over loads of single elements."""

PATCH_SQUARES, HELD_SQUARES, PATCH_SIDE, SHORT_SIDE = 64, 32, 2, 8
"""Choices: squares that a task takes, 64 KB of floats on either side, and that it holds. Along an outer side it takes
two, or all of up to eight."""

ITEM_BYTES = (4.0, 8.0)
"""Of elements that are turned: of smaller ones a square would take more registers than there are."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TurnedSquares:
    """Squares of ``columns`` along the axis ``inner`` by ``rows`` along ``across``.

    The result of the lone ``computation`` is contiguous along ``inner``, its ``loads`` are along ``across``.
    """

    computation: Computation
    loads: tuple[TensorLoad, ...]
    inner: Var
    across: Var
    columns: int
    rows: int
    along_rows: bool  # whether neighbouring squares, in turn, go on with the rows that the last one wrote
    tasks: int  # wanted
    staged: bool  # whether a patch is held in a buffer of its own, and copied row by row

    def emit(self, kind: ForKind) -> Stmt:
        """All squares in patches, divided by an outer loop of ``kind``."""
        computation = self.computation
        outer = [v for v in computation.spatial if not v.same_as(self.inner) and not v.same_as(self.across)]
        axes = [(self.across, self.rows), (self.inner, self.columns)]
        sides = axes if self.along_rows else axes[::-1]
        extents = [computation.extent(v) for v, _ in sides]
        counts = [ceil_div(extent, side) for extent, (_, side) in zip(extents, sides, strict=True)]
        others = [computation.extent(v) for v in outer]
        overlaps = bool(extents[0] % sides[0][1])
        most = HELD_SQUARES if self.staged else PATCH_SQUARES
        patch = _patch(counts, overlaps, min(most, max(1, prod(counts) * prod(others) // self.tasks)))

        def squares(at: tuple[Expr, ...]) -> Stmt:
            *others, second, first = at
            begins = [first * index(patch[0]), second * index(patch[1])]
            sizes = [tile_size(*whole) for whole in zip(counts, patch, begins, strict=True)]
            table = bind(outer, others)

            def starts(numbers: Sequence[Expr]) -> tuple[Expr, Expr]:
                """The column and the row that a square of the patch begins with."""
                numbered = zip(begins, numbers, extents, sides, strict=True)
                found = [tile_start(begin + number, side, extent) for begin, number, extent, (_, side) in numbered]
                return (found[1], found[0]) if self.along_rows else (found[0], found[1])

            if not self.staged:
                return nest(sizes, SERIAL, ("a", "b"), lambda numbers: self._square(table, *starts(numbers)))
            whole = [min(extent, size * side) for extent, size, (_, side) in zip(extents, patch, sides, strict=True)]
            origin = [
                tirx.min(begin * index(side), index(extent - length))
                for begin, (_, side), extent, length in zip(begins, sides, extents, whole, strict=True)
            ]
            (row_count, column_count), (row, column) = (
                (tuple(pair) if self.along_rows else tuple(pair[::-1])) for pair in (whole, origin)
            )
            held = new_buffer((row_count, column_count), dtype_of(computation.target), "held", "local")
            made = replace(computation, target=held, indices=(self.across - row, self.inner - column))

            def copied(numbers: tuple[Expr, ...]) -> Stmt:
                number_of_row, r, number_of_column = numbers
                pair = (number_of_row, number_of_column) if self.along_rows else (number_of_column, number_of_row)
                first_column, first_row = starts(pair)

                def element(v: Expr) -> Stmt:
                    place = [*table, *bind((self.inner, self.across), (first_column + v, first_row + r))]
                    value = load(held, [first_row + r - row, first_column + v - column])
                    return store(computation.target, value, [substitute(i, place) for i in computation.indices])

                return loop(self.columns, VECTORIZED, "v", element)

            row_squares, column_squares = sizes if self.along_rows else sizes[::-1]
            return sequence(
                allocate(held),
                nest(sizes, SERIAL, ("a", "b"), lambda numbers: self._square(table, *starts(numbers), made)),
                nest((row_squares, self.rows, column_squares), SERIAL, ("a", "r", "b"), copied),
            )

        patches = [ceil_div(count, size) for count, size in zip(counts, patch, strict=True)]
        return parallel_cut([*others, *patches[::-1]], kind, "patch", squares)

    def _square(self, table: list[tuple[Var, Expr]], first: Expr, start: Expr, made: Computation | None = None) -> Stmt:
        """The square from column ``first`` and row ``start`` on; ``made``: the computation with another target."""
        computation = made or self.computation
        statements: list[Stmt] = []
        read: list[tuple[TensorLoad, Buffer]] = []
        for item in self.loads:
            dtype = dtype_of(item)
            loaded = new_buffer((self.columns, self.rows), dtype, "loaded", "local")
            turned = new_buffer((self.rows * self.columns,), dtype, "turned", "local")

            def line(column: int, item: TensorLoad = item, loaded: Buffer = loaded) -> Stmt:
                def element(v: Expr) -> Stmt:
                    place = [*table, *bind((self.inner, self.across), (first + index(column), start + v))]
                    return store(loaded, substitute(item, place), [index(column), v])

                return loop(self.rows, VECTORIZED, "v", element)

            statements += [allocate(loaded), allocate(turned), *map(line, range(self.columns))]
            statements += transpose_registers(loaded, range(self.columns), 0, self.rows, turned, 0)
            read.append((item, turned))

        def row(number: Expr) -> Stmt:
            def element(v: Expr) -> Stmt:
                place = [*table, *bind((self.inner, self.across), (first + v, start + number))]
                known = [(item, load(turned, [number * index(self.columns) + v])) for item, turned in read]
                return store_point(computation, place, replace_equal_loads(computation.value, known))

            return loop(self.columns, VECTORIZED, "v", element)

        return sequence(*statements, loop(self.rows, SERIAL, "r", row))


def turned_squares(computation: Computation, device: DeviceSpec) -> TurnedSquares | None:
    """The squares of a lone element-wise ``computation``.

    None where no load goes across its stores, where a condition guards one, or where an axis is too short.
    """
    variables = computation.variables
    written = flat_form(computation.target, computation.indices, variables, computation.extents)
    if computation.is_reduction or written is None or written[0].count(1) != 1 or has_guard(computation.value):
        return None
    inner = variables[written[0].index(1)]
    loads: list[TensorLoad] = []
    for item in computation.loads():
        step = flat_stride(item, inner, computation)
        if step is None:
            return None
        if step not in (0, 1) and not any(structural_equal(item, other) for other in loads):
            loads.append(item)
    across = [v for v in variables if any(flat_stride(item, v, computation) == 1 for item in loads)]
    if len(across) != 1 or any(flat_stride(item, across[0], computation) != 1 for item in loads):
        return None
    if any(itemsize_bytes(dtype_of(item)) not in ITEM_BYTES for item in loads):
        return None
    lanes = min(lanes_of(dtype_of(item), device.register_bytes) for item in loads)
    columns, rows = (_power_of_two(min(lanes, computation.extent(v))) for v in (inner, across[0]))
    if min(columns, rows) < LEAST_SIDE or vector_kind(computation.value) != VECTORIZED:
        return None
    step = flat_stride(loads[0], inner, computation) or 0
    pitch = written[0][next(p for p, v in enumerate(variables) if v.same_as(across[0]))]
    return TurnedSquares(
        computation=computation,
        loads=tuple(loads),
        inner=inner,
        across=across[0],
        columns=columns,
        rows=rows,
        tasks=TASKS_PER_UNIT * device.unit_count,
        staged=_places(pitch, computation.target, device) * HELD_WAYS < rows,
        along_rows=_places(pitch, computation.target, device) <= _places(step, loads[0].source, device),
    )


def _patch(counts: Sequence[int], overlaps: bool, most: int) -> tuple[int, int]:
    """How many of ``counts`` squares along each side, the outer one first, are a task of up to ``most``.

    All of a short outer side whose last square ``overlaps`` the one before: two cores that are at them at once take the
    lines from each other. 28 planes of 1024 x 28 took 160 to 420 us by squares in turn (Zen 5).
    """
    first = counts[0] if overlaps and counts[0] <= SHORT_SIDE else min(counts[0], PATCH_SIDE)
    return first, max(1, min(counts[1], most // first))


def has_guard(value: Expr) -> bool:
    """Whether a condition says which loads of ``value`` may be made."""
    return any(call.op.same_as(IF_THEN_ELSE) for call in nodes_in(value, Call))


def _power_of_two(size: int) -> int:
    return 1 << (size.bit_length() - 1)


def _places(pitch: int, buffer: Buffer, device: DeviceSpec) -> int:
    """In how many sets of a cache rows that are ``pitch`` elements apart lie: many, where a walk across them is cheap.

    Worked example, pages of 4096 bytes: rows of 256 floats lie in 4 places, those of 3136 in 16. 3136 x 256 floats take
    43 us where squares go on along the rows of 256, and 62 us the other way round (Zen 5, two cores).
    """
    page, line = device.page_bytes or 1, device.layers[1].transaction_bytes
    return page // max(line, gcd(int(pitch * itemsize_bytes(dtype_of(buffer))), page))
