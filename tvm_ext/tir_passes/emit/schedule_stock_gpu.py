"""GPU kernels by stock TVM's schedules (dlight), where they leave nothing to the host; else by the stated fallback."""

from __future__ import annotations

from typing import Any

from tvm_ext._tvm import (
    Call,
    IRModule,
    PrimFunc,
    Schedule,
    ScheduleError,
    Target,
    gpu_schedule_rules,
    s_tir,
    structural_walk,
)
from tvm_ext.analysis.device_code import op_name
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.errors import IllegalRewrite, TargetError
from tvm_ext.records.choice import KernelChoice

from ..expressions.exact_floats import keep_floats_outside_reductions, pass_nan_on
from ..expressions.turn_divisions import with_turned_divisions
from .schedule_gpu_fallback import runs_on_device, schedule_gpu_fallback


def schedule_by_stock(func: PrimFunc, name: str, device: DeviceSpec, reason: str) -> tuple[PrimFunc, KernelChoice]:
    """``func`` by the first of stock TVM's rules whose kernels leave nothing to the host; else by the fallback.

    Raises TargetError where neither makes kernels of it, or it calls what runs on the host alone: as it is, the host
    would reach into the device's memory.
    """
    called = _host_functions(func)
    if called:
        raise TargetError(
            f"operator {name} of {_shapes(func)} calls {called[0]}, a function of the host, which cannot reach the "
            f"memory of {device.name}.",
            "build it for a CPU",
        )
    func = func.with_body(keep_floats_outside_reductions(func.body))
    target = Target.current(allow_none=True) or Target(dict(device.target))
    for rule in gpu_schedule_rules():
        schedule = _apply(rule, func, target)
        if schedule is None or not runs_on_device(schedule.mod["main"]):
            continue
        scheduled = _exact(schedule.mod["main"])
        if _can_be_lowered(scheduled):
            notes = (reason, f"stock TVM's dlight.gpu.{type(rule).__name__}")
            return scheduled, KernelChoice(operator=name, path="stock", notes=notes, device=device.name)
    try:
        scheduled, note = schedule_gpu_fallback(func)
    except IllegalRewrite as refusal:
        problem = f"operator {name} of {_shapes(func)} has no kernel for {device.name}: {reason}; none of stock TVM's "
        problem += f"schedules takes it, and the fallback does not: {refusal.problem}."
        raise TargetError(problem, "build it for a CPU") from refusal
    choice = KernelChoice(operator=name, path="fallback", notes=(reason, note), device=device.name)
    return _exact(scheduled), choice


def _exact(func: PrimFunc) -> PrimFunc:
    """``func``, scheduled, with what stock TVM's lowering gets wrong in other words."""
    return with_turned_divisions(func.with_body(pass_nan_on(func.body)))


_HOST_CALLS = ("tirx.tvm_call_packed", "tirx.tvm_call_cpacked", "tirx.tvm_call_packed_lowered")


def _host_functions(func: PrimFunc) -> list[str]:
    """The packed functions that ``func`` calls: no code of a device calls any."""
    found: list[str] = []

    def visit(call: Call) -> None:
        if op_name(call) in _HOST_CALLS:
            found.append(str(getattr(call.args[0], "value", call.args[0])))

    structural_walk(func.body, (Call, visit))
    return found


def _shapes(func: PrimFunc) -> str:
    """The shapes of its parameters, for an error."""
    shapes = [param.ty.shape for param in func.params if hasattr(param.ty, "shape")]
    return ", ".join(f"[{', '.join(str(getattr(size, 'value', size)) for size in shape)}]" for shape in shapes)


def _can_be_lowered(func: PrimFunc) -> bool:
    """Whether stock TVM has a reduction across threads for each that its rule asked for.

    It knows those that begin at finite numbers: none for a maximum that begins at -inf, or passes NaN on, as ours do.
    """
    try:
        s_tir.transform.LowerCrossThreadReduction()(IRModule({"main": func}))
    except (RuntimeError, ValueError):
        return False
    return True


def _apply(rule: Any, func: PrimFunc, target: Target) -> Schedule | None:
    """The rule's schedule of ``func``; None where it does not take it, or cannot carry out what it began."""
    try:
        with target:
            found = rule.apply(func, target, False)
    except (ScheduleError, RuntimeError, ValueError, TypeError, AttributeError):
        return None
    return found[0] if isinstance(found, list) else found
