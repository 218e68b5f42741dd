"""Products and convolutions of bytes by dot-product instructions: exact on CPUs with and without them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tvm import relax, te

from tests.support.dot_rows import FEATURES, INSTRUCTIONS, row_of, stand_in, use_models_of_missing_instructions
from tests.unit.kernels import constructed, from_te, run
from tvm_ext.devices.device_db import lookup
from tvm_ext.devices.dot_instructions import DOT_INSTRUCTIONS, dot_instruction
from tvm_ext.relay_passes.layout.blocked import ConvWindow, convolution
from tvm_ext.relay_passes.narrow_products import grouped_product

ROWS = sorted(FEATURES)


@pytest.fixture(autouse=True)
def _models(monkeypatch: pytest.MonkeyPatch) -> None:
    use_models_of_missing_instructions(monkeypatch)


def bytes_of(rng: Any, shape: tuple[int, ...], dtype: str) -> Any:
    """Random bytes, a third of them extremes."""
    limits = np.iinfo(dtype)
    x = rng.integers(limits.min, limits.max, shape, dtype, endpoint=True)
    extreme = rng.choice([limits.min, limits.max], shape)
    return np.where(rng.integers(0, 3, shape) == 0, extreme, x).astype(dtype)


def product(m: int, k: int, n: int) -> Any:
    x = relax.Var("x", relax.TensorType((m, k), "uint8"))
    w = relax.Var("w", relax.TensorType((k, n), "int8"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x, w]):
        builder.emit_func_output(builder.emit(relax.op.matmul(x, w, out_dtype="int32")))
    module = relax.transform.LegalizeOps()(builder.get())
    (func,) = (func for _, func in module.functions_items() if not isinstance(func, relax.Function))
    return func


@pytest.mark.parametrize("row", ROWS)
def test_rows_have_their_instruction(row: str) -> None:
    found = dot_instruction(row_of(row), "uint8", "int8", "int32")
    assert found is not None
    assert (found.name, found.register_bytes) == INSTRUCTIONS[row]
    assert dot_instruction(row_of(row), "uint8", "uint8", "int32") is None


def test_other_rows_have_none() -> None:
    for name in ("cpu-sse2", "cpu-neon", "nvidia-a100"):
        assert dot_instruction(lookup(name), "uint8", "int8", "int32") is None


@pytest.mark.sampled
@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("seed", range(3))
def test_products_of_random_shapes_are_exact(row: str, seed: int) -> None:
    rng = np.random.default_rng([seed, ROWS.index(row)])
    m, n = (int(size) for size in rng.integers(1, 70, 2))
    k = 4 * int(rng.integers(1, 40))
    x, w = bytes_of(rng, (m, k), "uint8"), bytes_of(rng, (k, n), "int8")
    kernel, choice = constructed(product(m, k, n), constants=(1,), device=row_of(row))
    got = run(kernel, choice, [x, w], (m, n), "int32")
    assert (got == x.astype("int64") @ w.astype("int64")).all()
    assert "reinterpret" in str(kernel.script()) or min(m, n) == 1


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("row", ROWS)
def test_weights_of_a_run_that_lie_by_groups_are_exact(row: str) -> None:
    rng = np.random.default_rng(ROWS.index(row))
    heads, m, groups, n = 2, int(rng.integers(1, 20)), int(rng.integers(1, 9)), 16 * int(rng.integers(1, 5))
    x, w = bytes_of(rng, (heads, m, 4 * groups), "uint8"), bytes_of(rng, (heads, groups, n, 4), "int8")
    data, weights = te.placeholder(x.shape, "uint8", "x"), te.placeholder(w.shape, "int8", "w")
    kernel, choice = constructed(from_te(data, weights, grouped_product(data, weights)), device=row_of(row))
    wide = w.transpose(0, 1, 3, 2).reshape(heads, 4 * groups, n).astype("int64")
    assert (run(kernel, choice, [x, w], (heads, m, n), "int32") == x.astype("int64") @ wide).all()
    assert "reinterpret" in str(kernel.script())


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("k", range(1, 10))
def test_short_reductions_are_exact(k: int) -> None:
    """Those that are no whole groups are plain arithmetic."""
    rng = np.random.default_rng(k)
    x, w = bytes_of(rng, (5, k), "uint8"), bytes_of(rng, (k, 20), "int8")
    kernel, choice = constructed(product(5, k, 20), constants=(1,), device=row_of("cpu-epyc-zen5"))
    got = run(kernel, choice, [x, w], (5, 20), "int32")
    assert (got == x.astype("int64") @ w.astype("int64")).all()
    assert ("reinterpret" in str(kernel.script())) == (k % 4 == 0)


@pytest.mark.parametrize("name", ["vpdpbusd", "vpmaddwd"])
def test_the_model_is_the_instruction(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both give the same sums; where the tests' target lacks the instruction, the model is compared with NumPy."""
    (row, *_) = (row for row in ROWS if INSTRUCTIONS[row][0] == name)
    rng = np.random.default_rng(7)
    x, w = bytes_of(rng, (9, 64), "uint8"), bytes_of(rng, (64, 40), "int8")
    for instruction in DOT_INSTRUCTIONS:
        stand_in(monkeypatch, instruction)
    kernel, choice = constructed(product(9, 64, 40), constants=(1,), device=row_of(row))
    assert "call_llvm" not in str(kernel.script())
    assert (run(kernel, choice, [x, w], (9, 40), "int32") == x.astype("int64") @ w.astype("int64")).all()


@pytest.mark.sampled
@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("strides", [(1, 1), (2, 1)])
@pytest.mark.parametrize("taps", [1, 3])
def test_blocked_convolutions_are_exact(row: str, strides: tuple[int, int], taps: int) -> None:
    rng = np.random.default_rng([taps, *strides, ROWS.index(row)])
    device = row_of(row)
    lanes, groups = device.teu_lanes, int(rng.integers(1, 3))
    depth, filters = 8 * groups, lanes * int(rng.integers(1, 4))
    height, width = (int(size) for size in rng.integers(3, 17, 2))
    window = ConvWindow(strides=strides, dilation=(1, 1), pads=(1, 1, 0, 1))
    data = te.placeholder((1, depth // 8, height, width, 8), "uint8", "data")
    weight = te.placeholder((filters, depth, taps, taps), "int8", "weight")
    result = convolution(window, 1, lanes, blocked_output=True)(data, weight)
    kernel, choice = constructed(from_te(data, weight, result), constants=(1,), device=device)
    x, w = bytes_of(rng, (1, depth, height, width), "uint8"), bytes_of(rng, (filters, depth, taps, taps), "int8")
    blocked = x.reshape(1, depth // 8, 8, height, width).transpose(0, 1, 3, 4, 2)
    shape = tuple(int(size) for size in result.shape)
    got = run(kernel, choice, [blocked, w], shape, "int32")
    expected = np.zeros((1, filters, *shape[2:4]), "int64")
    padded = np.pad(x, ((0, 0), (0, 0), (1, 0), (1, 1))).astype("int64")
    for ky in range(taps):
        for kx in range(taps):
            rows = slice(ky, ky + strides[0] * (shape[2] - 1) + 1, strides[0])
            columns = slice(kx, kx + strides[1] * (shape[3] - 1) + 1, strides[1])
            expected += np.einsum("ncyx,fc->nfyx", padded[:, :, rows, columns], w[:, :, ky, kx].astype("int64"))
    assert (got.transpose(0, 1, 4, 2, 3).reshape(expected.shape) == expected).all()
    assert "reinterpret" in str(kernel.script())


def test_sums_of_bytes_are_no_products() -> None:
    """What adds a constant to the data has the same types and accesses, and no instruction."""
    rng = np.random.default_rng(3)
    x, w = te.placeholder((6, 4), "uint8", "x"), te.placeholder((4, 33), "int8", "w")
    k = te.reduce_axis((0, 4), "k")
    total = te.compute((6, 33), lambda i, j: te.sum(x[i, k].astype("int32") + w[k, j].astype("int32"), axis=k))
    kernel, choice = constructed(from_te(x, w, total), constants=(1,), device=row_of("cpu-epyc-zen5"))
    a, b = bytes_of(rng, (6, 4), "uint8"), bytes_of(rng, (4, 33), "int8")
    expected = a.astype("int64").sum(1)[:, None] + b.astype("int64").sum(0)
    assert (run(kernel, choice, [a, b], (6, 33), "int32") == expected).all()
    assert "reinterpret" not in str(kernel.script())
