"""Emits window operators: depthwise convolution and pooling, a band of one plane per task (paper §3.1, storage).

    parallel for task in planes x bands:
      for row in rows of the band:                # cpu_windows/fill.py: padding included, de-interleaved by the stride
        data[phase, row, ...] = source[...]
      for tile in band:
        acc[rows, vectors] = init
        for ry, rx:                               # unrolled; a vector of data serves every row that it belongs to
          acc[r, v] = combine(acc[r, v], f(data[...], w[c, ry, rx]))
        out[...] = epilogue(acc)

Every vector is whole: where a row is no multiple of the vectors, the last one starts earlier and computes again what
its neighbour has computed, within the same task. Worked example: 83 columns in pairs of 16 lanes start at 0, 32 and 51.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm_ext._tvm import Buffer, Expr, ForKind, Stmt, Var, nodes_in, tirx
from tvm_ext.analysis.computations import Computation, mentions, replace_equal_loads, substitute
from tvm_ext.analysis.window import Window
from tvm_ext.cost.window_layouts import WindowLayout
from tvm_ext.ir.build_ir import (
    SERIAL,
    UNROLLED,
    VECTORIZED,
    accumulate,
    allocate,
    bind,
    index,
    load,
    loop,
    new_buffer,
    parallel_cut,
    sequence,
    store,
    tile_count,
    tile_size,
    tile_start,
    vector_kind,
)
from tvm_ext.ir.stores import store_element
from tvm_ext.support.arithmetic import ceil_div

from .fill import Staging, Table

FEW_PARTS = 4
"""Vectors of a row written out one by one."""

STACK_BYTES = 64 * 1024
"""Scratch memory up to this size lives on the thread's stack, a larger one in its workspace."""


def emit_window(layout: WindowLayout, epilogue: Sequence[Computation], kind: ForKind) -> Stmt:
    """The loops of ``layout``'s kernel with its fused ``epilogue``, in an outer loop of ``kind``."""
    window = layout.window
    data = _scratch(layout.phase_size * len(window.y.phases) * len(window.x.phases), window.dtype, "data")

    def task(at: tuple[Expr, ...]) -> Stmt:
        *plane, band = at
        start = band * index(layout.band)
        return _Band(
            layout=layout,
            epilogue=tuple(epilogue),
            data=data,
            outer=bind(window.outer, plane),
            start=start,
            count=tile_size(window.y.extent, layout.band, start),
        ).statement()

    return parallel_cut([*(window.anchor.extent(v) for v in window.outer), layout.bands], kind, "task", task)


def _scratch(size: int, dtype: str, name: str) -> Buffer:
    return new_buffer([size], dtype, name, "local" if size * 4 <= STACK_BYTES else "global")


Finish = Callable[[int, Expr, Buffer, Expr], Stmt]
"""``finish(row, vector, accumulators, first lane)`` stores a vector of a register tile."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Band:
    """``count`` output rows from ``start`` on of the plane that ``outer`` gives, whose source rows lie in ``data``."""

    layout: WindowLayout
    epilogue: tuple[Computation, ...]
    data: Buffer
    outer: Table
    start: Expr
    count: int | Expr

    def statement(self) -> Stmt:
        staged = Staging(layout=self.layout, data=self.data, outer=self.outer).band(self.start, self.count)
        return sequence(allocate(self.data), *staged, self._flat() if self.layout.is_flat else self._by_rows())

    # --- register tiles ---------------------------------------------------------------------------------------------
    def _by_rows(self) -> Stmt:
        """Tiles of ``rows`` x ``vectors`` that end with the band and with the row, stored through the epilogue."""
        layout, x = self.layout, self.layout.window.x
        chunk = min(layout.vectors * layout.width, x.extent)
        spill = new_buffer([layout.rows * layout.width], layout.window.dtype, "spill", "local")
        is_narrow = layout.width > layout.stored
        spilled = range(layout.rows - 1 if layout.overruns else 0, layout.rows) if is_narrow else range(0)

        def tile(group: Expr, part: Expr) -> Stmt:
            first = tile_start(group, layout.rows, self.count)
            row, column = self.start + first, tile_start(part, chunk, x.extent)

            def finish(r: int, v: Expr, sums: Buffer, at: Expr) -> Stmt:
                if r in spilled:
                    return _copy(layout.width, sums, at, spill, at)
                return self._write(sums, at, row + index(r), column + self._along(v), layout.width)

            rows = [self._store_row(spill, index(r * layout.width), row + index(r)) for r in spilled]
            computed = self._register_tile(first * index(layout.pitch) + column, finish)
            return sequence(*([allocate(spill)] if spilled else []), computed, *rows)

        def group(number: Expr) -> Stmt:
            return loop(ceil_div(x.extent, chunk), SERIAL, "part", lambda part: tile(number, part))

        return loop(tile_count(self.count, layout.rows), SERIAL, "group", group)

    def _flat(self) -> Stmt:
        """Tiles along all places of the band, then the rows out of them through the epilogue."""
        layout = self.layout
        result = _scratch(layout.result_size, layout.window.dtype, "result")
        chunk = layout.vectors * layout.width

        def tile(number: Expr) -> Stmt:
            place = number * index(chunk)

            def finish(_row: int, v: Expr, sums: Buffer, at: Expr) -> Stmt:
                return _copy(layout.width, sums, at, result, place + v * index(layout.width))

            return self._register_tile(place, finish)

        def row(number: Expr) -> Stmt:
            return self._store_row(result, number * index(layout.pitch), self.start + number)

        places = (self.count - 1) * layout.pitch + layout.window.x.extent
        tiles = loop(tile_count(places, chunk), SERIAL, "tile", tile)
        return sequence(allocate(result), tiles, loop(self.count, SERIAL, "row", row))

    def _register_tile(self, place: Expr, finish: Finish) -> Stmt:
        """One register tile at ``place``, whose vectors ``finish`` stores."""
        layout, window, width = self.layout, self.layout.window, self.layout.width
        sums = new_buffer([layout.rows * layout.vectors * width], window.dtype, "acc", "local")

        def at(row: int, v: Expr) -> Expr:
            return index(row * layout.vectors * width) + v * index(width)

        def vectors(body: Callable[[Expr], Stmt]) -> Stmt:
            return loop(layout.vectors, UNROLLED, "vector", body)

        def lanes(body: Callable[[Expr, Expr], Stmt]) -> Stmt:
            return vectors(lambda v: loop(width, VECTORIZED, "lane", lambda lane: body(v, lane)))

        def begin(row: int) -> Stmt:
            return lanes(lambda v, lane: store(sums, window.anchor.init, [at(row, v) + lane]))

        def update(row: int, tap_y: int, tap_x: Expr, source: Expr) -> Stmt:
            def add(v: Expr, lane: Expr) -> Stmt:
                value = self._term(load(self.data, [source + self._along(v) + lane]), tap_y, tap_x)
                return accumulate(sums, [at(row, v) + lane], value, window.anchor.combiner)

            return lanes(add)

        def end(row: int) -> Stmt:
            return vectors(lambda v: finish(row, v, sums, at(row, v)))

        rows = range(layout.rows)
        return sequence(allocate(sums), *map(begin, rows), *self._taps(place, update), *map(end, rows))

    def _along(self, v: Expr) -> Expr:
        """Where vector ``v`` of a tile begins: one that would go beyond the row ends with it (42 columns: at 0, 16,
        26).
        """
        layout, extent = self.layout, self.layout.window.x.extent
        is_whole_row = not layout.is_flat and layout.width == layout.stored
        if is_whole_row and layout.vectors * layout.width > extent:
            return tirx.min(v * index(layout.width), index(extent - layout.width))
        return v * index(layout.width)

    def _taps(self, place: Expr, update: Callable[[int, int, Expr, Expr], Stmt]) -> list[Stmt]:
        """The updates of a tile: per phase along x a loop over its taps, which keeps one column of taps in registers.

        Within a column it goes from source row to source row, so that each vector is loaded once. Unrolled along x as
        well, LLVM keeps all taps in registers and spills accumulators: a 5x5 window of 6 rows ran at 0.6 times the
        speed.
        """
        layout, x = self.layout, self.layout.window.x

        def phase(slot: int) -> Stmt:
            taps = [t for t in range(x.taps) if layout.tap(x, t)[0] == slot]
            places = [layout.tap(x, t)[1] for t in taps]
            tap_step, place_step = (taps[1] - taps[0], places[1] - places[0]) if len(taps) > 1 else (1, 1)

            def column(k: Expr) -> Stmt:
                source = place + index(slot * layout.phase_size + places[0]) + k * index(place_step)
                return self._column(source, index(taps[0]) + k * index(tap_step), update)

            return loop(len(taps), SERIAL, "tap", column)

        return [phase(slot) for slot in range(len(x.phases))]

    def _column(self, source: Expr, tap_x: Expr, update: Callable[[int, int, Expr, Expr], Stmt]) -> Stmt:
        """The updates by one column of taps, in the order of the source rows that they read."""
        layout, y, x = self.layout, self.layout.window.y, self.layout.window.x
        by_row: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for row, tap in layout.window.row_taps(layout.rows):
            slot, down = layout.tap(y, tap)
            by_row.setdefault((row + down, slot), []).append((row, tap))
        parts = []
        for (down, slot), users in sorted(by_row.items()):
            at = source + index(slot * len(x.phases) * layout.phase_size + down * layout.pitch)
            parts += [update(row, tap, tap_x, at) for row, tap in users]
        return sequence(*parts)

    def _term(self, element: Expr, tap_y: int, tap_x: Expr) -> Expr:
        """What one tap contributes: the anchor's value with ``element`` for what it reads through the window."""
        window = self.layout.window
        taps = self._bind_present((window.y.tap, index(tap_y)), (window.x.tap, tap_x))
        return substitute(replace_equal_loads(window.anchor.value, [(window.read, element)]), taps)

    def _bind_present(self, *axes: tuple[Expr | None, Expr]) -> Table:
        """The plane and those of ``axes`` that the window has."""
        present = [(variable, value) for variable, value in axes if variable is not None]
        return [*self.outer, *bind([v for v, _ in present], [value for _, value in present])]

    # --- stores -----------------------------------------------------------------------------------------------------
    def _store_row(self, result: Buffer, at: Expr, row: Expr) -> Stmt:
        """One output row, whose results lie in ``result`` from ``at`` on."""
        x, width = self.layout.window.x, self.layout.stored

        def part(number: Expr) -> Stmt:
            column = tile_start(number, width, x.extent)
            return self._write(result, at + column, row, column, width)

        parts = ceil_div(x.extent, width)
        return loop(parts, UNROLLED if parts <= FEW_PARTS else SERIAL, "part", part)

    def _write(self, result: Buffer, at: Expr, row: Expr, column: Expr, width: int) -> Stmt:
        """``width`` of the results from ``at`` on to ``row`` and ``column``, or what the epilogue makes of them."""
        window = self.layout.window
        kind = vector_kind(*(consumer.value for consumer in self.epilogue))

        def one(lane: Expr) -> Stmt:
            table = self._bind_present((window.x.variable, column + lane), (window.y.variable, row))
            return store_element(window.anchor, self.epilogue, load(result, [at + lane]), table)

        return loop(width, kind, "lane", one)


def _copy(width: int, source: Buffer, at: Expr, target: Buffer, to: Expr) -> Stmt:
    return loop(width, VECTORIZED, "lane", lambda lane: store(target, load(source, [at + lane]), [to + lane]))


def may_overrun(window: Window, epilogue: Sequence[Computation]) -> bool:
    """Whether vectors may go on into the next row: what they read and write there must be elements of that row.

    Worked example: bias[c] and residual[n, c, y, x] allow it, scale[x] does not, for it ends with the row. A table of
    twice the row's length is read no further, as a vector is less than two rows long. Divisors may be 0 behind a row.
    """
    if window.y.variable is None or not window.anchor.indices[-2].same_as(window.y.variable):
        return False
    for computation in epilogue:
        own = computation.spatial
        if _divides_by(computation.value, own[-1]):
            return False
        for item in computation.loads():
            is_own = len(item.indices) == len(own) and all(i.same_as(v) for i, v in zip(item.indices, own, strict=True))
            is_along_x = len(item.indices) == 1 and item.indices[0].same_as(own[-1])
            has_room = is_along_x and int(item.source.ty.shape[0]) >= 2 * window.x.extent
            if not is_own and not has_room and mentions(item, own[-1]):
                return False
    return True


def _divides_by(value: Expr, variable: Var) -> bool:
    """Whether a divisor in ``value`` depends on ``variable``."""
    divisions = nodes_in(value, (tirx.Div, tirx.Mod, tirx.FloorDiv, tirx.FloorMod))
    return any(mentions(node.b, variable) for node in divisions)
