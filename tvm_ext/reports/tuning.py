"""A tuning run in the report: its curve as inline SVG, its kernels as a table."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

from tvm_ext.records.tuned import CurvePoint, TunedTask, TuningRecord

from .text import format_time

_WIDTH, _HEIGHT = 1100, 360  # a choice: pixels of the picture
_LEFT, _RIGHT, _TOP, _BOTTOM = 80, 190, 20, 50  # margins; the right one holds names
_TICKS = 6  # a choice: lines across, about

Scale = Callable[[float], float]


def tuning_section(record: TuningRecord | None) -> str:
    """The part of the page on tuning; empty where nothing was tuned."""
    if record is None:
        return ""
    note = (
        "What the tuned kernels take in one run of the model, by the time spent searching: with each kernel's fastest "
        "so far, and with the fastest that the cost model still expects."
    )
    return (
        f'<section id="tuning"><h2>Tuning</h2><p class="muted">{escape(str(record))}.</p>'
        f'<p class="muted">{note}</p>{tuning_curve(record)}{_table(record)}</section>'
    )


def tuning_curve(record: TuningRecord) -> str:
    """The best so far, the predicted limit and the constructed kernels over seconds, or a sentence without a batch."""
    curve = [point for point in record.curve[1:] if point.best_us > 0]
    if not curve:
        return "<p>Nothing was measured in this run: the database knew enough.</p>"
    constructed = record.constructed_us
    x = _scale(0.0, max(point.seconds for point in curve), _LEFT, _WIDTH - _RIGHT)
    levels = [*(point.best_us for point in curve), *(point.limit_us for point in curve), constructed]
    low, high = _range([level for level in levels if level > 0])
    y = _scale(low, high, _HEIGHT - _BOTTOM, _TOP)
    labels = _spread([
        (y(constructed), f"constructed: {format_time(1e-6 * constructed)}"),
        (y(curve[-1].best_us), f"best so far: {format_time(1e-6 * curve[-1].best_us)}"),
        (y(curve[-1].limit_us), f"predicted limit: {format_time(1e-6 * curve[-1].limit_us)}"),
    ])  # fmt: skip
    parts = [
        *_grid(x, y, (0.0, curve[-1].seconds), (low, high)),
        _line("cache", [(x(0.0), y(constructed)), (x(curve[-1].seconds), y(constructed))]),
        _line("limit", [(x(point.seconds), y(point.limit_us)) for point in curve]),
        _line("best", _steps(curve, y(constructed), x, y)),
        *(_mark(point, x, y) for point in curve),
        *(_label(place, text) for place, text in labels),
    ]
    title = "Microseconds of the tuned kernels over seconds of tuning"
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{title}">{"".join(parts)}</svg>'


def _scale(low: float, high: float, start: float, end: float) -> Scale:
    span = high - low or 1.0
    return lambda value: start + (value - low) / span * (end - start)


def _range(levels: Sequence[float]) -> tuple[float, float]:
    """From the lowest to the highest with a margin of a tenth, so that curves do not lie on the frame."""
    margin = 0.1 * (max(levels) - min(levels)) or 0.05 * max(levels)
    return max(0.0, min(levels) - margin), max(levels) + margin


def _ticks(low: float, high: float) -> list[float]:
    """About `_TICKS` round numbers: 0.1, 0.2 or 0.5 times a power of ten apart."""
    rough = (high - low) / _TICKS or 1.0
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    first = math.ceil(low / step)
    return [number * step for number in range(first, math.floor(high / step) + 1)]


def _grid(x: Scale, y: Scale, seconds: tuple[float, float], levels: tuple[float, float]) -> list[str]:
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    parts = []
    for value in _ticks(*seconds):
        parts.append(f'<line class="grid" x1="{x(value):.1f}" y1="{_TOP}" x2="{x(value):.1f}" y2="{bottom}"/>')
        parts.append(f'<text x="{x(value):.1f}" y="{bottom + 18}" text-anchor="middle">{value:g}</text>')
    for value in _ticks(*levels):
        parts.append(f'<line class="grid" x1="{_LEFT}" y1="{y(value):.1f}" x2="{right}" y2="{y(value):.1f}"/>')
        text = format_time(1e-6 * value) if value else "0"
        parts.append(f'<text x="{_LEFT - 8}" y="{y(value) + 4:.1f}" text-anchor="end">{text}</text>')
    middle = (_LEFT + right) / 2
    parts.append(f'<text x="{middle}" y="{_HEIGHT - 10}" text-anchor="middle">seconds of tuning</text>')
    return parts


def _line(style: str, points: Sequence[tuple[float, float]]) -> str:
    return f'<polyline class="{style}" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}"/>'


def _steps(curve: Sequence[CurvePoint], start: float, x: Scale, y: Scale) -> list[tuple[float, float]]:
    """From level ``start``; level until the next batch is done, for nothing is known of the time between."""
    found = [(x(0.0), start)]
    for point in curve:
        found += [(x(point.seconds), found[-1][1]), (x(point.seconds), y(point.best_us))]
    return found


def _mark(point: CurvePoint, x: Scale, y: Scale) -> str:
    tip = f"{point.trials} trials, {point.seconds:.0f} s: {format_time(1e-6 * point.best_us)}"
    at = f'cx="{x(point.seconds):.1f}" cy="{y(point.best_us):.1f}"'
    return f'<circle class="best" {at} r="3"><title>{escape(tip)}</title></circle>'


def _label(y: float, text: str) -> str:
    return f'<text class="label" x="{_WIDTH - _RIGHT + 8}" y="{y + 4:.1f}">{escape(text)}</text>'


def _spread(labels: Sequence[tuple[float, str]], gap: float = 17.0) -> list[tuple[float, str]]:
    """Labels from the top down, pushed apart where they would lie on each other."""
    placed: list[tuple[float, str]] = []
    for y, text in sorted(labels):
        placed.append((max(y, placed[-1][0] + gap) if placed else y, text))
    over = max(0.0, placed[-1][0] - (_HEIGHT - _BOTTOM))
    return [(y - over, text) for y, text in placed]


_COLUMNS = ("Kernel", "Calls", "Share", "Constructed", "Now", "Tried", "Of", "Failed", "Why")


def _table(record: TuningRecord) -> str:
    head = "".join(f'<th scope="col"><button type="button">{name}</button></th>' for name in _COLUMNS)
    rows = "".join(_row(task) for task in record.tasks)
    rows += "".join(
        f'<tr><td class="name">{escape(name)}</td>{_EMPTY * 7}<td class="reason">{escape(why)}</td></tr>'
        for name, why in record.untuned
    )
    return (
        '<div class="scroll"><table class="sortable" id="tuned"><thead><tr>'
        f"{head}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


_EMPTY = '<td class="number" data-value=""></td>'


def _row(task: TunedTask) -> str:
    seconds = [None if value is None else 1e-6 * value for value in (task.constructed_us, task.best_us)]
    cells = [
        (task.calls, str(task.calls)),
        (task.share, f"{100 * task.share:.1f} %"),
        *((value, format_time(value)) for value in seconds),
        *((count, str(count)) for count in (task.known, task.candidates, task.failed)),
    ]
    numbers = "".join(
        f'<td class="number" data-value="{"" if value is None else repr(float(value))}">{escape(text)}</td>'
        for value, text in cells
    )
    return f'<tr><td class="name">{escape(task.name)}</td>{numbers}<td class="reason">{escape(task.reason)}</td></tr>'
