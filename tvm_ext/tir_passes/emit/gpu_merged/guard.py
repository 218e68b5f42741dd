"""Lets only some threads of a block run a body, while all of them meet at its barriers (Rammer, §4.1.3).

A thread that left early would be missed at the next barrier. So the condition is put around what lies between barriers,
and loops that hold barriers are run by all. Worked example:

    for k in range(8):                  for k in range(8):
        shared[t] = a[k, t]      ->         if t < 32: shared[t] = a[k, t]
        barrier                             barrier
        c += shared[t] * ...                if t < 32: c += shared[t] * ...
"""

from __future__ import annotations

from tvm_ext._tvm import AllocBuffer, Call, DeclBuffer, Expr, For, Stmt, nodes_in, tirx
from tvm_ext.analysis.computations import dtype_of
from tvm_ext.analysis.device_code import op_name
from tvm_ext.analysis.predicates import reads_memory
from tvm_ext.errors import IllegalRewrite
from tvm_ext.ir.build_ir import sequence

BARRIER = "tirx.tvm_storage_sync"


def guarded(body: Stmt, active: Expr) -> Stmt:
    """``body`` for threads for which ``active`` holds; all threads of the block pass its barriers.

    Raises IllegalRewrite where what decides about a barrier is read from memory: only active threads know it.
    """
    if not holds_barrier(body):
        return tirx.IfThenElse(active, body, None)
    if isinstance(body, tirx.SeqStmt):
        return _sequence(list(body.seq), active)
    if isinstance(body, For):
        _check_known(body.extent, "the bounds of a loop")
        return For(
            body.loop_var, body.min, body.extent, body.kind, guarded(body.body, active), body.thread_binding,
            dict(body.annotations), step=body.step,
        )  # fmt: skip
    if isinstance(body, tirx.AttrStmt):
        return tirx.AttrStmt(body.node, body.attr_key, body.value, guarded(body.body, active))
    if isinstance(body, tirx.IfThenElse):
        _check_known(body.condition, "a condition")
        other = None if body.else_case is None else guarded(body.else_case, active)
        return tirx.IfThenElse(body.condition, guarded(body.then_case, active), other)
    if isinstance(body, tirx.Evaluate):
        return body  # the barrier itself
    raise IllegalRewrite(f"a barrier lies inside of a {type(body).__name__}")


def holds_barrier(statement: Stmt) -> bool:
    """Whether all threads of the block meet in ``statement``."""
    barriers = (call for call in nodes_in(statement, Call) if op_name(call) == BARRIER)
    return any(str(call.args[0].value) != "warp" for call in barriers)


def _sequence(statements: list[Stmt], active: Expr) -> Stmt:
    """Statements one after another: what declares a name stays outside of conditions, which would end its life."""
    result: list[Stmt] = []
    pending: list[Stmt] = []

    def flush() -> None:
        if pending:
            result.append(tirx.IfThenElse(active, sequence(*pending), None))
            pending.clear()

    for statement in statements:
        if _declares(statement):
            result.append(statement)
        elif isinstance(statement, tirx.Bind):
            flush()
            result.append(_bind(statement, active))
        elif holds_barrier(statement):
            flush()
            result.append(guarded(statement, active))
        else:
            pending.append(statement)
    flush()
    return sequence(*result)


def _declares(statement: Stmt) -> bool:
    """Whether it declares a name and does nothing else; matrices of fragments are declared under attributes."""
    while isinstance(statement, tirx.AttrStmt):
        statement = statement.body
    return isinstance(statement, AllocBuffer | DeclBuffer)


def _bind(statement: Stmt, active: Expr) -> Stmt:
    """The name for all threads; what it is read from, for active ones alone."""
    if not reads_memory(statement.value):
        return statement
    kind = dtype_of(statement.var)
    if "x" in kind or kind == "handle":
        raise IllegalRewrite(f"it keeps {kind} from memory across a barrier")
    return tirx.Bind(statement.var, tirx.if_then_else(active, statement.value, tirx.const(0, kind)))


def _check_known(value: Expr, what: str) -> None:
    if reads_memory(value):
        raise IllegalRewrite(f"{what} around a barrier is read from memory")
