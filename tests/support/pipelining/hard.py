"""Kernels that are easily pipelined wrongly.

Each reads or writes its tiles in a way that a load ahead of time would change: the source is written in the loop, a
tile outlives its iteration, two loops share one buffer. For most of them only the values are asserted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tvm_ext._tvm import Expr, Stmt, tirx
from tvm_ext.ir.build_ir import allocate, index, load, sequence, store
from tvm_ext.ir.simt_ir import gpu_buffer, launch
from tvm_ext.records.pipelines import PipelineRule
from tvm_ext.support.arrays import Array

from ..simt.good_kernels import argument, primitive_function
from .kernels import THREADS, PipeliningKernel, serial_loop

STEPS = 5
WIDTH = THREADS
"""Elements of a row; each thread has one."""


def barrier() -> Stmt:
    """A barrier that the kernel's author wrote."""
    return tirx.Evaluate(tirx.call_intrin("int32", "tirx.tvm_storage_sync", "shared"))


def zero_of(dtype: str = "float32") -> Expr:
    return tirx.const(0, dtype)


FIRST = [index(0)]


def neighbour(thread: Expr) -> Expr:
    """The neighbour's element: what makes a barrier necessary."""
    return tirx.floormod(thread + index(1), index(WIDTH))


def add_to(total: Any, value: Expr) -> Stmt:
    return store(total, load(total, FIRST) + value, FIRST)


def row_kernel(body: Callable[[Any, Any, Any, Any, Expr], Stmt], rows: int = STEPS, out_rows: int = 1) -> Any:
    """``main(A[rows, 64], B[out_rows, 64])`` by one block of 64 threads, a shared row and a sum of each thread."""
    a, b = argument("A", rows, WIDTH), argument("B", out_rows, WIDTH)
    tile = gpu_buffer((WIDTH,), "float32", "A_shared", "shared")
    total = gpu_buffer((1,), "float32", "total", "local")

    def kernel(_block: Expr, thread: Expr) -> Stmt:
        return sequence(
            allocate(tile), allocate(total), store(total, zero_of(), FIRST), body(a, b, tile, total, thread)
        )

    return primitive_function([a, b], launch(1, THREADS, kernel))


def write_total(b: Any, total: Any, thread: Expr) -> Stmt:
    return store(b, load(total, FIRST), [index(0), thread])


def wide_of(a: Array) -> Array:
    return a.astype(np.float64)


def neighbours_of(a: Array) -> Array:
    return np.roll(wide_of(a), -1, axis=1)


# --- loads that depend on what the loop does -------------------------------------------------------------------------
def _iterate_in_place() -> Any:
    """What a step loads, the step before has written: ``B = A``, then five times ``B[i] = B[i + 1] / 2 + B[i]``."""

    def body(a: Any, b: Any, tile: Any, _total: Any, thread: Expr) -> Stmt:
        place = [index(0), thread]

        def step(_k: Expr) -> Stmt:
            half = load(tile, [neighbour(thread)]) * tirx.const(0.5, "float32")
            return sequence(store(tile, load(b, place), [thread]), store(b, half + load(tile, [thread]), place))

        return sequence(store(b, load(a, place), place), serial_loop(STEPS, "k", step))

    return row_kernel(body, rows=1)


def _iterate_reference(a: Array) -> Array:
    x = wide_of(a)
    for _ in range(STEPS):
        x = np.roll(x, -1, axis=1) / 2 + x
    return x


def _recurrence() -> Any:
    """Row k + 1 of the output is made of its row k: ``B[k + 1] = A[k + 1] + B[k, i + 1]``."""

    def body(a: Any, b: Any, tile: Any, _total: Any, thread: Expr) -> Stmt:
        def step(k: Expr) -> Stmt:
            value = load(a, [k + index(1), thread]) + load(tile, [neighbour(thread)])
            return sequence(store(tile, load(b, [k, thread]), [thread]), store(b, value, [k + index(1), thread]))

        return sequence(store(b, load(a, [index(0), thread]), [index(0), thread]), serial_loop(STEPS - 1, "k", step))

    return row_kernel(body, out_rows=STEPS)


def _recurrence_reference(a: Array) -> Array:
    rows = [wide_of(a)[0]]
    for row in wide_of(a)[1:]:
        rows.append(row + np.roll(rows[-1], -1))
    return np.stack(rows)


def _load_every_other_step() -> Any:
    """A tile serves two steps: it is loaded where k is even, and used in all."""

    def body(a: Any, b: Any, tile: Any, total: Any, thread: Expr) -> Stmt:
        def step(k: Expr) -> Stmt:
            even = tirx.EQ(tirx.floormod(k, index(2)), index(0))
            return sequence(
                tirx.IfThenElse(even, store(tile, load(a, [tirx.floordiv(k, index(2)), thread]), [thread]), None),
                add_to(total, load(tile, [neighbour(thread)]) * tirx.Cast("float32", k + index(1))),
            )

        return sequence(serial_loop(2 * STEPS, "k", step), write_total(b, total, thread))

    return row_kernel(body)


def _load_every_other_step_reference(a: Array) -> Array:
    weights = np.arange(1, 2 * STEPS + 1).reshape(STEPS, 2).sum(axis=1)
    return np.asarray(weights[None, :] @ neighbours_of(a))


def _changed_in_place() -> Any:
    """The tile is loaded, then doubled where it is, then used."""

    def body(a: Any, b: Any, tile: Any, total: Any, thread: Expr) -> Stmt:
        def step(k: Expr) -> Stmt:
            return sequence(
                store(tile, load(a, [k, thread]), [thread]),
                store(tile, load(tile, [thread]) * tirx.const(2, "float32"), [thread]),
                add_to(total, load(tile, [neighbour(thread)])),
            )

        return sequence(serial_loop(STEPS, "k", step), write_total(b, total, thread))

    return row_kernel(body)


def _used_after_the_loop() -> Any:
    """The last tile is used once more behind the loop."""

    def body(a: Any, b: Any, tile: Any, total: Any, thread: Expr) -> Stmt:
        def step(k: Expr) -> Stmt:
            return sequence(store(tile, load(a, [k, thread]), [thread]), add_to(total, load(tile, [neighbour(thread)])))

        return sequence(
            serial_loop(STEPS, "k", step), add_to(total, load(tile, [neighbour(thread)])), write_total(b, total, thread)
        )

    return row_kernel(body)


def _loaded_ahead_by_hand() -> Any:
    """The use comes first: each step loads what the next one uses."""

    def body(a: Any, b: Any, tile: Any, total: Any, thread: Expr) -> Stmt:
        def step(k: Expr) -> Stmt:
            return sequence(
                add_to(total, load(tile, [neighbour(thread)])), store(tile, load(a, [k + index(1), thread]), [thread])
            )

        return sequence(
            store(tile, load(a, [index(0), thread]), [thread]),
            serial_loop(STEPS - 1, "k", step),
            add_to(total, load(tile, [neighbour(thread)])),
            write_total(b, total, thread),
        )

    return row_kernel(body)


def _partly_loaded() -> Any:
    """Only half of the tile is loaded in the loop, the other half stays what it was before."""

    def body(a: Any, b: Any, tile: Any, total: Any, thread: Expr) -> Stmt:
        half = thread < index(WIDTH // 2)

        def step(k: Expr) -> Stmt:
            return sequence(
                tirx.IfThenElse(half, store(tile, load(a, [k, thread]), [thread]), None),
                add_to(total, load(tile, [neighbour(thread)])),
            )

        return sequence(
            store(tile, tirx.const(1, "float32"), [thread]),
            serial_loop(STEPS, "k", step),
            write_total(b, total, thread),
        )

    return row_kernel(body)


def _partly_loaded_reference(a: Array) -> Array:
    wide = wide_of(a)
    wide[:, WIDTH // 2 :] = 1
    return np.roll(wide.sum(axis=0, keepdims=True), -1, axis=1)


def _running_sums() -> Any:
    """A loop with a side effect: every step writes a row of the output."""

    def body(a: Any, b: Any, tile: Any, total: Any, thread: Expr) -> Stmt:
        def step(k: Expr) -> Stmt:
            return sequence(
                store(tile, load(a, [k, thread]), [thread]),
                add_to(total, load(tile, [neighbour(thread)])),
                store(b, load(total, FIRST), [k, thread]),
            )

        return serial_loop(STEPS, "k", step)

    return row_kernel(body, out_rows=STEPS)


def _own_barriers() -> Any:
    """The author has put the barriers himself, on both sides of the use."""

    def body(a: Any, b: Any, tile: Any, total: Any, thread: Expr) -> Stmt:
        def step(k: Expr) -> Stmt:
            return sequence(
                store(tile, load(a, [k, thread]), [thread]),
                barrier(),
                add_to(total, load(tile, [neighbour(thread)])),
                barrier(),
            )

        return sequence(serial_loop(STEPS, "k", step), write_total(b, total, thread))

    return row_kernel(body)


def _loop_from_two() -> Any:
    """A loop that begins at 2."""

    def body(a: Any, b: Any, tile: Any, total: Any, thread: Expr) -> Stmt:
        def step(k: Expr) -> Stmt:
            return sequence(store(tile, load(a, [k, thread]), [thread]), add_to(total, load(tile, [neighbour(thread)])))

        return sequence(serial_loop(STEPS - 2, "k", step, first=2), write_total(b, total, thread))

    return row_kernel(body)


def _one_buffer_of_two_loops() -> Any:
    """Two load-and-use loops, one after the other, fill the same tile."""

    def body(a: Any, b: Any, tile: Any, total: Any, thread: Expr) -> Stmt:
        def step(scale: float) -> Callable[[Expr], Stmt]:
            return lambda k: sequence(
                store(tile, load(a, [k, thread]), [thread]),
                add_to(total, load(tile, [neighbour(thread)]) * tirx.const(scale, "float32")),
            )

        return sequence(
            serial_loop(STEPS, "k", step(1.0)), serial_loop(STEPS - 1, "l", step(3.0)), write_total(b, total, thread)
        )

    return row_kernel(body)


def _one_buffer_of_two_loops_reference(a: Array) -> Array:
    return np.asarray(
        neighbours_of(a).sum(axis=0, keepdims=True) + 3 * neighbours_of(a)[:-1].sum(axis=0, keepdims=True)
    )


def _two_loads_of_one_buffer() -> Any:
    """Two load-and-use pairs in one iteration: the tile is loaded twice."""

    def body(a: Any, b: Any, tile: Any, total: Any, thread: Expr) -> Stmt:
        def step(k: Expr) -> Stmt:
            def half(which: int) -> list[Stmt]:
                row = k * index(2) + index(which)
                return [store(tile, load(a, [row, thread]), [thread]), add_to(total, load(tile, [neighbour(thread)]))]

            return sequence(*half(0), *half(1))

        return sequence(serial_loop(STEPS, "k", step), write_total(b, total, thread))

    return row_kernel(body, rows=2 * STEPS)


def _view_of_a_tile() -> Any:
    """The tile is read through another buffer that is a view of its memory."""

    def body(a: Any, b: Any, tile: Any, total: Any, thread: Expr) -> Stmt:
        view = tirx.decl_buffer([index(WIDTH // 2), index(2)], "float32", "A_view", data=tile.data, scope="shared")

        def step(k: Expr) -> Stmt:
            at = neighbour(thread)
            value = load(view, [tirx.floordiv(at, index(2)), tirx.floormod(at, index(2))])
            return sequence(store(tile, load(a, [k, thread]), [thread]), add_to(total, value))

        return sequence(
            tirx.DeclBuffer(view, data=tile.data), serial_loop(STEPS, "k", step), write_total(b, total, thread)
        )

    return row_kernel(body)


def sum_reference(a: Array) -> Array:
    return np.asarray(neighbours_of(a).sum(axis=0, keepdims=True))


def row_case(
    name: str, make: Callable[[], Any], reference: Callable[..., Array] = sum_reference, **rest: Any
) -> PipeliningKernel:
    return PipeliningKernel(name=name, make=make, reference=reference, **rest)


def hard_kernels() -> tuple[PipeliningKernel, ...]:
    """Those whose values go wrong where loads are moved without thinking."""
    shared = ("A_shared",)
    never: dict[str, PipelineRule | None] = dict.fromkeys(shared)
    return (
        row_case("iterate_in_place", _iterate_in_place, _iterate_reference, refused=never),
        row_case("recurrence", _recurrence, _recurrence_reference, refused=never),
        row_case("load_every_other_step", _load_every_other_step, _load_every_other_step_reference, refused=never),
        row_case("changed_in_place", _changed_in_place, lambda a: 2 * sum_reference(a)),
        row_case(
            "used_after_the_loop", _used_after_the_loop, lambda a: sum_reference(a) + neighbours_of(a)[-1:],
            refused=never,
        ),
        row_case("loaded_ahead_by_hand", _loaded_ahead_by_hand, refused=never),
        row_case("partly_loaded", _partly_loaded, _partly_loaded_reference, refused=never),
        row_case("running_sums", _running_sums, lambda a: np.cumsum(neighbours_of(a), axis=0), shared=shared),
        row_case("own_barriers", _own_barriers, refused=never),
        row_case("loop_from_two", _loop_from_two, lambda a: sum_reference(a[2:]), shared=shared),
        row_case(
            "one_buffer_of_two_loops", _one_buffer_of_two_loops, _one_buffer_of_two_loops_reference, refused=never
        ),
        row_case("two_loads_of_one_buffer", _two_loads_of_one_buffer),
        row_case("view_of_a_tile", _view_of_a_tile, refused=never),
    )  # fmt: skip
