"""Products and convolutions by the tile instructions of Intel AMX: exact on a model of them, on every machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import te, tirx

from tests.support.amx_machine import amx_row, counts, emulated, fault, tile_calls
from tests.support.dot_rows import use_models_of_missing_instructions
from tests.support.guarded_memory import MemoryGuardError
from tests.unit.kernels import constructed, from_te, relative_error, run
from tests.unit.tir_passes.kinds.test_bfloat16_products import ROUNDOFF, numbers
from tests.unit.tir_passes.kinds.test_bfloat16_products import product as bfloat16_product
from tests.unit.tir_passes.kinds.test_dot_products import bytes_of, product
from tvm_ext._tvm import BufferStore, PrimFunc, Target, structural_equal, structural_map
from tvm_ext.devices.device_db import lookup
from tvm_ext.relay_passes.layout.blocked import ConvWindow, convolution


@pytest.fixture(autouse=True)
def _no_faults(monkeypatch: pytest.MonkeyPatch) -> Any:
    use_models_of_missing_instructions(monkeypatch)
    counts(), fault()
    yield
    assert fault() is None


def built(m: int, k: int, n: int) -> tuple[PrimFunc, Any]:
    return constructed(product(m, k, n), constants=(1,), device=amx_row())


def result_of(kernel: PrimFunc, choice: Any, x: Any, w: Any) -> Any:
    return run(emulated(kernel), choice, [x, w], (x.shape[0], w.shape[1]), "int32")


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("seed", range(6))
def test_products_of_random_shapes_are_exact(seed: int) -> None:
    """Rows, lanes and depth with smaller last tiles; the last seeds' reductions go in chunks."""
    rng = np.random.default_rng([seed, 11])
    m, n = (int(size) for size in rng.integers(20, 140, 2))
    k = (64 if seed > 3 else 4) * int(rng.integers(2, 40))
    x, w = bytes_of(rng, (m, k), "uint8"), bytes_of(rng, (k, n), "int8")
    kernel, choice = built(m, k, n)
    assert (result_of(kernel, choice, x, w) == x.astype("int64") @ w.astype("int64")).all()


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(
    ("m", "k", "n", "tile"),
    [
        (64, 256, 64, (32, 32)),
        (16, 64, 256, (16, 64)),  # one row of tiles: four of weights
        (256, 64, 16, (64, 16)),
        (50, 192, 128, None),
        (100, 192, 64, None),
        (128, 1024, 256, (32, 32)),  # in chunks
    ],
)
def test_the_grid_of_tiles_fits_the_operator(m: int, k: int, n: int, tile: tuple[int, int] | None) -> None:
    kernel, choice = built(m, k, n)
    assert tile is None or choice.program.tile("L0").shape[:2] == tile
    assert choice.reason.endswith("by tdpbusd")
    rng = np.random.default_rng(m)
    x, w = bytes_of(rng, (m, k), "uint8"), bytes_of(rng, (k, n), "int8")
    assert (result_of(kernel, choice, x, w) == x.astype("int64") @ w.astype("int64")).all()
    ran = counts()
    assert ran["tdpbusd"] > 0
    assert ran["tilerelease"] > 0
    once = ran["ldtilecfg"] == ran["tilerelease"]
    assert once or m % choice.program.tile("L0").shape[0], "where all tiles are alike, a task configures them once"


def test_few_rows_and_odd_depths_keep_vectors() -> None:
    for m, k, n in ((1, 256, 64), (4, 64, 64), (64, 4 * 67, 64)):
        assert not tile_calls(built(m, k, n)[0])


def test_other_rows_have_no_tiles() -> None:
    for name in ("cpu-xeon-amx", "cpu-epyc-zen5", "cpu-sse2"):
        kernel, _ = constructed(product(64, 256, 64), constants=(1,), device=lookup(name))
        assert not tile_calls(kernel)


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize(
    ("taps", "channels", "strides"),
    [
        *((3, 16, strides) for strides in ((1, 1), (2, 1))),
        *((1, 16, strides) for strides in ((1, 1), (2, 1))),
        *((taps, 64, strides) for taps, strides in ((1, (1, 1)), (1, (2, 2)), (3, (1, 1)))),
        (5, 8, (2, 2)),
        (7, 4, (2, 2)),
    ],
)
def test_convolutions_are_exact(taps: int, channels: int, strides: tuple[int, int]) -> None:
    """A row of a tile is the channels of several taps, where these lie beside each other.

    Those of several blocks are copied into rows.
    """
    rng = np.random.default_rng([taps, channels, *strides])
    groups, images = int(rng.integers(1, 3)), int(rng.integers(1, 3))
    groups = 6 * groups if (taps, channels) == (1, 16) else groups
    filters, blocked_output = 16 * int(rng.integers(2, 6)), bool(rng.integers(0, 2))
    height, width = (int(size) for size in rng.integers(7, 40, 2))
    window = ConvWindow(strides=strides, dilation=(1, 1), pads=(1, 1, 0, 1))
    data = te.placeholder((images, groups, height, width, channels), "uint8", "data")
    weight = te.placeholder((filters, groups * channels, taps, taps), "int8", "weight")
    result = convolution(window, 1, 16, blocked_output=blocked_output)(data, weight)
    kernel, choice = constructed(from_te(data, weight, result), constants=(1,), device=amx_row())
    assert ("_rows" in str(kernel.script())) == ((taps, channels) == (1, 16))
    x = bytes_of(rng, (images, groups * channels, height, width), "uint8")
    w = bytes_of(rng, (filters, groups * channels, taps, taps), "int8")
    blocked = x.reshape(images, groups, channels, height, width).transpose(0, 1, 3, 4, 2)
    shape = tuple(int(size) for size in result.shape)
    got = run(emulated(kernel), choice, [blocked, w], shape, "int32")
    expected = _convolution(x, w, strides, shape[2:4])
    if blocked_output:
        got = got.transpose(0, 1, 4, 2, 3).reshape(expected.shape)
    assert (got == expected).all()


def _convolution(x: Any, w: Any, strides: tuple[int, int], size: tuple[int, ...]) -> Any:
    kind = "float64" if x.dtype == np.float64 else "int64"
    padded = np.pad(x, ((0, 0), (0, 0), (1, 0), (1, 1))).astype(kind)
    expected = np.zeros((x.shape[0], w.shape[0], *size), kind)
    for ky in range(w.shape[2]):
        for kx in range(w.shape[3]):
            rows = slice(ky, ky + strides[0] * (size[0] - 1) + 1, strides[0])
            columns = slice(kx, kx + strides[1] * (size[1] - 1) + 1, strides[1])
            expected += np.einsum("ncyx,fc->nfyx", padded[:, :, rows, columns], w[:, :, ky, kx].astype(kind))
    return expected


@pytest.mark.parametrize("m", [48, 75])
def test_the_fused_epilogue_reads_the_tiles_sums(m: int) -> None:
    """Requantisation to bytes, as quantised networks have it behind every product."""
    k, n = 128, 80
    x, w = te.placeholder((m, k), "uint8", "x"), te.placeholder((k, n), "int8", "w")
    scale = te.placeholder((n,), "float32", "scale")
    r = te.reduce_axis((0, k), "r")
    total = te.compute((m, n), lambda i, j: te.sum(x[i, r].astype("int32") * w[r, j].astype("int32"), axis=r))
    real = te.compute(
        (m, n), lambda i, j: tirx.round(total[i, j].astype("float32") * scale[j]) + tirx.const(7.0, "float32")
    )
    result = te.compute((m, n), lambda i, j: tirx.max(tirx.min(real[i, j], 255.0), 0.0).astype("uint8"))
    kernel, choice = constructed(from_te(x, w, scale, result), constants=(1,), device=amx_row())
    assert tile_calls(kernel)
    rng = np.random.default_rng(m)
    a, b = bytes_of(rng, (m, k), "uint8"), bytes_of(rng, (k, n), "int8")
    factors = rng.uniform(1e-4, 2e-4, n).astype("float32")
    got = run(emulated(kernel), choice, [a, b, factors], (m, n), "uint8")
    sums = (a.astype("int64") @ b.astype("int64")).astype("float32")
    assert (got == np.clip(np.round(sums * factors) + 7, 0, 255).astype("uint8")).all()


# --- bfloat16 ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("m", "k", "n", "result"), [(64, 256, 64, "float32"), (75, 90, 37, "float32"), (40, 64, 48, "bfloat16")]
)
def test_products_of_bfloat16_have_float32_sums(m: int, k: int, n: int, result: str) -> None:
    """Two products go into each sum at a time, rows of 64 bytes are 32 elements."""
    kernel, choice = constructed(bfloat16_product(m, k, n, result), constants=(1,), device=amx_row())
    assert "tdpbf16ps" in tile_calls(kernel)
    rng = np.random.default_rng(m)
    x, w = numbers(rng, (m, k)), numbers(rng, (k, n))
    got = run(emulated(kernel), choice, [x, w], (m, n), result).astype("float32")
    expected = x.astype("float64") @ w.astype("float64")
    assert relative_error(got, expected) < (ROUNDOFF if result == "float32" else 2.0**-8)


def test_convolutions_of_bfloat16_have_float32_sums() -> None:
    rng = np.random.default_rng(5)
    window = ConvWindow(strides=(2, 1), dilation=(1, 1), pads=(1, 1, 0, 1))
    data = te.placeholder((1, 2, 13, 21, 16), "bfloat16", "data")
    weight = te.placeholder((32, 32, 3, 3), "bfloat16", "weight")
    result = convolution(window, 1, 16, blocked_output=True)(data, weight)
    kernel, choice = constructed(from_te(data, weight, result), constants=(1,), device=amx_row())
    assert "tdpbf16ps" in tile_calls(kernel)
    x, w = numbers(rng, (1, 32, 13, 21)), numbers(rng, (32, 32, 3, 3))
    blocked = x.reshape(1, 2, 16, 13, 21).transpose(0, 1, 3, 4, 2)
    shape = tuple(int(size) for size in result.shape)
    got = run(emulated(kernel), choice, [blocked, w], shape, "float32")
    expected = _convolution(x.astype("float64"), w.astype("float64"), (2, 1), shape[2:4])
    assert relative_error(got.transpose(0, 1, 4, 2, 3).reshape(expected.shape), expected) < ROUNDOFF


# --- the machine code -------------------------------------------------------------------------------------------------
def test_machine_code_has_tiles_and_spills_none() -> None:
    row = amx_row()
    kernel, _ = built(128, 256, 64)
    target = Target({key: list(value) if isinstance(value, tuple) else value for key, value in row.target})
    text = tvm.compile(kernel.with_attr("global_symbol", "main"), target=target).mod.inspect_source("asm")
    lines = [line.split() for line in text.splitlines() if "tmm" in line or "ldtilecfg" in line]
    names = [line[0] for line in lines]
    assert {"ldtilecfg", "tilezero", "tileloadd", "tdpbusd", "tilestored"} <= set(names)
    calls = [name for name in tile_calls(kernel) if name in ("tilestored64", "ldtilecfg")]
    stored, configured = (calls.count(name) for name in ("tilestored64", "ldtilecfg"))
    assert (names.count("tilestored"), names.count("ldtilecfg")) == (stored, configured)


# --- what the model catches -------------------------------------------------------------------------------------------
def _configured(word: int, change: Callable[[int], int]) -> Callable[[PrimFunc], PrimFunc]:
    """Kernels with another ``word`` of each configuration."""

    def store(item: BufferStore) -> BufferStore:
        if item.buffer.name != "tile_shapes" or int(item.indices[0].value) != word:
            return item
        return BufferStore(item.buffer, tirx.IntImm("int64", change(int(item.value.value))), item.indices)

    return lambda kernel: kernel.with_body(structural_map(kernel.body, (BufferStore, store)))


def _called(name: str, change: Callable[[list[Any]], list[Any] | None]) -> Callable[[PrimFunc], PrimFunc]:
    """Kernels with other arguments of an instruction, or without it."""
    return lambda kernel: emulated(kernel, {name: change})


def _halved_stride(arguments: list[Any]) -> list[Any]:
    number, address, stride = arguments
    return [number, address, tirx.IntImm("int64", int(stride.value) // 2)]


MUTANTS: dict[str, Callable[[PrimFunc], PrimFunc]] = {
    "a tile of sums with a row less": _configured(6, lambda word: word - 1),
    "all tiles of sums with a row less": _configured(6, lambda word: word - 0x01_01_01_01),
    "sums of 60 bytes": _configured(2, lambda word: word - 4),
    "data of 60 bytes": _configured(3, lambda word: word - 4),
    "no tile at all": _configured(0, lambda _: 0),
    "a start row": _configured(0, lambda word: word + (1 << 8)),
    "never configured": _called("ldtilecfg", lambda _: None),
    "never cleared": _called("tilezero", lambda _: None),
    "rows half as far apart": _called("tileloadd64", _halved_stride),
    "sums half as far apart": _called("tilestored64", _halved_stride),
    "operands exchanged": _called("tdpbusd", lambda a: [a[0], a[2], a[1]]),
    "one product left out": _called("tdpbusd", lambda a: None if int(a[0].value) == 1 else a),
}


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_caught(name: str) -> None:
    """A wrong configuration, stride or operand faults in the model, or gives other values."""
    m, k, n = (128, 1024, 256) if name == "never cleared" else (96, 128, 64)  # the first configures for many tiles
    kernel, choice = built(m, k, n)
    rng = np.random.default_rng(1)
    x, w = bytes_of(rng, (m, k), "uint8"), bytes_of(rng, (k, n), "int8")
    mutant = MUTANTS[name](kernel)
    assert not structural_equal(mutant, kernel)
    try:
        got = result_of(mutant, choice, x, w)
    except (MemoryGuardError, AssertionError):
        got = None  # sums that no tile wrote, or other ones in either run
    assert fault() is not None or got is None or (got != x.astype("int64") @ w.astype("int64")).any()
