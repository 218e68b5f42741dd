"""Which lane's register holds which matrix element, for ldmatrix and mma.sync, and what these and wmma compute.

Source: PTX ISA, "Matrix Fragments for mma.m16n8k8", "... m16n8k16", "... m16n8k32", and "ldmatrix". Lane arrays are
``(..., 32, registers)``: any batch of warps first.

Everything is an index table, made once: the interpreter moves its marks for unwritten data through the same tables.

A fragment of wmma (``nvcuda::wmma``) is a whole matrix that a warp owns. The ISA leaves open which lane holds which
element ("wmma.load": the layout is unspecified), so a kernel can only load, multiply, fill and store fragments, and
modelling one as a matrix loses nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np

from tvm_ext.devices.gpu import WARP
from tvm_ext.errors import InputError
from tvm_ext.support.arrays import Array

from .number_types import PTX_DTYPES, to_dtype

LANES = np.arange(WARP)
GROUP, THREAD_IN_GROUP = LANES >> 2, LANES % 4  # the ISA's groupID and threadID_in_group


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FragmentMap:
    """Register element ``r`` of ``lane`` is matrix element ``(rows[lane, r], columns[lane, r])`` of ``shape``.

    ``rows`` and ``columns`` are int arrays of (32, elements); ``inverse`` is (rows, columns) of the matrix to the flat
    position ``lane * elements + r``. The map is one-to-one.
    """

    shape: tuple[int, int]
    rows: Array
    columns: Array
    inverse: Array

    @property
    def elements(self) -> int:
        """Elements of one lane."""
        return int(self.rows.shape[1])

    def matrix(self, registers: Array) -> Array:
        """(..., 32, elements) registers as (..., rows, columns) matrices."""
        return registers.reshape(*registers.shape[:-2], -1)[..., self.inverse]

    def registers(self, matrix: Array) -> Array:
        """(..., rows, columns) matrices as (..., 32, elements) registers."""
        return matrix[..., self.rows, self.columns]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MmaShape:
    """An mma.sync: ``c[m, n] += a[m, k] @ b[k, n]``, ``a`` in rows, ``b`` in columns."""

    m: int
    n: int
    k: int
    a: FragmentMap
    b: FragmentMap
    c: FragmentMap


def _fragment(shape: tuple[int, int], rows: Array, columns: Array) -> FragmentMap:
    inverse = np.full(shape, -1)
    inverse[rows, columns] = np.arange(rows.size).reshape(rows.shape)
    assert (inverse >= 0).all(), "every element of the matrix is held by a lane"
    assert inverse.size == rows.size, "and by one lane only"
    return FragmentMap(shape=shape, rows=rows, columns=columns, inverse=inverse)


def _operand_a(m: int, k: int, per_register: int) -> FragmentMap:
    """A 32-bit register holds ``per_register`` neighbours in k; first all blocks of 8 rows, then the next slab of k.

    Worked example, m16n8k16 of halves: 2 in a register, slabs of 8. a0, a1 are (g, 2t) and (g, 2t + 1), a2, a3 are in
    row g + 8, a4..a7 the same in columns + 8.
    """
    slab, row_blocks = 4 * per_register, m // 8
    element = np.arange(m * k // WARP)
    register, within = element // per_register, element % per_register
    rows = GROUP[:, None] + 8 * (register % row_blocks)
    columns = THREAD_IN_GROUP[:, None] * per_register + within + slab * (register // row_blocks)
    return _fragment((m, k), rows, columns)


def _operand_b(k: int, per_register: int) -> FragmentMap:
    slab = 4 * per_register
    element = np.arange(k * 8 // WARP)
    rows = THREAD_IN_GROUP[:, None] * per_register + element % per_register + slab * (element // per_register)
    return _fragment((k, 8), rows, np.broadcast_to(GROUP[:, None], rows.shape))


def _accumulator(m: int) -> FragmentMap:
    element = np.arange(m * 8 // WARP)
    rows = GROUP[:, None] + 8 * (element // 2)
    return _fragment((m, 8), rows, THREAD_IN_GROUP[:, None] * 2 + element % 2 + 0 * rows)


MMA_SHAPES = {
    (16, 16, 8, 8): "f16, bf16", (16, 16, 8, 16): "f16, bf16", (8, 16, 8, 16): "int8, fp8", (8, 16, 8, 32): "int8, fp8",
    (8, 8, 8, 16): "int8", (32, 16, 8, 4): "tf32", (32, 16, 8, 8): "tf32",
}  # fmt: skip
"""(bits of an operand's element, m, n, k): element types. Volta's m8n8k4, laid out in its own way, is not here."""


@cache
def mma_shape(name: str, operand_bits: int = 16) -> MmaShape:
    """The tables of ``name``, such as ``"m16n8k16"``, for operands of ``operand_bits`` bits.

    Raises InputError for a shape that is not in `MMA_SHAPES`.
    """
    found = re.fullmatch(r"m(\d+)n(\d+)k(\d+)", name)
    m, n, k = map(int, found.groups()) if found else (0, 0, 0)
    if (operand_bits, m, n, k) not in MMA_SHAPES:
        known = ", ".join(f"m{m}n{n}k{k} of {bits} bits" for bits, m, n, k in MMA_SHAPES)
        raise InputError(f"mma.sync {name} of {operand_bits}-bit operands is not modelled", f"use one of {known}")
    per_register = 32 // operand_bits
    return MmaShape(m=m, n=n, k=k, a=_operand_a(m, k, per_register), b=_operand_b(k, per_register), c=_accumulator(m))


def mma(shape: MmaShape, a: Array, b: Array, c: Array, *, accumulator: str, saturate: bool = False) -> Array:
    """``d`` of ``mma.sync``: (..., 32, elements of c), in dtype ``accumulator`` (``"fp32"`` and ``"float32"`` alike).

    ``a``, ``b``, ``c`` are (..., 32, elements) in their storage types. Modelled: products exact, the sum of all
    products and ``c`` exact to 53 bits, one rounding to nearest at the end. The ISA leaves order and intermediate
    rounding of the sum open; hardware may differ in the last bit. Integers are exact; the sum wraps at 32 bits, or with
    ``saturate`` (``.satfinite``) is held at the limits.
    """
    product = shape.a.matrix(a).astype(np.float64) @ shape.b.matrix(b).astype(np.float64)
    return round_accumulator(shape.c.registers(product), c, accumulator=accumulator, saturate=saturate)


def round_accumulator(product: Array, c: Array, *, accumulator: str, saturate: bool = False) -> Array:
    """``product`` (float64, whole numbers for integers) plus ``c`` in dtype ``accumulator``."""
    dtype = PTX_DTYPES[accumulator]
    if dtype != "int32":
        return to_dtype(product + c.astype(np.float64), dtype)
    # |product| <= 32 * 255 * 255 and |c| < 2**31: exact in int64
    total = product.astype(np.int64) + c.astype(np.int64)
    if saturate:
        total = np.clip(total, np.iinfo(np.int32).min, np.iinfo(np.int32).max)
    return to_dtype(total, dtype)


def mma_poison(shape: MmaShape, a: Array, b: Array, c: Array) -> Array:
    """Which elements of ``d`` depend on poisoned registers: booleans of the shapes of `mma`'s arguments and result.

    ``d[i, j]`` needs row i of a, column j of b and ``c[i, j]``.
    """
    rows = np.any(shape.a.matrix(a), axis=-1, keepdims=True)
    columns = np.any(shape.b.matrix(b), axis=-2, keepdims=True)
    return shape.c.registers(rows | columns) | c


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LdmatrixSources:
    """Both (32, 2 * count): 16-bit element ``r`` of lane ``l`` is ``element[l, r]`` (0..7) of the row that
    lane ``lane[l, r]`` gave the address of.
    """

    lane: Array
    element: Array


@cache
def ldmatrix_sources(count: int, *, transposed: bool) -> LdmatrixSources:
    """The (32, 2 * count) tables of ``ldmatrix.m8n8.x{count}[.trans].b16``.

    Row i of 8x8 matrix q lies at the address given by lane 8 q + i. Lane l receives of every matrix the elements 2 (l %
    4) and 2 (l % 4) + 1 of row l / 4; transposed, of column l / 4. Raises InputError unless ``count`` is 1, 2 or 4.
    """
    if count not in (1, 2, 4):
        raise InputError(f"ldmatrix.x{count} does not exist", "load 1, 2 or 4 matrices")
    element = np.arange(2 * count)
    matrix, pair = element // 2, element % 2
    inner = THREAD_IN_GROUP[:, None] * 2 + pair
    outer = GROUP[:, None] + 0 * inner
    row, column = (inner, outer) if transposed else (outer, inner)
    return LdmatrixSources(lane=8 * matrix + row, element=column)


def transposed_byte_offsets(stride: int) -> Array:
    """(32, 16): where TVM reads int8 element i of a lane from, counted from the pointer, for a transposed ldmatrix.

    ldmatrix transposes 16-bit elements only; for bytes TVM emits a loop over i in 0..15 which reads
    ``[(i % 8) / 4 * stride * 16 + (lane % 4) * 4 * stride + (i % 4) * stride + lane / 4 + (i / 8) * 8]``.
    """
    i, lane = np.arange(16)[None, :], LANES[:, None]
    return (i % 8) // 4 * stride * 16 + (lane % 4) * 4 * stride + (i % 4) * stride + lane // 4 + (i // 8) * 8


def store_offsets(stride: int) -> Array:
    """(32, 8): element offsets at which ``mma_store`` puts a lane's 8 accumulators, in rows ``stride`` apart.

    A tile of 16x16: two m16n8 accumulators side by side, local_id 0..3 hold columns 0..7, 4..7 columns 8..15.
    """
    local, lane = np.arange(8)[None, :], LANES[:, None]
    rows = local % 4 // 2 * 8 + lane // 4
    return rows * stride + local // 4 * 8 + lane % 4 * 2 + local % 2


FragmentRole = Literal["a", "b", "accumulator"]
WMMA_SHAPES = ((16, 16, 16), (32, 8, 16), (8, 32, 16))  # PTX ISA, wmma: shapes of 16-bit floats and of bytes


def fragment_shape(role: FragmentRole, m: int, n: int, k: int) -> tuple[int, int]:
    """(rows, columns) of a fragment of ``wmma.m{m}n{n}k{k}``; raises InputError for a shape that does not exist."""
    if (m, n, k) not in WMMA_SHAPES:
        known = ", ".join(f"m{m}n{n}k{k}" for m, n, k in WMMA_SHAPES)
        raise InputError(f"wmma.m{m}n{n}k{k} does not exist", f"use one of {known}")
    return {"a": (m, k), "b": (k, n), "accumulator": (m, n)}[role]


def wmma_offsets(role: FragmentRole, m: int, n: int, k: int, *, layout: str, stride: int) -> Array:
    """(rows, columns): element offsets of a fragment from its pointer, for loads and stores alike.

    ``layout`` is ``"row_major"`` (element (i, j) at ``i * stride + j``) or ``"col_major"`` (at ``j * stride + i``).
    """
    rows, columns = np.indices(fragment_shape(role, m, n, k))
    if layout not in ("row_major", "col_major"):
        raise InputError(f"a wmma fragment in {layout} does not exist", "use row_major or col_major")
    return rows * stride + columns if layout == "row_major" else columns * stride + rows


def wmma(a: Array, b: Array, c: Array, *, accumulator: str) -> Array:
    """(..., m, n): ``a @ b + c``, rounded as `fragments.mma` does, in dtype ``accumulator``."""
    product = a.astype(np.float64) @ b.astype(np.float64)
    return round_accumulator(product, c, accumulator=accumulator)


def wmma_poison(a: Array, b: Array, c: Array) -> Array:
    """(..., m, n) booleans: which elements depend on poisoned elements of the operands."""
    return np.asarray(np.any(a, axis=-1, keepdims=True) | np.any(b, axis=-2, keepdims=True) | c)
