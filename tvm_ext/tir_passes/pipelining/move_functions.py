"""Case 2 of ALCOP's Figure 5: an element-wise function moves from what loads a buffer to what uses it.

``S[i] = f(A[j])`` waits for A before it can store; ``S[i] = A[j]`` with every use ``f(S[i])`` is a copy, which can be
asynchronous. f is computed once for each use instead of once for each element.
"""

from __future__ import annotations

from typing import Any

from tvm_ext._tvm import (
    AllocBuffer,
    Analyzer,
    Buffer,
    BufferStore,
    Expr,
    Stmt,
    TensorLoad,
    Var,
    nodes_in,
    structural_equal,
    structural_map,
    tirx,
)

from .analyse import LoadUse
from .copies import Copy, is_zero
from .fragment_functions import apply_on_fragments, fragments_of, why_not_on_fragments
from .function import Function
from .loops import scope_of


def why_it_stays(function: Function, load_use: LoadUse) -> str | None:
    """Why the function computed by what loads ``load_use`` cannot move to its users; None where it can."""
    name, copies = load_use.name, load_use.copies
    sources = {str(copy.source.ty.dtype) for copy in copies}
    if len(sources) != 1:
        return f"{name} is loaded from tensors of several types"
    forms = [_form(copy) for copy in copies]
    if any(form is None for form in forms):
        return f"what is computed of {name} depends on where an element lies"
    if not all(structural_equal(form, forms[0], map_free_vars=True) for form in forms[1:]):
        return f"different functions are computed of {name}"
    if any(copy.predicate is not None for copy in copies) and not _keeps_zero(copies[0]):
        return f"{name} is filled with zeros at the edges, and its function of zero is not zero"
    return why_not_on_fragments(function, load_use.buffer, next(iter(sources)))


def _form(copy: Copy) -> Any:
    """The function applied to a variable; None where it depends on anything else."""
    variable = Var("x", str(copy.source.ty.dtype))
    value = variable if copy.function is None else copy.function(variable)
    return value if all(v.same_as(variable) for v in nodes_in(value, Var)) else None


def _keeps_zero(copy: Copy) -> bool:
    value = copy.stored(tirx.const(0, str(copy.source.ty.dtype)))
    if copy.predicate is not None and copy.function is not None:
        value = copy.function(tirx.const(0, str(copy.source.ty.dtype)))
    return is_zero(Analyzer().simplify(value))


def move_function(function: Function, load_use: LoadUse) -> Stmt:
    """The body with pure copies into a buffer of the source's type, and the function in every use of it."""
    old, copies = load_use.buffer, load_use.copies
    dtype = str(copies[0].source.ty.dtype)
    fragments = [] if copies[0].function is None else fragments_of(function, old)
    body = apply_on_fragments(function.body, fragments, copies[0]) if fragments else function.body
    new = old if fragments else _retyped(old, dtype)

    def store(node: BufferStore) -> Stmt:
        copy = next((c for c in copies if node.same_as(c.store)), None)
        if copy is None:
            return node
        return BufferStore(new, copy.loaded(), [copy.index])

    def load(node: TensorLoad) -> Expr:
        if not node.source.same_as(old):
            return node
        value = tirx.BufferLoad(new, [node.indices[0]])
        return value if copies[0].function is None else copies[0].function(value)

    def allocate(node: AllocBuffer) -> Stmt:
        return AllocBuffer(new, dict(node.annotations)) if node.buffer.same_as(old) else node

    stored = structural_map(body, (BufferStore, store))
    return structural_map(stored, [(TensorLoad, load), (AllocBuffer, allocate)])


def _retyped(buffer: Buffer, dtype: str) -> Buffer:
    return tirx.decl_buffer(
        list(buffer.ty.shape), dtype, str(buffer.name), scope=scope_of(buffer),
        data_alignment=int(buffer.ty.data_alignment),
    )  # fmt: skip
