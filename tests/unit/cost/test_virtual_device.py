"""vEUs of the device tables' rows, and the cache that one of a CPU's keeps."""

from __future__ import annotations

import pytest

from tvm_ext.cost.constant_cache import ConstantCache
from tvm_ext.cost.virtual_device import virtual_device
from tvm_ext.devices import device_db
from tvm_ext.errors import IllegalRewrite
from tvm_ext.records.rtasks import Need


@pytest.mark.parametrize(
    ("device", "need", "units", "veus"),
    [
        ("nvidia-v100", Need(threads=256, registers=64, shared_bytes=24576), 80, 4),
        ("nvidia-v100", Need(threads=1024, registers=64), 80, 1),
        ("nvidia-a100", Need(threads=128, registers=32, shared_bytes=32768), 108, 4),
        ("nvidia-h200", Need(threads=1024, registers=32), 132, 2),
        ("amd-mi50", Need(threads=256, registers=64), 60, 4),
        ("graphcore-ipu", Need(threads=1), 1216, 1),
        ("cpu-epyc-zen5", Need(), 2, 1),
    ],
)
def test_veus_are_resident_blocks(device: str, need: Need, units: int, veus: int) -> None:
    made = virtual_device(device_db.lookup(device), need)
    assert (made.unit_count, made.veus_per_unit) == (units, veus)
    assert made.fine_barriers == (device != "graphcore-ipu")
    assert min(made.task_overhead_s, made.barrier_s) > 0


def test_only_a_core_keeps_constants() -> None:
    zen = virtual_device(device_db.lookup("cpu-epyc-zen5"), Need())
    assert zen.cache_bytes == 1024 * 1024
    assert zen.refill_s(2**20) == pytest.approx(2**20 / 115e9)  # half of the 230 GB/s of both cores' L3
    assert virtual_device(device_db.lookup("nvidia-v100"), Need(threads=64)).cache_bytes == 0


def test_what_fits_no_unit_is_refused() -> None:
    with pytest.raises(IllegalRewrite, match="1024 threads, 255 registers each"):
        virtual_device(device_db.lookup("nvidia-v100"), Need(threads=1024, registers=255))


def test_a_cache_holds_what_ran_last() -> None:
    cache = ConstantCache(1000)
    assert cache.run(("a", "k"), 0, 4, 100) == 400
    assert cache.run(("a", "k"), 0, 4, 100) == 0
    assert cache.run(("a", "k"), 2, 6, 100) == 200  # joined: 0 to 6
    assert cache.run(("b", "k"), 0, 4, 100) == 400  # both fit
    assert cache.missing_bytes(("a", "k"), 0, 6, 100) == 0
    assert cache.run(("c", "k"), 0, 1, 100) == 100  # a, used longest ago, leaves
    assert cache.missing_bytes(("a", "k"), 0, 6, 100) == 600
    assert cache.missing_bytes(("b", "k"), 0, 4, 100) == 0


def test_what_is_larger_than_the_cache_is_read_every_time() -> None:
    cache = ConstantCache(1000)
    assert [cache.run(("a", "k"), 0, 2, 600) for _ in range(2)] == [1200, 1200]
    assert cache.copy().run(("a", "k"), 5, 6, 600) == 600


def test_a_copy_goes_its_own_way() -> None:
    cache = ConstantCache(1000)
    cache.run(("a", "k"), 0, 1, 100)
    copy = cache.copy()
    copy.run(("b", "k"), 0, 10, 100)
    assert copy.missing_bytes(("a", "k"), 0, 1, 100) == 100
    assert cache.missing_bytes(("a", "k"), 0, 1, 100) == 0
