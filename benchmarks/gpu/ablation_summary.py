"""Tables and drawing of what `ablation.py` found, beside the paper's own numbers."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ablation_variants import AS_BUILT, FIGURE_16, FIGURE_17, RULES, SHAPE_BOUNDS, TABLE_3
from rich.table import Table

PAPER_TABLE_3 = dict(zip(RULES, (1.00, 1.42, 1.88, 1.92, 1.94), strict=True))
"""Measured on a V100, mean over 119 operators (the paper says "average")."""

PAPER_FIGURE_16 = 2.3
PAPER_FIGURE_17 = "1.5 by fusion, 1.4 more by ε 1"
"""Roller-F over Roller-B, and Roller-P1.0 over Roller-F, as §5 says in words."""

Outcomes = Sequence[Any]
OVERHEADS = {
    "sectors loaded / needed": lambda item: item.sector_overhead,
    "wavefronts / fewest": lambda item: item.bank_overhead,
    "wavefronts of reads / fewest": lambda item: item.bank_read_overhead,
    "lanes / threads": lambda item: 1 / item.lane_share,
    "points computed / needed": lambda item: item.padded_points,
}
"""What was counted of a variant, 1 where nothing is wasted."""


# --- Table 3 ------------------------------------------------------------------------------------------------------
def complete(results: Outcomes, figure: str = TABLE_3) -> dict[str, dict[str, Any]]:
    """Operator -> variant -> outcome, for the operators with a kernel in every variant."""
    found: dict[str, dict[str, Any]] = {}
    for item in results:
        if item.figure == figure and item.variant:
            found.setdefault(item.operator, {})[item.variant] = item
    return {name: by for name, by in found.items() if not any(item.error for item in by.values())}


def mean_speedup(rows: Sequence[dict[str, Any]], label: str, time: Callable[[Any], float]) -> float:
    """Geometric mean of how much faster ``label`` is than the first variant."""
    return statistics.geometric_mean(time(next(iter(row.values()))) / time(row[label]) for row in rows)


def _predicted(item: Any) -> float:
    return float(item.predicted_s)


def _counted(item: Any) -> float:
    return float(item.counted_s)


def table_3(device: str, results: Outcomes) -> Table:
    """The columns of Table 3 as rows: speedups in the model, what was counted, and the paper's speedup."""
    rows = list(complete(results).values())
    missing = {item.operator for item in results if item.figure == TABLE_3 and item.variant and item.error}
    by_rows = sum(item.figure == TABLE_3 and not item.variant for item in results)
    title = f"Table 3 on {device}: {len(rows)} operators"
    title += f", {len(missing)} without a kernel in some column, {by_rows} made row by row"
    table = Table(title=title)
    for column in ("rules", "predicted", "counted", *OVERHEADS, "no conflict", "the paper (V100)"):
        table.add_column(column)
    for label in (*RULES, *AS_BUILT) if rows else ():
        cells = [mean_speedup(rows, label, _predicted), mean_speedup(rows, label, _counted)]
        cells += [statistics.geometric_mean(value(row[label]) for row in rows) for value in OVERHEADS.values()]
        clean = sum(row[label].bank_overhead == 1.0 for row in rows)
        paper = f"{PAPER_TABLE_3[label]:.2f}" if label in PAPER_TABLE_3 else ""
        table.add_row(label, *(f"{cell:.2f}" for cell in cells), f"{clean} of {len(rows)}", paper)
    return table


# --- Figures 16 and 17 --------------------------------------------------------------------------------------------
def _milliseconds(item: Any) -> str:
    return "no tile" if item.error else f"{item.predicted_s * 1e3:.4f} / {item.counted_s * 1e3:.4f}"


def figure_16(device: str, results: Outcomes) -> Table:
    """Milliseconds and blocks of the program as constructed for one unit, and of the shrunk one."""
    table = Table(title=f"Figure 16 on {device}: ms predicted / counted (the paper: {PAPER_FIGURE_16} times faster)")
    for column in ("operator", "original", "blocks", "shrunk", "blocks", "speedup predicted", "counted"):
        table.add_column(column)
    rows = complete(results, FIGURE_16)
    for name, row in rows.items():
        first, second = row["original"], row["shrunk"]
        gains = [time(first) / time(second) for time in (_predicted, _counted)]
        table.add_row(
            name, _milliseconds(first), str(first.blocks), _milliseconds(second), str(second.blocks),
            *(f"{gain:.2f}" for gain in gains),
        )  # fmt: skip
    if rows:
        gains = [mean_speedup(list(rows.values()), "shrunk", time) for time in (_predicted, _counted)]
        table.add_row("geometric mean", "", "", "", "", *(f"{gain:.2f}" for gain in gains))
    return table


def figure_17(device: str, results: Outcomes) -> Table:
    """Milliseconds with and without axis fusion and padding; "no tile" where none satisfies all rules."""
    table = Table(title=f"Figure 17 on {device}: ms predicted / counted (the paper: {PAPER_FIGURE_17})")
    for column in ("operator", *SHAPE_BOUNDS):
        table.add_column(column)
    found: dict[str, dict[str, Any]] = {}
    for item in results:
        if item.figure == FIGURE_17:
            found.setdefault(item.operator, {})[item.variant] = item
    for name, row in found.items():
        table.add_row(name, *(_milliseconds(row[label]) for label in SHAPE_BOUNDS))
    return table


TABLES = (table_3, figure_16, figure_17)


# --- drawing ------------------------------------------------------------------------------------------------------
def plot(path: Path, device: str, results: Outcomes) -> None:
    """Table 3 by kind of operator and by what was counted; Figures 16 and 17 by operator: ``results`` of ``device``."""
    from matplotlib.figure import Figure

    drawing = Figure(figsize=(11, 12.8), layout="constrained")
    panels = drawing.subplots(4, 1)
    drawing.suptitle(device)
    _draw_table_3(panels[0], results)
    _draw_overheads(panels[1], results)
    _draw_figure_16(panels[2], results)
    _draw_figure_17(panels[3], results)
    for axes in panels:
        axes.axhline(1, color="grey", linewidth=0.8)
        axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    drawing.savefig(path, dpi=120)


def _bars(axes: Any, groups: Sequence[str], series: dict[str, list[float | None]]) -> None:
    """A group of bars per name, one of each series; "no tile" stands where a value is missing."""
    width = 0.8 / len(series)
    for i, (label, heights) in enumerate(series.items()):
        places = [at + (i - (len(series) - 1) / 2) * width for at in range(len(groups))]
        axes.bar(places, [height or 0.0 for height in heights], width=width, label=label)
        for place, height in zip(places, heights, strict=True):
            if height is None:
                axes.text(place, 0.03, "no tile", rotation=90, fontsize=7, ha="center", va="bottom")
    axes.set_xticks(range(len(groups)), [textwrap.fill(group, 20) for group in groups], fontsize=8)


KINDS = {"roller_matmul": "products", "roller_conv2d": "convolutions", "roller_depthwiseconv": "depthwise"}


def _draw_table_3(axes: Any, results: Outcomes) -> None:
    rows = list(complete(results).values())
    parts = {
        f"{kind} ({len(part)})": part
        for group, kind in KINDS.items()
        if (part := [row for row in rows if row["none"].group == group])
    }
    parts[f"all ({len(rows)})"] = rows
    series: dict[str, list[float | None]] = {
        label: [*(mean_speedup(part, label, _counted) for part in parts.values()), PAPER_TABLE_3[label]]
        for label in RULES
    }
    _bars(axes, [*parts, "the paper, measured"], series)
    axes.set_ylabel("speedup")
    axes.set_title("Table 3: time from counted transactions, over no rules (geometric means)")


def _draw_overheads(axes: Any, results: Outcomes) -> None:
    rows = list(complete(results).values())
    series: dict[str, list[float | None]] = {
        label: [statistics.geometric_mean(value(row[label]) for row in rows) for value in OVERHEADS.values()]
        for label in RULES
    }
    _bars(axes, list(OVERHEADS), series)
    axes.set_ylim(bottom=0.9)
    axes.set_ylabel("waste (1: none)")
    axes.set_title("Table 3: what was counted (geometric means over operators)")


def _draw_figure_16(axes: Any, results: Outcomes) -> None:
    rows = complete(results, FIGURE_16)
    times = {"predicted": _predicted, "counted": _counted}
    series: dict[str, list[float | None]] = {
        label: [time(row["original"]) / time(row["shrunk"]) for row in rows.values()] for label, time in times.items()
    }
    _bars(axes, [name.replace("small_", "").replace("_", " x ") for name in rows], series)
    axes.set_ylabel("speedup")
    axes.set_title("Figure 16: shrunk until all units have work, over the original tiles")


def _draw_figure_17(axes: Any, results: Outcomes) -> None:
    found: dict[str, dict[str, Any]] = {}
    for item in results:
        if item.figure == FIGURE_17:
            found.setdefault(item.operator, {})[item.variant] = item

    def height(row: dict[str, Any], label: str) -> float | None:
        best = min(_counted(item) for item in row.values() if not item.error)
        return None if row[label].error else best / _counted(row[label])

    series = {label: [height(row, label) for row in found.values()] for label in SHAPE_BOUNDS}
    _bars(axes, list(found), series)
    axes.set_ylabel("speed, of the best")
    axes.set_title("Figure 17: axis fusion and ε, time from counted transactions")
