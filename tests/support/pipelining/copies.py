"""Kernels with unusual copies to be pipelined: gathered rows, bytes, odd pitches, transposed tiles."""

from __future__ import annotations

from typing import Any

import numpy as np

from tvm_ext._tvm import Expr, Stmt, tirx
from tvm_ext.ir.build_ir import VECTORIZED, allocate, index, load, loop, sequence, store
from tvm_ext.ir.simt_ir import gpu_buffer, launch
from tvm_ext.support.arrays import Array

from ..simt.good_kernels import argument, primitive_function
from .hard import FIRST, STEPS, WIDTH, add_to, neighbour, neighbours_of, row_case, wide_of, write_total, zero_of
from .kernels import DEPTH, THREADS, TILE, Copy, PipeliningKernel, clear, product_reference, random_inputs, serial_loop
from .products import SHARED, Product, matmul, write_sums


def _gathered_rows() -> Any:
    """Which row a step loads stands in another tensor."""
    a, order, b = argument("A", STEPS, WIDTH), argument("order", STEPS, dtype="int32"), argument("B", 1, WIDTH)
    tile = gpu_buffer((WIDTH,), "float32", "A_shared", "shared")
    total = gpu_buffer((1,), "float32", "total", "local")

    def kernel(_block: Expr, thread: Expr) -> Stmt:
        def step(k: Expr) -> Stmt:
            row = tirx.Cast("int64", load(order, [k]))
            weight = tirx.Cast("float32", k + index(1))
            return sequence(
                allocate(tile),
                store(tile, load(a, [row, thread]), [thread]),
                add_to(total, load(tile, [neighbour(thread)]) * weight),
            )

        return sequence(
            allocate(total),
            store(total, zero_of(), FIRST),
            serial_loop(STEPS, "k", step),
            write_total(b, total, thread),
        )

    return primitive_function([a, order, b], launch(1, THREADS, kernel))


def _gathered_inputs(function: Any, seed: int) -> tuple[Array, ...]:
    a, _ = random_inputs(function, seed)
    return a, np.random.default_rng(seed).permutation(STEPS).astype(np.int32)


def _gathered_reference(a: Array, order: Array) -> Array:
    return np.asarray(np.arange(1, STEPS + 1)[None, :] @ neighbours_of(a)[order])


def _sums_of_bytes() -> Any:
    """int8, 16 bytes a copy, summed to int32; 16 of the 64 threads copy."""
    a, b = argument("A", STEPS, 256, dtype="int8"), argument("B", 1, WIDTH, dtype="int32")
    tile = gpu_buffer((256,), "int8", "A_shared", "shared")
    total = gpu_buffer((1,), "int32", "total", "local")

    def kernel(_block: Expr, thread: Expr) -> Stmt:
        def step(k: Expr) -> Stmt:
            def copied(v: Expr) -> Stmt:
                place = thread * index(16) + v
                return store(tile, load(a, [k, place]), [place])

            value = tirx.Cast("int32", load(tile, [neighbour(thread) * index(4)]))
            return sequence(
                allocate(tile),
                tirx.IfThenElse(thread < index(16), loop(16, VECTORIZED, "v", copied), None),
                store(total, load(total, FIRST) + value, FIRST),
            )

        return sequence(
            allocate(total), store(total, zero_of("int32"), FIRST), serial_loop(STEPS, "k", step),
            write_total(b, total, thread),
        )  # fmt: skip

    return primitive_function([a, b], launch(1, THREADS, kernel))


def _byte_inputs(_function: Any, seed: int) -> tuple[Array, ...]:
    return (np.random.default_rng(seed).integers(-128, 128, (STEPS, 256)).astype(np.int8),)


def _byte_reference(a: Array) -> Array:
    return np.roll(wide_of(a).sum(axis=0, keepdims=True)[:, ::4], -1, axis=1)


def _odd_pitch_matmul() -> Any:
    """Rows of A are 81 floats apart: no 16 bytes of it are aligned but in the first row."""
    k = STEPS * DEPTH
    a, b, c = argument("A", TILE, k + 1), argument("B", k, TILE), argument("C", TILE, TILE)
    sums = gpu_buffer((2, 2), "float32", "sums", "local")

    def kernel(_block: Expr, thread: Expr) -> Stmt:
        corner = (index(0), index(0))
        return sequence(
            allocate(sums), clear(sums), Product(a=a, b=b).reduce(sums, corner, thread, STEPS),
            write_sums(c, sums, corner, thread),
        )  # fmt: skip

    return primitive_function([a, b, c], launch(1, THREADS, kernel))


def copy_kernels() -> tuple[PipeliningKernel, ...]:
    """All kernels of this file."""
    shared = ("A_shared",)
    return (
        row_case("gathered_rows", _gathered_rows, _gathered_reference, inputs=_gathered_inputs),
        row_case("sums_of_bytes", _sums_of_bytes, _byte_reference, inputs=_byte_inputs, shared=shared),
        PipeliningKernel(
            name="odd_pitch",
            make=_odd_pitch_matmul,
            shared=SHARED,
            reference=lambda a, b: product_reference(a[:, :-1], b),
        ),
        PipeliningKernel(
            name="transposed_copies",
            shared=SHARED,
            reference=lambda a, b: product_reference(a.T, b.T),
            make=lambda: matmul(TILE, TILE, STEPS * DEPTH, lambda a, b: Product(a=a, b=b, copy=Copy(transposed=True))),
        ),
    )
