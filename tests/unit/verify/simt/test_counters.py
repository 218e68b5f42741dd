"""Sectors and wavefronts against hand-worked examples and a count in plain Python."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.verify.simt.small_kernels import function, lowered, numbers, run, tensors
from tvm_ext.ir.build_ir import SERIAL, VECTORIZED, index, load, loop, sequence, store
from tvm_ext.ir.simt_ir import allocate_shared, gpu_buffer, launch
from tvm_ext.verify.simt.counters import INACTIVE, global_request, shared_request

LANE = np.arange(32)


def warp(addresses: Any) -> Any:
    return np.asarray(addresses, np.int64)[None, :]


@pytest.mark.parametrize(
    ("addresses", "width", "expected"),
    [
        (LANE * 4, 4, (1, 4, 128)),  # side by side
        (LANE * 4 + 4, 4, (1, 5, 128)),  # shifted by one element: one more sector
        (LANE * 8, 4, (1, 8, 128)),  # every other float
        (LANE * 128, 4, (1, 32, 128)),  # a sector each
        (LANE * 0, 4, (1, 1, 4)),  # all lanes the same
        (LANE * 16, 16, (1, 16, 512)),  # float4
        (np.where(LANE < 8, LANE * 4, INACTIVE), 4, (1, 1, 32)),  # a quarter of the warp
        (np.full(32, INACTIVE), 4, (0, 0, 0)),
        (LANE * 12 + 2, 4, (1, 12, 128)),  # bytes 2 to 377
    ],
)
def test_sectors(addresses: Any, width: int, expected: tuple[int, int, int]) -> None:
    assert global_request(warp(addresses), width, 32) == expected


@pytest.mark.parametrize(
    ("addresses", "width", "expected"),
    [
        (LANE * 4, 4, (1, 1, 1)),
        (LANE * 128, 4, (1, 32, 1)),  # one bank
        (LANE * 132, 4, (1, 1, 1)),  # rows of 32 floats padded by one
        (LANE * 0, 4, (1, 1, 1)),  # a broadcast
        (LANE // 2 * 4 + LANE % 2 * 2, 2, (1, 1, 1)),  # halves, two to a word
        (LANE * 8, 8, (1, 2, 2)),
        (LANE * 16, 16, (1, 4, 4)),
        (LANE * 64, 16, (1, 16, 4)),  # float4 in rows of 16 floats: 4 ways in each quarter
        (LANE // 8 * 4, 16, (1, 4, 4)),
        (LANE % 16 * 8, 4, (1, 1, 1)),  # 16 words in even banks, each read twice
        (LANE * 8, 4, (1, 2, 1)),
    ],
)
def test_wavefronts(addresses: Any, width: int, expected: tuple[int, int, int]) -> None:
    assert shared_request(warp(addresses), width, 32, 4) == expected


def wavefronts_in_python(addresses: Any, width: int) -> int:
    total, lanes = 0, min(32, 128 // max(4, width))
    for start in range(0, 32, lanes):
        banks: dict[int, set[int]] = {}
        for address in addresses[start : start + lanes]:
            if address >= 0:
                for word in range(address // 4, address // 4 + max(1, width // 4)):
                    banks.setdefault(word % 32, set()).add(word)
        total += max(map(len, banks.values()), default=0)
    return total


@given(st.data(), st.sampled_from([2, 4, 8, 16]))
def test_wavefronts_of_any_pattern(data: Any, width: int) -> None:
    elements = data.draw(st.lists(st.one_of(st.just(-1), st.integers(0, 300)), min_size=32, max_size=32))
    addresses = [e * width if e >= 0 else INACTIVE for e in elements]
    assert shared_request(warp(addresses), width, 32, 4)[1] == wavefronts_in_python(addresses, width)


@given(st.data(), st.sampled_from([1, 2, 4, 8, 16]))
def test_sectors_of_any_pattern(data: Any, width: int) -> None:
    addresses = data.draw(st.lists(st.one_of(st.just(-1), st.integers(0, 2000)), min_size=32, max_size=32))
    touched = {byte for a in addresses if a >= 0 for byte in range(a, a + width)}
    active = any(a >= 0 for a in addresses)
    assert global_request(warp(addresses), width, 32) == (int(active), len({b // 32 for b in touched}), len(touched))


def test_a_kernel_is_counted() -> None:
    """Copies 64 floats as float4 and adds: 16 threads; a warp's request moves 8 sectors each way."""
    a, b = tensors("A", "B")

    def body(block: Any, t: Any) -> Any:
        def one(v: Any) -> Any:
            i = t * index(4) + v
            return store(b, load(a, [i]) + load(a, [i]), [i])

        return loop(4, VECTORIZED, "v", one)

    counters = run(lowered(function([a, b], launch(1, 16, body))), A=numbers()).counters
    assert counters.flops == 64
    (stores,) = counters.select(scope="global", store=True)
    assert (stores.requests, stores.sectors, stores.useful_bytes, stores.width_bytes) == (1, 8, 256, 16)
    assert counters.sector_efficiency() == 1.0 and counters.sector_efficiency(store=True) == 1.0


@pytest.mark.parametrize(("padding", "conflicts"), [(0, 2 * 31), (1, 0)])
def test_padding_removes_the_conflicts_of_a_transposition(padding: int, conflicts: int) -> None:
    """A warp writes a row of a 32x32 tile and reads a column, twice (two columns)."""
    a, b = tensors("A", "B", size=64)
    tile = gpu_buffer((32, 32), "float32", "tile", "shared")

    def body(block: Any, t: Any) -> Any:
        rows = loop(32, SERIAL, "r", lambda r: store(tile, load(a, [t]), [r, t]))
        reads = loop(2, SERIAL, "c", lambda c: store(b, load(tile, [t, c]), [c * index(32) + t]))
        return sequence(allocate_shared(tile, padding=padding), rows, reads)

    counters = run(lowered(function([a, b], launch(1, 32, body))), A=numbers()).counters
    assert counters.bank_conflicts == conflicts
    assert counters.barriers == 1
    assert counters.total("requests", scope="shared", store=True) == 32
