"""Counts over the results of a run, as a table and as JSON."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from tvm_ext.bench.environment import current_environment

from .check import CaseResult
from .draw import draw_case
from .opencl import in_turn


def by_kind(results: Sequence[CaseResult]) -> dict[str, list[CaseResult]]:
    groups: dict[str, list[CaseResult]] = defaultdict(list)
    for result in sorted(results, key=lambda item: item.index):
        groups[result.kind].append(result)
    return dict(sorted(groups.items()))


def table(results: Sequence[CaseResult]) -> Table:
    """A row per kind: cases, outcomes, kernels by path, and the largest share of its tolerance that an error took."""
    rows = Table("kind", "cases", "passed", "failed", "kernels", "largest error / tolerance", "seconds")
    for column in rows.columns[1:]:
        column.justify = "right"
    for kind, group in by_kind(results).items():
        rows.add_row(kind, *_cells(group))
    rows.add_section()
    rows.add_row("all", *_cells(results))
    return rows


def _cells(group: Sequence[CaseResult]) -> tuple[str, ...]:
    passed = [item for item in group if item.passed]
    paths = Counter(path.path for item in group for path in item.paths)
    shares = [item.error / item.tolerance for item in passed if item.tolerance]
    return (
        str(len(group)),
        str(len(passed)),
        str(len(group) - len(passed) or "-"),
        ", ".join(f"{count} {path}" for path, count in sorted(paths.items())),
        f"{max(shares):.2f}" if shares else "exact",
        f"{sum(item.seconds for item in group):.0f}",
    )


def document(results: Sequence[CaseResult], seed: int, devices: Sequence[str] = ()) -> str:
    """JSON with the environment, the counts, and every failure with the case that failed; ``devices`` as `in_turn`."""
    failures = [item for item in sorted(results, key=lambda item: item.index) if not item.passed]
    record: dict[str, Any] = {
        "what": "random operators against float64 NumPy",
        "environment": asdict(current_environment()),
        "seed": seed,
        "devices": list(devices),
        "cases": len(results),
        "outcomes": dict(Counter(item.outcome for item in results)),
        "kernels": dict(Counter(path.path for item in results for path in item.paths)),
        "kinds": {
            kind: {
                "cases": len(group),
                "outcomes": dict(Counter(item.outcome for item in group)),
                "kernels": dict(Counter(path.path for item in group for path in item.paths)),
            }
            for kind, group in by_kind(results).items()
        },
        "failures": [
            {
                "index": item.index,
                "outcome": item.outcome,
                "problem": item.problem,
                "case": asdict(in_turn(draw_case(seed, item.index), devices)),
            }
            for item in failures
        ],
    }
    return json.dumps(record, indent=1) + "\n"
