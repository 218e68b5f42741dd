"""What loads a buffer, read as copies: rule 1 of ALCOP §2.1.

A copy can be asynchronous where the value stored is just what was loaded. For shared memory that is cp.async: 4, 8 or
16 bytes from global memory, neighbouring and aligned on both sides, or zeros where a predicate is false (PTX ISA,
cp.async). For registers it is ldmatrix, a fragment's load, or a plain load from shared memory: the hardware goes on
until the value is used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tvm_ext._tvm import (
    IF_THEN_ELSE,
    Analyzer,
    Buffer,
    BufferStore,
    Call,
    Expr,
    For,
    ForKind,
    Stmt,
    TensorLoad,
    Var,
    ir,
    nodes_in,
    structural_equal,
    structural_map,
    tirx,
)
from tvm_ext.analysis.computations import dtype_of, mentions, substitute
from tvm_ext.errors import IllegalRewrite

from .loops import (
    accesses_of,
    allocations_of,
    bytes_per_element,
    constant,
    enclosing_loops,
    integer,
    is_register,
    scope_of,
    size_of,
    zero,
)
from .side_effects import text_of

ASYNC_BYTES = (16, 8, 4)
"""What one cp.async copies (PTX ISA, "cp-size")."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Copy:
    """One store of a load part: ``buffer[index] = source[from_index]``, zeros where ``predicate`` is false.

    ``function`` is None for a pure copy, else makes the value stored of the value loaded (the f of ALCOP's Figure 5).
    ``vector`` is the loop over neighbouring elements, innermost, where there is one. ``store`` is the statement.
    """

    store: Stmt
    buffer: Buffer
    index: Expr
    source: Buffer
    from_index: Expr
    predicate: Expr | None
    vector: Stmt | None
    around: tuple[Stmt, ...]
    function: Any = None

    @property
    def is_pure(self) -> bool:
        return self.function is None

    def loaded(self) -> Expr:
        """What is loaded, before ``function``: zero where the predicate is false."""
        load = tirx.BufferLoad(self.source, [self.from_index])
        if self.predicate is None:
            return load
        return tirx.if_then_else(self.predicate, load, tirx.const(0, str(self.source.ty.dtype)))

    def stored(self, loaded: Expr) -> Expr:
        """What is stored, of what `loaded` gave."""
        if self.function is None:
            return loaded
        value = self.function(loaded)
        if self.predicate is None:
            return value
        return tirx.if_then_else(self.predicate, value, tirx.const(0, str(self.buffer.ty.dtype)))

    @property
    def lanes(self) -> int:
        return 1 if self.vector is None else integer(self.vector.extent) or 1


def read_copies(part: Stmt, buffer: Buffer) -> list[Copy]:
    """All stores to ``buffer`` in ``part``, as copies. Raises IllegalRewrite, by rule 1, where one is none."""
    staged = _staging(part)
    found = []
    for around, statement in enclosing_loops(part):
        if isinstance(statement, BufferStore) and statement.buffer.same_as(buffer):
            found.append(_read(statement, around, staged))
    for access in accesses_of(part):
        if access.buffer.same_as(buffer) and access.writes and not isinstance(access.node, BufferStore):
            raise IllegalRewrite(f"{buffer.name} is written by {text_of(access.node)}, which is no copy of ours")
        if access.buffer.same_as(buffer) and access.reads:
            raise IllegalRewrite(f"{buffer.name} is read where it is loaded")
    return found


def _read(store: Stmt, around: tuple[Stmt, ...], staged: Mapping[Buffer, tuple[Buffer, Var | None, Expr]]) -> Copy:
    index = store.indices[0]
    value, predicate = _open_predicate(_through_registers(store.value, staged), store)
    load = _only_load(value, store)
    vector = around[-1] if around and _is_vector(around[-1]) else None
    return Copy(
        store=store,
        buffer=store.buffer,
        index=index,
        source=load.source,
        from_index=load.indices[0],
        predicate=predicate,
        vector=vector,
        around=around,
        function=None if load.same_as(value) else (lambda new: _with_loads(value, load, new)),
    )


def _is_vector(loop: Stmt) -> bool:
    return isinstance(loop, For) and loop.kind == ForKind.VECTORIZED


def _open_predicate(value: Expr, store: Stmt) -> tuple[Expr, Expr | None]:
    """``if_then_else(p, value, 0)`` is a copy that writes zeros where p is false; so is f of it, if f(0) is 0."""
    guards = _guards_of_loads(value)
    if not guards:
        return value, None
    guard, condition, then, otherwise = guards[0]
    filled = Analyzer().simplify(_replaced(value, guard, tirx.const(0, dtype_of(otherwise))))
    if len(guards) > 1 or not is_zero(otherwise) or not is_zero(filled):
        what = otherwise if not is_zero(otherwise) else filled
        raise IllegalRewrite(f"{store.buffer.name} is filled with {what} where nothing is loaded; a copy fills zeros")
    return _replaced(value, guard, then), condition


def _guards_of_loads(value: Expr) -> list[tuple[Expr, Expr, Expr, Expr]]:
    """(expression, condition, what is loaded, what otherwise) for every choice with a load in a branch.

    A choice by what is loaded, as in ``x if x > 0 or isnan(x) else 0``, is no guard but a function of it.
    """
    found = []
    for node in nodes_in(value, (Call, tirx.Select), "pre"):
        is_select = isinstance(node, tirx.Select)
        if is_select or node.op.same_as(IF_THEN_ELSE):
            condition, *cases = (node.condition, node.true_value, node.false_value) if is_select else node.args
            if not _loads_in(condition) and _loads_in(cases):
                found.append((node, condition, *cases))
    return found


def _replaced(value: Expr, old: Expr, new: Expr) -> Expr:
    """``value`` with the node ``old`` replaced."""
    if value.same_as(old):
        return new
    return structural_map(value, (type(old), lambda node: new if node.same_as(old) else node))


def _with_loads(value: Expr, load: TensorLoad, new: Expr) -> Expr:
    """``value`` with ``load``, wherever it stands in it, replaced."""
    return structural_map(value, (TensorLoad, lambda node: new if structural_equal(node, load) else node))


def _loads_in(expr: Expr | list[Expr]) -> list[TensorLoad]:
    return nodes_in(expr, TensorLoad, "pre")


def is_zero(expr: Expr) -> bool:
    if isinstance(expr, tirx.FloatImm | tirx.IntImm):
        return float(expr.value) == 0.0
    if isinstance(expr, tirx.Cast):
        return is_zero(expr.value)
    return isinstance(expr, tirx.Broadcast) and is_zero(expr.value)


def _only_load(value: Expr, store: Stmt) -> TensorLoad:
    loads = _loads_in(value)
    if not loads or not all(structural_equal(other, loads[0]) for other in loads[1:]):
        what = "nothing" if not loads else " and ".join(dict.fromkeys(str(load.source.name) for load in loads))
        raise IllegalRewrite(f"{store.buffer.name} is computed from {what}, not copied")
    return loads[0]


def _staging(part: Stmt) -> dict[Buffer, tuple[Buffer, Var | None, Expr]]:
    """Registers that a load part fills first: buffer to (its loop variable, the value stored there).

    Worked example: ``for v in vectorized(4): r[v] = A[i + v]``, then ``for e: S[e * 64] = r[e]``: r is A's row, turned.
    """
    private = [statement.buffer for statement in allocations_of(part) if is_register(statement.buffer)]
    staged = {}
    for buffer in private:
        stores = [
            (around, statement)
            for around, statement in enclosing_loops(part)
            if isinstance(statement, BufferStore) and statement.buffer.same_as(buffer)
        ]
        if len(stores) != 1:
            continue
        ((around, store),) = stores
        innermost = around[-1] if around else None
        if isinstance(innermost, For) and store.indices[0].same_as(innermost.loop_var):
            if integer(innermost.extent) == size_of(buffer):
                staged[buffer] = (buffer, innermost.loop_var, store.value)
        elif size_of(buffer) == 1:
            staged[buffer] = (buffer, None, store.value)
    return staged


def _through_registers(value: Expr, staged: Mapping[Buffer, tuple[Buffer, Var | None, Expr]]) -> Expr:
    if not isinstance(value, TensorLoad):
        return value
    for buffer, variable, stored in staged.values():
        if value.source.same_as(buffer):
            return substitute(stored, [(variable, value.indices[0])] if variable is not None else [])
    return value


# --- how wide -----------------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True, slots=True)
class AsyncShape:
    """One copy as cp.async of ``bytes_each``, ``elements`` of them ``count`` times along the vector loop."""

    bytes_each: int
    elements: int
    count: int


def async_shape(copy: Copy, ranges: Mapping[Var, Expr]) -> AsyncShape:
    """The widest cp.async that is legal for ``copy``; raises IllegalRewrite, with the reason, where none is.

    ``ranges`` are those of the variables around the load part. Alignment must be provable: worked example, an index
    ``8 * x + 4`` of float16 is a multiple of 4 elements, hence 8 bytes, whatever x.
    """
    if not copy.is_pure:
        raise IllegalRewrite(
            f"{copy.buffer.name} is computed on the way from {copy.source.name}: {text_of(copy.store.value)}"
        )
    if scope_of(copy.source) != "global":
        raise IllegalRewrite(f"{copy.buffer.name} is copied from {copy.source.name} in {scope_of(copy.source)} memory")
    element = bytes_per_element(str(copy.buffer.ty.dtype))
    if str(copy.buffer.ty.dtype) != str(copy.source.ty.dtype):
        raise IllegalRewrite(
            f"{copy.buffer.name} holds {copy.buffer.ty.dtype}, {copy.source.name} {copy.source.ty.dtype}"
        )
    for bytes_each in ASYNC_BYTES:
        elements = bytes_each // element
        if elements and copy.lanes % elements == 0 and _is_aligned_run(copy, elements, ranges):
            return AsyncShape(bytes_each=bytes_each, elements=elements, count=copy.lanes // elements)
    narrow = min(copy.lanes * element, 16)
    why = (
        f"its copies are of {narrow} bytes"
        if narrow < min(ASYNC_BYTES)
        else "no 4 neighbouring bytes are provably aligned"
    )
    raise IllegalRewrite(f"cp.async copies 4, 8 or 16 bytes; {copy.buffer.name}: {why}")


def _is_aligned_run(copy: Copy, elements: int, ranges: Mapping[Var, Expr]) -> bool:
    """Whether lanes ``c * elements + (0 .. elements - 1)`` are neighbours, aligned, under one predicate."""
    if elements == 1:
        return True
    assert copy.vector is not None
    lane = copy.vector.loop_var
    analyzer = analyzer_for(copy.around, ranges)
    if copy.predicate is not None and mentions(copy.predicate, lane):
        return False
    return all(_is_run(analyzer, without_casts(index), lane, elements) for index in (copy.index, copy.from_index))


def is_vector_load(copy: Copy, ranges: Mapping[Var, Expr]) -> bool:
    """Whether the innermost loop around ``copy`` loads neighbouring, aligned elements that one vector load can fetch.

    Such a loop is no vectorised one where the elements are stored apart, in a tile that is turned while it is copied.
    """
    innermost = copy.around[-1] if copy.around else None
    if not isinstance(innermost, For) or (copy.predicate is not None and mentions(copy.predicate, innermost.loop_var)):
        return False
    extent = integer(innermost.extent) or 0
    if extent * bytes_per_element(str(copy.source.ty.dtype)) not in (4, 8, 16) or extent < 2:
        return False
    analyzer = analyzer_for(copy.around, ranges)
    return _is_run(analyzer, without_casts(copy.from_index), innermost.loop_var, extent)


def _is_run(analyzer: Analyzer, index: Expr, lane: Var, elements: int) -> bool:
    first = substitute(index, [(lane, zero(lane))])
    for place in range(1, elements):
        there = substitute(index, [(lane, constant(place, lane))])
        if not analyzer.can_prove_equal(there - first, constant(place, first)):
            return False
    step = substitute(index, [(lane, lane * constant(elements, lane))])
    return bool(analyzer.can_prove_equal(tirx.floormod(step, constant(elements, step)), zero(step)))


def without_casts(index: Expr) -> Expr:
    """``index`` without casts there and back: int64(int32(x)) is x, for no kernel of ours passes 32-bit indices."""

    def visit(cast: Expr) -> Expr:
        inner = cast.value
        if isinstance(inner, tirx.Cast) and str(inner.value.ty.dtype) == str(cast.ty.dtype):
            return inner.value
        return cast

    return structural_map(index, (tirx.Cast, visit))


def analyzer_for(around: Sequence[Stmt], ranges: Mapping[Var, Expr]) -> Analyzer:
    """An analyzer that knows the ranges of the loops ``around`` and of other variables."""
    analyzer = Analyzer()
    for variable, extent in ranges.items():
        analyzer.bind(variable, ir.Range.from_min_extent(zero(variable), extent))
    for loop in around:
        if isinstance(loop, For):
            analyzer.bind(loop.loop_var, ir.Range.from_min_extent(loop.min, loop.extent))
    return analyzer


def is_register_load(statement: Stmt, buffer: Buffer) -> str | None:
    """Why ``statement``, which writes register ``buffer``, is no plain load; None where it is one.

    A load is ldmatrix, a fragment's load, or a store of what was read from one other buffer, unchanged.
    """
    for access in accesses_of(statement):
        if not (access.buffer.same_as(buffer) and access.writes):
            continue
        if isinstance(access.node, BufferStore):
            value = access.node.value
            if not isinstance(value, TensorLoad):
                return f"{buffer.name} is computed, not copied: {text_of(value)}"
            if str(value.source.ty.dtype) != str(buffer.ty.dtype):
                return f"{buffer.name} is converted while it is loaded"
        elif access.reads or not access.is_known:
            return f"{buffer.name} is changed by {text_of(access.node)}"
    return None
