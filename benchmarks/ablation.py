"""The paper's ablations on this CPU: Table 3 (alignment rules), Figure 16 (shrinking), Figure 17 (axis fusion, ε).

    python benchmarks/ablation.py
    python benchmarks/ablation.py --plot ablation.png

Table 3 and Figure 17 run on one core and are timed by processor time. Figure 16 needs two cores at least, otherwise
idle ones: it is timed by the clock. Every variant is a parameter of the construction; the first program of each is
built and timed, variants of one operator taking turns.
"""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import numpy as np
import typer
from _ablated import construct_ablated
from _common import current_environment, progress, result_path, show, write_results
from _tiles import MATMULS, Bench, Case, models, prepare, single_core
from rich.table import Table

from tvm_ext.devices.device_db import device_for_target
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.records.rprogram import RProgram
from tvm_ext.tir_passes.roller.align import ALL_RULES, MEMORY, SHAPE, UNIT

RULES: dict[str, tuple[frozenset[str], bool]] = {
    "none": (frozenset(), False),
    "+ memory transaction": (frozenset({MEMORY}), False),
    "+ execution unit": (frozenset({MEMORY, UNIT}), False),
    "+ tensor shape": (frozenset({MEMORY, UNIT, SHAPE}), False),
    "+ storage": (ALL_RULES, True),
}
"""Table 3: (rules, whether constants are repacked). A CPU's caches have no banks that a tile could conflict on: what
the paper gains by padding there, a CPU gains by storing weights in panels."""

ALIGNMENT = ("matmul 512", "BERT 128 tokens, projection", "C0", "C3", "C5", "C9", "C17", "C25", "C35", "C38")
SMALL = ("matmul 64, 256, 256", "matmul 128, 128, 512", "BERT 16 tokens, projection", "C25")
IRREGULAR = ("C3", "C8", "C9", "C10", "C26", "C29")
TOLERANCE = 1e-3  # between variants' results, relative to the largest


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """One way to construct, and what came of it; ``time_s`` is measured."""

    figure: str
    operator: str
    variant: str
    vector_axis: str
    tile: str
    predicted_s: float
    time_s: float


def first_program(case: Case, **how: Any) -> RProgram:
    """The best predicted rProgram along a spatial vector axis; ValueError where there is none."""
    spatial = [axis.name for axis in case.expr.spatial]
    for program in construct_ablated(case.expr, case.device, k=10, **how).programs:
        if program.vector_axis in spatial:
            return program
    raise ValueError(f"{case.name}: no rProgram along a spatial axis with {how}")


def measure(
    figure: str, variants: dict[str, tuple[Case, RProgram]], rounds: int, clock: Callable[[], float] | None = None
) -> list[Variant]:
    """Build the variants' kernels, check that they agree, and time them in turn."""
    benches = {name: Bench(case, [program]) for name, (case, program) in variants.items()}
    outputs = [bench.output(0) for bench in benches.values()]
    for name, output in zip(benches, outputs, strict=True):
        if not np.allclose(output, outputs[0], rtol=TOLERANCE, atol=TOLERANCE * float(np.abs(outputs[0]).max())):
            raise AssertionError(f"{name} computes something else")
    best = dict.fromkeys(benches, float("inf"))
    for _ in range(rounds):
        for name, bench in benches.items():
            taken = bench.time(2) if clock is None else bench.time(2, clock=clock)
            best[name] = min(best[name], taken[0].time_s)
    return [
        Variant(
            figure=figure,
            operator=case.name,
            variant=name,
            vector_axis=program.vector_axis or "",
            tile=str(program.tile("L0")),
            predicted_s=program.prediction.time_s,
            time_s=best[name],
        )
        for name, (case, program) in variants.items()
    ]


def alignment(name: str, model: Any, device: DeviceSpec, target: Any, rounds: int) -> list[Variant]:
    """Table 3 for one operator."""
    cases = {packed: prepare(name, model, device, target, 1, repack=packed) for packed in (False, True)}
    variants = {
        label: (cases[packed], first_program(cases[packed], rules=rules)) for label, (rules, packed) in RULES.items()
    }
    return measure("Table 3", variants, rounds)


def irregular(name: str, model: Any, device: DeviceSpec, target: Any, rounds: int) -> list[Variant]:
    """Figure 17 for one operator: no axis fusion, axis fusion, and ε of 0.4 and 1."""
    plain, fused = (prepare(name, model, device, target, 1, fuse=fuse) for fuse in (False, True))
    variants = {
        "unfused, ε 0": (plain, first_program(plain, epsilon=0.0)),
        "fused, ε 0": (fused, first_program(fused, epsilon=0.0)),
        "fused, ε 0.4": (fused, first_program(fused, epsilon=0.4)),
        "fused, ε 1": (fused, first_program(fused, epsilon=1.0)),
    }
    return measure("Figure 17", variants, rounds)


def small(name: str, model: Any, device: DeviceSpec, target: Any, rounds: int) -> list[Variant]:
    """Figure 16 for one operator on all cores: as constructed for one core, and shrunk until all have work."""
    case = prepare(name, model, device, target, 1)
    variants = {"original": (case, first_program(case, shrink_small=False)), "shrunk": (case, first_program(case))}
    return measure("Figure 16", variants, rounds, clock=perf_counter)


def summary(figure: str, results: Sequence[Variant]) -> Table:
    """Speedup of each variant over the first one, by operator and as the geometric mean."""
    rows = [item for item in results if item.figure == figure]
    labels = list(dict.fromkeys(item.variant for item in rows))
    table = Table(title=f"{figure}: measured speedup over {labels[0]!r}" if labels else figure)
    table.add_column("operator")
    for label in labels:
        table.add_column(label)
    gains: dict[str, list[float]] = {label: [] for label in labels}
    for operator in dict.fromkeys(item.operator for item in rows):
        times = {item.variant: item.time_s for item in rows if item.operator == operator}
        for label in labels:
            gains[label].append(times[labels[0]] / times[label])
        table.add_row(operator, *(f"{gains[label][-1]:.2f}" for label in labels))
    if rows:
        table.add_row("geometric mean", *(f"{statistics.geometric_mean(gains[label]):.2f}" for label in labels))
    return table


def plot(path: Path, results: Sequence[Variant]) -> None:
    """One panel per figure, a group of bars per operator: speedup over the first variant."""
    from matplotlib.figure import Figure

    figures = list(dict.fromkeys(item.figure for item in results))
    drawing = Figure(figsize=(11, 3.2 * len(figures)), layout="constrained")
    for position, figure in enumerate(figures):
        axes = drawing.add_subplot(len(figures), 1, position + 1)
        rows = [item for item in results if item.figure == figure]
        labels = list(dict.fromkeys(item.variant for item in rows))
        operators = list(dict.fromkeys(item.operator for item in rows))
        times = {(item.operator, item.variant): item.time_s for item in rows}
        for i, label in enumerate(labels):
            heights = [times[operator, labels[0]] / times[operator, label] for operator in operators]
            places = [at + (i - (len(labels) - 1) / 2) * 0.8 / len(labels) for at in range(len(operators))]
            axes.bar(places, heights, width=0.8 / len(labels), label=label)
        wrapped = [textwrap.fill(operator, 12) for operator in operators]
        axes.set_xticks(range(len(operators)), wrapped, fontsize=8)
        axes.set_ylabel("speedup")
        axes.set_title(figure)
        axes.axhline(1, color="grey", linewidth=0.8)
        axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    drawing.savefig(path, dpi=120)


def main(
    only: Annotated[str | None, typer.Option(help="'Table 3', 'Figure 16' or 'Figure 17'")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="turns of each variant")] = 8,
    plot_file: Annotated[Path | None, typer.Option("--plot", help="also draw the results")] = None,
    out: Annotated[Path | None, typer.Option(help="JSON file; default benchmarks/results/DATE-ablation.json")] = None,
) -> None:
    """Measure, print the tables, write the JSON (after each operator)."""
    environment = current_environment()
    path = result_path("ablation", environment, out)
    one, target = single_core()
    whole, _ = device_for_target("llvm")
    parts: dict[str, tuple[Sequence[str], Callable[..., list[Variant]], DeviceSpec]] = {
        "Table 3": (ALIGNMENT, alignment, one),
        "Figure 17": (IRREGULAR, irregular, one),
        "Figure 16": (SMALL, small, whole),
    }
    results: list[Variant] = []
    with progress() as say:
        for figure, (names, measured, device) in parts.items():
            if only is not None and only != figure:
                continue
            for name, model in models([n for n in names if n in MATMULS or n.startswith("C")]):
                say(f"{figure}: {name}")
                results += measured(name, model, device, target, rounds)
                write_results(path, "ablation", environment, results)
    for figure in parts:
        if any(item.figure == figure for item in results):
            show(summary(figure, results))
    if plot_file is not None:
        plot(plot_file, results)
    print(f"written to {path}")


if __name__ == "__main__":
    typer.run(main)
