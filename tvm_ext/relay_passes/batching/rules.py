"""What each operator does to the batch axis: a rule looks at a call and says why elements would be mixed.

Where the batch axis of a result lies is seen from its shape, which differs between two sizes of the batch there alone.
A rule proves that element ``i`` of the result then depends on elements ``i`` of the operands alone, by a function that
no extent of the batch is part of. What has no rule is refused.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from tvm_ext._tvm import Call
from tvm_ext.records.batching import BatchAxis


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchedOperand:
    """A tensor among the arguments: its shape, and where its batch lies; None where it has none."""

    shape: tuple[int, ...]
    batch: BatchAxis | None

    @property
    def rank(self) -> int:
        return len(self.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchedCall:
    """A call whose operands have a batch, and so has its result, at ``out``."""

    call: Call
    operands: tuple[BatchedOperand, ...]
    shape: tuple[int, ...]  # of the (first) result
    out: BatchAxis

    @property
    def data(self) -> BatchedOperand:
        return self.operands[0]

    def axes(self, name: str = "axis") -> tuple[int, ...] | None:
        """Attribute ``name`` as axes of the first operand, counted from its first; None where it means all."""
        value = getattr(self.call.attrs, name)
        if value is None:
            return None
        listed = [value] if isinstance(value, int) or not hasattr(value, "__len__") else list(value)
        return tuple(int(axis) % max(1, self.data.rank) for axis in listed)


BatchRule = Callable[[BatchedCall], str]
"""Why the call mixes elements of the batch; empty where it does not."""

_OTHER_OPERANDS = "its other operands depend on the batch"


def _elementwise(step: BatchedCall) -> str:
    return _broadcast(step, step.operands, len(step.shape))


def _broadcast(step: BatchedCall, operands: Sequence[BatchedOperand], rank: int) -> str:
    """Operands meet the batch axis of a result of ``rank`` axes with their batch, or not at all."""
    for operand in operands:
        place = step.out.axis - (rank - operand.rank)
        if operand.batch is None:
            if place >= 0 and operand.shape[place] != 1:
                return f"it meets the batch with {operand.shape[place]} values of its own"
        elif operand.batch != replace(step.out, axis=place):
            return "its operands have their batches on different axes"
    return ""


def _first_alone(step: BatchedCall) -> str:
    """The batch stays on its axis, and the operands behind the first have none."""
    if step.data.batch != step.out:
        return "it moves the batch axis"
    return _OTHER_OPERANDS if any(operand.batch is not None for operand in step.operands[1:]) else ""


def _along(step: BatchedCall, axes: tuple[int, ...] | None) -> str:
    """The operator works along ``axes``, of which the batch is none."""
    if axes is None or (step.data.batch is not None and step.data.batch.axis in axes):
        return "it works across the batch axis"
    return ""


def _reduce(step: BatchedCall) -> str:
    axes = step.axes()
    if (problem := _along(step, axes)) or axes is None or step.data.batch is None:
        return problem or "it works across the batch axis"
    before = 0 if step.call.attrs.keepdims else sum(axis < step.data.batch.axis for axis in axes)
    return _moved(step, step.data.batch.axis - before)


def _moved(step: BatchedCall, axis: int) -> str:
    """The batch of the first operand lies on ``axis`` of the result."""
    batch = step.data.batch
    if batch is None or step.out != replace(batch, axis=axis):
        return "it moves the batch axis"
    return ""


def _scan(step: BatchedCall) -> str:
    return _along(step, step.axes()) or _first_alone(step)


def _normalise(step: BatchedCall) -> str:
    return _along(step, step.axes("axes")) or _first_alone(step)


def _group_normalise(step: BatchedCall) -> str:
    return _along(step, step.axes("channel_axis")) or _normalise(step)


def _matmul(step: BatchedCall) -> str:
    x, y = step.operands
    if min(x.rank, y.rank) < 2:
        return "it is a product with a vector"
    rank = len(step.shape)
    for own, other, place in ((x, y, rank - 2), (y, x, rank - 1)):
        if step.out.axis == place:
            same = replace(step.out, axis=own.rank - (rank - place))
            return "" if own.batch == same and other.batch is None else "it sums over the batch axis"
    return _broadcast(step, step.operands, rank)


def _window(step: BatchedCall) -> str:
    """Convolutions: the batch is axis N of the data."""
    layouts = (str(step.call.attrs.data_layout), str(step.call.attrs.out_layout))
    if step.out.axis != layouts[0].find("N") or step.out.axis != layouts[1].find("N"):
        return "its batch axis is no batch of the convolution"
    return _first_alone(step)


def _planes(step: BatchedCall) -> str:
    """Poolings and resampling: each plane by itself, and planes are counted by N and C."""
    if str(step.call.attrs.layout)[step.out.axis] not in "NC":
        return "it works across the batch axis"
    return _first_alone(step)


def _permute(step: BatchedCall) -> str:
    axes = step.axes("axes") or tuple(reversed(range(step.data.rank)))
    batch = step.data.batch
    return "it moves the batch axis" if batch is None else _moved(step, axes.index(batch.axis))


def _reshape(step: BatchedCall) -> str:
    """The places of an element among all stay where they are, which `reshaped` has seen to."""
    return "" if step.data.batch is not None else "it moves the batch axis"


def reshaped(data: BatchedOperand, shape: tuple[int, ...], seen: BatchAxis) -> BatchAxis | None:
    """The batch of ``data`` in another ``shape``, where its extent shows it at ``seen``; None where it is torn apart.

    An element's place in a row of all is ``(before * n + i) * rest + within``, and so it is in the result: (5, n, 2, 3)
    becomes (5, 2 n, 3), with an ``inner`` of 2, or (5 n, 6), with an ``outer`` of 5.
    """
    assert data.batch is not None
    before, left = prod(data.shape[: data.batch.axis]) * data.batch.outer, prod(shape[: seen.axis])
    outer, rest = divmod(before, left)
    inner, more = divmod(seen.inner, max(1, outer))
    return None if rest or more or not outer else BatchAxis(axis=seen.axis, inner=inner, outer=outer)


def _concat(step: BatchedCall) -> str:
    if any(operand.batch != step.out for operand in step.operands):
        return "it joins tensors that have a batch with others"
    return _along(step, step.axes())


def _slice(step: BatchedCall) -> str:
    axes = [int(axis.value) % step.data.rank for axis in step.call.args[1].fields]
    return _along(step, tuple(axes)) or _first_alone(step)


def _take(step: BatchedCall) -> str:
    data, indices = step.operands
    axes = step.axes()
    if axes is None:
        return "it takes elements of the whole tensor"
    if data.batch is not None and indices.batch is not None:
        return "its data and its indices both have a batch"
    if indices.batch is not None:
        same = replace(indices.batch, axis=axes[0] + indices.batch.axis)
        return "" if step.out == same else "it moves the batch axis"
    assert data.batch is not None
    behind = data.batch.axis > axes[0]
    return _along(step, axes) or _moved(step, data.batch.axis + (indices.rank - 1 if behind else 0))


def _gather_elements(step: BatchedCall) -> str:
    if any(operand.batch != step.out for operand in step.operands):
        return "its data and its indices have different batches"
    return _along(step, step.axes())


def _gather_nd(step: BatchedCall) -> str:
    """Places of an element in its own data or in data for all of them, or the same places in each element's data."""
    (data, indices), shared = step.operands, int(step.call.attrs.batch_dims)
    within = shared + indices.shape[-1]  # leading axes of the data that places name
    if data.batch is not None and indices.batch is not None:
        own = step.out.axis < shared and data.batch == indices.batch == step.out
        return "" if own else "its data and its indices both have a batch"
    if indices.batch is not None:
        named = step.out.axis < shared or step.out.axis == indices.rank - 1
        return "it moves the batch axis" if named or indices.batch != step.out else ""
    assert data.batch is not None
    if data.batch.axis < within:
        return "it works across the batch axis"
    return _moved(step, data.batch.axis - within + indices.rank - 1)


def _quantise(step: BatchedCall) -> str:
    scalars = all(operand.rank == 0 for operand in step.operands[1:])
    return ("" if scalars else _along(step, step.axes())) or _first_alone(step)


def _pad(step: BatchedCall) -> str:
    widths = [int(width) for width in step.call.attrs.pad_width]
    return "it pads the batch axis" if any(widths[2 * step.out.axis :][:2]) else _first_alone(step)


def _last_axes(count: int) -> BatchRule:
    """The operator works along its ``count`` last axes."""

    def rule(step: BatchedCall) -> str:
        return _along(step, tuple(range(step.data.rank - count, step.data.rank))) or _first_alone(step)

    return rule


def _one_hot(step: BatchedCall) -> str:
    rank, batch = len(step.shape), step.operands[0].batch
    if batch is None or any(operand.batch for operand in step.operands[1:]):
        return _OTHER_OPERANDS
    return _moved(step, batch.axis + (int(step.call.attrs.axis) % rank <= batch.axis))


def _einsum(step: BatchedCall) -> str:
    """One letter is the batch wherever it occurs, and the result has it."""
    given, _, result = str(step.call.attrs.subscripts).replace(" ", "").partition("->")
    terms = given.split(",")
    if not result or "." in given or len(terms) != len(step.operands):
        return "its subscripts do not name all axes"
    letter = result[step.out.axis]
    for term, operand in zip(terms, step.operands, strict=True):
        if letter not in string.ascii_letters or term.count(letter) > 1:
            return "it reads a diagonal"
        same = replace(step.out, axis=term.find(letter)) if letter in term else None
        if operand.batch != same:
            return "it sums over the batch axis"
    return ""


def _attention(step: BatchedCall) -> str:
    """Queries, keys and values of one element; a bias for all of them or one for each."""
    if step.out.axis != 0 or any(operand.batch != step.out for operand in step.operands[:3]):
        return "its queries, keys and values have different batches"
    return _broadcast(step, step.operands[3:], 4)


def _named(names: str, prefix: str = "relax.") -> tuple[str, ...]:
    return tuple(prefix + name for name in names.split())


RULES: dict[str, BatchRule] = {
    **dict.fromkeys(
        _named(
            "abs acos acosh add asin asinh astype atan atan2 atanh bitwise_and bitwise_not bitwise_or bitwise_xor "
            "broadcast_to ceil clip cos cosh divide equal erf ewise_fma exp floor floor_divide floor_mod full_like "
            "greater greater_equal isfinite isinf isnan left_shift less less_equal log log_add_exp logical_and "
            "logical_not logical_or logical_xor maximum minimum mod multiply negative not_equal ones_like power "
            "right_shift round rsqrt sigmoid sign sin sinh sqrt square subtract tan tanh trunc where zeros_like "
            "nn.gelu nn.gelu_tanh nn.leakyrelu nn.relu nn.selu nn.silu nn.softplus"
        ),
        _elementwise,
    ),
    **dict.fromkeys(_named("argmax argmin max mean median min prod std sum variance"), _reduce),
    **dict.fromkeys(_named("nn.softmax nn.log_softmax nn.prelu cumsum cumprod argsort sort topk repeat"), _scan),
    **dict.fromkeys(_named("nn.layer_norm nn.rms_norm"), _normalise),
    **dict.fromkeys(_named("nn.group_norm nn.instance_norm"), _group_normalise),
    **dict.fromkeys(_named("conv1d conv2d conv3d conv1d_transpose conv2d_transpose", "relax.nn."), _window),
    **dict.fromkeys(
        [
            *(f"relax.nn.{kind}_pool{rank}d" for kind in ("avg", "max", "adaptive_avg") for rank in (1, 2, 3)),
            *_named("image.resize2d image.resize3d"),
        ],
        _planes,
    ),
    **dict.fromkeys(_named("reshape expand_dims squeeze flatten nn.batch_flatten"), _reshape),
    **dict.fromkeys(_named("tril triu"), _last_axes(2)),
    **dict.fromkeys(_named("quantize dequantize"), _quantise),
    "relax.concat": _concat,
    "relax.einsum": _einsum,
    "relax.gather_elements": _gather_elements,
    "relax.gather_nd": _gather_nd,
    "relax.matmul": _matmul,
    "relax.nn.attention": _attention,
    "relax.nn.attention_bias": _attention,
    "relax.nn.pad": _pad,
    "relax.nn.pixel_shuffle": _last_axes(3),
    "relax.one_hot": _one_hot,
    "relax.permute_dims": _permute,
    "relax.split": _scan,
    "relax.strided_slice": _slice,
    "relax.take": _take,
}

RESHAPES = frozenset(name for name, rule in RULES.items() if rule is _reshape)
SHAPED = frozenset(_named("broadcast_to full ones reshape zeros"))
"""Operators with the shape of their result among the arguments, where the batch size may stand."""
UNIFORM = frozenset(_named("broadcast_to full full_like ones ones_like zeros zeros_like"))
"""Operators that give every element of a batch the same values where no operand has a batch."""


def attribute_text(attrs: Any) -> str:
    """Attributes as text, to be compared."""
    return "" if attrs is None else str(attrs)
