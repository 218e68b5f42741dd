"""How the loads of a part are written: as cp.async, or as loads to registers and stores from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from tvm_ext._tvm import AllocBuffer, Buffer, BufferStore, Call, Expr, For, ForKind, Stmt, Var, ir, tirx
from tvm_ext.analysis.computations import substitute
from tvm_ext.errors import IllegalRewrite
from tvm_ext.ir.build_ir import cast_to
from tvm_ext.ir.bulk_ir import shared_pointer

from .copies import AsyncShape, Copy, async_shape, is_vector_load
from .loops import allocations_of, constant, integer, is_register, unrolled_loop, zero

CP_ASYNC = "tirx.s_tir.cp_async_raw"
HIDDEN = "hand_threaded"
"""Attribute whose statement stock ThreadSync passes over: the barriers of a pipeline are ours."""

AHEAD = "_ahead"
"""Ends the names of registers that hold what is on its way to shared memory."""

NOTHING = tirx.Evaluate(tirx.IntImm("int32", 0))


class Loader:
    """How one buffer is loaded. ``is_late``: `issue` fills ``registers``, which `deposit` puts into shared memory."""

    registers: tuple[Buffer, ...] = ()
    is_late = False

    def whole(self, part: Stmt) -> Stmt:
        """``part``, complete: what a prologue does."""
        raise NotImplementedError

    def issue(self, part: Stmt) -> Stmt:
        """The beginning of ``part``, which does not wait for data."""
        raise NotImplementedError

    def deposit(self, part: Stmt) -> Stmt:
        """The rest of it."""
        raise NotImplementedError


@dataclass(kw_only=True, eq=False)
class AsyncLoader(Loader):
    """cp.async: from global to shared memory past the registers (sm_80 and later)."""

    copies: Sequence[Copy]
    shapes: Sequence[AsyncShape]

    def whole(self, part: Stmt) -> Stmt:
        return _Rewriter(self._of).rewrite(part, allocations_of(part))

    issue = whole

    def deposit(self, part: Stmt) -> Stmt:
        return NOTHING

    def _of(self, statement: Stmt) -> Stmt | None:
        """cp.async for a copy, or for the vector loop around one; None for other statements."""
        for copy, shape in zip(self.copies, self.shapes, strict=True):
            if copy.vector is not None and statement.same_as(copy.vector):
                return _async_vector(copy, shape)
            if copy.vector is None and statement.same_as(copy.store):
                return _async_call(copy, shape, ())
        return None


def asynchronous(copies: Sequence[Copy], ranges: Mapping[Var, Expr]) -> AsyncLoader:
    """Raises IllegalRewrite where a copy cannot be cp.async."""
    return AsyncLoader(copies=copies, shapes=[async_shape(copy, ranges) for copy in copies])


def _async_vector(copy: Copy, shape: AsyncShape) -> Stmt:
    assert copy.vector is not None
    lane = copy.vector.loop_var
    if shape.count == 1:
        return _async_call(copy, shape, [(lane, zero(lane))])
    return unrolled_loop(lane, shape.count, _async_call(copy, shape, [(lane, lane * constant(shape.elements, lane))]))


def _async_call(copy: Copy, shape: AsyncShape, lanes: Sequence[tuple[Var, Expr]]) -> Stmt:
    """Source: PTX ISA, cp.async; TVM's operator takes (to, offset, from, offset, bytes[, predicate]).

    The tile is named by a pointer of its element type. Stock StorageRewrite does not take a bare ``tile.data`` for an
    access: where all loads of the tile are vectors, it makes the buffer one of vectors, and merging then adds to the
    copy's offset, which counts floats, the tile's place in float4s. Worked example: behind 16 KiB of another tile
    loads go to float4 1024, byte 16384, and copies to float 1024, byte 4096.
    """
    arguments = [
        shared_pointer(copy.buffer, tirx.IntImm("int32", 0)),
        substitute(copy.index, lanes),
        copy.source.data,
        substitute(copy.from_index, lanes),
        tirx.IntImm("int32", shape.bytes_each),
    ]
    if copy.predicate is not None:
        arguments.append(substitute(copy.predicate, lanes))
    call = Call(ir.Op.get(CP_ASYNC), arguments, ret_ty=copy.store.value.ty)
    return tirx.Evaluate(call)


@dataclass(kw_only=True, eq=False)
class RegisterLoader(Loader):
    """Through registers: loads early in an iteration, stores late, so that what is between them hides the latency."""

    copies: Sequence[Copy]
    buffers: Sequence[Buffer]  # of the copies, in order
    vectors: Sequence[bool]  # whether the innermost loop around a copy is one vector load
    by_compiler: bool = True  # whether the device's compiler unrolls loops over registers
    is_late: bool = field(default=True, init=False)

    @property
    def registers(self) -> tuple[Buffer, ...]:  # type: ignore[override]
        return tuple(self.buffers)

    def whole(self, part: Stmt) -> Stmt:
        return tirx.AttrStmt(tirx.IntImm("int32", 0), HIDDEN, tirx.IntImm("int32", 1), part)

    def issue(self, part: Stmt) -> Stmt:
        return _Rewriter(self._load, unrolled=self._unrolled).rewrite(part, allocations_of(part))

    def deposit(self, part: Stmt) -> Stmt:
        stores = _Rewriter(self._store, unrolled=self._unrolled).rewrite(part, allocations_of(part))
        return tirx.AttrStmt(tirx.IntImm("int32", 0), HIDDEN, tirx.IntImm("int32", 1), stores)

    def _unrolled(self, loop: Stmt, body: Stmt) -> Stmt:
        return unrolled_loop(loop.loop_var, integer(loop.extent) or 0, body, by_compiler=self.by_compiler)

    def _load(self, statement: Stmt) -> Stmt | None:
        for copy, register, is_vector in zip(self.copies, self.buffers, self.vectors, strict=True):
            load = BufferStore(register, copy.loaded(), [_place(copy)])
            if statement.same_as(copy.store):
                return load
            if is_vector and statement.same_as(copy.around[-1]):
                loop = copy.around[-1]
                return For(loop.loop_var, loop.min, loop.extent, ForKind.VECTORIZED, load)
        return None

    def _store(self, statement: Stmt) -> Stmt | None:
        for copy, register in zip(self.copies, self.buffers, strict=True):
            if statement.same_as(copy.store):
                return BufferStore(copy.buffer, copy.stored(tirx.BufferLoad(register, [_place(copy)])), [copy.index])
        return None


def through_registers(
    copies: Sequence[Copy], ranges: Mapping[Var, Expr], *, by_compiler: bool = True
) -> RegisterLoader:
    """Raises IllegalRewrite where the number of a thread's elements is not known."""
    buffers = []
    for copy in copies:
        count = prod(_extent(loop, copy) for loop in copy.around if isinstance(loop, For))
        name = f"{copy.buffer.name}{AHEAD}"
        dtype = str(copy.source.ty.dtype)
        buffers.append(tirx.decl_buffer([tirx.IntImm("int32", count)], dtype, name, scope="local", data_alignment=16))
    vectors = [is_vector_load(copy, ranges) for copy in copies]
    return RegisterLoader(copies=copies, buffers=buffers, vectors=vectors, by_compiler=by_compiler)


def _extent(loop: Stmt, copy: Copy) -> int:
    extent = integer(loop.extent)
    if extent is None:
        raise IllegalRewrite(
            f"the extent of loop {loop.loop_var.name}, which loads {copy.buffer.name}, is not constant"
        )
    return extent


def _place(copy: Copy) -> Expr:
    """The register of an iteration: row-major in the loops around the copy."""
    place: Expr = tirx.IntImm("int32", 0)
    for loop in copy.around:
        if isinstance(loop, For):
            place = place * tirx.IntImm("int32", _extent(loop, copy)) + cast_to(loop.loop_var, "int32")
    return place


class _Rewriter:
    """Rebuilds a part with some statements replaced, and without what filled the registers that are skipped."""

    def __init__(
        self, replace: Callable[[Stmt], Stmt | None], unrolled: Callable[[Stmt, Stmt], Stmt] | None = None
    ) -> None:
        self._replace, self._unrolled = replace, unrolled
        self._dropped: list[Buffer] = []

    def rewrite(self, part: Stmt, dropped: Sequence[Stmt]) -> Stmt:
        """``dropped``: allocations inside the part that are no longer needed."""
        self._dropped = [statement.buffer for statement in dropped if is_register(statement.buffer)]
        return self._visit(part)

    def _visit(self, statement: Stmt) -> Stmt:
        new = self._replace(statement)
        if new is not None:
            return new
        if isinstance(statement, tirx.SeqStmt):
            parts = [part for part in (self._visit(s) for s in statement.seq) if not part.same_as(NOTHING)]
            return tirx.stmt_seq(*parts) if len(parts) > 1 else parts[0] if parts else NOTHING
        if isinstance(statement, For):
            return self._loop(statement)
        if isinstance(statement, tirx.AttrStmt):
            body = self._visit(statement.body)
            return body if body.same_as(NOTHING) else _attribute(statement, body)
        if isinstance(statement, tirx.IfThenElse):
            return self._condition(statement)
        return NOTHING if self._is_dropped(statement) else statement

    def _is_dropped(self, statement: Stmt) -> bool:
        buffer = statement.buffer if isinstance(statement, AllocBuffer | BufferStore) else None
        return buffer is not None and any(buffer.same_as(other) for other in self._dropped)

    def _loop(self, loop: Stmt) -> Stmt:
        body = self._visit(loop.body)
        if body.same_as(NOTHING):
            return NOTHING
        if self._unrolled is not None and loop.kind == ForKind.SERIAL:
            return self._unrolled(loop, body)
        return For(loop.loop_var, loop.min, loop.extent, loop.kind, body, loop.thread_binding, dict(loop.annotations))

    def _condition(self, statement: Stmt) -> Stmt:
        then = self._visit(statement.then_case)
        otherwise = None if statement.else_case is None else self._visit(statement.else_case)
        if otherwise is not None and otherwise.same_as(NOTHING):
            otherwise = None
        if then.same_as(NOTHING) and otherwise is None:
            return NOTHING
        return tirx.IfThenElse(statement.condition, then, otherwise)


def _attribute(statement: Stmt, body: Stmt) -> Stmt:
    return tirx.AttrStmt(statement.node, statement.attr_key, statement.value, body)
