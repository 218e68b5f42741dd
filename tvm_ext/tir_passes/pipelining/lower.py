"""The primitives as instructions of a target.

====================  ================================  ====================
primitive             cp.async (sm_80 and later)        through registers
====================  ================================  ====================
producer_acquire      a barrier, where what runs before the pipeline used the memory; else nothing
producer_commit       cp.async.commit_group             nothing
consumer_wait n       cp.async.wait_group n; barrier    barrier
consumer_release      nothing: the barrier of the next wait says it
====================  ================================  ====================
"""

from __future__ import annotations

from tvm_ext._tvm import Call, Stmt, ir, structural_map, tirx

from .primitives import read_primitive

COMMIT, WAIT, BARRIER = "tirx.ptx.cp_async_commit_group", "tirx.ptx.cp_async_wait_group", "tirx.tvm_storage_sync"


def lower_primitives(body: Stmt, asynchronous: dict[int, bool], scopes: dict[int, str]) -> Stmt:
    """``body`` with every primitive lowered; by pipeline number, whether it uses cp.async, and its memory's scope."""

    def visit(statement: Stmt) -> Stmt:
        found = read_primitive(statement)
        if found is None:
            return statement
        kind, number, argument = found
        if kind == "producer_commit" and asynchronous[number]:
            return _ptx(COMMIT, "commit_group")
        if kind == "consumer_wait":
            barrier = _barrier(scopes[number])
            return tirx.stmt_seq(_ptx(WAIT, "wait_group", argument), barrier) if asynchronous[number] else barrier
        if kind == "producer_acquire" and argument:
            return _barrier(scopes[number])
        return tirx.Evaluate(tirx.IntImm("int32", 0))

    return flattened(structural_map(body, (tirx.Evaluate, visit)))


def flattened(body: Stmt) -> Stmt:
    """``body`` without sequences in sequences and without statements that do nothing."""

    def visit(statement: Stmt) -> Stmt:
        kept = [s for s in statement.seq if not (isinstance(s, tirx.Evaluate) and isinstance(s.value, tirx.IntImm))]
        return tirx.stmt_seq(*kept) if len(kept) > 1 else kept[0] if kept else tirx.Evaluate(tirx.IntImm("int32", 0))

    return structural_map(body, (tirx.SeqStmt, visit))


def _barrier(scope: str) -> Stmt:
    return tirx.Evaluate(Call(ir.Op.get(BARRIER), [ir.StringImm(scope)], ret_ty=ir.PrimType("int32")))


def _ptx(name: str, instruction: str, *operands: int) -> Stmt:
    """``cp.async.<instruction>``: TVM's PTX operators take operands, then modifiers, then flags (none here)."""
    words = [ir.StringImm(word) for word in ("async", instruction, "")]
    values = [*(tirx.IntImm("int32", operand) for operand in operands), *words]
    return tirx.Evaluate(Call(ir.Op.get(name), values, ret_ty=ir.PrimType("void")))
