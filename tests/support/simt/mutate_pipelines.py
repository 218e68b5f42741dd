"""Mutants of a pipelined function: mistakes in its synchronisation and in which version of a buffer it means.

Made before stock TVM lowers the function, where a pipeline's primitives, or the instructions that they became, are
still statements of a sequence. A statement of synchronisation is dropped, weakened or moved to another place among its
neighbours; a version's number or a guard is off by one. What is said of `mutate` holds here: not every mutant is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from tvm_ext._tvm import AllocBuffer, Call, DeclBuffer, structural_map, structural_walk, tirx

from .mutate import Mutant

KINDS = ("drop", "weaken", "move", "shift_version", "shift_guard")

COMMIT, WAIT, BARRIER = "tirx.ptx.cp_async_commit_group", "tirx.ptx.cp_async_wait_group", "tirx.tvm_storage_sync"
PRIMITIVES = "tvm_ext."
"""Beginning of the names of the external calls that stand for a pipeline's primitives."""

MOST_VERSIONS = 8
"""``x % n`` for constants up to this is taken for the number of a version."""

Node = Any
Change = tuple[str, str, Node]


def pipeline_mutants(function: Any) -> Iterator[Mutant]:
    """All mutants of ``function``, in the order of its statements. ``function`` stays as it is."""
    for position, changes in enumerate(_found(function.body)):
        for number, (kind, change, _) in enumerate(changes):
            yield Mutant(kind=kind, change=change, make=partial(_changed, function, position, number))


def _changed(function: Any, position: int, number: int) -> Any:
    return function.with_body(_replaced(function.body, position, number))


def name_of(statement: Node) -> str | None:
    """What a statement of synchronisation is called; None for other statements."""
    call = statement.value if isinstance(statement, tirx.Evaluate) else None
    if not isinstance(call, Call):
        return None
    name = str(getattr(call.op, "name", ""))
    if name in (COMMIT, WAIT, BARRIER):
        return name.rpartition(".")[2]
    first = call.args[0] if len(call.args) else None
    word = str(getattr(first, "value", ""))
    return word.removeprefix(PRIMITIVES) if word.startswith(PRIMITIVES) else None


def synchronisation_of(statement: Node) -> str | None:
    """The names of what ``statement`` does, where it does nothing but synchronise: one call, or a guarded few."""
    if isinstance(statement, tirx.Evaluate):
        return name_of(statement)
    if isinstance(statement, tirx.IfThenElse) and statement.else_case is None:
        inner = synchronisation_of(statement.then_case)
        return None if inner is None else f"if {statement.condition}: {inner}"
    if isinstance(statement, tirx.SeqStmt):
        parts = [synchronisation_of(part) for part in statement.seq]
        return None if any(part is None for part in parts) else "; ".join(map(str, parts))
    return None


def _found(body: Node) -> list[list[Change]]:
    found: list[list[Change]] = []

    def visit(node: Node) -> Node:
        found.append(list(_changes(node)))
        return node

    structural_map(body, _callbacks(visit))
    return found


def _replaced(body: Node, position: int, number: int) -> Node:
    count = -1

    def visit(node: Node) -> Node:
        nonlocal count
        count += 1
        return list(_changes(node))[number][2] if count == position else node

    return structural_map(body, _callbacks(visit))


def _callbacks(visit: Any) -> list[tuple[Any, Any]]:
    return [(kind, visit) for kind in (tirx.SeqStmt, tirx.Evaluate, tirx.IfThenElse, tirx.FloorMod)]


def _changes(node: Node) -> Iterator[Change]:
    if isinstance(node, tirx.SeqStmt):
        yield from _moves(node)
    elif isinstance(node, tirx.Evaluate):
        yield from _of_call(node)
    elif isinstance(node, tirx.IfThenElse):
        yield from _of_guard(node)
    else:
        yield from _of_version(node)


def _moves(sequence: Node) -> Iterator[Change]:
    """Each statement of synchronisation before and behind its neighbours, and at both ends of its sequence."""
    parts = list(sequence.seq)
    for place, part in enumerate(parts):
        name = synchronisation_of(part)
        if name is None:
            continue
        for target in sorted({0, place - 1, place + 1, len(parts) - 1} - {place}):
            if not 0 <= target < len(parts):
                continue
            crossed = parts[min(place, target) : max(place, target) + 1]
            if any(isinstance(other, AllocBuffer | DeclBuffer) for other in crossed):
                continue
            moved = [other for other in parts if not other.same_as(part)]
            moved.insert(target, part)
            yield "move", f"{name} from place {place} of {len(parts)} to {target}", tirx.stmt_seq(*moved)


def _of_call(node: Node) -> Iterator[Change]:
    name = name_of(node)
    if name is None:
        return
    yield "drop", f"no {name}", tirx.Evaluate(tirx.IntImm("int32", 0))
    call = node.value
    if name in ("cp_async_wait_group", "consumer_wait"):
        position = 0 if name == "cp_async_wait_group" else 2  # of a primitive: (name, pipeline, count)
        arguments = list(call.args)
        count = int(arguments[position].value)
        arguments[position] = tirx.IntImm("int32", count + 1)
        weaker = tirx.Evaluate(Call(call.op, arguments, attrs=call.attrs, ret_ty=call.ty))
        yield "weaken", f"{name} {count} is {name} {count + 1}", weaker


def _of_guard(node: Node) -> Iterator[Change]:
    """``if x < n`` of a scalar that is no thread's: one more, one fewer."""
    condition = node.condition
    if synchronisation_of(node) is not None:
        yield "drop", f"no {synchronisation_of(node)}", tirx.Evaluate(tirx.IntImm("int32", 0))
    if not isinstance(condition, tirx.LT) or _is_of_a_thread(condition):
        return
    for step in (1, -1):
        changed = tirx.LT(condition.a, condition.b + tirx.IntImm(str(condition.b.ty.dtype), step))
        yield (
            "shift_guard",
            f"if {condition.a} < {condition.b} {step:+d}",
            tirx.IfThenElse(changed, node.then_case, node.else_case),
        )


def _of_version(node: Node) -> Iterator[Change]:
    divisor = getattr(node.b, "value", None)
    if divisor is None or not 2 <= int(divisor) <= MOST_VERSIONS or _is_of_a_thread(node):
        return
    one = tirx.IntImm(str(node.a.ty.dtype), 1)
    yield "shift_version", f"({node.a} + 1) % {divisor}", tirx.FloorMod(node.a + one, node.b)


def _is_of_a_thread(expression: Node) -> bool:
    """Whether a variable in it is a thread's or a block's number, by its name."""
    hit: list[bool] = []
    structural_walk(
        expression,
        [(tirx.Var, lambda v: hit.append(True) if "threadIdx" in str(v.name) or "blockIdx" in str(v.name) else None)],
        order="pre",
    )
    return bool(hit)
