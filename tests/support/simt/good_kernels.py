"""Small correct GPU kernels, of every kind of synchronisation that kernels here use: what a verifier must not accuse.

Some are written by hand as plain thread-bound loops, some scheduled by stock TVM. All are small enough for a verifier
that runs one thread after another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tvm_ext._tvm import Expr, PrimFunc, Schedule, Stmt, Target, gpu_schedule_rules, te, tirx, topi
from tvm_ext.analysis.computations import dtype_of
from tvm_ext.ir.build_ir import (
    SERIAL,
    UNROLLED,
    VECTORIZED,
    allocate,
    index,
    load,
    loop,
    nest,
    sequence,
    split_index,
    store,
)
from tvm_ext.ir.simt_ir import allocate_shared, gpu_buffer, launch
from tvm_ext.support.arithmetic import ceil_div
from tvm_ext.support.arrays import Array
from tvm_ext.verify.simt.number_types import storage_dtype

Reference = Callable[..., Array]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class GoodKernel:
    """A correct kernel. ``function`` is a thread-bound PrimFunc whose last parameter is the output.

    ``reference`` computes the output in float64 from the inputs. ``async_copy``: to be lowered with cp.async.
    """

    name: str
    function: Any
    reference: Reference
    async_copy: bool = False

    def inputs(self, seed: int = 0) -> tuple[Array, ...]:
        """Normal random arrays for all parameters but the last."""
        rng = np.random.default_rng(seed)
        return tuple(
            rng.standard_normal([int(size) for size in param.ty.shape]).astype(storage_dtype(str(param.ty.dtype)))
            for param in self.function.params[:-1]
        )


def primitive_function(params: Sequence[Any], body: Stmt) -> Any:
    """The PrimFunc ``main(*params)``, with the attributes that stock lowering of thread-bound loops asks for."""
    attributes = (("global_symbol", "main"), ("s_tir", True), ("tirx.noalias", True))
    function = PrimFunc(list(params), body)
    for key, value in attributes:
        function = function.with_attr(key, value)
    return function


def argument(name: str, *shape: int, dtype: str = "float32") -> Any:
    """A buffer in global memory, to be a parameter."""
    return tirx.decl_buffer([index(size) for size in shape], dtype, name)


def _matmul_reference(a: Array, b: Array) -> Array:
    return a.astype(np.float64) @ b.astype(np.float64)


def copy_in(target: Any, source: Any, at: Sequence[Expr], thread: Expr, threads: int, slot: Sequence[Expr]) -> Stmt:
    """Threads together copy the tile of ``source`` at ``at`` into ``target[*slot]``; zeros outside of ``source``."""
    rows, columns = (int(size) for size in target.ty.shape[-2:])
    assert rows * columns % threads == 0, "each thread copies as many elements"

    def element(step: Expr) -> Stmt:
        row, column = split_index(step * index(threads) + thread, (rows, columns))
        place = [at[0] + row, at[1] + column]
        value = load(source, place)
        limits = [int(size) for size in source.ty.shape]
        inside = [p < index(n) for p, n, t in zip(place, limits, (rows, columns), strict=True) if n % t]
        if inside:
            condition = inside[0] if len(inside) == 1 else tirx.all(*inside)
            value = tirx.if_then_else(condition, value, tirx.const(0, dtype_of(source)))
        return store(target, value, [*slot, row, column])

    return loop(rows * columns // threads, SERIAL, "copy", element)


TILE, DEPTH, SIDE = 16, 8, 8  # a block's tile, its reduction step, and threads along each side


def matmul_in_tiles(m: int, n: int, k: int, *, slots: int = 1) -> Any:
    """``C = A @ B`` in tiles of 16x16 staged through shared memory; 64 threads of 2x2 sums; edges by predicates.

    With two ``slots`` a step's tiles are in other memory than those of the step before.
    """
    a, b, c = argument("A", m, k), argument("B", k, n), argument("C", m, n)
    a_tile = gpu_buffer((slots, TILE, DEPTH), "float32", "A_shared", "shared")
    b_tile = gpu_buffer((slots, DEPTH, TILE), "float32", "B_shared", "shared")
    sums = gpu_buffer((2, 2), "float32", "sums", "local")
    grid = (ceil_div(m, TILE), ceil_div(n, TILE))

    def kernel(block: Expr, thread: Expr) -> Stmt:
        row, column = (part * index(TILE) for part in split_index(block, grid))
        ty, tx = split_index(thread, (SIDE, SIDE))

        def step(number: Expr) -> Stmt:
            slot = [tirx.floormod(number, index(slots))]
            depth = number * index(DEPTH)

            def update(kij: tuple[Expr, ...]) -> Stmt:
                kk, i, j = kij
                left = load(a_tile, [*slot, ty * index(2) + i, kk])
                return store(sums, load(sums, [i, j]) + left * load(b_tile, [*slot, kk, tx * index(2) + j]), [i, j])

            return sequence(
                copy_in(a_tile, a, (row, depth), thread, SIDE * SIDE, slot),
                copy_in(b_tile, b, (depth, column), thread, SIDE * SIDE, slot),
                nest((DEPTH, 2, 2), SERIAL, ("kk", "i", "j"), update),
            )

        def write(ij: tuple[Expr, ...]) -> Stmt:
            place = [row + ty * index(2) + ij[0], column + tx * index(2) + ij[1]]
            stored = store(c, load(sums, ij), place)
            inside = [p < index(size) for p, size in zip(place, (m, n), strict=True) if size % TILE]
            return tirx.IfThenElse(tirx.all(*inside), stored, None) if inside else stored

        return sequence(
            allocate(a_tile), allocate(b_tile), allocate(sums),
            nest((2, 2), UNROLLED, ("i", "j"), lambda ij: store(sums, tirx.const(0, "float32"), ij)),
            loop(ceil_div(k, DEPTH), SERIAL, "step", step),
            nest((2, 2), SERIAL, ("i", "j"), write),
        )  # fmt: skip

    return primitive_function([a, b, c], launch(grid[0] * grid[1], SIDE * SIDE, kernel))


def transpose_through_shared(size: int = 32) -> Any:
    """``B = A.T`` in tiles of 16x16, rows of the shared tile one element longer; 64 threads."""
    a, b = argument("A", size, size), argument("B", size, size)
    tile = gpu_buffer((TILE, TILE), "float32", "tile", "shared")

    def kernel(block: Expr, thread: Expr) -> Stmt:
        row, column = (part * index(TILE) for part in split_index(block, (size // TILE, size // TILE)))

        def write(step: Expr) -> Stmt:
            i, j = split_index(step * index(64) + thread, (TILE, TILE))
            return store(b, load(tile, [j, i]), [column + i, row + j])

        return sequence(
            allocate_shared(tile, padding=1),
            copy_in(tile, a, (row, column), thread, 64, ()),
            loop(TILE * TILE // 64, SERIAL, "write", write),
        )

    return primitive_function([a, b], launch((size // TILE) ** 2, 64, kernel))


def stencil_with_halo(size: int = 200) -> Any:
    """``B[i] = A[i - 1] + 2 A[i] + A[i + 1]``, zeros outside: 64 threads, the last two load the halo."""
    threads = 64
    a, b = argument("A", size), argument("B", size)
    tile = gpu_buffer((threads + 2,), "float32", "tile", "shared")

    def kernel(block: Expr, thread: Expr) -> Stmt:
        first = block * index(threads)

        def fill(place: Expr) -> Stmt:
            position = first + place - index(1)
            inside = tirx.all(position >= index(0), position < index(size))
            return store(tile, tirx.if_then_else(inside, load(a, [position]), tirx.const(0, "float32")), [place])

        value = load(tile, [thread]) + load(tile, [thread + index(2)])
        value = value + load(tile, [thread + index(1)]) * tirx.const(2, "float32")
        return sequence(
            allocate(tile),
            fill(thread),
            tirx.IfThenElse(thread < index(2), fill(thread + index(threads)), None),
            tirx.IfThenElse(first + thread < index(size), store(b, value, [first + thread]), None),
        )

    return primitive_function([a, b], launch(ceil_div(size, threads), threads, kernel))


def smooth_in_place(steps: int = 4) -> Any:
    """``steps`` times ``x[i] = (x[i] + x[i + 1 mod 64]) / 2`` in one shared buffer: barriers both ways in each step."""
    threads = 64
    a, b = argument("A", threads), argument("B", threads)
    shared, held = gpu_buffer((threads,), "float32", "x", "shared"), gpu_buffer((1,), "float32", "held", "local")

    def kernel(_block: Expr, thread: Expr) -> Stmt:
        def step(_number: Expr) -> Stmt:
            neighbour = tirx.floormod(thread + index(1), index(threads))
            mean = (load(shared, [thread]) + load(shared, [neighbour])) * tirx.const(0.5, "float32")
            return sequence(store(held, mean, [index(0)]), store(shared, load(held, [index(0)]), [thread]))

        return sequence(
            allocate(shared), allocate(held),
            store(shared, load(a, [thread]), [thread]),
            loop(steps, SERIAL, "step", step),
            store(b, load(shared, [thread]), [thread]),
        )  # fmt: skip

    return primitive_function([a, b], launch(1, threads, kernel))


def _smooth_reference(a: Array) -> Array:
    x = a.astype(np.float64)
    for _ in range(4):
        x = (x + np.roll(x, -1)) / 2
    return x


def scale_rows_in_two_kernels(rows: int = 16, columns: int = 24) -> Any:
    """``B = A * sum(A, axis=1)``: one kernel sums rows into a workspace, the next one multiplies, four at a time."""
    a, b = argument("A", rows, columns), argument("B", rows, columns)
    sums = gpu_buffer((rows,), "float32", "row_sums", "global")

    def add(block: Expr, thread: Expr) -> Stmt:
        row = block * index(8) + thread
        return sequence(
            store(sums, tirx.const(0, "float32"), [row]),
            loop(columns, SERIAL, "j", lambda j: store(sums, load(sums, [row]) + load(a, [row, j]), [row])),
        )

    def multiply(block: Expr, thread: Expr) -> Stmt:
        def element(lane: Expr) -> Stmt:
            place = [block, thread * index(4) + lane]
            return store(b, load(a, place) * load(sums, [block]), place)

        return loop(4, VECTORIZED, "lane", element)

    body = sequence(allocate(sums), launch(rows // 8, 8, add), launch(rows, columns // 4, multiply))
    return primitive_function([a, b], body)


def scheduled_matmul(m: int, n: int, depth: int, *, virtual_threads: int, stages: int, step: int = DEPTH) -> Any:
    """A stock schedule: shared and register stages, virtual threads, a software pipeline of ``stages`` by cp.async.

    ``step`` products of a sum are made of a tile.
    """
    a, b = te.placeholder((m, depth), "float32", "A"), te.placeholder((depth, n), "float32", "B")
    k = te.reduce_axis((0, depth), "k")
    c = te.compute((m, n), lambda i, j: te.sum(a[i, k] * b[k, j], axis=k), "C")
    schedule = Schedule(te.create_prim_func([a, b, c]))
    block = schedule.get_sblock("C")
    i, j, k = schedule.get_loops(block)
    by, vy, ty, ii = schedule.split(i, [None, virtual_threads, 4, 4 // virtual_threads])
    bx, tx, jj = schedule.split(j, [None, 8, 2])
    outer, inner = schedule.split(k, [None, step])
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
    if stages > 1:
        schedule.annotate(outer, "software_pipeline_stage", [0, 0, stages - 1])
        schedule.annotate(outer, "software_pipeline_order", [0, 1, 2])
        schedule.annotate(outer, "software_pipeline_async_stages", [0])
    return schedule.mod["main"]


def _cross_thread_sum(rows: int, columns: int, *, threads: int) -> Any:
    """Sums of rows by stock cross-thread reduction: shuffles for one warp, shared memory beyond."""
    a = te.placeholder((rows, columns), "float32", "A")
    schedule = Schedule(te.create_prim_func([a, topi.sum(a, axis=1)]))
    block = schedule.get_sblock("A_red")
    i, k = schedule.get_loops(block)
    _, lane = schedule.split(k, [None, threads])
    schedule.bind(i, "blockIdx.x")
    schedule.bind(lane, "threadIdx.x")
    return schedule.mod["main"]


def _scheduled_softmax(rows: int, columns: int) -> Any:
    """Softmax over rows by stock TVM's default GPU schedule: two cross-thread reductions in one kernel."""
    a = te.placeholder((rows, columns), "float32", "A")
    function = te.create_prim_func([a, topi.nn.softmax(a)])
    with Target({"kind": "cuda", "arch": "sm_80", "max_num_threads": 64}) as target:
        for rule in gpu_schedule_rules():
            scheduled = rule.apply(function, target, False)
            if scheduled is not None:
                return scheduled.mod["main"]
    raise AssertionError("stock TVM has a rule for every operator")


def _softmax_reference(a: Array) -> Array:
    powers = np.exp(a.astype(np.float64) - a.max(axis=1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=1, keepdims=True))


def _stencil_reference(a: Array) -> Array:
    padded = np.pad(a.astype(np.float64), 1)
    return np.asarray(padded[:-2] + 2 * padded[1:-1] + padded[2:])


def _sum_reference(a: Array) -> Array:
    return np.asarray(a.astype(np.float64).sum(axis=1))


def simt_kernels() -> tuple[GoodKernel, ...]:
    """Kernels without tensor cores."""
    matmul = _matmul_reference
    return (
        GoodKernel(name="matmul_shared", function=matmul_in_tiles(32, 32, 16), reference=matmul),
        GoodKernel(name="matmul_double_buffered", function=matmul_in_tiles(16, 32, 24, slots=2), reference=matmul),
        GoodKernel(name="matmul_predicated", function=matmul_in_tiles(19, 21, 13), reference=matmul),
        GoodKernel(
            name="matmul_virtual_threads",
            function=scheduled_matmul(16, 32, 16, virtual_threads=2, stages=1),
            reference=matmul,
        ),
        GoodKernel(
            name="matmul_three_stages",
            function=scheduled_matmul(16, 16, 32, virtual_threads=1, stages=3),
            reference=matmul,
            async_copy=True,
        ),
        GoodKernel(name="transpose_padded", function=transpose_through_shared(), reference=np.transpose),
        GoodKernel(name="stencil_halo", function=stencil_with_halo(), reference=_stencil_reference),
        GoodKernel(name="smooth_in_place", function=smooth_in_place(), reference=_smooth_reference),
        GoodKernel(
            name="two_kernels",
            function=scale_rows_in_two_kernels(),
            reference=lambda a: a.astype(np.float64) * _sum_reference(a)[:, None],
        ),
        GoodKernel(name="sum_of_a_warp", function=_cross_thread_sum(4, 96, threads=32), reference=_sum_reference),
        GoodKernel(name="sum_of_a_block", function=_cross_thread_sum(4, 128, threads=64), reference=_sum_reference),
        GoodKernel(name="softmax", function=_scheduled_softmax(2, 96), reference=_softmax_reference),
    )
