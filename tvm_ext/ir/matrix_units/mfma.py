"""What a wave of AMD's 64 lanes does with tiles in shared memory: v_mfma (CDNA 2 and 3 ISA guides).

Fragments are arrays in registers. Of a fragment of S x S, 16 or 32, with g = lane // S and t = lane % S, a lane has

* of A, row t, and of B, column t: the g-th run of what one instruction takes of it, 4 or 8 elements;
* of accumulators, column t: four rows from 4g on, then as many 256 / S further down, so that S lanes store neighbours.

A lane reads 16 bytes of a line at a time, for 2 or 4 instructions. Which products each of these adds up does not
matter, as long as both factors agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tvm_ext._tvm import IF_THEN_ELSE, Buffer, Call, Expr, Stmt, TensorLoad, tirx
from tvm_ext.analysis.computation_exprs import itemsize_bytes
from tvm_ext.analysis.gemm_form import TileSplit
from tvm_ext.devices.capabilities import has_wide_bytes
from tvm_ext.devices.gpu import VECTOR_BYTES
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.errors import IllegalRewrite
from tvm_ext.ir.build_ir import SERIAL, UNROLLED, VECTORIZED, allocate, index, load, loop, nest, sequence, store
from tvm_ext.ir.simt_ir import gpu_buffer

from .operand import Factor, is_zero
from .shared import SharedTile
from .warp_place import WarpPlace

WORDS = "int16"
"""What bfloat16 is taken for: stock TVM would keep tiles of it in float32."""
WAVE = 64  # lanes (CDNA ISA guides)


@dataclass(frozen=True, slots=True)
class MatrixInstruction:
    """``name`` is LLVM's; it multiplies ``side`` x ``side`` by ``elements`` of each lane, of tiles in ``dtype``."""

    name: str
    dtype: str
    side: int
    elements: int

    @property
    def depth(self) -> int:
        """Products that each element of the result adds up."""
        return WAVE // self.side * self.elements

    @property
    def lane_products(self) -> int:
        """A lane's part of the multiply-adds."""
        return self.side * self.elements


INSTRUCTIONS = tuple(
    MatrixInstruction(f"llvm.amdgcn.mfma.{name}", dtype, side, elements)
    for name, dtype, side, elements in (
        ("f32.16x16x16f16", "float16", 16, 4),
        ("f32.32x32x8f16", "float16", 32, 4),
        ("f32.16x16x16bf16.1k", WORDS, 16, 4),  # of bfloat16, from gfx90a on
        ("f32.32x32x8bf16.1k", WORDS, 32, 4),
        ("i32.16x16x16i8", "int8", 16, 4),  # until gfx90a
        ("i32.32x32x8i8", "int8", 32, 4),
        ("i32.16x16x32.i8", "int8", 16, 8),  # from gfx942 on
        ("i32.32x32x16.i8", "int8", 32, 8),
    )
)
QUAD = 4
"""Rows of a lane's accumulators that follow each other."""


def instruction_of(split: TileSplit, dtype: str, device: DeviceSpec) -> MatrixInstruction:
    """What multiplies ``split.step`` products of tiles in ``dtype`` (`WORDS` for bfloat16) on ``device``."""
    side = WAVE * VECTOR_BYTES // (split.step * int(itemsize_bytes(dtype)))
    elements = 8 if dtype == "int8" and has_wide_bytes(device) else 4
    return next(i for i in INSTRUCTIONS if (i.dtype, i.side, i.elements) == (dtype, side, elements))


class Mfma:
    """Fragments of scope "local", of side S: A [rows / S, 16 bytes], B [columns / S, 16 bytes], C [.., .., S * S / 64].

    Accumulators are float32, of bytes int32.
    """

    def __init__(self, split: TileSplit, dtype: str, accumulator: str, device: DeviceSpec, suffix: str = "") -> None:
        self.split, self.dtype, self.accumulator = split, dtype, accumulator
        self.instruction = instruction_of(split, dtype, device)
        self.side = self.instruction.side
        self.rows, self.columns = split.warp_rows // self.side, split.warp_columns // self.side
        self.chunk = VECTOR_BYTES // int(itemsize_bytes(dtype))
        self.a = gpu_buffer([self.rows, self.chunk], dtype, f"A_fragment{suffix}", "local")
        self.b = gpu_buffer([self.columns, self.chunk], dtype, f"B_fragment{suffix}", "local")
        self.shape = [self.rows, self.columns, self.side * self.side // WAVE]
        self.accumulators = gpu_buffer(self.shape, accumulator, f"C_fragment{suffix}", "local")

    def clear(self) -> Stmt:
        zero = tirx.const(0, self.accumulator)
        return nest(self.shape, UNROLLED, ("i", "j", "e"), lambda at: store(self.accumulators, zero, at))

    def place(self, lane: Expr, element: Expr) -> tuple[Expr, Expr]:
        """(row, column) of a lane's ``element`` of an accumulator."""
        row = tirx.floordiv(lane, index(self.side)) * index(QUAD) + tirx.floormod(element, index(QUAD))
        down = tirx.floordiv(element, index(QUAD)) * index(WAVE // self.side * QUAD)
        return down + row, tirx.floormod(lane, index(self.side))

    def multiply(self, a: SharedTile, b: SharedTile, warp: WarpPlace) -> Stmt:
        """Add the products of two tiles in shared memory."""

        def step(k: Expr) -> Stmt:
            parts = (self.chunk // self.instruction.elements, self.rows, self.columns)
            return sequence(
                allocate(self.a),
                allocate(self.b),
                loop(self.rows, UNROLLED, "i", lambda i: self._load(a, self.a, warp.row, warp.lane, i, k)),
                loop(self.columns, UNROLLED, "j", lambda j: self._load(b, self.b, warp.column, warp.lane, j, k)),
                nest(parts, UNROLLED, ("h", "i", "j"), lambda at: self._multiply(*at)),
            )

        return loop(self.split.depth // self.split.step, SERIAL, "k_inner", step)

    def _load(self, tile: SharedTile, fragment: Buffer, first: Expr, lane: Expr, at: Expr, k: Expr) -> Stmt:
        """A lane's elements of fragment ``at``: 16 bytes of a row of the tile, or one element of each of some rows."""
        line = first + at * index(self.side) + tirx.floormod(lane, index(self.side))
        chunk = k * index(WAVE // self.side) + tirx.floordiv(lane, index(self.side))
        if tile.operand.along_depth:
            start = tile.chunk_position(line, chunk)
            return loop(self.chunk, VECTORIZED, "e", lambda e: store(fragment, load(tile.buffer, [start + e]), [at, e]))

        def one(e: Expr) -> Stmt:
            row, column = chunk * index(self.chunk) + e, tirx.floordiv(line, index(self.chunk))
            start = tile.chunk_position(row, column) + tirx.floormod(line, index(self.chunk))
            return store(fragment, load(tile.buffer, [start]), [at, e])

        return loop(self.chunk, UNROLLED, "e", one)

    def _multiply(self, part: Expr, i: Expr, j: Expr) -> Stmt:
        count = self.shape[2]

        def several(buffer: Buffer, at: Sequence[Expr], first: Expr, count: int) -> Expr:
            """Element by element: stock TVM's CompactBufferAllocation takes no vectors of several widths."""
            elements = [load(buffer, [*at, first + index(e)]) for e in range(count)]
            return tirx.Shuffle(elements, list(range(count)))

        def factor(buffer: Buffer, at: Expr) -> Expr:
            elements = self.instruction.elements
            held = several(buffer, [at], part * index(elements), elements)
            return tirx.reinterpret(f"int{8 * elements}", held) if self.dtype == "int8" else held

        dtype, zero = f"{self.accumulator}x{count}", tirx.const(0, "int32")  # nothing is broadcast or permuted
        sums = several(self.accumulators, [i, j], index(0), count)
        taken = gpu_buffer([1], dtype, "products", "local")
        arguments = (factor(self.a, i), factor(self.b, j), sums, zero, zero, zero)
        called = tirx.call_llvm_pure_intrin(dtype, self.instruction.name, *arguments)
        parts = [tirx.Shuffle([load(taken, [index(0)])], [e]) for e in range(count)]
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
