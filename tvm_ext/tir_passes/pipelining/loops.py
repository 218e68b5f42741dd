"""The form that pipelining works on: loops over flat buffers, as stock TVM has them behind FlattenBuffer.

Kernels come as schedules with blocks (dlight's, MetaSchedule's, a user's) or as thread-bound loops (Roller's emitters).
`to_loops` brings both to one form: no blocks, one-dimensional buffers, thread extents as attributes, vectorised loops
still loops. What it gives may go through stock TVM's passes again; their first half then changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tvm_ext._tvm import (
    AllocBuffer,
    Buffer,
    BufferStore,
    Call,
    Expr,
    For,
    ForKind,
    IRModule,
    Node,
    PassContext,
    PrimFunc,
    SBlock,
    Sequential,
    Stmt,
    TensorLoad,
    Var,
    ir,
    nodes_in,
    s_tir,
    structural_map,
    structural_walk,
    tirx,
)

from ..expressions.guard_indices import guarded

PADDED_ROWS = "buffer_dim_align"
"""Annotation of an allocation: how far apart its rows shall be."""

UNROLL_HINT = "pragma_unroll_explicit"
"""Attribute of an unrolled loop; 0: the device's compiler unrolls it, and it stays a loop until then."""


def to_loops(func: PrimFunc) -> PrimFunc:
    """``func`` (a thread-bound PrimFunc, scheduled or not) as loops over flat buffers; raises what stock TVM raises."""
    lowering = s_tir.transform
    passes = [
        lowering.CanonicalizeLoop(), lowering.LowerCrossThreadReduction(), lowering.LowerInitBlock(),
        lowering.PlanAndUpdateBufferAllocationLocation(), lowering.ConvertBlocksToOpaque(),
        lowering.LiftThreadBinding(),
        lowering.ManifestSharedMemoryLocalStage(), lowering.CompactBufferAllocation(), lowering.LowerAutoCopy(),
        lowering.UnifyThreadBinding(), lowering.LowerMatchBuffer(), lowering.StmtSimplify(),
        lowering.InjectPermutedLayout(), lowering.AnnotateIrregularLoop(), lowering.InjectSoftwarePipeline(),
        lowering.TransformMmaBufferLayout(), lowering.LowerOpaqueBlock(), tirx.transform.FlattenBuffer(),
    ]  # fmt: skip
    with PassContext(config=dict(PassContext.current().config)):  # without the caller's instruments: these are ours
        lowered = Sequential(passes)(IRModule({"main": guarded(func)}))["main"]
    return lowered.with_body(structural_map(lowered.body, (AllocBuffer, _laid_out)))


def has_blocks(body: Stmt) -> bool:
    """Whether ``body`` has blocks of TensorIR: of what stock TVM scheduled."""
    return bool(nodes_in(body, SBlock))


def _laid_out(statement: Stmt) -> Stmt:
    """The allocation without its wish for padded rows, which has been granted: stock TVM would grant it once more."""
    kept = {key: statement.annotations[key] for key in statement.annotations.keys() if key != PADDED_ROWS}  # noqa: SIM118
    return AllocBuffer(statement.buffer, kept) if len(kept) < len(statement.annotations) else statement


# --- statements ---------------------------------------------------------------------------------------------------
def children_of(body: Stmt) -> list[Stmt]:
    """The statements that ``body`` runs one after another."""
    if isinstance(body, tirx.SeqStmt):
        return [child for part in body.seq for child in children_of(part)]
    return [body]


def open_wrappers(body: Stmt) -> tuple[Callable[[Stmt], Stmt], Stmt]:
    """``body`` without the attributes around it, and how to put them around another statement."""
    if isinstance(body, tirx.AttrStmt):
        wrap, inner = open_wrappers(body.body)
        return lambda new: tirx.AttrStmt(body.node, body.attr_key, body.value, wrap(new)), inner
    return lambda new: new, body


def is_sequential(loop: Stmt, *, registers: bool) -> bool:
    """Whether iterations of ``loop`` follow one another (ALCOP §2.1, rule 2).

    For registers an unrolled loop will do: unrolling is what gives each version registers of its own.
    """
    return loop.kind == ForKind.SERIAL or (registers and loop.kind == ForKind.UNROLLED)


def unrolled_loop(variable: Var, extent: int, body: Stmt, *, by_compiler: bool = True) -> Stmt:
    """A loop that the device's compiler unrolls; else TVM: LLVM's back ends take no hint."""
    new = For(variable, zero(variable), constant(extent, variable), ForKind.UNROLLED, body, None, {})
    if not by_compiler:
        return new
    return tirx.AttrStmt(tirx.IntImm("int32", 0), UNROLL_HINT, tirx.IntImm("int32", 0), new)


def constant(value: int, like: Expr) -> Expr:
    """``value`` in the integer type of ``like``."""
    return tirx.IntImm(str(like.ty.dtype), value)


def zero(like: Expr) -> Expr:
    return constant(0, like)


def integer(expr: Expr) -> int | None:
    """The value of a constant, None of anything else."""
    return int(expr) if isinstance(expr, int) else int(expr.value) if isinstance(expr, tirx.IntImm) else None


def op_name(call: Call) -> str:
    return str(call.op.name) if isinstance(call.op, ir.Op) else ""


# --- accesses -----------------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True, slots=True)
class PointerArgument:
    """How a call passes a buffer: at ``position`` its address, at ``offset`` elements (or fragments) beyond it."""

    position: int
    offset: int | None
    reads: bool = False
    writes: bool = False
    counts_fragments: bool = False


def _wmma(position: int, offset: int, *, reads: bool = False, writes: bool = False) -> PointerArgument:
    return PointerArgument(position=position, offset=offset, reads=reads, writes=writes, counts_fragments=True)


POINTERS: dict[str, tuple[PointerArgument, ...]] = {
    "tirx.ptx_legacy.ldmatrix": (PointerArgument(position=3, offset=4, writes=True),),
    "tirx.ptx_legacy.mma": (
        PointerArgument(position=6, offset=7, reads=True),
        PointerArgument(position=8, offset=9, reads=True),
        PointerArgument(position=10, offset=11, reads=True, writes=True),
    ),
    "tirx.mma_fill": (PointerArgument(position=1, offset=2, writes=True),),
    "tirx.mma_fill_legacy": (PointerArgument(position=1, offset=2, writes=True),),
    "tirx.mma_store": (PointerArgument(position=3, offset=4, reads=True),),
    "tirx.mma_store_legacy": (PointerArgument(position=3, offset=4, reads=True),),
    "tirx.tvm_load_matrix_sync": (_wmma(0, 4, writes=True),),
    "tirx.tvm_store_matrix_sync": (_wmma(0, 4, reads=True),),
    "tirx.tvm_fill_fragment": (_wmma(0, 4, writes=True),),
    "tirx.tvm_mma_sync": (
        _wmma(0, 1, writes=True),
        _wmma(2, 3, reads=True),
        _wmma(4, 5, reads=True),
        _wmma(6, 7, reads=True),
    ),
    "tirx.s_tir.cp_async_raw": (
        PointerArgument(position=0, offset=1, writes=True),
        PointerArgument(position=2, offset=3, reads=True),
    ),
}
"""Calls that read or write through the bare address of a buffer; of any other such call nothing is known."""

ACCESS_PTR = "tirx.tvm_access_ptr"
"""(type, data, offset, extent, rights): rights & 1 reads, & 2 writes."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BufferAccess:
    """One place where ``buffer`` is read or written: a `TensorLoad`, a `BufferStore` or a call."""

    buffer: Buffer
    node: TensorLoad | BufferStore | Call
    reads: bool
    writes: bool
    is_known: bool = True


def buffer_behind(expr: Expr) -> Buffer | None:
    """The buffer of ``buffer.data``; None for anything else."""
    if isinstance(expr, Call) and op_name(expr) == "tirx.buffer_data":
        return expr.args[0]
    return expr if isinstance(expr, Var) else None


def accesses_of(node: Node) -> list[BufferAccess]:
    """Every access in ``node``, in no particular order."""
    found: list[BufferAccess] = []
    explained: list[Expr] = []  # buffer.data expressions that a call has accounted for

    def load(n: TensorLoad) -> None:
        found.append(BufferAccess(buffer=n.source, node=n, reads=True, writes=False))

    def store(n: BufferStore) -> None:
        found.append(BufferAccess(buffer=n.buffer, node=n, reads=False, writes=True))

    def call(n: Call) -> None:
        name = op_name(n)
        if name == ACCESS_PTR:
            rights = integer(n.args[4]) or 3
            found.append(
                BufferAccess(buffer=buffer_behind(n.args[1]), node=n, reads=bool(rights & 1), writes=rights > 1)
            )
            explained.append(n.args[1])
        elif name == "tirx.buffer_data" and not any(n.same_as(other) for other in explained):
            found.append(BufferAccess(buffer=n.args[0], node=n, reads=True, writes=True, is_known=False))
        for pointer in POINTERS.get(name, ()):
            target = n.args[pointer.position]
            buffer = buffer_behind(target)
            if buffer is not None:
                found.append(BufferAccess(buffer=buffer, node=n, reads=pointer.reads, writes=pointer.writes))
                explained.append(target)

    structural_walk(node, [(TensorLoad, load), (BufferStore, store), (Call, call)], order="pre")
    return found


def scope_of(buffer: Buffer) -> str:
    return str(buffer.ty.storage_scope)


def is_shared(buffer: Buffer) -> bool:
    return scope_of(buffer) in ("shared", "shared.dyn")


def is_register(buffer: Buffer) -> bool:
    return scope_of(buffer) in ("local", "warp", "wmma.matrix_a", "wmma.matrix_b")


def size_of(buffer: Buffer) -> int | None:
    """Elements of a flat buffer; None where that is not known before the kernel runs."""
    return integer(buffer.ty.shape[0]) if len(buffer.ty.shape) == 1 else None


def bytes_per_element(dtype: str) -> int:
    return max(1, int(tirx.const(0, dtype).ty.dtype.bits) // 8)


def buffer_bytes(buffer: Buffer) -> int:
    """Bytes of a flat buffer; 0 where its size is not known before the kernel runs."""
    return (size_of(buffer) or 0) * bytes_per_element(str(buffer.ty.dtype))


def allocations_of(node: Node) -> list[AllocBuffer]:
    """The `AllocBuffer` statements in ``node``."""
    return nodes_in(node, AllocBuffer, "pre")


# --- where statements stand ---------------------------------------------------------------------------------------
def enclosing_loops(body: Stmt) -> Iterator[tuple[tuple[Stmt, ...], Stmt]]:
    """Every statement without statements in it, with the `For`, `IfThenElse` and `While` around it, outermost first."""

    def visit(statement: Stmt, around: tuple[Stmt, ...]) -> Iterator[tuple[tuple[Stmt, ...], Stmt]]:
        if isinstance(statement, tirx.SeqStmt):
            for part in statement.seq:
                yield from visit(part, around)
        elif isinstance(statement, tirx.AttrStmt):
            yield from visit(statement.body, around)
        elif isinstance(statement, For | tirx.While):
            yield from visit(statement.body, (*around, statement))
        elif isinstance(statement, tirx.IfThenElse):
            yield from visit(statement.then_case, (*around, statement))
            if statement.else_case is not None:
                yield from visit(statement.else_case, (*around, statement))
        else:
            yield around, statement

    yield from visit(body, ())
