"""GPU kernels of what neither we nor stock TVM schedule: bound to threads, right, and nothing left to the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.script import tirx as T  # noqa: N812 - TVMScript's own name

from tests.support import opencl_cpu
from tests.support.stock_kernels import stock_kernels
from tests.unit.kernels import legalised, relative_error
from tvm_ext._tvm import gpu_schedule_rules
from tvm_ext.analysis.predicates import unbounded_reduction
from tvm_ext.devices.device_db import device_for_target, lookup
from tvm_ext.errors import IllegalRewrite, TargetError
from tvm_ext.options import BuildOptions
from tvm_ext.records.choice import CHOICE, KernelChoice
from tvm_ext.records.serialise import from_json
from tvm_ext.tir_passes.construct_kernels import construct_kernel
from tvm_ext.tir_passes.emit import schedule_stock_gpu
from tvm_ext.tir_passes.emit.schedule_stock_gpu import runs_on_device, schedule_by_stock, schedule_gpu_fallback
from tvm_ext.verify.build_check import check_kernel

needs_opencl = pytest.mark.skipif(opencl_cpu.why_not() is not None, reason=str(opencl_cpu.why_not()))
A100 = lookup("nvidia-a100")


def adaptive_pool() -> Any:
    """64 positions to 13: windows of 5 and 6, whose bounds are no affine function of the position."""
    return legalised(lambda x: relax.op.nn.adaptive_avg_pool1d(x, [13]), (2, 7, 64))


def made(func: Any) -> tuple[Any, KernelChoice]:
    with tvm.target.Target({"kind": "cuda", "arch": "sm_80"}):
        kernel = construct_kernel(func, "operator", A100, BuildOptions())
    return kernel, from_json(KernelChoice, str(kernel.attrs[CHOICE]))


def test_what_no_rule_of_stock_tvm_takes_has_a_kernel_and_says_so() -> None:
    kernel, choice = made(adaptive_pool())
    assert choice.path == "fallback"
    assert "no kernel constructed: " in choice.reason and "a thread for each element" in choice.reason
    assert runs_on_device(kernel)


@needs_opencl
def test_the_fallback_computes_windows_of_two_sizes(rng: np.random.Generator) -> None:
    x = rng.standard_normal((2, 7, 64), dtype="float32")
    bounds = [(p * 64 // 13, -(-(p + 1) * 64 // 13)) for p in range(13)]
    expected = np.stack([x[..., a:b].astype("float64").mean(-1) for a, b in bounds], axis=-1)
    (actual,) = opencl_cpu.run_opencl(made(adaptive_pool())[0], [x])
    assert relative_error(actual, expected) < 1e-6


@needs_opencl
def test_a_result_of_one_element_is_one_thread(rng: np.random.Generator) -> None:
    func = legalised(lambda x: relax.op.sum(x), (13, 5))
    kernel, note = schedule_gpu_fallback(func)
    assert runs_on_device(kernel) and note.startswith("fallback: 1 kernel")
    x = rng.standard_normal((13, 5), dtype="float32")
    (actual,) = opencl_cpu.run_opencl(kernel, [x])
    assert actual == pytest.approx(x.astype("float64").sum(), rel=1e-5)


def test_a_schedule_that_launches_from_a_loop_of_the_host_is_not_taken() -> None:
    """dlight's GeneralReduction makes 13 launches of one thread of an argmin to a scalar."""
    kernel, choice = made(legalised(lambda x: relax.op.argmin(x, axis=0), (13,)))
    assert runs_on_device(kernel)
    assert "GeneralReduction" not in choice.reason


def test_a_schedule_that_launches_over_nothing_is_not_taken() -> None:
    """dlight binds 1024 threads to no elements, and TVM's runtime launches a block of them at the least."""
    func = legalised(relax.op.nn.relu, (0, 4))
    kernel, choice = made(func)
    device, target = device_for_target("nvidia-a100")
    assert choice.path == "fallback"
    with target:
        assert check_kernel("relu", kernel, func, device, target).launches == 0
        (rule,) = (rule for rule in gpu_schedule_rules() if type(rule).__name__ == "Fallback")
        taken = check_kernel("relu", rule.apply(func, target, False).mod["main"], func, device, target)
    assert "out of bounds of x0[0]" in taken.problem and "it has 0 elements" in taken.problem


# (rows, columns) of a matrix times a vector: dlight's GEMV has 16 rows a block, with a condition where some are none
@pytest.mark.parametrize(("rows", "columns"), [(5, 5), (17, 33), (16, 64)])
def test_a_schedule_that_stores_beyond_its_result_is_not_taken(rows: int, columns: int) -> None:
    """Stock TVM forgets the condition where it stores: what is noticed is what the interpreter finds, and no more."""
    device, target = device_for_target("nvidia-v100")
    func = legalised(lambda x, v: relax.op.matmul(x, v), (rows, columns), (columns,))
    gemv = next(rule for rule in gpu_schedule_rules() if type(rule).__name__ == "GEMV")
    with target:
        scheduled = gemv.apply(func, target, False).mod["main"]
        taken, choice = schedule_by_stock(func, "matmul", device, "a test")
        fault = check_kernel("main", scheduled, func, device, target).problem
        assert not check_kernel("main", taken, func, device, target).problem
    assert fault.startswith("main_kernel: out of bounds of matmul") if rows % 16 else not fault
    assert unbounded_reduction(scheduled) == ("matmul" if rows % 16 else "")
    assert ("dlight.gpu.GEMV" in choice.reason) == (rows % 16 == 0)


def test_a_schedule_that_adds_an_epilogue_twice_is_not_taken() -> None:
    """dlight's Fallback inlines what is behind a sum of one step into it, which stock TVM does wrong."""
    device, target = device_for_target("nvidia-v100")
    func = legalised(lambda x, y, z: relax.op.add(z, relax.op.matmul(x, y)), (8, 1), (1, 8), (8, 8))
    fallback = next(rule for rule in gpu_schedule_rules() if type(rule).__name__ == "Fallback")
    with target:
        scheduled = fallback.apply(func, target, False).mod["main"]
        taken, choice = schedule_by_stock(func, "matmul", device, "a test")
        assert "its values are off by" in check_kernel("main", scheduled, func, device, target).problem
        assert not check_kernel("main", taken, func, device, target).problem
    assert choice.path == "fallback"


def test_a_rule_that_asserts_is_one_that_does_not_take_it() -> None:
    """dlight's Reduction rule ends in an AssertionError of its own where a sum's reads are no whole boxes."""

    class Asserting:
        def apply(self, *_: Any) -> None:
            raise AssertionError

    assert schedule_stock_gpu._apply(Asserting(), adaptive_pool(), device_for_target("nvidia-v100")[1]) is None


@pytest.mark.slow
@pytest.mark.timeout(2 * 3600)
@pytest.mark.parametrize("everything", [False, True])
def test_no_kernel_of_stock_tvm_of_onnx_s_node_tests_is_wrong(everything: bool) -> None:
    """Of a default build, and of one without Roller: in the interpreter, every store within its tensor."""
    found = list(stock_kernels("nvidia-v100", everything=everything))
    assert sum(not item.unknown for item in found) > (100 if everything else 10)
    assert not [item for item in found if item.problem]


def scatter_nd() -> Any:
    x, indices, updates = (
        relax.Var(name, relax.TensorType(shape, dtype))
        for name, shape, dtype in (("x", (6, 8), "float32"), ("i", (4, 2), "int64"), ("u", (4,), "float32"))
    )
    builder = relax.BlockBuilder()
    with builder.function("main", [x, indices, updates]):
        builder.emit_func_output(builder.emit(relax.op.scatter_nd(x, indices, updates)))
    with tvm.target.Target({"kind": "cuda", "arch": "sm_80"}):
        module = relax.transform.LegalizeOps()(builder.get())
    (func,) = (item for _, item in module.functions_items() if not isinstance(item, relax.Function))
    return func


@pytest.mark.parametrize("way", ["chosen", "fallback"])
def test_what_launches_threads_itself_is_left_as_it_is(way: str) -> None:
    """Stock TVM's scatter_nd for GPUs has launches of its own, beside the loops of its indices."""
    kernel = made(scatter_nd())[0] if way == "chosen" else schedule_gpu_fallback(scatter_nd())[0]
    assert runs_on_device(kernel) and not runs_on_device(scatter_nd())
    module = tvm.compile(
        tvm.IRModule({"main": kernel.with_attr("global_symbol", "main")}),
        target=tvm.target.Target({"kind": "cuda", "arch": "sm_80"}, host="llvm"),
    )
    assert str(module.mod.imports[0].inspect_source()).count("__global__") >= 2


def test_loops_of_the_host_are_seen() -> None:
    @T.prim_func(s_tir=True)
    def launches(x: T.Buffer((4, 8), "float32"), y: T.Buffer((4, 8), "float32")) -> None:
        for i in range(4):
            for t in T.thread_binding(8, thread="threadIdx.x"):
                with T.sblock("copy"):
                    vi, vt = T.axis.remap("SS", [i, t])
                    y[vi, vt] = x[vi, vt]

    assert not runs_on_device(launches)
    assert not runs_on_device(adaptive_pool())


def test_what_has_no_blocks_is_refused_with_the_operator_and_the_device() -> None:
    @T.prim_func(s_tir=True)
    def foreign(x: T.Buffer((4,), "float32")) -> None:
        T.evaluate(T.call_extern("int32", "somebodys_function", x.data))

    with pytest.raises(IllegalRewrite, match="no blocks"):
        schedule_gpu_fallback(foreign)
    with pytest.raises(TargetError, match=r"operator operator of \[4\] has no kernel for nvidia-a100"):
        made(foreign)
