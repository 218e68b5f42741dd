"""rTiles: data tiles, reuse score and storage padding (paper §3.1, Figures 3 to 5)."""

from __future__ import annotations

import pytest

from tests.support.tensor_exprs import conv2d, matmul
from tvm_ext.cost.perf_model import PerfModel
from tvm_ext.devices import device_db
from tvm_ext.records.rprogram import RTile
from tvm_ext.tir_passes.roller.rtile import bank_padding, conflict_degree, reuse_score, storage_padding

V100 = device_db.lookup("nvidia-v100")


def test_data_tiles_of_figure_4():
    tile = RTile(axes=("i", "j", "k"), shape=(4, 4, 2))
    shapes = {access.tensor: access.tile_shape(tile.sizes) for access in matmul(64, 64, 64).accesses}
    assert shapes == {"A": (4, 2), "B": (2, 4), "C": (4, 4)}


def test_data_tile_of_a_strided_convolution_includes_the_halo():
    expr = conv2d(1, 8, 28, 28, 16, (3, 3), stride=2)
    tile = RTile(axes=("n", "f", "h", "w", "c", "r", "s"), shape=(1, 4, 4, 7, 2, 3, 3))
    assert expr.inputs[0].tensor == "X"
    assert expr.inputs[0].tile_shape(tile.sizes) == (1, 2, 2 * 3 + 2 + 1, 2 * 6 + 2 + 1)


def test_padding_of_figure_5b():
    assert bank_padding(row=4, read=1, banks=4, width=1) == 1
    assert conflict_degree(row=4, read=1, rows=3, banks=4, width=1) == 3
    assert conflict_degree(row=5, read=1, rows=3, banks=4, width=1) == 1


@pytest.mark.parametrize(("row", "read", "expected"), [(32, 1, 1), (8, 1, 25), (33, 1, 0), (64, 4, 4), (36, 4, 0)])
def test_padding_for_32_banks(row: int, read: int, expected: int):
    assert bank_padding(row, read, 32, 1) == expected


def test_shared_tiles_read_down_a_column_are_padded_and_rows_are_not():
    model = PerfModel(matmul(1024, 1024, 1024), V100)
    padding = storage_padding(model, (128, 128, 8), (8, 8, 1))
    assert padding[0] == 25  # A: 128 rows of 8, threads read down a column: stride 33
    assert storage_padding(model, (128, 128, 1), (8, 8, 1))[1] == 0  # B: one row of 128, shared out among threads


def test_reuse_score_prefers_the_smaller_side():
    """A 16 x 2 tile gains more by growing its short side: it saves more loads for as many bytes."""
    model = PerfModel(matmul(1024, 1024, 1024), V100)
    tile = (16, 2, 1)
    short_side, long_side = (16, 4, 1), (18, 2, 1)
    assert reuse_score(model, 0, tile, short_side) > reuse_score(model, 0, tile, long_side) > 0


def test_reuse_score_by_hand():
    model = PerfModel(matmul(64, 64, 64), V100)
    saved = model.traffic_bytes(0, (4, 4, 1)) - model.traffic_bytes(0, (8, 4, 1))
    assert saved == 64**3 * (1 / 4 - 1 / 8) * 4
    cost = (8 * 4 + 8 + 4 - (4 * 4 + 4 + 4)) * 4
    assert reuse_score(model, 0, (4, 4, 1), (8, 4, 1)) == pytest.approx(saved / cost)


def test_footprint_includes_storage_padding():
    model = PerfModel(matmul(1024, 1024, 1024), V100)
    padded, plain = (model.footprint_bytes(1, (64, 64, 8), padding) for padding in ((25, 0), ()))
    assert padded - plain == 64 * 25 * 4
