"""GPU kernels by stock TVM's schedules (dlight), where they leave nothing to the host; else by the stated fallback."""

from __future__ import annotations

from typing import Any

from tvm_ext._tvm import PrimFunc, Schedule, ScheduleError, Target, gpu_schedule_rules
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.errors import IllegalRewrite, TargetError
from tvm_ext.records.choice import KernelChoice

from ..expressions.exact_floats import keep_floats_outside_reductions
from ..expressions.turn_divisions import with_turned_divisions
from .schedule_gpu_fallback import runs_on_device, schedule_gpu_fallback


def schedule_by_stock(func: PrimFunc, name: str, device: DeviceSpec, reason: str) -> tuple[PrimFunc, KernelChoice]:
    """``func`` by the first of stock TVM's rules whose kernels leave nothing to the host; else by the fallback.

    Raises TargetError where neither makes kernels of it: as it is, the host would reach into the device's memory.
    """
    func = func.with_body(keep_floats_outside_reductions(func.body))
    target = Target.current(allow_none=True) or Target(dict(device.target))
    for rule in gpu_schedule_rules():
        schedule = _apply(rule, func, target)
        if schedule is not None and runs_on_device(schedule.mod["main"]):
            notes = (reason, f"stock TVM's dlight.gpu.{type(rule).__name__}")
            return with_turned_divisions(schedule.mod["main"]), KernelChoice(
                operator=name, path="stock", notes=notes, device=device.name
            )
    try:
        scheduled, note = schedule_gpu_fallback(func)
    except IllegalRewrite as refusal:
        problem = f"operator {name} has no kernel for {device.name}: {reason}; none of stock TVM's schedules takes it, "
        raise TargetError(problem + f"and the fallback does not: {refusal.problem}.", "build it for a CPU") from refusal
    choice = KernelChoice(operator=name, path="fallback", notes=(reason, note), device=device.name)
    return with_turned_divisions(scheduled), choice


def _apply(rule: Any, func: PrimFunc, target: Target) -> Schedule | None:
    """The rule's schedule of ``func``; None where it does not take it, or cannot carry out what it began."""
    try:
        with target:
            found = rule.apply(func, target, False)
    except (ScheduleError, RuntimeError, ValueError, TypeError, AttributeError):
        return None
    return found[0] if isinstance(found, list) else found
