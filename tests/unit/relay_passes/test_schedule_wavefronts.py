"""Graphs as schedules of rTasks: right in every order that a schedule allows, and what stays outside says why."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax

from tests.support.piece_graphs import kept_pieces, pieces
from tests.support.rtask_runs import compile_rkernels, plans_of, rkernels_of, run_plan
from tests.support.small_modules import inputs_of, module_of
from tvm_ext import pass_pipeline, relay
from tvm_ext._tvm import IRModule, PrimFunc, assert_structural_equal
from tvm_ext.errors import OptionError
from tvm_ext.options import BuildOptions
from tvm_ext.pass_pipeline import BuildPlan, plan_build
from tvm_ext.rammer_runtime import native
from tvm_ext.records.rammer import RAMMER, RammerRecord, SchedulePlan
from tvm_ext.records.rtask_split import RKERNEL, RTASKS
from tvm_ext.records.rtasks import RTaskSchedule
from tvm_ext.records.serialise import from_json
from tvm_ext.reports.report import BuildReport
from tvm_ext.reports.schedule_trace import report_trace
from tvm_ext.support.arrays import Array

op = relax.op


def values_of(mod: IRModule, seed: int = 5) -> list[Array]:
    """Values for the parameters of ``main``."""
    generator = np.random.default_rng(seed)
    kinds = [(variable.ty.shape.values, str(variable.ty.dtype)) for variable in mod["main"].params]
    return [
        generator.standard_normal([int(size) for size in shape]).astype(dtype)
        if "float" in dtype
        else generator.integers(0, 3, [int(size) for size in shape]).astype(dtype)
        for shape, dtype in kinds
    ]


def scheduled(mod: IRModule, threads: int, mode: Any = True) -> tuple[IRModule, BuildPlan]:
    """The graph of ``mod`` behind `ScheduleWavefronts`."""
    plan = plan_build("llvm", BuildOptions.create(enable_rammer=mode, num_threads=threads, kernel_cache="off"))
    passes = pass_pipeline.rammer_passes(plan.device, plan.options)
    with plan.target:
        return tvm.transform.Sequential(passes)(plan.construct(mod)), plan


def record_of(mod: IRModule) -> RammerRecord:
    return from_json(RammerRecord, str(mod.attrs[RAMMER]))


def whole_arguments(mod: IRModule, values: Sequence[Array]) -> tuple[SchedulePlan, list[Array], int]:
    """The only plan of ``mod``, and its arguments: parameters of ``main``, constants, then so many poisoned results."""
    (plan,) = plans_of(mod).values()
    (block,) = mod["main"].body.blocks
    (call,) = [
        binding.value
        for binding in block.bindings
        if isinstance(binding.value, relax.Call) and binding.value.op.name == "relax.call_dps_packed"
    ]
    names = dict(zip(mod["main"].params, values, strict=True))
    given = [names[item] if item in names else item.value.numpy() for item in call.args[1].fields]
    kinds = call.ty_args[0]
    results = list(kinds.fields) if isinstance(kinds, relax.TupleType) else [kinds]
    outputs = [np.full([int(size) for size in kind.shape.values], 77, str(kind.dtype)) for kind in results]
    return plan, [*given, *outputs], len(outputs)


def results_of(mod: IRModule, outputs: Sequence[Array]) -> list[Array]:
    """What ``main`` returns where its only schedule wrote ``outputs``."""
    bound = {binding.var: binding.value for block in mod["main"].body.blocks for binding in block.bindings}

    def array(expr: Any) -> Array:
        value = bound[expr]
        if isinstance(value, relax.TupleGetItem):
            return outputs[value.index]
        if value.op.name == "relax.reshape":
            return array(value.args[0]).reshape([int(size) for size in value.args[1].values])
        assert value.op.name == "relax.call_dps_packed"
        return outputs[0]

    result = mod["main"].body.body
    result = bound[result] if isinstance(bound.get(result), relax.Tuple) else result
    return [array(item) for item in (result.fields if isinstance(result, relax.Tuple) else [result])]


def ordinary(mod: IRModule, values: Sequence[Array], **settings: Any) -> list[Array]:
    """What a build computes."""
    library = relay.build(mod, "llvm", kernel_cache="off", **settings)
    result = library.vm()["main"](*map(tvm.runtime.tensor, values))
    return [item.numpy() for item in ([result] if hasattr(result, "numpy") else result)]


def branches() -> IRModule:
    """Four branches, two of them of one operator, that are joined and returned in parts."""
    x, *weights = inputs_of((1, 16, 9, 9), *[(16, 16, 3, 3)] * 3, (16, 16, 1, 1))
    first = op.nn.conv2d(x, weights[0], padding=1)
    second = op.nn.conv2d(op.nn.conv2d(x, weights[1], padding=1), weights[2], padding=1)
    third = op.nn.relu(op.nn.conv2d(x, weights[3]))
    joined = op.concat([first, second, third, op.nn.max_pool2d(x, (3, 3), (1, 1), 1)], axis=1)
    return module_of([x, *weights], op.nn.softmax(joined, axis=1), op.mean(first, axis=[2, 3]))


def chain() -> IRModule:
    """Operators that wait for each other, the workspaces of a product and views among them."""
    x, y = inputs_of((48, 80), (80, 64))
    hidden = op.nn.relu(op.matmul(x, y))
    turned = op.reshape(hidden, (64, 48))
    return module_of(
        [x, y], op.nn.softmax(turned), op.reshape(hidden, (3072,)), op.sum(op.matmul(turned, hidden), axis=[0])
    )


def independent() -> IRModule:
    """Many operators that need nothing of each other."""
    return softmaxes(40)


def softmaxes(count: int) -> IRModule:
    inputs = inputs_of(*[(5 + number % 2, 33) for number in range(count)])
    return module_of(inputs, *[op.nn.softmax(item) for item in inputs])


def fan_in() -> IRModule:
    """One operator that needs everything."""
    inputs = inputs_of(*[(4, 5) for _ in range(16)])
    return module_of(inputs, op.concat([op.nn.softmax(item) for item in inputs], axis=1))


def single() -> IRModule:
    (x,) = inputs_of((7, 9))
    return module_of([x], op.nn.relu(x))


GRAPHS: dict[str, Callable[[], IRModule]] = {
    "pieces": pieces,
    "kept pieces": kept_pieces,
    "branches": branches,
    "chain": chain,
    "independent": independent,
    "fan-in": fan_in,
    "single": single,
}


@functools.cache
def expected(name: str) -> tuple[IRModule, list[Array], list[Array]]:
    """A graph, values for its parameters, and what it computes one kernel after another."""
    mod = GRAPHS[name]()
    values = values_of(mod)
    return mod, values, ordinary(mod, values)


SOME = pytest.mark.parametrize(
    "threads", [pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow), 4]
)


def test_pieces_lie_where_the_whole_is() -> None:
    """Nothing is split or joined by a copy, but what is a result or begins within a line of the cache."""
    (plan,) = plans_of(scheduled(pieces(), 2)[0]).values()
    assert plan.names and not [name for name in plan.names if "split" in name or "concat" in name]
    (plan,) = plans_of(scheduled(kept_pieces(), 2)[0]).values()
    assert sum("split" in name for name in plan.names) == 2
    assert sum("concat" in name for name in plan.names) == 3


@SOME
@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("name", GRAPHS)
def test_every_order_that_the_schedule_allows_gives_the_same(name: str, threads: int) -> None:
    mod, values, wanted = expected(name)
    made, plan = scheduled(mod, threads)
    with plan.target:
        kernels = compile_rkernels(rkernels_of(made), plan.target)
    for seed in range(2):
        region, arguments, count = whole_arguments(made, values)
        run_plan(region, kernels, arguments, seed, most_in_turn=1 + 8 * (seed % 2))
        outputs = arguments[len(arguments) - count :]
        for actual, one in zip(results_of(made, outputs), wanted, strict=True):
            np.testing.assert_allclose(actual, one, rtol=1e-5, atol=1e-6)
    assert len(RTaskSchedule.from_json(region.schedule).programs[0].streams) == threads


@SOME
@pytest.mark.skipif(not native.is_available(), reason="this installation has no native runtime")
@pytest.mark.parametrize(
    "name", ["chain", *(pytest.param(name, marks=pytest.mark.slow) for name in GRAPHS if name != "chain")]
)
def test_the_native_runtime_gives_the_same(name: str, threads: int) -> None:
    mod, values, wanted = expected(name)
    library = relay.build(mod, "llvm", kernel_cache="off", enable_rammer=True, num_threads=threads)
    machine = library.vm()
    for _ in range(3):
        result = machine["main"](*map(tvm.runtime.tensor, values))
        actual = [item.numpy() for item in ([result] if hasattr(result, "numpy") else result)]
        for one, other in zip(actual, wanted, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@functools.cache
def compiled_branches() -> tuple[IRModule, Any]:
    """The graph behind `ScheduleWavefronts`, and its kernels."""
    made, plan = scheduled(branches(), 4)
    with plan.target:
        return made, compile_rkernels(rkernels_of(made), plan.target)


def orders_that_are_wrong(change: Callable[[SchedulePlan], SchedulePlan]) -> int:
    """Of ten orders, those in which ``change`` of the plan gives other results."""
    values = values_of(branches())
    made, kernels = compiled_branches()
    region, arguments, _ = whole_arguments(made, values)
    run_plan(region, kernels, arguments, seed=0)
    wanted = [item.copy() for item in arguments]
    wrong = 0
    for seed in range(10):
        _, arguments, _ = whole_arguments(made, values)
        run_plan(change(region), kernels, arguments, seed)
        wrong += any(not np.array_equal(one, other) for one, other in zip(arguments, wanted, strict=True))
    return wrong


def as_it_is(plan: SchedulePlan) -> SchedulePlan:
    return plan


def without_waits(plan: SchedulePlan) -> SchedulePlan:
    """All vEUs run on, whatever the others have done."""
    schedule = RTaskSchedule.from_json(plan.schedule)
    programs = [
        replace(program, streams=tuple(tuple(replace(item, waits=()) for item in stream) for stream in program.streams))
        for program in schedule.programs
    ]
    return replace(plan, schedule=replace(schedule, programs=tuple(programs)).to_json())


def in_one_place(plan: SchedulePlan) -> SchedulePlan:
    """All that lies in the arena lies at its start."""
    operators = [
        replace(item, places=tuple(replace(place, offset=0) for place in item.places)) for item in plan.operators
    ]
    return replace(plan, operators=tuple(operators))


@pytest.mark.parametrize(
    ("change", "least", "most"), [(as_it_is, 0, 0), (without_waits, 1, 10), (in_one_place, 10, 10)]
)
def test_missing_waits_and_shared_memory_are_found(
    change: Callable[[SchedulePlan], SchedulePlan], least: int, most: int
) -> None:
    assert least <= orders_that_are_wrong(change) <= most


@pytest.mark.slow
@pytest.mark.skipif(not native.is_available(), reason="this installation has no native runtime")
@pytest.mark.parametrize("count", [1, 1000])
def test_so_many_independent_operators(count: int) -> None:
    mod = softmaxes(count)
    values = values_of(mod)
    library = relay.build(mod, "llvm", kernel_cache="off", enable_rammer=True, num_threads=4)
    result = library.vm()["main"](*map(tvm.runtime.tensor, values))
    for item, value in zip([result] if count == 1 else result, values, strict=True):
        power = np.exp(value - value.max(axis=-1, keepdims=True))
        np.testing.assert_allclose(item.numpy(), power / power.sum(axis=-1, keepdims=True), rtol=1e-5)


def test_results_may_be_views_of_each_other() -> None:
    made, _ = scheduled(chain(), 2)
    (block,) = made["main"].body.blocks
    names = [
        getattr(binding.value.op, "name", "") for binding in block.bindings if isinstance(binding.value, relax.Call)
    ]
    assert names.count("relax.call_dps_packed") == 1
    assert "relax.call_tir" not in names


def test_kernels_that_nobody_calls_are_gone() -> None:
    made, _ = scheduled(branches(), 2)
    functions = [func for _, func in made.functions_items() if isinstance(func, PrimFunc)]
    assert functions
    assert all(func.attrs.get(RKERNEL) for func in functions)
    assert not any(RTASKS in func.attrs for func in functions)


def sorted_between() -> IRModule:
    (x,) = inputs_of((6, 50))
    first = op.nn.softmax(x)
    order = op.sort(first, axis=1)
    beside = op.nn.relu(op.exp(x))
    return module_of([x], op.nn.softmax(op.add(order, beside)), order)


def test_what_a_schedule_cannot_run_lies_between_two() -> None:
    mod = sorted_between()
    made, _ = scheduled(mod, 2)
    record = record_of(made)
    assert len(record.regions) == 2
    assert len(plans_of(made)) == 2
    assert [item.name for item in record.outside] == ["sort"]
    assert all(item.reason for item in record.outside)


@pytest.mark.skipif(not native.is_available(), reason="this installation has no native runtime")
def test_schedules_around_something_else_run_and_travel(tmp_path: Any) -> None:
    mod = sorted_between()
    values = values_of(mod)
    library = relay.build(mod, "llvm", kernel_cache="off", enable_rammer=True)
    library.export_library(tmp_path / "model.so")
    loaded = relay.load(tmp_path / "model.so")
    wanted = ordinary(mod, values)
    for machine in (library.vm(), loaded.vm()):
        for actual, expected in zip(machine["main"](*map(tvm.runtime.tensor, values)), wanted, strict=True):
            np.testing.assert_allclose(actual.numpy(), expected, rtol=1e-5, atol=1e-6)
    assert loaded.report.rammer == library.report.rammer
    assert "2 schedules" in str(library.report)
    assert "outside the schedules: sort" in str(library.report)
    check_measured_report(loaded.profile(repeat=1))


def check_measured_report(report: BuildReport) -> None:
    """All of what ran in schedules has measured times, and is in the page's pictures and in the trace."""
    assert report.rammer is not None
    for region in report.rammer.scheduled:
        assert len(region.measured) == region.entries
        assert (region.measured_us or 0) > 0
        assert "us measured" in str(region)
    assert all(operator.measured_s for operator in report.operators)
    assert BuildReport.from_json(report.to_json()) == report
    page, events = report.to_html(), json.loads(report_trace(report.rammer))["traceEvents"]
    captions = [f"{region.symbol}, {name}" for region in report.rammer.scheduled for name in ("simulated", "measured")]
    assert page.count("<figure>") == len(captions)
    assert [item["args"]["name"] for item in events if item["name"] == "process_name"] == captions
    assert sum(item["ph"] == "X" for item in events) == 2 * sum(region.entries for region in report.rammer.scheduled)


def test_auto_schedules_where_the_simulator_predicts_a_gain() -> None:
    """Branches of small operators, each too short to be divided, run side by side; a single operator gains nothing."""
    many, _ = scheduled(independent(), 2, "auto")
    one, _ = scheduled(single(), 2, "auto")
    (region,) = record_of(many).regions
    assert region.symbol
    assert region.predicted_us < region.sequential_us
    assert not record_of(one).scheduled
    assert plans_of(one) == {}
    (left,) = record_of(one).regions
    assert str(left).startswith("no schedule of 1 operators")


def test_auto_leaves_the_kernels_of_what_it_does_not_schedule() -> None:
    (x,) = inputs_of((8, 700))
    mod = module_of([x], op.nn.softmax(x))
    left, plan = scheduled(mod, 4, "auto")
    assert not record_of(left).scheduled
    ordinary_plan = plan_build("llvm", BuildOptions.create(num_threads=4, kernel_cache="off"))
    with plan.target:
        kernels = ordinary_plan.construct(mod)
    for gv, func in kernels.functions_items():
        if isinstance(func, PrimFunc):
            assert_structural_equal(func.body, left[gv.name_hint].body, map_free_vars=True)


def test_schedules_that_cannot_be_are_refused() -> None:
    with pytest.raises(OptionError, match="has none of them"):
        plan_build("opencl", BuildOptions.create(enable_rammer=True))
    assert plan_build("opencl", BuildOptions.create(enable_rammer="auto")).options.enable_rammer is False


def test_a_cpu_without_a_clock_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    device, target = pass_pipeline.device_for_target("llvm")
    unknown = replace(device, clock_ghz=None)
    monkeypatch.setattr(pass_pipeline, "device_for_target", lambda _target: (unknown, target))
    with pytest.raises(OptionError, match="no clock of"):
        plan_build("llvm", BuildOptions.create(enable_rammer=True))


def test_the_registered_pipeline_refuses_schedules() -> None:
    with pytest.raises(OptionError, match=r"relay\.build"):
        tvm.compile(single(), "llvm", relax_pipeline=relax.get_pipeline("tvm_ext", enable_rammer=True))


@pytest.mark.usefixtures("immutable_modules")
def test_the_module_stays_as_it_was() -> None:
    made, _ = scheduled(branches(), 2)
    assert made.attrs[RAMMER]
