"""More kernels easily pipelined wrongly: by what a load depends on, who comes to a barrier, what else reads a tile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .._tvm import Schedule, Var, tirx
from ..plan import PipelineRule
from ..tir_passes.build_ir import UNROLLED, Expr, Stmt, allocate, index, load, loop, sequence, split_index, store
from ..tir_passes.simt_ir import bind, gpu_buffer, launch
from .pipelining_kernels import (
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
)
from .pipelining_kernels_constructed import single_product
from .pipelining_kernels_hard import (
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
from .pipelining_kernels_simt import SHARED, Product, matmul, write_sums
from .simt.good_kernels import argument, primitive_function
from .simt.number_types import Array


# --- what a load depends on -------------------------------------------------------------------------------------------
def _row_number_in_a_variable() -> Any:
    """The row that a step loads is bound to a variable in the step, and used by it as well."""

    def body(a: Any, b: Any, tile: Any, total: Any, thread: Expr) -> Stmt:
        def step(k: Expr) -> Stmt:
            row = Var("row", "int64")
            return sequence(
                tirx.Bind(row, index(STEPS - 1) - k),
                store(tile, load(a, [row, thread]), [thread]),
                add_to(total, load(tile, [neighbour(thread)]) * tirx.Cast("float32", row)),
            )

        return sequence(serial_loop(STEPS, "k", step), write_total(b, total, thread))

    return row_kernel(body)


def _row_number_reference(a: Array) -> Array:
    return np.asarray(np.arange(len(a))[None, :] @ neighbours_of(a))


def _chased_rows() -> Any:
    """A step finds in a tensor which row the next one loads, and keeps it in a register."""
    a, following, b = argument("A", STEPS, WIDTH), argument("next", STEPS, dtype="int32"), argument("B", 1, WIDTH)
    tile = gpu_buffer((WIDTH,), "float32", "A_shared", "shared")
    total = gpu_buffer((1,), "float32", "total", "local")
    row = gpu_buffer((1,), "int32", "row", "local")

    def kernel(_block: Expr, thread: Expr) -> Stmt:
        at = tirx.Cast("int64", load(row, FIRST))

        def step(k: Expr) -> Stmt:
            return sequence(
                store(tile, load(a, [at, thread]), [thread]),
                add_to(total, load(tile, [neighbour(thread)]) * tirx.Cast("float32", k + index(1))),
                store(row, load(following, [at]), FIRST),
            )

        return sequence(
            allocate(tile), allocate(total), allocate(row), store(total, zero_of(), FIRST),
            store(row, tirx.IntImm("int32", 0), FIRST), serial_loop(STEPS, "k", step), write_total(b, total, thread),
        )  # fmt: skip

    return primitive_function([a, following, b], launch(1, THREADS, kernel))


def _chased_inputs(function: Any, seed: int) -> tuple[Array, ...]:
    a, _ = random_inputs(function, seed)
    return a, np.array([3, 4, 1, 2, 0], np.int32)


def _chased_reference(a: Array, following: Array) -> Array:
    total, row = np.zeros((1, WIDTH)), 0
    for k in range(STEPS):
        total += (k + 1) * neighbours_of(a)[row]
        row = int(following[row])
    return total


def _condition_in_a_register(*, zero_filled: bool) -> Any:
    """Whether a step loads is decided by the step before: a register says so."""

    def body(a: Any, b: Any, tile: Any, total: Any, thread: Expr) -> Stmt:
        wanted = gpu_buffer((1,), "int32", "wanted", "local")
        is_wanted = tirx.EQ(load(wanted, FIRST), tirx.IntImm("int32", 0))

        def step(k: Expr) -> Stmt:
            value = load(a, [k, thread])
            filled = store(tile, tirx.if_then_else(is_wanted, value, zero_of()) if zero_filled else value, [thread])
            turned = tirx.floormod(load(wanted, FIRST) + tirx.IntImm("int32", 1), tirx.IntImm("int32", 2))
            return sequence(
                filled if zero_filled else tirx.IfThenElse(is_wanted, filled, None),
                add_to(total, load(tile, [neighbour(thread)])),
                store(wanted, turned, FIRST),
            )

        return sequence(
            allocate(wanted), store(wanted, tirx.IntImm("int32", 0), FIRST), serial_loop(STEPS, "k", step),
            write_total(b, total, thread),
        )  # fmt: skip

    return row_kernel(body)


def _every_other_reference(a: Array) -> Array:
    return sum_reference(a[::2])


def _repeated_reference(a: Array) -> Array:
    """Steps 0, 1 use row 0, steps 2, 3 row 2, step 4 row 4."""
    return sum_reference(a[[0, 0, 2, 2, 4]])


def _place_in_a_register() -> Any:
    """Where an element is put in the tile is counted in a register from step to step."""

    def body(a: Any, b: Any, tile: Any, total: Any, thread: Expr) -> Stmt:
        turn = gpu_buffer((1,), "int64", "turn", "local")
        place = tirx.floormod(thread + load(turn, FIRST), index(WIDTH))

        def step(k: Expr) -> Stmt:
            return sequence(
                store(tile, load(a, [k, thread]), [place]),
                add_to(total, load(tile, [neighbour(thread)])),
                store(turn, load(turn, FIRST) + index(1), FIRST),
            )

        return sequence(
            allocate(turn), store(turn, index(0), FIRST), serial_loop(STEPS, "k", step), write_total(b, total, thread)
        )

    return row_kernel(body)


def _place_reference(a: Array) -> Array:
    rolled = np.stack([np.roll(row, k) for k, row in enumerate(wide_of(a))])
    return sum_reference(rolled)


# --- who comes to a barrier -------------------------------------------------------------------------------------------
def _own_elements(kernel: Callable[[Any, Any, Any, Expr], Stmt], params: tuple[Any, ...]) -> Any:
    """Each of 16 threads uses an element of shared memory of its own: no barrier is needed, and none may be added."""
    tile = gpu_buffer((TILE,), "float32", "A_shared", "shared")
    total = gpu_buffer((1,), "float32", "total", "local")

    def body(thread: Expr) -> Stmt:
        return sequence(
            allocate(tile), allocate(total), store(total, zero_of(), FIRST), kernel(tile, total, params, thread)
        )

    return primitive_function(list(params), bind("threadIdx.x", TILE, body))


def _loop_of_half_of_the_threads() -> Any:
    """Only 8 of 16 threads come to the loop; a barrier in it would wait for the others for ever."""
    a, b = argument("A", TILE, STEPS), argument("B", TILE)

    def kernel(tile: Any, total: Any, _params: Any, thread: Expr) -> Stmt:
        def step(k: Expr) -> Stmt:
            return sequence(store(tile, load(a, [thread, k]), [thread]), add_to(total, load(tile, [thread])))

        return sequence(
            tirx.IfThenElse(thread < index(TILE // 2), serial_loop(STEPS, "k", step), None),
            store(b, load(total, FIRST), [thread]),
        )

    return _own_elements(kernel, (a, b))


def _half_reference(a: Array) -> Array:
    sums = wide_of(a).sum(axis=1)
    sums[TILE // 2 :] = 0
    return np.asarray(sums)


def _trips_of_each_thread() -> Any:
    """Thread t makes 1 + t % 4 iterations, others have long gone on."""
    a, b = argument("A", TILE, STEPS), argument("B", TILE)

    def kernel(tile: Any, total: Any, _params: Any, thread: Expr) -> Stmt:
        def step(k: Expr) -> Stmt:
            return sequence(store(tile, load(a, [thread, k]), [thread]), add_to(total, load(tile, [thread])))

        trips = tirx.floormod(thread, index(4)) + index(1)
        return sequence(serial_loop(trips, "k", step), store(b, load(total, FIRST), [thread]))

    return _own_elements(kernel, (a, b))


def _trips_reference(a: Array) -> Array:
    return np.array([wide_of(row)[: 1 + t % 4].sum() for t, row in enumerate(a)])


# --- what else reads a tile -------------------------------------------------------------------------------------------
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
    return 2 * np.roll(sum_reference(a), -1, axis=1)


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
    schedule = Schedule(single_product(16, 32, STEPS * DEPTH))
    block = schedule.get_sblock("C")
    i, j, k = schedule.get_loops(block)
    by, vy, ty, ii = schedule.split(i, [None, 2, 4, 2])
    bx, tx, jj = schedule.split(j, [None, 8, 2])
    outer, inner = schedule.split(k, [None, DEPTH])
    schedule.reorder(by, bx, vy, ty, tx, outer, inner, ii, jj)
    tags = ("blockIdx.y", "blockIdx.x", "vthread.x", "threadIdx.y", "threadIdx.x")
    for axis, tag in zip((by, bx, vy, ty, tx), tags, strict=True):
        schedule.bind(axis, tag)
    schedule.reverse_compute_at(schedule.cache_write(block, 0, "local"), tx)
    for operand in (0, 1):
        copy = schedule.cache_read(block, operand, "shared")
        schedule.compute_at(copy, outer)
        _, fy, fx, lane = schedule.split(schedule.fuse(*schedule.get_loops(copy)[-2:]), [None, 4, 8, 4])
        schedule.bind(fy, "threadIdx.y")
        schedule.bind(fx, "threadIdx.x")
        schedule.vectorize(lane)
    schedule.decompose_reduction(block, outer)
    return schedule.mod["main"]


def _sum_of_unrolled_tiles() -> Any:
    """The loop that would be pipelined is unrolled: it is no sequential one (ALCOP §2.1, rule 2)."""

    def body(a: Any, b: Any, tile: Any, total: Any, thread: Expr) -> Stmt:
        def step(k: Expr) -> Stmt:
            return sequence(store(tile, load(a, [k, thread]), [thread]), add_to(total, load(tile, [neighbour(thread)])))

        return sequence(loop(STEPS, UNROLLED, "k", step), write_total(b, total, thread))

    return row_kernel(body)


def trap_kernels() -> tuple[PipeliningKernel, ...]:
    """All kernels of this file."""
    shared = ("A_shared",)
    never: dict[str, PipelineRule | None] = dict.fromkeys(shared)
    quads = Copy(guarded=True)
    return (
        row_case("row_number_in_a_variable", _row_number_in_a_variable, _row_number_reference),
        row_case("chased_rows", _chased_rows, _chased_reference, inputs=_chased_inputs, refused=never),
        row_case(
            "condition_in_a_register", lambda: _condition_in_a_register(zero_filled=False), _repeated_reference,
            refused=never,
        ),
        row_case(
            "zeros_by_a_register", lambda: _condition_in_a_register(zero_filled=True), _every_other_reference,
            refused=never,
        ),
        row_case("place_in_a_register", _place_in_a_register, _place_reference, refused=never),
        row_case("loop_of_half_of_the_threads", _loop_of_half_of_the_threads, _half_reference, refused=never),
        row_case("trips_of_each_thread", _trips_of_each_thread, _trips_reference, refused=never),
        PipeliningKernel(
            name="used_before_the_fragments", make=lambda: _used_around_the_fragments(behind=False),
            reference=_used_around_reference, shared=SHARED,
        ),
        PipeliningKernel(
            name="used_behind_the_fragments", make=lambda: _used_around_the_fragments(behind=True),
            reference=_used_around_reference, shared=SHARED,
        ),
        row_case("exchanged_between_threads", _exchanged_between_threads, _exchanged_reference, shared=shared),
        row_case(
            "reused_for_results", _reused_for_results, lambda a: sum_reference(a)[:, ::-1], shared=shared
        ),
        PipeliningKernel(name="virtual_threads", make=_virtual_threads, reference=product_reference),
        row_case("sum_of_unrolled_tiles", _sum_of_unrolled_tiles, refused={"A_shared": "sequential loop"}),
        PipeliningKernel(
            name="zero_filled_by_quads", make=lambda: matmul(20, 20, 44, lambda a, b: Product(a=a, b=b, copy=quads)),
            reference=product_reference, shared=SHARED,
        ),
        PipeliningKernel(
            name="half_zero_filled_by_quads", devices=(A100, T4), reference=product_reference,
            make=lambda: matmul(20, 20, 44, lambda a, b: Product(a=a, b=b, copy=quads), dtype="float16"),
        ),
    )  # fmt: skip
