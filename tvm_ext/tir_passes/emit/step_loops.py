"""The kernel of a loop over steps, most of them counted at run time: the kernel of one step, as ever, in a loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tvm_ext._tvm import PrimFunc
from tvm_ext.errors import IllegalRewrite
from tvm_ext.ir.step_loop import step_loop
from tvm_ext.records.choice import CHOICE, CONSTANT_PARAMS, KernelChoice
from tvm_ext.records.serialise import from_json
from tvm_ext.records.step_loop import STEP, STEP_LOOP, StepLoop

from ..plan.form import with_choice

Construct = Callable[[PrimFunc], PrimFunc]


def is_step_loop(func: PrimFunc) -> bool:
    return bool(func.attrs) and STEP_LOOP in func.attrs


def looped_kernel(func: PrimFunc, construct: Construct) -> PrimFunc:
    """The kernel of ``func``, the step's made by ``construct``; as it is where that kernel cannot be moved.

    What a step repacks of its constants, the loop does: their parameters have the same places.
    """
    plan = from_json(StepLoop, str(func.attrs[STEP_LOOP]))
    changing = {*plan.sliced, *(own for own, _ in plan.carried)}
    constants = [int(i) for i in func.attrs[CONSTANT_PARAMS]] if CONSTANT_PARAMS in func.attrs else []
    step = construct(func.attrs[STEP].with_attr(CONSTANT_PARAMS, [i for i in constants if i not in changing]))
    choice = from_json(KernelChoice, str(step.attrs[CHOICE]))
    note = "steps are counted at run time, by a loop around the kernel of one; times are those of one"
    if plan.steps is not None:
        note = f"{plan.steps} steps, by a loop around the kernel of one"
        choice = _times(choice, plan.steps)
    if plan.rows is not None:
        note = f"rows are counted at run time, by a loop around the kernel of {plan.rows}; times are those of these"
    try:
        kernel = step_loop(step, plan)
    except IllegalRewrite as refusal:
        kernel = func.without_attr(STEP)
        choice = replace(choice, path="stock", program=None, packs=(), expected_s=None, notes=())
        note = f"no kernel constructed: {refusal}"
    return with_choice(kernel, replace(choice, notes=(note, *choice.notes)))


def _times(choice: KernelChoice, steps: int) -> KernelChoice:
    """What ``steps`` of the kernel of ``choice`` come to; its program stays that of one."""
    one_s = choice.expected_s
    if one_s is None and choice.program is not None:
        one_s = choice.program.prediction.time_s
    return replace(
        choice,
        flops=steps * choice.flops,
        bytes=steps * choice.bytes,
        expected_s=None if one_s is None else steps * one_s,
    )
