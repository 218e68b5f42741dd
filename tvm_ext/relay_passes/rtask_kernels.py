"""The rKernels that a step is offered to a policy with: by which code, in how many rTasks, and how long one takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil

from tvm_ext.cost.gpu_rtasks import gpu_rkernel
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.devices.machine import Machine
from tvm_ext.records.rtask_split import KernelCode, RTaskSplit, RTaskStep
from tvm_ext.records.rtask_times import RTaskTimes
from tvm_ext.records.rtasks import LEAST_TASK_S, RKernel

SHORTEST_TASK_S = 1e-6
"""What is shorter is not divided further: handing it to another vEU takes about as long."""


@dataclass(frozen=True, slots=True)
class TimedStep:
    """A step as one kernel of the operator has it; ``seconds`` on one core, or on a GPU that it has for itself, of
    whose busiest resource it takes ``busy_s``.
    """

    step: RTaskStep
    seconds: float
    busy_s: float | None = None


def timed_steps(split: RTaskSplit, number: int, device: DeviceSpec) -> tuple[TimedStep, ...]:
    """Step ``number`` of a kernel as constructed, then by its variants that have other code for it."""
    own = split.steps[number]
    others = [other for other in split.variants if other.steps[number].kernel != own.kernel]
    return tuple(_timed(item, number, device) for item in (split, *others))


def _timed(split: RTaskSplit, number: int, device: DeviceSpec) -> TimedStep:
    busy_s = None if split.busy_s is None else split.busy_s / len(split.steps)
    return TimedStep(split.steps[number], step_seconds(split, split.steps[number], device), busy_s)


@dataclass(frozen=True, slots=True)
class OfferedKernel:
    """An rKernel for a policy, ``number`` being that of its code among the operator's `TimedStep`s."""

    number: int
    code: KernelCode
    timed: TimedStep

    @property
    def share(self) -> float:
        """That of an rTask in all iterations."""
        return self.code.per_task / self.code.iterations


def offers_of(steps: tuple[TimedStep, ...], device: DeviceSpec) -> Iterator[OfferedKernel]:
    """Each of ``steps``' codes divided among all vEUs, and whole, as constructed first. What is short is whole only.

    Twice as many rTasks as vEUs would balance better beside others, but neighbours share lines of the cache.
    """
    for number, timed in enumerate(steps):
        step = timed.step
        most = min(step.iterations, device.unit_count, max(1, int(timed.seconds / SHORTEST_TASK_S)))
        counts = [most, 1] if most > 1 else [1]
        if step.need is not None:  # a GPU's threadblocks: what one is does not change
            counts = [step.iterations]
        for count in counts:
            code = KernelCode(
                function=step.kernel,
                iterations=step.iterations,
                per_task=ceil(step.iterations / count),
                alignments=step.alignments,
            )
            yield OfferedKernel(number, code, timed)


def rkernels_of(
    offers: Sequence[OfferedKernel], constant_bytes: int, device: DeviceSpec, times: RTaskTimes | None
) -> tuple[RKernel, ...]:
    """What a policy is told of ``offers``; the operator reads ``constant_bytes`` of constants.

    ``times`` were measured, and count more than the model's. Where only the kernel as constructed was, the others'
    modelled times are taken to err by as much.
    """
    first = offers[0]
    if first.timed.step.need is not None:
        return tuple(_gpu_kernel(offer, device) for offer in offers)
    known = times or RTaskTimes({})
    error = (known.of(first.code) or _modelled_s(first)) / _modelled_s(first)
    return tuple(_cpu_kernel(offer, known.of(offer.code), error, constant_bytes) for offer in offers)


def _gpu_kernel(offer: OfferedKernel, device: DeviceSpec) -> RKernel:
    code, timed = offer.code, offer.timed
    assert timed.step.need is not None
    return gpu_rkernel(code.function, timed.step.need, code.task_count, timed.seconds, device, timed.busy_s)


def _cpu_kernel(offer: OfferedKernel, measured_s: float | None, error: float, constant_bytes: int) -> RKernel:
    task_s = error * _modelled_s(offer) if measured_s is None else measured_s
    return RKernel(
        name=f"{offer.code.function}/{offer.code.per_task}",
        task_count=offer.code.task_count,
        task_s=max(task_s, LEAST_TASK_S),
        constant_bytes=int(constant_bytes * offer.share),
    )


def _modelled_s(offer: OfferedKernel) -> float:
    return offer.timed.seconds * offer.share


def step_seconds(split: RTaskSplit, step: RTaskStep, device: DeviceSpec) -> float:
    """The time of ``step``: on one core, or on a GPU that it has for itself; launches of a kernel take equally long."""
    if step.need is None:
        return core_seconds(split, step, device)
    assert split.time_s is not None
    return split.time_s / len(split.steps)


def core_seconds(split: RTaskSplit, step: RTaskStep, device: DeviceSpec) -> float:
    """The time of all iterations of ``step`` on one core: its share of the model's time, else by its instructions.

    An iteration that only stores what is known counts as one instruction.
    """
    operations = max(step.operations, step.iterations)
    if split.time_s is not None and split.operations > 0:
        return split.time_s * operations / max(split.operations, operations)
    return operations / Machine(device).hz
