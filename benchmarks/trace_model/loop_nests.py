"""A scheduled function for a CPU as plain data: of each store the loops around it, and how far each of them moves it.

For functions in blocks whose loops somebody else has chosen, as MetaSchedule's candidates are; what has threads of a
GPU is refused. Worked example::

    for i0 in parallel(4):  for j in range(8):  for i1 in vectorized(16):  B[i0 * 16 + i1] += A[j, i0 * 16 + i1]

is one nest of three loops. The access to A moves by (0, 7, 0) along its first dimension and by (48, 0, 15) along its
second one: so much lies between a loop's first and last iteration, the other loops standing at their first.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tvm_ext._tvm import (
    IF_THEN_ELSE,
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
    structural_walk,
    tirx,
)
from tvm_ext.analysis.computation_exprs import count_flops, itemsize_bytes
from tvm_ext.analysis.computations import dtype_of, static_shape
from tvm_ext.errors import IllegalRewrite

LoopKind = Literal["serial", "parallel", "vectorized", "unrolled"]
KINDS: Mapping[int, LoopKind] = {
    int(ForKind.SERIAL): "serial",
    int(ForKind.PARALLEL): "parallel",
    int(ForKind.VECTORIZED): "vectorized",
    int(ForKind.UNROLLED): "unrolled",
}

UNROLL_PRAGMA = "pragma_auto_unroll_max_step"
NO_CODE = "meta_schedule.layout_rewrite_preproc"
"""A block with this annotation brings a constant into another order once, when the model is compiled."""

Positions: TypeAlias = "NDArray[np.int64]"
"""An index where all loops stand at their first iteration, then with each of them in turn at its last."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NestLoop:
    """``number`` tells loops of a function apart; ``unroll_limit`` is how many stores may be written out within it."""

    number: int
    extent: int
    kind: LoopKind
    unroll_limit: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class NestAccess:
    """One load or store. ``moves`` are elements, by dimension and loop.

    ``private_depth`` outer loops have a buffer of their own in each iteration, which is as good as one for all: 0 for
    the function's parameters.
    """

    buffer: int
    itemsize_bytes: float
    shape: tuple[int, ...]
    moves: tuple[tuple[int, ...], ...]
    is_param: bool
    private_depth: int = 0

    def moves_in(self, loop: int) -> bool:
        """Whether the loop at this depth goes to other elements."""
        return any(row[loop] for row in self.moves)

    def stride(self, loop: int, extent: int) -> float:
        """Elements between neighbouring iterations of the loop at this depth, in memory."""
        flat, distance = 1, 0
        for size, row in zip(reversed(self.shape), reversed(self.moves), strict=True):
            distance += row[loop] * flat
            flat *= size
        return distance / max(1, extent - 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopNest:
    """A store, what it loads, and the loops around it from the outermost in."""

    name: str
    loops: tuple[NestLoop, ...]
    store: NestAccess
    loads: tuple[NestAccess, ...]
    flops_per_point: float

    @property
    def accesses(self) -> tuple[NestAccess, ...]:
        """Distinct ones: an accumulator that is loaded and stored counts once."""
        return tuple(dict.fromkeys((self.store, *self.loads)))

    @property
    def accumulates(self) -> bool:
        """Whether it loads what it stores."""
        return self.store in self.loads


def read_nests(func: PrimFunc) -> tuple[LoopNest, ...]:
    """The nests of ``func`` in order; raises IllegalRewrite where it is not static, or no CPU's."""
    reader = _NestReader(func)
    nests = list(reader.nests(func.body, (), {}))
    return tuple(_with_private_buffers(nest, nests) for nest in nests)


class _NestReader:
    def __init__(self, func: PrimFunc) -> None:
        self._params = frozenset(func.params)
        self._buffers: dict[Buffer, int] = {}
        self._loops = 0

    def nests(
        self, node: Stmt, loops: tuple[NestLoop, ...], known: Mapping[Var, Positions], name: str = ""
    ) -> Iterator[LoopNest]:
        if isinstance(node, For):
            loop = self._loop(node, loops)
            yield from self.nests(node.body, (*loops, loop), _moved_by(known, node.loop_var, loop.extent), name)
        elif isinstance(node, SBlockRealize):
            yield from self._block(node, loops, known)
        elif isinstance(node, tirx.SeqStmt):
            for statement in node.seq:
                yield from self.nests(statement, loops, known, name)
        elif isinstance(node, BufferStore):
            yield self._nest(node, loops, known, name)
        elif isinstance(node, tirx.IfThenElse):
            yield from self.nests(node.then_case, loops, known, name)
        elif isinstance(node, tirx.AttrStmt):
            yield from self.nests(node.body, loops, known, name)
        else:
            raise IllegalRewrite(f"a loop nest holds a {type(node).__name__}")

    def _loop(self, node: For, outer: Sequence[NestLoop]) -> NestLoop:
        kind = KINDS.get(int(node.kind))
        if kind is None:
            raise IllegalRewrite("its loops are a GPU's threads")
        limit = node.annotations.get(UNROLL_PRAGMA) if node.annotations else None
        inherited = outer[-1].unroll_limit if outer else 0
        self._loops += 1
        extent = _static(node.extent)
        return NestLoop(
            number=self._loops, extent=extent, kind=kind, unroll_limit=inherited if limit is None else int(limit)
        )

    def _block(
        self, node: SBlockRealize, loops: tuple[NestLoop, ...], known: Mapping[Var, Positions]
    ) -> Iterator[LoopNest]:
        block = node.block
        if block.annotations and NO_CODE in block.annotations:
            return
        if len(block.match_buffers):
            raise IllegalRewrite(f"block {block.name_hint} is for an instruction of its own")
        bound = {
            item.var: _positions(value, known, len(loops))
            for item, value in zip(block.iter_vars, node.iter_values, strict=True)
        }
        if any(value is None for value in bound.values()):
            raise IllegalRewrite(f"block {block.name_hint} goes where its data says")
        inner = {**known, **{var: value for var, value in bound.items() if value is not None}}
        if block.init is not None:
            yield from self.nests(block.init, loops, inner, block.name_hint)
        yield from self.nests(block.body, loops, inner, block.name_hint)

    def _nest(
        self, node: BufferStore, loops: tuple[NestLoop, ...], known: Mapping[Var, Positions], name: str
    ) -> LoopNest:
        loads: list[TensorLoad] = []
        structural_walk(node.value, (TensorLoad, loads.append))
        depth = len(loops)
        return LoopNest(
            name=name,
            loops=loops,
            store=self._access(node.buffer, node.indices, known, depth),
            loads=tuple(self._access(load.source, load.indices, known, depth) for load in loads),
            flops_per_point=count_flops(node.value),
        )

    def _access(
        self, buffer: Buffer, indices: Sequence[Expr], known: Mapping[Var, Positions], depth: int
    ) -> NestAccess:
        shape = static_shape(buffer)
        return NestAccess(
            buffer=self._buffers.setdefault(buffer, len(self._buffers)),
            itemsize_bytes=itemsize_bytes(dtype_of(buffer)),
            shape=shape,
            moves=tuple(
                _moves(_positions(index, known, depth), size, depth) for index, size in zip(indices, shape, strict=True)
            ),
            is_param=buffer in self._params,
        )


def _moved_by(known: Mapping[Var, Positions], variable: Var, extent: int) -> dict[Var, Positions]:
    """Positions in one more loop, which all that is known so far does not move in."""
    wider = {var: np.append(value, value[0]) for var, value in known.items()}
    depth = len(next(iter(wider.values()))) if wider else 2
    wider[variable] = np.zeros(depth, dtype=np.int64)
    wider[variable][-1] = extent - 1
    return wider


def _static(extent: Expr) -> int:
    value = getattr(extent, "value", None)
    if value is None:
        raise IllegalRewrite(f"a loop has the dynamic extent {extent}")
    return int(value)


def _moves(positions: Positions | None, size: int, depth: int) -> tuple[int, ...]:
    """Elements by loop; an index that depends on data may go anywhere in every loop."""
    if positions is None:
        return (size - 1,) * depth
    return tuple(min(size - 1, abs(int(value - positions[0]))) for value in positions[1:])


def _positions(node: Expr, known: Mapping[Var, Positions], depth: int) -> Positions | None:
    """``node`` at every position of the loops; None where it depends on data."""
    kind = type(node).__name__
    if kind == "IntImm":
        return np.full(depth + 1, int(node.value), dtype=np.int64)
    if kind == "Var":
        return known.get(node)
    if kind == "Cast":
        return _positions(node.value, known, depth)
    if kind in _INTEGER:
        return _combined(kind, node, known, depth)
    if kind == "Call" and node.op.same_as(IF_THEN_ELSE):
        return _positions(node.args[1], known, depth)
    return _positions(node.true_value, known, depth) if kind == "Select" else None


def _combined(kind: str, node: Node, known: Mapping[Var, Positions], depth: int) -> Positions | None:
    left, right = _positions(node.a, known, depth), _positions(node.b, known, depth)
    if left is None or right is None or (kind.startswith("Floor") and not right.all()):
        return None
    result: Positions = _INTEGER[kind](left, right)
    return result


_INTEGER = {
    "Add": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "FloorDiv": np.floor_divide,
    "FloorMod": np.mod,
    "Min": np.minimum,
    "Max": np.maximum,
}


def _with_private_buffers(nest: LoopNest, nests: Sequence[LoopNest]) -> LoopNest:
    """The loops that all users of a buffer share have one of their own in each iteration, when it is compacted."""

    def settled(access: NestAccess) -> NestAccess:
        if access.is_param:
            return access
        users = [other.loops for other in nests if any(item.buffer == access.buffer for item in other.accesses)]
        together = zip(*users, strict=False)  # as deep as all of them are
        shared = itertools.takewhile(lambda level: all(loop == level[0] for loop in level), together)
        return replace(access, private_depth=sum(1 for _ in shared))

    return replace(nest, store=settled(nest.store), loads=tuple(map(settled, nest.loads)))
