"""Stock TVM's own cases for software pipelining, without its positional annotations, and its schedules left alone."""

from __future__ import annotations

from functools import partial

import pytest

from tests.support.opencl_cpu import why_not
from tests.support.pipelining.check import Wanted, check, error_on_llvm, error_on_opencl, pipelined, tolerance
from tests.support.pipelining.kernels import A100, OPENCL, PipeliningKernel, product_reference
from tests.support.pipelining.schedules import (
    stages_by_hand,
    stock_three_by_two,
    stock_three_stages,
    tensor_core_matmul,
)
from tests.support.pipelining.stock import stock_cases
from tvm_ext._tvm import IRModule
from tvm_ext.errors import InputError
from tvm_ext.tir_passes.pipelining.passes import AutoPipeline

CASES = {kernel.name: kernel for kernel in stock_cases()}
PAIRS = [(name, device) for name, kernel in CASES.items() for device in kernel.devices]
STAGES = (Wanted(), Wanted(shared_stages=2, register_stages=1), Wanted(shared_stages=4, register_stages=2))

no_opencl = why_not()
needs_opencl = pytest.mark.skipif(no_opencl is not None, reason=str(no_opencl))


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize(("name", "device"), PAIRS)
def test_every_case_is_right(name: str, device: str) -> None:
    for wanted in STAGES:
        item = pipelined(CASES[name], device, wanted)
        result = check(item)
        assert result.ok, f"{wanted}: {item.plan}\n{result}"


@pytest.mark.parametrize("name", CASES)
def test_what_is_pipelined(name: str) -> None:
    kernel = CASES[name]
    plan = pipelined(kernel, A100, Wanted(shared_stages=2, register_stages=2)).plan
    planned = {buffer.name for buffer in plan.buffers}
    assert {*kernel.shared, *kernel.registers} <= planned, f"{plan}: {plan.refusals}"
    assert not planned & set(kernel.refused), "what threads compute in shared memory is no load"


@pytest.mark.parametrize("name", [name for name, kernel in CASES.items() if kernel.shared and OPENCL in kernel.devices])
def test_on_llvm_with_threads_as_loops(name: str) -> None:
    kernel = CASES[name]
    if kernel.refused:
        pytest.skip("its threads compute what is in shared memory, which threads as loops do not")
    item = pipelined(kernel, A100, Wanted(shared_stages=3, register_stages=2))
    assert error_on_llvm(item) <= tolerance(item)


@pytest.mark.sampled(every=4)
@needs_opencl
@pytest.mark.parametrize("name", [name for name, kernel in CASES.items() if OPENCL in kernel.devices])
def test_as_opencl_on_the_cpu(name: str) -> None:
    item = pipelined(CASES[name], OPENCL, Wanted())
    assert error_on_opencl(item) <= tolerance(item)


def test_one_iteration_is_not_pipelined() -> None:
    """Stock TVM makes a pipeline without a loop of its trivial case; a plan says why there is none."""
    plan = pipelined(CASES["stock_trivial_copy"], A100).plan
    assert not plan.buffers
    assert [refusal.buffer for refusal in plan.refusals] == ["B"]


def test_fewer_iterations_than_stages_reduce_the_stages() -> None:
    plan = pipelined(CASES["stock_less_loop_than_stages_of_copies"], A100, Wanted(shared_stages=4)).plan
    assert {buffer.stages for buffer in plan.buffers if buffer.level == 0} == {2}


def test_a_function_on_the_way_moves_to_its_use() -> None:
    """Stock TVM makes its simple case a synchronous load in an asynchronous group; here the copy becomes one."""
    item = pipelined(CASES["stock_simple_compute"], A100, Wanted(shared_stages=2))
    assert item.plan.moved == ("B",)
    assert item.function.script().count("cp_async_raw") == 2, "one in the prologue, one in the loop"


# --- what stock pipelining is asked for -------------------------------------------------------------------------------
def _kernel(annotate: object) -> PipeliningKernel:
    make = partial(tensor_core_matmul, 32, 32, 160, tile=(32, 32, 32), warps=(1, 1), annotate=annotate)  # type: ignore[arg-type]
    return PipeliningKernel(name="annotated", make=make, reference=product_reference, devices=(A100,))


@pytest.mark.parametrize("annotate", [stock_three_stages, stock_three_by_two])
def test_stock_annotations_are_left_to_stock_tvm(annotate: object) -> None:
    kernel = _kernel(annotate)
    item = pipelined(kernel, A100, Wanted(shared_stages=4))
    assert not item.plan.buffers
    (refusal,) = item.plan.refusals
    assert refusal.rule == "already pipelined"
    assert "stock TVM" in refusal.reason
    assert check(item).ok


def test_hints_of_both_kinds_contradict_each_other() -> None:
    def both(schedule: object, outer: object, inner: object) -> None:
        stages_by_hand(3, 2)(schedule, outer, inner)
        stock_three_stages(schedule, outer, inner)

    module = IRModule({"main": _kernel(both).make()})
    with pytest.raises(InputError, match=r"stock TVM's pipeline annotations, and tvm_ext\.pipeline_stages asks"):
        AutoPipeline(A100)(module)
