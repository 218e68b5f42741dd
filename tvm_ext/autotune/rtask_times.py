"""What the store of measurements knows of rTasks, for the schedules of a build."""

from __future__ import annotations

from collections.abc import Mapping

from tvm_ext.options import BuildOptions
from tvm_ext.records.measurement import MeasuredWorkload
from tvm_ext.records.rtask_times import RTaskTimes, times_of

from .store import MeasurementStore


def known_rtask_times(options: BuildOptions, workloads: Mapping[str, MeasuredWorkload]) -> RTaskTimes:
    """Times of the rKernels that ``workloads`` names, of the database and the bases that ``options`` name."""
    store = MeasurementStore.for_build(options)
    try:
        return times_of(store, workloads)
    finally:
        store.close()
