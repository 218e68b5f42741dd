"""Reads a TensorIR function as a list of computations: the form in which kernels are analysed, constructed and emitted.

A `Computation` is one block of an unscheduled function as TE, `LegalizeOps` and `FuseTIR` make them: it fills one
buffer, by a value for each point of its spatial axes, or by a reduction.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import Any

from tvm_ext._tvm import (
    Buffer,
    BufferStore,
    Expr,
    For,
    ForKind,
    Node,
    PrimFunc,
    SBlockRealize,
    Stmt,
    TensorLoad,
    Var,
    nodes_in,
    structural_equal,
    structural_hash,
    structural_map,
    tirx,
)
from tvm_ext.errors import IllegalRewrite

from .tensor_expr import AxisKind

SPATIAL_ITERATION, REDUCTION_ITERATION = 0, 2  # tirx.IterVar's DataPar and CommReduce
COMBINERS = {"Add": "sum", "Max": "max", "Min": "min", "Mul": "prod"}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Computation:
    """One block: ``target[indices] = value`` or, with a ``combiner``, ``combine(target[indices], value)``."""

    name: str
    variables: tuple[Var, ...]
    extents: tuple[int, ...]
    kinds: tuple[AxisKind, ...]
    target: Buffer
    indices: tuple[Expr, ...]
    value: Expr
    combiner: str | None = None
    init: Expr | None = None
    _loads: list[TensorLoad] = field(default_factory=list, init=False, repr=False)  # what `loads` found

    @property
    def is_reduction(self) -> bool:
        return self.combiner is not None

    @property
    def spatial(self) -> tuple[Var, ...]:
        return tuple(v for v, kind in zip(self.variables, self.kinds, strict=True) if kind == "spatial")

    @property
    def reduction(self) -> tuple[Var, ...]:
        return tuple(v for v, kind in zip(self.variables, self.kinds, strict=True) if kind == "reduce")

    def extent(self, variable: Var) -> int:
        return next(e for v, e in zip(self.variables, self.extents, strict=True) if v.same_as(variable))

    @property
    def point_count(self) -> int:
        return prod(self.extents)

    def sources(self) -> list[Buffer]:
        """The distinct buffers that ``value`` reads."""
        found: list[Buffer] = []
        for load in nodes_in(self.value, TensorLoad):
            if not any(load.source.same_as(other) for other in found):
                found.append(load.source)
        return found

    def loads(self) -> list[TensorLoad]:
        """The distinct loads in ``value``, in order of appearance."""
        found = self._loads
        if found:
            return list(found)
        alike: dict[int, list[TensorLoad]] = {}
        for load in nodes_in(self.value, TensorLoad, "pre"):
            others = alike.setdefault(structural_hash(load), [])
            if not any(structural_equal(load, other) for other in others):
                others.append(load)
                found.append(load)
        return list(found)

    def writes_at_its_own_axes(self) -> bool:
        """Whether it writes ``target[v0, v1, ...]``, its own axes in order: inlining is then a substitution."""
        return len(self.indices) == len(self.spatial) and all(
            index.same_as(variable) for index, variable in zip(self.indices, self.spatial, strict=True)
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class OperatorBody:
    """A whole function: its parameters (inputs then outputs) and its computations in order of execution."""

    name: str
    params: tuple[Buffer, ...]
    outputs: tuple[Buffer, ...]
    computations: tuple[Computation, ...]

    def is_output(self, buffer: Buffer) -> bool:
        return any(buffer.same_as(output) for output in self.outputs)

    def consumers(self, buffer: Buffer) -> list[Computation]:
        return [computation for computation in self.computations if reads(computation.value, buffer)]


@lru_cache(maxsize=1024)  # planners ask for the few buffers of an operator again and again
def static_shape(buffer: Buffer) -> tuple[int, ...]:
    """The buffer's shape as ints; raises IllegalRewrite where a dimension is symbolic."""
    try:
        return tuple(int(size) for size in buffer.ty.shape)
    except (TypeError, ValueError) as error:
        raise IllegalRewrite(f"tensor {buffer.name} has the dynamic shape {list(buffer.ty.shape)}") from error


def dtype_of(value: Node) -> str:
    """The element type of a buffer, load, variable or expression, as text: a TVM dtype does not hash like one."""
    return str(value.ty.dtype)


def reads(expression: Expr, buffer: Buffer) -> bool:
    return any(load.source.same_as(buffer) for load in nodes_in(expression, TensorLoad))


def mentions(node: Node, *variables: Any) -> bool:
    """Whether any of ``variables`` occurs in ``node``: an expression, a statement or a list of them."""
    if isinstance(node, Var):  # most often; a walk takes twenty times as long
        return any(node.same_as(own) for own in variables)
    return any(found.same_as(own) for found in nodes_in(node, Var) for own in variables)


def substitute(node: Node, table: Collection[tuple[Any, Expr]]) -> Node:
    """``node`` with each variable of ``table`` replaced by its expression; of a mapping, give the items."""
    if not table:
        return node

    def swap(variable: Var) -> Expr:
        for old, new in table:
            if variable.same_as(old):
                return new
        return variable

    return structural_map(node, (Var, swap))


def replace_loads(node: Node, replace: Callable[[TensorLoad], Expr]) -> Node:
    """``node`` with each load passed through ``replace`` (which returns the same load to keep it)."""
    return structural_map(node, (TensorLoad, replace))


def replace_equal_loads(node: Node, table: Collection[tuple[TensorLoad, Expr]]) -> Node:
    """``node`` with each load that equals one of ``table`` replaced by what stands beside that."""
    return replace_loads(node, lambda load: next((new for old, new in table if structural_equal(load, old)), load))


def replace_reads(node: Node, buffer: Buffer, replace: Callable[[TensorLoad], Expr]) -> Node:
    """``node`` with each load from ``buffer`` passed through ``replace``."""
    return replace_loads(node, lambda load: replace(load) if load.source.same_as(buffer) else load)


def read_operator(func: PrimFunc, name: str) -> OperatorBody:
    """The computations of an unscheduled PrimFunc; raises IllegalRewrite with the reason where it has another form."""
    body = func.body
    if not isinstance(body, SBlockRealize):
        raise IllegalRewrite("its body is not a block of TensorIR (an external or already lowered function)")
    root = body.block
    statements = list(root.body.seq) if isinstance(root.body, tirx.SeqStmt) else [root.body]
    computations = tuple(computation for statement in statements for computation in _read_block(statement))
    params = tuple(func.params)
    for param in params:
        if not hasattr(param.ty, "shape"):
            raise IllegalRewrite(f"parameter {param.name} is a scalar, not a tensor")
        static_shape(param)
    outputs = tuple(p for p in params if any(computation.target.same_as(p) for computation in computations))
    for position, computation in enumerate(computations):
        if any(other.target.same_as(computation.target) for other in computations[:position]):
            raise IllegalRewrite(f"tensor {computation.target.name} is written by two computations")
    return OperatorBody(name=name, params=params, outputs=outputs, computations=computations)


def _read_block(statement: Stmt) -> list[Computation]:
    loops = []
    while isinstance(statement, For):
        if statement.kind != ForKind.SERIAL:
            raise IllegalRewrite("its loops are already scheduled")
        loops.append(statement)
        statement = statement.body
    if not isinstance(statement, SBlockRealize):
        raise IllegalRewrite(f"a computation is a {type(statement).__name__}, not a block (an external call)")
    block = statement.block
    if len(block.match_buffers) or len(block.alloc_buffers):
        raise IllegalRewrite(f"block {block.name_hint} has buffers of its own")
    variables: list[Var] = []
    extents: list[int] = []
    kinds: list[AxisKind] = []
    for iterator, value in zip(block.iter_vars, statement.iter_values, strict=True):
        loop = next((loop for loop in loops if loop.loop_var.same_as(value)), None)
        if int(iterator.iter_type) not in (SPATIAL_ITERATION, REDUCTION_ITERATION):
            raise IllegalRewrite(f"block {block.name_hint} has an ordered axis (a scan)")
        extent = getattr(iterator.dom.extent, "value", None)
        if extent is None:
            raise IllegalRewrite(f"block {block.name_hint} has an axis of dynamic size {iterator.dom.extent}")
        if int(extent) == 0:
            raise IllegalRewrite(f"block {block.name_hint} has an empty axis: there is nothing to compute")
        if loop is None and int(extent) != 1:
            raise IllegalRewrite(f"block {block.name_hint} has an axis that is not one loop")
        variables.append(iterator.var)
        extents.append(int(extent))
        kinds.append("reduce" if int(iterator.iter_type) == REDUCTION_ITERATION else "spatial")
    stores = _stores(block.body, block.name_hint)
    starts = [None] * len(stores) if block.init is None else _stores(block.init, block.name_hint)
    if len(starts) != len(stores):
        raise IllegalRewrite(f"block {block.name_hint} initialises {len(starts)} tensors and updates {len(stores)}")
    return [
        _computation_of(store, start, block.name_hint, (tuple(variables), tuple(extents), tuple(kinds)), stores)
        for store, start in zip(stores, starts, strict=True)
    ]


def _stores(body: Stmt, name: str) -> list[BufferStore]:
    """The stores of a block, with values bound before them put in their place.

    A pair such as ``a = s + x; b = q + x * x; s[i] = a; q[i] = b`` gives ``s[i] = s + x`` and ``q[i] = q + x * x``.
    """
    bound: list[tuple[Var, Expr]] = []
    stores = []
    for statement in list(body.seq) if isinstance(body, tirx.SeqStmt) else [body]:
        if isinstance(statement, tirx.Bind):
            bound.append((statement.var, substitute(statement.value, bound)))
        elif isinstance(statement, BufferStore):
            static_shape(statement.buffer)
            stores.append(BufferStore(statement.buffer, substitute(statement.value, bound), list(statement.indices)))
        else:
            raise IllegalRewrite(f"block {name} holds a {type(statement).__name__}, not only stores")
    return stores


def _computation_of(
    store: BufferStore,
    start: BufferStore | None,
    name: str,
    axes: tuple[tuple[Var, ...], tuple[int, ...], tuple[AxisKind, ...]],
    together: Sequence[BufferStore],
) -> Computation:
    """The computation of one store among those that its block runs ``together``; they must not read each other's
    tensors.
    """
    variables, extents, kinds = axes
    for other in together:
        if other is not store and reads(store.value, other.buffer):
            raise IllegalRewrite(f"block {name} combines several tensors at once (such as a value and its position)")
    computation = Computation(
        name=name if len(together) == 1 else f"{name}_{together.index(store)}",
        variables=variables,
        extents=extents,
        kinds=kinds,
        target=store.buffer,
        indices=tuple(store.indices),
        value=store.value,
    )
    return _check_spatial(computation) if start is None else _read_reduction(computation, start)


def _check_spatial(computation: Computation) -> Computation:
    if reads(computation.value, computation.target):
        raise IllegalRewrite(f"block {computation.name} updates {computation.target.name} in place")
    if "reduce" in computation.kinds:
        raise IllegalRewrite(f"block {computation.name} reduces without an initial value")
    return computation


def _read_reduction(computation: Computation, start: BufferStore) -> Computation:
    """Split ``C[i] = C[i] + update`` into combiner and update."""
    combiner = COMBINERS.get(type(computation.value).__name__)
    if combiner is None:
        raise IllegalRewrite(f"block {computation.name} combines by {type(computation.value).__name__}")
    own = [side for side in (computation.value.a, computation.value.b) if _is_own_load(side, computation)]
    rest = [side for side in (computation.value.a, computation.value.b) if not _is_own_load(side, computation)]
    if len(own) != 1 or reads(rest[0], computation.target):
        raise IllegalRewrite(f"block {computation.name} does not accumulate into its own element")
    return dataclasses.replace(computation, value=rest[0], combiner=combiner, init=start.value)


def _is_own_load(side: Expr, computation: Computation) -> bool:
    return (
        isinstance(side, TensorLoad)
        and side.source.same_as(computation.target)
        and all(structural_equal(a, b) for a, b in zip(side.indices, computation.indices, strict=True))
    )
