"""Statements that load by way of a thread's own registers, made one: what fills these belongs to the load.

``AllocBuffer(r); for v: r[v] = A[..]; for e: S[..] = r[e]`` are three statements of a loop's body where a copy takes
one round, and one (a loop over the rounds) where it takes several. Detection asks which statement loads S; here that is
one statement in both cases, held together by an attribute until the function is lowered.
"""

from __future__ import annotations

from tvm_ext._tvm import AllocBuffer, Buffer, Stmt, structural_map, tirx

from .loops import accesses_of, is_register, is_shared

TOGETHER = "tvm_ext.loaded_together"
"""Attribute around the statements that were made one."""


def group_loads(body: Stmt) -> Stmt:
    """``body``, its loads by way of registers each one statement."""
    return structural_map(ungroup_loads(body), (tirx.SeqStmt, _grouped))


def ungroup_loads(body: Stmt) -> Stmt:
    """The inverse of `group_loads`."""
    return structural_map(body, (tirx.AttrStmt, lambda node: node.body if node.attr_key == TOGETHER else node))


def _grouped(sequence: Stmt) -> Stmt:
    statements = list(sequence.seq)
    for allocation in list(statements):
        if isinstance(allocation, AllocBuffer) and is_register(allocation.buffer):
            statements = _with_group(statements, allocation)
    if len(statements) == len(sequence.seq):
        return sequence
    return statements[0] if len(statements) == 1 else tirx.stmt_seq(*statements)


def _with_group(statements: list[Stmt], allocation: Stmt) -> list[Stmt]:
    """``statements`` with the ``allocation`` and all that uses it as one, if that is a load of shared memory."""
    register = allocation.buffer
    users = [position for position, statement in enumerate(statements) if _uses(statement, register)]
    if len(users) < 2 or users[-1] - users[0] != len(users) - 1:
        return statements
    members = statements[users[0] : users[-1] + 1]
    if not _is_load(members, register):
        return statements
    zero = tirx.IntImm("int32", 0)
    one = tirx.AttrStmt(zero, TOGETHER, zero, tirx.stmt_seq(allocation, *members))
    rest = [*statements[: users[0]], one, *statements[users[-1] + 1 :]]
    return [statement for statement in rest if not statement.same_as(allocation)]


def _uses(statement: Stmt, register: Buffer) -> bool:
    return any(access.buffer is not None and access.buffer.same_as(register) for access in accesses_of(statement))


def _is_load(statements: list[Stmt], register: Buffer) -> bool:
    """Whether ``statements`` write ``register`` and one buffer in shared memory, and read no shared memory."""
    accesses = [access for statement in statements for access in accesses_of(statement)]
    if any(access.buffer is None or not access.is_known for access in accesses):
        return False
    written = [access.buffer for access in accesses if access.writes and not access.buffer.same_as(register)]
    reads_shared = any(access.reads and is_shared(access.buffer) for access in accesses)
    return bool(written) and not reads_shared and all(is_shared(b) and b.same_as(written[0]) for b in written)
