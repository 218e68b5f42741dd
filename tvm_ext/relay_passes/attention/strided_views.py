"""Tensors of a graph as strided views of tensors before them: what transposes, reshapes and slices would copy.

An axis of a view is a number written in `BatchDigits` of its own: worked example, keys (1, 2, 24, 64) repeated for two
queries each and reshaped to (1, 4, 24, 64) have the heads ((2, 1536), (2, 0)): head h is at 1536 * (h // 2).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from tvm_ext._tvm import Expr, Var, relax
from tvm_ext.analysis.relax_values import operator_name, static_shape
from tvm_ext.byoc_cutlass.graph_values import GraphValues
from tvm_ext.records.attention import BatchDigits
from tvm_ext.support.arithmetic import ceil_div

MOST_STEPS = 16  # operators that are looked through


@dataclass(frozen=True, kw_only=True, slots=True)
class StridedView:
    """``scale`` times elements of ``source``, which is a tensor of the graph, flat; strides are in elements."""

    source: Expr
    axes: tuple[BatchDigits, ...]
    offset: int = 0
    scale: float = 1.0

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(prod(extent for extent, _ in digits) for digits in self.axes)


def whole(source: Expr) -> StridedView | None:
    """``source`` as it lies; None where an extent is known only at run time."""
    shape = static_shape(source)
    if shape is None or not prod(shape):
        return None
    strides = [prod(shape[axis + 1 :]) for axis in range(len(shape))]
    return StridedView(source=source, axes=tuple(_merged([pair]) for pair in zip(shape, strides, strict=True)))


def views_of(value: Expr, values: GraphValues, *, scaled: bool) -> Iterator[StridedView]:
    """Ways to read ``value``, the one furthest back in the graph first; ``scaled``: through products with a number."""
    chain = [value]
    while len(chain) <= MOST_STEPS and (before := _read_through(chain[-1], values, scaled)) is not None:
        chain.append(before)
    for start in range(len(chain) - 1, -1, -1):
        view = whole(chain[start])
        for step in reversed(chain[:start]):
            view = None if view is None else _applied(view, step, values)
        if view is not None:
            yield view


def _read_through(value: Expr, values: GraphValues, scaled: bool) -> Expr | None:
    """The tensor that ``value`` shows in another form; None where it is none."""
    if not isinstance(value, Var) or value not in values.bindings:
        return None
    bound = values.bindings[value]
    if isinstance(bound, relax.TupleGetItem):
        split = values.call_of(bound.tuple_value, "relax.split")
        return None if split is None else split.args[0]
    name = operator_name(bound)
    if name in _FORMS:
        return bound.args[0]
    if name in ("relax.multiply", "relax.divide") and scaled:
        factor = scalar_factor(value, values)
        return None if factor is None else factor[0]
    return None


def scalar_factor(value: Expr, values: GraphValues) -> tuple[Expr, float] | None:
    """``value`` as another tensor of the same shape times a number that is finite and not 0."""
    call = values.bindings[value]
    divides = operator_name(call) == "relax.divide"
    for tensor, other in ((call.args[0], call.args[1]), (call.args[1], call.args[0])):
        number = values.scalar_of(other)
        if number is not None and static_shape(tensor) == static_shape(value):
            usable = np.isfinite(number) and number != 0.0
            return (tensor, 1.0 / number if divides else number) if usable else None
        if divides:
            return None
    return None


def _applied(view: StridedView, step: Expr, values: GraphValues) -> StridedView | None:
    """``view`` in the form that ``step`` gives it; None where no strides say so."""
    bound = values.bindings[step]
    if isinstance(bound, relax.TupleGetItem):
        return _part(view, values.bindings[bound.tuple_value], bound.index)
    name = operator_name(bound)
    if name in ("relax.multiply", "relax.divide"):
        factor = scalar_factor(step, values)
        return None if factor is None else replace(view, scale=view.scale * factor[1])
    made = _FORMS[name or ""](view, bound, values)
    # The digits are our reading of the operator; its extents are TVM's.
    return made if made is not None and made.shape == static_shape(step) else None


# --- one operator each ---------------------------------------------------------------------------------------------
def _permuted(view: StridedView, call: Expr, _values: GraphValues) -> StridedView:
    order = [int(axis) for axis in call.attrs.axes] if call.attrs.axes is not None else range(len(view.axes))[::-1]
    return replace(view, axes=tuple(view.axes[axis] for axis in order))


def reshaped(view: StridedView, shape: Sequence[int]) -> StridedView | None:
    """``view`` with other extents; None where one of them would need two strides that are no digits."""
    digits = [digit for axis in view.axes for digit in axis]
    axes: list[BatchDigits] = []
    for extent in reversed(shape):
        taken: list[tuple[int, int]] = []
        while extent > 1:
            size, stride = digits.pop()
            if extent % size == 0:
                taken.insert(0, (size, stride))
                extent //= size
            elif size % extent == 0:
                taken.insert(0, (extent, stride))
                digits.append((size // extent, stride * extent))
                extent = 1
            else:
                return None
        axes.insert(0, _merged(taken))
    return replace(view, axes=tuple(axes))


def _reshaped(view: StridedView, call: Expr, _values: GraphValues) -> StridedView | None:
    shape = static_shape(call)
    return None if shape is None else reshaped(view, shape)


def broadcast(view: StridedView, shape: Sequence[int]) -> StridedView | None:
    """``view`` repeated to ``shape`` as NumPy does it."""
    own = view.shape
    if len(own) > len(shape):
        return None
    axes: list[BatchDigits] = [((extent, 0),) if extent > 1 else () for extent in shape[: len(shape) - len(own)]]
    for digits, extent, wanted in zip(view.axes, own, shape[len(shape) - len(own) :], strict=True):
        if extent not in (1, wanted):
            return None
        axes.append(digits if extent == wanted else ((wanted, 0),))
    return replace(view, axes=tuple(axes))


def _broadcast(view: StridedView, call: Expr, _values: GraphValues) -> StridedView | None:
    shape = static_shape(call)
    return None if shape is None else broadcast(view, shape)


def _sliced(view: StridedView, axis: int, begin: int, count: int, step: int = 1) -> StridedView | None:
    """``count`` places of an axis from ``begin`` on; None for an axis of several digits."""
    digits = view.axes[axis]
    if len(digits) > 1 or count < 1:
        return None
    stride = digits[0][1] if digits else 0
    changed = _merged([(count, stride * step)])
    axes = (*view.axes[:axis], changed, *view.axes[axis + 1 :])
    return replace(view, axes=axes, offset=view.offset + begin * stride)


def _part(view: StridedView, call: Expr, number: int) -> StridedView | None:
    """One of the tensors that ``relax.split`` makes."""
    axis = int(call.attrs.axis) % len(view.axes)
    extent, how = view.shape[axis], call.attrs.indices_or_sections
    if hasattr(how, "value"):
        count = int(how.value)
        bounds = [min(extent, ceil_div(extent, count) * item) for item in range(count + 1)]
    else:
        bounds = [0, *(int(item.value) for item in how), extent]
    return _sliced(view, axis, bounds[number], bounds[number + 1] - bounds[number])


def _taken(view: StridedView, call: Expr, values: GraphValues) -> StridedView | None:
    """Constant indices: one place of an axis, or every place so many times in a row, as heads are repeated."""
    constant = values.constant_of(call.args[1])
    if constant is None or call.attrs.axis is None:
        return None
    indices, axis = np.asarray(constant.value.numpy()), int(call.attrs.axis) % len(view.axes)
    extent = view.shape[axis]
    if indices.ndim == 0:
        one = _sliced(view, axis, int(indices) % extent, 1)
        return None if one is None else replace(one, axes=(*one.axes[:axis], *one.axes[axis + 1 :]))
    repeat = indices.size // extent
    if indices.ndim != 1 or not repeat or not np.array_equal(indices, np.arange(extent).repeat(repeat)):
        return None
    digits = _merged([*view.axes[axis], (repeat, 0)])
    return replace(view, axes=(*view.axes[:axis], digits, *view.axes[axis + 1 :]))


def _strided_slice(view: StridedView, call: Expr, _values: GraphValues) -> StridedView | None:
    """Slices of known bounds in steps forwards."""
    bounds = [_numbers(argument) for argument in call.args[1:]]
    if len(bounds) != 4 or any(bound is None for bound in bounds):
        return None
    made: StridedView | None = view
    for axis, begin, end, step in zip(*(bound for bound in bounds if bound is not None), strict=True):
        if made is None or step < 1:
            return None
        start, stop, _ = slice(begin, end, step).indices(made.shape[axis])
        made = _sliced(made, axis % len(made.axes), start, ceil_div(stop - start, step), step)
    return made


def _numbers(items: Expr) -> list[int] | None:
    """The integers of a tuple; None where one is known only at run time."""
    found = [getattr(item, "value", None) for item in getattr(items, "fields", ())]
    return [int(item) for item in found if item is not None] if found and None not in found else None


_FORMS = {
    "relax.permute_dims": _permuted,
    "relax.reshape": _reshaped,
    "relax.expand_dims": _reshaped,
    "relax.squeeze": _reshaped,
    "relax.broadcast_to": _broadcast,
    "relax.take": _taken,
    "relax.strided_slice": _strided_slice,
}


def _merged(digits: Sequence[tuple[int, int]]) -> BatchDigits:
    """The digits without those of extent 1, neighbours that continue each other as one."""
    found: list[tuple[int, int]] = []
    for extent, stride in digits:
        if extent == 1:
            continue
        if found and found[-1][1] == extent * stride:
            found[-1] = (found[-1][0] * extent, stride)
        else:
            found.append((extent, stride))
    return tuple(found)
