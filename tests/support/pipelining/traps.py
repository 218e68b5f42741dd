"""More kernels easily pipelined wrongly: by what a load depends on, and by who comes to a barrier."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tvm_ext._tvm import Expr, Stmt, Var, tirx
from tvm_ext.ir.build_ir import allocate, index, load, sequence, store
from tvm_ext.ir.simt_ir import bind, gpu_buffer, launch
from tvm_ext.records.pipelines import PipelineRule
from tvm_ext.support.arrays import Array

from ..simt.good_kernels import argument, primitive_function
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
from .kernels import THREADS, TILE, PipeliningKernel, random_inputs, serial_loop


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


def trap_kernels() -> tuple[PipeliningKernel, ...]:
    """All kernels of this file."""
    never: dict[str, PipelineRule | None] = {"A_shared": None}
    return (
        row_case("row_number_in_a_variable", _row_number_in_a_variable, _row_number_reference),
        row_case("chased_rows", _chased_rows, _chased_reference, inputs=_chased_inputs, refused=never),
        row_case(
            "condition_in_a_register",
            lambda: _condition_in_a_register(zero_filled=False),
            _repeated_reference,
            refused=never,
        ),
        row_case(
            "zeros_by_a_register",
            lambda: _condition_in_a_register(zero_filled=True),
            _every_other_reference,
            refused=never,
        ),
        row_case("place_in_a_register", _place_in_a_register, _place_reference, refused=never),
        row_case("loop_of_half_of_the_threads", _loop_of_half_of_the_threads, _half_reference, refused=never),
        row_case("trips_of_each_thread", _trips_of_each_thread, _trips_reference, refused=never),
    )
