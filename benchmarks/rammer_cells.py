"""Random cells as NAS-Bench draws them, simulated (Rammer, paper §5.2.5): what it gains to schedule irregular ones.

    python benchmarks/rammer_cells.py --irregular 1000
    python benchmarks/rammer_cells.py --irregular 1000 --graphs build/cells     # keeps what was constructed

Cells are looked at by their numbers until so many irregular ones are found; these alone are simulated: a launch for
each operator, and schedules by each policy, with barriers between rTasks and between all vEUs. No GPU is needed. Cells
are constructed in worker processes, which are replaced after some cells.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from _common import current_environment, progress, result_path, show, write_results
from _rtask_graphs import constructed_alone, kept_graph
from rammer_simulated import GLOBAL, SHOWN, simulated
from rich.table import Table

from benchmarks.networks import models
from benchmarks.networks.random_cells import CELLS
from tests.support.case_workers import Trial, run_trials
from tvm_ext import relay
from tvm_ext._tvm import IRModule
from tvm_ext.devices import device_db
from tvm_ext.records.rtasks import RTaskGraph
from tvm_ext.relay_passes.wavefronts.wavefront_policy import waves

IRREGULAR = 2.0
"""A cell is irregular where a wave's longest operator has so many times the work of its shortest. The paper says no
more than "heterogeneous operators in a wave"."""
SEVERAL = "list, several kernels"
PERCENTILES = (0, 5, 10, 25, 50, 75, 90, 95, 100)
RATIOS = (
    *((f"{policy} over launches", "launches", policy) for policy in (*SHOWN[1:], SEVERAL)),
    ("barriers between rTasks over global ones", GLOBAL, "list"),
    ("several kernels over one", "list", SEVERAL),
)
PAPER = {"list over launches": "1.28 (3.40), of all cells", "barriers between rTasks over global ones": "1.11 (1.89)"}
"""Means, and most, of Rammer on 5000 cells, and on the irregular ones of them."""
LIMIT_S = 1800.0
BLOCK = 100
"""Cells that are looked at before those found are counted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """A cell on a device; ``folder``: where graphs are kept from one run to the next, "" for nowhere."""

    index: int
    device: str
    folder: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CellTimes:
    """A cell's times in us by schedule, if it is irregular; ``problem`` where its process ended."""

    index: int
    times_us: dict[str, float]
    problem: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gain:
    """How much faster one schedule is than another on ``irregular`` of ``cells`` cells: 1.0 is as fast.

    ``percentiles`` are of `PERCENTILES`; ``mean`` is geometric.
    """

    device: str
    cells: int
    irregular: int
    ratio: str
    mean: float
    percentiles: tuple[float, ...]


def is_irregular(graph: RTaskGraph) -> bool:
    """Whether a wave of Algorithm 1 has operators of which one has `IRREGULAR` times the work of another."""
    for wave in waves(graph):
        times = [graph.operators[index].kernels[0].work_s for index in wave]
        if max(times) >= IRREGULAR * min(times):
            return True
    return False


def cell_times(wanted: Wanted) -> CellTimes:
    """The times of a cell by each schedule; nothing of a regular one."""
    name, row = f"nasbench_{wanted.index}", device_db.lookup(wanted.device)

    def network() -> IRModule:
        return relay.bind_params(*relay.frontend.from_onnx(models.build_model(name)))

    graph = kept_graph(name, row.name, wanted.folder, network)
    if not is_irregular(graph):
        return CellTimes(index=wanted.index, times_us={})
    one = constructed_alone(graph)
    runs = {policy: (one, policy) for policy in (*SHOWN, GLOBAL)} | {SEVERAL: (graph, "list")}
    times = {name: simulated("cell", own, row, policy)[0].makespan_ms * 1e3 for name, (own, policy) in runs.items()}
    return CellTimes(index=wanted.index, times_us=times)


def _failure(wanted: Wanted, outcome: str, problem: str, _seconds: float) -> CellTimes:
    return CellTimes(index=wanted.index, times_us={}, problem=f"{outcome}: {problem}")


def first_irregular(device: str, count: int, folder: str, jobs: int) -> Iterator[list[CellTimes]]:
    """All cells looked at so far, block after block, until ``count`` of them are irregular; the last one then is."""
    trial = Trial(attempt=cell_times, failure=_failure)
    found: list[CellTimes] = []
    for begin in range(0, CELLS, BLOCK):
        cases = (Wanted(index=index, device=device, folder=folder) for index in range(begin, begin + BLOCK))
        found += sorted(run_trials(cases, trial, jobs=jobs, limit_s=LIMIT_S), key=lambda cell: cell.index)
        rough = [place for place, cell in enumerate(found) if cell.times_us]
        if len(rough) >= count:
            yield found[: rough[count - 1] + 1]
            return
        yield list(found)


def gains(device: str, found: Sequence[CellTimes]) -> Iterator[Gain]:
    """By ratio of `RATIOS`, over the irregular cells of ``found``."""
    rough = [cell.times_us for cell in found if cell.times_us]
    for name, base, ours in RATIOS:
        ratios = [times[base] / times[ours] for times in rough]
        yield Gain(
            device=device,
            cells=len(found),
            irregular=len(rough),
            ratio=name,
            mean=statistics.geometric_mean(ratios),
            percentiles=tuple(float(item) for item in np.percentile(ratios, PERCENTILES)),
        )


def gain_table(results: Sequence[Gain]) -> Table:
    """A line for each ratio, beside the paper's."""
    first = results[0]
    share = 100 * first.irregular / first.cells
    title = (
        f"{first.irregular} irregular of {first.cells} cells ({share:.1f} %; paper 28.3 %), {first.device}, simulated"
    )
    table = Table(title=title)
    for heading in ("times as fast", "mean", *(f"{item} %" for item in PERCENTILES), "paper (most)"):
        table.add_column(heading)
    for item in results:
        numbers = (f"{number:.2f}" for number in (item.mean, *item.percentiles))
        table.add_row(item.ratio, *numbers, PAPER.get(item.ratio, ""))
    return table


def main(
    irregular: Annotated[int, typer.Option(help="Irregular cells to find.", min=1)] = 1000,
    device: Annotated[str, typer.Option(help="A row of the device tables.")] = "nvidia-v100",
    graphs: Annotated[str, typer.Option(help="A folder that keeps the constructed graphs.")] = "",
    jobs: Annotated[int, typer.Option(help="Worker processes.", min=1)] = os.cpu_count() or 1,
    output: Annotated[Path | None, typer.Option(help="The JSON file.")] = None,
) -> None:
    """Simulate, print, and write JSON."""
    environment = current_environment()
    path = result_path("rammer-cells", environment, output)
    with progress() as step:
        for found in first_irregular(device_db.lookup(device).name, irregular, graphs, jobs):
            step(f"{sum(bool(cell.times_us) for cell in found)} irregular of {len(found)} cells")
    for cell in found:
        if cell.problem:
            print(f"cell {cell.index}: {cell.problem}")
    results = list(gains(device, found))
    write_results(path, "rammer-cells", environment, results)
    show(gain_table(results))


if __name__ == "__main__":
    typer.run(main)
