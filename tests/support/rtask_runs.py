"""Runs schedules of rTasks in Python, entry by entry, in any order that their streams and waits allow.

What the native runtime does with threads happens here one entry at a time, the next one drawn at random from those that
may start. A wait that is missing, or memory that two values share though the schedule does not order them, then gives a
wrong answer in some order, on any machine.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tvm_ext._tvm import RKERNEL_PIPELINE, IRModule, PrimFunc, Target, tvm
from tvm_ext.records.rammer import RTASK_PLANS, SchedulePlan
from tvm_ext.records.rtask_split import ARENA, RKERNEL, DataPlace
from tvm_ext.records.rtasks import RTaskProgram, RTaskSchedule, ScheduleEntry
from tvm_ext.records.serialise import from_json
from tvm_ext.support.arrays import Array

RKernel = Callable[..., None]
_ALIGNMENT = 64


def compile_rkernels(functions: Mapping[str, PrimFunc], target: Target) -> dict[str, RKernel]:
    """Each function, an rKernel, as something to call with addresses, and a first and a last iteration."""
    module = tvm.tirx.build(IRModule(dict(functions)), target=target, pipeline=RKERNEL_PIPELINE)
    return {name: _with_addresses(module[name], module) for name in functions}


def _with_addresses(function: Callable[..., None], module: Any) -> RKernel:
    def call(*arguments: int) -> None:
        *addresses, begin, end = arguments
        assert module is not None, "it holds the code"
        function(*map(ctypes.c_void_p, addresses), begin, end)

    return call


def plans_of(mod: IRModule) -> dict[str, SchedulePlan]:
    """The plans that `ScheduleWavefronts` left at ``mod``, by the name of their function."""
    plans = [from_json(SchedulePlan, str(text)) for text in mod.attrs[RTASK_PLANS]]
    return {plan.symbol: plan for plan in plans}


def rkernels_of(mod: IRModule) -> dict[str, PrimFunc]:
    """The rKernels of ``mod`` by name."""
    functions = ((gv.name_hint, func) for gv, func in mod.functions_items() if isinstance(func, PrimFunc))
    return {name: func for name, func in functions if func.attrs and func.attrs.get(RKERNEL)}


def aligned(size_bytes: int) -> Array:
    """Bytes of memory that start at a multiple of 64, all of them 0xFF: NaN as a float, -1 as an integer."""
    whole = np.full(size_bytes + _ALIGNMENT, 0xFF, np.uint8)
    start = -whole.ctypes.data % _ALIGNMENT
    return whole[start : start + size_bytes]


def run_plan(
    plan: SchedulePlan, kernels: Mapping[str, RKernel], arguments: Sequence[Array], seed: int, most_in_turn: int = 1
) -> list[int]:
    """Run ``plan`` on ``arguments``, inputs and outputs, in an order drawn from ``seed``; the vEUs in that order.

    A vEU that is drawn takes up to ``most_in_turn`` entries. Raises RuntimeError where nothing may start.
    """
    arena, drawn, order = aligned(plan.arena_bytes), random.Random(seed), []
    schedule = RTaskSchedule.from_json(plan.schedule)

    def address(place: DataPlace) -> int:
        base = arena if place.argument == ARENA else arguments[place.argument]
        return int(base.ctypes.data) + place.offset

    def run(entry: ScheduleEntry) -> None:
        operator = plan.operators[entry.operator]
        code = operator.codes[entry.kernel]
        kernels[code.function](*map(address, operator.places), *code.range_of(entry.begin, entry.end))

    for program in schedule.programs:
        done = [0] * len(program.streams)
        while ready := _ready(program, done):
            unit = drawn.choice(ready)
            for _ in range(drawn.randint(1, most_in_turn)):
                if unit in _ready(program, done):
                    run(program.streams[unit][done[unit]])
                    done[unit] += 1
                    order.append(unit)
        if any(count < len(stream) for count, stream in zip(done, program.streams, strict=True)):
            raise RuntimeError(f"no vEU can go on: {done} entries have run")
    return order


def _ready(program: RTaskProgram, done: Sequence[int]) -> list[int]:
    """The vEUs whose next entry may start."""
    return [
        unit
        for unit, stream in enumerate(program.streams)
        if done[unit] < len(stream) and all(done[other] >= count for other, count in stream[done[unit]].waits)
    ]
