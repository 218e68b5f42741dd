"""Small constructors for thread-bound TensorIR, so that GPU emitters read like the kernels that they make.

A GPU kernel here is plain loops, no blocks: an outer ``blockIdx.x`` loop, a ``threadIdx.x`` loop in it, allocations of
scope ``"shared"`` and ``"local"`` where they are used. Stock TVM's passes make the barriers (ThreadSync), the vector
accesses (VectorizeLoop) and the launch. Several root nests in one function become several launches, in order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm_ext._tvm import Buffer, Expr, For, ForKind, IterVar, Stmt, Var, structural_map, tirx
from tvm_ext.devices.gpu import VECTOR_BYTES
from tvm_ext.records.choice import ConstantPack

from .build_ir import INDEX_DTYPE, index

MIN_BLOCKS_PER_UNIT = "tirx.launch_bounds_min_blocks_per_sm"
"""The statement that stock TVM prints as the second number of ``__launch_bounds__``."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SimtKernel:
    """What a GPU emitter made, and what it planned, to be compared with the compiler's report.

    ``statements`` are root nests, one launch each. ``threads``, ``shared_bytes`` and ``register_count`` (32-bit
    registers of a thread) are those of the largest launch; ``notes`` say what was chosen beyond the rProgram.
    """

    statements: tuple[Stmt, ...]
    threads: int
    blocks: int
    shared_bytes: int
    register_count: int
    packs: tuple[tuple[Buffer, ConstantPack], ...] = ()
    notes: tuple[str, ...] = ()


def bind(tag: str, extent: int, body: Callable[[Expr], Stmt]) -> Stmt:
    """``body`` for every ``tag`` (``"blockIdx.x"``, ``"threadIdx.x"``, ...) in ``range(extent)``, in parallel."""
    variable = Var(tag.replace(".", "_"), INDEX_DTYPE)
    thread = IterVar(None, Var(tag, INDEX_DTYPE), IterVar.ThreadIndex, tag)
    return For(variable, index(0), index(extent), ForKind.THREAD_BINDING, body(variable), thread, {})


def launch(blocks: int, threads: int, body: Callable[[Expr, Expr], Stmt]) -> Stmt:
    """One kernel: ``body(block, thread)`` on a grid of ``blocks`` blocks of ``threads`` threads."""
    return bind("blockIdx.x", blocks, lambda block: bind("threadIdx.x", threads, lambda thread: body(block, thread)))


def launch_2d(blocks: int, columns: int, rows: int, body: Callable[[Expr, Expr, Expr], Stmt]) -> Stmt:
    """One kernel: ``body(block, x, y)`` on a grid of ``blocks`` blocks of ``rows`` x ``columns`` threads."""

    def threads(block: Expr) -> Stmt:
        return bind("threadIdx.y", rows, lambda y: bind("threadIdx.x", columns, lambda x: body(block, x, y)))

    return bind("blockIdx.x", blocks, threads)


def gpu_buffer(shape: Sequence[int], dtype: str, name: str, scope: str) -> Buffer:
    """A buffer of scope ``"shared"``, ``"local"`` (registers) or ``"warp"``, aligned for the widest access."""
    return tirx.decl_buffer([index(s) for s in shape], dtype, name, scope=scope, data_alignment=VECTOR_BYTES)


def allocate_shared(buffer: Buffer, *, padding: int = 0) -> Stmt:
    """Allocate ``buffer``; with ``padding``, so many elements are added to each row (its last axis).

    A buffer declared with longer rows would not do: stock CompactBufferAllocation shrinks it to what is used. Worked
    example: rows of 64 floats padded by 4 are 68 elements apart.
    """
    if not padding:
        return tirx.AllocBuffer(buffer, {})
    rows = len(buffer.ty.shape) - 2
    row = int(buffer.ty.shape[-1])
    assert rows >= 0, f"{buffer.name} has no rows to pad"
    # (buffer, axis, factor, offset): the stride of `axis` becomes offset modulo factor
    return tirx.AllocBuffer(buffer, {"buffer_dim_align": [[-1, rows, row + padding, 0]]})


def with_blocks_per_unit(statement: Stmt, blocks: int) -> Stmt:
    """A statement of a kernel, and with it how many blocks the device's compiler is told to fit into a unit."""
    return tirx.AttrStmt(tirx.const(0, "int32"), MIN_BLOCKS_PER_UNIT, tirx.const(max(1, blocks), "int32"), statement)


def unrolled(extent: int, name: str, body: Callable[[Expr], Stmt]) -> Stmt:
    """``body`` for every ``name`` in ``range(extent)``, unrolled by the device's compiler and not by TVM.

    The loop stays a loop in TensorIR (``#pragma unroll`` in CUDA), so that lowering and reading the source cost what
    the loop nest costs, not what 64 copies of its body do.
    """
    if extent == 1:
        return body(index(0))
    variable = Var(name, INDEX_DTYPE)
    by_compiler = {"pragma_unroll_explicit": tirx.IntImm("int32", 0)}
    return For(variable, index(0), index(extent), ForKind.UNROLLED, body(variable), None, by_compiler)


def unrolled_by_tvm(statement: Stmt) -> Stmt:
    """``statement`` with the loops of `unrolled` left to TVM: LLVM's back ends (rocm) ignore the hint to unroll."""

    def strip(loop: For) -> Stmt:
        if loop.kind != ForKind.UNROLLED:
            return loop
        return For(loop.loop_var, loop.min, loop.extent, ForKind.UNROLLED, loop.body, None, {})

    return structural_map(statement, (For, strip))
