"""Statements of a device function as closures that change a `Engine`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tvm_ext._tvm import Stmt, tirx
from tvm_ext.analysis.device_code import constant_int, op_name, pointer_variable, split_dtype
from tvm_ext.errors import InputError
from tvm_ext.verify.simt.values import Value

from .compile_expr import buffer_index, compile_expression
from .local_memory import LocalMemory, View
from .machine import Engine, Run
from .memory import SharedMemory
from .number_types import storage_dtype
from .scope import BufferBinding, Scope
from .values import Tainted, is_uniform, strip

FRAGMENT_SCOPES = ("wmma.matrix_a", "wmma.matrix_b", "wmma.accumulator")


def compile_statement(scope: Scope, statement: Stmt) -> Run:
    """The closure of ``statement``; raises InputError for what the interpreter does not know."""
    kind = type(statement).__name__
    maker = _MAKERS.get(kind)
    if maker is None:
        raise InputError(f"{scope.kernel}: the interpreter does not know the statement {kind}")
    scope.statement = statement
    return maker(scope, statement)


def _sequence(scope: Scope, statement: Stmt) -> Run:
    parts = [compile_statement(scope, part) for part in statement.seq]

    def run(m: Engine) -> None:
        for part in parts:
            part(m)

    return run


def _counted(scope: Scope, run: Run) -> Run:
    """``run``, which counts the floating-point operations that were compiled since ``scope.flops`` was zeroed."""
    flops, scope.flops = scope.flops, 0
    if not flops:
        return run

    def both(m: Engine) -> None:
        m.record.flops += flops * m.mask.count
        run(m)

    return both


def _bind(scope: Scope, statement: Stmt) -> Run:
    value, slot = compile_expression(scope, statement.value), scope.define(statement.var)

    def run(m: Engine) -> None:
        result = value(m)
        plain = strip(result)
        if isinstance(plain, np.ndarray) and plain.base is not None:  # a register, which may change
            result = Tainted(plain.copy(), result.origin.copy()) if type(result) is Tainted else plain.copy()
        m.env[slot] = result

    return _counted(scope, run)


def _store(scope: Scope, statement: Stmt) -> Run:
    binding = scope.buffer(statement.buffer)
    index, value = buffer_index(scope, binding, statement.indices), compile_expression(scope, statement.value)
    ramp = statement.indices[0]
    contiguous = not isinstance(ramp, tirx.Ramp) or getattr(ramp.stride, "value", 0) == 1
    view, slot = View(site=scope.site(binding.name), dtype=binding.dtype, vector=contiguous), binding.slot
    return _counted(scope, lambda m: m.memory[slot].write(m, view, index(m), value(m)))


def _evaluate(scope: Scope, statement: Stmt) -> Run:
    call = statement.value
    if type(call).__name__ != "Call":
        return lambda m: None
    effect = scope.effects.get(op_name(call))
    if effect is not None:
        run: Run = effect(scope, call)
        return run
    value = compile_expression(scope, call)

    def evaluate(m: Engine) -> None:
        value(m)

    return _counted(scope, evaluate)


def _if(scope: Scope, statement: Stmt) -> Run:
    scope.flops = 0
    test, site = compile_expression(scope, statement.condition), scope.site()
    then = compile_statement(scope, statement.then_case)
    other = compile_statement(scope, statement.else_case) if statement.else_case is not None else None

    def run(m: Engine) -> None:
        which = m.decided(test(m), site, "a condition")
        if is_uniform(which):
            if which:
                then(m)
            elif other is not None:
                other(m)
            return
        taken = m.restrict(which)
        if taken.count == m.mask.count:
            then(m)
            return
        rest = m.restrict(~which) if other is not None else None
        if taken.count:
            with m.masked(taken):
                then(m)
        if other is not None and rest is not None and rest.count:
            with m.masked(rest):
                other(m)

    return run


def _for(scope: Scope, statement: Stmt) -> Run:
    first, extent = compile_expression(scope, statement.min), compile_expression(scope, statement.extent)
    step = 1 if statement.step is None else constant_int(statement.step, "a loop's step")
    slot, site, name = scope.define(statement.loop_var), scope.site(), str(statement.loop_var.name)
    body, identity = compile_statement(scope, statement.body), site.number

    def run(m: Engine) -> None:
        begin = m.decided(first(m), site, "a loop's bounds")
        count = m.decided(extent(m), site, "a loop's bounds")
        if is_uniform(count):
            for i in range(int(count)):
                _iterate(m, i, begin + i * step)
            return
        active = count[m.active_lanes()]
        for i in range(int(active.max()) if len(active) else 0):
            mask = m.restrict(count > i)
            with m.masked(mask):
                _iterate(m, i, begin + i * step)

    def _iterate(m: Engine, i: int, value: Value) -> None:
        m.env[slot] = value
        m.loops.append((identity, name, i))
        body(m)
        m.loops.pop()

    return run


def _while(scope: Scope, statement: Stmt) -> Run:
    test, site = compile_expression(scope, statement.condition), scope.site()
    body = compile_statement(scope, statement.body)

    def run(m: Engine) -> None:
        iteration, mask = 0, m.mask
        while mask.count:
            with m.masked(mask):
                which = m.decided(test(m), site, "a condition")
                if is_uniform(which):
                    if not which:
                        return
                else:
                    mask = m.restrict(which)
            if not mask.count:
                return
            with m.masked(mask):
                m.loops.append((site.number, "while", iteration))
                body(m)
                m.loops.pop()
            iteration += 1

    return run


def _attribute(scope: Scope, statement: Stmt) -> Run:
    key = str(statement.attr_key)
    if key == "thread_extent":
        return _thread(scope, statement)
    if key == "async_commit_queue_scope":
        body = compile_statement(scope, statement.body)

        def commit(m: Engine) -> None:
            body(m)
            m.queue.commit(m.mask.flags)

        return commit
    if key == "async_wait_queue_scope":
        inner = statement.body
        site = scope.site()
        left = compile_expression(scope, inner.value)
        body = compile_statement(scope, inner.body)
        wait = scope.wait

        def run(m: Engine) -> None:
            wait(m, int(m.decided(left(m), site, "a wait count")))
            body(m)

        return run
    return compile_statement(scope, statement.body)


def _thread(scope: Scope, statement: Stmt) -> Run:
    tag = str(statement.node.thread_tag)
    slot = scope.define(statement.node.var)
    body = compile_statement(scope, statement.body)

    def run(m: Engine) -> None:
        m.env[slot] = m.lanes.coordinate(tag)
        body(m)

    return run


def _allocate(scope: Scope, statement: Stmt) -> Run:
    buffer = statement.buffer
    where, name = str(buffer.ty.storage_scope), str(buffer.name)
    base, lanes = split_dtype(str(buffer.ty.dtype))
    dtype, size = storage_dtype(base), lanes
    for extent in buffer.ty.shape:
        size *= constant_int(extent, f"the size of {name}")
    slot = scope.new_memory()
    scope.bind_buffer(buffer, BufferBinding(slot=slot, name=name, dtype=dtype, lanes=lanes, scope=where))
    if where.startswith("shared"):
        scope.note_granule(slot, dtype.itemsize, is_allocation=True)
        scope.shared_bytes += size * dtype.itemsize

        def share(m: Engine) -> None:
            if m.memory[slot] is None:
                m.memory[slot] = SharedMemory(size * dtype.itemsize, scope.granule(slot), len(m.lanes.blocks))

        return share
    if where in FRAGMENT_SCOPES:
        return lambda m: m.memory.__setitem__(slot, {})  # matrices by index, made when they are written
    if where in ("local", "warp", "global", ""):

        def keep(m: Engine) -> None:
            m.memory[slot] = LocalMemory(size, dtype, m.lanes.count)

        return keep
    raise InputError(f"{scope.kernel}: {name} is in {where!r}, a memory that the interpreter does not know")


def _declare(scope: Scope, statement: Stmt) -> Run:
    """A buffer that is another view of memory: of a parameter, or of the merged shared allocation."""
    buffer, data = statement.buffer, statement.data
    if data is None:
        raise InputError(f"{scope.kernel}: {buffer.name} is declared without memory")
    source = pointer_variable(data)
    base = scope.buffer(source)
    name, lanes = split_dtype(str(buffer.ty.dtype))
    dtype = storage_dtype(name)
    binding = BufferBinding(slot=base.slot, name=str(buffer.name), dtype=dtype, lanes=lanes, scope=base.scope)
    scope.bind_buffer(buffer, binding)
    scope.note_granule(base.slot, dtype.itemsize, is_allocation=False)
    return lambda m: None


_MAKERS: dict[str, Callable[[Scope, Any], Run]] = {
    "SeqStmt": _sequence,
    "Bind": _bind,
    "BufferStore": _store,
    "Evaluate": _evaluate,
    "IfThenElse": _if,
    "For": _for,
    "While": _while,
    "AttrStmt": _attribute,
    "AllocBuffer": _allocate,
    "DeclBuffer": _declare,
    "AssertStmt": lambda scope, statement: lambda m: None,
}
