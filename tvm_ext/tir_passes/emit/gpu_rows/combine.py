"""How threads that share a row combine their partial results, so that each of them has the total afterwards."""

from __future__ import annotations

from collections.abc import Callable

from tvm_ext._tvm import ALLREDUCE, Buffer, Call, Expr, Stmt, Var, tirx
from tvm_ext.analysis.computation_exprs import itemsize_bytes
from tvm_ext.analysis.computations import Computation, dtype_of
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.ir.build_ir import (
    SERIAL,
    UNROLLED,
    VECTORIZED,
    accumulate,
    accumulator_dtype,
    allocate,
    combine,
    in_dtype,
    index,
    load,
    loop,
    neutral,
    sequence,
    store,
)
from tvm_ext.ir.simt_ir import allocate_shared, gpu_buffer
from tvm_ext.support.arithmetic import ceil_div

from .form import RowForm
from .lanes import access_lanes
from .plan import RowPlan

STOCK_ALIGNMENT_BYTES = 64  # of the buffers that LowerThreadAllreduce makes


def starts_neutral(computation: Computation) -> bool:
    """Whether the reduction's initial value is `neutral`."""
    if computation.combiner in ("max", "min"):
        return True
    return getattr(computation.init, "value", None) == (0 if computation.combiner == "sum" else 1)


def shared_bytes(form: RowForm, plan: RowPlan, device: DeviceSpec) -> int:
    """Shared memory of a block for combining partial results: ours across the lanes, stock TVM's for an allreduce.

    Worked example, two sums of floats by 256 threads on CUDA: each 8 results of warps and one total, in 64 bytes each
    as stock TVM aligns them.
    """
    if plan.row_threads == 1:
        return 0
    sizes = [
        max(4, int(itemsize_bytes(accumulator_dtype(dtype_of(s.target))))) for s in form.computations if s.is_reduction
    ]
    if not plan.along_row:
        return sum(plan.threads * plan.grid_lanes * size for size in sizes)
    return sum(_allreduce_bytes(plan, size, device) for size in sizes)


def _allreduce_bytes(plan: RowPlan, size: int, device: DeviceSpec) -> int:
    warp = device.teu_lanes
    shuffles = size == 4 and (device.kind == "cuda" or (device.kind == "rocm" and plan.row_threads == warp))
    if not shuffles:
        return _aligned_bytes(plan.threads * size)
    return 0 if plan.row_threads <= warp else _aligned_bytes(plan.row_threads // warp * size) + _aligned_bytes(size)


def _aligned_bytes(size: int) -> int:
    return ceil_div(size, STOCK_ALIGNMENT_BYTES) * STOCK_ALIGNMENT_BYTES


def add_initial(computation: Computation, total: Buffer, width: int) -> Stmt:
    """Combine the reduction's initial value into each of ``width`` totals."""
    first = in_dtype(computation.init, dtype_of(total))

    def add(lane: Expr) -> Stmt:
        return store(total, combine(computation.combiner, first, load(total, [lane])), [lane])

    return loop(width, UNROLLED, "lane", add)


def allreduce(computation: Computation, part: Buffer, total: Buffer, thread: Expr) -> tuple[Stmt, Stmt]:
    """``total[0]`` = ``part[0]`` of all threads along ``thread`` (threadIdx.x) combined; and a statement for the end.

    Stock LowerThreadAllreduce makes shuffles of it within warps and shared memory between them; without shuffles
    (OpenCL) a tree in shared memory. The statement for the kernel's end is a last use of the total. Otherwise stock
    StorageRewrite lets ``mean = total / 7`` have the total's storage, which LowerThreadAllreduce then puts into shared
    memory: every thread would divide it once more.
    """
    dtype = dtype_of(part)
    a, b = Var("a", dtype), Var("b", dtype)
    reducer = tirx.CommReducer([a], [b], [combine(computation.combiner, a, b)], [neutral(computation, dtype)])
    zero = index(0)
    arguments = [tirx.const(1, "uint32"), load(part, [zero]), tirx.const(True, "bool"), load(total, [zero]), thread]
    call = Call(ALLREDUCE, arguments, ret_ty=tirx.const(0, dtype).ty)
    return tirx.AttrStmt(reducer, "reduce_scope", 0, tirx.Evaluate(call)), tirx.Evaluate(load(total, [zero]))


def meet(
    computation: Computation, part: Buffer, total: Buffer, *, at: tuple[Expr, Expr], counts: tuple[int, int]
) -> tuple[list[Stmt], list[Stmt]]:
    """Combine ``part`` of the threads that differ in ``at[0]`` alone: (allocations, statements).

    ``at`` is this thread's (row thread, grid thread), ``counts`` how many there are. Each thread writes its partial
    results to shared memory and, after a barrier (stock ThreadSync's), combines those of all, in the same order.
    Neighbouring threads' 16-byte pieces are neighbours, which is free of bank conflicts: 8 floats of a thread in one
    piece of 32 bytes would not be.
    """
    dtype, width = dtype_of(part), int(part.ty.shape[0])
    piece = access_lanes(dtype, width)
    shape = (counts[0], width // piece, counts[1] * piece)
    shared = gpu_buffer(shape, dtype, f"{computation.target.name}_shared", "shared")
    other = gpu_buffer((width,), dtype, "other", "local")
    column = at[1] * index(piece)

    def pieces(body: Callable[[Expr, Expr, Expr], Stmt]) -> Stmt:
        """``body(piece, its first lane, lane)``."""
        kind = VECTORIZED if piece > 1 else UNROLLED

        def one(p: Expr) -> Stmt:
            return loop(piece, kind, "lane", lambda v: body(p, p * index(piece), v))

        return loop(width // piece, UNROLLED, "piece", one)

    def each(body: Callable[[Expr], Stmt]) -> Stmt:
        return loop(width, UNROLLED, "lane", body)

    def add(number: Expr) -> Stmt:
        read = pieces(lambda p, first, v: store(other, load(shared, [number, p, column + v]), [first + v]))
        return sequence(read, each(lambda v: accumulate(total, [v], load(other, [v]), computation.combiner)))

    statements = [
        pieces(lambda p, first, v: store(shared, load(part, [first + v]), [at[0], p, column + v])),
        each(lambda v: store(total, neutral(computation, dtype), [v])),
        loop(counts[0], SERIAL, "part", add),
    ]
    return [allocate_shared(shared), allocate(other)], statements
