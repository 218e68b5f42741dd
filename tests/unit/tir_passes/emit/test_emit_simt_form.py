"""SIMT kernels: their structure, what they need of a device, and what they refuse."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tvm_ffi
from tvm import te, topi

from tests.support.pipelining.check import cuda_source
from tests.unit.tir_passes.emit.simt_operators import (
    A100,
    H200,
    MI50,
    OPERATORS,
    V100,
    anchor_of,
    best_program,
    conv2d,
    emit,
    function,
    kernel_of,
    matmul,
    verified,
    with_tiles,
)
from tvm_ext._tvm import For, ForKind
from tvm_ext.devices import device_db
from tvm_ext.errors import IllegalRewrite
from tvm_ext.tir_passes.roller.construct import construct


# --- structure -----------------------------------------------------------------------------------------------------
def _divisible() -> tuple[Any, Any]:
    anchor = anchor_of(matmul(128, 256, 32).func)
    program = with_tiles(best_program(anchor), {"i": 8, "j": 8}, {"i": 64, "j": 128, "k": 8})
    device = replace(V100, unit_count=1)
    kernel = emit(anchor, program, device)
    return function(anchor, kernel), kernel


def test_tiles_that_divide_carry_no_predicate():
    func, kernel = _divisible()
    text = func.script()
    assert "if_then_else" not in text
    assert "if " not in text
    assert (kernel.threads, kernel.blocks) == (128, 4)
    assert kernel.shared_bytes == (8 * (64 + 4) + 8 * 128) * 4  # A transposed and padded, B as it lies


def test_tiles_that_do_not_divide_are_predicated():
    text = kernel_of(matmul(61, 67, 53).func)[0].script()
    assert "if_then_else" in text


def test_copies_operands_and_stores_are_16_byte_vectors():
    source = cuda_source(_divisible()[0], "sm_80")
    body = source[source.rindex('extern "C"') :]
    assert "float4 B_1_shared_ptr[256]" in body  # TVM's own choice where all accesses are vectors
    assert re.search(r"B_1_shared_ptr\[.*\] = \*\(float4\*\)\(B_ptr", body)
    assert re.search(r"\*\(float4\*\)\(A_0_shared_vector_ptr.*= \*\(float4\*\)\(A_ptr", body)
    assert re.search(r"\*\(float4\*\)\(A_0_fragment_ptr.*= \*\(float4\*\)\(A_0_shared_ptr", body)
    assert re.search(r"\*\(float4\*\)\(C_ptr.*= \*\(float4\*\)\(acc_ptr", body)
    assert body.count("__syncthreads") == 2  # before a step's copies and after them


def test_divisible_products_have_neither_conflicts_nor_wasted_sectors():
    operator = matmul(128, 256, 32)
    result = verified(operator, func=_divisible()[0])
    assert result.ok, str(result)
    assert result.counters.bank_conflicts == 0
    assert result.counters.sector_efficiency(store=False) == 1.0
    assert result.counters.sector_efficiency(store=True) == 1.0


@pytest.mark.parametrize("name", ["3x3 stride 2", "depthwise stride 2", "7x7 stride 2, 3 channels", "1x1"])
def test_windows_and_strides_read_shared_memory_without_conflicts(name):
    result = verified(OPERATORS[name])
    reads = result.counters.select(scope="shared", store=False)
    assert sum(access.conflicts for access in reads) == 0, str(result)


def test_a_small_grid_divides_the_reduction_among_threads():
    operator = matmul(16, 64, 1024)
    anchor = anchor_of(operator.func)
    kernel = emit(anchor, with_tiles(best_program(anchor), {"i": 2, "j": 2}, {"i": 16, "j": 32, "k": 16}))
    assert any("divided among" in note for note in kernel.notes)
    assert kernel.threads > 8 * 16
    result = verified(operator, func=function(anchor, kernel))
    assert result.ok, str(result)


def test_inputs_that_are_used_once_are_read_from_global_memory():
    func, kernel = kernel_of(matmul(1, 200, 300).func)
    assert any("B read from global memory" in note for note in kernel.notes)
    assert "B_1_shared" not in func.script()


def test_steps_of_a_single_point_are_deepened():
    operator = matmul(48, 72, 40, transpose_a=True)
    anchor = anchor_of(operator.func)
    program = with_tiles(best_program(anchor), {"i": 2, "j": 4}, {"i": 16, "j": 16, "k": 1})
    assert "k_step in range(T.int64(5))" in function(anchor, emit(anchor, program)).script()  # 40 products, 8 a step


def test_kernels_for_llvm_are_unrolled_by_tvm():
    text = kernel_of(matmul(64, 64, 64).func, MI50)[0].script()
    assert "pragma_unroll_explicit" not in text
    assert "T.unroll" in text


def test_kernels_for_opencl_use_static_shared_memory():
    device = device_db.lookup("opencl")
    func, _ = kernel_of(conv2d(1, 16, (20, 20), 32, (3, 3), 1, 1).func, device)
    assert '"shared.dyn"' not in func.script()


def test_the_function_read_is_not_changed():
    operator = matmul(64, 64, 64)
    before = tvm_ffi.structural_hash(operator.func)
    kernel_of(operator.func)
    assert tvm_ffi.structural_hash(operator.func) == before


def _loops(func: Any) -> dict[str, int]:
    found: dict[str, int] = {}

    def visit(loop: Any) -> None:
        if loop.kind == ForKind.THREAD_BINDING:
            found[str(loop.thread_binding.thread_tag)] = int(loop.extent)

    tvm_ffi.structural_walk(func.body, (For, visit))
    return found


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("name", OPERATORS)
def test_the_plan_says_what_the_kernel_launches(name):
    func, kernel = kernel_of(OPERATORS[name].func)
    assert _loops(func) == {"blockIdx.x": kernel.blocks, "threadIdx.x": kernel.threads}


# --- refusals ------------------------------------------------------------------------------------------------------
def _refused(upper: dict[str, int], lower: dict[str, int], device: Any = V100) -> str:
    anchor = anchor_of(matmul(2048, 2048, 2048).func)
    with pytest.raises(IllegalRewrite) as refusal:
        emit(anchor, with_tiles(best_program(anchor), upper, lower), device)
    return str(refusal.value)


def test_too_many_threads_are_refused_with_the_numbers():
    message = _refused({"i": 2, "j": 2}, {"i": 128, "j": 128, "k": 8})
    assert "takes 4096 threads, nvidia-v100 has 1024 in a block" in message


def test_too_many_registers_are_refused_with_the_numbers():
    assert "256 accumulators, 32 operands" in _refused({"i": 16, "j": 16}, {"i": 64, "j": 64, "k": 8})
    message = _refused({"i": 8, "j": 8}, {"i": 128, "j": 512, "k": 8})  # 1024 threads: 64 registers each
    assert "leaves 64 to each of 1024 threads" in message


def test_too_much_shared_memory_is_refused_with_the_numbers():
    assert "of shared memory, nvidia-v100 has 98304" in _refused({"i": 8, "j": 8}, {"i": 128, "j": 128, "k": 256})


def test_shared_memory_beyond_the_static_limit_is_asked_for_where_the_device_has_it():
    operator = matmul(128, 128, 64)
    anchor = anchor_of(operator.func)
    program = with_tiles(best_program(anchor), {"i": 8, "j": 8}, {"i": 128, "j": 128, "k": 64})
    kernel = emit(anchor, program)
    assert 48 * 1024 < kernel.shared_bytes <= 96 * 1024
    func = function(anchor, kernel)
    assert '"shared.dyn"' in func.script()
    result = verified(operator, func=func)
    assert result.ok, str(result)


# --- the paper's operators -----------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize("device", [V100, A100, H200], ids=lambda d: d.name)
def test_the_papers_operators_emit_within_the_device(device):
    workload = Path(__file__).resolve().parents[4] / "benchmarks" / "workloads" / "roller_ops.csv"
    refused = []
    for name, func in _paper_operators(workload):
        anchor = anchor_of(func)
        for program in construct(anchor.expr, device, k=10, tensor_core=False).programs:
            try:
                kernel = emit(anchor, program, device)
            except IllegalRewrite:
                continue
            assert kernel.shared_bytes <= (device.layer("L1").opt_in_capacity_bytes or 0)
            assert kernel.threads <= (device.max_threads_per_block or 0)
            break
        else:
            refused.append(name)
    assert refused == []


def _paper_operators(workload: Path) -> list[tuple[str, Any]]:
    import csv

    from benchmarks.networks.roller_models import same_padding

    with workload.open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["op"] in ("MatMul", "Conv2D", "DepthwiseConv")]
    found = []
    for row in rows:
        if row["op"] == "MatMul":
            found.append((row["id"], matmul(int(row["M"]), int(row["N_mm"]), int(row["K"])).func))
            continue
        n, c, h, w, r, s, stride = (int(row[key]) for key in ("N", "C", "H", "W", "KH", "KW", "stride"))
        pads = [
            same_padding(size, k, stride)[1:] if row["padding"] == "SAME" else (0, 0) for size, k in ((h, r), (w, s))
        ]
        pad = [pads[0][0], pads[1][0], pads[0][1], pads[1][1]]
        x = te.placeholder((n, c, h, w), "float32", "X")
        if row["op"] == "Conv2D":
            weight = te.placeholder((int(row["F"]), c, r, s), "float32", "W")
            y = topi.nn.conv2d_nchw(x, weight, stride, pad, 1)
        else:
            weight = te.placeholder((c, 1, r, s), "float32", "W")
            y = topi.nn.depthwise_conv2d_nchw(x, weight, stride, pad, 1)
        found.append((row["id"], te.create_prim_func([x, weight, y])))
    return found
