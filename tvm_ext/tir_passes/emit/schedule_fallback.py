"""The stated fallback for what no rProgram describes: parallel outer loops and inner loops that LLVM vectorises."""

from __future__ import annotations

from itertools import takewhile
from math import prod
from typing import Any

from tvm_ext._tvm import For, PrimFunc, SBlock, SBlockRealize, Schedule, ScheduleError, Var, ir, tirx
from tvm_ext.analysis.computations import SPATIAL_ITERATION, static_shape
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.devices.machine import Machine
from tvm_ext.errors import IllegalRewrite
from tvm_ext.ir.build_ir import SERIAL, outer_kind
from tvm_ext.records.choice import KernelChoice

from ..expressions.exact_floats import keep_floats_outside_reductions, pass_nan_on

ELEMENT_CYCLES = 4.0
"""Of one element on one core, assumed: such a kernel computes indices, and seldom vectors."""

INNER_LOOPS_LEFT = 1  # the last loop stays serial, for LLVM to vectorise


def fallback_kernel(
    func: PrimFunc, name: str, device: DeviceSpec, refusal: IllegalRewrite
) -> tuple[PrimFunc, KernelChoice]:
    """The kernel of what was refused, scheduled where that can be; the choice says why."""
    func = func.with_body(keep_floats_outside_reductions(func.body))
    try:
        scheduled, what = schedule_fallback(func, device)
    except IllegalRewrite as second:
        notes = (f"no kernel constructed: {refusal}", f"not scheduled either: {second}")
        func = func.with_body(pass_nan_on(func.body))
        return func, KernelChoice(operator=name, path="stock", notes=notes, device=device.name)
    notes = (f"no kernel constructed: {refusal}", what)
    scheduled = scheduled.with_body(pass_nan_on(scheduled.body))
    return scheduled, KernelChoice(operator=name, path="fallback", notes=notes, device=device.name)


def schedule_fallback(func: PrimFunc, device: DeviceSpec | None = None) -> tuple[PrimFunc, str]:
    """``func`` with the outer data-parallel loops of every block run in parallel, and a sentence that says so.

    Where ``device`` is known, few elements stay on one core, which is done before another one has begun.
    Raises IllegalRewrite where the function has no block to schedule (external calls, hand-lowered loops).
    """
    if not isinstance(func.body, SBlockRealize) or not func.attrs.get("s_tir", True):
        raise IllegalRewrite("its body has no blocks to schedule")
    schedule = Schedule(func.with_attr("s_tir", True).with_attr("global_symbol", "main"))
    try:
        blocks = schedule.get_child_blocks(schedule.get_sblock("root"))
    except (ScheduleError, ValueError, RuntimeError) as error:
        raise IllegalRewrite("stock TVM's schedule does not accept it") from error
    if not blocks:
        raise IllegalRewrite("its body has no blocks to schedule")
    if device is not None and _is_little(func, device) and not any(_reduces(schedule, block) for block in blocks):
        return func, "fallback: few elements, on one core"
    done = sum(_parallelise(schedule, block) for block in blocks)
    scheduled = schedule.mod["main"].without_attr("global_symbol")
    return scheduled, f"fallback: {done} of {len(blocks)} blocks run in parallel over their outer loops"


def _is_little(func: PrimFunc, device: DeviceSpec) -> bool:
    """Whether a launch costs more than it saves, by the tensors of known shapes; one of unknown shape has as many."""
    sizes = [size for param in func.params if (size := _elements(param)) is not None]
    busy_s = sum(sizes) * ELEMENT_CYCLES / Machine(device).vector_hz
    return bool(sizes) and outer_kind(busy_s / device.unit_count, device) == SERIAL


def _elements(param: Var) -> int | None:
    """None of a tensor whose shape is not known, and of a number."""
    if isinstance(param.ty, ir.PrimType):
        return None
    try:
        return prod(static_shape(param))
    except IllegalRewrite:
        return None


def _reduces(schedule: Schedule, block: SBlock) -> bool:
    return any(int(v.iter_type) != SPATIAL_ITERATION for v in schedule.get(block).iter_vars)


def _parallelise(schedule: Schedule, block: SBlock) -> int:
    """Fuse and parallelise the leading data-parallel loops; 0 where there are none that may be."""
    loops, parallel = data_parallel_loops(schedule, block)
    outer = parallel[: max(1, len(loops) - INNER_LOOPS_LEFT)]
    nest = [schedule.get(loop) for loop in outer]
    if not nest or not all(isinstance(loop, For) for loop in nest):
        return 0
    if any(isinstance(loop.extent, tirx.IntImm) and int(loop.extent) == 0 for loop in nest):
        return 0  # nothing to compute, and fusing (3, 0, 5) would divide by the 0
    try:
        schedule.parallel(schedule.fuse(*outer))
    except ScheduleError:
        return 0  # loops shared with other blocks, or of dynamic extent: left as they are
    return 1


def data_parallel_loops(schedule: Schedule, block: SBlock) -> tuple[list[Any], list[Any]]:
    """The loops around ``block``, and the leading ones of them that no reduction is along."""
    loops = list(schedule.get_loops(block))
    kinds = [int(v.iter_type) for v in schedule.get(block).iter_vars]
    leading = takewhile(lambda pair: pair[1] == SPATIAL_ITERATION, zip(loops, kinds, strict=False))
    return loops, [loop for loop, _ in leading]
