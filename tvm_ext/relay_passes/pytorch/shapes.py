"""Operators that move, select, join and make elements."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from tvm_ext._tvm import Expr, relax

from .pen import TorchPen, dtype_of, extents, rule


@rule(
    "clone alias detach contiguous lift_fresh_copy dropout native_dropout _assert_tensor_metadata copy "
    "broadcast_to expand expand_as"
)
def _same(pen: TorchPen) -> Expr:
    """A value itself, or as many of it as the result has."""
    if "dropout" in pen.name and pen.operands[2]:
        raise pen.refusal("drops elements in training", "export a module in eval mode")
    x = pen.operands[1 if pen.name.startswith("copy") else 0]
    x = pen.cast(x, pen.dtype)
    return x if extents(x) == pen.shape else pen.emit(relax.op.broadcast_to(x, list(pen.shape)))


@rule(
    "view _unsafe_view reshape unsqueeze squeeze squeeze.dim squeeze.dims flatten.using_ints unflatten.int view_copy "
    "reshape_as view_as"
)
def _reshape(pen: TorchPen) -> Expr:
    return pen.reshaped(pen.operands[0], pen.shape)


@rule("permute transpose.int t numpy_T")
def _permute(pen: TorchPen) -> Expr:
    x, rank = pen.operands[0], len(pen.shape)
    axes = list(range(rank))
    if pen.name.startswith("permute"):
        axes = [axis % rank for axis in pen.operands[1]] if rank else []
    elif pen.name.startswith("transpose"):
        first, second = (axis % rank for axis in pen.operands[1:3])
        axes[first], axes[second] = second, first
    else:
        axes = axes[::-1]
    return pen.emit(relax.op.permute_dims(x, axes)) if axes != sorted(axes) else x


@rule("slice.Tensor narrow select.int")
def _slice(pen: TorchPen) -> Expr:
    x, axis = pen.operands[0], pen.operands[1] % len(extents(pen.operands[0]))
    extent = extents(x)[axis]
    if pen.name.startswith("select"):
        begin = pen.operands[2] % extent
        return pen.reshaped(pen.sliced(x, axis, begin, begin + 1), pen.shape)
    if pen.name.startswith("narrow"):
        begin = pen.operands[2] % extent
        return pen.sliced(x, axis, begin, begin + pen.operands[3])
    begin, end, step = _span(pen.operands[2:5], extent)
    return pen.sliced(x, axis, begin, end, step)


def _span(given: Sequence[int | None], extent: int) -> tuple[int, int, int]:
    """What ``begin:end:step`` means along an axis: within it, and never backwards."""
    begin, end, step = slice(*given).indices(extent)
    return begin, max(begin, end), step


@rule("slice_scatter select_scatter")
def _scattered(pen: TorchPen) -> Expr:
    """The parts of a tensor before and behind a slice, and a new one between them."""
    x, new, dim = pen.operands[:3]
    axis = dim % len(pen.shape)
    extent = pen.shape[axis]
    if pen.name.startswith("select"):
        begin, end, step = pen.operands[3] % extent, pen.operands[3] % extent + 1, 1
        new = pen.reshaped(new, [1 if at == axis else size for at, size in enumerate(pen.shape)])
    else:
        begin, end, step = _span(pen.operands[3:6], extent)
    if step != 1:
        raise pen.refusal(f"writes every element {step} of an axis")
    before = [pen.sliced(x, axis, 0, begin)] if begin else []
    behind = [pen.sliced(x, axis, end, extent)] if end < extent else []
    return pen.joined([*before, pen.cast(new, pen.dtype), *behind], axis)


@rule("cat stack")
def _cat(pen: TorchPen) -> Expr:
    tensors, dim = pen.operands
    axis = dim % len(pen.shape)
    parts = [pen.cast(item, pen.dtype) for item in tensors]
    if pen.name.startswith("stack"):
        shape = [1 if at == axis else size for at, size in enumerate(pen.shape)]
        return pen.joined([pen.reshaped(part, shape) for part in parts], axis)
    return pen.joined([part for part in parts if extents(part) != (0,) or len(pen.shape) == 1], axis)


@rule("split.Tensor split_with_sizes chunk unbind.int")
def _split(pen: TorchPen) -> list[Expr]:
    """The extents of the results say where to cut."""
    x = pen.operands[0]
    dim = pen.operands[1] if pen.name.startswith("unbind") else pen.operands[2]
    axis, begin, parts = dim % len(extents(x)), 0, []
    for shape in pen.shapes:
        size = 1 if pen.name.startswith("unbind") else shape[axis]
        parts.append(pen.reshaped(pen.sliced(x, axis, begin, begin + size), shape))
        begin += size
    return parts


@rule("repeat tile")
def _repeat(pen: TorchPen) -> Expr:
    x, counts = pen.operands[:2]
    rank = max(len(counts), len(extents(x)))
    x = pen.reshaped(x, [1] * (rank - len(extents(x))) + list(extents(x)))
    return pen.emit(relax.op.tile(x, [1] * (rank - len(counts)) + list(counts)))


@rule("flip")
def _flip(pen: TorchPen) -> Expr:
    x = pen.operands[0]
    for axis in pen.operands[1]:
        x = pen.emit(relax.op.flip(x, axis % len(pen.shape)))
    return x


@rule("roll")
def _roll(pen: TorchPen) -> Expr:
    x, shifts, dims = pen.operands
    shape = pen.shape
    if not dims:
        x, dims = pen.reshaped(x, [prod(shape)]), [0]
    for shift, dim in zip(shifts, dims, strict=True):
        axis = dim % len(extents(x))
        extent = extents(x)[axis]
        cut = -shift % extent if extent else 0
        if cut:
            x = pen.joined([pen.sliced(x, axis, cut, extent), pen.sliced(x, axis, 0, cut)], axis)
    return pen.reshaped(x, shape)


@rule("constant_pad_nd")
def _pad(pen: TorchPen) -> Expr:
    """Amounts come in pairs, those of the last axis first; negative ones cut."""
    x, amounts, value = pen.operands
    rank = len(pen.shape)
    pairs = [(0, 0)] * rank
    for index in range(len(amounts) // 2):
        pairs[rank - 1 - index] = (amounts[2 * index], amounts[2 * index + 1])
    for axis, (before, behind) in enumerate(pairs):
        x = pen.sliced(x, axis, max(0, -before), extents(x)[axis] - max(0, -behind))
    widths = [max(0, amount) for pair in pairs for amount in pair]
    return pen.emit(relax.op.nn.pad(x, widths, pad_value=value)) if any(widths) else x


@rule("embedding index_select")
def _rows(pen: TorchPen) -> Expr:
    if pen.name.startswith("embedding"):
        weight, index = pen.operands[:2]
        return pen.emit(relax.op.take(weight, index, axis=0))
    x, dim, index = pen.operands
    return pen.emit(relax.op.take(x, index, axis=dim % len(pen.shape)))


@rule("index.Tensor")
def _index(pen: TorchPen) -> Expr:
    x, given = pen.operands
    axes = [axis for axis, index in enumerate(given) if index is not None]
    if any(dtype_of(given[axis]) in ("bool", "uint8") for axis in axes):
        raise pen.refusal("selects by a mask: how much it selects is known at run time alone")
    indices = [_from_front(pen, given[axis], extents(x)[axis]) for axis in axes]
    if len(axes) == 1:
        return pen.emit(relax.op.take(x, indices[0], axis=axes[0]))
    if axes != list(range(axes[0], axes[0] + len(axes))):
        raise pen.refusal(f"indexes the axes {axes}, others between them")
    shape, first = extents(x), axes[0]
    whole = (*shape[:first], prod(shape[first : first + len(axes)]), *shape[first + len(axes) :])
    place = indices[0]
    for axis, index in zip(axes[1:], indices[1:], strict=True):
        place = pen.emit(relax.op.add(pen.emit(relax.op.multiply(place, relax.const(shape[axis], "int64"))), index))
    return pen.emit(relax.op.take(pen.reshaped(x, whole), place, axis=first))


def _from_front(pen: TorchPen, index: Expr, extent: int) -> Expr:
    """Indices of an axis, negative ones being counted from its end."""
    index = pen.cast(index, "int64")
    known = pen.state(index)
    if known is not None and bool((known >= 0).all()):
        return index
    moved = pen.emit(relax.op.add(index, relax.const(extent, "int64")))
    return pen.emit(relax.op.where(pen.emit(relax.op.less(index, relax.const(0, "int64"))), moved, index))


@rule("gather")
def _gather(pen: TorchPen) -> Expr:
    x, dim, index = pen.operands[:3]
    axis = dim % len(pen.shape)
    if any(a != b for at, (a, b) in enumerate(zip(extents(x), pen.shape, strict=True)) if at != axis):
        for at, size in enumerate(pen.shape):
            x = x if at == axis else pen.sliced(x, at, 0, size)
    return pen.emit(relax.op.gather_elements(x, index, axis=axis))


@rule("full_like zeros_like ones_like new_full new_zeros new_ones")
def _filled(pen: TorchPen) -> Expr:
    value = pen.operands[2 if "new_full" in pen.name else 1] if "full" in pen.name else int("ones" in pen.name)
    return pen.emit(relax.op.broadcast_to(pen.cast(value, pen.dtype), list(pen.shape)))


@rule("tril triu")
def _triangle(pen: TorchPen) -> Expr:
    x, diagonal = pen.operands
    ones: Any = np.ones(pen.shape[-2:], "bool")
    kept = np.tril(ones, diagonal) if pen.name.startswith("tril") else np.triu(ones, diagonal)
    return pen.emit(relax.op.where(relax.const(kept, "bool"), x, pen.cast(0, pen.dtype)))


@rule("getitem")
def _getitem(pen: TorchPen) -> Expr:
    values, index = pen.operands
    if isinstance(values, Expr):
        return pen.emit(relax.TupleGetItem(values, index))
    if values[index] is None:
        raise pen.refusal(f"asks for result {index}, which is not computed here")
    return values[index]
