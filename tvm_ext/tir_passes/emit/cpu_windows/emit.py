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
from math import prod

from tvm_ext._tvm import Buffer, Expr, ForKind, Stmt, structural_equal, tirx
from tvm_ext.analysis.computations import Computation, mentions, replace_loads, substitute
from tvm_ext.analysis.window import Window
from tvm_ext.cost.window_layouts import WindowLayout
from tvm_ext.ir.build_ir import (
    SERIAL,
    UNROLLED,
    VECTORIZED,
    allocate,
    as_index,
    bind,
    combine,
    index,
    load,
    loop,
    new_buffer,
    sequence,
    split_index,
    store,
    tile_count,
    tile_size,
    tile_start,
    vector_kind,
)
from tvm_ext.ir.epilogue import store_element
from tvm_ext.support.arithmetic import ceil_div

from .fill import Table, stage_band

FEW_PARTS = 4
"""Vectors of a row written out one by one."""

STACK_BYTES = 64 * 1024
"""Scratch memory up to this size lives on the thread's stack, a larger one in its workspace."""


def emit_window(layout: WindowLayout, epilogue: Sequence[Computation], kind: ForKind) -> Stmt:
    """The loops of ``layout``'s kernel with its fused ``epilogue``, in an outer loop of ``kind``."""
    window = layout.window
    extents = [*(window.anchor.extent(v) for v in window.outer), layout.bands]
    tasks = prod(extents)
    data = _scratch(layout.phase_size * len(window.y.phases) * len(window.x.phases), window.dtype, "data")

    def task(number: Expr) -> Stmt:
        *plane, band = split_index(number, extents)
        outer = bind(window.outer, plane)
        start = band * index(layout.band)
        count = tile_size(window.y.extent, layout.band, start)
        compute = _flat if layout.is_flat else _by_rows
        return sequence(
            allocate(data),
            *stage_band(layout, data, outer, start, count),
            compute(layout, epilogue, data, outer, start, count),
        )

    return loop(tasks, kind, "task", task)


def _scratch(size: int, dtype: str, name: str) -> Buffer:
    return new_buffer([size], dtype, name, "local" if size * 4 <= STACK_BYTES else "global")


# --- register tiles ------------------------------------------------------------------------------------------------
def _by_rows(
    layout: WindowLayout, epilogue: Sequence[Computation], data: Buffer, outer: Table, start: Expr, count: int | Expr
) -> Stmt:
    """Tiles of ``rows`` x ``vectors`` that end with the band and with the row, stored through the epilogue."""
    x = layout.window.x
    is_narrow = layout.width > layout.stored
    chunk = min(layout.vectors * layout.width, x.extent)
    spill = new_buffer([layout.rows * layout.width], layout.window.dtype, "spill", "local")
    spilled = range(layout.rows - 1 if layout.overruns else 0, layout.rows) if is_narrow else range(0)

    def tile(group: Expr, part: Expr) -> Stmt:
        first = tile_start(group, layout.rows, count)
        row = start + first
        column = tile_start(part, chunk, x.extent)

        def finish(r: int, v: Expr, acc: Buffer, at: Expr) -> Stmt:
            if r in spilled:
                return _copy(layout.width, acc, at, spill, at)
            place = (row + index(r), column + _along(layout, v))
            return _write(layout, epilogue, lambda lane: load(acc, [at + lane]), outer, place, layout.width)

        place = first * index(layout.pitch) + column
        rows = [_store_row(layout, epilogue, spill, index(r * layout.width), outer, row + index(r)) for r in spilled]
        buffers = [allocate(spill)] if spilled else []
        return sequence(*buffers, _tile(layout, data, outer, place, finish), *rows)

    parts = ceil_div(x.extent, chunk)
    groups = tile_count(count, layout.rows)
    return loop(groups, SERIAL, "group", lambda g: loop(parts, SERIAL, "part", lambda p: tile(g, p)))


def _flat(
    layout: WindowLayout, epilogue: Sequence[Computation], data: Buffer, outer: Table, start: Expr, count: int | Expr
) -> Stmt:
    """Tiles along all places of the band, then the rows out of them through the epilogue."""
    x = layout.window.x
    result = _scratch(layout.result_size, layout.window.dtype, "result")
    chunk = layout.vectors * layout.width

    def tile(number: Expr) -> Stmt:
        place = number * index(chunk)

        def finish(_row: int, v: Expr, acc: Buffer, at: Expr) -> Stmt:
            return _copy(layout.width, acc, at, result, place + v * index(layout.width))

        return _tile(layout, data, outer, place, finish)

    def row(number: Expr) -> Stmt:
        return _store_row(layout, epilogue, result, number * index(layout.pitch), outer, start + number)

    places = (count - 1) * layout.pitch + x.extent
    return sequence(
        allocate(result),
        loop(tile_count(places, chunk), SERIAL, "tile", tile),
        loop(count, SERIAL, "row", row),
    )


def _copy(width: int, source: Expr, at: Expr, target: Expr, to: Expr) -> Stmt:
    return loop(width, VECTORIZED, "lane", lambda lane: store(target, load(source, [at + lane]), [to + lane]))


def _store_row(
    layout: WindowLayout, epilogue: Sequence[Computation], result: Buffer, at: Expr, outer: Table, row: Expr
) -> Stmt:
    """One output row, whose results lie in ``result`` from ``at`` on."""
    x = layout.window.x

    def part(number: Expr) -> Stmt:
        column = tile_start(number, layout.stored, x.extent)
        place = at + column
        return _write(layout, epilogue, lambda lane: load(result, [place + lane]), outer, (row, column), layout.stored)

    parts = ceil_div(x.extent, layout.stored)
    kind = UNROLLED if parts <= FEW_PARTS else SERIAL
    return loop(parts, kind, "part", part)


def _tile(
    layout: WindowLayout,
    data: Buffer,
    outer: Table,
    place: Expr,
    finish: Callable[[int, Expr, Buffer, Expr], Stmt],
) -> Stmt:
    """One register tile at ``place``; ``finish(row, vector, accumulators, first lane)`` stores one of its vectors."""
    window = layout.window
    width = layout.width
    acc = new_buffer([layout.rows * layout.vectors * width], window.dtype, "acc", "local")

    def at(row: int, v: Expr) -> Expr:
        return index(row * layout.vectors * width) + v * index(width)

    def vectors(body: Callable[[Expr], Stmt]) -> Stmt:
        return loop(layout.vectors, UNROLLED, "vector", body)

    def initial(row: int) -> Stmt:
        return vectors(
            lambda v: loop(width, VECTORIZED, "lane", lambda lane: store(acc, window.anchor.init, [at(row, v) + lane]))
        )

    def update(row: int, tap_y: int, tap_x: Expr, source: Expr) -> Stmt:
        def one(v: Expr) -> Stmt:
            def lane_body(lane: Expr) -> Stmt:
                element = load(data, [source + _along(layout, v) + lane])
                to = [at(row, v) + lane]
                value = _value(window, element, outer, tap_y, tap_x)
                return store(acc, combine(window.anchor.combiner, load(acc, to), value), to)

            return loop(width, VECTORIZED, "lane", lane_body)

        return vectors(one)

    return sequence(
        allocate(acc),
        *(initial(row) for row in range(layout.rows)),
        *_taps(layout, place, update),
        *(vectors(lambda v, row=row: finish(row, v, acc, at(row, v))) for row in range(layout.rows)),  # type: ignore[misc]
    )


def _along(layout: WindowLayout, v: Expr) -> Expr:
    """Where vector ``v`` of a tile begins: one that would go beyond the row ends with it (42 columns: at 0, 16, 26)."""
    is_whole_row = not layout.is_flat and layout.width == layout.stored
    if is_whole_row and layout.vectors * layout.width > layout.window.x.extent:
        return tirx.min(v * index(layout.width), index(layout.window.x.extent - layout.width))
    return v * index(layout.width)


def _taps(layout: WindowLayout, place: Expr, update: Callable[[int, int, Expr, Expr], Stmt]) -> list[Stmt]:
    """The updates of a tile: per phase along x a loop over its taps, which keeps one column of taps in registers.

    Within a column it goes from source row to source row, so that each vector is loaded once. Unrolled along x as well,
    LLVM keeps all taps in registers and spills accumulators: a 5x5 window of 6 rows ran at 0.6 times the speed.
    """
    x = layout.window.x
    statements = []
    for slot in range(len(x.phases)):
        taps = [t for t in range(x.taps) if layout.tap(x, t)[0] == slot]
        places = [layout.tap(x, t)[1] for t in taps]
        tap_step, place_step = (taps[1] - taps[0], places[1] - places[0]) if len(taps) > 1 else (1, 1)

        def column(k: Expr, at: tuple[int, ...] = (slot, taps[0], tap_step, places[0], place_step)) -> Stmt:
            phase, first, step, offset, move = at
            source = place + index(phase * layout.phase_size + offset) + k * index(move)
            return _column(layout, source, index(first) + k * index(step), update)

        statements.append(loop(len(taps), SERIAL, "tap", column))
    return statements


def _column(layout: WindowLayout, source: Expr, tap_x: Expr, update: Callable[[int, int, Expr, Expr], Stmt]) -> Stmt:
    """The updates by one column of taps, in the order of the source rows that they read."""
    y, x = layout.window.y, layout.window.x
    by_row: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for tap in range(y.taps):
        slot, down = layout.tap(y, tap)
        for row in range(layout.rows):
            by_row.setdefault((row + down, slot), []).append((row, tap))
    parts = []
    for (down, slot), users in sorted(by_row.items()):
        at = source + index(slot * len(x.phases) * layout.phase_size + down * layout.pitch)
        parts += [update(row, tap, tap_x, at) for row, tap in users]
    return sequence(*parts)


def _value(window: Window, element: Expr, outer: Table, tap_y: int, tap_x: Expr) -> Expr:
    """What one tap contributes: the anchor's value with ``element`` for what it reads through the window."""
    taps = ((window.y.tap, index(tap_y)), (window.x.tap, tap_x))
    table = [*outer, *((v, as_index(tap, v)) for v, tap in taps if v is not None)]
    others = replace_loads(window.anchor.value, lambda item: element if structural_equal(item, window.read) else item)
    return substitute(others, table)


# --- stores --------------------------------------------------------------------------------------------------------
def _write(
    layout: WindowLayout,
    epilogue: Sequence[Computation],
    element: Callable[[Expr], Expr],
    outer: Table,
    place: tuple[Expr, Expr],
    width: int,
) -> Stmt:
    """``width`` results at ``place``, row and column of the plane, or what each epilogue computation makes of them."""
    row, column = place
    window = layout.window
    kind = vector_kind(*(consumer.value for consumer in epilogue))

    def one(lane: Expr) -> Stmt:
        at = ((window.x.variable, column + lane), (window.y.variable, row))
        table = [*outer, *((v, as_index(x, v)) for v, x in at if v is not None)]
        return store_element(window.anchor, epilogue, element(lane), table)

    return loop(width, kind, "lane", one)


def may_overrun(window: Window, epilogue: Sequence[Computation]) -> bool:
    """Whether vectors may go on into the next row: what they read and write there must be elements of that row.

    Worked example: bias[c] and residual[n, c, y, x] allow it, scale[x] does not, for it ends with the row. A table of
    twice the row's length is read no further, as a vector is less than two rows long.
    """
    if window.y.variable is None or not window.anchor.indices[-2].same_as(window.y.variable):
        return False
    for computation in epilogue:
        own = computation.spatial
        for item in computation.loads():
            is_own = len(item.indices) == len(own) and all(i.same_as(v) for i, v in zip(item.indices, own, strict=True))
            is_along_x = len(item.indices) == 1 and item.indices[0].same_as(own[-1])
            has_room = is_along_x and int(item.source.ty.shape[0]) >= 2 * window.x.extent
            if not is_own and not has_room and mentions(item, own[-1]):
                return False
    return True
