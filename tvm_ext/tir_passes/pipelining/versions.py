"""Steps 1 to 3 of ALCOP §3.2: buffers with a version for each stage, and accesses that say which version they mean."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm_ext._tvm import Buffer, BufferStore, Call, Expr, Node, Stmt, TensorLoad, structural_map, tirx
from tvm_ext.devices.gpu import ALL_BANKS_BYTES
from tvm_ext.ir.build_ir import cast_to
from tvm_ext.support.arithmetic import ceil_div

from .loops import (
    ACCESS_PTR,
    POINTERS,
    buffer_behind,
    bytes_per_element,
    integer,
    is_shared,
    op_name,
    scope_of,
    size_of,
)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Versioned:
    """``old`` (flat, of one tile) and ``new``, which has ``count`` versions of ``size`` elements one after another."""

    old: Buffer
    new: Buffer
    count: int
    size: int


def version_elements(buffer: Buffer) -> int:
    """Elements from one version of the flat ``buffer`` to the next, in shared memory a multiple of all banks.

    So a layout without bank conflicts stays one in each version.
    """
    size = size_of(buffer)
    assert size is not None, buffer
    if not is_shared(buffer):
        return size
    granule = ALL_BANKS_BYTES // bytes_per_element(str(buffer.ty.dtype))
    return ceil_div(size, granule) * granule


def version_bytes(buffer: Buffer) -> int:
    """`version_elements` in bytes."""
    return version_elements(buffer) * bytes_per_element(str(buffer.ty.dtype))


def with_versions(buffer: Buffer, count: int, scope: str | None = None) -> Versioned:
    """A buffer for ``count`` versions of the flat ``buffer``, in another ``scope`` where one is given."""
    size, dtype = version_elements(buffer), str(buffer.ty.dtype)
    new = tirx.decl_buffer(
        [tirx.IntImm(str(buffer.ty.shape[0].ty.dtype), count * size)], dtype, str(buffer.name),
        scope=scope or scope_of(buffer), data_alignment=int(buffer.ty.data_alignment),
    )  # fmt: skip
    return Versioned(old=buffer, new=new, count=count, size=size)


def use_versions(statement: Stmt, versions: Sequence[tuple[Versioned, Expr]]) -> Stmt:
    """``statement`` with every access to ``old`` made one to version ``slot`` of ``new``.

    Worked example: ``S[i]`` with 3 versions of 64 elements and slot ``k % 3`` is ``S[k % 3 * 64 + i]``. Addresses
    passed to calls move the same way; a fragment's index counts fragments: 4 of them a version move it by ``slot * 4``.
    """

    def find(buffer: Buffer | None) -> tuple[Versioned, Expr] | None:
        return next((version for version in versions if buffer is not None and buffer.same_as(version[0].old)), None)

    def load(node: TensorLoad) -> Node:
        version = find(node.source)
        return node if version is None else tirx.BufferLoad(version[0].new, [_moved(node.indices[0], version)])

    def store(node: BufferStore) -> Node:
        version = find(node.buffer)
        return node if version is None else BufferStore(version[0].new, node.value, [_moved(node.indices[0], version)])

    def call(node: Call) -> Node:
        name = op_name(node)
        if name == ACCESS_PTR:
            version = find(buffer_behind(node.args[1]))
            if version is None:
                return node
            offset = _moved(node.args[2], version)
            return Call(node.op, [node.args[0], version[0].new.data, offset, *node.args[3:]], ret_ty=node.ty)
        arguments = list(node.args)
        for pointer in POINTERS.get(name, ()):
            version = find(buffer_behind(arguments[pointer.position]))
            if version is None or pointer.offset is None:
                continue
            each = _elements_of_fragment(node, version[0]) if pointer.counts_fragments else 1
            arguments[pointer.position] = version[0].new.data
            arguments[pointer.offset] = _moved(arguments[pointer.offset], version, each)
        return node if len(arguments) == 0 else _same_or_new(node, arguments)

    return structural_map(statement, [(TensorLoad, load), (BufferStore, store), (Call, call)])


def _same_or_new(node: Node, arguments: list[Expr]) -> Node:
    if all(new.same_as(old) for new, old in zip(arguments, node.args, strict=True) if hasattr(new, "same_as")):
        return node
    return Call(node.op, arguments, attrs=node.attrs, ret_ty=node.ty)


def _moved(index: Expr, version: tuple[Versioned, Expr], elements: int = 1) -> Expr:
    versioned, slot = version
    dtype = str(index.ty.dtype) if not isinstance(index, int) else "int32"
    step = tirx.IntImm(dtype, versioned.size // elements)
    if integer(slot) is not None:
        return index + tirx.IntImm(dtype, (integer(slot) or 0) * (versioned.size // elements))
    return index + cast_to(slot, dtype) * step


def _elements_of_fragment(call: Call, versioned: Versioned) -> int:
    """Elements of the fragments that a wmma call counts. A's are m x k, B's k x n."""
    shapes = {"wmma.matrix_a": (1, 3), "wmma.matrix_b": (3, 2), "wmma.accumulator": (1, 2)}
    if op_name(call) == "tirx.tvm_mma_sync":
        return 256  # mma_sync does not repeat the shape: all that TVM emits have 256 elements (16x16, 32x8 by 8x32 ...)
    first, second = shapes[scope_of(versioned.old)]
    return int(call.args[first].value) * int(call.args[second].value)
