"""Operators on tensors without elements become constants and slices, before kernels are made of them.

A kernel over no elements has nothing to tile, and a loop of no steps never sets the element that a sum starts from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf, nan
from typing import Any

import numpy as np

from tvm_ext._tvm import CALL_TIR, Call, Expr, Type, ir, relax, tirx

from .rewriting import CallRewriter, call_pass

_PRODUCTS = frozenset(
    ["relax.matmul", "einsum", *(f"relax.nn.conv{rank}d{kind}" for rank in (1, 2, 3) for kind in ("", "_transpose"))]
)
_SAMPLERS = frozenset(["relax.image.grid_sample", "relax.vision.roi_align", "relax.vision.roi_pool"])
"""They read pixels wherever their kernels clamp them to, which is outside an image that has none."""


def _limits(dtype: np.dtype[Any]) -> tuple[float, float]:
    if dtype.kind == "b":
        return False, True
    return (np.iinfo(dtype).min, np.iinfo(dtype).max) if dtype.kind in "iu" else (-inf, inf)


_OF_NOTHING: dict[str, Callable[[np.dtype[Any]], float]] = {
    **dict.fromkeys(_PRODUCTS | _SAMPLERS, lambda _: 0),
    "relax.sum": lambda _: 0,
    "relax.prod": lambda _: 1,
    "relax.mean": lambda _: nan,
    "relax.max": lambda dtype: _limits(dtype)[0],
    "relax.min": lambda dtype: _limits(dtype)[1],
}
"""Operator to what it makes of no elements, by ONNX's definitions of the reductions: their neutral element."""

_UPDATES = frozenset(["relax.scatter_elements", "relax.scatter_nd", "relax.index_put"])
"""Operators that give their first operand back where their third one has no elements."""


@call_pass("tvm_ext.SettleEmptyTensors")
class SettleEmptyTensors(CallRewriter):
    """Replace results without elements, reductions and products of nothing, and splits that have an empty part."""

    def rewritten(self, call: Call) -> Expr:
        if not isinstance(call.op, ir.Op) or not call.op.get_attr("FPurity"):
            return call
        kind = self.builder_.normalize(call).ty
        if isinstance(kind, relax.TupleType):
            return self._settled_tuple(call, list(kind.fields))
        extents = _extents(kind)
        if extents is None:
            return call
        if 0 in extents:
            return _filled(extents, kind.dtype, 0)
        if call.op.name in _UPDATES and _is_empty(call.args[2].ty):
            return call.args[0]
        value = _OF_NOTHING.get(_name_of(call))
        if value is None or not any(_is_empty(argument.ty) for argument in call.args):
            return call
        return _filled(extents, kind.dtype, value(np.dtype(str(kind.dtype))))

    def _settled_tuple(self, call: Call, kinds: Sequence[Type]) -> Expr:
        shapes = [_extents(kind) for kind in kinds]
        known = [shape for shape in shapes if shape is not None]
        if len(known) < len(shapes) or not any(0 in shape for shape in known):
            return call
        if all(0 in shape for shape in known):
            return relax.Tuple([_filled(shape, kind.dtype, 0) for shape, kind in zip(known, kinds, strict=True)])
        return relax.Tuple(self._parts(call, known, kinds)) if call.op.name == "relax.split" else call

    def _parts(self, call: Call, shapes: Sequence[tuple[int, ...]], kinds: Sequence[Type]) -> list[Expr]:
        """The parts of a split as slices: stock TVM refuses sections that do not grow."""
        axis = int(call.attrs.axis) % len(shapes[0])
        parts, begin = [], 0
        for shape, kind in zip(shapes, kinds, strict=True):
            end = begin + shape[axis]
            cut = relax.op.strided_slice(call.args[0], axes=[axis], begin=[begin], end=[end])
            parts.append(_filled(shape, kind.dtype, 0) if 0 in shape else self.builder_.emit(cut))
            begin = end
        return parts


def _extents(kind: Type) -> tuple[int, ...] | None:
    """The shape of a tensor; None where it is none, or an extent is open."""
    values = getattr(getattr(kind, "shape", None), "values", None)
    if values is None or not all(isinstance(extent, tirx.IntImm) for extent in values):
        return None
    return tuple(int(extent) for extent in values)


def _name_of(call: Call) -> str:
    """The operator; of a function that an importer has made (`einsum1`), what it computes."""
    return str(call.args[0].name_hint).rstrip("0123456789") if call.op == CALL_TIR else str(call.op.name)


def _is_empty(kind: Type) -> bool:
    """Whether a tensor has no elements, or one in a tuple of operands has none."""
    if isinstance(kind, relax.TupleType):
        return any(map(_is_empty, kind.fields))
    return 0 in (_extents(kind) or ())


def _filled(extents: Sequence[int], dtype: object, value: float) -> Expr:
    return relax.const(np.full(extents, value, np.dtype(str(dtype))), str(dtype))
