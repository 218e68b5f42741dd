"""Small correct kernels for tensor cores, written by hand: mma.sync with ldmatrix, and wmma. Part of `good_kernels`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tvm_ext._tvm import Expr, Stmt, tirx
from tvm_ext.analysis.computations import dtype_of
from tvm_ext.devices.gpu import WARP
from tvm_ext.ir.build_ir import SERIAL, allocate, index, load, loop, nest, sequence, split_index, store
from tvm_ext.ir.simt_ir import allocate_shared, gpu_buffer, launch
from tvm_ext.support.arrays import Array

from .good_kernels import GoodKernel, argument, copy_in, primitive_function

TILE = 16
THREADS = 64
PADDING = 8  # halves after each row of a shared tile: rows start 16 bytes apart modulo 128


def _reference(a: Array, b: Array) -> Array:
    return a.astype(np.float64) @ b.astype(np.float64)


def _call(name: str, *args: Any) -> Stmt:
    """The intrinsic ``tirx.{name}``, which returns nothing. Plain integers are int32, as code generation expects."""
    constants = [tirx.IntImm("int32", arg) if type(arg) is int else arg for arg in args]
    return tirx.Evaluate(tirx.call_intrin("", f"tirx.{name}", *constants))


READ, WRITE = 1, 2


def _pointer(buffer: Any, place: Sequence[Expr], stride: int, access: int) -> Expr:
    """The address of ``buffer[place]``, rows ``stride`` elements apart, through which 16 rows are read or written.

    Stock ThreadSync sees accesses through ``tvm_access_ptr``; ``address_of`` would leave the kernel without barriers.
    """
    offset = tirx.Cast("int32", place[0] * index(stride) + place[1])
    extent = tirx.IntImm("int32", 15 * stride + TILE)
    return tirx.tvm_access_ptr(tirx.type_annotation(dtype_of(buffer)), buffer.data, offset, extent, access)


def _row_stride(buffer: Any, padding: int) -> int:
    return int(buffer.ty.shape[-1]) + padding


def matmul_by_mma(m: int, n: int, k: int, dtype: str) -> Any:
    """``C = A @ B``, ``dtype`` to float32: two warps, each a tile of 16x16 by two mma.m16n8k16 a step, ldmatrix.x4.

    A step of 16 along k is staged in shared memory, rows padded by 8 halves.
    """
    a, b, c = argument("A", m, k, dtype=dtype), argument("B", k, n, dtype=dtype), argument("C", m, n)
    a_tile = gpu_buffer((2 * TILE, TILE), dtype, "A_shared", "shared")
    b_tile = gpu_buffer((TILE, TILE), dtype, "B_shared", "shared")
    a_registers, b_registers = (gpu_buffer((8,), dtype, f"{name}_registers", "local") for name in "ab")
    sums = gpu_buffer((8,), "float32", "sums", "local")
    grid = (m // (2 * TILE), n // TILE)
    zero = index(0)

    def ldmatrix(registers: Any, tile: Any, first_row: Expr, lane: Expr, *, transposed: bool) -> Stmt:
        # lanes 0..15 give the addresses of 16 rows, lanes 16..31 those of the same rows, 8 columns on
        row, column = tirx.floormod(lane, index(16)), tirx.floordiv(lane, index(16)) * index(8)
        offset = row * index(_row_stride(tile, PADDING)) + column
        pointer = _pointer(tile, [first_row, zero], _row_stride(tile, PADDING), READ)
        return _call(
            "ptx_legacy.ldmatrix", tirx.const(transposed, "bool"), 4, ".b16", registers.data, 0,
            pointer, tirx.Cast("int32", offset),
        )  # fmt: skip

    def multiply(half: int) -> Stmt:
        names = {"float16": "fp16", "bfloat16": "bf16"}
        words = ("m16n8k16", "row", "col", names[dtype], names[dtype], "fp32")
        return _call(
            "ptx_legacy.mma", *words, a_registers.data, 0, b_registers.data, 4 * half,
            sums.data, 4 * half, tirx.const(False, "bool"),
        )  # fmt: skip

    def kernel(block: Expr, thread: Expr) -> Stmt:
        block_row, block_column = split_index(block, grid)
        row, column = block_row * index(2 * TILE), block_column * index(TILE)
        warp, lane = tirx.floordiv(thread, index(WARP)), tirx.floormod(thread, index(WARP))

        def step(number: Expr) -> Stmt:
            depth = number * index(TILE)
            return sequence(
                copy_in(a_tile, a, (row, depth), thread, THREADS, ()),
                copy_in(b_tile, b, (depth, column), thread, THREADS, ()),
                ldmatrix(a_registers, a_tile, warp * index(TILE), lane, transposed=False),
                ldmatrix(b_registers, b_tile, zero, lane, transposed=True),
                multiply(0),
                multiply(1),
            )

        def write(parts: tuple[Expr, ...]) -> Stmt:
            half, lower, pair = parts
            i = warp * index(TILE) + lower * index(8) + tirx.floordiv(lane, index(4))
            j = half * index(8) + tirx.floormod(lane, index(4)) * index(2) + pair
            value = load(sums, [half * index(4) + lower * index(2) + pair])
            return store(c, value, [row + i, column + j])

        return sequence(
            allocate_shared(a_tile, padding=PADDING), allocate_shared(b_tile, padding=PADDING),
            allocate(a_registers), allocate(b_registers), allocate(sums),
            loop(8, SERIAL, "i", lambda i: store(sums, tirx.const(0, "float32"), [i])),
            loop(k // TILE, SERIAL, "step", step),
            nest((2, 2, 2), SERIAL, ("half", "lower", "pair"), write),
        )  # fmt: skip

    return primitive_function([a, b, c], launch(grid[0] * grid[1], THREADS, kernel))


def matmul_by_wmma(m: int, n: int, k: int) -> Any:
    """``C = A @ B``, float16 to float32: two warps, each a wmma.m16n16k16 a step from padded shared memory."""
    a, b = argument("A", m, k, dtype="float16"), argument("B", k, n, dtype="float16")
    c = argument("C", m, n)
    a_tile = gpu_buffer((2 * TILE, TILE), "float16", "A_shared", "shared")
    b_tile = gpu_buffer((TILE, TILE), "float16", "B_shared", "shared")
    a_fragment = gpu_buffer((TILE, TILE), "float16", "a_fragment", "wmma.matrix_a")
    b_fragment = gpu_buffer((TILE, TILE), "float16", "b_fragment", "wmma.matrix_b")
    sums = gpu_buffer((TILE, TILE), "float32", "sums", "wmma.accumulator")
    grid = (m // (2 * TILE), n // TILE)
    sizes = (TILE, TILE, TILE)
    row_major = "row_major"

    def kernel(block: Expr, thread: Expr) -> Stmt:
        block_row, block_column = split_index(block, grid)
        row, column = block_row * index(2 * TILE), block_column * index(TILE)
        warp_row = tirx.floordiv(thread, index(WARP)) * index(TILE)

        def read(fragment: Any, tile: Any, first_row: Expr) -> Stmt:
            stride = _row_stride(tile, PADDING)
            pointer = _pointer(tile, [first_row, index(0)], stride, READ)
            return _call("tvm_load_matrix_sync", fragment.data, *sizes, 0, pointer, stride, row_major)

        def step(number: Expr) -> Stmt:
            depth = number * index(TILE)
            return sequence(
                copy_in(a_tile, a, (row, depth), thread, THREADS, ()),
                copy_in(b_tile, b, (depth, column), thread, THREADS, ()),
                read(a_fragment, a_tile, warp_row),
                read(b_fragment, b_tile, index(0)),
                _call("tvm_mma_sync", sums.data, 0, a_fragment.data, 0, b_fragment.data, 0, sums.data, 0),
            )

        target = _pointer(c, [row + warp_row, column], n, WRITE)
        return sequence(
            allocate_shared(a_tile, padding=PADDING), allocate_shared(b_tile, padding=PADDING),
            allocate(a_fragment), allocate(b_fragment), allocate(sums),
            _call("tvm_fill_fragment", sums.data, *sizes, 0, tirx.const(0, "float32")),
            loop(k // TILE, SERIAL, "step", step),
            _call("tvm_store_matrix_sync", sums.data, *sizes, 0, target, n, row_major),
        )  # fmt: skip

    return primitive_function([a, b, c], launch(grid[0] * grid[1], THREADS, kernel))


def tensor_core_kernels() -> tuple[GoodKernel, ...]:
    """Kernels with tensor-core instructions."""
    return (
        GoodKernel(name="matmul_mma", function=matmul_by_mma(32, 32, 48, "float16"), reference=_reference),
        GoodKernel(name="matmul_mma_bfloat16", function=matmul_by_mma(32, 16, 32, "bfloat16"), reference=_reference),
        GoodKernel(name="matmul_wmma", function=matmul_by_wmma(32, 32, 32), reference=_reference),
    )
