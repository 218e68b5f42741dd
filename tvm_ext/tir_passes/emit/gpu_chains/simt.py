"""Chains on vector units: in float32, whatever the tensors' type, the values between two products in shared memory.

``across`` threads share a row; each has every TR-th row (TR: threads along the rows) and 4 columns of every 4 x across.
All tiles are rows in shared memory: of the first factor and of the values between along the reduction, a thread reading
4 steps of a row at once; of the second factor along the columns. Pitches let eight threads meet all banks
(`gpu_chain_tiles.row_pitch`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from math import gcd

from tvm_ext._tvm import Buffer, Expr, Stmt, tirx
from tvm_ext.cost.gpu_chain_tiles import VECTOR, row_pitch
from tvm_ext.ir.build_ir import (
    SERIAL,
    UNROLLED,
    VECTORIZED,
    accumulate,
    allocate,
    cast_to,
    index,
    load,
    loop,
    nest,
    sequence,
    store,
)
from tvm_ext.ir.matrix_units.operand import Factor
from tvm_ext.ir.matrix_units.shared import SharedTile
from tvm_ext.ir.simt_ir import gpu_buffer, unrolled

from .parts import ChainParts, kept_values, with_planned_blocks

ACCUMULATED = "float32"


def simt_block(parts: ChainParts, block: Expr, thread: Expr) -> Stmt:
    """What a threadblock does: its rows of all products, one after the other."""
    place = _place(parts, block, thread)
    products = [_product(parts, position) for position in range(len(parts.tile.products))]
    rows = _row_tile(parts, _in_floats(parts.operands[0][0], "A", along_depth=True), parts.tile.products[0].depth)
    statements = [allocate(products[0].sums), with_planned_blocks(products[0].clear(), parts)]

    def first(k: Expr) -> Stmt:
        return sequence(
            allocate(rows.buffer),
            allocate(products[0].weights.buffer),
            parts.copy_rows(rows, place.first_row, k, thread),
            parts.copy_weights(products[0].weights, 0, k, thread),
            products[0].multiply(rows, index(0), place),
        )

    statements.append(loop(parts.tile.products[0].steps, SERIAL, "k_outer", first))
    for position, product in enumerate(products[1:], start=1):
        before = products[position - 1]
        factor = _in_floats(parts.operands[position][0], f"kept{position - 1}", along_depth=True)
        kept = _row_tile(parts, factor, parts.tile.products[position - 1].columns)
        statements += [allocate(kept.buffer), _keep(parts, position - 1, before, kept, place)]
        statements += [allocate(product.sums), product.clear(), _later(parts, position, product, kept, place, thread)]
    return sequence(*statements, _write(parts, products[-1], place))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _ThreadPlace:
    """Which rows and columns a thread has: rows ``row + i * down``, columns ``4 * (column + j * across) + v``."""

    first_row: Expr
    row: Expr
    column: Expr
    down: int
    across: int

    def row_at(self, i: Expr) -> Expr:
        return self.row + i * index(self.down)

    def column_at(self, j: Expr) -> Expr:
        return self.column * index(VECTOR) + j * index(VECTOR * self.across)


def _place(parts: ChainParts, block: Expr, thread: Expr) -> _ThreadPlace:
    across = parts.tile.products[0].across
    return _ThreadPlace(
        first_row=block * index(parts.tile.rows),
        row=tirx.floordiv(thread, index(across)),
        column=tirx.floormod(thread, index(across)),
        down=parts.tile.threads // across,
        across=across,
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _SimtProduct:
    """A product's sums, [rows of a thread, vectors of 4 columns, 4], its operands in registers, its second factor."""

    sums: Buffer
    row_values: Buffer
    column_values: Buffer
    weights: SharedTile

    @property
    def shape(self) -> tuple[int, int]:
        rows, vectors, _ = (int(size) for size in self.sums.ty.shape)
        return rows, vectors

    def clear(self) -> Stmt:
        zero = tirx.const(0, ACCUMULATED)
        return nest((*self.shape, VECTOR), UNROLLED, ("i", "j", "v"), lambda at: store(self.sums, zero, at))

    def multiply(self, rows: SharedTile, first: Expr, place: _ThreadPlace) -> Stmt:
        """Add the products of one step: of ``rows`` from element ``first`` on, of the second factor from the start."""
        own_rows, vectors = self.shape

        def read(target: Buffer, number: Expr, source: SharedTile, start: Expr) -> Stmt:
            """Four neighbours to the vector ``number`` of ``target``."""

            def lane(v: Expr) -> Stmt:
                return store(target, load(source.buffer, [start + v]), [number, v])

            return loop(VECTOR, VECTORIZED, "v", lane)

        def read_row(i: Expr, at: Expr) -> Stmt:
            return read(self.row_values, i, rows, place.row_at(i) * index(rows.pitch) + at)

        def read_columns(j: Expr, at: Expr) -> Stmt:
            return read(self.column_values, j, self.weights, at * index(self.weights.pitch) + place.column_at(j))

        def add(u: Expr, i: Expr, j: Expr, v: Expr) -> Stmt:
            product = load(self.row_values, [i, u]) * load(self.column_values, [j, v])
            return accumulate(self.sums, [i, j, v], product)

        def one(u: Expr, k: Expr) -> Stmt:
            return sequence(
                unrolled(vectors, "j", lambda j: read_columns(j, k * index(VECTOR) + u)),
                _nest((own_rows, vectors, VECTOR), lambda i, j, v: add(u, i, j, v)),
            )

        def four(k: Expr) -> Stmt:
            return sequence(
                unrolled(own_rows, "i", lambda i: read_row(i, first + k * index(VECTOR))),
                unrolled(VECTOR, "u", lambda u: one(u, k)),
            )

        steps = loop(self.weights.depth_count // VECTOR, SERIAL, "k_inner", four)
        return sequence(allocate(self.row_values), allocate(self.column_values), steps)


def _nest(extents: tuple[int, int, int], body: Callable[[Expr, Expr, Expr], Stmt]) -> Stmt:
    a, b, c = extents
    return unrolled(a, "i", lambda i: unrolled(b, "j", lambda j: unrolled(c, "v", lambda v: body(i, j, v))))


def _product(parts: ChainParts, position: int) -> _SimtProduct:
    tile = parts.tile.products[position]
    rows = parts.tile.rows * tile.across // parts.tile.threads
    vectors = tile.columns // tile.across // VECTOR
    factor = _in_floats(parts.operands[position][1], f"B{position}", along_depth=False)
    return _SimtProduct(
        sums=gpu_buffer([rows, vectors, VECTOR], ACCUMULATED, f"sums{position}", "local"),
        row_values=gpu_buffer([rows, VECTOR], ACCUMULATED, f"row_values{position}", "local"),
        column_values=gpu_buffer([vectors, VECTOR], ACCUMULATED, f"column_values{position}", "local"),
        # steps of the reduction as rows of all columns, not padded: threads read them side by side
        weights=_tile(factor, tile.columns, tile.depth, tile.columns),
    )


def _in_floats(factor: Factor, name: str, *, along_depth: bool) -> Factor:
    """The factor as it is staged under ``name``: float32, along the reduction or its lines, turned where need be."""
    turned = factor.lanes_along_depth != along_depth
    wide = factor.dtype == ACCUMULATED
    return dataclasses.replace(
        factor,
        name=name,
        dtype=ACCUMULATED,
        value=cast_to(factor.value, ACCUMULATED),
        along_depth=along_depth,
        vector=1 if turned else gcd(factor.vector, VECTOR),
        plain=factor.plain and wide,
    )


def _row_tile(parts: ChainParts, factor: Factor, row: int) -> SharedTile:
    """Rows of the block, ``row`` elements of the reduction each."""
    return _tile(factor, parts.tile.rows, row, row_pitch(row, parts.tile.products[0].across))


def _tile(factor: Factor, lines: int, depth: int, pitch: int) -> SharedTile:
    count = pitch * (lines if factor.along_depth else depth)
    return SharedTile(
        operand=factor,
        buffer=gpu_buffer([count], ACCUMULATED, f"{factor.name}_shared", "shared"),
        line_count=lines,
        depth_count=depth,
        pitch=pitch,
        swizzled=False,
    )


def _keep(parts: ChainParts, position: int, product: _SimtProduct, kept: SharedTile, place: _ThreadPlace) -> Stmt:
    """The epilogue of a product whose values stay in shared memory, where four columns are stored at once."""
    values = kept_values(parts, position)
    piece = gpu_buffer([VECTOR], ACCUMULATED, "piece", "local")

    def four(at: tuple[Expr, ...]) -> Stmt:
        i, j = at
        row, column = place.row_at(i), place.column_at(j)

        def put(v: Expr, value: Expr) -> Stmt:
            return store(piece, cast_to(value, ACCUMULATED), [v])

        start = row * index(kept.pitch) + column
        return sequence(
            allocate(piece),
            values.keep((place.first_row + row, column), VECTOR, lambda v: load(product.sums, [i, j, v]), put),
            loop(VECTOR, VECTORIZED, "v", lambda v: store(kept.buffer, load(piece, [v]), [start + v])),
        )

    return nest(product.shape, UNROLLED, ("i", "j"), four)


def _later(
    parts: ChainParts, position: int, product: _SimtProduct, kept: SharedTile, place: _ThreadPlace, thread: Expr
) -> Stmt:
    """A later product: its second factor step by step, its first one where it was kept."""
    tile = parts.tile.products[position]

    def step(k: Expr) -> Stmt:
        return sequence(
            allocate(product.weights.buffer),
            parts.copy_weights(product.weights, position, k, thread),
            product.multiply(kept, k * index(tile.depth), place),
        )

    return loop(tile.steps, SERIAL, f"k_outer{position}", step)


def _write(parts: ChainParts, product: _SimtProduct, place: _ThreadPlace) -> Stmt:
    to = parts.last

    def four(at: tuple[Expr, ...]) -> Stmt:
        i, j = at
        row, column = place.first_row + place.row_at(i), place.column_at(j)
        return to.store_piece(index(0), row, column, VECTOR, lambda v: load(product.sums, [i, j, v]))

    return nest(product.shape, UNROLLED, ("i", "j"), four)
