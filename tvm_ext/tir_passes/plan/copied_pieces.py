"""Kernels that only copy: what they write, or what they read, are pieces of one buffer, each without a gap.

Such a copy need not be made where whoever reads or writes a piece can be told where in the whole it lies.

Worked example: a split of 100 x 256 along its first axis copies row k of the whole to output k. Output k *is* the whole
from byte 1024 k on. A concatenation along the first axis is the same backwards.
"""

from __future__ import annotations

from math import prod

from tvm_ext._tvm import IF_THEN_ELSE, Analyzer, Buffer, BufferStore, Call, Expr, PrimFunc, TensorLoad, nodes_in, tirx
from tvm_ext.analysis.computation_exprs import itemsize_bytes
from tvm_ext.analysis.computations import dtype_of
from tvm_ext.analysis.relax_values import known_extent
from tvm_ext.records.rtask_split import CopiedPiece


def copied_pieces(func: PrimFunc) -> tuple[CopiedPiece, ...]:
    """The pieces that ``func`` copies, of one whole; none where it computes anything, or a piece has gaps.

    Pieces of what is written fill it: all of each is copied.
    """
    copies = _copies(func)
    if not copies:
        return ()
    sources, targets = {source for source, _ in copies}, {target for _, target in copies}
    if len(sources) == 1:
        pieces = [_piece(func, source, target, shift) for (source, target), shift in copies.items()]
    elif len(targets) == 1:
        pieces = [_piece(func, target, source, -shift) for (source, target), shift in copies.items()]
        if not _fill(func, next(iter(targets)), pieces):
            return ()
    else:
        return ()
    return tuple(pieces) if all(_is_inside(func, piece) for piece in pieces) else ()


def _copies(func: PrimFunc) -> dict[tuple[int, int], int]:
    """By read and written parameter, how many elements further on in its buffer an element is read than it is written.

    Empty where ``func`` does anything else.
    """
    copies: dict[tuple[int, int], int] = {}
    stores, loads = nodes_in(func.body, BufferStore), nodes_in(func.body, TensorLoad)
    has_others = any(not call.op.same_as(IF_THEN_ELSE) for call in nodes_in(func.body, Call))  # may do anything
    leaves = [(store, leaf) for store in stores for leaf in _leaves(store.value) or [None]]
    if has_others or len(leaves) != len(loads):
        return {}
    noted = all(leaf is not None and _note(func, leaf, store, copies) for store, leaf in leaves)
    return copies if noted else {}


def _note(func: PrimFunc, leaf: TensorLoad, store: BufferStore, copies: dict[tuple[int, int], int]) -> bool:
    """Add what is copied by ``store``; whether it is a copy, and as far on as others of the pair."""
    source, target, shift = _place(func, leaf.source), _place(func, store.buffer), _shift(leaf, store)
    if source is None or target is None or shift is None:
        return False
    return copies.setdefault((source, target), shift) == shift


def _leaves(value: Expr) -> list[TensorLoad]:
    """The elements among which ``value`` chooses; empty where it computes anything."""
    if isinstance(value, TensorLoad):
        return [value]
    if isinstance(value, Call) and value.op.same_as(IF_THEN_ELSE):
        chosen = [_leaves(value.args[1]), _leaves(value.args[2])]
        return [leaf for leaves in chosen for leaf in leaves] if all(chosen) else []
    return []


def _place(func: PrimFunc, buffer: Buffer) -> int | None:
    """Which parameter ``buffer`` is, if it is one of known size without strides."""
    known = all(known_extent(extent) for extent in buffer.ty.shape) and not len(buffer.ty.strides)
    return next((position for position, param in enumerate(func.params) if known and param.same_as(buffer)), None)


def _shift(load: TensorLoad, store: BufferStore) -> int | None:
    difference = _flat(load.source, load.indices) - _flat(store.buffer, store.indices)
    return known_extent(Analyzer().simplify(difference))


def _flat(buffer: Buffer, indices: list[Expr]) -> Expr:
    place: Expr = tirx.IntImm("int64", 0)
    for extent, index in zip(buffer.ty.shape, indices, strict=True):
        place = place * tirx.IntImm("int64", known_extent(extent) or 0) + tirx.Cast("int64", index)
    return place


def _elements(func: PrimFunc, param: int) -> int:
    return prod(known_extent(extent) or 0 for extent in func.params[param].ty.shape)


def _piece(func: PrimFunc, whole: int, piece: int, offset: int) -> CopiedPiece:
    itemsize = int(itemsize_bytes(dtype_of(func.params[whole])))
    return CopiedPiece(whole=whole, piece=piece, offset_bytes=offset * itemsize)


def _fill(func: PrimFunc, whole: int, pieces: list[CopiedPiece]) -> bool:
    """Whether ``pieces`` lie side by side in all of ``whole``, so that each byte can come from one of them alone."""
    itemsize = int(itemsize_bytes(dtype_of(func.params[whole])))
    end = 0
    for piece in sorted(pieces, key=lambda piece: piece.offset_bytes):
        if piece.offset_bytes != end:
            return False
        end += itemsize * _elements(func, piece.piece)
    return end == itemsize * _elements(func, whole)


def _is_inside(func: PrimFunc, piece: CopiedPiece) -> bool:
    """Also: of the same type. A cast is no copy."""
    whole, part = func.params[piece.whole], func.params[piece.piece]
    itemsize = int(itemsize_bytes(dtype_of(whole)))
    end = piece.offset_bytes + itemsize * _elements(func, piece.piece)
    fits = piece.offset_bytes >= 0 and end <= itemsize * _elements(func, piece.whole)
    return fits and dtype_of(whole) == dtype_of(part)
