"""Mutants of a lowered device function: small mistakes of the kinds that GPU code suffers from.

A verifier is worth what it catches. Each mutant has one change: a barrier, wait, commit, store or predicate gone, a
barrier that half of the threads reach, an index, wait count or loop extent off by one, thread indices exchanged. Not
every mutant is wrong: two barriers may do one's work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from tvm_ext._tvm import IF_THEN_ELSE, BufferStore, Call, For, TensorLoad, structural_map, structural_walk, tirx
from tvm_ext.analysis.computations import mentions, substitute

Node = Any
Change = tuple[str, str, Node]  # (kind, what was done, the node that replaces the old one)

KINDS = (
    "remove_barrier", "diverge_barrier", "change_wait", "drop_commit", "shift_index", "shift_vector", "swap_threads",
    "drop_predicate", "change_extent", "drop_store", "drop_instruction", "shift_shuffle",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Mutant:
    """A function with one change of ``kind`` (one of `KINDS`), which ``change`` describes.

    It is made when it is asked for: of most mutants a test needs no more than their number.
    """

    kind: str
    change: str
    make: Callable[[], Any]

    @property
    def function(self) -> Any:
        return self.make()


def mutants(function: Any) -> Iterator[Mutant]:
    """All mutants of the device PrimFunc ``function``, in the order of its statements. ``function`` stays as it is."""
    rules = _Rules(function.body)
    for position, changes in enumerate(_found(function.body, rules)):
        for number, (kind, change, _) in enumerate(changes):
            yield Mutant(kind=kind, change=change, make=partial(_changed, function, rules, position, number))


def _changed(function: Any, rules: _Rules, position: int, number: int) -> Any:
    return function.with_body(_replaced(function.body, rules, position, number))


def _callbacks(visit: Callable[[Node], Node]) -> list[tuple[Any, Any]]:
    types = (TensorLoad, BufferStore, Call, For, tirx.AttrStmt, tirx.IfThenElse, tirx.Evaluate)
    return [(kind, visit) for kind in types]


def _found(body: Node, rules: _Rules) -> list[list[Change]]:
    """What can be done to each node, in the order in which `_replaced` comes to it."""
    found: list[list[Change]] = []

    def visit(node: Node) -> Node:
        found.append(rules.changes(node))
        return node

    structural_map(body, _callbacks(visit))
    return found


def _replaced(body: Node, rules: _Rules, position: int, number: int) -> Node:
    count = -1

    def visit(node: Node) -> Node:
        nonlocal count
        count += 1
        return rules.changes(node)[number][2] if count == position else node

    return structural_map(body, _callbacks(visit))


# Which arguments of calls are offsets in elements, or strides, and of what.
_OFFSETS = {
    "tirx.s_tir.cp_async_raw": {1: "destination", 3: "source"},
    "tirx.ptx_legacy.ldmatrix": {4: "registers", 6: "row address"},
    "tirx.ptx_legacy.mma": {7: "registers of a", 9: "registers of b", 11: "registers of c"},
    "tirx.tvm_load_matrix_sync": {6: "stride"},
    "tirx.tvm_store_matrix_sync": {6: "stride"},
}
_SHUFFLES = tuple(f"tirx.cuda.__shfl_{kind}sync" for kind in ("", "down_", "up_", "xor_"))
_BARRIER = "tirx.tvm_storage_sync"
_INSTRUCTIONS = (*_OFFSETS, "tirx.tvm_fill_fragment", "tirx.tvm_mma_sync")


class _Rules:
    """What can go wrong at a node. The threads of the function are those of ``body``'s thread extents."""

    def __init__(self, body: Node) -> None:
        self._threads: list[tuple[Any, Any]] = []  # (variable, extent)

        def visit(node: Node) -> None:
            if node.attr_key == "thread_extent" and node.node.thread_tag.startswith("threadIdx"):
                self._threads.append((node.node.var, node.value))

        structural_walk(body, [(tirx.AttrStmt, visit)], order="pre")

    def changes(self, node: Node) -> list[Change]:
        if isinstance(node, TensorLoad):
            return list(self._of_access(node, node.source, lambda index: tirx.BufferLoad(node.source, [index])))
        if isinstance(node, BufferStore):
            gone = ("drop_store", f"no store to {node.buffer.name}", tirx.Evaluate(0))
            return [gone, *self._of_access(node, node.buffer, lambda i: BufferStore(node.buffer, node.value, [i]))]
        if isinstance(node, Call):
            return list(self._of_call(node))
        if isinstance(node, For):
            return list(_of_loop(node))
        if isinstance(node, tirx.IfThenElse):
            return [("drop_predicate", f"no if {node.condition}", node.then_case)]
        return list(_of_attribute(node) if isinstance(node, tirx.AttrStmt) else self._of_instruction(node))

    def _of_access(self, node: Node, buffer: Node, remade: Callable[[Node], Node]) -> Iterator[Change]:
        if len(node.indices) != 1:
            return
        (index,) = node.indices
        what = f"{type(node).__name__} {buffer.name}[{index}]"
        yield "shift_index", f"{what} + 1", remade(_shifted(index, 1))
        if isinstance(index, tirx.Ramp):
            lanes = int(index.lanes)
            yield "shift_vector", f"{what} + {lanes}", remade(_shifted(index, lanes))
        exchanged = self._exchanged(index)
        if exchanged is not None:
            yield "swap_threads", f"{what} with other threads", remade(exchanged)

    def _of_call(self, node: Node) -> Iterator[Change]:
        name = getattr(node.op, "name", "")
        if node.op.same_as(IF_THEN_ELSE):
            yield "drop_predicate", f"no predicate {node.args[0]}", node.args[1]
        if name in _SHUFFLES:
            yield "shift_shuffle", f"{name} one lane on", _with_argument(node, 2, node.args[2] + 1)
        for position, word in _OFFSETS.get(name, {}).items():
            offset = node.args[position]
            yield "shift_index", f"{name} {word} + 1", _with_argument(node, position, offset + 1)
            if word != "stride":
                yield "shift_vector", f"{name} {word} + 8", _with_argument(node, position, offset + 8)
            exchanged = self._exchanged(offset)
            if exchanged is not None:
                change = f"{name} {word} {offset} with other threads"
                yield "swap_threads", change, _with_argument(node, position, exchanged)

    def _of_instruction(self, node: Node) -> Iterator[Change]:
        name = getattr(getattr(node.value, "op", None), "name", "")
        if name == _BARRIER:
            yield "remove_barrier", "no barrier", tirx.Evaluate(0)
            variable, extent = max(self._threads, key=lambda thread: int(thread[1]))
            half = tirx.IfThenElse(variable < int(extent) // 2, node, None)
            yield "diverge_barrier", f"a barrier for half of {variable.name}", half
        elif name in _INSTRUCTIONS:
            yield "drop_instruction", f"no {name}", tirx.Evaluate(0)

    def _exchanged(self, index: Node) -> Node | None:
        """``index`` with two thread variables exchanged, or one counted from the end; None where it has none."""
        present = [(var, extent) for var, extent in self._threads if mentions(index, var)]
        if not present:
            return None
        if len(present) == 1:
            ((var, extent),) = present
            return substitute(index, [(var, extent - 1 - var)])
        (first, _), (second, _) = present[:2]
        return substitute(index, [(first, second), (second, first)])


def _of_loop(node: Node) -> Iterator[Change]:
    for step in (1, -1):
        extent = int(node.extent) + step
        if extent:
            longer = For(node.loop_var, node.min, tirx.IntImm(node.extent.ty, extent), node.kind, node.body)
            yield "change_extent", f"{node.loop_var.name} in range({extent})", longer


def _of_attribute(node: Node) -> Iterator[Change]:
    if node.attr_key == "async_commit_queue_scope":
        yield "drop_commit", "no commit_group", node.body
    if node.attr_key == "async_wait_inflight_count":
        count = int(node.value)
        for other in (count + 1, count - 1):
            if other >= 0:
                changed = tirx.AttrStmt(node.node, node.attr_key, tirx.IntImm("int32", other), node.body)
                yield "change_wait", f"wait_group {count} is wait_group {other}", changed


def _shifted(index: Node, amount: int) -> Node:
    if isinstance(index, tirx.Ramp):
        return tirx.Ramp(index.base + amount, index.stride, index.lanes)
    return index + amount


def _with_argument(call: Node, position: int, value: Node) -> Node:
    arguments = list(call.args)
    arguments[position] = value
    return Call(call.op, arguments, ret_ty=call.ty)
