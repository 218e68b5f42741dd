"""Policies that users register: what they make is checked, and runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tvm import relax

from tests.support.small_modules import module_of
from tvm_ext import relay
from tvm_ext._tvm import IRModule
from tvm_ext.cost.schedule_simulator import simulate
from tvm_ext.errors import OptionError
from tvm_ext.options import BuildOptions
from tvm_ext.records.rtasks import Need, RKernel, ROperator, RTaskGraph, RTaskProgram, VDevice, need_of
from tvm_ext.relay_passes.wavefronts import policies
from tvm_ext.relay_passes.wavefronts.earliest_finish import append_earliest
from tvm_ext.relay_passes.wavefronts.kernel_choice import KernelChoices, MakeDevice
from tvm_ext.relay_passes.wavefronts.policies import Policy, schedule
from tvm_ext.relay_passes.wavefronts.program_plan import ProgramPlan

SETTINGS: dict[str, Any] = {"kernel_cache": "off", "enable_rammer": True, "num_threads": 2}


def _branches() -> IRModule:
    """Two products of one input, joined by a third."""
    x = relax.Var("x", relax.TensorType((64, 64), "float32"))
    draw = np.random.default_rng(1)
    weights = [relax.const(draw.standard_normal((64, 64)).astype("float32")) for _ in range(2)]
    left, right = (relax.op.matmul(x, weight) for weight in weights)
    return module_of([x], relax.op.matmul(left, right))


def in_order(graph: RTaskGraph, make: MakeDevice) -> list[RTaskProgram]:
    """A user's policy: the graph's order, fastest kernels, rTasks where they end first."""
    choices = KernelChoices(graph, make)
    chosen = [(index, choices.fastest(index)) for index in range(len(graph.operators))]
    plan = ProgramPlan(graph, choices.device(need_of(choices.kernel(*pair) for pair in chosen)))
    for pair in chosen:
        append_earliest(plan, *pair)
    return [plan.program()]


def without_an_operator(graph: RTaskGraph, make: MakeDevice) -> list[RTaskProgram]:
    (program,) = in_order(graph, make)
    last = len(graph.operators) - 1
    streams = tuple(tuple(entry for entry in stream if entry.operator != last) for stream in program.streams)
    return [replace(program, streams=streams)]


def without_any_wait(graph: RTaskGraph, make: MakeDevice) -> list[RTaskProgram]:
    (program,) = in_order(graph, make)
    streams = tuple(tuple(replace(entry, waits=()) for entry in stream) for stream in program.streams)
    return [replace(program, streams=streams)]


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Policy], None]:
    monkeypatch.setattr(policies, "_REGISTERED", {})
    return policies.register_policy


def test_a_policy_of_a_users_own(registered: Callable[[str, Policy], None]) -> None:
    registered("in order", in_order)
    mod = _branches()
    library = relay.build(mod, "llvm", rammer_policy="in order", **SETTINGS)
    record = library.report.rammer
    assert record is not None
    assert {region.policy for region in record.regions} == {"in order"}
    x = np.random.default_rng(0).standard_normal((64, 64)).astype("float32")
    wanted = relay.build(mod, "llvm", kernel_cache="off").vm()["main"](x).numpy()
    np.testing.assert_allclose(library.vm()["main"](x).numpy(), wanted, rtol=1e-4)


@pytest.mark.parametrize(
    ("policy", "match"),
    [
        (without_an_operator, "do not run once each"),
        (without_any_wait, "may begin before operator"),
        (lambda _graph, _make: [], "at least one program"),
    ],
)
def test_schedules_of_a_users_policy_are_checked(
    registered: Callable[[str, Policy], None], policy: Policy, match: str
) -> None:
    registered("mine", policy)
    with pytest.raises(OptionError, match=f"'mine' made a schedule that cannot be run: .*{match}"):
        relay.build(_branches(), "llvm", rammer_policy="mine", **SETTINGS)


def test_policies_have_names(registered: Callable[[str, Policy], None]) -> None:
    with pytest.raises(OptionError, match="'list' is a scheduling policy of tvm_ext"):
        registered("list", in_order)
    with pytest.raises(OptionError, match="did you mean 'wavefront'"):
        relay.build(_branches(), "llvm", rammer_policy="wavefronts", **SETTINGS)
    with pytest.raises(OptionError, match="no scheduling policy"):
        relay.build(_branches(), "llvm", rammer_policy="nothing", enable_rammer=False)


def test_segments_have_as_many_veus_as_suit_them() -> None:
    """Ten operators in a row of two rTasks a unit: two vEUs a unit, though there is room for eight and one needs them.

    Before them and behind them one of eight rTasks a unit, 1 us by itself and 2 us beside the others.
    """
    pair = RKernel(name="pair", task_count=8, task_s=4 * 1e-6, residents=2, alone_s=4 * 1e-6)
    crowd = RKernel(name="crowd", task_count=32, task_s=2 * 1e-6, residents=8, alone_s=1e-6)
    kernels = (crowd, *(pair,) * 10, crowd)
    operators = tuple(
        ROperator(name=f"o{place}", kernels=(kernel,), predecessors=(place - 1,) if place else ())
        for place, kernel in enumerate(kernels)
    )
    graph = RTaskGraph(operators=operators)

    def make(need: Need) -> VDevice:
        return VDevice(name="gpu", unit_count=4, veus_per_unit=8, launch_s=2 * 1e-6, barrier_s=0.7 * 1e-6)

    found = {name: schedule(graph, make, name) for name in ("list", "segments")}
    times = {name: simulate(made, graph).makespan_s for name, made in found.items()}
    assert [program.device.veus_per_unit for program in found["segments"].programs] == [8, 2, 8]
    assert times["segments"] == pytest.approx((4 + 2 + 10 * 4 + 9 * 0.7 + 4) * 1e-6)
    assert times["list"] > 1.1 * times["segments"]


def test_builds_cut_where_a_unit_has_room_for_several() -> None:
    """The standard policy is that of the cuts; where each kernel has a unit for itself it makes the list policy's."""
    kernel = RKernel(name="alone", task_count=8, task_s=4 * 1e-6)
    row = [
        ROperator(name=f"o{place}", kernels=(kernel,), predecessors=(place - 1,) * (place > 0)) for place in range(9)
    ]
    graph = RTaskGraph(operators=tuple(row))

    def make(need: Need) -> VDevice:
        return VDevice(name="gpu", unit_count=4, launch_s=2 * 1e-6, barrier_s=0.7 * 1e-6)

    standard = schedule(graph, make)
    assert standard.policy == policies.STANDARD_POLICY == BuildOptions().rammer_policy == "segments"
    assert standard.programs == schedule(graph, make, "list").programs


def test_short_operators_in_a_row_stay_on_a_veu() -> None:
    """A hundred of four rTasks of 0.02 us behind a long one: by earliest end alone they would wait for each other."""
    long = RKernel(name="long", task_count=8, task_s=10e-6)
    short = RKernel(name="short", task_count=4, task_s=0.02e-6)
    operators = [ROperator(name="o0", kernels=(long,))]
    operators += (ROperator(name=f"o{place}", kernels=(short,), predecessors=(place - 1,)) for place in range(1, 101))
    graph = RTaskGraph(operators=tuple(operators))

    def make(need: Need) -> VDevice:
        return VDevice(name="gpu", unit_count=8, launch_s=2e-6, task_overhead_s=0.2e-6, barrier_s=0.7e-6)

    times = {name: simulate(schedule(graph, make, name), graph).makespan_s for name in ("wavefront", "list")}
    assert times["list"] == pytest.approx((2 + 0.2 + 10 + 0.7 + 100 * (0.2 + 0.08)) * 1e-6)
    assert times["wavefront"] > 2 * times["list"]
