"""Which taps of a convolution over a padded tensor meet an element, for each tile of its outputs.

A wide dilation reaches over most of a small image: 3x3 taps dilated by 12 over 16 rows padded by 12 read, for the
outputs of rows 0 to 3, padding by tap 0, rows 0 to 3 by tap 1 and rows 12 to 15 by tap 2. What meets padding alone adds
zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from tvm_ext._tvm import Expr, tirx

from .computation_exprs import linear_form
from .computations import Computation
from .predicates import factors_of
from .window import Interval, WindowAxis, padding_of

MOST_LIVE = 0.5
"""Of the products of a sum, those that meet elements, for loops to leave out the others: a choice. Loops of known
length run faster: 3x3 taps over 7x7 elements, of which 82 % are met, gain nothing."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LiveTaps:
    """``axis`` of a window over a padded dimension; ``outputs`` and ``taps`` are positions of a computation's axes."""

    outputs: int
    taps: int
    axis: WindowAxis

    @property
    def share(self) -> float:
        """Of all products of taps and outputs, those that meet an element."""
        axis = self.axis
        return sum(len(axis.outputs_of(tap)) for tap in range(axis.taps)) / (axis.extent * axis.taps)

    def span(self, start: Expr, size: int) -> tuple[Expr, Expr]:
        """(first, number) of the taps by which some of ``size`` outputs from ``start`` on meet an element."""
        axis = self.axis
        least = axis.before - axis.stride * (size - 1) + axis.dilation - 1
        most = axis.before + axis.size - 1 + axis.dilation
        begin = tirx.max(tirx.floordiv(least - start * axis.stride, axis.dilation), 0)
        end = tirx.min(tirx.floordiv(most - start * axis.stride, axis.dilation), axis.taps)
        return begin, tirx.max(end - begin, 0)


def live_taps(anchor: Computation, pads: Sequence[Computation]) -> tuple[LiveTaps, ...]:
    """The taps of ``anchor``, a sum of products over what one of ``pads`` surrounds by zeros; none where `MOST_LIVE`
    of the products meet an element.
    """
    factors = factors_of(anchor) if anchor.combiner == "sum" else None
    found: list[LiveTaps] = []
    for load in factors or ():
        pad = next((pad for pad in pads if pad.target.same_as(load.source)), None)
        inside = None if pad is None else padding_of(pad)
        if inside is None or float(inside[1].value) != 0:
            continue
        for place, bound in zip(load.indices, inside[2], strict=True):
            taps = None if bound is None else _taps(place, bound, anchor)
            found += [] if taps is None else [taps]
    return tuple(found) if prod(taps.share for taps in found) <= MOST_LIVE else ()


def _taps(place: Expr, bound: Interval, anchor: Computation) -> LiveTaps | None:
    """None where ``place`` is no sum of one output and one tap, both ascending."""
    form = linear_form(place, anchor.variables)
    if form is None:
        return None
    used = [position for position, step in enumerate(form[0]) if step]
    if [anchor.kinds[position] for position in used] not in (["spatial", "reduce"], ["reduce", "spatial"]):
        return None
    taps, outputs = sorted(used, key=lambda position: anchor.kinds[position])  # "reduce" comes before "spatial"
    stride, dilation = form[0][outputs], form[0][taps]
    if min(stride, dilation) < 1:
        return None
    axis = WindowAxis(
        variable=anchor.variables[outputs],
        tap=anchor.variables[taps],
        extent=anchor.extents[outputs],
        taps=anchor.extents[taps],
        stride=stride,
        dilation=dilation,
        before=bound[0] - form[1],
        first=0,
        size=bound[1] - bound[0],
    )
    return LiveTaps(outputs=outputs, taps=taps, axis=axis)
