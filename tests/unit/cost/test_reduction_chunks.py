"""How long chunks of a reduction are, and how many tiles go over one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.tensor_exprs import matmul
from tvm_ext.analysis.tensor_expr import Access, Axis, LinearIndex, TensorExpr
from tvm_ext.cost.reduction_chunks import (
    LEAST_STEPS,
    RUN_BYTES,
    ReductionChunks,
    far_rows,
    is_asked_for,
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


def _less_than_lines(channels: int) -> tuple[TensorExpr, CpuTile]:
    """Columns of a product whose rows lie a page apart, 8 of them a tile: half a line."""
    expr = matmul(1024, 256, channels, constant=True)
    a, b = expr.inputs
    turned = replace(a, shape=a.shape[::-1], indices=a.indices[::-1])
    tile = CpuTile(vector=1, register=(8, 32), inner=(1, 1), outer=(1, 1), order=(1, 0))
    return replace(expr, inputs=(turned, b)), tile


def test_a_chunk_goes_over_as_many_rows_as_are_followed() -> None:
    expr, tile = _less_than_lines(1024)
    assert far_rows(expr.inputs[0], {"i": 8, "k": 1024}, PAGE) == 1024
    assert reduction_chunks(tile, expr, DEVICE) == ReductionChunks(extent=1024, steps=LEAST_STEPS)


def test_rows_that_go_on_by_whole_lines_are_asked_for() -> None:
    expr = _pointwise(1024, 1024, 256)
    assert far_rows(expr.inputs[0], {"p": 8, "co": 64, "ci": 16}, PAGE) == 64
    assert is_asked_for(expr.inputs[0], _tile(expr), expr, DEVICE)
    assert reduction_chunks(_tile(expr), expr, DEVICE) is None
    assert not is_asked_for(expr.inputs[1], _tile(expr), expr, DEVICE)


@pytest.mark.parametrize(
    "expr", [_pointwise(32, 16, 256), _pointwise(1024, 8, 256)], ids=["the first cache holds all", "one tile of rows"]
)
def test_what_is_not_asked_for(expr: TensorExpr) -> None:
    assert not is_asked_for(expr.inputs[0], _tile(expr), expr, DEVICE)


def test_a_reduction_over_rows_that_are_followed_stays_whole() -> None:
    expr, tile = _less_than_lines(32)
    assert reduction_chunks(tile, expr, DEVICE) is None


def test_an_unknown_page_leaves_reductions_whole() -> None:
    expr, tile = _less_than_lines(1024)
    assert reduction_chunks(tile, expr, replace(DEVICE, page_bytes=None)) is None


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
