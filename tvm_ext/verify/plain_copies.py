"""Asynchronous copies as the plain ones that they come to, where nothing is concurrent."""

from __future__ import annotations

from dataclasses import dataclass

from tvm_ext._tvm import (
    Buffer,
    BufferStore,
    Call,
    Expr,
    For,
    ForKind,
    IterVar,
    Node,
    PrimFunc,
    Stmt,
    TensorLoad,
    Var,
    ir,
    structural_map,
    tirx,
)
from tvm_ext.analysis.computations import dtype_of, mentions, substitute
from tvm_ext.ir.build_ir import as_index
from tvm_ext.tir_passes.pipelining.loops import enclosing_loops
from tvm_ext.tir_passes.pipelining.part_copies import AHEAD
from tvm_ext.verify.simt.values import Value

ACCESS_PTR = ir.Op.get("tirx.tvm_access_ptr")
NO_CPU_CALLS = ("tirx.ptx.cp_async_", "tirx.tvm_storage_sync")


def synchronous(function: PrimFunc) -> PrimFunc:
    """``function`` with every ``cp_async_raw`` as stores at once, without commits, waits and tiles held in registers.

    Thread extents become bound loops, so that a function that pipelining has lowered reads like one that it has not.
    """

    def visit(statement: Stmt) -> Node:
        call = statement.value
        name = str(getattr(call.op, "name", "")) if isinstance(call, Call) else ""
        if name == "tirx.s_tir.cp_async_raw":
            return _stores(call)
        return tirx.Evaluate(tirx.IntImm("int32", 0)) if name.startswith(NO_CPU_CALLS) else statement

    def thread(statement: Stmt) -> Stmt:
        if statement.attr_key != "thread_extent":
            return statement
        axis, extent = statement.node, statement.value
        bound = IterVar(None, Var(str(axis.var.name), str(axis.var.ty.dtype)), IterVar.ThreadIndex, axis.thread_tag)
        first = tirx.IntImm(str(extent.ty.dtype), 0)
        return For(axis.var, first, extent, ForKind.THREAD_BINDING, statement.body, bound, {})

    body = structural_map(function.body, [(tirx.Evaluate, visit), (tirx.AttrStmt, thread)])
    return function.with_body(_without_detours(body))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Held:
    """Registers that hold what was loaded until it is stored to shared memory: ``buffer[index] = value``, in loops."""

    buffer: Buffer
    index: Value
    value: Expr
    loops: tuple[For, ...]


def _without_detours(body: Stmt) -> Stmt:
    """``body`` with what waits in registers on its way from global to shared memory loaded where it is stored."""
    held = _held(body)

    def visit(load: TensorLoad) -> Node:
        item = next((item for item in held if load.source.same_as(item.buffer)), None)
        return load if item is None else _loaded_there(item, load.indices[0])

    def drop(store: BufferStore) -> Stmt:
        return tirx.Evaluate(tirx.IntImm("int32", 0)) if any(store.buffer.same_as(i.buffer) for i in held) else store

    return structural_map(structural_map(body, (BufferStore, drop)), (TensorLoad, visit))


def _held(body: Stmt) -> list[_Held]:
    """The registers so named by the pipelining passes, each written by one statement."""
    found: list[_Held] = []
    for around, statement in enclosing_loops(body):
        if isinstance(statement, BufferStore) and str(statement.buffer.name).endswith(AHEAD):
            loops = tuple(
                loop for loop in around if isinstance(loop, For) and mentions(statement.indices[0], loop.loop_var)
            )
            found.append(_Held(buffer=statement.buffer, index=statement.indices[0], value=statement.value, loops=loops))
    return found


def _loaded_there(held: _Held, place: Expr) -> Expr:
    """The value of register ``place``: the loops' variables are its digits, the innermost changing fastest."""
    values, rest = {}, place
    for loop in reversed(held.loops):
        extent = tirx.IntImm(str(rest.ty.dtype), int(loop.extent))
        digit = tirx.floormod(rest, extent)
        values[loop.loop_var] = as_index(digit, loop.loop_var)
        rest = tirx.floordiv(rest, extent)
    return substitute(held.value, values.items())


def _stores(call: Call) -> Stmt:
    """``to[i + v] = from[j + v]`` for the elements of one copy, zeros where its predicate is false."""
    target, first, source, begin, size_bytes, *predicate = call.args
    (to, base), origin = _place_of(target), source.args[0]
    dtype = dtype_of(to)
    count = int(size_bytes.value) * 8 // int(tirx.const(0, dtype).ty.dtype.bits)
    lane = Var("lane", "int32")

    def at(start: Expr) -> Expr:
        return start + as_index(lane, start)

    value = tirx.BufferLoad(origin, [at(begin)])
    if predicate:
        value = tirx.if_then_else(predicate[0], value, tirx.const(0, dtype))
    stored = BufferStore(to, value, [at(first if base is None else first + tirx.Cast(str(first.ty.dtype), base))])
    return For(lane, tirx.IntImm("int32", 0), tirx.IntImm("int32", count), ForKind.SERIAL, stored)


def _place_of(pointer: Expr) -> tuple[Buffer, Expr]:
    """The buffer of ``buffer.data`` or of an access pointer, and the element at which that one begins."""
    if pointer.op.same_as(ACCESS_PTR):
        return pointer.args[1].args[0], pointer.args[2]
    return pointer.args[0], None
