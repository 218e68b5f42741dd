"""Results of a run: kept line by line, so that it can be resumed, and counted as a table and as JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from tvm_ext.bench.environment import current_environment

from .check import ChainResult, counts, reason
from .draw import draw_case

FAILURES = ("wrong", "raised", "crashed", "timed out")


def read_results(path: Path) -> dict[int, ChainResult]:
    """The results that an earlier run left in ``path``, by case; a last line that was not finished is left out."""
    results: dict[int, ChainResult] = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        if line.endswith("}"):
            record = json.loads(line)
            record["paths"] = tuple((str(name), int(count)) for name, count in record["paths"])
            results[int(record["index"])] = ChainResult(**record)
    return results


def append_result(path: Path, result: ChainResult) -> None:
    with path.open("a") as file:
        file.write(json.dumps(asdict(result)) + "\n")


def table(results: Mapping[int, ChainResult]) -> Table:
    """A row per producer: chains by outcome, kernels by path, seconds."""
    rows = Table("producer", "chains", "passed", "refused", "failed", "kernels", "seconds")
    for column in rows.columns[1:]:
        column.justify = "right"
    kinds = sorted({result.kind for result in results.values()})
    for kind in kinds:
        rows.add_row(kind, *_cells([result for result in results.values() if result.kind == kind]))
    rows.add_section()
    rows.add_row("all", *_cells(list(results.values())))
    return rows


def _cells(group: Sequence[ChainResult]) -> tuple[str, ...]:
    outcomes = Counter(result.outcome for result in group)
    return (
        str(len(group)),
        str(outcomes["passed"]),
        str(outcomes["refused"] or "-"),
        str(sum(outcomes[name] for name in FAILURES) or "-"),
        ", ".join(f"{count} {path}" for path, count in sorted(_paths(group).items())),
        f"{sum(result.seconds for result in group):.0f}",
    )


def _paths(group: Sequence[ChainResult]) -> Counter[str]:
    found: Counter[str] = Counter()
    for result in group:
        found.update(dict(result.paths))
    return found


def refusals(results: Mapping[int, ChainResult]) -> dict[str, list[int]]:
    """The cases refused, by reason, the most frequent one first."""
    found: dict[str, list[int]] = {}
    for result in results.values():
        if result.outcome == "refused":
            found.setdefault(reason(result.problem), []).append(result.index)
    return dict(sorted(found.items(), key=lambda item: -len(item[1])))


def document(results: Mapping[int, ChainResult], seed: int, devices: Sequence[str] = ()) -> str:
    """JSON with the environment, the counts, every refusal by reason, and every failure with its chain in words."""
    failed = [result for _, result in sorted(results.items()) if result.failed]
    record: dict[str, Any] = {
        "what": "random chains of ONNX operators against ONNX Runtime",
        "environment": asdict(current_environment()),
        "seed": seed,
        "devices": list(devices),
        "cases": len(results),
        "outcomes": counts(results),
        "kernels": dict(_paths(list(results.values()))),
        "refusals": refusals(results),
        "failures": [
            {
                "index": result.index,
                "outcome": result.outcome,
                "problem": result.problem,
                "case": str(draw_case(seed, result.index)).splitlines(),
            }
            for result in failed
        ],
    }
    return json.dumps(record, indent=1) + "\n"
