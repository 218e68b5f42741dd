"""What in a loop keeps its loads where they are: barriers, asynchronous copies, calls of unknown effect."""

from __future__ import annotations

from tvm_ext._tvm import BufferStore, Call, Node, Stmt, structural_walk, tirx

from .loops import POINTERS, op_name

HARMLESS_CALLS = frozenset({*POINTERS, "tirx.tvm_access_ptr"})
"""Calls as statements that touch their buffers and nothing else."""

TEXT_LENGTH = 90  # a choice: characters of a statement in a message, one line

SYNCHRONISATION = ("sync", "cp_async", "mbarrier", "async_")


def side_effect_in(body: Stmt) -> str | None:
    """What in ``body`` may depend on the order of loads: barriers, asynchronous copies, calls of unknown effect."""
    found: list[str] = []

    def attribute(node: Node) -> None:
        if str(node.attr_key).startswith("async_"):
            found.append("has asynchronous copies already")

    def evaluate(node: Node) -> None:
        call = node.value
        if not isinstance(call, Call):
            return
        name = op_name(call)
        if any(word in name for word in SYNCHRONISATION) and name not in HARMLESS_CALLS - {"tirx.s_tir.cp_async_raw"}:
            found.append(f"synchronises by itself ({name.removeprefix('tirx.')})")
        elif name not in HARMLESS_CALLS:
            found.append(f"has a side effect: {text_of(node)}")

    def leave(node: Node) -> None:
        found.append(f"can be left early by {type(node).__name__.lower()}")

    structural_walk(
        body,
        [(tirx.AttrStmt, attribute), (tirx.Evaluate, evaluate), *((kind, leave) for kind in _WAYS_OUT)],
        order="pre",
    )
    return found[0] if found else None


_WAYS_OUT = (tirx.stmt.Break, tirx.stmt.Continue, tirx.stmt.Return)


def text_of(node: Node) -> str:
    """A statement or an expression on one line, shortened."""
    if isinstance(node, BufferStore):  # its own text declares the buffers first
        node = f"{node.buffer.name}[{node.indices[0]}] = {node.value}"
    elif isinstance(node, tirx.Evaluate):
        node = node.value
    text = " ".join(str(node).split())
    return text if len(text) <= TEXT_LENGTH else text[: TEXT_LENGTH - 3] + "..."
