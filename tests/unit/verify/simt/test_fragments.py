"""Fragment tables against the formulas printed in the PTX ISA, and the arithmetic against NumPy."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest

from tvm_ext.errors import InputError
from tvm_ext.verify.simt.fragments import (
    MMA_SHAPES,
    WMMA_SHAPES,
    FragmentMap,
    fragment_shape,
    ldmatrix_sources,
    mma,
    mma_poison,
    mma_shape,
    store_offsets,
    transposed_byte_offsets,
    wmma,
    wmma_offsets,
    wmma_poison,
)

Formula = Callable[[int, int, int], tuple[int, int]]  # (groupID, threadID_in_group, i) -> (row, column)

# Transcribed from the ISA's figures, "Matrix Fragments for mma.m16n8k16 with floating point type" and the like.
ISA: dict[tuple[str, int, str], Formula] = {
    ("m16n8k16", 16, "a"): lambda g, t, i: (
        g if 0 <= i < 2 or 4 <= i < 6 else g + 8,
        t * 2 + (i & 1) if i < 4 else t * 2 + (i & 1) + 8,
    ),
    ("m16n8k16", 16, "b"): lambda g, t, i: (t * 2 + (i & 1) if i < 2 else t * 2 + (i & 1) + 8, g),
    ("m16n8k16", 16, "c"): lambda g, t, i: (g if i < 2 else g + 8, t * 2 + (i & 1)),
    ("m16n8k8", 16, "a"): lambda g, t, i: (g if i < 2 else g + 8, t * 2 + (i & 1)),
    ("m16n8k8", 16, "b"): lambda g, t, i: (t * 2 + i, g),
    ("m16n8k8", 16, "c"): lambda g, t, i: (g if i < 2 else g + 8, t * 2 + (i & 1)),
    ("m16n8k32", 8, "a"): lambda g, t, i: (
        g if 0 <= i < 4 or 8 <= i < 12 else g + 8,
        t * 4 + (i & 3) if i < 8 else t * 4 + (i & 3) + 16,
    ),
    ("m16n8k32", 8, "b"): lambda g, t, i: (t * 4 + (i & 3) if i < 4 else t * 4 + (i & 3) + 16, g),
    ("m16n8k32", 8, "c"): lambda g, t, i: (g if i < 2 else g + 8, t * 2 + (i & 1)),
    ("m16n8k16", 8, "a"): lambda g, t, i: (g if i < 4 else g + 8, t * 4 + (i & 3)),
    ("m16n8k16", 8, "b"): lambda g, t, i: (t * 4 + i, g),
    ("m8n8k16", 8, "a"): lambda g, t, i: (g, t * 4 + i),
    ("m8n8k16", 8, "b"): lambda g, t, i: (t * 4 + i, g),
    ("m8n8k16", 8, "c"): lambda g, t, i: (g, t * 2 + i),
    ("m16n8k8", 32, "a"): lambda g, t, i: (g if i in (0, 2) else g + 8, t if i < 2 else t + 4),
    ("m16n8k8", 32, "b"): lambda g, t, i: (t if i == 0 else t + 4, g),
    ("m16n8k4", 32, "a"): lambda g, t, i: (g if i == 0 else g + 8, t),
    ("m16n8k4", 32, "b"): lambda g, t, i: (t, g),
}


@pytest.mark.parametrize("key", ISA, ids=lambda key: "-".join(map(str, key)))
def test_tables_are_those_of_the_isa(key: tuple[str, int, str]) -> None:
    name, bits, operand = key
    table: FragmentMap = getattr(mma_shape(name, bits), operand)
    for lane in range(32):
        group, thread = lane >> 2, lane % 4
        for i in range(table.elements):
            assert (table.rows[lane, i], table.columns[lane, i]) == ISA[key](group, thread, i), (lane, i)


@pytest.mark.parametrize("key", MMA_SHAPES, ids=str)
def test_maps_between_registers_and_matrices_are_inverse(key: tuple[int, int, int, int]) -> None:
    bits, m, n, k = key
    shape = mma_shape(f"m{m}n{n}k{k}", bits)
    rng = np.random.default_rng(0)
    for table, size in ((shape.a, (m, k)), (shape.b, (k, n)), (shape.c, (m, n))):
        matrix = rng.standard_normal((3, *size))
        assert table.shape == size
        assert np.array_equal(table.matrix(table.registers(matrix)), matrix)


def test_an_unknown_shape_is_refused() -> None:
    with pytest.raises(InputError, match="m8n8k4 of 16-bit operands is not modelled"):
        mma_shape("m8n8k4")
    with pytest.raises(InputError, match="not modelled"):
        mma_shape("nonsense")


CASES = [
    ("m16n8k16", 16, np.float16, "fp32", np.float32), ("m16n8k16", 16, ml_dtypes.bfloat16, "fp32", np.float32),
    ("m16n8k8", 16, np.float16, "fp32", np.float32), ("m16n8k16", 16, np.float16, "fp16", np.float16),
]  # fmt: skip


@pytest.mark.parametrize(("name", "bits", "dtype", "accumulator", "stored"), CASES)
def test_mma_multiplies_matrices(name: str, bits: int, dtype: type, accumulator: str, stored: type) -> None:
    shape, rng = mma_shape(name, bits), np.random.default_rng(1)
    a = rng.standard_normal((2, shape.m, shape.k)).astype(dtype)
    b = rng.standard_normal((2, shape.k, shape.n)).astype(dtype)
    c = rng.standard_normal((2, shape.m, shape.n)).astype(stored)
    got = mma(shape, shape.a.registers(a), shape.b.registers(b), shape.c.registers(c), accumulator=accumulator)
    exact = a.astype(np.float64) @ b.astype(np.float64) + c.astype(np.float64)
    assert got.dtype == stored
    assert got.shape == (2, 32, shape.c.elements)
    assert np.array_equal(shape.c.matrix(got), exact.astype(stored))


def test_integer_mma_is_exact_and_wraps_or_saturates() -> None:
    shape, rng = mma_shape("m16n8k32", 8), np.random.default_rng(2)
    a, b = (rng.integers(-128, 128, size).astype(np.int8) for size in ((16, 32), (32, 8)))
    c = np.full((16, 8), 2**31 - 1, np.int32)
    registers = shape.a.registers(a), shape.b.registers(b), shape.c.registers(c)
    exact = a.astype(np.int64) @ b.astype(np.int64) + c
    assert (exact > 2**31 - 1).any(), "the case must overflow"
    assert (exact < 2**31 - 1).any()
    assert np.array_equal(shape.c.matrix(mma(shape, *registers, accumulator="int32")), exact.astype(np.int32))
    saturated = mma(shape, *registers, accumulator="int32", saturate=True)
    assert np.array_equal(shape.c.matrix(saturated), np.minimum(exact, 2**31 - 1))


def test_mma_poison_reaches_what_depends_on_it() -> None:
    shape = mma_shape("m16n8k16")
    clean = [np.zeros((32, table.elements), bool) for table in (shape.a, shape.b, shape.c)]
    assert not mma_poison(shape, *clean).any()
    a, b, c = (x.copy() for x in clean)
    a[5, 3] = True  # lane 5: groupID 1, a3 is in row 9
    b[6, 0] = True  # groupID 1: column 1
    c[0, 0] = True
    expected = np.zeros((16, 8), bool)
    expected[9, :] = expected[:, 1] = expected[0, 0] = True
    assert np.array_equal(shape.c.matrix(mma_poison(shape, a, b, c)), expected)


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("transposed", [False, True])
def test_ldmatrix_gives_each_lane_its_two_neighbours(count: int, *, transposed: bool) -> None:
    sources = ldmatrix_sources(count, transposed=transposed)
    matrices = np.arange(count * 64).reshape(count, 8, 8)  # row i of matrix q is at the address of lane 8 q + i
    got = matrices.reshape(count * 8, 8)[sources.lane, sources.element]
    for lane in range(32):
        for register in range(count):
            matrix = matrices[register].T if transposed else matrices[register]
            assert got[lane, 2 * register : 2 * register + 2].tolist() == (
                matrix[lane // 4, lane % 4 * 2 : lane % 4 * 2 + 2].tolist()
            )


def test_ldmatrix_loads_the_fragments_of_mma() -> None:
    shape, rng = mma_shape("m16n8k16"), np.random.default_rng(3)
    a, b = rng.standard_normal((16, 16)), rng.standard_normal((16, 8))
    lanes = np.arange(32)
    rows_of_a = np.stack([a[lane % 16, lane // 16 * 8 :][:8] for lane in lanes])
    x4 = ldmatrix_sources(4, transposed=False)
    assert np.array_equal(rows_of_a[x4.lane, x4.element], shape.a.registers(a))
    rows_of_b = np.stack([b[lane % 16] for lane in lanes])
    x2 = ldmatrix_sources(2, transposed=True)
    assert np.array_equal(rows_of_b[x2.lane, x2.element], shape.b.registers(b))


def test_ldmatrix_reads_no_addresses_of_idle_lanes() -> None:
    assert ldmatrix_sources(2, transposed=True).lane.max() == 15
    with pytest.raises(InputError, match=r"ldmatrix\.x3"):
        ldmatrix_sources(3, transposed=False)


def test_transposed_bytes_are_the_second_operand_of_two_integer_mma() -> None:
    shape = mma_shape("m16n8k32", 8)
    b = np.arange(32 * 16).reshape(32, 16)
    registers = b.reshape(-1)[transposed_byte_offsets(16)]
    assert np.array_equal(registers[:, :8], shape.b.registers(b[:, :8]))
    assert np.array_equal(registers[:, 8:], shape.b.registers(b[:, 8:]))


def test_mma_store_writes_two_accumulators_side_by_side() -> None:
    shape, stride = mma_shape("m16n8k16"), 20
    tile = np.arange(256).reshape(16, 16)
    registers = np.concatenate([shape.c.registers(tile[:, :8]), shape.c.registers(tile[:, 8:])], axis=1)
    stored = np.full(16 * stride, -1)
    stored[store_offsets(stride)] = registers
    assert np.array_equal(stored.reshape(16, stride)[:, :16], tile)
    assert (stored.reshape(16, stride)[:, 16:] == -1).all()


@pytest.mark.parametrize("sizes", WMMA_SHAPES)
@pytest.mark.parametrize("layout", ["row_major", "col_major"])
def test_wmma_multiplies_matrices_from_memory(sizes: tuple[int, int, int], layout: str) -> None:
    m, n, k = sizes
    rng, loaded = np.random.default_rng(4), {}
    for role in ("a", "b"):
        rows, columns = fragment_shape(role, m, n, k)
        memory = rng.standard_normal((40, 40)).astype(np.float16)
        loaded[role] = memory.reshape(-1)[wmma_offsets(role, m, n, k, layout=layout, stride=40)]
        expected = memory[:rows, :columns] if layout == "row_major" else memory[:columns, :rows].T
        assert np.array_equal(loaded[role], expected)
    c = rng.standard_normal((m, n)).astype(np.float32)
    exact = loaded["a"].astype(np.float64) @ loaded["b"].astype(np.float64) + c
    assert np.array_equal(wmma(loaded["a"], loaded["b"], c, accumulator="float32"), exact.astype(np.float32))


def test_wmma_poison_and_wrong_arguments() -> None:
    a, b, c = np.zeros((16, 16), bool), np.zeros((16, 16), bool), np.zeros((16, 16), bool)
    a[3, 7] = True
    assert np.array_equal(wmma_poison(a, b, c), np.arange(16)[:, None] * np.ones(16) == 3)
    with pytest.raises(InputError, match=r"wmma\.m8n8k8"):
        fragment_shape("a", 8, 8, 8)
    with pytest.raises(InputError, match="fragment in diagonal"):
        wmma_offsets("a", 16, 16, 16, layout="diagonal", stride=16)
