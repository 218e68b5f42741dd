"""What in a loop keeps its loads where they are: barriers, asynchronous copies, calls of unknown effect."""

from __future__ import annotations

from tvm_ext._tvm import BufferStore, Call, Node, Stmt, nodes_in, tirx

from .loops import POINTERS, op_name

HARMLESS_CALLS = frozenset({*POINTERS, "tirx.tvm_access_ptr"})
"""Calls as statements that touch their buffers and nothing else."""

TEXT_LENGTH = 90  # a choice: characters of a statement in a message, one line

SYNCHRONISATION = ("sync", "cp_async", "mbarrier", "async_")


def side_effect_in(body: Stmt) -> str | None:
    """What in ``body`` may depend on the order of loads: barriers, asynchronous copies, calls of unknown effect."""
    for node in nodes_in(body, (tirx.AttrStmt, tirx.Evaluate, *_WAYS_OUT), "pre"):
        if isinstance(node, _WAYS_OUT):
            return f"can be left early by {type(node).__name__.lower()}"
        if isinstance(node, tirx.AttrStmt) and str(node.attr_key).startswith("async_"):
            return "has asynchronous copies already"
        if isinstance(node, tirx.Evaluate) and isinstance(node.value, Call):
            name = op_name(node.value)
            synchronises = any(word in name for word in SYNCHRONISATION)
            if synchronises and name not in HARMLESS_CALLS - {"tirx.s_tir.cp_async_raw"}:
                return f"synchronises by itself ({name.removeprefix('tirx.')})"
            if name not in HARMLESS_CALLS:
                return f"has a side effect: {text_of(node)}"
    return None


_WAYS_OUT = (tirx.stmt.Break, tirx.stmt.Continue, tirx.stmt.Return)


def text_of(node: Node) -> str:
    """A statement or an expression on one line, shortened."""
    if isinstance(node, BufferStore):  # its own text declares the buffers first
        node = f"{node.buffer.name}[{node.indices[0]}] = {node.value}"
    elif isinstance(node, tirx.Evaluate):
        node = node.value
    text = " ".join(str(node).split())
    return text if len(text) <= TEXT_LENGTH else text[: TEXT_LENGTH - 3] + "..."
