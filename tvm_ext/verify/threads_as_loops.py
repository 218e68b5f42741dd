"""Runs thread-bound TensorIR on LLVM, its thread axes as serial loops: the sequential meaning of a GPU kernel.

Thread after thread runs to its end, with registers ("local" buffers) of its own. Before a thread reads shared memory,
*all* threads' part of the copy that filled it must have happened: each statement that only fills shared memory is
therefore repeated for every thread, wherever one thread meets it. Worked example, 256 threads that copy four elements
each and then multiply::

    for thread in 256:                       for thread in 256:
        A_shared[thread * 4 + v] = A[...]        for copier in 256:
        barrier                                      A_shared[copier * 4 + v] = A[...]
        acc += A_shared[...] * ...               acc += A_shared[...] * ...

What a pass proves: every address, predicate, cast and formula of the kernel, that copies cover what is read, and that
every output element is written (outputs start as NaN). What it cannot see: barriers, races, divergence, alignment, and
whether an asynchronous copy has landed (here it does when it is issued); for those there is the interpreter
(`tvm_ext.verify.simt`). Kernels in which threads exchange *computed* values - through shared memory, shuffles,
allreduce or matrix fragments - have no such sequential form and are refused, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import tvm

from tvm_ext._tvm import (
    AllocBuffer,
    Buffer,
    BufferStore,
    Call,
    Expr,
    For,
    ForKind,
    IterVar,
    Node,
    PrimFunc,
    SBlockRealize,
    Stmt,
    TensorLoad,
    Var,
    ir,
    nodes_in,
    structural_map,
    structural_walk,
    tirx,
)
from tvm_ext.analysis.computations import dtype_of, mentions, substitute
from tvm_ext.analysis.predicates import is_in
from tvm_ext.devices.device_db import device_for_target
from tvm_ext.errors import IllegalRewrite, InputError
from tvm_ext.ir.build_ir import as_index
from tvm_ext.ir.float_ir import is_float, is_number
from tvm_ext.support.arrays import Array
from tvm_ext.tir_passes.pipelining.loops import enclosing_loops
from tvm_ext.tir_passes.pipelining.part_copies import AHEAD
from tvm_ext.verify.simt.values import Value

_EXCHANGES = ("shfl", "allreduce", "mma", "ldmatrix", "ptx", "cp_async", "matrix_sync", "fill_fragment", "storage_sync")
"""What is part of the name of every intrinsic by which threads meet."""


def threads_as_loops(func: PrimFunc) -> PrimFunc:
    """``func`` for a CPU: every thread axis a serial loop, shared and local buffers plain memory.

    Raises IllegalRewrite where threads exchange computed values.
    """
    func = synchronous(func)
    _refuse_exchanges(func)
    # In a stock schedule (blocks) a copy has thread loops of its own, inside the consumer's: it is repeated already.
    body = func.body if isinstance(func.body, SBlockRealize) else _with_repeated_copies(func.body, ())
    body = structural_map(body, [(For, _serial), (tirx.Max, _of_numbers), (tirx.Min, _of_numbers)])
    return func.with_body(_in_plain_memory(body))


def run_threads_as_loops(func: PrimFunc, inputs: Sequence[Array]) -> list[Array]:
    """The outputs of a thread-bound ``func`` whose first parameters are ``inputs``; what they hold before is poison.

    Raises InputError where the inputs do not fit the parameters, IllegalRewrite as `threads_as_loops` does.
    """
    shapes = [tuple(int(size) for size in param.ty.shape) for param in func.params]
    dtypes = [str(param.ty.dtype) for param in func.params]
    check_inputs("main", shapes, dtypes, inputs)
    _, target = device_for_target("llvm")
    library = tvm.compile(threads_as_loops(func).with_attr("global_symbol", "main"), target=target)
    arrays = [np.ascontiguousarray(array).reshape(shape) for array, shape in zip(inputs, shapes, strict=False)]
    rest = list(zip(shapes, dtypes, strict=True))[len(inputs) :]
    tensors = [tvm.runtime.tensor(array) for array in (*arrays, *(poison(shape, dtype) for shape, dtype in rest))]
    library(*tensors)
    return [tensor.numpy() for tensor in tensors[len(inputs) :]]


def _refuse_exchanges(func: PrimFunc) -> None:
    names = [str(getattr(call.op, "name", "")) for call in nodes_in(func.body, Call)]
    met = sorted({name for name in names if any(part in name for part in _EXCHANGES)} - {"tirx.tvm_storage_sync"})
    if met:
        raise IllegalRewrite(f"its threads meet in {', '.join(met)}, which loops cannot run one thread after another")


def _with_repeated_copies(statement: Stmt, threads: tuple[Stmt, ...]) -> Stmt:
    """``statement``, inside the thread loops ``threads``, its fillings of shared memory repeated for all threads."""
    if isinstance(statement, For) and _tag(statement).startswith(("threadIdx", "vthread")):
        return _replace_body(statement, _with_repeated_copies(statement.body, (*threads, statement)))
    stored, read = _touched(statement)
    shared = [buffer for buffer in stored if _is_shared(buffer)]
    if not shared:
        return statement
    if threads and not _needs_others(statement, stored, read):
        return _for_all(threads, statement)
    children = _children(statement)
    if children is None:
        raise IllegalRewrite(
            f"shared buffer {shared[0].name} is filled with values that its threads computed from one another's"
        )
    return children(lambda child: _with_repeated_copies(child, threads))


def _needs_others(statement: Stmt, stored: Sequence[Buffer], read: Sequence[Buffer]) -> bool:
    """Whether it does more than fill shared memory from parameters: reads it, or keeps or uses a thread's registers."""
    allocated = [node.buffer for node in nodes_in(statement, AllocBuffer)]
    kept = [b for b in stored if not _is_shared(b) and not is_in(b, allocated) and not _only_here(b, statement)]
    taken = [b for b in read if b.ty.storage_scope == "local" and not is_in(b, stored)]
    return bool(kept) or bool(taken) or any(_is_shared(buffer) for buffer in read)


def _only_here(buffer: Buffer, statement: Stmt) -> bool:
    """Whether ``statement`` uses registers as a place in passing: it writes them before it reads them.

    A vector on its way from global to shared memory is one; an accumulator, read by its own update, is not.
    """
    if buffer.ty.storage_scope != "local":
        return False
    for node in nodes_in(statement, BufferStore, "pre"):
        if any(load.source.same_as(buffer) for load in nodes_in(node.value, TensorLoad)):
            return False
        if node.buffer.same_as(buffer):
            return True
    return False


def _for_all(threads: Sequence[Stmt], statement: Stmt) -> Stmt:
    """``statement`` once for every point of the thread loops, under new variables."""
    copies = [Var(f"every_{loop.loop_var.name}", loop.loop_var.ty) for loop in threads]
    body = substitute(statement, [(loop.loop_var, copy) for loop, copy in zip(threads, copies, strict=True)])
    for loop, copy in reversed(list(zip(threads, copies, strict=True))):
        body = For(copy, loop.min, loop.extent, ForKind.SERIAL, body)
    return body


def _children(statement: Stmt) -> Callable[[Callable[[Stmt], Stmt]], Stmt] | None:
    """How to rebuild a compound statement from its children; None for one that has none."""
    if isinstance(statement, tirx.SeqStmt):
        return lambda change: tirx.stmt_seq(*map(change, statement.seq))
    if isinstance(statement, For):
        return lambda change: _replace_body(statement, change(statement.body))
    if isinstance(statement, tirx.IfThenElse):
        other = statement.else_case
        return lambda change: tirx.IfThenElse(
            statement.condition, change(statement.then_case), None if other is None else change(other)
        )
    if isinstance(statement, tirx.AttrStmt):
        return lambda change: tirx.AttrStmt(statement.node, statement.attr_key, statement.value, change(statement.body))
    return None


def _replace_body(loop: Stmt, body: Stmt) -> Stmt:
    return For(
        loop.loop_var, loop.min, loop.extent, loop.kind, body, loop.thread_binding, dict(loop.annotations), loop.step
    )


def _serial(loop: For) -> Stmt:
    if loop.kind != ForKind.THREAD_BINDING:
        return loop
    return For(loop.loop_var, loop.min, loop.extent, ForKind.SERIAL, loop.body, None, {}, loop.step)


def _of_numbers(extreme: Expr) -> Expr:
    """As GPUs have it: of a number and a NaN the number. On x86 a NaN in the second place is kept."""
    return tirx.Select(is_number(extreme.b), extreme, extreme.a) if is_float(extreme) else extreme


def _tag(loop: For) -> str:
    return str(loop.thread_binding.thread_tag) if loop.kind == ForKind.THREAD_BINDING else ""


def _touched(statement: Stmt) -> tuple[list[Buffer], list[Buffer]]:
    stored: list[Buffer] = []
    read: list[Buffer] = []
    structural_walk(
        statement,
        [
            (BufferStore, lambda node: None if is_in(node.buffer, stored) else stored.append(node.buffer)),
            (TensorLoad, lambda load: None if is_in(load.source, read) else read.append(load.source)),
        ],
    )
    return stored, read


def _is_shared(buffer: Buffer) -> bool:
    return str(buffer.ty.storage_scope).startswith("shared")


def _in_plain_memory(body: Stmt) -> Stmt:
    """``body`` with every shared or local buffer in the CPU's memory, which has no such scopes."""
    buffers = [node.buffer for node in nodes_in(body, AllocBuffer)]
    return substitute(body, [(own, _plain(own)) for own in buffers if str(own.ty.storage_scope) != "global"])


def _plain(buffer: Buffer) -> Buffer:
    kind = buffer.ty
    return tirx.decl_buffer(list(kind.shape), kind.dtype, buffer.name, data_alignment=kind.data_alignment)


def poison(shape: Sequence[int], dtype: str) -> Array:
    """An array that a kernel must overwrite: NaN, the lowest integer, or True."""
    kind = np.dtype(dtype).kind
    value = np.nan if kind == "f" else (True if kind == "b" else np.iinfo(dtype).min if kind == "i" else 255)
    return np.full(tuple(shape), value, dtype)


def check_inputs(name: str, shapes: Sequence[Sequence[int]], dtypes: Sequence[str], inputs: Sequence[Array]) -> None:
    """Raises InputError for an input whose shape, element count or type is not the parameter's."""
    for position, array in enumerate(inputs):
        shape, dtype = tuple(shapes[position]), dtypes[position]
        if str(array.dtype) != dtype or prod(array.shape) != prod(shape):
            raise InputError(
                f"input {position} of function {name} should be {dtype} of shape {list(shape)}, "
                f"but is {array.dtype} of shape {list(array.shape)}.",
                "pass arrays in the order of the function's parameters",
            )


# --- Asynchronous copies as the plain ones that they come to, where nothing is concurrent -----------------------------
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
