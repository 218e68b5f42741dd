"""Emits a 3x3 convolution in Winograd's form (Lavin & Gray, CVPR 2016), all of its steps in one task's caches:

    parallel for task in groups x blocks of tiles x parts of the group's filters:
      for tile in block:                           # (m+2) x (m+2) inputs, a vector of channels at a time
        data[:, tile, channels] = B^T d B
      for panel of filters in part:
        for element in (m+2) x (m+2):              # that many products of matrices
          for rows in block:                       # register tiles of tiles x filters
            sums[rows, filters] += data[element, rows, channel] * weights[panel, element, channel, filters]
        for tile in block:
          out[m x m, filters] = epilogue(A^T sums A)

The weights G g G^T are made when the model is built. Blocks have tiles of all images, one after the other. Where the
last block is not full, the last tile stands in for what is missing, and is stored once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import reduce
from math import prod

from tvm_ext._tvm import Buffer, Expr, ForKind, Stmt, Var, tirx
from tvm_ext.analysis.computations import Computation
from tvm_ext.analysis.winograd import Convolution
from tvm_ext.cost.attention_time import FLOAT_BYTES
from tvm_ext.ir.build_ir import (
    SERIAL,
    UNROLLED,
    VECTORIZED,
    RegisterArray,
    allocate,
    below,
    bind,
    flat,
    if_all,
    index,
    load,
    loop,
    nest,
    new_buffer,
    parallel_cut,
    prefetch,
    sequence,
    split_index,
    store,
    vector_kind,
)
from tvm_ext.ir.stores import store_element
from tvm_ext.records.choice import ConstantPack
from tvm_ext.records.tuning import WinogradTile
from tvm_ext.support.arithmetic import ceil_div
from tvm_ext.support.toom_cook import TAPS, Rationals, transforms


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class WinogradKernel:
    """A kernel's statement, and the buffer of transformed weights that replaces a parameter, with how it is made."""

    statement: Stmt
    pack: tuple[Buffer, ConstantPack]


def emit_winograd(
    conv: Convolution,
    epilogue: Sequence[Computation],
    tile: WinogradTile,
    params: Sequence[Buffer],
    kind: ForKind,
    *,
    asks_ahead: bool,
) -> WinogradKernel:
    """The kernel in ``tile`` with its fused ``epilogue``, its tasks in a loop of ``kind``.

    With ``asks_ahead`` each product asks for the weights of the next one, which no core's own cache holds.
    """
    (blocks, lanes), channels = conv.extents(*conv.filters), conv.extents(*conv.channels)
    outer, lane = conv.strides(*conv.filters)
    panels = conv.count(conv.groups) * blocks // tile.vectors
    how = ConstantPack(
        param_index=next(i for i, param in enumerate(params) if param.same_as(conv.weights.source)),
        extents=(panels, TAPS, TAPS, *channels, tile.vectors, lanes),
        strides=(tile.vectors * outer, *conv.strides(*conv.taps, *conv.channels), outer, lane),
        winograd=tile.outputs,
    )
    weights = new_buffer(how.shape, "float32", f"{conv.weights.source.name}_winograd")
    loops = _WinogradLoops(conv=conv, epilogue=tuple(epilogue), tile=tile, weights=weights, asks_ahead=asks_ahead)
    return WinogradKernel(statement=loops.statement(kind), pack=(weights, how))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _WinogradTask:
    """The tiles from ``first`` on, and ``panels`` of a group's filters from ``panel`` on."""

    group: tuple[Expr, ...]  # the place along `Convolution.groups`
    first: Expr
    panel: Expr
    panels: int
    data: Buffer  # [element, tile, channel]
    sums: Buffer  # [element, tile, filter]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _WinogradLoops:
    conv: Convolution
    epilogue: tuple[Computation, ...]
    tile: WinogradTile
    weights: Buffer
    asks_ahead: bool

    @property
    def size(self) -> int:
        """Elements of a tile of inputs along an axis."""
        return self.tile.outputs + TAPS - 1

    @property
    def lanes(self) -> int:
        return self.conv.anchor.extent(self.conv.filters[1])

    @property
    def grid(self) -> list[int]:
        """The images' axes, and tiles along y and x."""
        conv = self.conv
        sides = [ceil_div(extent, self.tile.outputs) for extent in conv.extents(conv.y, conv.x)]
        return [*conv.extents(*conv.images), *sides]

    def statement(self, kind: ForKind) -> Stmt:
        conv, tile = self.conv, self.tile
        blocks = ceil_div(prod(self.grid), tile.tiles)
        panels = conv.extents(conv.filters[0])[0] // tile.vectors
        elements = self.size * self.size
        data = new_buffer([elements, tile.tiles, conv.count(conv.channels)], "float32", "data_winograd")
        sums = new_buffer([elements, tile.tiles, tile.vectors * self.lanes], "float32", "sums_winograd")

        def task(at: tuple[Expr, ...]) -> Stmt:
            *group, block, part = at
            own = _WinogradTask(
                group=tuple(group),
                first=block * index(tile.tiles),
                panel=part * index(panels // tile.parts),
                panels=panels // tile.parts,
                data=data,
                sums=sums,
            )
            return sequence(allocate(data), allocate(sums), self._inputs(own), self._panels(own))

        return parallel_cut([*conv.extents(*conv.groups), blocks, tile.parts], kind, "task", task)

    def _place(self, task: _WinogradTask, number: Expr) -> tuple[list[tuple[Var, Expr]], Expr, Expr]:
        """The image and the group, and the first output along y and x, of the tile ``number`` of the task."""
        count = prod(self.grid)
        whole = task.first + number
        last = whole if count % self.tile.tiles == 0 else tirx.min(whole, index(count - 1))
        *image, y, x = split_index(last, self.grid)
        where = bind((*self.conv.images, *self.conv.groups), (*image, *task.group))
        return where, y * index(self.tile.outputs), x * index(self.tile.outputs)

    # --- B^T d B ----------------------------------------------------------------------------------------------------
    def _inputs(self, task: _WinogradTask) -> Stmt:
        """The block's tiles of inputs, transformed: one vector of channels of a tile after another."""
        conv, matrix = self.conv, transforms(self.tile.outputs).inputs
        blocks, lanes = conv.extents(*conv.channels)
        held, half = (new_buffer([self.size, self.size, lanes], "float32", n, "local") for n in ("inputs", "half"))

        def vector(at: tuple[Expr, ...]) -> Stmt:
            number, block = at
            image, y, x = self._place(task, number)

            def read(i: int, j: int, lane: Expr) -> Expr:
                channel = [*image, *bind(conv.channels, (block, lane))]
                rows, columns = (self._inside(o, p, v) for o, p, v in ((y, i, conv.y), (x, j, conv.x)))
                return conv.source(channel, rows, columns)

            def write(i: int, j: int, value: Expr, lane: Expr) -> Stmt:
                element = index(i * self.size + j)
                return store(task.data, value, [element, number, block * index(lanes) + lane])

            fetched = self._each(self.size, self.size, lanes, lambda i, j, v: store(held, read(i, j, v), [i, j, v]))
            made = self._on_both_sides(matrix, lambda i, j, v: load(held, [index(i), index(j), v]), half, lanes, write)
            return sequence(allocate(held), allocate(half), fetched, *made)

        return nest([self.tile.tiles, blocks], SERIAL, ["tile", "channels"], vector)

    def _inside(self, first: Expr, offset: int, axis: Var) -> Expr:
        """``offset`` behind the first input of a tile, or the last input that there is: no output needs more."""
        extent = self.conv.anchor.extent(axis)
        at = first + index(offset)
        return at if extent % self.tile.outputs == 0 else tirx.min(at, index(extent + TAPS - 2))

    # --- products ---------------------------------------------------------------------------------------------------
    def _panels(self, task: _WinogradTask) -> Stmt:
        each = self.conv.anchor.extent(self.conv.filters[0]) // self.tile.vectors
        extents = (*self.conv.extents(*self.conv.groups), each)

        def panel(number: Expr) -> Stmt:
            own = task.panel + number
            here = flat((*task.group, own), extents)

            def element(at: tuple[Expr, ...]) -> Stmt:
                def rows(first: Expr) -> Stmt:
                    return self._register_tile(task, here, at, first * index(self.tile.rows))

                return loop(self.tile.tiles // self.tile.rows, SERIAL, "rows", rows)

            products = nest([self.size, self.size], SERIAL, ["element_y", "element_x"], element)
            return sequence(products, self._outputs(task, own))

        return loop(task.panels, SERIAL, "panel", panel)

    def _register_tile(self, task: _WinogradTask, panel: Expr, element: tuple[Expr, ...], first: Expr) -> Stmt:
        """``rows`` tiles by ``vectors`` vectors of filters, over all channels."""
        tile, lanes = self.tile, self.lanes
        flat = element[0] * index(self.size) + element[1]
        buffer = new_buffer([tile.rows, tile.vectors * lanes], "float32", "acc", "local")

        def walk(body: Callable[..., Stmt]) -> Stmt:
            def row(r: Expr) -> Stmt:
                def vector(v: Expr) -> Stmt:
                    return loop(lanes, VECTORIZED, "v", lambda lane: body(r, v * index(lanes) + lane, v, lane))

                return loop(tile.vectors, UNROLLED, "vector", vector)

            return loop(tile.rows, UNROLLED, "row", row)

        sums = RegisterArray(buffer, walk, lambda r, at, _v, _lane: (r, at))

        def step(channel: tuple[Expr, ...]) -> Stmt:
            block, c = channel
            flat_channel = block * index(self.conv.extents(*self.conv.channels)[1]) + c

            def term(r: Expr, _at: Expr, v: Expr, lane: Expr) -> Expr:
                weight = load(self.weights, [panel, *element, block, c, v, lane])
                return load(task.data, [flat, first + r, flat_channel]) * weight

            return sequence(*self._questions([panel, *element, block, c]), sums.accumulate(term))

        reduced = nest(self.conv.extents(*self.conv.channels), SERIAL, ["channels", "channel"], step)
        written = sums.write(lambda r, at, _v, _lane, value: store(task.sums, value, [flat, first + r, at]))
        return sequence(allocate(buffer), sums.fill(lambda *_: tirx.const(0.0, "float32")), reduced, written)

    def _questions(self, place: Sequence[Expr]) -> Iterator[Stmt]:
        """Prefetches of what the next element's product reads at this step: the same place, a matrix further on.

        Measured on Zen 5 with weights from memory, 512 channels on 7x7: 756 us without, 439 with them.
        """
        if self.asks_ahead:
            row = prod(int(extent) for extent in self.weights.ty.shape[-2:])
            matrix = row * self.conv.count(self.conv.channels)
            first = load(self.weights, [*place, index(0), index(0)])
            for number in range(self.tile.vectors):
                yield prefetch(first, (matrix + number * self.lanes) * FLOAT_BYTES)

    # --- A^T m A ----------------------------------------------------------------------------------------------------
    def _outputs(self, task: _WinogradTask, panel: Expr) -> Stmt:
        """The outputs of a panel of filters, stored through the epilogue."""
        conv, tile, lanes = self.conv, self.tile, self.lanes
        matrix = transforms(tile.outputs).outputs
        half = new_buffer([tile.outputs, self.size, lanes], "float32", "half", "local")
        result = new_buffer([tile.outputs, tile.outputs, lanes], "float32", "result", "local")
        kind = vector_kind(*(consumer.value for consumer in self.epilogue))
        heights, widths = conv.extents(conv.y, conv.x)

        def vector(at: tuple[Expr, ...]) -> Stmt:
            number, v = at
            image, y, x = self._place(task, number)

            def read(i: int, j: int, lane: Expr) -> Expr:
                return load(task.sums, [index(i * self.size + j), number, v * index(lanes) + lane])

            def stored(i: int, j: int) -> Stmt:
                row, column = y + index(i), x + index(j)
                filters = panel * index(tile.vectors) + v

                def one(lane: Expr) -> Stmt:
                    axes = (conv.y, conv.x, *conv.filters)
                    table = [*image, *bind(axes, (row, column, filters, lane))]
                    return store_element(conv.anchor, self.epilogue, load(result, [index(i), index(j), lane]), table)

                exists = (below(row, heights, tile.outputs), below(column, widths, tile.outputs))
                return if_all(exists, loop(lanes, kind, "lane", one))

            places = [(i, j) for i in range(tile.outputs) for j in range(tile.outputs)]
            made = self._on_both_sides(
                matrix, read, half, lanes, lambda i, j, value, lane: store(result, value, [i, j, lane])
            )
            body = sequence(allocate(half), allocate(result), *made, *(stored(i, j) for i, j in places))
            return if_all([below(task.first + number, prod(self.grid), tile.tiles)], body)

        return nest([tile.tiles, tile.vectors], SERIAL, ["tile", "vector"], vector)

    # --- M d M^T ------------------------------------------------------------------------------------------------------
    def _on_both_sides(
        self,
        matrix: Rationals,
        read: Callable[[int, int, Expr], Expr],
        half: Buffer,
        lanes: int,
        write: Callable[[int, int, Expr, Expr], Stmt],
    ) -> list[Stmt]:
        """``write(i, j, value, lane)`` for the elements of M d M^T: d by ``read``, M d kept in ``half``."""

        def first(i: int, j: int, lane: Expr) -> Stmt:
            return store(half, _dot(matrix[i], lambda k: read(k, j, lane)), [index(i), index(j), lane])

        def second(i: int, j: int, lane: Expr) -> Stmt:
            value = _dot(matrix[j], lambda k: load(half, [index(i), index(k), lane]))
            return write(i, j, value, lane)

        rows = len(matrix)
        return [self._each(rows, self.size, lanes, first), self._each(rows, rows, lanes, second)]

    @staticmethod
    def _each(rows: int, columns: int, lanes: int, body: Callable[[int, int, Expr], Stmt]) -> Stmt:
        """``body(i, j, lane)``, written out for each element of a small matrix, in vectors."""
        places = [(i, j) for i in range(rows) for j in range(columns)]
        parts = [loop(lanes, VECTORIZED, "lane", lambda lane, i=i, j=j: body(i, j, lane)) for i, j in places]  # type: ignore[misc]
        return sequence(*parts)


def _dot(row: Sequence[Fraction], read: Callable[[int], Expr]) -> Expr:
    """The sum of ``read(k)`` times what ``row`` has at ``k``, without products by 0 and 1."""
    terms = [
        (factor > 0, read(k) if abs(factor) == 1 else read(k) * tirx.const(float(abs(factor)), "float32"))
        for k, factor in sorted(enumerate(row), key=lambda item: item[1] < 0)
        if factor
    ]
    (is_added, first), *others = terms
    begin = first if is_added else -first
    return reduce(lambda total, term: total + term[1] if term[0] else total - term[1], others, begin)
