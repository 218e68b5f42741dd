"""Kernels that ALCOP's rules refuse (MLSys 2023, §2.1), or that are pipelined already: one for every reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from tvm_ext._tvm import Expr, Stmt, tirx
from tvm_ext.ir.build_ir import UNROLLED, allocate, index, load, loop, sequence, split_index, store
from tvm_ext.ir.simt_ir import gpu_buffer, launch
from tvm_ext.support.arrays import Array

from ..simt import good_kernels
from ..simt.good_kernels import argument, primitive_function
from .hard import FIRST, STEPS, WIDTH, add_to, neighbour, neighbours_of, row_case, wide_of, write_total, zero_of
from .kernels import A100, DEPTH, T4, THREADS, TILE, Copy, PipeliningKernel, clear, product_reference, serial_loop
from .products import SHARED, Product, matmul, write_sums


def _stencil_of_parallel_tiles() -> Any:
    """Every block has a tile of its own: there is no sequential loop around the load (ALCOP §2.1, rule 2)."""
    blocks = 4
    a, b = argument("A", blocks * WIDTH + 2), argument("B", blocks * WIDTH)
    tile = gpu_buffer((WIDTH + 2,), "float32", "A_shared", "shared")

    def kernel(block: Expr, thread: Expr) -> Stmt:
        first = block * index(WIDTH)

        def fill(place: Expr) -> Stmt:
            return store(tile, load(a, [first + place]), [place])

        def value(offset: int) -> Expr:
            return load(tile, [thread + index(offset)])

        return sequence(
            allocate(tile),
            fill(thread),
            tirx.IfThenElse(thread < index(2), fill(thread + index(WIDTH)), None),
            store(b, value(0) + value(1) + value(2), [first + thread]),
        )

    return primitive_function([a, b], launch(blocks, THREADS, kernel))


def _stencil_reference(a: Array) -> Array:
    wide = wide_of(a)
    return np.asarray(wide[:-2] + wide[1:-1] + wide[2:])


def _row_of_tiles() -> Any:
    """The sequential loop's variable indexes the buffer: each iteration fills a row of its own of one tile."""
    a, b = argument("A", STEPS, WIDTH), argument("B", STEPS, WIDTH)
    tile = gpu_buffer((STEPS, WIDTH), "float32", "A_shared", "shared")

    def kernel(_block: Expr, thread: Expr) -> Stmt:
        def step(k: Expr) -> Stmt:
            return sequence(
                store(tile, load(a, [k, thread]), [k, thread]),
                store(b, load(tile, [k, neighbour(thread)]), [k, thread]),
            )

        return sequence(allocate(tile), serial_loop(STEPS, "k", step))

    return primitive_function([a, b], launch(1, THREADS, kernel))


def _two_nested_loops() -> Any:
    """Both tiles are in shared memory, one loaded per ``ko``, the other per ``ki``: barriers at two places (rule 3)."""
    outer, inner = 3, 4
    a, b = argument("A", outer, WIDTH), argument("B", outer * inner, WIDTH)
    c = argument("C", 1, WIDTH)
    a_tile, b_tile = (gpu_buffer((WIDTH,), "float32", f"{name}_shared", "shared") for name in "AB")
    total = gpu_buffer((1,), "float32", "total", "local")

    def kernel(_block: Expr, thread: Expr) -> Stmt:
        def inner_step(ko: Expr, ki: Expr) -> Stmt:
            return sequence(
                allocate(b_tile),
                store(b_tile, load(b, [ko * index(inner) + ki, thread]), [thread]),
                add_to(total, load(a_tile, [neighbour(thread)]) * load(b_tile, [neighbour(thread)])),
            )

        def step(ko: Expr) -> Stmt:
            return sequence(
                allocate(a_tile),
                store(a_tile, load(a, [ko, thread]), [thread]),
                serial_loop(inner, "ki", lambda ki: inner_step(ko, ki)),
            )

        return sequence(
            allocate(total),
            store(total, zero_of(), FIRST),
            serial_loop(outer, "ko", step),
            write_total(c, total, thread),
        )

    return primitive_function([a, b, c], launch(1, THREADS, kernel))


def _two_nested_loops_reference(a: Array, b: Array) -> Array:
    product = np.repeat(wide_of(a), len(b) // len(a), axis=0) * wide_of(b)
    return np.roll(product.sum(axis=0, keepdims=True), -1, axis=1)


def _bias_of_outer_loop() -> Any:
    """A tile of the outer, persistent loop is used after the inner one that loads tiles of its own."""
    tiles, k = 3, 3 * DEPTH
    a, b = argument("A", tiles * TILE, k), argument("B", k, TILE)
    bias, c = argument("D", tiles * TILE, TILE), argument("C", tiles * TILE, TILE)
    sums = gpu_buffer((2, 2), "float32", "sums", "local")
    bias_tile = gpu_buffer((TILE, TILE), "float32", "D_shared", "shared")

    def kernel(_block: Expr, thread: Expr) -> Stmt:
        ty, tx = split_index(thread, (8, 8))

        def tile(number: Expr) -> Stmt:
            corner = (number * index(TILE), index(0))

            def add(i: Expr) -> Stmt:
                def element(j: Expr) -> Stmt:
                    value = load(bias_tile, [ty * index(2) + i, tx * index(2) + j])
                    return store(sums, load(sums, [i, j]) + value, [i, j])

                return loop(2, UNROLLED, "j", element)

            return sequence(
                allocate(sums), allocate(bias_tile), clear(sums),
                Copy().tile(bias_tile, bias, corner, thread),
                Product(a=a, b=b).reduce(sums, corner, thread, k // DEPTH),
                loop(2, UNROLLED, "i", add),
                write_sums(c, sums, corner, thread),
            )  # fmt: skip

        return serial_loop(tiles, "tile", tile)

    return primitive_function([a, b, bias, c], launch(1, THREADS, kernel))


def _good(name: str) -> Callable[[], Any]:
    return lambda: next(kernel.function for kernel in good_kernels.simt_kernels() if kernel.name == name)


def refused_kernels() -> tuple[PipeliningKernel, ...]:
    """One for every rule that refuses, and those that are pipelined already."""
    odd = (TILE, 2 * TILE, STEPS * DEPTH)
    twice = Copy(apply=lambda value: value * tirx.const(2, "float32") + tirx.const(1, "float32"))

    def arithmetic(a: Array, b: Array) -> Array:
        return product_reference(2 * wide_of(a) + 1, 2 * wide_of(b) + 1)

    edges = Copy(vector=1, guarded=True)

    def doubling(a: Any, b: Any) -> Product:
        return Product(a=a, b=b, copy=replace(edges, apply=lambda value: value * tirx.const(2, "float32")))

    def widened(a: Any, b: Any) -> Product:
        return Product(a=a, b=b, copy=Copy(apply=lambda value: tirx.Cast("float32", value)), tile_dtype="float32")

    def scalar_halves(a: Any, b: Any) -> Product:
        return Product(a=a, b=b, copy=Copy(vector=1))

    return (
        row_case(
            "stencil_of_parallel_tiles", _stencil_of_parallel_tiles, _stencil_reference,
            refused={"A_shared": "sequential loop"},
        ),
        row_case("row_of_tiles", _row_of_tiles, neighbours_of, refused={"A_shared": "sequential loop"}),
        PipeliningKernel(
            name="arithmetic_copies", make=lambda: matmul(*odd, lambda a, b: Product(a=a, b=b, copy=twice)),
            reference=arithmetic, shared=SHARED,
        ),
        PipeliningKernel(
            name="widening_copies", make=lambda: matmul(*odd, widened, dtype="float16"), devices=(A100, T4),
            reference=product_reference, shared=SHARED,
        ),
        PipeliningKernel(
            name="zero_filled_and_doubled", make=lambda: matmul(19, 21, 45, doubling),
            reference=lambda a, b: 4 * product_reference(a, b),
        ),
        PipeliningKernel(
            name="zero_filled_behind_arithmetic", reference=arithmetic,
            make=lambda: matmul(
                19, 21, 45, lambda a, b: Product(a=a, b=b, copy=replace(edges, apply=twice.apply, guard_last=True))
            ),
            refused=dict.fromkeys(SHARED, "asynchronous copy"),
        ),
        PipeliningKernel(
            name="half_scalars", make=lambda: matmul(*odd, scalar_halves, dtype="float16"), devices=(A100, T4),
            reference=product_reference, refused=dict.fromkeys(SHARED, "asynchronous copy"),
        ),
        PipeliningKernel(
            name="half_transposed",
            make=lambda: matmul(*odd, lambda a, b: Product(a=a, b=b, copy=Copy(transposed=True)), dtype="float16"),
            devices=(A100, T4), reference=lambda a, b: product_reference(a.T, b.T),
            refused=dict.fromkeys(SHARED, "asynchronous copy"),
        ),
        row_case(
            "two_nested_loops", _two_nested_loops, _two_nested_loops_reference, shared=("B_shared",),
            refused={"A_shared": "synchronisation"},
        ),
        PipeliningKernel(
            name="bias_of_outer_loop", make=_bias_of_outer_loop, shared=SHARED, refused={"D_shared": "synchronisation"},
            reference=lambda a, b, bias: product_reference(a, b) + wide_of(bias),
        ),
        PipeliningKernel(
            name="double_buffered_by_hand", make=_good("matmul_double_buffered"), reference=product_reference,
            refused=dict.fromkeys(SHARED),
        ),
        PipeliningKernel(
            name="pipelined_by_stock", make=_good("matmul_three_stages"), reference=product_reference, devices=(A100,),
            refused={"A_shared": "already pipelined", "B_shared": "already pipelined"},
        ),
    )  # fmt: skip
