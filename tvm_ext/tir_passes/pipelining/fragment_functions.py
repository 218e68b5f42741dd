"""Case 2 of ALCOP's Figure 5 on tensor cores: what is computed of a tile's elements is computed of fragments.

``S[i] = f(A[j]); ldmatrix(F, S); mma(C, F, ..)`` becomes ``S[i] = A[j]; ldmatrix(F, S); G = f(F); mma(C, G, ..)``: the
copy is pure, and can be asynchronous. Which lane holds which element does not matter to a function of the element
alone. F stays a plain load, which its own pipeline may issue ahead; G is computed where F is used.
"""

from __future__ import annotations

from typing import Any

from tvm_ext._tvm import AllocBuffer, Buffer, BufferStore, Call, Expr, Stmt, TensorLoad, Var, structural_map, tirx

from .copies import Copy
from .function import Function
from .loops import POINTERS, accesses_of, buffer_behind, integer, is_shared, op_name, scope_of, size_of, unrolled_loop
from .side_effects import text_of

LDMATRIX = "tirx.ptx_legacy.ldmatrix"
APPLIED = "_applied"
"""Ends the names of fragments that a function has been applied to."""


def fragments_of(function: Function, tile: Buffer) -> list[Buffer]:
    """The registers that ldmatrix loads from ``tile``."""
    found: list[Buffer] = []
    for _, statement in function.leaves:
        if _is_fragment_load(statement, tile):
            fragment = _loaded_fragment(statement)
            if fragment is not None and not any(fragment.same_as(other) for other in found):
                found.append(fragment)
    return found


def why_not_on_fragments(function: Function, tile: Buffer, dtype: str) -> str | None:
    """Why a function of ``tile``'s elements, which are loaded as ``dtype``, cannot be applied to its fragments."""
    name = tile.name
    for _, statement, access in function.accesses:
        if not (access.buffer.same_as(tile) and access.reads) or isinstance(access.node, TensorLoad):
            continue
        if not _is_fragment_load(statement, tile):
            return f"{name} is used by {text_of(statement)}, which takes elements as they are"
    fragments = fragments_of(function, tile)
    if fragments and dtype != str(tile.ty.dtype):
        return f"{name} holds {tile.ty.dtype} in fragments, where {dtype} is loaded"
    for fragment in fragments:
        why = _why_not_one(function, fragment, tile)
        if why is not None:
            return why
    return None


def _why_not_one(function: Function, fragment: Buffer, tile: Buffer) -> str | None:
    if scope_of(fragment) != "local" or str(fragment.ty.dtype) != str(tile.ty.dtype) or size_of(fragment) is None:
        return f"the elements of {fragment.name} in {scope_of(fragment)} are not at hand one by one"
    for _, statement, access in function.accesses:
        if not access.buffer.same_as(fragment):
            continue
        if access.writes and not _is_fragment_load(statement, tile):
            return f"{fragment.name} is loaded from elsewhere as well"
        if access.reads and (access.writes or not access.is_known):
            return f"what {text_of(statement)} does with {fragment.name} is not known"
    if _home(function.body, fragment) is None:
        return f"{fragment.name} is not loaded before it is used in one sequence of statements"
    return None


def apply_on_fragments(body: Stmt, fragments: list[Buffer], copy: Copy) -> Stmt:
    """``body`` with the function of ``copy`` between the loads of ``fragments`` and their uses."""

    def visit(sequence: Stmt) -> Stmt:
        statements = list(sequence.seq)
        for fragment in fragments:
            first = _first_use(statements, fragment)
            if first is not None:
                statements = _with_function(statements, first, fragment, copy)
        return sequence if len(statements) == len(sequence.seq) else tirx.stmt_seq(*statements)

    return structural_map(body, (tirx.SeqStmt, visit))


def _with_function(statements: list[Stmt], first: int, fragment: Buffer, copy: Copy) -> list[Stmt]:
    """The ``first`` statement is the first that uses the ``fragment``."""
    size = size_of(fragment)
    assert size is not None and copy.function is not None
    applied = tirx.decl_buffer(
        [tirx.IntImm("int32", size)], str(fragment.ty.dtype), f"{fragment.name}{APPLIED}", scope="local",
        data_alignment=int(fragment.ty.data_alignment),
    )  # fmt: skip
    lane = Var("e", "int32")
    value = copy.function(tirx.BufferLoad(fragment, [lane]))
    computed = unrolled_loop(lane, size, BufferStore(applied, value, [lane]))
    used = [_using(statement, fragment, applied) for statement in statements[first:]]
    return [*statements[:first], AllocBuffer(applied, {}), computed, *used]


def _using(statement: Stmt, old: Buffer, new: Buffer) -> Stmt:
    """``statement`` with ``new`` in place of ``old`` in its loads and calls."""

    def load(node: TensorLoad) -> Expr:
        return tirx.BufferLoad(new, list(node.indices)) if node.source.same_as(old) else node

    def call(node: Call) -> Expr:
        arguments = list(node.args)
        places = [p.position for p in POINTERS.get(op_name(node), ()) if _names(arguments[p.position], old)]
        for place in places:
            arguments[place] = new.data
        return Call(node.op, arguments, attrs=node.attrs, ret_ty=node.ty) if places else node

    return structural_map(statement, [(TensorLoad, load), (Call, call)])


def _names(expr: Expr, buffer: Buffer) -> bool:
    behind = buffer_behind(expr)
    return behind is not None and bool(behind.same_as(buffer))


def _home(body: Stmt, fragment: Buffer) -> Stmt | None:
    """The sequence that holds all loads and, behind them, all uses of ``fragment``, as statements of their own."""
    found: list[Any] = []

    def visit(sequence: Stmt) -> Stmt:
        if _first_use(list(sequence.seq), fragment) is not None:
            found.append(sequence)
        return sequence

    structural_map(body, (tirx.SeqStmt, visit))
    return found[0] if len(found) == 1 else None


def _first_use(statements: list[Stmt], fragment: Buffer) -> int | None:
    """Where ``fragment`` is used for the first time, in the sequence that allocates, loads and then uses it."""
    allocated = any(
        isinstance(statement, AllocBuffer) and statement.buffer.same_as(fragment) for statement in statements
    )
    loads = [position for position, statement in enumerate(statements) if _does(statement, fragment, "writes")]
    uses = [position for position, statement in enumerate(statements) if _does(statement, fragment, "reads")]
    if not allocated or not loads or not uses or loads[-1] >= uses[0]:
        return None
    return uses[0]


def _does(statement: Stmt, fragment: Buffer, what: str) -> bool:
    return any(
        access.buffer is not None and access.buffer.same_as(fragment) and getattr(access, what)
        for access in accesses_of(statement)
    )


def _is_fragment_load(statement: Stmt, tile: Buffer) -> bool:
    if not (isinstance(statement, tirx.Evaluate) and isinstance(statement.value, Call)):
        return False
    if op_name(statement.value) != LDMATRIX:
        return False
    return any(access.reads and access.buffer.same_as(tile) and is_shared(tile) for access in accesses_of(statement))


def _loaded_fragment(statement: Stmt) -> Buffer | None:
    call = statement.value
    place = next(pointer.position for pointer in POINTERS[LDMATRIX] if pointer.writes)
    return buffer_behind(call.args[place]) if integer(call.args[place]) is None else None
