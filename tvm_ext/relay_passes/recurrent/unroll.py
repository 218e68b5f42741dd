"""A recurrent layer as a graph: products of all steps with the input's weights at once, then one call per step."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tvm_ext._tvm import BlockBuilder, Call, Expr, GlobalVar, relax
from tvm_ext.records.recurrent import RecurrentCell
from tvm_ext.support.arithmetic import ceil_div

from .cell_function import cell_function


@dataclass(frozen=True, kw_only=True, slots=True)
class DirectionOperands:
    """What one direction of a layer computes with; G: the columns of all gates (`RecurrentCell.gate_columns`).

    * ``weight``: (features, G): W transposed.
    * ``recurrent``: the operands from ``recurrent...`` on that the cell wants, in order: R transposed, its bias, the
      peepholes.
    * ``bias``: (1, G), added to the products of the input; None: nothing.
    * ``states``: the initial hidden state and, of an lstm, cell state: (batch, hidden) each.
    """

    weight: Expr
    recurrent: tuple[Expr, ...]
    bias: Expr | None
    states: tuple[Expr, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Unrolled:
    """One direction's results: a hidden state per step, in the order of time, and the states after the last step."""

    hidden: tuple[Expr, ...]
    states: tuple[Expr, ...]


MOST_PARTS = 160
"""Steps that one tensor is split into at most. Whoever looks at a part looks at the type of the whole, which has all of
them: 2,000 steps would be 4 million looks in each pass.
"""


def input_products(
    builder: BlockBuilder, rows: Expr, weight: Expr, bias: Expr | None, *, steps: int, chunk: int | None = None
) -> list[Expr]:
    """``rows`` (steps * batch, features) times ``weight``, plus ``bias``, as one matrix (batch, columns) per step.

    ``chunk`` steps are one product, None: all of them, or `MOST_PARTS`. `overlap_layers` divides them for schedules.
    """
    made: list[Expr] = []
    for part, count in _parts(builder, rows, steps, chunk or MOST_PARTS):
        product = builder.emit(relax.op.matmul(part, weight))
        if bias is not None:
            product = builder.emit(relax.op.add(product, bias))
        made += by_step(builder, product, count)
    return made


def by_step(builder: BlockBuilder, rows: Expr, steps: int) -> list[Expr]:
    """(steps * batch, columns) as a matrix of (batch, columns) for each step."""
    made: list[Expr] = []
    for part, count in _parts(builder, rows, steps, MOST_PARTS):
        if count == 1:
            made.append(part)
            continue
        split = builder.emit(relax.op.split(part, count, axis=0))
        made += [builder.emit(relax.TupleGetItem(split, index)) for index in range(count)]
    return made


def _parts(builder: BlockBuilder, rows: Expr, steps: int, most: int) -> Iterator[tuple[Expr, int]]:
    """``rows`` in parts of at most ``most`` steps, about equally long, each with its number of steps.

    Worked example: 500 steps by at most 160 are four times 125, not 160, 160, 160 and 20, and so one kernel for all.
    """
    batch, parts = int(rows.ty.shape[0]) // steps, ceil_div(steps, most)
    bounds = [steps * index // parts for index in range(parts + 1)]
    for first, end in itertools.pairwise(bounds):
        if parts == 1:
            yield rows, steps
        else:
            yield builder.emit(relax.op.strided_slice(rows, [0], [first * batch], [end * batch])), end - first


def active_rows(builder: BlockBuilder, lengths: Expr, *, steps: int, batch: int) -> Expr:
    """(steps * batch, 1) of bool: whether a step lies within the sequence, whose lengths are (batch,) of int32."""
    places = relax.const(np.arange(steps, dtype=np.int32)[:, None], "int32")
    within = builder.emit(relax.op.less(places, relax.op.reshape(lengths, (1, batch))))
    return builder.emit(relax.op.reshape(within, (steps * batch, 1)))


def unrolled(
    builder: BlockBuilder,
    cell: RecurrentCell,
    rows: Expr,
    operands: DirectionOperands,
    *,
    steps: int,
    is_reverse: bool = False,
    active: Expr | None = None,
) -> Unrolled:
    """One direction of a layer over ``rows`` (steps * batch, features), emitted into ``builder``.

    ``active`` are the rows of `active_rows`, where ``cell.is_masked``.
    """
    step_inputs = input_products(builder, rows, operands.weight, operands.bias, steps=steps)
    masks = [(part,) for part in by_step(builder, active, steps)] if active is not None else [()] * steps
    # Functions that are equal are one in the builder's module: all layers of a shape share their cell.
    function = builder.add_func(cell_function(cell), f"{cell.kind}_step")
    hidden: list[Expr] = [operands.states[0]] * steps
    states: Sequence[Expr] = operands.states
    for step in reversed(range(steps)) if is_reverse else range(steps):
        states = _called(builder, function, cell, [step_inputs[step], *states, *operands.recurrent, *masks[step]])
        hidden[step] = states[0]
    return Unrolled(hidden=tuple(hidden), states=tuple(states))


def _called(
    builder: BlockBuilder, function: GlobalVar, cell: RecurrentCell, operands: Sequence[Expr]
) -> tuple[Expr, ...]:
    """The states after one call of the cell."""
    result = builder.emit(Call(function, list(operands)))
    if len(cell.results) == 1:
        return (result,)
    return tuple(builder.emit(relax.TupleGetItem(result, index)) for index in range(len(cell.results)))
