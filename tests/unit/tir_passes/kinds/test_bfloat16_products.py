"""Products of bfloat16 in float32 sums, by instruction and by widening; rounding to bfloat16."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tvm
from tvm import relax, te

from tests.support.dot_rows import FEATURES, HALVES, row_of, use_models_of_missing_instructions
from tests.unit.kernels import constructed, from_te, relative_error, run
from tvm_ext._tvm import CPU_PIPELINE
from tvm_ext.devices.device_db import lookup
from tvm_ext.devices.dot_instructions import VDPBF16PS, dot_instruction
from tvm_ext.relay_passes.layout.blocked import ConvWindow, convolution

ROWS = sorted(FEATURES)
ROUNDOFF = 2.0**-22
"""Of float32 sums of exact products, by norm."""


@pytest.fixture
def _models(monkeypatch: pytest.MonkeyPatch) -> None:
    use_models_of_missing_instructions(monkeypatch)


def numbers(rng: Any, shape: tuple[int, ...]) -> Any:
    return rng.standard_normal(shape).astype(ml_dtypes.bfloat16)


def product(m: int, k: int, n: int, result: str = "float32") -> Any:
    x = relax.Var("x", relax.TensorType((m, k), "bfloat16"))
    w = relax.Var("w", relax.TensorType((k, n), "bfloat16"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x, w]):
        builder.emit_func_output(builder.emit(relax.op.matmul(x, w, out_dtype=result)))
    module = relax.transform.LegalizeOps()(builder.get())
    (func,) = (func for _, func in module.functions_items() if not isinstance(func, relax.Function))
    return func


@pytest.mark.parametrize("row", ROWS)
def test_rows_have_their_instruction(row: str) -> None:
    found = dot_instruction(row_of(row), "bfloat16", "bfloat16", "float32")
    assert found is not None
    assert (found.name, found.register_bytes) == HALVES[row]
    assert dot_instruction(row_of(row), "bfloat16", "float32", "float32") is None


def test_rows_without_vectors_of_multiply_adds_have_none() -> None:
    for name in ("cpu-sse2", "cpu-neon", "nvidia-a100"):
        assert dot_instruction(lookup(name), "bfloat16", "bfloat16", "float32") is None


@pytest.mark.sampled
@pytest.mark.usefixtures("_models")
@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("seed", range(3))
def test_products_of_random_shapes_have_float32_sums(row: str, seed: int) -> None:
    rng = np.random.default_rng([seed, ROWS.index(row)])
    m, n = (int(size) for size in rng.integers(1, 70, 2))
    k = 2 * int(rng.integers(1, 80))
    x, w = numbers(rng, (m, k)), numbers(rng, (k, n))
    kernel, choice = constructed(product(m, k, n), constants=(1,), device=row_of(row))
    got = run(kernel, choice, [x, w], (m, n), "float32")
    assert relative_error(got, x.astype("float64") @ w.astype("float64")) < ROUNDOFF
    assert "reinterpret" in str(kernel.script()) or min(m, n) == 1


@pytest.mark.usefixtures("_models")
@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("k", range(1, 6))
def test_results_of_bfloat16_are_rounded_once(k: int) -> None:
    rng = np.random.default_rng(k)
    x, w = numbers(rng, (5, k)), numbers(rng, (k, 20))
    kernel, choice = constructed(product(5, k, 20, "bfloat16"), constants=(1,), device=row_of("cpu-epyc-zen5"))
    got = run(kernel, choice, [x, w], (5, 20), "bfloat16").astype("float32")
    sums = (x.astype("float64") @ w.astype("float64")).astype("float32")
    assert relative_error(got, sums) < 2.0**-8
    assert (got == sums.astype(ml_dtypes.bfloat16).astype("float32")).mean() > 0.95  # another order of additions


@pytest.mark.sampled
@pytest.mark.usefixtures("_models")
@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("strides", [(1, 1), (2, 1)])
@pytest.mark.parametrize("taps", [1, 3])
def test_blocked_convolutions_have_float32_sums(row: str, strides: tuple[int, int], taps: int) -> None:
    rng = np.random.default_rng([taps, *strides, ROWS.index(row)])
    device = row_of(row)
    lanes, groups = device.teu_lanes, int(rng.integers(1, 3))
    depth, filters = 8 * groups, lanes * int(rng.integers(1, 4))
    height, width = (int(size) for size in rng.integers(3, 17, 2))
    window = ConvWindow(strides=strides, dilation=(1, 1), pads=(1, 1, 0, 1))
    data = te.placeholder((1, depth // 8, height, width, 8), "bfloat16", "data")
    weight = te.placeholder((filters, depth, taps, taps), "bfloat16", "weight")
    result = convolution(window, 1, lanes, blocked_output=True)(data, weight)
    kernel, choice = constructed(from_te(data, weight, result), constants=(1,), device=device)
    x, w = numbers(rng, (1, depth, height, width)), numbers(rng, (filters, depth, taps, taps))
    blocked = x.reshape(1, depth // 8, 8, height, width).transpose(0, 1, 3, 4, 2)
    shape = tuple(int(size) for size in result.shape)
    got = run(kernel, choice, [blocked, w], shape, "float32")
    expected = np.zeros((1, filters, *shape[2:4]))
    padded = np.pad(x.astype("float64"), ((0, 0), (0, 0), (1, 0), (1, 1)))
    for ky in range(taps):
        for kx in range(taps):
            rows = slice(ky, ky + strides[0] * (shape[2] - 1) + 1, strides[0])
            columns = slice(kx, kx + strides[1] * (shape[3] - 1) + 1, strides[1])
            expected += np.einsum("ncyx,fc->nfyx", padded[:, :, rows, columns], w[:, :, ky, kx].astype("float64"))
    assert relative_error(got.transpose(0, 1, 4, 2, 3).reshape(expected.shape), expected) < ROUNDOFF
    assert "reinterpret" in str(kernel.script())


def test_code_for_a_cpu_with_the_instruction_consists_of_it() -> None:
    """Compiled for a Zen 5, whatever this machine is: no call is left, and no multiply-add of float32."""
    device = row_of("cpu-epyc-zen5")
    kernel, _ = constructed(product(64, 128, 96), constants=(1,), device=device)
    text = assembly(kernel, device)
    assert VDPBF16PS in text and "zmm" in text
    assert "vfmadd" not in text and "tvm_ext_llvm" not in text


def test_a_kernel_brings_its_functions_to_any_pipeline() -> None:
    """Stock TVM's pipeline links none: a call without its text ended the process where it was loaded."""
    kernel, _ = constructed(product(64, 128, 96), constants=(1,), device=row_of("cpu-epyc-zen5"))
    assert "pragma_import_llvm" in kernel.script()


@pytest.mark.parametrize("row", ["cpu-epyc-zen5", "cpu-cascade-lake"])
def test_rounding_is_one_instruction_where_there_is_one(row: str) -> None:
    device = row_of(row)
    text = assembly(rounding(64), device)
    assert ("vcvtneps2bf16" in text) == (row == "cpu-epyc-zen5")
    assert "tvm_ext_llvm" not in text and "__truncsfbf2" not in text


@pytest.mark.parametrize("target", [None, {"kind": "llvm", "mcpu": "x86-64"}])
@pytest.mark.parametrize("size", [1, 7, 64])
def test_rounding_is_to_nearest_even_and_keeps_nan_and_infinity(size: int, target: Any) -> None:
    bits = np.random.default_rng(size).integers(0, 1 << 32, (4096, size), np.uint64).astype(np.uint32)
    special = [0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF, 0xFF800000, 0x7F7FFFFF, 0x3F808000, 0x3F818000, 0x80000000]
    bits[: len(special), 0] = special
    x = bits.view("float32")
    x = np.where(np.abs(x) < 2.0**-125, np.float32(0), x)  # what the instruction takes for 0
    library = tvm.tirx.build(
        tvm.IRModule({"main": rounding(size, rows=4096)}),
        target=tvm.target.Target(target) if target else device_target(),
        pipeline=CPU_PIPELINE,
    )
    got = tvm.runtime.empty(x.shape, "bfloat16")
    library["main"](tvm.runtime.tensor(x), got)
    with np.errstate(invalid="ignore"):
        expected = x.astype(ml_dtypes.bfloat16).astype("float32")
    assert np.array_equal(got.numpy().astype("float32"), expected, equal_nan=True)


def rounding(size: int, rows: int = 1) -> Any:
    x = te.placeholder((rows, size), "float32", "x")
    kernel, _ = constructed(from_te(x, te.compute((rows, size), lambda i, j: x[i, j].astype("bfloat16"))))
    return kernel.with_attr("global_symbol", "main")


def device_target() -> Any:
    from tvm_ext.devices import device_db

    return device_db.device_for_target("llvm")[1]


def assembly(kernel: Any, device: Any) -> str:
    target = tvm.target.Target({key: list(v) if isinstance(v, tuple) else v for key, v in device.target})
    module = tvm.IRModule({"main": kernel.with_attr("global_symbol", "main")})
    return str(tvm.tirx.build(module, target=target, pipeline=CPU_PIPELINE).inspect_source("asm"))
