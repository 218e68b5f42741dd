"""Counts over the results of a run, as a table and as JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from tvm_ext.bench.environment import current_environment
from tvm_ext.byoc_cutlass._cutlass import VERSION
from tvm_ext.toolchains.cuda_toolchain import find_nvcc

from .draw import TemplateCase
from .units import TemplateResult

Found = Mapping[str, TemplateResult]
"""Results by the key of their case."""


def table(cases: Sequence[TemplateCase], found: Found) -> Table:
    """A row for each kind on each architecture; those without a result are drawn, and nothing else."""
    titles = ("architecture", "kind", "drawn", "compiled", "refused", "spilling", "seconds")
    made = Table(*titles, title="legal configurations, compiled")
    groups: dict[tuple[str, str], list[TemplateResult | None]] = {}
    for case in cases:
        groups.setdefault((case.architecture, case.kind), []).append(found.get(case.key))
    for (architecture, kind), results in sorted(groups.items()):
        made.add_row(architecture, kind, *_cells(results))
    made.add_section()
    made.add_row("all", "", *_cells([found.get(case.key) for case in cases]))
    return made


def _cells(drawn: Sequence[TemplateResult | None]) -> tuple[str, ...]:
    results = [item for item in drawn if item is not None]
    refused = sum(not item.compiled for item in results)
    spilling = sum(item.spill_bytes > 0 for item in results)
    counts = (len(drawn), len(results) - refused, refused, spilling)
    return *(str(count or "-") for count in counts), f"{sum(item.seconds for item in results):.0f}"


def document(cases: Sequence[TemplateCase], found: Found, seed: int) -> str:
    """JSON with the environment, the counts, and a line for each configuration."""
    results = [found[case.key] for case in cases if case.key in found]
    record: dict[str, Any] = {
        "what": "random legal configurations of CUTLASS's templates, compiled",
        "environment": asdict(current_environment()),
        "nvcc": find_nvcc().version,
        "cutlass": VERSION,
        "seed": seed,
        "drawn": len(cases),
        "compiled": sum(item.compiled for item in results),
        "refused": sum(not item.compiled for item in results),
        "spilling": sum(item.spill_bytes > 0 for item in results),
        "kinds": dict(Counter(f"{case.architecture} {case.kind}" for case in cases)),
        "results": [_row(case, found[case.key]) for case in cases if case.key in found],
    }
    return json.dumps(record, indent=1) + "\n"


def _row(case: TemplateCase, result: TemplateResult) -> dict[str, Any]:
    row = {
        "index": case.index, "kind": case.kind, "architecture": case.architecture, "template": case.template,
        "epilogue": case.epilogue, "compiled": result.compiled, "registers": result.registers,
        "spill_bytes": result.spill_bytes, "together": result.together, "seconds": round(result.seconds, 1),
    }  # fmt: skip
    return row if result.compiled else {**row, "problem": result.problem}
