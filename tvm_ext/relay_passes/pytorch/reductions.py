"""Sums, extrema and what is computed from them along axes."""

from __future__ import annotations

from math import prod
from typing import Any

from tvm_ext._tvm import Expr, relax

from .pen import TorchPen, dtype_of, extents, is_float, rule


def _axes(dim: Any, rank: int) -> list[int]:
    """None and [] mean all axes."""
    given = [dim] if isinstance(dim, int) else list(dim or range(rank))
    return [axis % rank for axis in given] if rank else []


@rule("sum sum.dim_IntList mean mean.dim amax amin prod prod.dim_int max min")
def _reduced(pen: TorchPen) -> Expr:
    x = pen.cast(pen.operands[0], pen.dtype)
    kind = pen.name.partition(".")[0].removeprefix("a")
    has_axes = pen.name.endswith((".dim_IntList", ".dim", ".dim_int")) or pen.name.startswith(("amax", "amin"))
    axes = _axes(pen.operands[1] if has_axes else None, len(extents(x)))
    keep = bool(has_axes and pen.operands[2])
    wide = "float32" if pen.dtype in ("float16", "bfloat16") and kind in ("sum", "mean", "prod") else pen.dtype
    if not axes:
        return x
    reduced = pen.emit(getattr(relax.op, kind)(pen.cast(x, wide), axes, keepdims=keep))
    return pen.reshaped(pen.cast(reduced, pen.dtype), pen.shape)


@rule("any any.dim any.dims all all.dim all.dims")
def _any(pen: TorchPen) -> Expr:
    x = pen.cast(pen.cast(pen.operands[0], "bool"), "int32")
    axes = _axes(pen.operands[1] if "dim" in pen.name else None, len(extents(x)))
    reduced = pen.emit((relax.op.max if pen.name.startswith("any") else relax.op.min)(x, axes)) if axes else x
    return pen.reshaped(pen.cast(reduced, "bool"), pen.shape)


@rule("argmax argmin")
def _place(pen: TorchPen) -> Expr:
    x, dim, keep = pen.operands
    op = relax.op.argmax if pen.name.startswith("argmax") else relax.op.argmin
    if dim is None:
        x, dim, keep = pen.reshaped(x, [prod(extents(x))]), 0, False
    return pen.reshaped(pen.cast(pen.emit(op(x, dim % len(extents(x)), keep)), pen.dtype), pen.shape)


@rule("max.dim min.dim")
def _extremum(pen: TorchPen) -> list[Expr]:
    x, dim, keep = pen.operands
    axis, is_max = dim % len(extents(x)), pen.name.startswith("max")
    value = pen.emit((relax.op.max if is_max else relax.op.min)(x, [axis], keepdims=keep))
    place = pen.emit((relax.op.argmax if is_max else relax.op.argmin)(x, axis, keep))
    return [value, pen.cast(place, "int64")]


@rule("cumsum")
def _cumsum(pen: TorchPen) -> Expr:
    x, dim = pen.operands[:2]
    return pen.emit(relax.op.cumsum(pen.cast(x, pen.dtype), dim % len(pen.shape), pen.dtype))


@rule("_softmax softmax.int _log_softmax log_softmax.int _safe_softmax")
def _softmax(pen: TorchPen) -> Expr:
    x, dim = pen.operands[:2]
    if "safe" in pen.name:
        raise pen.refusal("answers rows of -inf by 0", "export without decomposing scaled_dot_product_attention")
    op = relax.op.nn.log_softmax if "log" in pen.name else relax.op.nn.softmax
    return pen.emit(op(pen.cast(x, pen.dtype), axis=dim % len(pen.shape)))


@rule("var.correction std.correction var_mean.correction")
def _variance(pen: TorchPen) -> Any:
    x, dim, correction, keep = pen.operands
    axes = _axes(dim, len(extents(x)))
    count = prod(extents(x)[axis] for axis in axes)
    divisor = count - (1 if correction is None else correction)
    if divisor <= 0:
        raise pen.refusal(f"divides by {count} elements less {count - divisor}")
    centred = pen.emit(relax.op.subtract(x, pen.emit(relax.op.mean(x, axes, keepdims=True))))
    total = pen.emit(relax.op.sum(pen.emit(relax.op.multiply(centred, centred)), axes, keepdims=keep))
    value = pen.emit(relax.op.divide(total, pen.cast(float(divisor), pen.dtype)))
    if pen.name.startswith("var_mean"):
        return [value, pen.emit(relax.op.mean(x, axes, keepdims=keep))]
    return pen.emit(relax.op.sqrt(value)) if pen.name.startswith("std") else value


@rule("linalg_vector_norm norm.ScalarOpt_dim")
def _norm(pen: TorchPen) -> Expr:
    x, order, dim, keep = pen.operands[:4]
    x = pen.cast(x, pen.dtype)
    axes = _axes(dim, len(extents(x)))
    if order not in (1, 2, float("inf")) or not is_float(dtype_of(x)):
        raise pen.refusal(f"has the order {order}; 1, 2 and infinity are known")
    size = pen.emit(relax.op.multiply(x, x) if order == 2 else relax.op.abs(x))
    total = pen.emit((relax.op.max if order == float("inf") else relax.op.sum)(size, axes, keepdims=bool(keep)))
    return pen.reshaped(pen.emit(relax.op.sqrt(total)) if order == 2 else total, pen.shape)
