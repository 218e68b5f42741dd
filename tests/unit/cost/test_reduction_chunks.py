"""How long chunks of a reduction are, and how many tiles go over one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.tensor_exprs import matmul
from tvm_ext.analysis.tensor_expr import Access, Axis, LinearIndex, TensorExpr
from tvm_ext.cost.reduction_chunks import (
    FOLLOWED_ROWS,
    RUN_BYTES,
    ReductionChunks,
    far_rows,
    reduction_chunks,
    with_longer_runs,
)
from tvm_ext.devices.device_db import lookup
from tvm_ext.devices.device_facts import with_unit_count
from tvm_ext.records.tuning import CpuTile

NARROW = with_unit_count(lookup("cpu-zen3"), 2)
DEVICE = with_unit_count(lookup("cpu-epyc-zen5"), 2)
PAGE = 4096


def _index(*terms: tuple[str, int]) -> LinearIndex:
    return LinearIndex(terms=terms, constant=0)


def _pointwise(channels: int, pixels: int, filters: int) -> TensorExpr:
    """A 1x1 convolution in blocks of 16 channels: out[fo, p, fi] += in[co, p, ci] * w[fo, fi, co, ci]."""
    blocks = channels // 16
    sizes = {"fo": filters // 16, "p": pixels, "fi": 16, "co": blocks, "ci": 16}

    def access(tensor: str, *axes: str, is_constant: bool = False) -> Access:
        return Access(
            tensor=tensor,
            shape=tuple(sizes[axis] for axis in axes),
            dtype="float32",
            itemsize_bytes=4.0,
            indices=tuple(_index((axis, 1)) for axis in axes),
            is_constant=is_constant,
        )

    return TensorExpr(
        name="pointwise",
        axes=tuple(
            Axis(name=name, extent=extent, kind="reduce" if name in ("co", "ci") else "spatial")
            for name, extent in sizes.items()
        ),
        inputs=(access("x", "co", "p", "ci"), access("w", "fo", "fi", "co", "ci", is_constant=True)),
        output=access("y", "fo", "p", "fi"),
        combiner="sum",
        flops_per_point=2.0,
    )


def _tile(expr: TensorExpr, rows: int = 8) -> CpuTile:
    pixels = expr.spatial[1].extent
    return CpuTile(
        vector=2, register=(2, rows, 16), inner=(1, 1, 1), outer=(1, min(4, pixels // rows), 1), order=(0, 2, 1)
    )


def test_a_chunk_goes_over_as_many_rows_as_are_followed() -> None:
    expr = _pointwise(1024, 1024, 256)
    assert far_rows(expr.inputs[0], {"p": 8, "co": 64, "ci": 16}, PAGE) == 64
    assert reduction_chunks(_tile(expr), expr, DEVICE) == ReductionChunks(extent=64, steps=FOLLOWED_ROWS)


@pytest.mark.parametrize(
    "expr",
    [_pointwise(512, 1024, 256), _pointwise(2048, 16, 256)],
    ids=["32 rows are followed", "rows of 1 KiB are near"],
)
def test_a_reduction_stays_whole(expr: TensorExpr) -> None:
    assert reduction_chunks(_tile(expr), expr, DEVICE) is None


def test_an_unknown_page_leaves_reductions_whole() -> None:
    expr = _pointwise(1024, 1024, 256)
    assert reduction_chunks(_tile(expr), expr, replace(DEVICE, page_bytes=None)) is None


def test_runs_are_as_long_as_their_sums_may_be() -> None:
    expr = _pointwise(1024, 4096, 256)
    tile = with_longer_runs(_tile(expr), expr, DEVICE)
    assert tile.outer == (1, RUN_BYTES // (2 * 8 * 16 * 4), 1)


def test_runs_go_over_further_loops_where_sums_may_wait() -> None:
    expr = _pointwise(1024, 256, 512)  # 32 tiles of pixels, 64 of which may wait: two tiles of filters at a time
    assert with_longer_runs(_tile(expr), expr, DEVICE).outer == (2, 32, 1)


def _product(rows: int, depth: int, columns: int) -> tuple[TensorExpr, CpuTile]:
    return matmul(rows, columns, depth, constant=True), CpuTile(
        vector=1, register=(6, 16), inner=(1, 1), outer=(1, 1), order=(1, 0)
    )


def test_a_panel_that_a_core_keeps_stays_whole() -> None:
    expr, tile = _product(64, 6000, 1024)
    assert reduction_chunks(tile, expr, NARROW) is None


def test_a_longer_panel_goes_in_parts_of_half_of_l1() -> None:
    expr, tile = _product(64, 30522, 1024)
    chunks = reduction_chunks(tile, expr, NARROW)
    assert chunks is not None
    assert chunks.steps * 16 * 4 == pytest.approx(16 * 1024, rel=0.05)
    assert with_longer_runs(tile, expr, NARROW).outer == (11, 8)


def test_runs_leave_every_core_tasks() -> None:
    expr = _pointwise(4096, 64, 32)  # one panel of filters: 8 tiles for two cores
    assert with_longer_runs(_tile(expr), expr, DEVICE).outer == (1, 4, 1)
    assert with_longer_runs(_tile(expr), expr, with_unit_count(DEVICE, 1)).outer == (1, 8, 1)
