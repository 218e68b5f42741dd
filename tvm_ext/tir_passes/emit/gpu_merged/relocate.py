"""Moves the body of a lowered kernel into another launch: other memory, other threads, another block number.

A lowered kernel has parameters that are pointers, views of them, and a launch around its statements. Moved, its views
are of one of the merged kernel's tensors, a number of elements further on, which a table says; its shared memory is a
piece of one that all bodies use in turn; its threads are those of a 1-D block, of which it may need fewer.

Worked example: in a block of 256 threads, a body for 16 x 8 of them reads ``threadIdx.y`` as ``threadIdx.x // 16 % 8``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from tvm_ext._tvm import (
    AllocBuffer,
    Buffer,
    BufferStore,
    Call,
    DeclBuffer,
    Expr,
    PrimFunc,
    Stmt,
    TensorLoad,
    Var,
    nodes_in,
    structural_map,
    structural_mutate,
    structural_walk,
    tirx,
)
from tvm_ext.analysis.computation_exprs import itemsize_bytes
from tvm_ext.analysis.computations import dtype_of, substitute
from tvm_ext.analysis.device_code import constant_int, op_name, pointer_variable, split_dtype, thread_extents
from tvm_ext.errors import IllegalRewrite
from tvm_ext.ir.build_ir import cast_to
from tvm_ext.ir.simt_ir import MIN_BLOCKS_PER_UNIT
from tvm_ext.records.merged import UNIT_BYTES
from tvm_ext.support.arithmetic import ceil_div
from tvm_ext.tir_passes.pipelining.loops import ACCESS_PTR, POINTERS

from .guard import guarded

_AXES = ("x", "y", "z")
SHARED_ALIGNMENT = 128  # a choice: bytes, all banks of shared memory; more than any copy's alignment
MOST_BYTES = 2**31 - 1  # what a signed 32-bit index tells apart
_REFUSED = ("mbarrier", "cp.async.bulk", "cluster")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Memory:
    """A tensor in which a body's buffer lies, ``units`` (of `UNIT_BYTES`) behind its beginning."""

    base: Buffer
    units: Expr


@dataclass(frozen=True, kw_only=True, slots=True)
class BodyNeed:
    """What a body needs of its block, and how its rTasks are numbered: ``grid`` (x, y, z), x fastest."""

    threads: int
    shared_bytes: int
    grid: tuple[int, int, int]


def need_of(func: PrimFunc) -> BodyNeed:
    """What a lowered kernel needs; raises IllegalRewrite for what cannot be moved."""
    extents = thread_extents(func)
    _refuse_bulk_copies(func)
    return BodyNeed(
        threads=prod(size for tag, size in extents.items() if tag.startswith("threadIdx")),
        shared_bytes=sum(_rounded(_bytes(allocation.buffer)) for allocation in _shared_allocations(func)),
        grid=_shape(extents, "blockIdx"),
    )


def check_movable(func: PrimFunc) -> None:
    """Raise IllegalRewrite where ``func`` could not be a body, among others that need more threads."""
    need = need_of(func)
    zero = tirx.IntImm("int32", 0)
    anywhere = tirx.decl_buffer([MOST_BYTES], "uint8", "anywhere")
    memory = [Memory(base=anywhere, units=zero) for _ in func.params]
    pool = tirx.decl_buffer([max(1, need.shared_bytes)], "uint8", "pool", scope="shared")
    moved_body(func, memory, pool, Var("thread", "int32"), zero, need.threads + 1)


def moved_body(
    func: PrimFunc, memory: Sequence[Memory], pool: Buffer | None, thread: Expr, task: Expr, threads: int
) -> Stmt:
    """The statements of ``func`` for rTask ``task``, by thread ``thread`` of a block of ``threads``.

    ``memory`` is where its parameters lie, ``pool`` the block's shared memory. All threads of the block run them, and
    meet at every barrier.
    """
    extents = thread_extents(func)
    body = _without_launch(func.body, _indices(extents, thread, task))
    body = _Relocation(func, memory, pool).applied(body)
    own = prod(size for tag, size in extents.items() if tag.startswith("threadIdx"))
    return body if own == threads else guarded(body, thread < tirx.IntImm("int32", own))


def _shape(extents: Mapping[str, int], kind: str) -> tuple[int, int, int]:
    x, y, z = (extents.get(f"{kind}.{axis}", 1) for axis in _AXES)
    return x, y, z


def _indices(extents: Mapping[str, int], thread: Expr, task: Expr) -> dict[str, Expr]:
    """By tag, the number that a thread or block of the original launch has."""
    found: dict[str, Expr] = {}
    for kind, number in (("threadIdx", thread), ("blockIdx", task)):
        shape = _shape(extents, kind)
        for position, axis in enumerate(_AXES):
            inner = prod(shape[:position])
            value = number if inner == 1 else tirx.floordiv(number, tirx.IntImm("int32", inner))
            if any(size > 1 for size in shape[position + 1 :]):
                value = tirx.floormod(value, tirx.IntImm("int32", shape[position]))
            found[f"{kind}.{axis}"] = value if shape[position] > 1 else tirx.IntImm("int32", 0)
    return found


def _without_launch(body: Stmt, indices: Mapping[str, Expr]) -> Stmt:
    """``body`` without its launch, each number of a thread or block replaced."""
    table: list[tuple[Var, Expr]] = []

    def peel(node: Stmt, mutator: object) -> Stmt:
        if node.attr_key == MIN_BLOCKS_PER_UNIT:
            return mutator.mutate(node.body)  # type: ignore[attr-defined]
        if node.attr_key != "thread_extent":
            return mutator.default_mutate(node)  # type: ignore[attr-defined]
        variable = node.node.var
        table.append((variable, cast_to(indices[str(node.node.thread_tag)], dtype_of(variable))))
        return mutator.mutate(node.body)  # type: ignore[attr-defined]

    bare = structural_mutate(body, (tirx.AttrStmt, peel))
    return substitute(bare, table)


def _shared_allocations(func: PrimFunc) -> list[AllocBuffer]:
    found = nodes_in(func.body, AllocBuffer)
    return [node for node in found if str(node.buffer.ty.storage_scope).startswith("shared")]


def _bytes(buffer: Buffer) -> int:
    count = prod(constant_int(extent, f"the size of {buffer.name}") for extent in buffer.ty.shape)
    return count * _itemsize(buffer)


def _itemsize(buffer: Buffer) -> int:
    base, lanes = split_dtype(dtype_of(buffer))
    size = itemsize_bytes(base)
    if size < 1 or UNIT_BYTES % int(size * lanes):
        raise IllegalRewrite(f"elements of {buffer.name} are {dtype_of(buffer)}")
    return int(size) * lanes


def _rounded(size_bytes: int) -> int:
    return ceil_div(size_bytes, SHARED_ALIGNMENT) * SHARED_ALIGNMENT


def _refuse_bulk_copies(func: PrimFunc) -> None:
    for call in nodes_in(func.body, Call):
        name = op_name(call)
        if any(word in name or any(word in str(argument) for argument in call.args[:4]) for word in _REFUSED):
            raise IllegalRewrite("it copies in bulk, by mbarriers that stay in shared memory")


@dataclass(slots=True)
class _Relocation:
    """The buffers of ``func`` as what they become."""

    func: PrimFunc
    memory: Sequence[Memory]
    pool: Buffer | None
    places: dict[int, Memory] = field(default_factory=dict)  # by the hash of a pointer or buffer
    views: dict[int, Buffer] = field(default_factory=dict)
    kept: list[object] = field(default_factory=list)  # so that no hash is used twice

    def applied(self, body: Stmt) -> Stmt:
        for parameter, memory in zip(self.func.params, self.memory, strict=True):
            self._put(parameter, memory)
        taken = 0
        for allocation in _shared_allocations(self.func):
            assert self.pool is not None, "a body with shared memory has a pool"
            self._put(allocation.buffer, Memory(base=self.pool, units=tirx.IntImm("int32", taken // UNIT_BYTES)))
            taken += _rounded(_bytes(allocation.buffer))
        structural_walk(body, [(DeclBuffer, self._note_view)], order="pre")
        rules = [(TensorLoad, self._load), (BufferStore, self._store), (Call, self._call)]
        moved = structural_map(body, [*rules, (DeclBuffer, self._declare), (AllocBuffer, self._declare)])
        _check_moved(moved, self.places, self.views)
        return moved

    def _put(self, variable: Var, memory: Memory) -> None:
        self.places[hash(variable)] = memory
        self.kept.append(variable)

    def _note_view(self, node: DeclBuffer) -> None:
        memory = self.places.get(hash(pointer_variable(node.data)))
        if memory is not None:
            self._put(node.buffer, memory)
            self._view(node.buffer)

    def _view(self, buffer: Buffer) -> Buffer:
        """What the body's ``buffer`` becomes: a view of all of the tensor that it lies in."""
        if hash(buffer) not in self.views:
            base = self.places[hash(buffer)].base
            size = max(1, _bytes(base) // _itemsize(buffer))
            scope, kind = str(base.ty.storage_scope), dtype_of(buffer)
            self.views[hash(buffer)] = tirx.decl_buffer([size], kind, str(buffer.name), scope=scope)
        return self.views[hash(buffer)]

    def _shift(self, buffer: Buffer, index: Expr) -> Expr:
        """``index`` into the view."""
        units = self.places[hash(buffer)].units
        if getattr(units, "value", None) == 0:
            return index
        scale = UNIT_BYTES // _itemsize(buffer)
        if isinstance(index, tirx.Ramp):
            return tirx.Ramp(self._shift(buffer, index.base), index.stride, index.lanes)
        elements = cast_to(units * tirx.IntImm("int32", scale), dtype_of(index))
        return index + elements

    def _is_moved(self, buffer: Buffer) -> bool:
        return hash(buffer) in self.places

    def _load(self, node: TensorLoad) -> Expr:
        if not self._is_moved(node.source):
            return node
        return tirx.BufferLoad(self._view(node.source), [self._shift(node.source, index) for index in node.indices])

    def _store(self, node: BufferStore) -> Stmt:
        if not self._is_moved(node.buffer):
            return node
        indices = [self._shift(node.buffer, index) for index in node.indices]
        return BufferStore(self._view(node.buffer), node.value, indices)

    def _declare(self, node: DeclBuffer | AllocBuffer) -> Stmt:
        if not self._is_moved(node.buffer):
            return node
        return DeclBuffer(self._view(node.buffer), data=self.places[hash(node.buffer)].base.data)

    def _call(self, node: Call) -> Call:
        name = op_name(node)
        arguments = list(node.args)
        if name == ACCESS_PTR:
            self._shift_pointer(arguments, 1, 2)
        for pointer in POINTERS.get(name, ()):
            if pointer.offset is not None and not pointer.counts_fragments:
                self._shift_pointer(arguments, pointer.position, pointer.offset)
        if all(new.same_as(old) for new, old in zip(arguments, node.args, strict=True)):
            return node
        return Call(node.op, arguments, attrs=node.attrs, ret_ty=node.ty)

    def _shift_pointer(self, arguments: list[Expr], position: int, offset: int) -> None:
        """Let the bare address at ``position`` be that of a view, and the offset that follows it count from there."""
        data = arguments[position]
        if not (isinstance(data, Call) and op_name(data) == "tirx.buffer_data" and self._is_moved(data.args[0])):
            return
        buffer = data.args[0]
        arguments[position] = self._view(buffer).data
        arguments[offset] = self._shift(buffer, arguments[offset])


def _check_moved(body: Stmt, places: Mapping[int, Memory], views: Mapping[int, Buffer]) -> None:
    """Raise IllegalRewrite where ``body`` still names what it was moved away from: an address that is used unseen."""
    own = {hash(view) for view in views.values()}

    for variable in nodes_in(body, Var):
        if hash(variable) in places and hash(variable) not in own:
            raise IllegalRewrite(f"it uses the address of {variable.name} in a way that is not known")
