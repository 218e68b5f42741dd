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
from .window import Interval, padding_of

MOST_LIVE = 0.5
"""Of the products of a sum, those that meet elements, for loops to leave out the others: a choice. Loops of known
length run faster: 3x3 taps over 7x7 elements, of which 82 % are met, gain nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveTaps:
    """The axis ``taps`` that slides along ``outputs`` (positions of the computation's axes) over a padded dimension.

    An output o reads place ``stride * o + dilation * tap + first``; elements lie in ``low`` to ``high`` - 1.
    """

    outputs: int
    taps: int
    extent: int  # of the taps
    stride: int
    dilation: int
    first: int
    low: int
    high: int

    def share(self, outputs: int) -> float:
        """Of all products of taps and ``outputs``, those that meet an element."""
        places = (
            self.stride * output + self.dilation * tap + self.first
            for output in range(outputs)
            for tap in range(self.extent)
        )
        return sum(self.low <= place < self.high for place in places) / (outputs * self.extent)

    def span(self, start: Expr, size: int) -> tuple[Expr, Expr]:
        """(first, number) of the taps by which some of ``size`` outputs from ``start`` on meet an element."""
        least = self.low - self.first - self.stride * (size - 1) + self.dilation - 1
        most = self.high - 1 - self.first + self.dilation
        begin = tirx.max(tirx.floordiv(least - start * self.stride, self.dilation), 0)
        end = tirx.min(tirx.floordiv(most - start * self.stride, self.dilation), self.extent)
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
    share = prod(taps.share(anchor.extents[taps.outputs]) for taps in found)
    return tuple(found) if share <= MOST_LIVE else ()


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
    return LiveTaps(
        outputs=outputs,
        taps=taps,
        extent=anchor.extents[taps],
        stride=stride,
        dilation=dilation,
        first=form[1],
        low=bound[0],
        high=bound[1],
    )
