"""How many versions of each buffer: the depth that ALCOP's model predicts to be fastest (paper §4, Table 1).

A search over a few dozen pairs of shared and register stages, each predicted in microseconds; nothing is measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from tvm_ext.cost.pipeline_model import PipelineLatency, predict
from tvm_ext.cost.pipeline_workload import PipelineWorkload, shared_bytes
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.devices.occupancy import shared_limit_bytes
from tvm_ext.errors import IllegalRewrite

SHARED_STAGES = range(2, 9)
"""Stages of shared memory that are tried beside 1."""

REGISTER_STAGES = range(1, 5)  # a choice: each stage more costs a thread a fragment's registers

SYNCHRONOUS_STAGES = 2
"""Without asynchronous copies a thread's registers hold the one tile that is under way."""

TIE = 0.01
"""Predictions within this share of the best count as equal: the smaller program is taken."""

KIBIBYTE = 1024  # bytes, by definition


@dataclass(frozen=True, kw_only=True, slots=True)
class StageChoice:
    """The stages to use, what is predicted of them and of the kernel without pipelining, and what was given up."""

    shared_stages: int
    register_stages: int
    latency: PipelineLatency
    unpipelined: PipelineLatency
    notes: tuple[str, ...] = ()

    @property
    def speedup(self) -> float:
        return self.unpipelined.time_s / self.latency.time_s


def choose_stages(
    workload: PipelineWorkload,
    device: DeviceSpec,
    *,
    fixed_shared: int | None = None,
    fixed_register: int | None = None,
    asynchronous: bool = True,
) -> StageChoice:
    """The stages with the least predicted time; among predictions within 1 %, the least shared memory and registers.

    One stage is always tried, so that nothing is pipelined where that would be slower. ``fixed_shared`` and
    ``fixed_register`` are a user's stages: they are reduced only where trips, shared memory or registers force it, and
    a note says so. The stages of registers divide the inner loop's trips, so that once it is unrolled each version is
    a constant. ``asynchronous`` says whether the copies to shared memory are.

    Raises IllegalRewrite where not even one stage fits the device.
    """
    unpipelined = predict(workload, device, 1, 1, asynchronous=asynchronous)
    notes: list[str] = []
    shared = _shared_candidates(workload, device, fixed_shared, asynchronous, notes)
    register = _register_candidates(workload, fixed_register, notes)
    found = list(_legal(workload, device, shared, register, asynchronous))
    if not found:  # fixed stages
        found = [_reduced(workload, device, shared[-1], register[-1], asynchronous, notes)]
    best = min(latency.time_s for latency in found)
    chosen = min((latency for latency in found if latency.time_s <= best * (1 + TIE)), key=_cost)
    notes += _unknown(device)
    if fixed_shared is None and chosen.shared_stages == 1 and workload.shared_trips > 1:
        notes.append("one stage of shared memory: more are predicted to be no faster")
    return StageChoice(
        shared_stages=chosen.shared_stages,
        register_stages=chosen.register_stages,
        latency=chosen,
        unpipelined=unpipelined,
        notes=tuple(notes),
    )


def _cost(latency: PipelineLatency) -> tuple[int, int, float]:
    return latency.shared_bytes, latency.registers, latency.time_s


def _legal(
    workload: PipelineWorkload, device: DeviceSpec, shared: Iterable[int], register: Sequence[int], asynchronous: bool
) -> Iterator[PipelineLatency]:
    for shared_stages in shared:
        for register_stages in register:
            latency = _predicted(workload, device, shared_stages, register_stages, asynchronous)
            if latency is not None:
                yield latency


def _predicted(
    workload: PipelineWorkload, device: DeviceSpec, shared_stages: int, register_stages: int, asynchronous: bool
) -> PipelineLatency | None:
    try:
        return predict(workload, device, shared_stages, register_stages, asynchronous=asynchronous)
    except IllegalRewrite:
        return None


def _shared_candidates(
    workload: PipelineWorkload, device: DeviceSpec, fixed: int | None, asynchronous: bool, notes: list[str]
) -> list[int]:
    """Stages of shared memory that trips, the copies and the memory of a block allow."""
    most = _most_that_fit(workload, device)
    limits = [
        (most, f"do not fit: {_size(shared_limit_bytes(device))} of {device.name} hold {most}"),
        (workload.shared_trips, f"are reduced to {workload.shared_trips}: so many iterations has the loop"),
    ]
    if not asynchronous:
        why = f"are reduced to {SYNCHRONOUS_STAGES}: without asynchronous copies, registers hold one tile under way"
        limits.append((SYNCHRONOUS_STAGES, why))
    limit, reason = min(limits, key=lambda limit: limit[0])
    if fixed is None:
        return [1, *(stages for stages in SHARED_STAGES if stages <= limit)]
    if fixed > limit:
        notes.append(f"{fixed} stages of {_size(workload.stage_bytes)} {reason}")
    return [max(1, min(fixed, limit))]


def _most_that_fit(workload: PipelineWorkload, device: DeviceSpec) -> int:
    free = shared_limit_bytes(device) - shared_bytes(workload, 0)
    return max(1, free // workload.stage_bytes) if workload.stage_bytes else max(SHARED_STAGES)


def _register_candidates(workload: PipelineWorkload, fixed: int | None, notes: list[str]) -> list[int]:
    """Versions of the fragments that divide the inner loop's trips, the fewest first."""
    trips = workload.register_trips
    divisors = [stages for stages in range(1, trips + 1) if trips % stages == 0]
    if fixed is None:
        return (
            [stages for stages in divisors if stages in REGISTER_STAGES] if workload.register_stage_registers else [1]
        )
    legal = max(stages for stages in divisors if stages <= max(1, fixed))
    if legal != fixed:
        why = f"they have to divide the {trips} iterations of the inner loop"
        notes.append(f"{fixed} stages of registers are reduced to {legal}: {why}")
    return [legal]


def _reduced(
    workload: PipelineWorkload, device: DeviceSpec, shared: int, register: int, asynchronous: bool, notes: list[str]
) -> PipelineLatency:
    """Fixed stages reduced until the registers suffice: first those of registers, which take most. (1, 1) is legal."""
    fewer = [stages for stages in range(register, 0, -1) if workload.register_trips % stages == 0]
    latency = next(
        found
        for shared_stages in range(shared, 0, -1)
        for stages in fewer
        for found in _legal(workload, device, [shared_stages], [stages], asynchronous)
    )
    notes.append(
        f"{shared} stages of shared memory with {register} of registers exceed the registers of {device.name}; "
        f"reduced to {latency.shared_stages} with {latency.register_stages}"
    )
    return latency


def _unknown(device: DeviceSpec) -> list[str]:
    """A note where the device tables do not know what a load waits for."""
    layer = device.layer("L2")
    missing = [] if layer.latency_ns is not None else ["memory"]
    missing += [] if layer.cache_latency_ns is not None else ["its cache"]
    return (
        [f"the latency of {' and of '.join(missing)} of {device.name} is not known and counts as 0"] if missing else []
    )


def _size(count: int) -> str:
    return f"{count / KIBIBYTE:g} KiB"
