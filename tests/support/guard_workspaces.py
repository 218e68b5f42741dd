"""Puts the workspaces of CPU kernels between guard elements, for runs in guarded memory (`guarded_memory.py`).

Each allocation grows by some rows on both sides, all accesses move up by as many, what lies between starts as NaN (or a
conspicuous integer), and behind the last use the guards are compared with what they started as.

Worked example: ``space = alloc(5 float32); ...; space[i]`` becomes ``space = alloc(16 + 5 + 16); fill it; ...;
space[16 + i]; for j in range(16): assert space[j] == guard and space[16 + 5 + j] == guard``. Of 8 rows of 40 floats
there are 10 then.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from math import prod

from tvm_ext._tvm import (
    AllocBuffer,
    Buffer,
    BufferStore,
    Call,
    Expr,
    IRModule,
    PassContext,
    PrimFunc,
    Stmt,
    StringImm,
    TensorLoad,
    copy_module,
    module_pass,
    structural_map,
    structural_walk,
    tirx,
)
from tvm_ext.analysis.computation_exprs import itemsize_bytes
from tvm_ext.analysis.computations import dtype_of
from tvm_ext.ir.build_ir import INDEX_DTYPE, SERIAL, allocate, index, load, nest, sequence, store
from tvm_ext.support.kernel_cache import SEALED
from tvm_ext.tir_passes.pipelining.loops import has_blocks, integer, to_loops

GUARD_ERROR = "MemoryGuardError"
"""The name of the error that a kernel raises; the class is in `guarded_memory.py`."""

GUARD_BYTES = 64
"""On each side: the alignment that allocations have, which accesses keep."""

REMEDY = (
    "\n  remedy: " + "the kernel is wrong: report it with the model; enable_roller=False builds stock TVM's instead"
)


@module_pass(opt_level=0, name="test.GuardWorkspaces")
class GuardWorkspaces:
    """Put every workspace of every scheduled kernel of a module between guards; kernels without a body stay."""

    def transform_module(self, mod: IRModule, _ctx: PassContext) -> IRModule:
        result = copy_module(mod)
        for gv, func in mod.functions_items():
            if isinstance(func, PrimFunc) and not func.attrs.get(SEALED):
                result[gv] = guard_workspaces(func, gv.name_hint)
        return result


def guard_workspaces(func: PrimFunc, name: str = "kernel") -> PrimFunc:
    """``func``, a scheduled kernel for CPUs, with its workspaces between guards.

    A workspace stays as it is where it is used otherwise than by loads and stores (its address goes to a library), its
    size is only known at run time, or vectors go in and out as a whole (registers by another name).
    Called, it raises `MemoryGuardError`, which names ``name`` and the workspace.
    """
    if has_blocks(func.body):  # what stock TVM scheduled: its blocks allocate, not its statements
        func = to_loops(func)
    opaque = _opaque(func.body)

    def may_guard(statement: Stmt) -> bool:
        return (
            isinstance(statement, AllocBuffer)
            and not any(statement.buffer.same_as(other) for other in opaque)
            and len(statement.buffer.ty.shape) > 0
            and "x" not in dtype_of(statement.buffer)
            and all(integer(size) is not None for size in statement.buffer.ty.shape)
        )

    return func.with_body(structural_map(func.body, (tirx.SeqStmt, lambda seq: _guarded(seq, may_guard, name))))


def _opaque(body: Stmt) -> list[Buffer]:
    """The buffers whose data calls are passed, and those that vectors are read from or written to as a whole.

    Stock TVM's StmtSimplify fails on scalar accesses beside vectors that are bound to names ("mismatched types").
    """
    found: list[Buffer] = []

    def access(buffer: Buffer, indices: Sequence[Expr]) -> None:
        if any("x" in dtype_of(index) for index in indices):
            found.append(buffer)

    def visit(call: Call) -> None:
        if getattr(call.op, "name", "") == "tirx.buffer_data":
            found.extend(call.args)

    structural_walk(
        body,
        [
            (Call, visit),
            (TensorLoad, lambda load: access(load.source, load.indices)),
            (BufferStore, lambda store: access(store.buffer, store.indices)),
        ],
    )
    return found


def _guarded(block: Stmt, may_guard: Callable[[Stmt], bool], name: str) -> Stmt:
    """``block`` with the workspaces that it allocates between guards, filled first and compared last."""
    parts, spaces = [], []
    for part in block.seq:
        if may_guard(part):
            spaces.append(_Workspace(part, name))
            parts += spaces[-1].opening()
        else:
            parts.append(part)
    for space in spaces:
        parts = [space.moved(part) for part in parts]
    return sequence(*parts, *(space.check() for space in spaces)) if spaces else block


class _Workspace:
    """One allocation that becomes a larger one: by whole rows of its first axis, so that accesses keep their form."""

    def __init__(self, allocation: Stmt, name: str) -> None:
        self.old, self.annotations, self.name = allocation.buffer, allocation.annotations, name
        self.dtype = dtype_of(self.old)
        first, *inner = (int(size) for size in self.old.ty.shape)
        self.rows, self.inner = first, tuple(inner)
        self.margin = max(1, math.ceil(GUARD_BYTES / (itemsize_bytes(self.dtype) * prod(inner))))
        self.new = tirx.decl_buffer(
            [self._index(first + 2 * self.margin), *self.old.ty.shape[1:]],
            self.dtype,
            self.old.name,
            scope=self.old.ty.storage_scope,
            data_alignment=GUARD_BYTES,
        )

    def _index(self, value: int) -> Expr:
        return tirx.IntImm(dtype_of(self.old.ty.shape[0]), value)

    def opening(self) -> list[Stmt]:
        """The allocation; NaN or a conspicuous integer all over it."""
        value = _guard_value(self.dtype)
        guard = self._guards(lambda *places: sequence(*(store(self.new, value, place) for place in places)))
        fill = self._rows(self.rows, lambda place: store(self.new, _fill(self.dtype), self._behind(place)))
        return [AllocBuffer(self.new, self.annotations), fill, guard]

    def check(self) -> Stmt:
        """The guards are what they were. One assertion for each side: one for each element takes LLVM minutes."""
        text = f"kernel {self.name} writes {{}} its workspace {self.old.name} ({self._shape()} {self.dtype})."
        kind, value = StringImm(GUARD_ERROR), _guard_value(self.dtype)
        counts = tirx.decl_buffer([index(2)], "int32", f"{self.old.name}_damage", data_alignment=GUARD_BYTES)

        def count(place: Sequence[Expr], side: int) -> Stmt:
            damaged = tirx.Cast("int32", _differ(load(self.new, place), value))
            return store(counts, load(counts, [index(side)]) + damaged, [index(side)])

        def judge(side: int, word: str) -> Stmt:
            parts = [StringImm(text.format(word)), StringImm(REMEDY)]
            return tirx.AssertStmt(load(counts, [index(side)]) == tirx.const(0, "int32"), kind, parts)

        return sequence(
            allocate(counts),
            *(store(counts, tirx.const(0, "int32"), [index(side)]) for side in range(2)),
            self._guards(lambda before, behind: sequence(count(before, 0), count(behind, 1))),
            judge(0, "before"),
            judge(1, "behind"),
        )

    def _shape(self) -> str:
        return "x".join(map(str, (self.rows, *self.inner)))

    def _guards(self, body: Callable[[Sequence[Expr], Sequence[Expr]], Stmt]) -> Stmt:
        """``body`` for each element of the guard before and the one behind that corresponds to it."""

        def both(place: Sequence[Expr]) -> Stmt:
            return body(place, (place[0] + self._index(self.margin + self.rows), *place[1:]))

        return self._rows(self.margin, both)

    def _rows(self, count: int, body: Callable[[Sequence[Expr]], Stmt]) -> Stmt:
        """``body`` for each element of ``count`` rows."""
        extents = (count, *self.inner)
        names = [f"g{axis}" for axis in range(len(extents))]
        dtype = dtype_of(self.old.ty.shape[0])
        return nest(
            extents,
            SERIAL,
            names,
            lambda place: body(place if dtype == INDEX_DTYPE else [tirx.Cast(dtype, index) for index in place]),
        )

    def moved(self, part: Stmt) -> Stmt:
        """``part`` with its accesses of the old buffer in the new one, behind the margin."""

        def read(access: TensorLoad) -> Expr:
            return load(self.new, self._behind(access.indices)) if access.source.same_as(self.old) else access

        def written(statement: Stmt) -> Stmt:
            if not statement.buffer.same_as(self.old):
                return statement
            return store(self.new, statement.value, self._behind(statement.indices))

        return structural_map(part, [(TensorLoad, read), (BufferStore, written)])

    def _behind(self, place: Sequence[Expr]) -> list[Expr]:
        """``place`` beyond the margin."""
        first, *inner = place
        return [first + tirx.IntImm(dtype_of(first), self.margin), *inner]


def _fill(dtype: str) -> Expr:
    """What an element holds that was not written: NaN, or a conspicuous integer."""
    return tirx.const(math.nan, dtype) if "float" in dtype else _repeated(0x5A, dtype)


def _guard_value(dtype: str) -> Expr:
    """What guards hold: no NaN, which differs from itself, and nothing that a kernel computes often."""
    return tirx.const(-27648.0, dtype) if "float" in dtype else _repeated(0x6B, dtype)  # exact in half precision too


def _repeated(byte: int, dtype: str) -> Expr:
    """The integer whose every byte is ``byte``; for bool, True."""
    return tirx.const(dtype == "bool" or int.from_bytes(bytes([byte]) * int(itemsize_bytes(dtype)), "big"), dtype)


def _differ(a: Expr, b: Expr) -> Expr:
    """Whether two scalars differ. LLVM compares bools as floats here, and fails."""
    return tirx.NE(tirx.Cast("int8", a), tirx.Cast("int8", b)) if dtype_of(a) == "bool" else tirx.NE(a, b)
