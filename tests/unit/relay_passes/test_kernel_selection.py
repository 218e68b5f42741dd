"""Several rKernels for an operator: which one a schedule takes, that it is right, linked alone, and told of."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import numpy as np
import pytest

from tests.support.merged_runs import MergedGraph, Runs, merged_graph
from tests.support.rtask_runs import compile_rkernels, plans_of, rkernels_of, run_plan
from tests.support.small_modules import inputs_of, module_of
from tvm_ext._tvm import IRModule, Sequential, relax
from tvm_ext.options import BuildOptions
from tvm_ext.pass_pipeline import plan_build
from tvm_ext.records.choice import ALTERNATIVES
from tvm_ext.records.measurement import MeasuredWorkload
from tvm_ext.records.rammer import RegionRecord
from tvm_ext.records.rtask_times import RTaskTimes
from tvm_ext.records.rtasks import Need, RKernel, ROperator, RTaskGraph, RTaskSchedule, VDevice
from tvm_ext.relay_passes.region_records import chosen_kernels
from tvm_ext.relay_passes.schedule_wavefronts import ScheduleWavefronts
from tvm_ext.relay_passes.wavefronts import policies
from tvm_ext.support.arrays import Array
from tvm_ext.tir_passes.plan import alternatives
from tvm_ext.tir_passes.split_rtasks import SplitRTasks
from tvm_ext.verify.simt import Concurrency

op = relax.op
ROWS, COLUMNS = 16, 32
BRANCHES = 4


def branches_and_one() -> IRModule:
    """Products side by side, the last of which adds them up, and one behind them: all of one shape."""
    x, *weights = inputs_of((ROWS, COLUMNS), *[(COLUMNS, COLUMNS)] * (BRANCHES + 1))
    parts = [op.nn.relu(op.matmul(x, weight)) for weight in weights[:BRANCHES]]
    joined = functools.reduce(op.add, parts)
    return module_of([x, *weights], op.nn.relu(op.matmul(joined, weights[BRANCHES])))


def branches_in_numpy(x: Array, *weights: Array) -> Array:
    parts = [np.maximum(x @ weight, 0) for weight in weights[:BRANCHES]]
    return np.maximum(sum(parts[1:], parts[0]) @ weights[BRANCHES], 0)


def values_of(mod: IRModule) -> list[Array]:
    generator = np.random.default_rng(5)
    shapes = [[int(size) for size in item.ty.shape.values] for item in mod["main"].params]
    return [generator.standard_normal(shape).astype("float32") for shape in shapes]


@functools.cache
def on_gpu() -> MergedGraph:
    return merged_graph(branches_and_one(), units=8)


def products_of(region: RegionRecord) -> list[tuple[int, int]]:
    """By product, which of its kernels it has, of how many rTasks."""
    graph, chosen = RTaskGraph.from_json(region.graph), chosen_kernels(RTaskSchedule.from_json(region.schedule))
    found = []
    for place, operator in enumerate(graph.operators):
        if "matmul" in operator.name:
            found.append((chosen[place], operator.kernels[chosen[place]].task_count))
    return found


def test_side_by_side_the_efficient_kernel_alone_the_fastest() -> None:
    (region,) = on_gpu().record.regions
    *beside, joined, last = products_of(region)
    assert beside == [(1, 1)] * (BRANCHES - 1)
    assert joined == last == (0, 8)
    assert region.operators[0].kernel == region.operators[-1].kernel, "calls of one function"
    assert region.constructed_us is not None
    assert region.predicted_us < region.constructed_us


def test_the_report_says_which_and_why() -> None:
    (region,) = on_gpu().record.regions
    assert f"{region.constructed_us:.1f} us with one kernel for each operator" in str(region)
    (line, *_) = region.selection_lines()
    assert "the most efficient kernel, " in line
    assert "not the fastest, " in line
    assert "for 8 vEUs (and 3 more calls)" in line
    assert region.operators[-1].selection.startswith("the fastest kernel, 8 rTasks")


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("how", [None, Concurrency(order="random", seed=1)])
def test_both_kernels_are_right_in_one_launch(how: Concurrency | None) -> None:
    graph = on_gpu()
    runs, values = Runs(graph), values_of(graph.mod)
    wanted = branches_in_numpy(*(item.astype("float64") for item in values))
    (actual,) = runs(values, how)
    assert np.linalg.norm(actual - wanted) <= 1e-5 * np.linalg.norm(wanted)
    assert runs.findings == []


def test_a_choice_that_saves_little_is_not_scheduled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second schedule takes as long to make as the first."""
    own, other = (RKernel(name=name, task_count=8, task_s=us * 1e-6) for name, us in (("own", 2.0), ("other", 1.9)))
    large = ROperator(name="large", kernels=(RKernel(name="l", task_count=64, task_s=1e-5),))
    graph, one = (
        RTaskGraph(operators=(large, ROperator(name="small", kernels=kernels))) for kernels in ((own, other), (own,))
    )

    def make(_need: Need) -> VDevice:
        return VDevice(name="eight", unit_count=8)

    found, seconds = policies.schedule_by_choice(graph, one, make)
    assert seconds == pytest.approx(82e-6)
    assert set(chosen_kernels(found).values()) == {0}
    monkeypatch.setattr(policies, "LEAST_SAVING", 0.0)
    found, seconds = policies.schedule_by_choice(graph, one, make)
    assert seconds == pytest.approx(82e-6)
    assert chosen_kernels(found) == {0: 0, 1: 1}


# --- CPUs -------------------------------------------------------------------------------------------------------------
def constant_weights() -> IRModule:
    """Products side by side whose weights are packed at compile time."""
    (x,) = inputs_of((24, 40))
    generator = np.random.default_rng(3)
    weights = [relax.const(generator.standard_normal((40, 96)).astype("float32")) for _ in range(3)]
    return module_of([x], functools.reduce(op.add, [op.nn.relu(op.matmul(x, weight)) for weight in weights]))


def by_variants(workloads: Mapping[str, MeasuredWorkload]) -> RTaskTimes:
    """Measurements by which every other kernel is quicker than the constructed one."""
    return RTaskTimes({name: {1: 1e-6 if "_other" in name else 1e-5} for name in workloads})


def by_constructed(workloads: Mapping[str, MeasuredWorkload]) -> RTaskTimes:
    return RTaskTimes({name: {1: 1e-5 if "_other" in name else 1e-6} for name in workloads})


def inputs_of_call(mod: IRModule, values: list[Array]) -> list[Array]:
    """What the schedule's call in ``mod`` takes, parameters of ``main`` being ``values``."""
    named = dict(zip(mod["main"].params, values, strict=True))
    bindings = [binding for block in mod["main"].body.blocks for binding in block.bindings]
    (call,) = [item.value for item in bindings if getattr(item.value.op, "name", "") == "relax.call_dps_packed"]
    return [named[item] if item in named else item.value.numpy() for item in call.args[1].fields]


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("weights", [constant_weights, branches_and_one])
def test_a_cpu_s_kernels_share_packed_constants_and_the_chosen_alone_are_linked(
    monkeypatch: pytest.MonkeyPatch, weights: Callable[[], IRModule]
) -> None:
    """Tiles of no less work than the constructed ones, which the model would not offer, and measured times."""
    monkeypatch.setattr(alternatives, "WORTH", 1.5)
    mod = weights()
    options = BuildOptions.create(enable_rammer=True, num_threads=4, kernel_cache="off", device="cpu-epyc-zen5")
    plan = plan_build("llvm", options)
    values = values_of(mod)
    results, linked = [], []
    with plan.target:
        kernels = plan.construct(mod)
        assert any(func.attrs and ALTERNATIVES in func.attrs for _, func in kernels.functions_items())
        for known in (by_constructed, by_variants):
            passes = [SplitRTasks(plan.device), ScheduleWavefronts(plan.device, True, known)]
            made = Sequential(passes)(kernels)
            linked.append(set(rkernels_of(made)))
            (region,) = plans_of(made).values()
            outputs = [np.full(item.shape, 77, item.dtype) for item in region.arguments if item.role == "output"]
            arguments = [*inputs_of_call(made, values), *outputs]
            run_plan(region, compile_rkernels(rkernels_of(made), plan.target), arguments, seed=1)
            results.append(outputs)
    assert not any("_other" in name for name in linked[0])
    assert any("_other" in name for name in linked[1])
    for first, second in zip(*results, strict=True):
        np.testing.assert_allclose(first, second, rtol=1e-5, atol=1e-5)
