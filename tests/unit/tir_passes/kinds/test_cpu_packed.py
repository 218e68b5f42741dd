"""Products by weights of four bits whose left operand is rounded: exact sums of the rounded numbers, block by block."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tvm import te

from tests.support.dot_rows import FEATURES, INSTRUCTIONS, row_of, use_models_of_missing_instructions
from tests.unit.kernels import constructed, from_te, run
from tvm_ext.cost.packed_products import MOST_WEIGHTS, PackedTiles
from tvm_ext.devices.dot_instructions import VPMADDWD
from tvm_ext.records.packed import ROUNDED
from tvm_ext.relay_passes.onnx.operators.packed_product import product
from tvm_ext.relay_passes.settle_packed import floats
from tvm_ext.tir_passes.emit.cpu_packed.emit import MOST_UNROLLED

ROWS = sorted(row for row in FEATURES if INSTRUCTIONS[row][0] != VPMADDWD)


@pytest.fixture(autouse=True)
def _models(monkeypatch: pytest.MonkeyPatch) -> None:
    use_models_of_missing_instructions(monkeypatch)


def function_of(arrays: list[Any]) -> Any:
    operands = [te.placeholder(array.shape, str(array.dtype), f"p{n}") for n, array in enumerate(arrays)]
    return from_te(*operands, product(*operands)).with_attr(ROUNDED, True)


def operands_of(rng: Any, rows: int, columns: int, blocks: int, half: int, *, zeros: bool) -> list[Any]:
    scales = rng.uniform(0.01, 0.02, (blocks, columns)).astype("float32")
    points = [rng.integers(0, 16, (blocks, columns), "uint8")] if zeros else []
    x = rng.standard_normal((rows, 2 * half * blocks)).astype("float32")
    return [x, rng.integers(0, 256, (blocks, half, columns), "uint8"), scales, *points]


def computed(operands: list[Any], row: str) -> Any:
    rows, columns = len(operands[0]), operands[1].shape[2]
    kernel, choice = constructed(function_of(operands), constants=tuple(range(1, len(operands))), device=row_of(row))
    assert choice.reason.startswith("int8 by four bits")
    return run(kernel, choice, operands, (rows, columns), "float32")


def rounded(x: Any, block: int) -> Any:
    """What the bytes of each block stand for, in float64; numbers of ``x`` that are nearly ties become 0 themselves."""
    blocks = x.reshape(len(x), -1, block)
    step = np.abs(blocks).max(axis=2, keepdims=True).astype("float64") / 127
    blocks[np.abs(blocks / step % 1 - 0.5) < 1e-3] = 0
    return (np.rint(blocks / step) * step).reshape(x.shape)


def error(got: Any, wanted: Any) -> float:
    return float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted))


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("seed", range(3))
def test_products_of_random_shapes(row: str, seed: int) -> None:
    rng = np.random.default_rng([seed, ROWS.index(row)])
    rows, columns, blocks = (int(size) for size in rng.integers(1, (18, 90, 5)))
    half = 4 * int(rng.integers(1, 10)) if seed else 4 * (MOST_UNROLLED + 1)
    operands = operands_of(rng, rows, columns, blocks, half, zeros=seed % 2 == 1)
    x, weights = operands[0], floats(*operands[1:]).astype("float64")
    wanted = rounded(x, 2 * half) @ weights
    got = computed(operands, row)
    assert error(got, wanted) < 1e-5
    assert error(got, x.astype("float64") @ weights) < 3e-2


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("zeros", [False, True])
def test_the_bias_is_added_where_sums_are_stored(zeros: bool) -> None:
    """The last panel has fewer columns than the others."""
    operands = operands_of(np.random.default_rng(3), 5, 83, 2, 16, zeros=zeros)
    bias = np.random.default_rng(4).standard_normal(83).astype("float32")
    plain, row = computed(operands, "cpu-epyc-zen5"), "cpu-epyc-zen5"
    assert (computed([*operands, bias], row) == plain + bias).all()


def test_numbers_that_are_bytes_are_exact() -> None:
    """Signed bytes with 127 in each block, times scales that are powers of two."""
    rng = np.random.default_rng(0)
    x, codes, scales, zeros = operands_of(rng, 7, 40, 3, 16, zeros=True)
    x = rng.integers(-127, 128, x.shape).astype("float32")
    x[:, ::32] = 127
    scales = np.exp2(rng.integers(-3, 3, scales.shape)).astype("float32")
    for operands in ([x, codes, scales, zeros], [x, codes, scales]):
        wanted = x.astype("float64") @ floats(*operands[1:]).astype("float64")
        assert (computed(operands, "cpu-epyc-zen5") == wanted).all()


def test_numbers_beyond_floats_stay_beyond_and_small_ones_vanish() -> None:
    x, codes, scales = operands_of(np.random.default_rng(0), 5, 16, 2, 16, zeros=False)
    x[0, 3], x[1, 40], x[2, 0] = np.nan, np.inf, -np.inf
    x[3], x[4] = 0.0, 1e-38
    got = computed([x, codes, scales], "cpu-epyc-zen5")
    assert not np.isfinite(got[:3]).any()
    assert (np.abs(got[3:]) < 1e-30).all()


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("rows", [1, 2, 5, 8, 13, 128])
def test_sums_and_operands_fit_the_registers(row: str, rows: int) -> None:
    device = row_of(row)
    tiles = PackedTiles.of(rows, 4096, 8, 16, device)
    assert tiles is not None
    assert tiles.height <= rows
    assert 2 * tiles.vectors * (tiles.height + 1) < device.register_limit


def test_other_processors_have_no_tiles() -> None:
    assert PackedTiles.of(1, 64, 2, 16, row_of("cpu-cascade-lake")) is None
    for half in (6, MOST_WEIGHTS // 2 + 4):
        assert PackedTiles.of(1, 64, 2, half, row_of("cpu-epyc-zen5")) is None
