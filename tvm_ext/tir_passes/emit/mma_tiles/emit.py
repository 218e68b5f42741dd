"""Tensor-core kernels from rPrograms: matrix products, batched or not, and convolutions as implicit GEMM (paper §4).

A threadblock computes the L1 tile of the output, its warps the L0 tiles in it. Step by step along the reduction all
threads copy both factors' tiles to shared memory, 16 bytes at a time where memory allows, and the warps multiply them.
Where the tiles are too few for the device, blocks share a tile's reduction (split-K): partial sums go to a workspace
that a second kernel adds up in a fixed order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, gcd

from tvm_ext._tvm import Buffer, Expr, Stmt, tirx
from tvm_ext.analysis.computation_exprs import itemsize_bytes
from tvm_ext.analysis.computations import Computation
from tvm_ext.analysis.gemm_form import (
    ACCUMULATORS,
    GemmForm,
    TileSplit,
    fragment_sides,
    gemm_form,
    reduction_step,
    split_of,
    supports_mma,
    uses_mfma,
    uses_wmma,
    wmma_pitches,
)
from tvm_ext.analysis.tensor_expr import TensorExpr
from tvm_ext.cost.mma_model import ACCUMULATOR_BYTES, SPARE_REGISTERS, block_use, resident_blocks, thread_registers
from tvm_ext.cost.product_counts import grid_group
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.devices.occupancy import blocks_per_unit, max_block_threads, shared_limit_bytes, static_shared_bytes
from tvm_ext.errors import IllegalRewrite
from tvm_ext.ir.build_ir import (
    SERIAL,
    UNROLLED,
    VECTORIZED,
    accumulate,
    allocate,
    below,
    if_all,
    index,
    load,
    loop,
    sequence,
    store,
)
from tvm_ext.ir.matrix_units.mfma import in_words, instruction_of
from tvm_ext.ir.matrix_units.operand import Factor, read_operands
from tvm_ext.ir.matrix_units.shared import SharedTile, TileOrigin, copy_tile, shared_tile
from tvm_ext.ir.matrix_units.warp import MmaSync, Wmma, multiplier, rolled
from tvm_ext.ir.matrix_units.warp_place import place_of
from tvm_ext.ir.matrix_units.write import (
    PIECE,
    Destination,
    TileCorner,
    output_destination,
    staging_elements,
    workspace_destination,
    write_tile,
)
from tvm_ext.ir.simt_ir import SimtKernel, gpu_buffer, launch, with_blocks_per_unit
from tvm_ext.records.rprogram import RProgram
from tvm_ext.support.arithmetic import ceil_div

__all__ = ["emit_mma_tile", "supports_mma"]

REDUCE_THREADS = 256  # a choice: a block's threads where partial sums are added up, eight warps

SMALL_PLAN = 72
"""Registers of a thread up to which ptxas is told how many blocks are planned."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GemmGrid:
    """``rows`` x ``columns`` tiles for each batch, each computed by ``splits`` blocks that share its reduction.

    Tiles are taken in groups of ``group`` rows, column by column: blocks that run at the same time then share panels of
    both factors, which stay in the device's cache. Worked example: 108 blocks of an 32 x 32 grid read 4 panels of rows
    and 32 of columns in row-major order, 8 and 14 in groups of 8 rows.
    """

    batch: int
    rows: int
    columns: int
    splits: int
    group: int

    @property
    def blocks(self) -> int:
        return self.batch * self.rows * self.columns * self.splits


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BlockPlace:
    """Which tile a block computes, and which share of its reduction."""

    batch: Expr
    row: Expr
    column: Expr
    split: Expr


def place_block(grid: GemmGrid, block: Expr) -> BlockPlace:
    """The place of ``block`` in ``range(grid.blocks)``: batches and splits outermost."""
    tiles = grid.rows * grid.columns
    outer, tile = _divide(block, tiles, grid.batch * grid.splits)
    split, batch = _divide(outer, grid.batch, grid.splits)
    group, within = _divide(tile, grid.group * grid.columns, ceil_div(grid.rows, grid.group))
    height: Expr = index(grid.group)
    if grid.rows % grid.group:  # the last group has fewer rows
        height = tirx.min(height, index(grid.rows) - group * index(grid.group))
    elif grid.group == 1:
        return BlockPlace(batch=batch, row=group, column=within, split=split)
    row = group * index(grid.group) + tirx.floormod(within, height)
    return BlockPlace(batch=batch, row=row, column=tirx.floordiv(within, height), split=split)


def _divide(value: Expr, size: int, count: int) -> tuple[Expr, Expr]:
    """(value // size, value % size) of a value below ``size * count``."""
    if count == 1:
        return index(0), value
    if size == 1:
        return value, index(0)
    return tirx.floordiv(value, index(size)), tirx.floormod(value, index(size))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Product:
    """All that the kernel's parts need to know of the operator and of its program."""

    computation: Computation
    form: GemmForm
    operands: tuple[Factor, Factor]
    extents: tuple[int, int, int, int]  # batch, rows, columns, reduction
    split: TileSplit
    grid: GemmGrid
    device: DeviceSpec
    tiles: tuple[SharedTile, SharedTile]
    accumulator: str

    @property
    def steps(self) -> int:
        """Reduction steps of one block: all of them, or its share."""
        return ceil(self.extents[3] / (self.split.depth * self.grid.splits))

    @property
    def bounds(self) -> tuple[int | None, int | None, int | None]:
        """Ends of rows, columns and reduction that tiles cross, None where they fit exactly."""
        _, rows, columns, depth = self.extents
        shared = self.steps * self.split.depth * self.grid.splits
        sizes = (rows, self.split.rows), (columns, self.split.columns), (depth, shared)
        return tuple(extent if extent % size else None for extent, size in sizes)  # type: ignore[return-value]


def emit_mma_tile(
    computation: Computation,
    expr: TensorExpr,
    prologue: Sequence[Computation],
    epilogue: Sequence[Computation],
    program: RProgram,
    device: DeviceSpec,
    params: Sequence[Buffer],
) -> SimtKernel:
    """The kernel of ``program``, one of `construct_mma`'s.

    ``computation`` and ``expr`` are the product in canonical form, ``prologue`` the injective computations whose values
    its loads are, ``epilogue`` the computations that consume its result element by element, ``params`` the function's
    parameters. With split-K the first statement allocates the workspace and two launches follow.

    Raises IllegalRewrite where tensor cores cannot compute the expression, or the program's tiles do not fit fragments
    or the device.
    """
    reason = supports_mma(expr, device)
    if reason is not None:
        raise IllegalRewrite(f"{computation.name}: {reason}")
    form = gemm_form(expr)
    assert isinstance(form, GemmForm)
    product = _product(computation, expr, form, prologue, program, device, params)
    shared_bytes = _shared_bytes(product)
    rows, columns, _ = product.bounds
    final = output_destination(computation, form, epilogue, (rows, columns))
    statements: list[Stmt] = []
    if product.grid.splits == 1:
        statements.append(_multiply(product, final))
    else:
        batch, row_count, column_count, _ = product.extents
        shape = [product.grid.splits * batch, row_count, column_count]
        workspace = gpu_buffer(shape, product.accumulator, "partial_sums", "global")
        statements.append(allocate(workspace))
        statements.append(_multiply(product, workspace_destination(workspace, (rows, columns))))
        statements.append(_add_up(product, workspace, output_destination(computation, form, epilogue, (None, None))))
    return SimtKernel(
        statements=tuple(statements),
        threads=product.split.warps * device.teu_lanes,
        blocks=product.grid.blocks,
        shared_bytes=shared_bytes,
        register_count=thread_registers(product.split, product.operands[0].dtype, device),
        notes=tuple(_notes(product)),
    )


def _product(
    computation: Computation,
    expr: TensorExpr,
    form: GemmForm,
    prologue: Sequence[Computation],
    program: RProgram,
    device: DeviceSpec,
    params: Sequence[Buffer],
) -> _Product:
    operands = read_operands(computation, form, prologue, params)
    if uses_mfma(device) and operands[0].dtype == "bfloat16":
        operands = (in_words(operands[0]), in_words(operands[1]))
    split = split_of(program)
    _check_split(split, operands[0].dtype, device, computation.name)
    extents = (operands[0].batch.size, operands[0].lines.size, operands[1].lines.size, operands[0].depth.size)
    tile_rows, tile_columns = ceil_div(extents[1], split.rows), ceil_div(extents[2], split.columns)
    splits = max(1, program.partition_count // (extents[0] * tile_rows * tile_columns))
    resident = device.unit_count * resident_blocks(split, operands[0].dtype, device)
    grid = GemmGrid(
        batch=extents[0],
        rows=tile_rows,
        columns=tile_columns,
        splits=splits,
        group=grid_group(tile_rows, tile_columns, resident, (split.rows, split.columns)),
    )

    def shared(operand: Factor, lines: int) -> SharedTile:
        pitches = wmma_pitches(device, along_depth=operand.along_depth) if uses_wmma(device) else None
        return shared_tile(operand, lines, split.depth, scope, pitches)

    tile_bytes = (split.rows + split.columns) * split.depth * int(itemsize_bytes(operands[0].dtype))
    scope = "shared" if tile_bytes <= static_shared_bytes(device) else "shared.dyn"
    return _Product(
        computation=computation,
        form=form,
        operands=operands,
        extents=extents,
        split=split,
        grid=grid,
        device=device,
        tiles=(shared(operands[0], split.rows), shared(operands[1], split.columns)),
        accumulator=ACCUMULATORS[expr.inputs[0].dtype][-1],
    )


def _check_split(split: TileSplit, dtype: str, device: DeviceSpec, name: str) -> None:
    """Raises IllegalRewrite where tiles are no whole fragments, warps or reduction steps."""
    sides = {reduction_step(dtype, device, side): side for side in fragment_sides(device)}
    side = sides.get(split.step, 0)
    if not side or split.warp_rows % side or split.warp_columns % side or split.depth % split.step:
        raise IllegalRewrite(
            f"{name}: warp tile {split.warp_rows}x{split.warp_columns}x{split.depth} in steps of {split.step} is not "
            f"whole fragments of {' or '.join(f'{side}x{side}x{step}' for step, side in sides.items())}"
        )
    if split.rows % split.warp_rows or split.columns % split.warp_columns:
        raise IllegalRewrite(f"{name}: tile {split.rows}x{split.columns} is not whole warp tiles")
    threads = split.warps * device.teu_lanes
    limit = max_block_threads(device)
    if limit is not None and threads > limit:
        raise IllegalRewrite(f"{name}: {threads} threads exceed {device.name}'s {limit}")


def _shared_bytes(product: _Product) -> int:
    """Shared memory of a block; raises IllegalRewrite where it is more than the device has."""
    size = sum(tile.bytes for tile in product.tiles)
    if uses_wmma(product.device):
        size += staging_elements(product.split) * ACCUMULATOR_BYTES
    limit = shared_limit_bytes(product.device)
    if size > limit:
        raise IllegalRewrite(
            f"{product.computation.name}: tiles of {size} bytes exceed {product.device.name}'s {limit}"
        )
    return size


def _notes(product: _Product) -> list[str]:
    split, grid = product.split, product.grid
    how = "wmma" if uses_wmma(product.device) else "mma.sync"
    if uses_mfma(product.device):
        instruction = instruction_of(split, product.operands[0].dtype, product.device)
        how = f"mfma {instruction.side}x{instruction.side}x{instruction.depth}"
    notes = [f"{how} in {split.warps} warps of {split.warp_rows}x{split.warp_columns}"]
    if grid.splits > 1:
        notes.append(f"reduction split among {grid.splits} blocks")
    notes += [f"{o.name} copied {o.vector} elements at a time" for o in product.operands if o.vector * 2 < PIECE]
    return notes


# ---- the product ----------------------------------------------------------------------------------------------------


def _multiply(product: _Product, to: Destination) -> Stmt:
    return launch(
        product.grid.blocks, product.split.warps * product.device.teu_lanes, lambda b, t: _block(product, to, b, t)
    )


def _block(product: _Product, to: Destination, block: Expr, thread: Expr) -> Stmt:
    split, operand = product.split, product.operands[0]
    place = place_block(product.grid, block)
    mma = multiplier(split, operand.dtype, product.accumulator, product.device)
    warp = place_of(thread, split, product.device.teu_lanes)

    def step(k: Expr) -> Stmt:
        return sequence(
            *(allocate(tile.buffer) for tile in product.tiles),
            *_copies(product, place, k, thread),
            mma.multiply(*product.tiles, warp),
        )

    share = place.batch if product.grid.splits == 1 else place.split * index(product.extents[0]) + place.batch
    corner = TileCorner(
        batch=share,
        row=place.row * index(split.rows) + warp.row,
        column=place.column * index(split.columns) + warp.column,
    )
    steps = loop(product.steps, SERIAL, "k_outer", step)
    clear = _with_blocks_per_unit(mma.clear(), product, to) if isinstance(mma, MmaSync) else mma.clear()
    multiplied = rolled(steps) if isinstance(mma, Wmma) else steps
    return sequence(allocate(mma.accumulators), clear, multiplied, *write_tile(mma, corner, warp, thread, to))


def _with_blocks_per_unit(statement: Stmt, product: _Product, to: Destination) -> Stmt:
    """A statement of the kernel, and with it how many blocks ptxas is told to fit into a unit.

    Left alone, it spills registers of small tiles in order that more blocks fit. Worked example, sm_90, 8 warps of
    16 x 16: 40 registers and a spilled one for 6 blocks; for the 4 that 56 planned registers make, 64 and none.
    Padding on the way in and functions on the way out take 140 to 154 registers where 128 are planned: one block.
    """
    split, dtype, device = product.split, product.operands[0].dtype, product.device
    planned = thread_registers(split, dtype, device)
    if planned <= SMALL_PLAN:
        use = block_use(split, dtype, device)
        blocks = blocks_per_unit(replace(use, registers=planned + SPARE_REGISTERS), device)
    elif to.lane_by_lane and not all(operand.plain for operand in product.operands):
        blocks = 1
    else:
        return statement
    return with_blocks_per_unit(statement, blocks)


def _copies(product: _Product, place: BlockPlace, k: Expr, thread: Expr) -> list[Stmt]:
    split = product.split
    rows, columns, depth = product.bounds
    step = k if product.grid.splits == 1 else place.split * index(product.steps) + k
    starts = (place.row * index(split.rows), place.column * index(split.columns))
    return [
        copy_tile(
            tile,
            TileOrigin(
                batch=place.batch, line=start, depth=step * index(split.depth), line_bound=bound, depth_bound=depth
            ),
            thread,
            split.warps * product.device.teu_lanes,
        )
        for tile, start, bound in zip(product.tiles, starts, (rows, columns), strict=True)
    ]


# ---- split-K --------------------------------------------------------------------------------------------------------


def _add_up(product: _Product, workspace: Buffer, to: Destination) -> Stmt:
    """The second kernel: the partial sums of each element in the order of their shares, then the epilogue."""
    batch, rows, columns, _ = product.extents
    vector = gcd(PIECE, columns)
    units = batch * rows * columns // vector
    sums = gpu_buffer([vector], product.accumulator, "sums", "local")

    def add(b: Expr, row: Expr, column: Expr) -> Stmt:
        def share(s: Expr) -> Stmt:
            def lane(v: Expr) -> Stmt:
                return accumulate(sums, [v], load(workspace, [s * index(batch) + b, row, column + v]))

            return loop(vector, VECTORIZED, "v", lane)

        zero = tirx.const(0, product.accumulator)
        return sequence(
            allocate(sums),
            loop(vector, UNROLLED, "v", lambda v: store(sums, zero, [v])),
            loop(product.grid.splits, SERIAL, "s", share),
            to.store_piece(b, row, column, vector, lambda v: load(sums, [v])),
        )

    def body(block: Expr, thread: Expr) -> Stmt:
        unit = block * index(REDUCE_THREADS) + thread
        line, piece = tirx.floordiv(unit, index(columns // vector)), tirx.floormod(unit, index(columns // vector))
        added = add(tirx.floordiv(line, index(rows)), tirx.floormod(line, index(rows)), piece * index(vector))
        return if_all([below(unit, units, REDUCE_THREADS)], added)

    return launch(ceil_div(units, REDUCE_THREADS), REDUCE_THREADS, body)
