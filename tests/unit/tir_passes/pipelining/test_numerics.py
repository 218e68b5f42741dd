"""Every kernel of the library is right once it is pipelined: by the interpreter, on LLVM, as OpenCL on the CPU."""

from __future__ import annotations

import csv
import itertools
from functools import cache
from pathlib import Path

import pytest

from tests.support.opencl_cpu import why_not
from tests.support.pipelining.check import (
    Pipelined,
    Wanted,
    check,
    error_on_llvm,
    error_on_opencl,
    pipelined,
    tolerance,
)
from tests.support.pipelining.constructed import constructed_kernels, scaled_operator
from tests.support.pipelining.copies import copy_kernels
from tests.support.pipelining.hard import hard_kernels
from tests.support.pipelining.kernels import A100, H200, OPENCL, T4, V100, PipeliningKernel
from tests.support.pipelining.refused import refused_kernels
from tests.support.pipelining.simt import simt_kernels
from tests.support.pipelining.stock import specialised, symbolic_compute
from tests.support.pipelining.tiles import tile_kernels
from tests.support.pipelining.traps import trap_kernels
from tvm_ext._tvm import te, topi
from tvm_ext.devices.device_db import lookup
from tvm_ext.options import BuildOptions
from tvm_ext.tir_passes.construct_kernels import construct_kernel
from tvm_ext.verify.verification import verify

ALCOP = Path(__file__).resolve().parents[4] / "benchmarks" / "workloads" / "alcop_ops.csv"
STAGES = tuple(itertools.product((2, 3, 4), (1, 2)))
EVERY = 9  # of ALCOP's operators, the everyday run tries each ninth

HAND_WRITTEN = {
    kernel.name: kernel
    for make in (simt_kernels, copy_kernels, refused_kernels, hard_kernels, trap_kernels, tile_kernels)
    for kernel in make()
}
CONSTRUCTED = {kernel.name: kernel for kernel in constructed_kernels()}
KERNELS = HAND_WRITTEN | CONSTRUCTED
PAIRS = [(name, device) for name, kernel in KERNELS.items() for device in kernel.devices]

no_opencl = why_not()
needs_opencl = pytest.mark.skipif(no_opencl is not None, reason=str(no_opencl))


@cache
def alcop_rows() -> tuple[dict[str, str], ...]:
    with ALCOP.open(newline="", encoding="utf-8") as file:
        return tuple(row for row in csv.DictReader(file) if not row["dup_of"])


@cache
def made(kernel: PipeliningKernel, device: str, wanted: Wanted) -> Pipelined:
    """`pipelined`, once for all that is asked of it."""
    return pipelined(kernel, device, wanted)


def prove(kernel: PipeliningKernel, device: str, wanted: Wanted) -> Pipelined:
    item = made(kernel, device, wanted)
    result = check(item)
    assert result.ok, f"{kernel} on {device}, {wanted}: {item.plan}\n{result}"
    return item


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize(("name", "device"), PAIRS)
def test_pipelined_kernels_are_right(name: str, device: str) -> None:
    prove(KERNELS[name], device, Wanted())


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("name", ["matmul_odd_steps", "matmul_triangular", "two_products", "matmul_zero_filled"])
@pytest.mark.parametrize("device", [A100, T4])
def test_all_numbers_of_stages_are_right(name: str, device: str) -> None:
    for shared, registers in (*STAGES, (8, 4)):
        item = prove(KERNELS[name], device, Wanted(shared_stages=shared, register_stages=registers))
        depths = {buffer.stages for buffer in item.plan.buffers if buffer.level == 0}
        assert depths and max(depths) <= shared


@pytest.mark.parametrize("name", ["matmul_odd_steps", "two_products", "matmul_zero_filled", "sum_of_rows"])
def test_on_an_amd_gpu(name: str) -> None:
    """LLVM's back end unrolls no loop by itself, so that register versions are unrolled by TVM."""
    item = prove(KERNELS[name], "amd-mi50", Wanted(shared_stages=2, register_stages=2))
    assert item.plan.buffers


def test_a_loop_of_which_one_step_loads_ahead() -> None:
    """Stock CompactBufferAllocation gave a buffer an extent by the variable of this kernel's loop of two steps."""
    x, w = te.placeholder((1, 32, 27, 27), "float32", "x"), te.placeholder((128, 32, 3, 3), "float32", "w")
    func = te.create_prim_func([x, w, topi.nn.conv2d_nchw(x, w, 1, 1, 1)])
    kernel = construct_kernel(func, "convolution", lookup("amd-mi300x"), BuildOptions())
    assert "v_rc_step in range(T.int64(2))" in kernel.script()
    result = verify(kernel, "amd-mi300x", blocks=(0, 223))
    assert result.ok, str(result)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "device"), PAIRS)
def test_all_kernels_are_right_with_all_numbers_of_stages(name: str, device: str) -> None:
    for shared, registers in STAGES:
        prove(KERNELS[name], device, Wanted(shared_stages=shared, register_stages=registers))


@pytest.mark.parametrize("name", HAND_WRITTEN)
def test_what_must_be_pipelined_is_and_what_must_not_is_not(name: str) -> None:
    kernel = HAND_WRITTEN[name]
    plan = made(kernel, A100, Wanted(shared_stages=3, register_stages=2)).plan
    planned = {buffer.name for buffer in plan.buffers}
    rules = {refusal.buffer: refusal.rule for refusal in plan.refusals}
    assert {*kernel.shared, *kernel.registers} <= planned, f"{plan}, refused: {plan.refusals}"
    assert not planned & set(kernel.refused), str(plan)
    for buffer, rule in kernel.refused.items():
        found = rules.get(buffer, rules.get("*"))
        assert found is not None, f"{buffer} is neither pipelined nor refused"
        assert rule in (None, found), plan.refusals


@pytest.mark.parametrize("mode", ["none", "double", "multistage", "full"])
def test_the_modes_of_the_ablation(mode: str) -> None:
    kernel = KERNELS["matmul_odd_steps"]
    item = prove(kernel, A100, Wanted(mode=mode, always=mode != "none"))
    levels = {buffer.level for buffer in item.plan.buffers}
    depths = {buffer.stages for buffer in item.plan.buffers if buffer.level == 0}
    assert levels == {"none": set(), "double": {0}, "multistage": {0}, "full": {0, 1}}[mode]
    assert mode != "double" or depths == {2}


def _sequential() -> list[tuple[str, str]]:
    """Kernels whose threads may run one after another: they exchange nothing that they have computed."""
    exchanging = ("exchanged_between_threads", "reused_for_results")
    return [
        (name, device)
        for name, kernel in HAND_WRITTEN.items()
        for device in kernel.devices
        if kernel.shared and device != OPENCL and name not in exchanging
    ]


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize(("name", "device"), _sequential())
def test_on_llvm_with_threads_as_loops(name: str, device: str) -> None:
    item = made(HAND_WRITTEN[name], device, Wanted(shared_stages=3, register_stages=2))
    assert item.plan.buffers
    assert error_on_llvm(item) <= tolerance(item)


def _on_opencl(name: str, wanted: Wanted) -> None:
    item = made(HAND_WRITTEN[name], OPENCL, wanted)
    assert error_on_opencl(item) <= tolerance(item), f"{wanted}: {item.plan}"


@pytest.mark.sampled(every=13)
@needs_opencl
@pytest.mark.parametrize("name", [name for name, kernel in HAND_WRITTEN.items() if OPENCL in kernel.devices])
def test_as_opencl_on_the_cpu(name: str) -> None:
    _on_opencl(name, Wanted())


@needs_opencl
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, kernel in HAND_WRITTEN.items() if OPENCL in kernel.devices])
def test_as_opencl_on_the_cpu_with_all_numbers_of_stages(name: str) -> None:
    for shared, registers in STAGES:
        _on_opencl(name, Wanted(shared_stages=shared, register_stages=registers))


@pytest.mark.parametrize("columns", [1, 2, 3, 16])
def test_shapes_known_at_launch(columns: int) -> None:
    """A symbolic function is pipelined as it is, and right for every extent that it is launched with."""
    function, k = symbolic_compute()
    kernel = PipeliningKernel(name="symbolic", make=lambda: function, reference=lambda a: 2.0 * a.astype("float64") + 1)
    item = made(kernel, A100, Wanted(shared_stages=3))
    assert [buffer.stages for buffer in item.plan.buffers] == [3]
    fixed = specialised(item.function, k, columns)
    result = verify(fixed, A100, reference=lambda arrays: {"C": kernel.reference(arrays["A"])})
    assert result.ok, result


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("number", range(0, 73, EVERY))
def test_operators_of_alcop(number: int) -> None:
    prove(scaled_operator(alcop_rows()[number % len(alcop_rows())], number, A100), A100, Wanted(shared_stages=3))


@pytest.mark.slow
@pytest.mark.parametrize("device", [A100, H200, V100, T4])
def test_all_operators_of_alcop(device: str) -> None:
    for number, row in enumerate(alcop_rows()):
        kernel = scaled_operator(row, number, device)
        stages = STAGES if device == A100 else ((2, 1), (3, 2))
        for shared, registers in stages:
            prove(kernel, device, Wanted(shared_stages=shared, register_stages=registers))
