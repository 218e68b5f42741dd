"""Products and convolutions by Arm's matrix instructions, two rows at a time: exact on a model, compiled for Arm."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tvm import te, tirx

from tests.support.dot_rows import use_models_of_missing_instructions
from tests.unit.kernels import constructed, from_te, relative_error, run
from tests.unit.tir_passes.kinds.test_bfloat16_products import ROUNDOFF, assembly, numbers
from tests.unit.tir_passes.kinds.test_bfloat16_products import product as bfloat16_product
from tests.unit.tir_passes.kinds.test_dot_products import bytes_of, product
from tvm_ext.cost.reduction_chunks import ReductionChunks
from tvm_ext.devices.device_db import lookup
from tvm_ext.relay_passes.layout.blocked import ConvWindow, convolution

ROW = "cpu-neoverse-v1"


@pytest.fixture
def _models(monkeypatch: pytest.MonkeyPatch) -> None:
    use_models_of_missing_instructions(monkeypatch)


@pytest.mark.usefixtures("_models")
@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(("m", "k", "n"), [(2, 16, 4), (3, 24, 9), (7, 64, 33), (33, 40, 20)])
def test_products_of_bytes_are_exact(m: int, k: int, n: int) -> None:
    """Odd last rows, and lanes that fill no register."""
    _exact(m, k, n)


@pytest.mark.usefixtures("_models")
def test_sums_of_a_reduction_in_chunks_wait_by_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = ReductionChunks(extent=12, steps=5)
    monkeypatch.setattr("tvm_ext.tir_passes.emit.cpu_tiles.layout.reduction_chunks", lambda *_: chunks)
    assert "chunk" in _exact(13, 96, 20)


def _exact(m: int, k: int, n: int) -> str:
    """The text of the product's kernel."""
    rng = np.random.default_rng([m, k])
    x, w = bytes_of(rng, (m, k), "uint8"), bytes_of(rng, (k, n), "int8")
    kernel, choice = constructed(product(m, k, n), constants=(1,), device=lookup(ROW))
    assert choice.reason.endswith("by usmmla")
    assert (run(kernel, choice, [x, w], (m, n), "int32") == x.astype("int64") @ w.astype("int64")).all()
    return str(kernel.script())


@pytest.mark.usefixtures("_models")
@pytest.mark.parametrize(("m", "k", "n", "result"), [(5, 20, 11, "float32"), (32, 64, 48, "bfloat16")])
def test_products_of_bfloat16_have_float32_sums(m: int, k: int, n: int, result: str) -> None:
    rng = np.random.default_rng(m)
    x, w = numbers(rng, (m, k)), numbers(rng, (k, n))
    kernel, choice = constructed(bfloat16_product(m, k, n, result), constants=(1,), device=lookup(ROW))
    assert choice.reason.endswith("by bfmmla")
    got = run(kernel, choice, [x, w], (m, n), result).astype("float32")
    bound = ROUNDOFF if result == "float32" else 2.0**-8
    assert relative_error(got, x.astype("float64") @ w.astype("float64")) < bound


@pytest.mark.parametrize(("m", "k"), [(1, 64), (16, 20), (1, 4)])
def test_single_rows_and_odd_depths_keep_single_rows(m: int, k: int) -> None:
    choice = constructed(product(m, k, 32), constants=(1,), device=lookup(ROW))[1]
    assert "mmla" not in choice.reason


@pytest.mark.usefixtures("_models")
def test_the_epilogue_reads_sums_by_rows() -> None:
    m, k, n = 9, 32, 24
    x, w = te.placeholder((m, k), "uint8", "x"), te.placeholder((k, n), "int8", "w")
    scale, r = te.placeholder((n,), "float32", "scale"), te.reduce_axis((0, k), "r")
    total = te.compute((m, n), lambda i, j: te.sum(x[i, r].astype("int32") * w[r, j].astype("int32"), axis=r))
    result = te.compute((m, n), lambda i, j: tirx.max(total[i, j].astype("float32") * scale[j], 0.0))
    kernel, choice = constructed(from_te(x, w, scale, result), constants=(1,), device=lookup(ROW))
    rng = np.random.default_rng(1)
    a, b, factors = (
        bytes_of(rng, (m, k), "uint8"),
        bytes_of(rng, (k, n), "int8"),
        rng.uniform(0, 1, n).astype("float32"),
    )
    got = run(kernel, choice, [a, b, factors], (m, n), "float32")
    assert "usmmla" in choice.reason
    assert (got == np.maximum((a.astype("int64") @ b.astype("int64")).astype("float32") * factors, 0)).all()


@pytest.mark.usefixtures("_models")
@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("blocked_output", [True, False])
def test_convolutions_of_one_tap_copy_pairs_of_blocks(blocked_output: bool) -> None:
    """Channels in blocks of four: a row of eight bytes is two blocks of a pixel."""
    channels, filters, height, width = 32, 256, 5, 7
    window = ConvWindow(strides=(1, 1), dilation=(1, 1), pads=(0, 0, 0, 0))
    data = te.placeholder((1, channels // 4, height, width, 4), "uint8", "data")
    weight = te.placeholder((filters, channels, 1, 1), "int8", "weight")
    result = convolution(window, 1, 4, blocked_output=blocked_output)(data, weight)
    kernel, choice = constructed(from_te(data, weight, result), constants=(1,), device=lookup(ROW))
    assert "usmmla" in choice.reason and "_rows" in str(kernel.script())
    rng = np.random.default_rng(2)
    x, w = bytes_of(rng, (channels, height, width), "uint8"), bytes_of(rng, (filters, channels), "int8")
    blocked = x.reshape(1, channels // 4, 4, height, width).transpose(0, 1, 3, 4, 2)
    got = run(kernel, choice, [blocked, w.reshape(filters, channels, 1, 1)], tuple(map(int, result.shape)), "int32")
    got = got.transpose(0, 1, 4, 2, 3).reshape(1, filters, height, width) if blocked_output else got
    assert (got[0] == np.einsum("fc,cyx->fyx", w.astype("int64"), x.astype("int64"))).all()


@pytest.mark.parametrize(
    ("kind", "m", "instruction"),
    [("bfloat16", 32, "bfmmla"), ("bytes", 32, "usmmla"), ("bfloat16", 1, "bfdot"), ("bytes", 1, "usdot")],
)
def test_machine_code_has_the_instruction(kind: str, m: int, instruction: str) -> None:
    """Cross-compiled: it has never run on such a processor."""
    device = lookup(ROW)
    func: Any = (bfloat16_product if kind == "bfloat16" else product)(m, 64, 48)
    kernel, _ = constructed(func, constants=(1,), device=device)
    names = [line.split()[0] for line in assembly(kernel, device).splitlines() if line.strip()]
    assert names.count(instruction) >= 4
    assert not {"fmla", "mla", "fcvt"} & set(names)
