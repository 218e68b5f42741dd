"""Temporaries of one element for each SIMD lane, for parts of a long value. LLVM makes registers of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tvm_ext._tvm import (
    IF_THEN_ELSE,
    Buffer,
    BufferStore,
    Call,
    Expr,
    For,
    ForKind,
    Stmt,
    nodes_in,
    structural_map,
    structural_mutate,
    tirx,
)
from tvm_ext.analysis.computations import dtype_of
from tvm_ext.ir.build_ir import allocate, load, new_buffer, sequence, store


@dataclass(frozen=True, slots=True)
class Temporaries:
    """Those of one loop over lanes, or of one store outside of such loops."""

    lanes: int
    lane: Expr
    buffers: list[Buffer] = field(default_factory=list)

    def stored(self, value: Expr, before: list[Stmt], prefix: str) -> Expr:
        """``value`` as a load of a new temporary, ``<prefix><number>``; its store is appended to ``before``."""
        buffer = new_buffer((self.lanes,), dtype_of(value), f"{prefix}{len(self.buffers)}", "local")
        self.buffers.append(buffer)
        before.append(store(buffer, value, [self.lane]))
        return load(buffer, [self.lane])


def rewrite_stores(node: Stmt, rewrite: Callable[[BufferStore, Temporaries], Stmt]) -> Stmt:
    """``node``, a statement, with every store as ``rewrite(store, temporaries)`` has it, and those allocated."""

    def loop(node: For, mutator: Any) -> Stmt:
        extent = getattr(node.extent, "value", None)
        if node.kind != ForKind.VECTORIZED or extent is None:
            return mutator.default_mutate(node)
        return _rewritten(node, rewrite, Temporaries(int(extent), node.loop_var - node.min))

    def alone(node: BufferStore, _: Any) -> Stmt:
        return _rewritten(node, rewrite, Temporaries(1, tirx.IntImm("int64", 0)))

    return structural_mutate(node, [(For, loop), (BufferStore, alone)])


def _rewritten(statement: Stmt, rewrite: Callable[[BufferStore, Temporaries], Stmt], temporaries: Temporaries) -> Stmt:
    new = structural_map(statement, (BufferStore, lambda node: rewrite(node, temporaries)))
    return sequence(*map(allocate, temporaries.buffers), new) if temporaries.buffers else statement


def may_be_parted(node: BufferStore) -> bool:
    """Whether parts of what is stored may be computed first: conditions guard loads, vectors have lanes already."""
    guards = (call.op.same_as(IF_THEN_ELSE) for call in nodes_in(node.value, Call))
    return "x" not in dtype_of(node.value) and not any(guards)
