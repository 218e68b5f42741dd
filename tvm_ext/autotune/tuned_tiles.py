"""The tiles that builds take by measurement: what `choose_tuned` says of all that a store knows of one device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tvm_ext.analysis.tile_workload import KIND
from tvm_ext.records.measurement import MeasuredWorkload

from .choose import choose_tuned
from .standings import standings_of
from .store import MeasurementStore


@dataclass(frozen=True, kw_only=True, slots=True)
class TunedTiles:
    """Configurations by their workloads' keys, why they were chosen, and what was wrong with the store."""

    configurations: Mapping[str, str] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def tuned_tiles(store: MeasurementStore, like: MeasuredWorkload) -> TunedTiles:
    """What is to be taken on the device, with the instructions, threads and versions of ``like``.

    Nothing that was measured on another device, with other instructions or another number of threads is looked at.
    """
    configurations, reasons = {}, {}
    for key, workload in store.workloads(KIND).items():
        if not is_same_machine(workload, like):
            continue
        choice = choose_tuned(standings_of(store.trials(workload)))
        if choice.configuration is not None:
            configurations[key], reasons[key] = choice.configuration, choice.reason
    return TunedTiles(configurations=configurations, reasons=reasons, notes=tuple(store.notes.values()))


def is_same_machine(workload: MeasuredWorkload, like: MeasuredWorkload) -> bool:
    """Whether times of one say something of the other: same device, instructions, threads, versions."""
    names = ("kind", "device", "instructions", "threads", "versions")
    return all(getattr(workload, name) == getattr(like, name) for name in names)
