"""Loads beside the arithmetic of a core: counted by hand on AVX-512, 32 KiB of L1 in pages of 4 KiB."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.support.tensor_exprs import conv2d, matmul
from tvm_ext.cost.load_ports import PortTimes, set_share
from tvm_ext.cost.perf_model import PerfModel
from tvm_ext.devices import device_db
from tvm_ext.devices.device_facts import with_unit_count

WIDE = with_unit_count(device_db.lookup("cpu-avx512"), 1)
CORE = replace(
    WIDE, layers=tuple(replace(item, capacity_bytes=32768) if item.name == "L1" else item for item in WIDE.layers)
)


def ports(m: int, n: int, k: int) -> PortTimes:
    return PortTimes(PerfModel(matmul(m, n, k, constant=True), CORE, "j"))


def test_a_product_loads_its_vectors_and_broadcasts_at_each_step() -> None:
    """Tiles of 8 x 48: 3 vectors of B and 8 broadcasts of A, 12 cycles of 24 multiply-adds."""
    times = ports(16, 96, 100)
    assert times.loads_per_step((8, 48, 1)) == 11
    assert times.issue_s((8, 48, 1)) * times.hz == pytest.approx(2 * 2 * 100 * 11 / 2)
    assert times.arithmetic_s((8, 48, 1)) * times.hz == pytest.approx(4 * (100 * 12 + 24 + 4))


def test_a_cut_tile_loads_for_its_own_rows() -> None:
    """Nine rows in tiles of 8 are one of 8 and one of 1: 11 loads a step and 4."""
    times = ports(9, 48, 100)
    assert times.issue_s((8, 48, 1)) * times.hz == pytest.approx(100 * (11 + 4) / 2)


def test_what_taps_share_is_loaded_once() -> None:
    """Two rows of seven columns: 2 x 9 values serve the three taps of a row, and each tap has a vector of weights."""
    expr = conv2d(1, 16, 28, 28, 16, (3, 3), constant=True)
    model = PerfModel(expr, CORE, "f")
    sizes = {"f": 16, "h": 2, "w": 7}
    tile = tuple(sizes.get(name, 1) for name in model.names)
    assert sum(model.core.operand_loads(tile)) == 15
    assert PortTimes(model).loads_per_step(tile) == pytest.approx(1 + 6)


@pytest.mark.parametrize(
    ("rows", "depth", "lines"), [(8, 1024, 0), (12, 1024, 4), (12, 768, 0), (16, 512, 0), (18, 512, 2), (30, 1000, 0)]
)
def test_rows_a_power_of_two_apart_crowd_their_sets(rows: int, depth: int, lines: int) -> None:
    """Rows of 4096 bytes lie in one set of 8 lines, of 2048 in two, of 3072 in four, of 4000 in all."""
    times = ports(rows, 16, depth)
    assert times.evicted_bytes((rows, 16, 1)) == lines * 64 * depth


def test_a_device_that_names_no_pages_crowds_nothing() -> None:
    unknown = replace(CORE, page_bytes=None)
    model = PerfModel(matmul(12, 16, 1024, constant=True), unknown, "j")
    assert PortTimes(model).evicted_bytes((12, 16, 1)) == 0


@pytest.mark.parametrize(("columns", "share"), [(32, 0.5), (16, 0.25), (64, 1.0), (33, 0.75)])
def test_part_of_each_row_lies_in_part_of_the_sets(columns: int, share: float) -> None:
    """Rows of 64 floats: 32 of them are two lines of every four; whole rows leave no gap."""
    model = PerfModel(matmul(128, 64, 128), CORE, "j")
    b = model.inputs[1]
    assert set_share(b, (8, columns, 128), CORE) == share
    several = tuple(np.array([size, size]) for size in (8, columns, 128))
    assert set_share(b, several, CORE).tolist() == [share, share]
    packed = PerfModel(matmul(128, 64, 128, constant=True), CORE, "j").inputs[1]
    assert set_share(packed, (8, columns, 128), CORE) == 1.0
