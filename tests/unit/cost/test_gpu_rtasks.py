"""How threadblocks share a GPU's units."""

from __future__ import annotations

import pytest

from tvm_ext.cost.gpu_rtasks import gpu_rkernel
from tvm_ext.devices import device_db
from tvm_ext.records.rtasks import Need, RKernel

V100 = device_db.lookup("nvidia-v100")
WARP = Need(threads=32, registers=64, shared_bytes=4096)


def kernel(blocks: int, time_us: float, busy_us: float | None) -> RKernel:
    return gpu_rkernel("k", WARP, blocks, time_us * 1e-6, V100, None if busy_us is None else busy_us * 1e-6)


@pytest.mark.parametrize(
    ("busy_us", "residents"),
    [
        (None, 8),  # eight warps fill a unit
        (6.0, 1),  # one block keeps the unit busy: two take twice as long
        (2.0, 3),
        (0.1, 8),  # latency: eight blocks as fast as one
    ],
)
def test_blocks_share_what_the_busiest_resource_has(busy_us: float | None, residents: int) -> None:
    found = kernel(80, 6.0, busy_us)
    assert found.residents == residents
    assert found.task_s_beside(1) == pytest.approx(6e-6)
    if busy_us is not None:
        assert found.work_s / V100.unit_count >= busy_us * 1e-6 * (1 - 1e-9)


def test_blocks_that_are_resident_at_once_share_the_time() -> None:
    found = kernel(320, 8.0, 8.0)
    assert (found.residents, found.task_s) == (4, pytest.approx(8e-6))
    assert found.work_s == pytest.approx(80 * 8e-6)
