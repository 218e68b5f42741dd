"""Launches as operators of rTasks: what they need of a unit, and those that no unit has room for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.support.merged_runs import small_gpu
from tests.unit.tir_passes.test_merge_rtasks import chain
from tvm_ext import pass_pipeline
from tvm_ext._tvm import PrimFunc
from tvm_ext.options import BuildOptions
from tvm_ext.records.rtask_split import RTASKS, RTaskSplit
from tvm_ext.records.serialise import from_json
from tvm_ext.tir_passes.split_launches import SplitLaunches


def splits(**row: Any) -> list[RTaskSplit]:
    """The splits of the kernels of a chain for an A100, by a row with other numbers."""
    device, target = small_gpu("nvidia-a100", 3)
    options = BuildOptions.create(enable_rammer=True, enable_persistent_fusion=False, kernel_cache="off")
    with target:
        kernels = pass_pipeline.kernel_pipeline(target, device, options)(chain())
        mod = SplitLaunches(replace(device, **row))(kernels)
    functions = [func for _, func in mod.functions_items() if isinstance(func, PrimFunc) and RTASKS in func.attrs]
    return [from_json(RTaskSplit, str(func.attrs[RTASKS])) for func in functions]


def test_what_is_planned_beyond_a_threads_registers_is_not_asked_for() -> None:
    """The compiler moves it to memory: a block needs no more than there is."""
    found = splits(max_registers_per_thread=16)
    assert {step.need.registers for split in found for step in split.steps if step.need is not None} == {16}


def test_a_launch_that_fits_no_unit_stays_one() -> None:
    found = splits(registers_per_unit=512, registers_per_block=512)
    assert found and not any(split.steps for split in found)
    assert all("fit no unit of nvidia-a100" in str(split.refusal) for split in found)
