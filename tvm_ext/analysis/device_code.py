"""Small questions about device functions: what stock TVM's lowering leaves of a thread-bound PrimFunc."""

from __future__ import annotations

from tvm_ext._tvm import Expr, PrimFunc, Var, llvm_get_intrinsic_name, nodes_in, tirx
from tvm_ext.errors import InputError


def split_dtype(name: str) -> tuple[str, int]:
    """``"float16x4"`` as ("float16", 4); a scalar has 1."""
    base, separator, lanes = name.partition("x")
    return (base, int(lanes)) if separator else (name, 1)


def constant_int(expr: Expr, what: str) -> int:
    """The value of an integer constant; raises InputError for anything else."""
    value = getattr(expr, "value", None)
    if isinstance(value, int):
        return int(value)
    raise InputError(f"{what} is not a constant: {expr}")


def op_name(expr: Expr) -> str:
    """The name of a call's operator, ``"tirx.exp"``."""
    return str(getattr(expr.op, "name", expr.op))


def pointer_variable(expr: Expr) -> Var:
    """The buffer or pointer variable behind ``buffer.data`` or a bare pointer."""
    if type(expr).__name__ == "Call" and op_name(expr) == "tirx.buffer_data":
        return expr.args[0]
    if type(expr).__name__ == "Var":
        return expr
    raise InputError(f"the pointer comes from elsewhere: {expr}")


def thread_extents(function: PrimFunc) -> dict[str, int]:
    """The launch of a device function: thread tag to extent."""
    found: dict[str, int] = {}
    for node in nodes_in(function.body, tirx.AttrStmt, "pre"):
        if str(node.attr_key) == "thread_extent":
            tag = str(node.node.thread_tag)
            found[tag] = max(found.get(tag, 1), constant_int(node.value, "the extent of a launch"))
    return found


NAMED_CALLS = (
    "tirx.call_pure_extern", "tirx.call_extern", "tirx.call_llvm_pure_intrin", "tirx.call_llvm_intrin",
    "tirx.cuda.func_call",
)  # fmt: skip
"""Calls whose first argument is the name of what is called."""


def called_name(call: Expr) -> str:
    """The function's name in a call of one by its name, "" in another call; LLVM's are called by number."""
    if op_name(call) not in NAMED_CALLS or not len(call.args):
        return ""
    value = getattr(call.args[0], "value", "")
    return str(llvm_get_intrinsic_name(int(value))) if isinstance(value, int) else str(value)
