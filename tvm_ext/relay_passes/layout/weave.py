"""Interleaves the phases of a strided transposed convolution (`expand_transposed`), plain or in blocks of channels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm_ext._tvm import BlockBuilder, Expr, TeTensor, te, tirx
from tvm_ext.records.serialise import to_json

from .blocked import shape_of

WEAVE = "tvm_ext.weave"
"""Attribute of a PrimFunc that does nothing else: its `Weave` as JSON."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseRange:
    """The phases ``first`` to ``first + count - 1`` of one dimension, each with ``taps``."""

    first: int
    count: int
    taps: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Weave:
    """Place s * q + r of each dimension, ``crops`` places further on, is element q of phase r.

    There is a tensor for each of ``rows`` and ``columns``, with the channels [group, row's phase, column's, filter].
    """

    rows: tuple[PhaseRange, ...]
    columns: tuple[PhaseRange, ...]
    strides: tuple[int, int]
    crops: tuple[int, int]
    lengths: tuple[int, int]
    groups: int


def woven(builder: BlockBuilder, values: Sequence[Expr], weave: Weave) -> Expr:
    """A call of the weave's own kernel on the phases ``values``, plain or in blocks of channels."""
    call = builder.call_te(_weave(weave), *values, primfunc_name_hint="weave")
    builder.update_func(call.args[0], builder.get()[call.args[0]].with_attr(WEAVE, to_json(weave)))
    return call


def _weave(weave: Weave) -> Callable[..., TeTensor]:
    def compute(*tensors: TeTensor) -> TeTensor:
        images, channels, _, _, *lanes = shape_of(tensors[0])
        filters = channels // (weave.rows[0].count * weave.columns[0].count)
        grouped = filters // weave.groups

        def element(image: Expr, output: Expr, y: Expr, x: Expr, *lane: Expr) -> Expr:
            moved = [at + crop for at, crop in zip((y, x), weave.crops, strict=True)]
            at = [tirx.floordiv(own, stride) for own, stride in zip(moved, weave.strides, strict=True)]
            phases = [tirx.floormod(own, stride) for own, stride in zip(moved, weave.strides, strict=True)]

            def value(i: int, j: int) -> Expr:
                rows, columns = weave.rows[i], weave.columns[j]
                number = (phases[0] - rows.first) * columns.count + (phases[1] - columns.first)
                channel = number * grouped + output
                if weave.groups > 1:
                    before = tirx.floordiv(output, grouped) * (grouped * rows.count * columns.count)
                    channel = before + number * grouped + tirx.floormod(output, grouped)
                place = (image, channel, *at, *lane)
                return tensors[i * len(weave.columns) + j][place]

            lines = [
                _of_phase(phases[1], weave.columns, [value(i, j) for j in range(len(weave.columns))])
                for i in range(len(weave.rows))
            ]
            return _of_phase(phases[0], weave.rows, lines)

        return te.compute((images, filters, *weave.lengths, *lanes), element, name="T_weave")

    return compute


def _of_phase(phase: Expr, cut: Sequence[PhaseRange], values: Sequence[Expr]) -> Expr:
    """The value of the part that ``phase`` is in."""
    return values[0] if len(cut) == 1 else tirx.if_then_else(phase < cut[1].first, values[0], values[1])
