"""LSTM, GRU and RNN, which the stock importer lacks, by `relay_passes/recurrent`: a call of a cell per step.

Where the number of steps is known only at run time, one call of a loop over them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tvm_ext._tvm import BlockBuilder, Constant, Expr, relax, tirx
from tvm_ext.analysis.relax_values import dtype_of
from tvm_ext.records.recurrent import ACTIVATIONS, GATES, CellKind, RecurrentCell

from ...recurrent.loop import Looped, active_steps, looped
from ...recurrent.unroll import DirectionOperands, Unrolled, active_rows, unrolled
from .context import Converter, Pen, converter, rule
from .recurrent_attributes import Settings, check_recurrent, settings_of

_OPERANDS = ("x", "weight", "recurrent", "bias", "lengths", "hidden", "cell", "peepholes")
_NARROW = ("float16", "bfloat16")


@dataclass(kw_only=True, slots=True)
class _Layer:
    """A node under conversion: what it says, and its operands (or None), in ``dtype``, steps before batches.

    ``steps``: None where they are counted at run time.
    """

    builder: BlockBuilder
    settings: Settings
    operands: dict[str, Expr | None]
    steps: int | None
    batch: int
    hidden: int
    dtype: str

    @property
    def columns(self) -> int:
        return GATES[self.settings.kind] * self.hidden

    def part(self, name: str, direction: int) -> Expr | None:
        """An operand (directions, ...) of one direction."""
        whole = self.operands[name]
        if whole is None:
            return None
        one = self.slice(whole, 0, direction, direction + 1)
        return self.builder.emit(relax.op.squeeze(one, [0]))

    def slice(self, x: Expr, axis: int, begin: int, end: int) -> Expr:
        if begin == 0 and end == int(x.ty.shape[axis]):
            return x
        return self.builder.emit(relax.op.strided_slice(x, [axis], [begin], [end]))

    def transposed(self, x: Expr, *axes: int) -> Expr:
        return self.builder.emit(relax.op.permute_dims(x, list(axes)))

    def reshaped(self, x: Expr, *shape: int | Expr) -> Expr:
        return self.builder.emit(relax.op.reshape(x, shape))

    def zeros(self, *shape: int) -> Expr:
        return relax.const(np.zeros(shape, np.dtype(self.dtype)), self.dtype)


def _converter(kind: CellKind) -> Converter:
    def convert(builder: BlockBuilder, inputs: Sequence[Expr], attributes: Mapping[str, Any], _opset: int) -> Expr:
        given = [*inputs, *[None] * (len(_OPERANDS) - len(inputs))]
        original = dtype_of(given[0])
        layer = _layer(builder, settings_of(kind, attributes), dict(zip(_OPERANDS, given, strict=True)))
        outputs = _outputs(layer, _directions(layer))
        if layer.dtype != original:
            outputs = [builder.emit(relax.op.astype(output, original)) for output in outputs]
        return relax.Tuple(outputs)

    return convert


def _layer(builder: BlockBuilder, settings: Settings, operands: dict[str, Expr | None]) -> _Layer:
    """Half precision is computed in float32 and rounded once; batches go behind steps and directions."""
    x = operands["x"]
    assert x is not None and operands["recurrent"] is not None
    dtype = "float32" if dtype_of(x) in _NARROW else dtype_of(x)
    for name, value in operands.items():
        if value is not None and name != "lengths" and dtype_of(value) != dtype:
            operands[name] = builder.emit(relax.op.astype(value, dtype))
        if operands[name] is not None and settings.is_batch_first and name in ("x", "hidden", "cell"):
            operands[name] = builder.emit(relax.op.permute_dims(operands[name], [1, 0, 2]))
    steps, batch = _extents(operands["x"])
    hidden = int(operands["recurrent"].ty.shape[2])
    if steps is not None and _is_whole(operands["lengths"], steps):
        operands["lengths"] = None
    return _Layer(
        builder=builder, settings=settings, operands=operands, steps=steps, batch=batch, hidden=hidden, dtype=dtype
    )


def _extents(x: Expr | None) -> tuple[int | None, int]:
    """The steps of (steps, batch, features), None where they are counted at run time, and the batch."""
    assert x is not None
    if x.ty.shape is None:
        raise ValueError("the rank of its input is known only at run time")
    steps, batch, features = x.ty.shape.values
    for what, extent in (("batch", batch), ("number of features", features)):
        if not isinstance(extent, tirx.IntImm):
            raise ValueError(f"the {what} of its input, {extent}, is known only at run time; only its steps may be")
    return int(steps) if isinstance(steps, tirx.IntImm) else None, int(batch)


def _is_whole(lengths: Expr | None, steps: int) -> bool:
    return isinstance(lengths, Constant) and bool((lengths.value.numpy() >= steps).all())


def _directions(layer: _Layer) -> Sequence[Unrolled | Looped]:
    x, steps = layer.operands["x"], layer.steps
    assert x is not None
    rows = x if steps is None else layer.reshaped(x, steps * layer.batch, int(x.ty.shape[2]))
    active = _active(layer, x)
    made: list[Unrolled | Looped] = []
    for direction, is_reverse in enumerate(layer.settings.is_reverse):
        given = layer.builder, _cell(layer, direction), rows, _direction_operands(layer, direction)
        if steps is None:
            made.append(looped(*given, is_reverse=is_reverse, active=active))
        else:
            made.append(unrolled(*given, steps=steps, is_reverse=is_reverse, active=active))
    return made


def _active(layer: _Layer, x: Expr) -> Expr | None:
    """Which rows are of a sequence that goes on, where some end early; ``x`` has a row for each step."""
    lengths = layer.operands["lengths"]
    if lengths is None or layer.steps is None:
        return None if lengths is None else active_steps(layer.builder, lengths, x)
    return active_rows(layer.builder, lengths, steps=layer.steps, batch=layer.batch)


def _cell(layer: _Layer, direction: int) -> RecurrentCell:
    settings, count = layer.settings, ACTIVATIONS[layer.settings.kind]
    return RecurrentCell(
        kind=settings.kind,
        batch_size=layer.batch,
        hidden_size=layer.hidden,
        dtype=layer.dtype,
        activations=settings.activations[direction * count : (direction + 1) * count],
        clip=settings.clip,
        input_forget=settings.input_forget,
        linear_before_reset=settings.linear_before_reset,
        has_peepholes=layer.operands["peepholes"] is not None,
        is_masked=layer.operands["lengths"] is not None,
    )


def _direction_operands(layer: _Layer, direction: int) -> DirectionOperands:
    weight, recurrent = layer.part("weight", direction), layer.part("recurrent", direction)
    assert weight is not None and recurrent is not None
    bias, hidden_bias = _biases(layer, direction)
    matrix = layer.transposed(recurrent, 1, 0)
    if layer.settings.kind == "gru" and not layer.settings.linear_before_reset:
        gates = 2 * layer.hidden
        parts = [layer.slice(matrix, 1, 0, gates), layer.slice(matrix, 1, gates, layer.columns)]
    else:
        parts = [matrix]
    if layer.settings.linear_before_reset:
        parts.append(hidden_bias if hidden_bias is not None else layer.zeros(1, layer.hidden))
    peepholes = layer.part("peepholes", direction)
    if peepholes is not None:
        parts.append(layer.reshaped(peepholes, 1, 3 * layer.hidden))
    return DirectionOperands(
        weight=layer.transposed(weight, 1, 0), recurrent=tuple(parts), bias=bias, states=_states(layer, direction)
    )


def _biases(layer: _Layer, direction: int) -> tuple[Expr | None, Expr | None]:
    """What is added to the products of the input, and what a linear_before_reset adds to those of the hidden gate."""
    both = layer.part("bias", direction)
    if both is None:
        return None, None
    columns, emit = layer.columns, layer.builder.emit
    of_input, of_state = layer.slice(both, 0, 0, columns), layer.slice(both, 0, columns, 2 * columns)
    if not layer.settings.linear_before_reset:
        return layer.reshaped(emit(relax.op.add(of_input, of_state)), 1, columns), None
    gates = columns - layer.hidden
    summed = emit(relax.op.add(layer.slice(of_input, 0, 0, gates), layer.slice(of_state, 0, 0, gates)))
    bias = emit(relax.op.concat([summed, layer.slice(of_input, 0, gates, columns)], axis=0))
    hidden = layer.slice(of_state, 0, gates, columns)
    return layer.reshaped(bias, 1, columns), layer.reshaped(hidden, 1, layer.hidden)


def _states(layer: _Layer, direction: int) -> tuple[Expr, ...]:
    names = ("hidden", "cell") if layer.settings.kind == "lstm" else ("hidden",)
    given = [layer.part(name, direction) for name in names]
    return tuple(layer.zeros(layer.batch, layer.hidden) if state is None else state for state in given)


def _outputs(layer: _Layer, directions: Sequence[Unrolled | Looped]) -> list[Expr]:
    """Y, the last hidden states and, of an lstm, the last cell states."""
    sequences = [_sequence(layer, one) for one in directions]
    y = _joined(layer, sequences, 1)
    last = [
        _joined(layer, [layer.reshaped(one.states[index], 1, layer.batch, layer.hidden) for one in directions], 0)
        for index in range(len(directions[0].states))
    ]
    if not layer.settings.is_batch_first:
        return [y, *last]
    return [layer.transposed(y, 2, 0, 1, 3), *[layer.transposed(state, 1, 0, 2) for state in last]]


def _sequence(layer: _Layer, one: Unrolled | Looped) -> Expr:
    """(steps, 1, batch, hidden): the hidden states of one direction, 0 behind the end of a sequence."""
    rows = one.hidden if isinstance(one, Looped) else _joined(layer, one.hidden, 0)
    active = _active(layer, rows)
    if active is not None:
        rows = layer.builder.emit(relax.op.where(active, rows, relax.const(0.0, layer.dtype)))
    steps = rows.ty.shape[0] if layer.steps is None else layer.steps
    return layer.reshaped(rows, steps, 1, layer.batch, layer.hidden)


def _joined(layer: _Layer, parts: Sequence[Expr], axis: int) -> Expr:
    return parts[0] if len(parts) == 1 else layer.builder.emit(relax.op.concat(list(parts), axis=axis))


_KINDS: Mapping[str, CellKind] = {"GRU": "gru", "LSTM": "lstm", "RNN": "rnn"}
for _name, _kind in _KINDS.items():
    converter(_name)(_converter(_kind))


@rule(*_KINDS)
def _check(pen: Pen) -> None:
    check_recurrent(_KINDS[pen.op_type], pen)
