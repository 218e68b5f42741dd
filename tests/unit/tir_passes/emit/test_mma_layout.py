"""Shared-memory layouts of tensor-core tiles, the order of threadblocks, and the implicit GEMM itself."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.tir_passes.emit.tensor_core_operators import Conv, conv2d, matmul, parts_of
from tvm_ext.analysis.gemm_form import (
    EVEN_PITCHES,
    ODD_PITCHES,
    GemmForm,
    gemm_expr,
    gemm_form,
    padded_chunks,
    wmma_pitches,
)
from tvm_ext.cost.product_counts import grid_group
from tvm_ext.devices import device_db
from tvm_ext.ir.build_ir import index
from tvm_ext.ir.matrix_units.operand import Factor, read_operands
from tvm_ext.ir.matrix_units.shared import copy_order, swizzle
from tvm_ext.tir_passes.emit.mma_tiles.emit import GemmGrid, place_block

BANKS_CHUNKS = 8
ROWS = 32


def number(value: Any) -> int:
    """An index expression of constants, which TVM folds as it is built."""
    return int(value.value)


def places(chunks: int) -> list[list[int]]:
    """Chunk address of each (row, chunk) of a swizzled tile."""
    return [
        [row * chunks + number(swizzle(index(row), index(chunk), chunks)) for chunk in range(chunks)]
        for row in range(ROWS)
    ]


@pytest.mark.parametrize("chunks", range(1, 33))
def test_swizzle_keeps_every_chunk_in_its_row(chunks: int) -> None:
    for row, at in enumerate(places(chunks)):
        assert sorted(at) == list(range(row * chunks, (row + 1) * chunks))


@pytest.mark.parametrize("chunks", range(1, 33))
def test_ldmatrix_meets_every_bank_once(chunks: int) -> None:
    """One chunk of each of eight rows that start at a multiple of eight."""
    table = places(chunks)
    for first in range(0, ROWS, 8):
        for chunk in range(chunks):
            banks = {table[row][chunk] % BANKS_CHUNKS for row in range(first, first + 8)}
            assert len(banks) == BANKS_CHUNKS


@pytest.mark.parametrize("chunks", [1, 2, 4, 8, 16, 24, 32, 12, 6, 3])
def test_eight_copies_in_a_row_meet_every_bank_once(chunks: int) -> None:
    flat = [address for row in places(chunks) for address in row]
    for first in range(0, len(flat) // 8 * 8, 8):
        assert len({address % BANKS_CHUNKS for address in flat[first : first + 8]}) == BANKS_CHUNKS


@pytest.mark.parametrize("chunks", range(1, 33))
@pytest.mark.parametrize("pitches", [ODD_PITCHES, EVEN_PITCHES])
def test_padding_is_small_and_keeps_32_bytes_of_neighbours_apart(chunks: int, pitches: tuple[int, int]) -> None:
    pitch = padded_chunks(chunks, pitches)
    assert chunks <= pitch < chunks + 8
    first, second = {0, 1}, {pitch % BANKS_CHUNKS, (pitch + 1) % BANKS_CHUNKS}
    assert not first & second


def test_wmma_meets_all_banks_as_it_is_compiled() -> None:
    """sm_75: a chunk of each of eight rows. sm_70, along the lines: half a chunk at two places of each of four rows."""
    turing, volta = device_db.lookup("nvidia-t4"), device_db.lookup("nvidia-v100")
    for along_depth in (False, True):
        for pitch in wmma_pitches(turing, along_depth=along_depth):
            assert len({row * pitch % BANKS_CHUNKS for row in range(8)}) == BANKS_CHUNKS
    for pitch in wmma_pitches(volta, along_depth=False):
        assert len({(row * pitch + chunk) % BANKS_CHUNKS for row in range(4) for chunk in (0, 1)}) == BANKS_CHUNKS
    for pitch in wmma_pitches(volta, along_depth=True):
        assert len({row * pitch % BANKS_CHUNKS for row in range(4)}) == 4


CHUNKS = [1, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 32]


@pytest.mark.sampled
@pytest.mark.parametrize("units_per_chunk", [1, 2, 4, 8])
@pytest.mark.parametrize(
    ("chunks", "pitches"), [*((c, ODD_PITCHES) for c in CHUNKS), *((c, EVEN_PITCHES) for c in CHUNKS[1:])], ids=str
)
def test_padded_rows_are_written_without_conflicts(chunks: int, pitches: tuple[int, int], units_per_chunk: int) -> None:
    """Of units of 16, 8, 4 and 2 bytes; 32 lanes of 2 bytes write half a wavefront."""
    row_units, pitch = chunks * units_per_chunk, padded_chunks(chunks, pitches)
    order = [
        tuple(map(number, copy_order(index(unit), chunks, pitch, 16, units_per_chunk)))
        for unit in range(16 * row_units)
    ]
    assert sorted(order) == [(row, unit) for row in range(16) for unit in range(row_units)]
    written = [row * pitch + unit // units_per_chunk for row, unit in order]
    lanes = min(32, 8 * units_per_chunk)
    for first in range(0, len(written), lanes):
        of_bank: dict[int, set[int]] = {}
        for chunk in written[first : first + lanes]:
            of_bank.setdefault(chunk % BANKS_CHUNKS, set()).add(chunk)
        assert all(len(found) == 1 for found in of_bank.values())


@pytest.mark.parametrize("pitches", [ODD_PITCHES, EVEN_PITCHES])
@pytest.mark.parametrize("chunks", [2, 4, 6, 8, 10, 12, 14, 16, 20])
def test_neighbouring_threads_copy_whole_sectors(chunks: int, pitches: tuple[int, int]) -> None:
    pitch = padded_chunks(chunks, pitches)
    order = [tuple(map(number, copy_order(index(unit), chunks, pitch, ROWS))) for unit in range(ROWS * chunks)]
    for even, odd in zip(order[::2], order[1::2], strict=True):
        assert even[1] % 2 == 0
        assert odd == (even[0], even[1] + 1)


@pytest.mark.parametrize(
    "grid",
    [
        GemmGrid(batch=1, rows=8, columns=5, splits=1, group=4),
        GemmGrid(batch=3, rows=7, columns=4, splits=1, group=3),
        GemmGrid(batch=2, rows=5, columns=3, splits=4, group=1),
        GemmGrid(batch=1, rows=1, columns=1, splits=6, group=1),
        GemmGrid(batch=1, rows=13, columns=1, splits=2, group=13),
    ],
    ids=str,
)
def test_every_tile_has_one_block(grid: GemmGrid) -> None:
    found = []
    for block in range(grid.blocks):
        place = place_block(grid, index(block))
        found.append(tuple(map(number, (place.batch, place.row, place.column, place.split))))
    wanted = [
        (batch, row, column, split)
        for batch in range(grid.batch)
        for row in range(grid.rows)
        for column in range(grid.columns)
        for split in range(grid.splits)
    ]
    assert sorted(found) == sorted(wanted)


def test_groups_share_panels() -> None:
    """108 blocks of 32 x 32 square tiles: 8 rows by 14 columns are 22 panels, 4 rows by 27 are 31."""
    assert grid_group(32, 32, 108, (128, 128)) == 8
    grid = GemmGrid(batch=1, rows=32, columns=32, splits=1, group=8)
    wave = [place_block(grid, index(block)) for block in range(108)]
    assert len({number(p.row) for p in wave}) + len({number(p.column) for p in wave}) == 22


# ---- the implicit GEMM ----------------------------------------------------------------------------------------------


def form_of(func: Any) -> tuple[GemmForm, Any]:
    expr = parts_of(func).expr
    form = gemm_form(expr)
    assert isinstance(form, GemmForm)
    return form, gemm_expr(expr, form)


def operands_of(func: Any) -> tuple[Factor, Factor]:
    parts = parts_of(func)
    form, _ = form_of(func)
    return read_operands(parts.anchor, form, parts.prologue, parts.params)


def test_nhwc_convolution_multiplies_pixels_by_filters() -> None:
    _, product = form_of(conv2d(Conv(n=2, h=9, w=7, c=32, f=48))[0])
    assert [(axis.extent, axis.kind) for axis in product.axes] == [
        (2 * 9 * 7, "spatial"),
        (48, "spatial"),
        (3 * 3 * 32, "reduce"),
    ]


def test_nchw_convolution_multiplies_filters_by_pixels() -> None:
    """Its result is contiguous along pixels, which therefore are the columns."""
    form, product = form_of(conv2d(Conv(n=2, h=9, w=7, c=32, f=48, layout="NCHW OIHW"))[0])
    assert [axis.extent for axis in product.axes] == [48, 2 * 9 * 7, 32 * 3 * 3]
    assert (form.row_input, form.column_input) == (1, 0)


@pytest.mark.parametrize(
    ("func", "vectors", "along_depth"),
    [
        (matmul(64, 64, 64)[0], (8, 8), (True, False)),
        (matmul(64, 64, 64, ta=True, tb=True)[0], (8, 8), (False, True)),
        (matmul(64, 60, 36)[0], (4, 4), (True, False)),
        (matmul(64, 64, 64, dtype="int8", out="int32", tb=True)[0], (16, 16), (True, True)),
        (matmul(64, 64, 64, dtype="int8", out="int32")[0], (16, 1), (True, True)),
        (conv2d(Conv())[0], (8, 8), (True, True)),
        (conv2d(Conv(layout="NHWC HWIO"))[0], (8, 8), (True, False)),
        (conv2d(Conv(layout="NCHW OIHW"))[0], (8, 1), (True, False)),
        (conv2d(Conv(layout="NCHW OIHW", r=1, s=1, pad=0))[0], (8, 8), (True, False)),
        (conv2d(Conv(layout="NCHW OIHW", r=1, s=1, pad=0, h=7, w=7))[0], (8, 1), (True, False)),
        (conv2d(Conv(r=1, s=1, pad=0))[0], (8, 8), (True, True)),
    ],
)
def test_operands_are_staged_as_they_lie_in_memory(
    func: Any, vectors: tuple[int, int], along_depth: tuple[bool, bool]
) -> None:
    operands = operands_of(func)
    assert tuple(operand.vector for operand in operands) == vectors
    assert tuple(operand.along_depth for operand in operands) == along_depth


def test_a_run_of_memory_is_one_digit() -> None:
    """W[f, c, r, s] along the reduction (c, r, s) is one axis of 288, X[n, c, h + r, w + s] three."""
    weights, pixels = operands_of(conv2d(Conv(layout="NCHW OIHW"))[0])
    assert weights.depth.extents == (288,)
    assert pixels.depth.extents == (32, 3, 3)
