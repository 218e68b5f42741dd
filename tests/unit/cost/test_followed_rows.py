"""Which rows of memory a kernel's loops leave for the prefetcher to follow."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tvm_ext.analysis.tensor_expr import Access, Axis, LinearIndex, TensorExpr
from tvm_ext.cost.followed_rows import UNFOLLOWED_COST, is_followed
from tvm_ext.cost.persistent import ChainClock, Moved, Stage
from tvm_ext.devices.device_db import lookup
from tvm_ext.devices.device_facts import with_unit_count
from tvm_ext.records.tuning import CpuTile

DEVICE = with_unit_count(lookup("cpu-cascade-lake"), 1)
CLOCK = ChainClock(DEVICE)
FILTERS, COLUMNS, CHANNELS = 96, 112, 16


def access(tensor: str, shape: tuple[int, ...], *axes: str, is_constant: bool = False) -> Access:
    return Access(
        tensor=tensor,
        shape=shape,
        dtype="float32",
        itemsize_bytes=4.0,
        indices=tuple(LinearIndex(terms=((axis, 1),)) for axis in axes),
        is_constant=is_constant,
    )


EXPR = TensorExpr(
    name="pointwise",
    axes=(
        Axis(name="f", extent=FILTERS, kind="spatial"),
        Axis(name="x", extent=COLUMNS, kind="spatial"),
        Axis(name="c", extent=CHANNELS, kind="reduce"),
    ),
    inputs=(access("in", (COLUMNS, CHANNELS), "x", "c"), access("w", (FILTERS, CHANNELS), "f", "c", is_constant=True)),
    output=access("out", (FILTERS, 112 * COLUMNS), "f", "x"),
    combiner="sum",
    flops_per_point=2.0,
)


def tile(filters: int, columns: int, order: tuple[int, int], inner: tuple[int, int] = (1, 1)) -> CpuTile:
    counts = (-(-FILTERS // filters), -(-COLUMNS // columns))
    return CpuTile(vector=0, register=(filters, columns), inner=inner, outer=counts, order=order)


@pytest.mark.parametrize(
    ("loops", "followed"),
    [
        (tile(48, 8, (0, 1)), False),  # half a line of each of 48 rows, then the other half
        (tile(32, 8, (0, 1)), True),
        (tile(16, 16, (0, 1)), True),
        (tile(16, 16, (1, 0)), False),  # all 96 rows until a row goes on
        (tile(16, 16, (1, 0), inner=(2, 2)), True),  # 32 rows, for two lines
        (tile(12, 32, (1, 0)), True),  # two lines of each row
        (tile(96, 112, (0, 1)), True),
    ],
)
def test_rows_between_two_visits_of_a_row_count(loops: CpuTile, followed: bool) -> None:
    """As measured: 18 us a row where nothing follows, 10 us elsewhere (the module's text)."""
    assert is_followed(EXPR.output, loops, EXPR, DEVICE) is followed


def test_rows_within_a_page_and_constants_are_followed() -> None:
    near = replace(EXPR, output=replace(EXPR.output, shape=(FILTERS, COLUMNS)))
    assert is_followed(near.output, tile(48, 8, (0, 1)), near, DEVICE)
    assert all(is_followed(item, tile(48, 8, (0, 1)), EXPR, DEVICE) for item in EXPR.inputs)
    unknown = replace(DEVICE, page_bytes=None)
    assert is_followed(EXPR.output, tile(48, 8, (0, 1)), EXPR, unknown)


def test_the_whole_reduction_of_an_input_is_between_two_visits() -> None:
    """40 channels, each a page away, of which a tile reads 8 columns; in 32 channels they are followed.

    Where it reads 16, a line, the tile before has asked for them.
    """
    for channels, followed in ((40, False), (32, True)):
        expr = replace(
            EXPR,
            axes=(*EXPR.axes[:2], Axis(name="c", extent=channels, kind="reduce")),
            inputs=(access("in", (channels, 112 * COLUMNS), "c", "x"),),
        )
        assert is_followed(expr.inputs[0], tile(16, 8, (0, 1)), expr, DEVICE) is followed
        assert is_followed(expr.inputs[0], tile(16, 16, (0, 1)), expr, DEVICE)


def test_what_is_not_followed_takes_longer_beyond_the_own_caches_alone() -> None:
    far = Moved(part_bytes=1e6, whole_bytes=2e7, written=True)
    slow = replace(far, followed=False)
    once, twice = (CLOCK.stage_s(Stage(compute_s=0.0, near_s=0.0, moved=(item,))) for item in (far, slow))
    assert twice == pytest.approx(UNFOLLOWED_COST * once)
    near = [CLOCK.stage_s(Stage(compute_s=0.0, near_s=0.0, moved=(replace(i, whole_bytes=1e5),))) for i in (far, slow)]
    assert near == [0.0, 0.0]
