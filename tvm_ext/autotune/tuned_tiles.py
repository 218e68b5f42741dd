"""The tiles that builds take by measurement: what `choose_tuned` says of all that a store knows of one device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from tvm_ext.analysis.tile_workload import KERNELS, tile_machine
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.options import BuildOptions

from .choose import choose_tuned
from .standings import standings_of
from .store import MeasurementStore


@dataclass(frozen=True, kw_only=True, slots=True)
class TunedTiles:
    """Configurations by their workloads' keys, why they were chosen, and what was wrong with the store."""

    configurations: Mapping[str, str] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def tiles_for_build(device: DeviceSpec, options: BuildOptions) -> TunedTiles:
    """Of the database and the bases that ``options`` name; none for GPUs, and where nothing is constructed."""
    if device.kind != "cpu" or options.enable_roller is False:
        return TunedTiles()
    store = MeasurementStore.for_build(options)
    try:
        return tuned_tiles(store, device)
    finally:
        store.close()


def tuned_tiles(store: MeasurementStore, device: DeviceSpec) -> TunedTiles:
    """What ``store`` gives ``device``.

    Nothing is looked at that was measured on another device, with other instructions, threads or versions.
    """
    machines = {kind: tile_machine(device, kind) for kind in KERNELS}
    configurations, reasons = {}, {}
    for key, workload in store.workloads(machines).items():
        if replace(workload, structure="", dtype="") != machines[workload.kind]:
            continue
        choice = choose_tuned(standings_of(store.trials(workload)))
        if choice.configuration is not None:
            configurations[key], reasons[key] = choice.configuration, choice.reason
    return TunedTiles(configurations=configurations, reasons=reasons, notes=tuple(store.notes.values()))
