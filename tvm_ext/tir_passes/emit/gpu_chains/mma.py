"""Chains on matrix units: mma.sync after mma.sync, the results of one being the first factors of the next.

*In registers.* A warp has whole rows (Warp_N = N). What a lane holds of two 16 x 8 accumulators side by side is what it
holds of the 16 x 16 fragment of A that covers them: row g = lane // 4 in columns 2t and 2t + 1 (t = lane % 4), row
g + 8, then the same 8 columns on. Rounded to half, accumulators are fragments; no lane gives anything to another.

*In shared memory.* Warps share the columns. Each writes its part, rounded, to a tile whose 16-byte chunks are rotated
like those of every factor, so that a store of pairs and ldmatrix both meet all banks; the next product reads it as A.

*By wmma*, before sm_80, accumulators are opaque: fragment by fragment they go through a warp's floats in shared memory,
and from there, rounded, to that tile, whose rows are padded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from tvm_ext._tvm import Buffer, Expr, Stmt, tirx
from tvm_ext.analysis.gemm_form import TileSplit, uses_mma_sync, wmma_pitches
from tvm_ext.devices.gpu import FRAGMENT, WARP
from tvm_ext.ir.build_ir import SERIAL, UNROLLED, allocate, index, load, loop, nest, sequence, store
from tvm_ext.ir.matrix_units.mfma import Mfma
from tvm_ext.ir.matrix_units.operand import Factor
from tvm_ext.ir.matrix_units.shared import SharedTile, rows_apart, shared_tile
from tvm_ext.ir.matrix_units.warp import MMA_COLUMNS, MmaSync, Wmma, multiplier, rolled, unrolled_by_compiler
from tvm_ext.ir.matrix_units.warp_place import WarpPlace, place_of
from tvm_ext.ir.matrix_units.write import PIECE, TileCorner, write_tile
from tvm_ext.ir.simt_ir import gpu_buffer

from .parts import ChainParts, kept_values, with_planned_blocks

STAGING_PITCH = 24
"""Floats from row to row of a warp's fragment: rows one or two apart start at different halves of the banks."""


def mma_block(parts: ChainParts, block: Expr, thread: Expr) -> Stmt:
    """What a threadblock does: its rows of all products, one after the other."""
    products = _products(parts)
    first_row = block * index(parts.tile.rows)
    statements = [allocate(product.weights.buffer) for product in products[1:] if product.steps == 1]
    # factors that fit whole are on their way while the first product is computed
    statements += [
        parts.copy_weights(product.weights, product.position, index(0), thread)
        for product in products[1:]
        if product.steps == 1
    ]
    statements += _first(parts, products[0], first_row, thread)
    for before, item in pairwise(products):
        statements += _kept(parts, before, first_row, thread)
        statements += _next(parts, before, item, thread)
    last = products[-1]
    place = place_of(thread, last.mma.split)
    corner = TileCorner(batch=index(0), row=first_row + place.row, column=place.column)
    return sequence(*statements, *write_tile(last.mma, corner, place, thread, parts.last))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _MmaProduct:
    """A product's multiplier and factor, and where its values stay: of the last one nowhere."""

    position: int
    steps: int
    mma: MmaSync | Wmma
    weights: SharedTile
    held: Buffer | None
    kept: SharedTile | None


def _products(parts: ChainParts) -> list[_MmaProduct]:
    result = []
    for position, tile in enumerate(parts.tile.products):
        split = TileSplit(
            rows=parts.tile.rows,
            columns=tile.columns,
            depth=tile.depth,
            warp_rows=parts.tile.warp_rows(position),
            warp_columns=tile.columns // tile.across,
        )
        factor = dataclasses.replace(parts.operands[position][1], name=f"B{position}")
        last = position == len(parts.tile.products) - 1
        in_registers = parts.tile.residence == "registers"
        steps = [split.warp_rows // FRAGMENT, tile.columns // FRAGMENT, 8]
        mma = multiplier(split, factor.dtype, "float32", parts.device, str(position))
        assert not isinstance(mma, Mfma), "chains on matrix units are CUDA's alone"
        held = gpu_buffer(steps, factor.dtype, f"held{position}", "local")
        result.append(
            _MmaProduct(
                position=position,
                steps=tile.steps,
                mma=mma,
                weights=_tile(parts, factor, tile.columns, tile.depth),
                held=held if in_registers and not last else None,
                kept=_kept_tile(parts, position) if not in_registers and not last else None,
            )
        )
    return result


def _kept_tile(parts: ChainParts, position: int) -> SharedTile:
    """The values between two products in shared memory, rows of the next one's first factor."""
    factor: Factor = dataclasses.replace(parts.operands[position + 1][0], name=f"kept{position}", along_depth=True)
    return _tile(parts, factor, parts.tile.rows, parts.tile.products[position].columns)


def _tile(parts: ChainParts, factor: Factor, lines: int, depth: int) -> SharedTile:
    pitches = None
    if not uses_mma_sync(parts.device):
        pitches = wmma_pitches(parts.device, along_depth=factor.along_depth)
    return shared_tile(factor, lines, depth, parts.scope, pitches)


def _first(parts: ChainParts, product: _MmaProduct, first_row: Expr, thread: Expr) -> Sequence[Stmt]:
    """The first product: both factors step by step through shared memory."""
    tile = parts.tile.products[0]
    rows = _tile(parts, parts.operands[0][0], parts.tile.rows, tile.depth)
    place = place_of(thread, product.mma.split)

    def step(k: Expr) -> Stmt:
        return sequence(
            allocate(rows.buffer),
            allocate(product.weights.buffer),
            parts.copy_rows(rows, first_row, k, thread),
            parts.copy_weights(product.weights, 0, k, thread),
            product.mma.multiply(rows, product.weights, place),
        )

    cleared = with_planned_blocks(product.mma.clear(), parts)
    steps = loop(tile.steps, SERIAL, "k_outer", step)
    return [allocate(product.mma.accumulators), cleared, steps if isinstance(product.mma, MmaSync) else rolled(steps)]


def _kept(parts: ChainParts, product: _MmaProduct, first_row: Expr, thread: Expr) -> Sequence[Stmt]:
    """The epilogue of a product whose values stay on the chip."""
    if isinstance(product.mma, Wmma):
        return _kept_by_wmma(parts, product, product.mma, first_row, thread)
    split, values = product.mma.split, kept_values(parts, product.position)
    place = place_of(thread, split)

    def pair(at: tuple[Expr, ...]) -> Stmt:
        """Two neighbouring columns of a lane: of fragment (i, k) those of 8 columns c, 8 rows h."""
        i, k, c, h = at
        row = place.row + i * index(FRAGMENT) + h * index(8) + tirx.floordiv(place.lane, index(4))
        column = place.column + k * index(FRAGMENT) + c * index(MMA_COLUMNS)
        column += tirx.floormod(place.lane, index(4)) * index(2)

        def element(v: Expr) -> Expr:
            return load(product.mma.accumulators, [i, k * index(2) + c, h * index(2) + v])

        def put(v: Expr, value: Expr) -> Stmt:
            if product.held is not None:
                return store(product.held, value, [i, k, c * index(4) + h * index(2) + v])
            assert product.kept is not None
            chunk = tirx.floordiv(place.column, index(8)) + k * index(2) + c
            start = product.kept.chunk_position(row, chunk)
            return store(product.kept.buffer, value, [start + tirx.floormod(place.lane, index(4)) * index(2) + v])

        return values.keep((first_row + row, column), 2, element, put)

    kept = product.held if product.held is not None else product.kept.buffer if product.kept else None
    assert kept is not None
    sizes = (split.warp_rows // FRAGMENT, split.warp_columns // FRAGMENT, 2, 2)
    return [allocate(kept), unrolled_by_compiler(nest(sizes, UNROLLED, ("i", "k", "c", "h"), pair))]


def _kept_by_wmma(parts: ChainParts, product: _MmaProduct, wmma: Wmma, first_row: Expr, thread: Expr) -> Sequence[Stmt]:
    """Each fragment through the warp's floats to the tile of values; a lane takes four columns of two rows.

    Four rows that half a warp writes together are as far apart as their pitch asks for (`rows_apart`).
    """
    assert product.kept is not None
    kept, values = product.kept, kept_values(parts, product.position)
    place = place_of(thread, wmma.split)
    # a fragment of floats for each warp; in another scope than the tiles, like that of single products
    staging = gpu_buffer([parts.tile.warps * FRAGMENT * STAGING_PITCH], "float32", "C_shared", "shared.dyn")
    base = tirx.floordiv(thread, index(WARP)) * index(FRAGMENT * STAGING_PITCH)
    apart = rows_apart(FRAGMENT // kept.chunk, kept.pitch // kept.chunk) or 1
    lane_row = tirx.floordiv(place.lane, index(PIECE))
    row_of_eight = tirx.floormod(lane_row, index(4)) * index(apart) + tirx.floordiv(lane_row, index(4)) * index(
        4 if apart == 1 else 1
    )
    column_of_fragment = tirx.floormod(place.lane, index(PIECE)) * index(PIECE)

    def fragment(at: tuple[Expr, ...]) -> Stmt:
        i, j = at

        def half(u: Expr) -> Stmt:
            within = u * index(8) + row_of_eight
            row = place.row + i * index(FRAGMENT) + within
            column = place.column + j * index(FRAGMENT) + column_of_fragment
            start = base + within * index(STAGING_PITCH) + column_of_fragment

            def put(v: Expr, value: Expr) -> Stmt:
                return store(kept.buffer, value, [row * index(kept.pitch) + column + v])

            return values.keep((first_row + row, column), PIECE, lambda v: load(staging, [start + v]), put)

        stored = wmma.store(staging.access_ptr("w", offset=base), STAGING_PITCH, i, j)
        return sequence(stored, loop(2, UNROLLED, "u", half))

    return [allocate(kept.buffer), allocate(staging), nest((wmma.rows, wmma.columns), UNROLLED, ("i", "j"), fragment)]


def _next(parts: ChainParts, before: _MmaProduct, product: _MmaProduct, thread: Expr) -> Sequence[Stmt]:
    """A later product: its first factor is what the one before has kept."""
    place = place_of(thread, product.mma.split)
    statements = [allocate(product.mma.accumulators), product.mma.clear()]
    if product.steps == 1:
        return [*statements, _multiply(before, product, index(0), place)]

    def step(k: Expr) -> Stmt:
        return sequence(
            allocate(product.weights.buffer),
            parts.copy_weights(product.weights, product.position, k, thread),
            _multiply(before, product, k * index(product.mma.split.depth // FRAGMENT), place),
        )

    # what is held in registers is addressed by constants, so that each step is code of its own
    kind = SERIAL if before.held is None else UNROLLED
    steps = loop(product.steps, kind, f"k_outer{product.position}", step)
    return [*statements, steps if before.held is None else unrolled_by_compiler(steps)]


def _multiply(before: _MmaProduct, product: _MmaProduct, first: Expr, place: WarpPlace) -> Stmt:
    """Add one step's products; ``first`` of the fragments along the reduction is the step's."""
    if before.held is not None:
        assert isinstance(product.mma, MmaSync)
        return product.mma.multiply_held(before.held, first, product.weights, place)
    assert before.kept is not None
    return product.mma.multiply(dataclasses.replace(before.kept, first=first), product.weights, place)
