"""Sequences, which are tuples whose length is known at import."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tvm_ext import _tvm
from tvm_ext._tvm import BlockBuilder, Expr

from .context import Pen, converter, rule


@converter("SequenceInsert")
def _insert(builder: BlockBuilder, inputs: Sequence[Expr], attributes: Mapping[str, Any], opset: int) -> Expr:
    """A negative position counts from the end: -1 is before the last tensor. Without one, it is the end."""
    operands = list(inputs)
    tensors = _tensors_of(operands[0])
    if len(operands) < 3 or operands[2] is None:
        return _tvm.relax.Tuple([*tensors, operands[1]])
    if not isinstance(operands[2], _tvm.Constant):
        raise ValueError("the position is not known when the model is imported")
    position = int(operands[2].value.numpy().reshape(-1)[0])
    if not -len(tensors) <= position <= len(tensors):
        raise ValueError(f"position {position} in a sequence of {len(tensors)}")
    tensors.insert(position, operands[1])
    return _tvm.relax.Tuple(tensors)


def _tensors_of(sequence: Expr) -> list[Expr]:
    """Its tensors; a sequence that is an input is a variable, which can be indexed without end."""
    if isinstance(sequence, _tvm.relax.Tuple):
        return list(sequence)
    return [sequence[position] for position in range(len(sequence.ty.fields))]


@rule("SplitToSequence")
def _split(pen: Pen) -> None:
    """A scalar is the size of all parts but the last: 9 elements by 4 are 4, 4, 1, not three times 3."""
    given = pen.known_value(1)
    if given is None:
        return
    axis = pen.integer("axis", 0)
    extent = pen.known_shape(pen.x)[axis]
    if given.ndim:
        if int(given.sum()) != extent or given.min(initial=0) < 0:
            raise pen.refusal(f"splits {extent} elements into {given.tolist()}", "the sizes must add up")
        return
    size = int(given)
    if size < 1:
        raise pen.refusal(f"splits into parts of {size}", "parts have at least 1 element")
    sizes = [min(size, extent - first) for first in range(0, extent, size)]
    pen.add("SplitToSequence", pen.x, pen.integers(*sizes), out=pen.out, axis=axis)
