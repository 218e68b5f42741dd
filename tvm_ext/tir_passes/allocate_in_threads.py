"""Gives each thread registers of its own where a kernel that stock TVM wrote asks for them outside of its launch.

Its scans for GPUs (TVM 0.27, `exclusive_scan`) do: the host then allocates one element, and all threads of the launch
write to it. Worked example: where thread 5 adds up columns 10 and 11, its place 10 was overwritten by thread 6's 12.
"""

from __future__ import annotations

from tvm_ext._tvm import AllocBuffer, IRModule, PassContext, PrimFunc, Stmt, prim_func_pass, structural_map, tirx
from tvm_ext.ir.build_ir import sequence


@prim_func_pass(opt_level=0, name="tvm_ext.AllocateInThreads")
class AllocateInThreads:
    """Move every allocation of local memory that stands beside one launch of threads into that launch."""

    def transform_function(self, func: PrimFunc, _mod: IRModule, _ctx: PassContext) -> PrimFunc:
        return func.with_body(structural_map(func.body, (tirx.SeqStmt, _within)))


def _within(statements: tirx.SeqStmt) -> Stmt:
    parts = list(statements.seq)
    local = [item for item in parts if isinstance(item, AllocBuffer) and item.buffer.scope() == "local"]
    launches = [item for item in parts if _is_launch(item)]
    if not local or len(launches) != 1:
        return statements
    rest = [item for item in parts if not any(item.same_as(one) for one in local)]
    return sequence(*(_with_front(item, local) if item.same_as(launches[0]) else item for item in rest))


def _is_launch(statement: Stmt) -> bool:
    return isinstance(statement, tirx.AttrStmt) and statement.attr_key == "thread_extent"


def _with_front(launch: Stmt, local: list[Stmt]) -> Stmt:
    """``launch`` whose threads begin with ``local``; of a launch along several axes, inside all of them."""
    if not _is_launch(launch):
        return sequence(*local, launch)
    body = _with_front(launch.body, local)
    return tirx.AttrStmt(launch.node, launch.attr_key, launch.value, body, launch.span)
