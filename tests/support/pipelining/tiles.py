"""Kernels whose tiles are read or allocated in unusual ways, to be pipelined."""

from __future__ import annotations

from typing import Any

import numpy as np

from tvm_ext._tvm import Expr, Stmt, tirx
from tvm_ext.ir.build_ir import UNROLLED, allocate, index, load, loop, sequence, split_index, store
from tvm_ext.ir.simt_ir import gpu_buffer, launch
from tvm_ext.support.arrays import Array

from ..simt.good_kernels import argument, primitive_function, scheduled_matmul
from .hard import (
    FIRST,
    STEPS,
    WIDTH,
    add_to,
    neighbour,
    neighbours_of,
    row_case,
    row_kernel,
    sum_reference,
    wide_of,
    write_total,
    zero_of,
)
from .kernels import A100, DEPTH, T4, THREADS, TILE, Copy, PipeliningKernel, clear, product_reference, serial_loop
from .products import SHARED, Product, matmul, write_sums


def _used_around_the_fragments(*, behind: bool) -> Any:
    """Beside the loop over fragments an iteration uses its tile of A once more, before that loop or behind it."""
    k = STEPS * DEPTH
    a, b, c = argument("A", TILE, k), argument("B", k, TILE), argument("C", TILE, TILE)
    sums = gpu_buffer((2, 2), "float32", "sums", "local")
    a_tile, b_tile = (gpu_buffer((TILE, DEPTH), "float32", name, "shared") for name in SHARED)

    def kernel(_block: Expr, thread: Expr) -> Stmt:
        ty, tx = split_index(thread, (8, 8))
        product = Product(a=a, b=b)

        def once_more() -> Stmt:
            value = load(a_tile, [tx * index(2), ty * index(2)])
            return store(sums, load(sums, [index(0), index(0)]) + value, [index(0), index(0)])

        def step(ko: Expr) -> Stmt:
            depth = ko * index(DEPTH)
            multiplied = product.multiply_fragments(sums, a_tile, b_tile, (ty, tx))
            used = [multiplied, once_more()] if behind else [once_more(), multiplied]
            return sequence(
                allocate(a_tile), allocate(b_tile),
                Copy().tile(a_tile, a, (index(0), depth), thread), Copy().tile(b_tile, b, (depth, index(0)), thread),
                *used,
            )  # fmt: skip

        return sequence(
            allocate(sums),
            clear(sums),
            serial_loop(STEPS, "ko", step),
            write_sums(c, sums, (index(0), index(0)), thread),
        )

    return primitive_function([a, b, c], launch(1, THREADS, kernel))


def _used_around_reference(a: Array, b: Array) -> Array:
    total = product_reference(a, b)
    for tile in np.split(wide_of(a), STEPS, axis=1):
        total[::2, ::2] += tile[::2, ::2].T
    return total


def _exchanged_between_threads() -> Any:
    """What threads compute of a tile goes to other threads by another buffer, which has barriers of its own."""

    def body(a: Any, b: Any, tile: Any, total: Any, thread: Expr) -> Stmt:
        other = gpu_buffer((WIDTH,), "float32", "X_shared", "shared")

        def step(k: Expr) -> Stmt:
            value = load(tile, [neighbour(thread)]) * tirx.const(2, "float32")
            return sequence(
                allocate(other),
                store(tile, load(a, [k, thread]), [thread]),
                store(other, value, [thread]),
                add_to(total, load(other, [neighbour(thread)])),
            )

        return sequence(serial_loop(STEPS, "k", step), write_total(b, total, thread))

    return row_kernel(body)


def _exchanged_reference(a: Array) -> Array:
    return np.asarray(2 * np.roll(sum_reference(a), -1, axis=1))


def _reused_for_results() -> Any:
    """Behind the loop its tile is filled with sums, which go out in another order."""

    def body(a: Any, b: Any, tile: Any, total: Any, thread: Expr) -> Stmt:
        out = gpu_buffer((WIDTH,), "float32", "B_shared", "shared")

        def step(k: Expr) -> Stmt:
            return sequence(store(tile, load(a, [k, thread]), [thread]), add_to(total, load(tile, [neighbour(thread)])))

        return sequence(
            serial_loop(STEPS, "k", step),
            allocate(out),
            store(out, load(total, FIRST), [thread]),
            store(b, load(out, [index(WIDTH - 1) - thread]), [index(0), thread]),
        )

    return row_kernel(body)


def _virtual_threads() -> Any:
    """A stock schedule with two virtual threads: stock TVM repeats statements for each."""
    return scheduled_matmul(16, 32, STEPS * DEPTH, virtual_threads=2, stages=1, step=DEPTH)


def _buffers_of_one_name() -> Any:
    """Two loops, one after the other, with two different buffers that have one name."""
    a, b = argument("A", 2 * STEPS, WIDTH), argument("B", 1, WIDTH)
    tiles = [gpu_buffer((WIDTH,), "float32", "A_shared", "shared") for _ in range(2)]
    total = gpu_buffer((1,), "float32", "total", "local")

    def kernel(_block: Expr, thread: Expr) -> Stmt:
        def part(number: int) -> Stmt:
            def step(k: Expr) -> Stmt:
                row = k * index(2) + index(number)
                weight = tirx.const(1.0 + number, "float32")
                return sequence(
                    allocate(tiles[number]),
                    store(tiles[number], load(a, [row, thread]), [thread]),
                    add_to(total, load(tiles[number], [neighbour(thread)]) * weight),
                )

            return serial_loop(STEPS, "k", step)

        return sequence(
            allocate(total), store(total, zero_of(), FIRST), part(0), part(1), write_total(b, total, thread)
        )

    return primitive_function([a, b], launch(1, THREADS, kernel))


def _one_name_reference(a: Array) -> Array:
    return np.asarray(sum_reference(a[::2]) + 2 * sum_reference(a[1::2]))


def _two_kinds_of_shared_memory() -> Any:
    """One tile is declared, the other asked for at the launch."""
    a, b, c = (argument(name, STEPS, WIDTH) for name in "ABC")
    d = argument("D", 1, WIDTH)
    scopes = ("shared", "shared.dyn", "shared")
    tiles = [gpu_buffer((WIDTH,), "float32", f"{n}_shared", scope) for n, scope in zip("ABC", scopes, strict=True)]
    total = gpu_buffer((1,), "float32", "total", "local")

    def kernel(_block: Expr, thread: Expr) -> Stmt:
        def step(k: Expr) -> Stmt:
            loads = [store(tile, load(t, [k, thread]), [thread]) for tile, t in zip(tiles, (a, b, c), strict=True)]
            values = [load(tile, [neighbour(thread)]) for tile in tiles]
            return sequence(*map(allocate, tiles), *loads, add_to(total, values[0] * values[1] + values[2]))

        return sequence(
            allocate(total),
            store(total, zero_of(), FIRST),
            serial_loop(STEPS, "k", step),
            write_total(d, total, thread),
        )

    return primitive_function([a, b, c, d], launch(1, THREADS, kernel))


def _two_kinds_reference(a: Array, b: Array, c: Array) -> Array:
    return np.asarray((neighbours_of(a) * neighbours_of(b) + neighbours_of(c)).sum(axis=0, keepdims=True))


def _edges_by_conditions() -> Any:
    """Threads beyond the edge load nothing, whatever the tile holds there; they write nothing either."""
    rows = 40
    a, b = argument("A", STEPS, rows), argument("B", rows)
    tile = gpu_buffer((WIDTH,), "float32", "A_shared", "shared")
    total = gpu_buffer((1,), "float32", "total", "local")

    def kernel(_block: Expr, thread: Expr) -> Stmt:
        inside = thread < index(rows)

        def step(k: Expr) -> Stmt:
            value = load(tile, [tirx.max(index(rows - 1) - thread, index(0))])
            return sequence(
                allocate(tile),
                tirx.IfThenElse(inside, store(tile, load(a, [k, thread]), [thread]), None),
                add_to(total, value),
            )

        return sequence(
            allocate(total), store(total, zero_of(), FIRST), serial_loop(STEPS, "k", step),
            tirx.IfThenElse(inside, store(b, load(total, FIRST), [thread]), None),
        )  # fmt: skip

    return primitive_function([a, b], launch(1, THREADS, kernel))


def _sum_of_unrolled_tiles() -> Any:
    """The loop that would be pipelined is unrolled: it is no sequential one (ALCOP §2.1, rule 2)."""

    def body(a: Any, b: Any, tile: Any, total: Any, thread: Expr) -> Stmt:
        def step(k: Expr) -> Stmt:
            return sequence(store(tile, load(a, [k, thread]), [thread]), add_to(total, load(tile, [neighbour(thread)])))

        return sequence(loop(STEPS, UNROLLED, "k", step), write_total(b, total, thread))

    return row_kernel(body)


def tile_kernels() -> tuple[PipeliningKernel, ...]:
    """All kernels of this file."""
    shared = ("A_shared",)
    quads = Copy(guarded=True)
    return (
        PipeliningKernel(
            name="used_before_the_fragments",
            make=lambda: _used_around_the_fragments(behind=False),
            reference=_used_around_reference,
            shared=SHARED,
        ),
        PipeliningKernel(
            name="used_behind_the_fragments",
            make=lambda: _used_around_the_fragments(behind=True),
            reference=_used_around_reference,
            shared=SHARED,
        ),
        row_case("exchanged_between_threads", _exchanged_between_threads, _exchanged_reference, shared=shared),
        row_case("reused_for_results", _reused_for_results, lambda a: sum_reference(a)[:, ::-1], shared=shared),
        row_case("buffers_of_one_name", _buffers_of_one_name, _one_name_reference, shared=("A_shared", "A_shared#2")),
        row_case(
            "two_kinds_of_shared_memory",
            _two_kinds_of_shared_memory,
            _two_kinds_reference,
            devices=(A100, T4),
            shared=("A_shared", "B_shared", "C_shared"),
        ),
        row_case("edges_by_conditions", _edges_by_conditions, lambda a: wide_of(a).sum(axis=0)[::-1], shared=shared),
        PipeliningKernel(name="virtual_threads", make=_virtual_threads, reference=product_reference),
        row_case("sum_of_unrolled_tiles", _sum_of_unrolled_tiles, refused={"A_shared": "sequential loop"}),
        PipeliningKernel(
            name="zero_filled_by_quads",
            make=lambda: matmul(20, 20, 44, lambda a, b: Product(a=a, b=b, copy=quads)),
            reference=product_reference,
            shared=SHARED,
        ),
        PipeliningKernel(
            name="half_zero_filled_by_quads",
            devices=(A100, T4),
            reference=product_reference,
            make=lambda: matmul(20, 20, 44, lambda a, b: Product(a=a, b=b, copy=quads), dtype="float16"),
        ),
    )
