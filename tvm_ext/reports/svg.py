"""The roofline of a `BuildRecord` as inline SVG; its colours come from the page's style sheet."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from .record import BuildRecord, Ceiling, OperatorReport
from .text import format_time

_WIDTH, _HEIGHT = 1100, 480
"""A choice: pixels of the picture."""
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 30, 20, 50  # margins: room for the labels of axes
_CHARACTER, _LINE = 8.0, 18.0  # pixels of a label's text, nearly
_LABELLED_POINTS = 8  # a choice: so many labels do not hide each other


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """An operator in the plot: FLOP per byte, GFLOP/s, and its share of the model's time (0 to 1)."""

    operator: OperatorReport
    title: str
    intensity: float
    gflops: float
    share: float


@dataclass(frozen=True, kw_only=True, slots=True)
class LogAxis:
    """Maps ``low``..``high`` to ``start``..``end`` pixels by their logarithm: 1, 10, 100 are equally far apart."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        share = (math.log10(value) - math.log10(self.low)) / (math.log10(self.high) - math.log10(self.low))
        return self.start + share * (self.end - self.start)

    def decades(self) -> Iterable[float]:
        first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
        return (10.0**exponent for exponent in range(first, last + 1))


def points(report: BuildRecord) -> list[Point]:
    """Every operator that has arithmetic, traffic and a time; the ones with most time first."""
    total = sum(operator.total_s or 0.0 for operator in report.operators)
    found = []
    for operator in report.operators:
        if operator.intensity and operator.time_s:
            gflops = operator.choice.flops / operator.time_s / 1e9
            share = (operator.total_s or 0.0) / total if total else 0.0
            title = report.title_of(operator)
            found.append(
                Point(operator=operator, title=title, intensity=operator.intensity, gflops=gflops, share=share)
            )
    return sorted(found, key=lambda point: -point.share)


def roofline(report: BuildRecord) -> str:
    """The plot, or a sentence where there is nothing to plot."""
    shown = points(report)
    peak, memories = _peak(report.ceilings), [ceiling for ceiling in report.ceilings if ceiling.kind == "memory"]
    if not shown and (peak is None or not memories):
        return "<p>No operator has a time yet, and the device's limits are not known.</p>"
    x_axis, y_axis = _axes(shown, peak, memories)
    said = [] if peak is None else [_peak_label(x_axis, y_axis, peak)]
    parts = [*_grid(x_axis, y_axis), *_ceilings(x_axis, y_axis, peak, memories), *_points(x_axis, y_axis, shown, said)]
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="Roofline: GFLOP/s over FLOP per byte">'
        + "".join(parts)
        + "</svg>"
    )


def _peak(ceilings: Sequence[Ceiling]) -> Ceiling | None:
    """The compute ceiling drawn: float32's where known."""
    compute = [ceiling for ceiling in ceilings if ceiling.kind == "compute"]
    return next((item for item in compute if item.name == "float32"), compute[0] if compute else None)


def _axes(shown: Sequence[Point], peak: Ceiling | None, memories: Sequence[Ceiling]) -> tuple[LogAxis, LogAxis]:
    """Axes that hold every point, and the ridge where the lowest memory's line meets the peak."""
    xs = [point.intensity for point in shown] or [1.0]
    ys = [point.gflops for point in shown]
    if peak is not None:
        ys.append(peak.value)
        xs += [peak.value / memory.value for memory in memories]
    x_low, x_high = min(xs) / 2, max(xs) * 3
    ys += [memory.value * x_low * 2 for memory in memories[-1:]]
    return (
        LogAxis(low=x_low, high=x_high, start=_LEFT, end=_WIDTH - _RIGHT),
        LogAxis(low=min(ys) / 2, high=max(ys) * 2, start=_HEIGHT - _BOTTOM, end=_TOP),
    )


def _grid(x_axis: LogAxis, y_axis: LogAxis) -> list[str]:
    parts = []
    for value in x_axis.decades():
        x = x_axis(value)
        parts.append(f'<line class="grid" x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{_HEIGHT - _BOTTOM}"/>')
        parts.append(f'<text x="{x:.1f}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">{value:g}</text>')
    for value in y_axis.decades():
        y = y_axis(value)
        parts.append(f'<line class="grid" x1="{_LEFT}" y1="{y:.1f}" x2="{_WIDTH - _RIGHT}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>')
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    parts.append(
        f'<text x="{middle}" y="{_HEIGHT - 10}" text-anchor="middle">FLOP per byte of compulsory traffic</text>'
    )
    parts.append(f'<text transform="translate(16 {_HEIGHT / 2}) rotate(-90)" text-anchor="middle">GFLOP/s</text>')
    return parts


def _ceilings(x_axis: LogAxis, y_axis: LogAxis, peak: Ceiling | None, memories: Sequence[Ceiling]) -> list[str]:
    """The peak as a level line; each memory as ``bandwidth * intensity`` up to the peak (GB/s x FLOP/B = GFLOP/s)."""
    parts = []
    top = y_axis.high if peak is None else peak.value
    for index, memory in enumerate(memories):
        start = max(x_axis.low, y_axis.low / memory.value)
        end = min(x_axis.high, top / memory.value)
        if end <= start:
            continue
        x1, y1 = x_axis(start), y_axis(start * memory.value)
        x2, y2 = x_axis(end), y_axis(end * memory.value)
        style = "ceiling" if index == len(memories) - 1 else "cache"
        parts.append(f'<line class="{style}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>')
        share = 0.25 if index % 3 == 2 else 0.75  # neighbouring lines may lie close together
        parts.append(_slanted_label(x1, y1, x2, y2, f"{memory.name}: {memory.value:.4g} GB/s", share))
    if peak is not None:
        ridge = max([x_axis.low, *(peak.value / memory.value for memory in memories[:1])])
        x1, x2, y = x_axis(ridge), x_axis(x_axis.high), y_axis(peak.value)
        parts.append(f'<line class="ceiling" x1="{x1:.1f}" y1="{y:.1f}" x2="{x2:.1f}" y2="{y:.1f}"/>')
        parts.append(_peak_label(x_axis, y_axis, peak).drawn())
    return parts


def _peak_label(x_axis: LogAxis, y_axis: LogAxis, peak: Ceiling) -> _Box:
    text = f"peak {peak.name}: {peak.value:.4g} GFLOP/s"
    right, bottom = x_axis(x_axis.high) - 4, y_axis(peak.value) - 3
    return _Box(text=text, left=right - _CHARACTER * len(text), top=bottom - _LINE, right=right, bottom=bottom)


def _slanted_label(x1: float, y1: float, x2: float, y2: float, text: str, share: float) -> str:
    """A label above the line, at ``share`` of its length and as steep as it."""
    angle = math.degrees(math.atan2(y2 - y1, x2 - x1))
    x, y = x1 + share * (x2 - x1), y1 + share * (y2 - y1)
    place = f"translate({x:.1f} {y:.1f}) rotate({angle:.1f})"
    return f'<text class="label" transform="{place}" dy="-6" text-anchor="middle">{escape(text)}</text>'


def _points(x_axis: LogAxis, y_axis: LogAxis, shown: Sequence[Point], said: Sequence[_Box]) -> list[str]:
    """Circles, their area growing with the share of time; large ones first so that small ones stay visible."""
    circles = [_circle(x_axis, y_axis, point) for point in shown]
    return circles + _labels(x_axis, y_axis, shown, said)


def _circle(x_axis: LogAxis, y_axis: LogAxis, point: Point) -> str:
    operator = point.operator
    kind = "measured" if operator.measured_s is not None else "predicted"
    guess = "" if kind == "measured" else " guess"
    tip = (
        f"{point.title} ({operator.name}): {point.gflops:.4g} GFLOP/s at {point.intensity:.3g} FLOP/byte, "
        f"{operator.calls} x {format_time((operator.total_s or 0.0) / max(operator.calls, 1))} ({kind}), "
        f"{100 * point.share:.1f} % of the time, path {operator.choice.path}"
    )
    return (
        f'<circle class="point {operator.choice.path}{guess}" cx="{x_axis(point.intensity):.1f}" '
        f'cy="{y_axis(point.gflops):.1f}" r="{_radius(point):.1f}"><title>{escape(tip)}</title></circle>'
    )


def _radius(point: Point) -> float:
    return 4 + 22 * math.sqrt(point.share)


def _labels(x_axis: LogAxis, y_axis: LogAxis, shown: Sequence[Point], said: Sequence[_Box]) -> list[str]:
    """Names of the points with most time, each where it covers no other point, no other name and nothing ``said``."""
    centres = [(x_axis(point.intensity), y_axis(point.gflops)) for point in shown]
    taken = list(said)
    for index, point in enumerate(shown[:_LABELLED_POINTS]):
        others = [centre for position, centre in enumerate(centres) if position != index]
        places = _places(*centres[index], _radius(point), _shortened(point.title))
        free = (box for box in places if not any(box.holds(*centre) for centre in others))
        taken += itertools.islice((box for box in free if not any(box.meets(other) for other in taken)), 1)
    return [box.drawn() for box in taken[len(said) :]]


def _shortened(name: str) -> str:
    return name if len(name) <= 36 else name[:35] + "…"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Box:
    """Where a text may stand, in pixels."""

    text: str
    left: float
    top: float
    right: float
    bottom: float

    def drawn(self) -> str:
        place = f'x="{(self.left + self.right) / 2:.1f}" y="{self.bottom - 4:.1f}"'
        return f'<text class="label" {place} text-anchor="middle">{escape(self.text)}</text>'

    def holds(self, x: float, y: float) -> bool:
        return self.left - 6 <= x <= self.right + 6 and self.top - 6 <= y <= self.bottom + 6

    def meets(self, other: _Box) -> bool:
        beside = self.right <= other.left or other.right <= self.left
        return not (beside or self.bottom <= other.top or other.bottom <= self.top)

    def inside_plot(self) -> bool:
        across = self.left >= _LEFT and self.right <= _WIDTH - _RIGHT
        return across and self.top >= _TOP and self.bottom <= _HEIGHT - _BOTTOM


def _places(x: float, y: float, radius: float, text: str) -> list[_Box]:
    """Where ``text`` may stand: right of the point, left of it, above, below."""
    width, height, gap = _CHARACTER * len(text), _LINE, radius + 3
    corners = (
        (x + gap, y - height / 2),
        (x - gap - width, y - height / 2),
        (x - width / 2, y - gap - height),
        (x - width / 2, y + gap),
    )
    boxes = [_Box(text=text, left=left, top=top, right=left + width, bottom=top + height) for left, top in corners]
    return [box for box in boxes if box.inside_plot()]
