"""What is told of a region's schedule: times by the simulator, and who runs what, by which kernel, and why."""

from __future__ import annotations

from functools import partial

from tvm_ext.cost.schedule_simulator import ScheduleTimes
from tvm_ext.cost.virtual_device import virtual_device
from tvm_ext.records.rammer import OperatorSchedule, RegionRecord
from tvm_ext.records.rtasks import RTaskGraph, RTaskSchedule

from .rtask_graphs import RTaskRegion
from .wavefronts.selection import chosen_kernels, selections


def region_record(
    symbol: str,
    region: RTaskRegion,
    graph: RTaskGraph,
    schedule: RTaskSchedule,
    times: ScheduleTimes,
    sequential_s: float,
    arena_bytes: int,
    constructed_s: float | None,
) -> RegionRecord:
    """The record of ``schedule``; ``constructed_s``: the time by the constructed kernels alone, if there are others."""
    entries = [item for program in schedule.programs for item in program.entries()]
    units: dict[int, set[int]] = {}
    for unit, _, entry in entries:
        units.setdefault(entry.operator, set()).add(unit)
    kernel = chosen_kernels(schedule)
    chosen = [operator.kernels[kernel[place]] for place, operator in enumerate(graph.operators)]
    functions = [len(operator.kernels) for operator in region.operators]
    texts = selections(graph, schedule, partial(virtual_device, region.device), functions)
    return RegionRecord(
        symbol=symbol,
        policy=schedule.policy,
        veu_count=max(len(program.streams) for program in schedule.programs),
        entries=len(entries),
        operators=tuple(
            OperatorSchedule(
                name=operator.name,
                task_count=chosen[place].task_count,
                veu_count=len(units[place]),
                work_us=chosen[place].work_s * 1e6,
                selection=texts[place],
            )
            for place, operator in enumerate(graph.operators)
        ),
        predicted_us=times.makespan_s * 1e6,
        sequential_us=sequential_s * 1e6,
        utilisation=times.utilisation,
        arena_bytes=arena_bytes,
        schedule=schedule.to_json(),
        graph=graph.to_json(),
        constructed_us=None if constructed_s is None else constructed_s * 1e6,
    )
