"""Workloads and trials that the tests of the store share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm_ext.records.measurement import MeasuredWorkload, Measurement, Trial

WORKLOAD = MeasuredWorkload(
    kind="cutlass",
    structure='{"rows":1024,"columns":1024,"depth":512}',
    layout="row,column",
    dtype="float16",
    device="nvidia-a100",
    instructions="sm_80",
    versions=(("apache-tvm", "0.27.0.post1"), ("nvidia-cutlass", "4.2.0.0")),
)


def workload(structure: str) -> MeasuredWorkload:
    return MeasuredWorkload(
        kind="cutlass", structure=structure, layout="", dtype="float16", device="nvidia-a100", instructions="sm_80"
    )


def measured(configuration: str, *times_us: float, of: MeasuredWorkload = WORKLOAD, **fields: Any) -> Measurement:
    """A trial that ran in ``times_us``, or one that failed where there are none."""
    outcome = fields.pop("outcome", "ok" if times_us else "launch_failed")
    trial = Trial(configuration=configuration, outcome=outcome, times_us=times_us, **fields)
    return Measurement(workload=of, trial=trial)


def identities(measurements: Sequence[Measurement]) -> set[str]:
    return {item.identity for item in measurements}
