"""Random matrix products, randomly staged and pipelined, in the interpreter: right values, no findings."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.pipelining.check import Pipelined, Wanted, check, pipelined
from tests.support.pipelining.kernels import A100, DEPTH, T4, TILE, Copy, PipeliningKernel, product_reference
from tests.support.pipelining.products import Product, matmul
from tvm_ext.ir.build_ir import SERIAL, UNROLLED

EVERYDAY, MORE = 15, 1500


def random_kernel(rng: np.random.Generator) -> PipeliningKernel:
    """One or two blocks, 1 to 9 reduction steps, whole or with edges; every way to copy, allocate and use a tile."""
    steps, has_edges = int(rng.integers(1, 10)), bool(rng.integers(4) == 0)
    dtype = "float32" if has_edges else str(rng.choice(["float32", "float16"]))
    vector = 1 if has_edges else int(rng.choice([1, 2, 4] if dtype == "float32" else [2, 4, 8]))
    options: dict[str, Any] = {
        "copy": Copy(vector=vector, guarded=has_edges, kind=rng.choice([SERIAL, UNROLLED])),
        "fragment_depth": int(rng.choice([0, 1, 2, 4, 8, 16])),
        "outside": bool(rng.integers(2)),
        "padding": int(rng.choice([0, 8])),
    }
    missing = int(rng.integers(DEPTH)) if has_edges else 0
    sizes = (TILE, TILE * int(rng.integers(1, 3)) - missing % 5, steps * DEPTH - missing)
    return PipeliningKernel(
        name=f"{sizes} {dtype} {options}",
        make=lambda: matmul(*sizes, lambda a, b: Product(a=a, b=b, **options), dtype=dtype, steps=steps),
        reference=product_reference,
    )


def random_wish(rng: np.random.Generator) -> Wanted:
    shared, registers = int(rng.integers(2, 9)), int(rng.integers(1, 5))
    if rng.integers(8) == 0:
        return Wanted(mode=str(rng.choice(["full", "multistage", "double"])))
    return Wanted(shared_stages=shared, register_stages=registers)


def prove(seed: int) -> Pipelined:
    rng = np.random.default_rng(seed)
    kernel, wanted, device = random_kernel(rng), random_wish(rng), str(rng.choice([A100, A100, T4]))
    item = pipelined(kernel, device, wanted)
    result = check(item, seed=seed)
    assert result.ok, f"seed {seed}: {kernel} on {device}, {wanted}: {item.plan}\n{result}"
    depths = {buffer.stages for buffer in item.plan.buffers if buffer.level == 0}
    assert all(2 <= depth <= (wanted.shared_stages or 8) for depth in depths)
    return item


def test_random_products_are_right_once_they_are_pipelined() -> None:
    items = [prove(seed) for seed in range(EVERYDAY)]
    levels = [{buffer.level for buffer in item.plan.buffers} for item in items]
    assert levels.count({0}) >= EVERYDAY // 5, "shared memory alone"
    assert levels.count({0, 1}) >= EVERYDAY // 5, "both levels"


@pytest.mark.slow
def test_many_random_products_are_right_once_they_are_pipelined() -> None:
    for seed in range(EVERYDAY, MORE):
        prove(seed)
