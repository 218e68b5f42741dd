"""Kernels for vector units to be pipelined: matrix products in all shapes of load-and-use loops, and sums of rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tvm_ext._tvm import Expr, Stmt, tirx
from tvm_ext.ir.build_ir import SERIAL, UNROLLED, allocate, index, load, loop, sequence, split_index, store
from tvm_ext.ir.simt_ir import allocate_shared, gpu_buffer, launch
from tvm_ext.support.arithmetic import ceil_div
from tvm_ext.support.arrays import Array

from ..simt.good_kernels import argument, primitive_function
from .kernels import (
    A100,
    DEPTH,
    T4,
    THREADS,
    TILE,
    Copy,
    PipeliningKernel,
    clear,
    product_reference,
    random_inputs,
    serial_loop,
    unrolled_nest,
)
from .products import FRAGMENTS, SHARED, Form, Product, matmul, write_sums


def _dynamic_matmul(k: int) -> Any:
    """As many steps of the reduction as a tensor says."""
    a, b, c = argument("A", TILE, k), argument("B", k, TILE), argument("C", TILE, TILE)
    count = argument("count", 1, dtype="int32")
    sums = gpu_buffer((2, 2), "float32", "sums", "local")

    def kernel(_block: Expr, thread: Expr) -> Stmt:
        corner = (index(0), index(0))
        steps = tirx.Cast("int64", load(count, [index(0)]))
        return sequence(
            allocate(sums),
            clear(sums),
            Product(a=a, b=b).reduce(sums, corner, thread, steps),
            write_sums(c, sums, corner, thread),
        )

    return primitive_function([a, b, count, c], launch(1, THREADS, kernel))


def _dynamic_inputs(steps: int) -> Callable[[Any, int], tuple[Array, ...]]:
    def inputs(function: Any, seed: int) -> tuple[Array, ...]:
        a, b, _ = random_inputs(function, seed)
        return a, b, np.array([steps], np.int32)

    return inputs


def _dynamic_reference(a: Array, b: Array, count: Array) -> Array:
    k = int(count[0]) * DEPTH
    return product_reference(a[:, :k], b[:k])


def _triangular_matmul(blocks: int) -> Any:
    """Block b of rows multiplies the first 1 + 2b tiles of the reduction: A is lower triangular by blocks."""
    k = (2 * blocks - 1) * DEPTH
    a, b, c = argument("A", blocks * TILE, k), argument("B", k, TILE), argument("C", blocks * TILE, TILE)
    sums = gpu_buffer((2, 2), "float32", "sums", "local")

    def kernel(block: Expr, thread: Expr) -> Stmt:
        corner = (block * index(TILE), index(0))
        return sequence(
            allocate(sums),
            clear(sums),
            Product(a=a, b=b).reduce(sums, corner, thread, block * index(2) + index(1)),
            write_sums(c, sums, corner, thread),
        )

    return primitive_function([a, b, c], launch(blocks, THREADS, kernel))


def _triangular_reference(a: Array, b: Array) -> Array:
    rows = [a[i : i + TILE, : (2 * (i // TILE) + 1) * DEPTH] for i in range(0, len(a), TILE)]
    return np.concatenate([product_reference(part, b[: part.shape[1]]) for part in rows])


def _two_products(first_depth: int, second_depth: int) -> Any:
    """``D = A @ B + E @ F`` in one kernel: two load-and-use loops, one after the other."""
    a, b = argument("A", TILE, first_depth), argument("B", first_depth, TILE)
    e, f = argument("E", TILE, second_depth), argument("F", second_depth, TILE)
    d = argument("D", TILE, TILE)
    sums = gpu_buffer((2, 2), "float32", "sums", "local")

    def kernel(_block: Expr, thread: Expr) -> Stmt:
        corner = (index(0), index(0))
        return sequence(
            allocate(sums),
            clear(sums),
            Product(a=a, b=b, name="_0").reduce(sums, corner, thread, first_depth // DEPTH),
            Product(a=e, b=f, name="_1", fragment_depth=0).reduce(sums, corner, thread, second_depth // DEPTH),
            write_sums(d, sums, corner, thread),
        )

    return primitive_function([a, b, e, f, d], launch(1, THREADS, kernel))


def _persistent_matmul(tiles: int, k: int, *, fragment_depth: int = 1) -> Any:
    """One block computes ``tiles`` tiles of rows one after the other: the load-and-use loop is in a sequential one."""
    a, b, c = argument("A", tiles * TILE, k), argument("B", k, TILE), argument("C", tiles * TILE, TILE)
    sums = gpu_buffer((2, 2), "float32", "sums", "local")

    def kernel(_block: Expr, thread: Expr) -> Stmt:
        def tile(number: Expr) -> Stmt:
            corner = (number * index(TILE), index(0))
            return sequence(
                allocate(sums),
                clear(sums),
                Product(a=a, b=b, fragment_depth=fragment_depth).reduce(sums, corner, thread, ceil_div(k, DEPTH)),
                write_sums(c, sums, corner, thread),
            )

        return serial_loop(tiles, "tile", tile)

    return primitive_function([a, b, c], launch(1, THREADS, kernel))


def _sum_of_rows(columns: int, vector: int) -> Any:
    """``B[i] = sum(A[i, :])`` of 64 rows, by way of shared memory so that global reads are contiguous."""
    a, b = argument("A", THREADS, columns), argument("B", THREADS)
    tile = gpu_buffer((THREADS, DEPTH), "float32", "A_shared", "shared")
    total = gpu_buffer((1,), "float32", "total", "local")
    zero = [index(0)]

    def kernel(_block: Expr, thread: Expr) -> Stmt:
        def step(ko: Expr) -> Stmt:
            def add(kk: Expr) -> Stmt:
                return store(total, load(total, zero) + load(tile, [thread, kk]), zero)

            return sequence(
                allocate_shared(tile, padding=4),
                Copy(vector=vector, kind=SERIAL).tile(tile, a, (index(0), ko * index(DEPTH)), thread),
                loop(DEPTH, UNROLLED, "kk", add),
            )

        return sequence(
            allocate(total),
            store(total, tirx.const(0, "float32"), zero),
            serial_loop(columns // DEPTH, "ko", step),
            store(b, load(total, zero), [thread]),
        )

    return primitive_function([a, b], launch(1, THREADS, kernel))


def _convolution_of_rows() -> Any:
    """``y[o, x] = sum over c, k of w[k, c, o] * x[c, x + k]``: the tile is loaded inside two sequential loops."""
    channels, kernel_size, width = 32, 3, TILE
    x, w = argument("X", channels, width + kernel_size - 1), argument("W", kernel_size, channels, TILE)
    y = argument("Y", TILE, width)
    x_tile = gpu_buffer((DEPTH, width), "float32", "X_shared", "shared")
    w_tile = gpu_buffer((DEPTH, TILE), "float32", "W_shared", "shared")
    sums = gpu_buffer((2, 2), "float32", "sums", "local")

    def kernel(_block: Expr, thread: Expr) -> Stmt:
        ty, tx = split_index(thread, (8, 8))

        def step(c: Expr, k: Expr) -> Stmt:
            def copy_x(at: Expr) -> Stmt:
                row, column = split_index(at * index(THREADS) + thread, (DEPTH, width))
                return store(x_tile, load(x, [c * index(DEPTH) + row, column + k]), [row, column])

            def copy_w(at: Expr) -> Stmt:
                row, column = split_index(at * index(THREADS) + thread, (DEPTH, TILE))
                return store(w_tile, load(w, [k, c * index(DEPTH) + row, column]), [row, column])

            def add(kij: tuple[Expr, ...]) -> Stmt:
                kk, i, j = kij
                left = load(w_tile, [kk, ty * index(2) + i])
                return store(sums, load(sums, [i, j]) + left * load(x_tile, [kk, tx * index(2) + j]), [i, j])

            return sequence(
                allocate(x_tile),
                allocate(w_tile),
                loop(4, UNROLLED, "copy_x", copy_x),
                loop(4, UNROLLED, "copy_w", copy_w),
                unrolled_nest((DEPTH, 2, 2), add),
            )

        return sequence(
            allocate(sums),
            clear(sums),
            serial_loop(channels // DEPTH, "c", lambda c: serial_loop(kernel_size, "k", lambda k: step(c, k))),
            write_sums(y, sums, (index(0), index(0)), thread),
        )

    return primitive_function([x, w, y], launch(1, THREADS, kernel))


def _convolution_reference(x: Array, w: Array) -> Array:
    width = x.shape[1] - len(w) + 1
    wide_x, wide_w = x.astype(np.float64), w.astype(np.float64)
    total: Array = sum(wide_w[k].T @ wide_x[:, k : k + width] for k in range(len(w)))
    return total


def _matmul_kernel(name: str, sizes: tuple[int, int, int], form: Form | None = None, **rest: Any) -> PipeliningKernel:
    dtype, steps = rest.pop("dtype", "float32"), rest.pop("steps", None)
    settings: dict[str, Any] = {"shared": SHARED, "registers": FRAGMENTS, "reference": product_reference, **rest}
    return PipeliningKernel(name=name, make=lambda: matmul(*sizes, form, dtype=dtype, steps=steps), **settings)


def simt_kernels() -> tuple[PipeliningKernel, ...]:
    """All kernels of this file."""
    product = product_reference
    odd = (TILE, 2 * TILE, 5 * DEPTH)
    guarded = Copy(vector=1, guarded=True)
    halves: dict[str, Any] = {"dtype": "float16", "devices": (A100, T4)}
    return (
        _matmul_kernel("matmul_odd_steps", odd),
        _matmul_kernel("matmul_two_steps", (TILE, TILE, 2 * DEPTH)),
        _matmul_kernel("matmul_one_step", (TILE, TILE, DEPTH), shared=(), registers=()),
        _matmul_kernel("matmul_shared_only", odd, lambda a, b: Product(a=a, b=b, fragment_depth=0), registers=()),
        _matmul_kernel("matmul_fragments_of_4", odd, lambda a, b: Product(a=a, b=b, fragment_depth=4)),
        _matmul_kernel("matmul_fragments_of_8", odd, lambda a, b: Product(a=a, b=b, fragment_depth=8)),
        _matmul_kernel(
            "matmul_one_fragment", odd, lambda a, b: Product(a=a, b=b, fragment_depth=16), registers=()
        ),
        _matmul_kernel("matmul_tiles_outside", odd, lambda a, b: Product(a=a, b=b, outside=True)),
        _matmul_kernel("matmul_padded_rows", odd, lambda a, b: Product(a=a, b=b, padding=4)),
        _matmul_kernel("matmul_by_scalars", odd, lambda a, b: Product(a=a, b=b, copy=Copy(vector=1))),
        _matmul_kernel("matmul_rolled_copies", odd, lambda a, b: Product(a=a, b=b, copy=Copy(vector=1, kind=SERIAL))),
        _matmul_kernel("matmul_zero_filled", (19, 21, 45), lambda a, b: Product(a=a, b=b, copy=guarded)),
        _matmul_kernel("matmul_stages_by_hand", odd, lambda a, b: Product(a=a, b=b, hints=(2, 4)), devices=(A100,)),
        _matmul_kernel("matmul_half_quads", odd, **halves),
        _matmul_kernel("matmul_half_pairs", odd, lambda a, b: Product(a=a, b=b, copy=Copy(vector=2)), **halves),
        _matmul_kernel(
            "matmul_half_octets", odd, lambda a, b: Product(a=a, b=b, copy=Copy(vector=8), fragment_depth=2), **halves
        ),
        _matmul_kernel("matmul_bfloat16", odd, dtype="bfloat16", devices=(A100,)),
        *(
            PipeliningKernel(
                name=f"matmul_dynamic_{steps}_steps", make=lambda: _dynamic_matmul(7 * DEPTH),
                reference=_dynamic_reference, inputs=_dynamic_inputs(steps), shared=SHARED, registers=FRAGMENTS,
            )
            for steps in (0, 1, 2, 7)
        ),
        PipeliningKernel(
            name="matmul_triangular", make=lambda: _triangular_matmul(3), reference=_triangular_reference,
            shared=SHARED, registers=FRAGMENTS,
        ),
        PipeliningKernel(
            name="two_products", make=lambda: _two_products(5 * DEPTH, 3 * DEPTH),
            reference=lambda a, b, e, f: product(a, b) + product(e, f),
            shared=("A_shared_0", "B_shared_0", "A_shared_1", "B_shared_1"), registers=("A_fragment_0", "B_fragment_0"),
        ),
        PipeliningKernel(
            name="two_short_products", make=lambda: _two_products(2 * DEPTH, 2 * DEPTH),
            reference=lambda a, b, e, f: product(a, b) + product(e, f),
            shared=("A_shared_0", "B_shared_0", "A_shared_1", "B_shared_1"), registers=("A_fragment_0", "B_fragment_0"),
        ),
        PipeliningKernel(
            name="persistent_tiles", make=lambda: _persistent_matmul(3, 5 * DEPTH), reference=product, shared=SHARED,
            registers=FRAGMENTS,
        ),
        PipeliningKernel(
            name="persistent_short_tiles", make=lambda: _persistent_matmul(4, 2 * DEPTH, fragment_depth=0),
            reference=product, shared=SHARED,
        ),
        PipeliningKernel(
            name="sum_of_rows", make=lambda: _sum_of_rows(7 * DEPTH, 4), shared=("A_shared",),
            reference=lambda a: a.astype(np.float64).sum(axis=1),
        ),
        PipeliningKernel(
            name="sum_of_rows_in_order", make=lambda: _sum_of_rows(3 * DEPTH, 1), shared=("A_shared",),
            reference=lambda a: a.astype(np.float64).sum(axis=1),
        ),
        PipeliningKernel(
            name="convolution_of_rows", make=_convolution_of_rows, shared=("X_shared", "W_shared"),
            reference=_convolution_reference,
        ),
    )  # fmt: skip
