"""What a user can ask that cannot be done: refused or reduced with the reason, never a crash, never a wrong kernel."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from tests.support.pipelining.check import Pipelined, Wanted, check, pipelined
from tests.support.pipelining.constructed import single_product
from tests.support.pipelining.copies import copy_kernels
from tests.support.pipelining.hard import hard_kernels
from tests.support.pipelining.kernels import A100, DEPTH, T4, TILE, Copy, PipeliningKernel, product_reference
from tests.support.pipelining.products import Product, matmul
from tests.support.pipelining.refused import refused_kernels
from tests.support.pipelining.schedules import stages_by_hand, tensor_core_matmul
from tvm_ext._tvm import For, IRModule, PassContext, Schedule, structural_map, tirx
from tvm_ext.errors import InputError
from tvm_ext.records.pipelines import PIPELINE_PLAN
from tvm_ext.tir_passes.pipelining.passes import AutoPipeline, InjectPipelines

KERNELS = {kernel.name: kernel for kernel in (*refused_kernels(), *hard_kernels(), *copy_kernels())}
ODD = (TILE, TILE, 5 * DEPTH)


def _kernel(make: Callable[[], Any], **rest: Any) -> PipeliningKernel:
    return PipeliningKernel(name="asked", make=make, reference=product_reference, devices=(A100, T4), **rest)


def _hinted(first: Any, second: Any) -> PipeliningKernel:
    return _kernel(partial(matmul, *ODD, lambda a, b: Product(a=a, b=b, hints=(first, second))))


def _proved(kernel: PipeliningKernel, device: str = A100, wanted: Wanted | None = None) -> Pipelined:
    item = pipelined(kernel, device, wanted)
    result = check(item)
    assert result.ok, result
    return item


def _depths(item: Pipelined) -> dict[str, int]:
    return {buffer.name: buffer.stages for buffer in item.plan.buffers if buffer.level == 0}


# --- numbers of stages ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("hint", [0, -1, 9, 1000, "three", 2.5])
def test_hints_that_are_no_number_of_stages(hint: Any) -> None:
    hint = tirx.FloatImm("float32", hint) if isinstance(hint, float) else hint
    with pytest.raises(InputError, match=r"tvm_ext\.pipeline_stages of buffer A_shared is"):
        pipelined(_hinted(hint, 2), A100)


@pytest.mark.parametrize("settings", [
    {"mode": "triple"}, {"shared_stages": 0}, {"shared_stages": 9}, {"shared_stages": 2.5}, {"shared_stages": True},
    {"register_stages": 0}, {"register_stages": 5}, {"register_stages": "2"},
])  # fmt: skip
def test_settings_that_do_not_exist(settings: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"mode|_stages"):
        AutoPipeline(A100, **settings)


def test_hints_that_contradict_each_other() -> None:
    """Two blocks, one in the other, write one buffer, and ask for different numbers of versions."""
    schedule = Schedule(single_product(*ODD))
    product = schedule.get_sblock("C")
    schedule.bind(schedule.get_loops(product)[0], "threadIdx.x")
    copy = schedule.cache_read(product, 0, "shared")
    schedule.annotate(copy, "tvm_ext.pipeline_stages", 3)
    around = schedule.blockize(schedule.get_loops(copy)[0])
    schedule.annotate(around, "tvm_ext.pipeline_stages", 4)
    with pytest.raises(InputError, match=r"says both [34] and [34] for buffer A_shared"):
        AutoPipeline(A100)(schedule.mod)


def test_different_depths_of_two_buffers_are_no_contradiction() -> None:
    assert _depths(_proved(_hinted(2, 5))) == {"A_shared": 2, "B_shared": 5}
    assert _depths(_proved(_hinted(4, 3))) == {"A_shared": 4, "B_shared": 3}


def test_one_version_means_none() -> None:
    item = _proved(_hinted(1, 3))
    assert _depths(item) == {"B_shared": 3}
    assert {refusal.buffer: refusal.rule for refusal in item.plan.refusals}["A_shared"] == "switched off"


def test_more_stages_than_iterations_are_reduced_and_said() -> None:
    item = _proved(_hinted(8, 8))
    assert set(_depths(item).values()) == {5}
    assert any("reduced to 5" in note for note in item.plan.notes), item.plan.notes


def test_stages_that_do_not_fit_shared_memory_are_reduced_and_said() -> None:
    """A tile of 256 x 128 x 64 takes 53 KiB; an A100's 163 KiB hold three."""
    make = partial(tensor_core_matmul, 256, 128, 640, tile=(256, 128, 64), warps=(4, 2))
    item = _proved(_kernel(make), wanted=Wanted(shared_stages=8, register_stages=2))
    assert set(_depths(item).values()) == {3}
    assert any("8 stages" in note and "do not fit" in note for note in item.plan.notes), item.plan.notes


def test_static_shared_memory_beyond_its_limit_becomes_dynamic() -> None:
    """Eight stages of 128 x 32 + 32 x 128 halves are 128 KiB and more; a kernel may declare 48 KiB."""
    make = partial(tensor_core_matmul, 128, 128, 320, tile=(128, 128, 32), scope="shared")
    item = _proved(_kernel(make), wanted=Wanted(shared_stages=8, register_stages=2))
    assert set(_depths(item).values()) == {8}
    assert 'scope="shared.dyn"' in item.function.script()


def test_stages_of_registers_that_do_not_divide_the_loop_are_reduced_and_said() -> None:
    make = partial(tensor_core_matmul, 32, 32, 160, tile=(32, 32, 32), warps=(1, 1), annotate=stages_by_hand(3, 3))
    item = _proved(_kernel(make))
    assert {buffer.stages for buffer in item.plan.buffers if buffer.level == 1} == {2}
    assert any("divide the 2 iterations" in note for note in item.plan.notes), item.plan.notes


def test_without_asynchronous_copies_two_stages_are_all() -> None:
    item = _proved(_kernel(partial(matmul, *ODD)), T4, Wanted(shared_stages=8))
    assert set(_depths(item).values()) == {2}
    assert any("asynchronous" in note for note in item.plan.notes), item.plan.notes


# --- functions that are not as they should be --------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "buffer", "reason"),
    [
        ("own_barriers", "A_shared", "synchronises by itself"),
        ("view_of_a_tile", "A_shared", "aliased"),
        ("iterate_in_place", "A_shared", "which the kernel writes"),
        ("recurrence", "A_shared", "which the kernel writes"),
        ("load_every_other_step", "A_shared", "not loaded in every iteration"),
        ("used_after_the_loop", "A_shared", "used outside its loop"),
        ("one_buffer_of_two_loops", "A_shared", "different loops"),
        ("half_scalars", "A_shared", "4, 8 or 16 bytes.* 2 bytes"),
        ("half_transposed", "B_shared", "provably aligned"),
        ("stencil_of_parallel_tiles", "A_shared", "parallel threadblocks"),
        ("two_nested_loops", "A_shared", "waited for at different places"),
        ("bias_of_outer_loop", "D_shared", "waited for at different places"),
        ("pipelined_by_stock", "*", "left as it is"),
    ],
)
def test_refusals_name_the_buffer_and_say_why(name: str, buffer: str, reason: str) -> None:
    item = _proved(KERNELS[name], wanted=Wanted(shared_stages=3))
    found = {refusal.buffer: refusal.reason for refusal in item.plan.refusals}
    assert buffer not in _depths(item)
    assert re.search(reason, found[buffer]), found


def test_a_hint_does_not_overrule_a_rule() -> None:
    """Copies of 2 bytes stay synchronous though three versions are asked for."""

    def form(a: Any, b: Any) -> Product:
        return Product(a=a, b=b, copy=Copy(vector=1), hints=(3, 3))

    item = _proved(_kernel(partial(matmul, *ODD, form, dtype="float16")))
    assert not item.plan.buffers
    assert {refusal.rule for refusal in item.plan.refusals if refusal.buffer.endswith("shared")} == {
        "asynchronous copy"
    }


def test_calls_of_unknown_effect_keep_a_loop_as_it_is() -> None:
    function = _with_call_in_the_loop(matmul(*ODD))
    plan = pipelined(_kernel(lambda: function), A100).plan
    assert not plan.buffers
    assert all("side effect" in refusal.reason for refusal in plan.refusals if refusal.buffer.endswith("shared"))


def _with_call_in_the_loop(function: Any) -> Any:
    def visit(loop: Any) -> Any:
        if loop.loop_var.name != "ko":
            return loop
        call = tirx.Evaluate(tirx.call_extern("int32", "count_iteration", loop.loop_var))
        body = tirx.stmt_seq(loop.body, call)
        return For(loop.loop_var, loop.min, loop.extent, loop.kind, body, None, {})

    return function.with_body(structural_map(function.body, (For, visit)))


def test_a_device_is_needed() -> None:
    with pytest.raises(InputError, match="which device"):
        AutoPipeline()(IRModule({"main": matmul(*ODD)}))


def test_a_plan_for_another_function() -> None:
    planned = AutoPipeline(A100)(IRModule({"main": matmul(*ODD)}))["main"]
    other = matmul(*ODD, lambda a, b: Product(a=a, b=b, name="_other"))
    other = other.with_attr(PIPELINE_PLAN, planned.attrs[PIPELINE_PLAN])
    with pytest.raises(InputError, match="A_shared, which the function does not allocate"):
        InjectPipelines(A100)(IRModule({"main": other}))


def test_a_plan_for_another_device() -> None:
    """Planned with copies of 2 bytes through registers; cp.async cannot."""
    function = KERNELS["half_scalars"].make()
    planned = AutoPipeline(T4, shared_stages=2)(IRModule({"main": function}))
    with pytest.raises(InputError, match="plan it"):
        InjectPipelines(A100)(planned)


@pytest.mark.parametrize("name", ["half_scalars", "arithmetic_copies", "two_nested_loops", "running_sums"])
def test_the_input_is_not_written_to(name: str) -> None:
    module = IRModule({"main": KERNELS[name].make()})
    before = module.script()
    with PassContext(config={"testing.immutable_module": True}):
        InjectPipelines(A100)(AutoPipeline(A100, shared_stages=3)(module))
    assert module.script() == before


def test_a_second_time_changes_nothing() -> None:
    once = pipelined(_kernel(partial(matmul, *ODD)), A100).function
    again = InjectPipelines(A100)(AutoPipeline(A100, shared_stages=5)(IRModule({"main": once})))["main"]
    assert again.script() == once.script()
