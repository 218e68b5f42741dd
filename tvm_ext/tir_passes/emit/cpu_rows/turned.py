"""An element-wise operator that reads across the rows which it writes: square by square, turned in registers.

Worked example, ``y[j, i] = f(x[i, j])`` of 3136 x 256 floats. Along the rows of ``y`` each element of ``x`` lies in a
line of its own, and LLVM loads lane by lane. Here 16 rows of ``x`` are loaded as 16 registers, which 64 shuffles turn
into 16 rows of ``y``:

    for a, b in squares:
      turned = transposed(x[16 * a + 0 .. 15, 16 * b + 0 .. 15])
      for r in 0 .. 15: y[16 * b + r, 16 * a + 0 .. 15] = f(turned[r])

The last square of an axis ends with it and computes some elements a second time: no square is cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from tvm_ext._tvm import (
    IF_THEN_ELSE,
    Buffer,
    Call,
    Expr,
    ForKind,
    Stmt,
    TensorLoad,
    Var,
    structural_equal,
    structural_walk,
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
    new_buffer,
    parallel_cut,
    sequence,
    store,
    store_point,
    tile_start,
    vector_kind,
)
from tvm_ext.ir.transpose_registers import transpose_registers
from tvm_ext.support.arithmetic import ceil_div

LEAST_SIDE = 4
"""Elements along a square's side: of fewer, a shuffle saves nothing over loads of single elements."""

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

    def emit(self, kind: ForKind) -> Stmt:
        """All squares, divided by an outer loop of ``kind``."""
        computation = self.computation
        outer = [v for v in computation.spatial if not v.same_as(self.inner) and not v.same_as(self.across)]
        axes = [(self.across, self.rows), (self.inner, self.columns)]
        sides = axes if self.along_rows else axes[::-1]
        extents = [computation.extent(v) for v, _ in sides]
        counts = [ceil_div(extent, side) for extent, (_, side) in zip(extents, sides, strict=True)]

        def square(at: tuple[Expr, ...]) -> Stmt:
            numbered = zip(at[-2:], extents, sides, strict=True)
            starts = [tile_start(number, side, extent) for number, extent, (_, side) in numbered]
            start, first = starts if self.along_rows else starts[::-1]
            return self._square(bind(outer, at[:-2]), first, start)

        return parallel_cut([*(computation.extent(v) for v in outer), *counts], kind, "square", square)

    def _square(self, table: list[tuple[Var, Expr]], first: Expr, start: Expr) -> Stmt:
        """The square from column ``first`` and row ``start`` on."""
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
                return store_point(self.computation, place, replace_equal_loads(self.computation.value, known))

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
        along_rows=_places(pitch, computation.target, device) <= _places(step, loads[0].source, device),
    )


def has_guard(value: Expr) -> bool:
    """Whether a condition says which loads of ``value`` may be made."""
    found: list[bool] = []
    structural_walk(value, (Call, lambda call: found.append(call.op.same_as(IF_THEN_ELSE))))
    return any(found)


def _power_of_two(size: int) -> int:
    return 1 << (size.bit_length() - 1)


def _places(pitch: int, buffer: Buffer, device: DeviceSpec) -> int:
    """In how many sets of a cache rows that are ``pitch`` elements apart lie: many, where a walk across them is cheap.

    Worked example, pages of 4096 bytes: rows of 256 floats lie in 4 places, those of 3136 in 16. 3136 x 256 floats take
    43 us where squares go on along the rows of 256, and 62 us the other way round (Zen 5, two cores).
    """
    page, line = device.page_bytes or 1, device.layers[1].transaction_bytes
    return page // max(line, gcd(int(pitch * itemsize_bytes(dtype_of(buffer))), page))
