"""Networks exported from torch, built and compared with ONNX Runtime.

    python -m tests.support.exported_models --jobs 1 --output exported.json
    python -m tests.support.exported_models swin gpt2 --exporter torchscript
    python -m tests.support.exported_models --device nvidia-a100 --device nvidia-v100    # as far as their source
    python -m tests.support.exported_models --torch    # programs of torch.export, imported as they are, against torch

Exits with 1 where one failed. Their ONNX files, about 1.5 GB of them, are kept in the cache folder.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from tvm_ext import options
from tvm_ext.bench.environment import current_environment
from tvm_ext.devices.device_db import lookup
from tvm_ext.errors import OptionError
from tvm_ext.support.files import write_atomically

from ..commands import Jobs, Output, console
from .networks import NETWORKS, network, require_packages
from .record import CPU, EXPORTERS, PROGRAM, ExportResult
from .runs import Run, run_all

app = typer.Typer(add_completion=False)


@app.command()
def main(
    names: Annotated[list[str] | None, typer.Argument(metavar="NETWORK...", help="All of them if left out.")] = None,
    exporter: Annotated[list[str] | None, typer.Option(help="dynamo, torchscript; both if left out.")] = None,
    device: Annotated[list[str] | None, typer.Option(help="Rows to build for; this CPU if left out.")] = None,
    jobs: Jobs = 1,
    limit_s: Annotated[float, typer.Option(min=1.0, help="Seconds for one export, and for one build and run.")] = 300.0,
    seed: Annotated[int, typer.Option(help="Of the weights and inputs.")] = 0,
    keep: Annotated[Path | None, typer.Option(help="Folder of the ONNX files, instead of the cache's.")] = None,
    programs: Annotated[
        bool, typer.Option("--torch", help="Import torch.export's programs; compare with torch.")
    ] = False,
    output: Output = None,
) -> None:
    """Export networks from randomly initialised torch modules, build each and compare it with ONNX Runtime."""
    folder = keep or options.cache_directory() / "exported"
    runs = [
        Run(network=name, exporter=how, devices=_devices(device), folder=folder, seed=seed, limit_s=limit_s)
        for name in names or NETWORKS
        for how in ((PROGRAM,) if programs else _exporters(exporter))
        if programs or how in network(name).exporters
    ]
    if programs or not all(run.model.is_file() for run in runs):
        require_packages()
    results = []
    for result in run_all(runs, jobs):
        results.append(result)
        console.print(line(result), markup=False, highlight=False)
        if output is not None:
            write_atomically(output, document(results).encode())
    console.print(table(results))
    raise typer.Exit(0 if all(result.passed for result in results) else 1)


def _devices(given: Sequence[str] | None) -> tuple[str, ...]:
    for name in given or ():
        lookup(name)  # raises for a name that is not in the tables
    return tuple(given or (CPU,))


def _exporters(given: Sequence[str] | None) -> tuple[str, ...]:
    for name in given or ():
        if name not in EXPORTERS:
            raise OptionError(f"there is no exporter {name!r}.", f"the exporters are {', '.join(EXPORTERS)}")
    return tuple(given or EXPORTERS)


def line(result: ExportResult) -> str:
    """One line on stdout as soon as it is known."""
    figures = "" if result.build_s is None else f", built in {result.build_s:.1f} s"
    if result.error is not None and result.variation is not None:
        figures += f", error {result.error:.1e} (inputs make a difference of {result.variation:.1e})"
    return f"{result.network}, {result.exporter}, {result.device}: {result.outcome} {result.problem}{figures}".strip()


def table(results: Sequence[ExportResult]) -> Table:
    """A row per exporter and device."""
    shown = Table("exporter", "device", "passed", "others", "largest error", "kernels", "built in")
    for exporter, device in dict.fromkeys((item.exporter, item.device) for item in results):
        part = [item for item in results if (item.exporter, item.device) == (exporter, device)]
        others = Counter(item.outcome for item in part if not item.passed)
        errors = [item.error for item in part if item.error is not None]
        paths: Counter[str] = Counter()
        for item in part:
            paths.update(dict(item.paths))
        shown.add_row(
            exporter, device, f"{sum(item.passed for item in part)} of {len(part)}",
            ", ".join(f"{count} {outcome}" for outcome, count in others.items()) or "-",
            f"{max(errors):.1e}" if errors else "-", ", ".join(f"{n} {path}" for path, n in sorted(paths.items())),
            f"{sum(item.build_s or 0.0 for item in part):.0f} s",
        )  # fmt: skip
    return shown


def document(results: Sequence[ExportResult]) -> str:
    """JSON with the environment and every result."""
    record = {
        "what": "networks exported from torch, against ONNX Runtime",
        "environment": asdict(current_environment()),
        "outcomes": dict(Counter(item.outcome for item in results)),
        "results": [asdict(item) for item in results],
    }
    return json.dumps(record, indent=1) + "\n"


if __name__ == "__main__":
    app()
