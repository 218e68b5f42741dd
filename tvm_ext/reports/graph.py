"""The calls of a build's kernels as a graph, coloured by time, as inline SVG."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from html import escape

from .record import BuildRecord
from .text import format_time

_BOX, _HEIGHT, _GAP, _STEP = 250, 26, 24, 46
"""A choice: pixels of a box, between two boxes of a row, and from row to row."""
_MOST_CALLS = 1500  # a choice: what a browser still scrolls smoothly
_SHOWN_CHARACTERS = 28  # a choice: what fits into a box beside the time


@dataclass(frozen=True, kw_only=True, slots=True)
class _Corner:
    x: float
    y: float


def graph_section(report: BuildRecord) -> str:
    """A section of the page; empty where the build has no graph of kernels."""
    if not report.sites:
        return ""
    head = "<section><h2>Graph</h2>"
    if len(report.sites) > _MOST_CALLS:
        return f'{head}<p class="muted">{len(report.sites)} calls are too many to be drawn.</p></section>'
    note = "Every call of a kernel, from inputs to outputs. The fuller the colour, the larger its share of the time."
    return f'{head}<p class="muted">{note}</p><div class="scroll tall">{_picture(report)}</div></section>'


def _picture(report: BuildRecord) -> str:
    places = _places(report)
    width = max(place.x for place in places) + _BOX + 2 * _GAP
    height = max(place.y for place in places) + _STEP
    usual = {operator.function: operator.time_s or 0.0 for operator in report.operators}
    seconds = [usual.get(site.function, 0.0) for site in report.sites]
    total, longest = sum(seconds) or 1.0, max(seconds) or 1.0
    edges = [_edge(places[source], places[index]) for index, site in enumerate(report.sites) for source in site.reads]
    boxes = []
    for site, place, time_s in zip(report.sites, places, seconds, strict=True):
        title = site.title
        shown = title if len(title) <= _SHOWN_CHARACTERS else title[: _SHOWN_CHARACTERS - 1] + "…"
        nodes = "\n".join(f"{node} {node.shape}" for node in site.nodes)
        tip = f"{site.function}: {format_time(time_s)}, {100 * time_s / total:.1f} %\n{nodes}"
        boxes.append(
            f'<g class="call"><title>{escape(tip)}</title>'
            f'<rect class="box" x="{place.x:.0f}" y="{place.y:.0f}" width="{_BOX}" height="{_HEIGHT}" rx="4"></rect>'
            f'<rect class="heat" x="{place.x:.0f}" y="{place.y:.0f}" width="{_BOX}" height="{_HEIGHT}" rx="4" '
            f'fill-opacity="{0.85 * time_s / longest:.3f}"></rect>'
            f'<text x="{place.x + 8:.0f}" y="{place.y + 17:.0f}">{escape(shown)}</text>'
            f'<text x="{place.x + _BOX - 8:.0f}" y="{place.y + 17:.0f}" text-anchor="end">{format_time(time_s)}</text>'
            "</g>"
        )
    return (
        f'<svg class="calls" width="{width:.0f}" height="{height:.0f}" role="img" aria-label="Graph of kernels">'
        + "".join(edges + boxes)
        + "</svg>"
    )


def _places(report: BuildRecord) -> list[_Corner]:
    """Rows by the longest way from an input; within a row in the order of the program."""
    ranks: list[int] = []
    columns: defaultdict[int, int] = defaultdict(int)
    places = []
    for site in report.sites:
        rank = max((ranks[source] + 1 for source in site.reads), default=0)
        ranks.append(rank)
        places.append(_Corner(x=_GAP + columns[rank] * (_BOX + _GAP), y=10 + rank * _STEP))
        columns[rank] += 1
    return places


def _edge(start: _Corner, end: _Corner) -> str:
    """Straight to the next row; further down in a bow to the right of the boxes between."""
    x1, y1, x2, y2 = start.x + _BOX / 2, start.y + _HEIGHT, end.x + _BOX / 2, end.y
    if y2 - y1 <= _STEP:
        return f'<line class="edge" x1="{x1:.0f}" y1="{y1:.0f}" x2="{x2:.0f}" y2="{y2:.0f}"/>'
    x1, y1, x2, y2 = start.x + _BOX, start.y + _HEIGHT / 2, end.x + _BOX, end.y + _HEIGHT / 2
    bow = max(x1, x2) + _GAP * 0.9
    path = f"M{x1:.0f} {y1:.0f} C{bow:.0f} {y1:.0f} {bow:.0f} {y1 + 30:.0f} {bow:.0f} {(y1 + y2) / 2:.0f} "
    return f'<path class="edge" d="{path}S{bow:.0f} {y2:.0f} {x2:.0f} {y2:.0f}"></path>'
