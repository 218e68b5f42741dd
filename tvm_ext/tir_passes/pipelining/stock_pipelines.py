"""Pipelines that somebody else has put into a kernel: how they show, and a schedule without stock TVM's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tvm_ext._tvm import Call, For, PrimFunc, SBlock, Stmt, structural_map, structural_walk, tirx

from .loops import op_name

LOOP_ANNOTATIONS = ("software_pipeline_stage", "software_pipeline_order", "software_pipeline_async_stages")
BLOCK_ANNOTATIONS = ("double_buffer_scope", "tirx.manifest_shared_memory_local_stage")
"""What dlight writes on a copy to shared memory: two versions, by way of a thread's registers."""


def already_pipelined(func: PrimFunc) -> str | None:
    """What shows that ``func`` (scheduled or not) has been pipelined by someone else; None where nothing does."""
    found: list[str] = []

    def loop(node: For) -> None:
        if any(key in node.annotations for key in LOOP_ANNOTATIONS):
            found.append(f"loop {node.loop_var.name} has stock TVM's pipeline annotations")

    def attribute(node: Stmt) -> None:
        if str(node.attr_key) in ("async_scope", "async_commit_queue_scope", "async_wait_queue_scope"):
            found.append("it has asynchronous copies in groups")

    def call(node: Call) -> None:
        if "cp_async" in op_name(node) or "mbarrier" in op_name(node):
            found.append(f"it calls {op_name(node).removeprefix('tirx.')}")

    def block(node: SBlock) -> None:
        if any(key in node.annotations for key in LOOP_ANNOTATIONS):
            found.append(f"block {node.name_hint} has stock TVM's pipeline annotations")

    structural_walk(func.body, [(For, loop), (tirx.AttrStmt, attribute), (Call, call), (SBlock, block)], order="pre")
    return found[0] if found else None


def without_stock_pipelines(func: PrimFunc) -> PrimFunc:
    """The scheduled ``func`` without stock TVM's pipeline annotations, which are not carried out yet."""

    def loop(node: For) -> Stmt:
        kept = _without(node.annotations, LOOP_ANNOTATIONS)
        if len(kept) == len(node.annotations):
            return node
        return For(node.loop_var, node.min, node.extent, node.kind, node.body, node.thread_binding, kept, node.step)

    def block(node: SBlock) -> Stmt:
        kept = _without(node.annotations, (*LOOP_ANNOTATIONS, *BLOCK_ANNOTATIONS))
        if len(kept) == len(node.annotations):
            return node
        return SBlock(
            node.iter_vars, node.reads, node.writes, node.name_hint, node.body, node.init, node.alloc_buffers,
            node.match_buffers, kept,
        )  # fmt: skip

    return func.with_body(structural_map(func.body, [(For, loop), (SBlock, block)]))


def _without(annotations: Any, names: tuple[str, ...]) -> Mapping[str, Any]:
    return {key: annotations[key] for key in annotations.keys() if key not in names}  # noqa: SIM118
