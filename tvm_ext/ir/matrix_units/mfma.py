"""What a wave of AMD's 64 lanes does with tiles in shared memory: v_mfma_f32_16x16x16 (CDNA 2 and 3 ISA guides).

Fragments are arrays in registers. With g = lane // 16 and t = lane % 16, a lane's four elements are

* A, 16 x 16: row t, columns 4g to 4g + 3;
* B, 16 x 16: column t, rows 4g to 4g + 3;
* accumulators, 16 x 16: rows 4g to 4g + 3 of column t, so that 16 lanes store neighbours.
"""

from __future__ import annotations

from dataclasses import replace

from tvm_ext._tvm import IF_THEN_ELSE, Buffer, Call, Expr, Stmt, TensorLoad, tirx
from tvm_ext.analysis.gemm_form import FRAGMENT, TileSplit
from tvm_ext.errors import IllegalRewrite
from tvm_ext.ir.build_ir import SERIAL, UNROLLED, VECTORIZED, allocate, index, load, loop, nest, sequence, store
from tvm_ext.ir.simt_ir import gpu_buffer

from .operand import Factor, is_zero
from .shared import SharedTile
from .warp_place import WarpPlace

WORDS = "int16"
"""What bfloat16 is taken for: stock TVM would keep tiles of it in float32."""
MFMA = {"float16": "llvm.amdgcn.mfma.f32.16x16x16f16", WORDS: "llvm.amdgcn.mfma.f32.16x16x16bf16.1k"}
"""LLVM's names by the type of tiles; the second is of bfloat16, from gfx90a on."""
LANE_ELEMENTS, LANE_CHUNK, STEP = 4, 8, 32
"""A lane's elements of a fragment, of 256 among 64 lanes; and what it reads at a time for two of them, 16 bytes, of a
step of 32 products. The first instruction adds up products 0-3, 8-11 and so on, the second the others."""

LANE_PRODUCTS = FRAGMENT**3 // 64
"""A lane's part of the multiply-adds of an instruction."""


class Mfma:
    """Fragments of scope "local": A [rows / 16, 8], B [columns / 16, 8], C [rows / 16, columns / 16, 4] in float32."""

    def __init__(self, split: TileSplit, dtype: str, accumulator: str, suffix: str = "") -> None:
        self.split, self.dtype, self.accumulator = split, dtype, accumulator
        self.rows, self.columns = split.warp_rows // FRAGMENT, split.warp_columns // FRAGMENT
        self.a = gpu_buffer([self.rows, LANE_CHUNK], dtype, f"A_fragment{suffix}", "local")
        self.b = gpu_buffer([self.columns, LANE_CHUNK], dtype, f"B_fragment{suffix}", "local")
        shape = [self.rows, self.columns, LANE_ELEMENTS]
        self.accumulators = gpu_buffer(shape, accumulator, f"C_fragment{suffix}", "local")

    def clear(self) -> Stmt:
        zero = tirx.const(0, self.accumulator)
        shape = (self.rows, self.columns, LANE_ELEMENTS)
        return nest(shape, UNROLLED, ("i", "j", "e"), lambda at: store(self.accumulators, zero, at))

    def multiply(self, a: SharedTile, b: SharedTile, warp: WarpPlace) -> Stmt:
        """Add the products of two tiles in shared memory."""

        def step(k: Expr) -> Stmt:
            halves = (LANE_CHUNK // LANE_ELEMENTS, self.rows, self.columns)
            return sequence(
                allocate(self.a),
                allocate(self.b),
                loop(self.rows, UNROLLED, "i", lambda i: self._load(a, self.a, warp.row, warp.lane, i, k)),
                loop(self.columns, UNROLLED, "j", lambda j: self._load(b, self.b, warp.column, warp.lane, j, k)),
                nest(halves, UNROLLED, ("h", "i", "j"), lambda at: self._multiply(*at)),
            )

        return loop(self.split.depth // STEP, SERIAL, "k_inner", step)

    def _load(self, tile: SharedTile, fragment: Buffer, first: Expr, lane: Expr, at: Expr, k: Expr) -> Stmt:
        """A lane's elements of fragment ``at``: a chunk of a row of the tile, or one element of each of eight rows."""
        line = first + at * index(FRAGMENT) + tirx.floormod(lane, index(FRAGMENT))
        chunk = k * index(STEP // LANE_CHUNK) + tirx.floordiv(lane, index(FRAGMENT))
        if tile.operand.along_depth:
            start = tile.chunk_position(line, chunk)
            return loop(LANE_CHUNK, VECTORIZED, "e", lambda e: store(fragment, load(tile.buffer, [start + e]), [at, e]))

        def one(e: Expr) -> Stmt:
            row, column = chunk * index(LANE_CHUNK) + e, tirx.floordiv(line, index(LANE_CHUNK))
            start = tile.chunk_position(row, column) + tirx.floormod(line, index(LANE_CHUNK))
            return store(fragment, load(tile.buffer, [start]), [at, e])

        return loop(LANE_CHUNK, UNROLLED, "e", one)

    def _multiply(self, half: Expr, i: Expr, j: Expr) -> Stmt:
        def four(buffer: Buffer, *at: Expr) -> Expr:
            """Element by element: stock TVM's CompactBufferAllocation takes no vectors of several widths."""
            first = at[-1] * index(LANE_ELEMENTS)
            elements = [load(buffer, [*at[:-1], first + index(e)]) for e in range(LANE_ELEMENTS)]
            return tirx.Shuffle(elements, list(range(LANE_ELEMENTS)))

        factors, sums = (four(self.a, i, half), four(self.b, j, half)), four(self.accumulators, i, j, index(0))
        dtype, zero = f"{self.accumulator}x{LANE_ELEMENTS}", tirx.const(0, "int32")  # nothing is broadcast or permuted
        taken = gpu_buffer([1], dtype, "products", "local")
        called = tirx.call_llvm_pure_intrin(dtype, MFMA[self.dtype], *factors, sums, zero, zero, zero)
        parts = [tirx.Shuffle([load(taken, [index(0)])], [e]) for e in range(LANE_ELEMENTS)]
        stores = [store(self.accumulators, part, [i, j, index(e)]) for e, part in enumerate(parts)]
        return sequence(allocate(taken), store(taken, called, [index(0)]), *stores)


def in_words(factor: Factor) -> Factor:
    """A factor of bfloat16 by its bits; raises IllegalRewrite where it is more than loads, conditions and numbers."""

    def bits(value: Expr) -> Expr:
        if isinstance(value, TensorLoad):
            return tirx.reinterpret(WORDS, value)
        if is_zero(value):
            return tirx.const(0, WORDS)
        if isinstance(value, Call) and value.op.same_as(IF_THEN_ELSE):
            return tirx.if_then_else(value.args[0], bits(value.args[1]), bits(value.args[2]))
        raise IllegalRewrite(f"{factor.name} in bfloat16 is computed while it is copied, which mfma's tiles cannot be")

    return replace(factor, value=bits(factor.value), dtype=WORDS)
