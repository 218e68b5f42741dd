"""The vendor's heuristics, and how our ranking agrees with them."""

from __future__ import annotations

import pytest

from benchmarks.gpu import vendor_heuristics
from benchmarks.gpu.vendor_heuristics import vendor_choices
from tvm_ext.byoc_cutlass.epilogue import Epilogue
from tvm_ext.byoc_cutlass.gemm import packed_problem
from tvm_ext.byoc_cutlass.products import ProductFamily
from tvm_ext.devices.device_db import lookup
from tvm_ext.errors import InputError, TargetError, UnsupportedEnvironmentError
from tvm_ext.records.partition import CutlassProblem

SHAPES = [(128, 1000, 2048), (1024, 768, 768), (1280, 3072, 768), (4096, 4096, 4096), (32768, 64, 128)]
PLAIN = Epilogue(out_dtype="float16")


def product(m: int, n: int, k: int, arithmetic: str = "float16", batch: int = 1) -> CutlassProblem:
    return packed_problem(m=m, n=n, k=k, batch=batch, arithmetic=arithmetic, out_dtype="float16")


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("name", ["nvidia-a100", "nvidia-h200"])
def test_the_vendors_tile_is_mostly_among_our_first_eight(name):
    """The whole list is benchmarks/gpu/heuristics.py's."""
    device, among = lookup(name), 0
    for shape in SHAPES:
        best = vendor_choices(product(*shape), device)[0]
        first = ProductFamily(product(*shape), device, PLAIN).propose(8)
        among += best.tile in {item.config.threadblock[:2] for item in first}
    assert among >= 4


def test_what_the_package_does_not_know_is_said():
    with pytest.raises(TargetError, match="nvidia-t4"):
        vendor_choices(product(64, 64, 64), lookup("nvidia-t4"))
    with pytest.raises(InputError, match="int8"):
        vendor_choices(product(64, 64, 64, "int8"), lookup("nvidia-a100"))


def test_without_the_package_the_remedy_is_named(monkeypatch):
    monkeypatch.setattr(vendor_heuristics, "is_installed", lambda: False)
    vendor_heuristics._session.cache_clear()
    try:
        with pytest.raises(UnsupportedEnvironmentError, match=r"tvm-ext\[heuristics\]"):
            vendor_choices(product(64, 64, 64), lookup("nvidia-a100"))
    finally:
        vendor_heuristics._session.cache_clear()
