"""Rammer's models on GPUs, simulated: rTasks co-scheduled in one launch, against a launch for each operator.

    python benchmarks/rammer_simulated.py --device nvidia-v100 --device nvidia-a100 --device nvidia-h200
    python benchmarks/rammer_simulated.py --brief --device nvidia-v100 --device amd-mi50
    python benchmarks/rammer_simulated.py lstm_tc --picture /tmp
    python benchmarks/rammer_simulated.py lstm_tc resnext29 --batch 4 --batch 16

Kernels are those that a build constructs, their times and needs what the models and emitters say (`_rtask_graphs.py`);
schedules are run by `cost/schedule_simulator.py`. No GPU is needed, and nothing is measured. Prints, beside the paper's
Figures 11, 14 and 16, times, utilisation and overheads; what it gains to select kernels (Figure 17). --picture draws
the schedules. Random cells (§5.2.5) are `rammer_cells.py`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from _common import current_environment, progress, result_path, show, write_results
from _rtask_graphs import chosen_alone, constructed_alone, graph_of, kept_graph, scheduled_on_cpu
from _schedules import gantt_file, paper_ms, unit_activity
from rich.table import Table

from benchmarks.baseline_policies import BASELINES
from benchmarks.networks import models
from tvm_ext import relay
from tvm_ext._tvm import IRModule
from tvm_ext.cost.schedule_simulator import ScheduleTimes, simulate
from tvm_ext.cost.virtual_device import virtual_device
from tvm_ext.devices import device_db
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.records.rammer import RegionRecord
from tvm_ext.records.rtasks import Need, RTaskGraph, RTaskSchedule, VDevice
from tvm_ext.relay_passes.recurrent.overlap_layers import overlapped
from tvm_ext.relay_passes.region_records import chosen_kernels
from tvm_ext.relay_passes.wavefronts.policies import schedule
from tvm_ext.relay_passes.wavefronts.schedule_check import check_schedule

DEVICES = ("nvidia-v100", "nvidia-a100", "nvidia-h200")
SHOWN = ("launches", "wavefront", "list", "segments")
CONSTRUCTED, SEVERAL, SELECTED = "constructed", "several", "selected"
"""Kernels of an operator: the one that is constructed first; another one too; of these the one that "list" selects."""
OVERLAPPED = "overlapped"
"""Recurrent layers whose input products are of few steps (`overlap_layers`), so that layers run beside each other."""
GLOBAL = "list, global barriers"


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulated:
    """A schedule of ``model`` by ``policy``: its time, and what of it is overhead.

    ``chunk``: how many steps of a recurrent layer an input product has, where these are ``kernels`` `OVERLAPPED`.
    ``others`` counts operators that do not have the kernel that was constructed first.
    ``utilisation`` is the share of the time in which a unit runs something (the paper's SM efficiency).
    ``overhead_share`` is the share of the time in launches and in taking entries, the latter shared out among vEUs.
    """

    model: str
    device: str
    policy: str
    operators: int
    rtasks: int
    programs: int
    veus: int
    makespan_ms: float
    utilisation: float
    overhead_share: float
    scheduling_s: float
    batch: int = 1
    kernels: str = CONSTRUCTED
    others: int = 0
    chunk: int | None = None


Run = tuple[Simulated, RTaskSchedule, RTaskGraph]


def simulated(name: str, graph: RTaskGraph, device: DeviceSpec, policy: str) -> tuple[Simulated, RTaskSchedule]:
    """``graph`` scheduled and simulated; the schedule is checked as well."""
    fine = policy != GLOBAL

    def make(need: Need) -> VDevice:
        return dataclasses.replace(virtual_device(device, need), fine_barriers=fine)

    start = time.process_time()
    made = schedule(graph, make, policy.partition(",")[0])
    seconds = time.process_time() - start
    check_schedule(made, graph)
    times = simulate(made, graph)
    rtasks = sum(entry.task_count for program in made.programs for _, _, entry in program.entries())
    chosen = chosen_kernels(made)
    found = Simulated(
        model=name,
        device=device.name,
        policy=policy,
        operators=len(graph.operators),
        rtasks=rtasks,
        programs=len(made.programs),
        veus=max(program.device.veu_count for program in made.programs),
        makespan_ms=times.makespan_s * 1e3,
        utilisation=unit_activity(made, times),
        overhead_share=_overhead_s(made, times) / times.makespan_s,
        scheduling_s=seconds,
        others=sum(kernel > 0 for kernel in chosen.values()),
    )
    return found, made


def by_kernels(name: str, graph: RTaskGraph, device: DeviceSpec, policies: Sequence[str]) -> Iterator[Run]:
    """``policies`` with the kernels that are constructed first; those of Figure 17 with several, where there are."""
    one, done = constructed_alone(graph), []
    for policy in policies:
        found, made = simulated(name, one, device, policy)
        done.append((found, made, one))
    yield from done
    if graph == one:
        yield from _same_again(done)
        return
    several = {policy: simulated(name, graph, device, policy) for policy in SHOWN[1:]}
    for policy in several:
        found, made = several[policy]
        yield dataclasses.replace(found, kernels=SEVERAL), made, graph
    selected = chosen_alone(graph, chosen_kernels(several["list"][1]))
    found, made = simulated(name, selected, device, "launches")
    yield dataclasses.replace(found, kernels=SELECTED), made, selected


def on_cpu(name: str, region: RegionRecord, device: DeviceSpec) -> Iterator[Simulated]:
    """What a build says of its largest schedule: by the constructed kernels alone, and with several."""
    constructed_us = region.predicted_us if region.constructed_us is None else region.constructed_us
    others = sum(kernel.startswith("the most efficient") for kernel in (item.selection for item in region.operators))
    for policy, kernels, time_us in (
        ("launches", CONSTRUCTED, region.sequential_us),
        ("list", CONSTRUCTED, constructed_us),
        ("list", SEVERAL, region.predicted_us),
    ):
        yield Simulated(
            model=name,
            device=device.name,
            policy=policy,
            operators=len(region.operators),
            rtasks=sum(operator.task_count for operator in region.operators),
            programs=1,
            veus=region.veu_count,
            makespan_ms=time_us / 1e3,
            utilisation=region.utilisation,
            overhead_share=0.0,
            scheduling_s=0.0,
            kernels=kernels,
            others=others if kernels == SEVERAL else 0,
        )


def _same_again(done: Sequence[Run]) -> Iterator[Run]:
    """What a graph without choices comes to by several kernels."""
    kernels = {"launches": SELECTED, **dict.fromkeys(SHOWN[1:], SEVERAL)}
    for found, made, graph in done:
        if found.policy in kernels:
            yield dataclasses.replace(found, kernels=kernels[found.policy]), made, graph


def _overhead_s(made: RTaskSchedule, times: ScheduleTimes) -> float:
    return times.launch_s + times.overhead_s / max(len(program.streams) for program in made.programs)


def model_table(device: str, results: Sequence[Simulated]) -> Table:
    """One line a model: times, and utilisation and overheads of launches and of the better of our schedules."""
    table = Table(title=f"{device}, batch {results[0].batch}, simulated", show_lines=False)
    for heading in ("model", "operators", "launches ms", "wavefront ms", "list ms", "segments ms", "gain"):
        table.add_column(heading)
    for heading in ("utilisation", "overhead", "layers overlapped ms (steps)"):
        table.add_column(heading)
    is_paper_s = device == "nvidia-v100" and results[0].batch == 1
    table.add_column("Rammer's paper ms" if is_paper_s else "")
    for name in dict.fromkeys(item.model for item in results):
        shown = [_of(results, device, name, policy) for policy in SHOWN]
        base, ours = shown[0], min(shown[1:], key=lambda item: item.makespan_ms)
        table.add_row(
            name,
            str(base.operators),
            *(f"{item.makespan_ms:.3f}" for item in shown),
            f"{base.makespan_ms / ours.makespan_ms:.2f}",
            f"{100 * base.utilisation:.0f} -> {100 * ours.utilisation:.0f} %",
            f"{100 * base.overhead_share:.0f} -> {100 * ours.overhead_share:.1f} %",
            _overlapped_ms([item for item in results if (item.device, item.model) == (device, name)]),
            f"{paper_ms().get(name, math.nan):.2f}" if is_paper_s else "",
        )
    return table


def _overlapped_ms(results: Sequence[Simulated]) -> str:
    """By Algorithm 1 and by the list policy, and the steps of a product; "" where no layers can overlap."""
    found = [item for item in results if item.kernels == OVERLAPPED]
    return " / ".join(f"{item.makespan_ms:.3f}" for item in found) + f" ({found[0].chunk})" if found else ""


def kernel_table(results: Sequence[Simulated]) -> Table:
    """What it gains to choose from several kernels (Figure 17), times in ms by device and model."""
    table = Table(title="kernels selected (paper, Figure 17), simulated")
    for heading in ("device", "model", "batch", "launches", "launches, selected", "wavefront", "wavefront, several"):
        table.add_column(heading)
    for heading in ("list", "list, several", "segments", "segments, several", "gain", "operators by others"):
        table.add_column(heading)
    for device, name in dict.fromkeys((item.device, item.model) for item in results):
        shown = [
            _of(results, device, name, policy, kernels)
            for policy, kernels in (
                *(("launches", CONSTRUCTED), ("launches", SELECTED)),
                *((policy, kernels) for policy in SHOWN[1:] for kernels in (CONSTRUCTED, SEVERAL)),
            )
        ]
        ours, several = shown[-2:]
        table.add_row(
            *(device, name, str(ours.batch)),
            *(f"{item.makespan_ms:.3f}" for item in shown),
            f"{ours.makespan_ms / several.makespan_ms:.2f}",
            f"{several.others} of {several.operators}",
        )
    return table


def cpu_table(device: str, results: Sequence[Simulated]) -> Table:
    """One line a model: its operators one after another, and by the list policy with one kernel and with several."""
    table = Table(title=f"{device}, simulated")
    for heading in ("model", "operators", "in turn ms", "list ms", "list, several ms", "operators by others"):
        table.add_column(heading)
    for name in dict.fromkeys(item.model for item in results):
        base, ours = (_of(results, device, name, policy) for policy in ("launches", "list"))
        several = _of(results, device, name, "list", SEVERAL)
        times = (f"{item.makespan_ms:.3f}" for item in (base, ours, several))
        table.add_row(name, str(base.operators), *times, str(several.others))
    return table


def _of(results: Sequence[Simulated], device: str, model: str, policy: str, kernels: str = CONSTRUCTED) -> Simulated:
    key = (device, model, policy, kernels)
    return next(item for item in results if (item.device, item.model, item.policy, item.kernels) == key)


def main(
    names: Annotated[list[str] | None, typer.Argument(help="Models; all six where none is named.")] = None,
    device: Annotated[list[str], typer.Option(help="Rows of the device tables.")] = list(DEVICES),  # noqa: B006
    output: Annotated[Path | None, typer.Option(help="The JSON file.")] = None,
    batch: Annotated[list[int], typer.Option(help="Of the models.")] = [1],  # noqa: B006
    picture: Annotated[Path | None, typer.Option(help="A folder for pictures of the schedules.")] = None,
    graphs: Annotated[str, typer.Option(help="A folder that keeps the graphs of --brief.")] = "",
    brief: Annotated[bool, typer.Option("--brief", help="One kernel an operator, the main policies alone.")] = False,
) -> None:
    """Simulate, print, and write JSON."""
    environment = current_environment()
    path = result_path("rammer-simulated", environment, output)
    results: list[Simulated] = []
    with progress() as step:
        for name, size in itertools.product(names or models.RAMMER, batch):
            for row in map(device_db.lookup, device):
                step(f"{name} of batch {size} on {row.name}")
                runs = _brief(name, size, row, graphs) if brief else _runs(name, size, row, picture)
                results += (dataclasses.replace(found, batch=size) for found in runs)
                write_results(path, "rammer-simulated", environment, results)
    for row_name, size in dict.fromkeys((item.device, item.batch) for item in results):
        own = [item for item in results if (item.device, item.batch) == (row_name, size)]
        if device_db.lookup(row_name).kind == "cpu":
            show(cpu_table(row_name, own))
        else:
            show(model_table(row_name, own))
            if not brief:
                show(kernel_table(own))


@functools.lru_cache(maxsize=1)
def _network(name: str, batch: int) -> IRModule:
    return relay.bind_params(*relay.frontend.from_onnx(models.build_model(name, batch=batch)))


def _brief(name: str, batch: int, row: DeviceSpec, graphs: str) -> Iterator[Simulated]:
    """The policies that are shown, with the kernels that are constructed first."""
    kept = name if batch == 1 else f"{name}-batch{batch}"
    graph = constructed_alone(kept_graph(kept, row.name, graphs, functools.partial(_network, name, batch)))
    yield from (simulated(name, graph, row, policy)[0] for policy in SHOWN)


def _runs(name: str, batch: int, row: DeviceSpec, picture: Path | None) -> Iterator[Simulated]:
    """All that is simulated of a model on a device; pictures go to the folder ``picture``."""
    mod = _network(name, batch)
    if row.kind == "cpu":
        yield from on_cpu(name, scheduled_on_cpu(mod, row.name), row)
        return
    for found, made, own in by_kernels(name, graph_of(mod, row.name), row, (*SHOWN, *BASELINES)):
        if picture is not None:
            label = f"{name}-{row.name}-{found.policy}-{found.kernels}"
            text = gantt_file(made, own, simulate(made, own).entries)
            (picture / f"{label}.svg").write_text(text, encoding="utf-8")
        yield found
    yield from _overlapped(name, mod, row)


def _overlapped(name: str, mod: IRModule, row: DeviceSpec) -> Iterator[Simulated]:
    """Its recurrent layers beside each other, by the policies that builds have; nothing where there are none."""

    def predict(trial: IRModule) -> float:
        return simulated(name, constructed_alone(graph_of(trial, row.name)), row, "list")[0].makespan_ms * 1e3

    best, chunk = overlapped(mod, predict)
    if chunk is not None:
        graph = constructed_alone(graph_of(best, row.name))
        for policy in SHOWN[1:]:
            found, _ = simulated(name, graph, row, policy)
            yield dataclasses.replace(found, kernels=OVERLAPPED, chunk=chunk)


if __name__ == "__main__":
    typer.run(main)
