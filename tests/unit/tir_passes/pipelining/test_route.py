"""Construction and the passes of a user's module take one way to pipelines, and choose the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from tvm import topi

from tests.support.pipelining.constructed import batched_product, convolution, single_product
from tests.support.pipelining.schedules import half_product
from tvm_ext._tvm import IRModule, te
from tvm_ext.devices.device_db import lookup
from tvm_ext.options import BuildOptions
from tvm_ext.records.choice import CHOICE, GpuPlan, KernelChoice
from tvm_ext.records.pipelines import PipelinePlan
from tvm_ext.records.serialise import from_json
from tvm_ext.tir_passes.construct_kernels import construct_kernel
from tvm_ext.tir_passes.pipelining.passes import AutoPipeline, InjectPipelines
from tvm_ext.tir_passes.pipelining.route import PIPELINED, plan_pipelines, registers_by_launch, wishes_of

A100, H200, V100 = DEVICES = ("nvidia-a100", "nvidia-h200", "nvidia-v100")
PLAIN = BuildOptions(enable_pipelining=False)


def channels_first(x: tuple[int, ...], w: tuple[int, ...]) -> Any:
    """A convolution of floats, NCHW, without padding."""
    a, b = te.placeholder(x, "float32", "X"), te.placeholder(w, "float32", "W")
    return te.create_prim_func([a, b, topi.nn.conv2d_nchw(a, b, 1, 0, 1)])


OPERATORS: dict[str, Callable[[], Any]] = {
    "a product of halves": partial(half_product, 512, 768, 3072),
    "one with few products a sum": partial(half_product, 50176, 128, 64),
    "one with its sums shared by blocks": partial(half_product, 64, 64, 8192),
    "a product of floats": partial(single_product, 1024, 1024, 512),
    "a batch of products": partial(batched_product, 8, 128, 128, 256),
    "a convolution of halves": partial(convolution, (8, 28, 28, 64), (3, 3, 64, 128), 1, 1),
    "a convolution of floats": partial(channels_first, (128, 168, 56, 56), (168, 168, 1, 1)),
}


def choice_of(kernel: Any) -> KernelChoice:
    return from_json(KernelChoice, str(kernel.attrs[CHOICE]))


def by_passes(kernel: Any, device: str) -> Any:
    """``kernel`` through the two passes, as a user runs them."""
    module = IRModule({"main": kernel.with_attr("global_symbol", "main")})
    return InjectPipelines(device)(AutoPipeline(device)(module))["main"]


@pytest.mark.sampled
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", OPERATORS)
def test_both_routes_give_one_kernel(name: str, device: str) -> None:
    func = OPERATORS[name]()
    built = construct_kernel(func, "operator", lookup(device), BuildOptions())
    passed = by_passes(construct_kernel(func, "operator", lookup(device), PLAIN), device)
    assert choice_of(built).pipeline is not None
    assert choice_of(passed) == choice_of(built)
    assert passed.without_attr(PIPELINED).script() == built.without_attr(PIPELINED).script()


def planned_and_estimated(name: str, device: str) -> tuple[PipelinePlan, PipelinePlan]:
    kernel = construct_kernel(OPERATORS[name](), "operator", lookup(device), PLAIN)
    plans = choice_of(kernel).gpu
    return plan_pipelines(kernel, lookup(device), None, plans), plan_pipelines(kernel, lookup(device))


def test_the_registers_that_were_planned_decide() -> None:
    """Estimated from its buffers, this kernel has more registers than a thread may have, and no model was asked."""
    planned, estimated = planned_and_estimated("a convolution of floats", H200)
    assert any("the model was not asked" in note for note in estimated.notes)
    assert not any("the model was not asked" in note for note in planned.notes)
    assert planned.buffers != estimated.buffers


def test_a_build_says_what_it_chose_by_the_planned_registers() -> None:
    planned, _ = planned_and_estimated("a convolution of floats", H200)
    built = construct_kernel(OPERATORS["a convolution of floats"](), "operator", lookup(H200), BuildOptions())
    assert choice_of(built).pipeline == planned


def test_plans_of_other_launches_are_not_used() -> None:
    """A kernel that was cut in two since it was planned: registers are estimated."""
    kernel = construct_kernel(OPERATORS["a convolution of floats"](), "operator", lookup(H200), PLAIN)
    (plan,) = choice_of(kernel).gpu
    two = plan_pipelines(kernel, lookup(H200), None, [plan, plan])
    assert two == plan_pipelines(kernel, lookup(H200))


def test_each_launch_of_a_group_has_the_groups_registers() -> None:
    plan = GpuPlan(launches=2, blocks=1, threads=64, shared_bytes=0, register_count=80)
    assert registers_by_launch([plan, replace(plan, launches=1, register_count=40)]) == (80, 80, 40)


def test_a_build_without_pipelines_asks_for_none() -> None:
    assert wishes_of(PLAIN).mode == "none"
    assert wishes_of(BuildOptions(enable_pipelining=True, shared_stages=3)).shared_stages == 3
    assert wishes_of(BuildOptions(enable_pipelining=True)).always
