"""Which operators get a second kernel, and of which rProgram."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.small_modules import inputs_of, module_of
from tvm_ext._tvm import IRModule, relax
from tvm_ext.analysis.waves import waves_of_calls
from tvm_ext.options import BuildOptions
from tvm_ext.pass_pipeline import operator_pipeline, plan_build
from tvm_ext.records.rprogram import Prediction, RProgram
from tvm_ext.records.rtask_split import RTaskSplit, RTaskStep
from tvm_ext.tir_passes.plan.alternatives import frugal_programs
from tvm_ext.tir_passes.plan.rkernels import may_replace
from tvm_ext.tir_passes.roller.construct import narrower_places

op = relax.op


def program(partitions: int, busy_us: float) -> RProgram:
    """For a device of 80 units."""
    return RProgram(
        device="v",
        expr_digest="one",
        tiles=(),
        vector_axis=None,
        unit_count=min(80, partitions),
        partition_count=partitions,
        epsilon=0.0,
        shrunk=False,
        prediction=Prediction(time_s=(busy_us + 2) * 1e-6, compute_s=busy_us * 1e-6, layers=(), bound="compute"),
    )


def test_work_is_that_of_all_rounds() -> None:
    assert program(80, 2).work_s() == pytest.approx(160e-6)
    assert program(160, 4).work_s() == pytest.approx(320e-6)
    assert program(81, 4).work_s() == pytest.approx(162e-6), "two rounds of 2 us, the second of one tile"
    assert program(20, 1).work_s(least_s=3e-6) == pytest.approx(60e-6)


def test_narrower_programs_have_fewer_tiles_than_all_before() -> None:
    assert narrower_places([80, 96, 40, 80, 20, 40]) == [2, 4]
    assert narrower_places([]) == narrower_places([3]) == []


@pytest.mark.parametrize(
    ("narrower", "least_us", "taken"),
    [
        ([(40, 3.0), (20, 4.0), (10, 7.9)], 0.0, [20, 40]),  # 120, 80 and 79 us of work; the last is no less
        ([(40, 4.0), (20, 8.0)], 0.0, []),  # as much work on fewer units
        ([(40, 0.5), (20, 0.6), (5, 4.0)], 1.5, [5, 20, 40]),  # latency counts: 60, 30 and 20 us
        ([(80, 1.0)], 0.0, []),  # no fewer tiles
    ],
)
def test_frugal_programs_have_less_work(narrower: list[tuple[int, float]], least_us: float, taken: list[int]) -> None:
    found = frugal_programs([program(*item) for item in narrower], program(80, 2.0), 1, least_us * 1e-6)
    assert [item.partition_count for item in found] == taken
    others = [replace(program(*item), expr_digest="another") for item in narrower]
    assert frugal_programs(others, program(80, 2.0), 1, least_us * 1e-6) == []
    share = frugal_programs([program(*item) for item in narrower], program(80, 2.0), 30, least_us * 1e-6)
    assert [item.partition_count for item in share] == [count for count in taken if count >= 30]


def operators_of(mod: IRModule) -> IRModule:
    options = BuildOptions.create(kernel_cache="off")
    plan = plan_build("llvm", options)
    with plan.target:
        return operator_pipeline(plan.target, plan.device, options)(mod)


def test_waves_are_what_could_run_at_the_same_time() -> None:
    x, first, second = inputs_of((8, 16), (16, 24), (16, 24))
    left, right = op.matmul(x, first), op.matmul(x, second)
    joined = op.nn.softmax(op.reshape(op.concat([left, right], axis=1), (24, 16)))
    found = waves_of_calls(operators_of(module_of([x, first, second], joined)))
    assert [len(wave) for wave in found] == [2, *[1] * (len(found) - 1)]
    assert len(set(found[0])) == 1, "both products are of one shape"


def step(kernel: str, **changes: object) -> RTaskStep:
    one = RTaskStep(
        kernel=kernel, iterations=4, buffers=(0, 1), reads=(0,), writes=(1,), alignments=(4, 4), operations=9
    )
    return replace(one, **changes)


def split(*kernels: str, **changes: object) -> RTaskSplit:
    return replace(RTaskSplit(param_count=2, steps=tuple(map(step, kernels)), workspaces=(64,)), **changes)


def test_a_kernel_replaces_another_in_one_step() -> None:
    own = split("pack", "tiles")
    assert may_replace(split("pack", "other"), own)
    assert not may_replace(split("pack", "tiles"), own), "nothing differs"
    assert not may_replace(split("other pack", "other"), own), "one step reads what the other laid out"
    assert not may_replace(split("other"), own)
    assert not may_replace(split("pack", "other", workspaces=(128,)), own)
    assert not may_replace(split("pack", "other", steps=(step("pack"), step("other", reads=(0, 1)))), own)
    assert not may_replace(RTaskSplit(param_count=2, refusal="no"), own)
