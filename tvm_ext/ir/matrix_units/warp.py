"""What a warp does with tiles in shared memory: fragments and matrix instructions (PTX ISA; CUDA's wmma).

On sm_80 and later fragments are arrays in registers, filled by ldmatrix and multiplied by mma.sync.m16n8k16 (int8:
m16n8k32, the same 32 bytes a row). A lane's part, with g = lane // 4 and t = lane % 4:

* A, 16 x 16: four pairs, rows g and g + 8 of columns 2t, then of columns 2t + 8;
* B, 16 x 8: two pairs, column g, rows 2t and 2t + 8;
* accumulators, 16 x 8: row g, columns 2t and 2t + 1, then row g + 8.

Before, fragments are opaque objects of wmma, 16 x 16 each.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm_ext._tvm import Buffer, Expr, For, Stmt, tirx
from tvm_ext.analysis.computation_exprs import itemsize_bytes
from tvm_ext.analysis.gemm_form import FRAGMENT, TileSplit, uses_mfma, uses_wmma
from tvm_ext.devices.gpu import VECTOR_BYTES, WARP
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.ir.build_ir import SERIAL, UNROLLED, allocate, index, loop, nest, sequence, store
from tvm_ext.ir.simt_ir import gpu_buffer

from .mfma import Mfma
from .shared import SharedTile
from .warp_place import WarpPlace

MMA_COLUMNS = 8
"""Columns of one mma.sync; ldmatrix.x4 loads B for two of them."""
STEP_CHUNKS = 2
"""Chunks of 16 bytes that one step of the reduction takes of each line: 16 halves or 32 bytes."""
PTX_TYPES = {"float16": "fp16", "bfloat16": "bf16", "int8": "int8", "float32": "fp32", "int32": "int32"}


class MmaSync:
    """ldmatrix and mma.sync on fragments of scope "local": A [rows / 16, 8], B [columns / 16, 8], C [.., .., 4]."""

    def __init__(self, split: TileSplit, dtype: str, accumulator: str, suffix: str = "") -> None:
        self.split, self.dtype, self.accumulator = split, dtype, accumulator
        self.step = STEP_CHUNKS * VECTOR_BYTES // int(itemsize_bytes(dtype))
        self.lane_elements = FRAGMENT * self.step // WARP
        rows, columns = split.warp_rows // FRAGMENT, split.warp_columns // MMA_COLUMNS
        self.a = gpu_buffer([rows, self.lane_elements], dtype, f"A_fragment{suffix}", "local")
        self.b = gpu_buffer([columns // 2, self.lane_elements], dtype, f"B_fragment{suffix}", "local")
        self.accumulators = gpu_buffer([rows, columns, 4], accumulator, f"C_fragment{suffix}", "local")

    def clear(self) -> Stmt:
        zero = tirx.const(0, self.accumulator)
        shape = [int(size) for size in self.accumulators.ty.shape]
        return nest(shape, UNROLLED, ("i", "j", "e"), lambda at: store(self.accumulators, zero, at))

    def multiply(self, a: SharedTile, b: SharedTile, warp: WarpPlace) -> Stmt:
        """Add the products of two tiles in shared memory."""

        def load_rows(k: Expr) -> list[Stmt]:
            return [loop(self.row_fragments, UNROLLED, "i", lambda i: self._load_a(a, warp, i, k))]

        return self._steps([self.a], load_rows, b, warp, lambda i, _: (self.a, i))

    def multiply_held(self, held: Buffer, first: Expr, b: SharedTile, warp: WarpPlace) -> Stmt:
        """A's fragments are in registers already: ``held`` [rows / 16, all steps, 8], from step ``first`` on."""
        steps = index(int(held.ty.shape[1]))
        return self._steps([], lambda _: [], b, warp, lambda i, k: (held, i * steps + k + first))

    def _steps(
        self,
        buffers: list[Buffer],
        load_rows: Callable[[Expr], list[Stmt]],
        b: SharedTile,
        warp: WarpPlace,
        factor: Callable[[Expr, Expr], tuple[Buffer, Expr]],
    ) -> Stmt:
        """The steps of a tile's reduction; ``factor(i, k)`` is the fragment of A, by its buffer and number."""
        pairs = self.split.warp_columns // FRAGMENT

        def step(k: Expr) -> Stmt:
            def multiply(at: tuple[Expr, ...]) -> Stmt:
                i, j = at
                return self._mma(i, j, *factor(i, k))

            return sequence(
                *map(allocate, [*buffers, self.b]),
                *load_rows(k),
                loop(pairs, UNROLLED, "j", lambda j: self._load_b(b, warp, j, k)),
                nest((self.row_fragments, 2 * pairs), UNROLLED, ("i", "j"), multiply),
            )

        return unrolled_by_compiler(loop(self.split.depth // self.step, UNROLLED, "k_inner", step))

    @property
    def row_fragments(self) -> int:
        return self.split.warp_rows // FRAGMENT

    def _load_a(self, tile: SharedTile, warp: WarpPlace, i: Expr, k: Expr) -> Stmt:
        """Four 8x8 matrices: rows 0-7 and 8-15 of the first chunk, then of the second.

        Lane l gives the address of row l % 8 of matrix l // 8.
        """
        line, lane = warp.row + i * index(FRAGMENT), warp.lane
        if tile.operand.along_depth:
            row = line + tirx.floormod(lane, index(16))
            chunk = k * index(STEP_CHUNKS) + tirx.floordiv(lane, index(16))
        else:
            row = k * index(FRAGMENT) + _two_eights(lane)
            chunk = tirx.floordiv(line, index(8)) + tirx.floormod(tirx.floordiv(lane, index(8)), index(2))
        return self._ldmatrix(tile, self.a, i, tile.chunk_position(row, chunk))

    def _load_b(self, tile: SharedTile, warp: WarpPlace, j: Expr, k: Expr) -> Stmt:
        """Four 8x8 matrices: both chunks of columns 0-7, then of columns 8-15."""
        line, lane = warp.column + j * index(FRAGMENT), warp.lane
        if tile.operand.along_depth:
            row = line + _two_eights(lane)
            chunk = k * index(STEP_CHUNKS) + tirx.floormod(tirx.floordiv(lane, index(8)), index(2))
        else:
            row = k * index(FRAGMENT) + tirx.floormod(lane, index(16))
            chunk = tirx.floordiv(line, index(8)) + tirx.floordiv(lane, index(16))
        return self._ldmatrix(tile, self.b, j, tile.chunk_position(row, chunk))

    def _ldmatrix(self, tile: SharedTile, fragment: Buffer, at: Expr, position: Expr) -> Stmt:
        transposed = tirx.const(not tile.operand.along_depth, "bool")
        to, pointer = (fragment.data, at * index(self.lane_elements)), tile.buffer.access_ptr("r")
        return _call(self.dtype, "ptx_legacy.ldmatrix", transposed, 4, ".b16", *to, pointer, position)

    def _mma(self, i: Expr, j: Expr, a: Buffer, number: Expr) -> Stmt:
        """Multiply-add fragment ``number`` of ``a`` and fragment j of B."""
        columns, kind = self.split.warp_columns // MMA_COLUMNS, PTX_TYPES[self.dtype]
        shape = (f"m{FRAGMENT}n{MMA_COLUMNS}k{self.step}", "row", "col", kind, kind, PTX_TYPES[self.accumulator])
        factors = (a.data, number * index(self.lane_elements), self.b.data, j * index(self.lane_elements // 2))
        sums = (self.accumulators.data, (i * index(columns) + j) * index(4))
        return _call(self.accumulator, "ptx_legacy.mma", *shape, *factors, *sums, tirx.const(False, "bool"))


def unrolled_by_compiler(statement: Stmt) -> Stmt:
    """``statement`` with its unrolled loops printed as loops under ``#pragma unroll``: 40 instead of 100 KB of CUDA.

    Fragments are indexed by constants, and so stay in registers, once the CUDA compiler has unrolled them.
    """
    zero = tirx.const(0, "int32")
    return tirx.AttrStmt(zero, "pragma_unroll_explicit", zero, statement)


def rolled(statement: Stmt) -> Stmt:
    """``statement``, if it is a loop, under ``#pragma unroll 1``: the CUDA compiler leaves it one.

    A loop of 8 steps is unrolled otherwise, and addresses of several steps are held at once. Worked example, wmma in 8
    warps of 64 x 32 on sm_75: 128 registers and one spilled; rolled 122 and none.
    """
    if not isinstance(statement, For):
        return statement
    annotations = {**statement.annotations, "disable_unroll": tirx.const(True, "bool")}
    return For(statement.loop_var, statement.min, statement.extent, statement.kind, statement.body, None, annotations)


def _two_eights(lane: Expr) -> Expr:
    """lane % 8 in lanes 0-15, 8 more in lanes 16-31."""
    return tirx.floormod(lane, index(8)) + tirx.floordiv(lane, index(16)) * index(8)


class Wmma:
    """wmma 16x16x16: fragments in scopes "wmma.matrix_a", "wmma.matrix_b", "wmma.accumulator".

    All of B's are held for a step, of A's one at a time: a fragment of halves takes 8 registers of each thread.
    """

    def __init__(self, split: TileSplit, dtype: str, accumulator: str, suffix: str = "") -> None:
        self.split, self.dtype, self.accumulator = split, dtype, accumulator
        self.rows, self.columns = split.warp_rows // FRAGMENT, split.warp_columns // FRAGMENT
        size = FRAGMENT * FRAGMENT
        self.a = gpu_buffer([size], dtype, f"A_fragment{suffix}", "wmma.matrix_a")
        self.b = gpu_buffer([self.columns * size], dtype, f"B_fragment{suffix}", "wmma.matrix_b")
        self.accumulators = gpu_buffer(
            [self.rows * self.columns * size], accumulator, f"C_fragment{suffix}", "wmma.accumulator"
        )

    def clear(self) -> Stmt:
        zero = tirx.const(0, self.accumulator)

        def fill(i: Expr) -> Stmt:
            return _call("void", "tvm_fill_fragment", self.accumulators.data, *SHAPE, i, zero)

        return loop(self.rows * self.columns, UNROLLED, "i", fill)

    def multiply(self, a: SharedTile, b: SharedTile, warp: WarpPlace) -> Stmt:
        def row(i: Expr, k: Expr) -> Stmt:
            loaded = self._load(a, self.a, index(0), warp.row, i, k, "row_major")
            return sequence(loaded, loop(self.columns, UNROLLED, "j", lambda j: self._mma(i, j)))

        def step(k: Expr) -> Stmt:
            return sequence(
                allocate(self.a),
                allocate(self.b),
                loop(self.columns, UNROLLED, "j", lambda j: self._load(b, self.b, j, warp.column, j, k, "col_major")),
                loop(self.rows, UNROLLED, "i", lambda i: row(i, k)),
            )

        return loop(self.split.depth // FRAGMENT, SERIAL, "k_inner", step)

    def _load(self, tile: SharedTile, fragment: Buffer, to: Expr, first: Expr, i: Expr, k: Expr, straight: str) -> Stmt:
        """A's lines are rows, B's columns: stored by lines they are row-major and column-major, else the other way."""
        line, depth = first + i * index(FRAGMENT), k * index(FRAGMENT)
        start, layout = tile.element_position(line, depth), straight
        if not tile.operand.along_depth:
            layout = {"row_major": "col_major"}.get(straight, "row_major")
        pointer = tile.buffer.access_ptr("r", offset=start)
        return _call("void", "tvm_load_matrix_sync", fragment.data, *SHAPE, to, pointer, index(tile.pitch), layout)

    def _mma(self, i: Expr, j: Expr) -> Stmt:
        c = (self.accumulators.data, i * index(self.columns) + j)
        return _call("void", "tvm_mma_sync", *c, self.a.data, index(0), self.b.data, j, *c)

    def store(self, pointer: Expr, pitch: int, i: Expr, j: Expr) -> Stmt:
        """Write one accumulator fragment, row-major, to shared memory."""
        at = i * index(self.columns) + j
        return _call(
            "void", "tvm_store_matrix_sync", self.accumulators.data, *SHAPE, at, pointer, index(pitch), "row_major"
        )


SHAPE = (FRAGMENT, FRAGMENT, FRAGMENT)


def multiplier(
    split: TileSplit, dtype: str, accumulator: str, device: DeviceSpec, suffix: str = ""
) -> MmaSync | Wmma | Mfma:
    """What the warps of ``device`` multiply by; names of fragments end in ``suffix``."""
    if uses_mfma(device):
        return Mfma(split, dtype, accumulator, device, suffix)
    kind = Wmma if uses_wmma(device) else MmaSync
    return kind(split, dtype, accumulator, suffix)


def _call(dtype: str, name: str, *args: Expr | int | str) -> Stmt:
    return tirx.Evaluate(tirx.call_intrin(dtype, f"tirx.{name}", *args))
