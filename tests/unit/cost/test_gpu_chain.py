"""When a chain of products fits one GPU kernel, in which tiles, and whether that pays."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tvm_ext.cost.gpu_chain import ChainProduct, ChainUnits, ProductChain, predict_chain, separate_s, why_apart
from tvm_ext.cost.gpu_chain_tiles import construct_chain, row_pitch, why_no_room
from tvm_ext.devices.device_db import lookup
from tvm_ext.devices.machine import Machine
from tvm_ext.devices.occupancy import blocks_per_unit, shared_limit_bytes

MI50 = lookup("amd-mi50")
AMPERE, HOPPER, VOLTA, TURING = (lookup(f"nvidia-{name}") for name in ("a100", "h200", "v100", "t4"))
UNITS: tuple[ChainUnits, ...] = ("matrix units", "vector units")


def halves(rows: int, *sizes: int) -> ProductChain:
    """``rows`` x sizes[0] times factors of sizes[1], sizes[2], ... columns, in half precision, nothing else read."""
    products = tuple(ChainProduct(columns=b, depth=a, weight_bytes=2.0 * a * b) for a, b in pairwise(sizes))
    return ProductChain(
        rows=rows, products=products, dtype="float16", itemsize=2, input_bytes=2.0 * rows * sizes[0], output_itemsize=2
    )


def test_traffic_of_one_kernel_and_of_one_for_each_product() -> None:
    chain = halves(1000, 256, 64, 16)
    assert chain.between_bytes == 2 * 1000 * 64 * 2
    assert chain.least_bytes == 2 * (1000 * (256 + 16) + 256 * 64 + 64 * 16)
    assert sum(one.least_bytes for one in chain.singles) == chain.least_bytes + chain.between_bytes


@pytest.mark.parametrize("units", UNITS)
@pytest.mark.parametrize("sizes", [(256, 64, 16), (576, 128, 64), (96, 32, 96), (37, 21, 45, 3)], ids=str)
def test_tiles_hold_all_columns_and_fit_the_device(units: ChainUnits, sizes: tuple[int, ...]) -> None:
    chain = halves(5000, *sizes)
    tiles = construct_chain(chain, AMPERE, units)
    assert tiles.refusal is None
    times = [time.time_s for _, time in tiles.ranked]
    assert times == sorted(times)
    for tile, time in tiles.ranked:
        assert why_no_room(tile, AMPERE) is None
        assert blocks_per_unit(tile.use, AMPERE) >= 1
        assert all(mine.columns >= own.columns for mine, own in zip(tile.products, chain.products, strict=True))
        assert all(
            own.depth * own.steps >= given.depth for own, given in zip(tile.products, chain.products, strict=True)
        )
        if tile.residence == "registers":
            assert all(product.across == 1 for product in tile.products)
        assert time.time_s > time.busy_s > 0


@pytest.mark.parametrize("units", UNITS)
def test_what_epilogues_compute_counts_in_one_kernel_and_apart(units: ChainUnits) -> None:
    """Vector units compute it: as long for all products whichever way, where it takes longest of all."""
    plain = halves(1 << 20, 64, 64, 64)
    dear = replace(plain, products=tuple(replace(product, instructions=2000.0) for product in plain.products))
    tile = construct_chain(plain, AMPERE, units).ranked[0][0]
    change_s = 2 * plain.rows * 64 * 2000 / Machine(AMPERE).results_per_s("float32")
    for fewer, more in (
        (predict_chain(plain, tile, AMPERE).time_s, predict_chain(dear, tile, AMPERE).time_s),
        (separate_s(plain, AMPERE, units), separate_s(dear, AMPERE, units)),
    ):
        assert fewer < change_s / 10 and more == pytest.approx(change_s, rel=0.1)


@pytest.mark.parametrize("residence", ["registers", "shared memory"])
def test_both_residences_are_offered(residence: str) -> None:
    tiles = construct_chain(halves(5000, 256, 64, 64), AMPERE, "matrix units")
    assert any(tile.residence == residence for tile, _ in tiles.ranked)


def test_what_does_not_stay_says_what_is_lacking() -> None:
    refusal = construct_chain(halves(5000, 768, 3072, 768), AMPERE, "matrix units").refusal
    assert refusal is not None
    assert "3072 -> 768 columns do not stay" in refusal
    assert "exceed nvidia-a100's" in refusal or "no tile" in refusal


def test_before_mma_sync_values_stay_in_shared_memory() -> None:
    for device in (VOLTA, TURING):
        ranked = construct_chain(halves(5000, 64, 64, 64), device, "matrix units").ranked
        assert {tile.residence for tile, _ in ranked} == {"shared memory"}


def test_a_device_without_matrix_units_says_so() -> None:
    assert "no matrix units" in str(construct_chain(halves(5000, 64, 64, 64), MI50, "matrix units").refusal)


def test_mfma_keeps_whole_steps_of_halves_in_shared_memory() -> None:
    device, chain = lookup("amd-mi300x"), halves(5000, 64, 48, 64)
    tiles = [tile for tile, _ in construct_chain(chain, device, "matrix units").ranked]
    assert {tile.residence for tile in tiles} == {"shared memory"} and {tile.lanes for tile in tiles} == {64}
    assert all(product.columns % 32 == product.depth % 32 == 0 for tile in tiles for product in tile.products)
    assert max(tile.threads for tile in tiles) == 256
    refusal = construct_chain(replace(chain, dtype="bfloat16"), device, "matrix units").refusal
    assert "no kernel for AMD's matrix cores" in str(refusal)


def test_less_shared_memory_leaves_fewer_tiles() -> None:
    chain = halves(5000, 256, 128, 128)
    layers = tuple(
        replace(layer, capacity_bytes=24576, opt_in_capacity_bytes=None) if layer.name == "L1" else layer
        for layer in AMPERE.layers
    )
    small = replace(AMPERE, layers=layers)
    assert shared_limit_bytes(small) == 24576
    few, many = (construct_chain(chain, device, "matrix units").ranked for device in (small, AMPERE))
    assert 0 < len(few) < len(many)
    assert all(tile.shared_bytes <= 24576 for tile, _ in few)


def test_chains_pay_where_memory_binds_and_not_where_arithmetic_does() -> None:
    memory = halves(128320, 96, 32, 96)
    best = construct_chain(memory, AMPERE, "matrix units").ranked[0][1]
    assert best.bound == "L2"
    assert why_apart(memory, best, AMPERE, "matrix units") is None
    apart = sum(construct_chain(one, AMPERE, "matrix units").ranked[0][1].time_s for one in memory.singles)
    assert separate_s(memory, AMPERE, "matrix units") <= apart
    floats = replace(halves(32768, 576, 128, 64), dtype="float32", itemsize=4)
    best = construct_chain(floats, VOLTA, "vector units").ranked[0][1]
    assert best.bound == "compute"
    assert "bound by arithmetic" in str(why_apart(floats, best, VOLTA, "vector units"))
    slow = replace(best, time_s=separate_s(memory, AMPERE, "matrix units"))
    assert "predicted" in str(why_apart(memory, slow, AMPERE, "matrix units"))


@pytest.mark.parametrize("device", [AMPERE, HOPPER], ids=lambda device: device.name)
@pytest.mark.parametrize(
    ("rows", "sizes"), [(16384, (256, 64, 16)), (32768, (576, 128, 64)), (128320, (96, 32, 96))], ids=str
)
def test_bolts_table_1_is_taken(device: object, rows: int, sizes: tuple[int, ...]) -> None:
    chain = halves(rows, *sizes)
    best = construct_chain(chain, device, "matrix units").ranked[0][1]  # type: ignore[arg-type]
    assert why_apart(chain, best, device, "matrix units") is None  # type: ignore[arg-type]


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 5000), st.lists(st.integers(1, 300), min_size=3, max_size=5), st.sampled_from(UNITS))
def test_more_rows_take_no_less_time(rows: int, sizes: list[int], units: ChainUnits) -> None:
    chain, twice = halves(rows, *sizes), halves(2 * rows, *sizes)
    for tile, time in construct_chain(chain, AMPERE, units).ranked[:3]:
        assert predict_chain(twice, tile, AMPERE).time_s >= time.time_s


@given(st.integers(1, 64).map(lambda count: 4 * count), st.sampled_from([1, 2, 4, 8, 16, 32]))
def test_eight_threads_meet_all_banks(row: int, across: int) -> None:
    """Reading a chunk of as many rows as they are in, and writing their chunks of these rows."""
    pitch = row_pitch(row, across)
    assert row <= pitch < row + 32
    assert pitch % 4 == 0
    down = max(1, 8 // across)
    read = {(r * pitch // 4) % 8 for r in range(down)}
    written = {(r * pitch // 4 + c) % 8 for r in range(down) for c in range(min(across, 8))}
    assert len(read) == down
    assert len(written) == 8
