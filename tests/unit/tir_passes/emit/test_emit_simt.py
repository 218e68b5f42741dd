"""SIMT kernels: their values and parallel meaning in the interpreter, their structure, and what they refuse."""

from __future__ import annotations

import math
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
import tvm_ffi
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import te, tirx, topi

from tests.unit.compilers import needs_nvcc
from tests.unit.tir_passes.emit.simt_operators import (
    V100,
    VECTOR_RULES,
    Operator,
    anchor_of,
    batch_matmul,
    best_program,
    conv1d,
    conv2d,
    conv2d_nhwc,
    conv3d,
    convolved,
    depthwise,
    emit,
    function,
    kernel_of,
    matmul,
    random_inputs,
    verified,
    with_tiles,
)
from tvm_ext._tvm import For, ForKind
from tvm_ext.devices import device_db
from tvm_ext.errors import IllegalRewrite
from tvm_ext.tir_passes.roller.construct import construct
from tvm_ext.toolchains.cuda_toolchain import find_nvcc
from tvm_ext.verify import opencl_cpu

A100, H200, MI50 = (device_db.lookup(name) for name in ("nvidia-a100", "nvidia-h200", "amd-mi50"))

OPERATORS = {
    "square": matmul(64, 64, 32),
    "primes": matmul(31, 37, 29),
    "a single row": matmul(1, 200, 300),
    "a single column": matmul(100, 1, 300),
    "a single product": matmul(32, 32, 1),
    "tiny": matmul(3, 5, 7),
    "b transposed": matmul(48, 72, 40, transpose_b=True),
    "a transposed": matmul(48, 72, 40, transpose_a=True),
    "double": matmul(32, 32, 32, "float64"),
    "half": matmul(32, 64, 64, "float16"),
    "half to float": matmul(32, 48, 64, "float16", out="float32"),
    "bytes": matmul(32, 64, 64, "int8", out="int32"),
    "batch": batch_matmul(3, 33, 20, 24),
    "batch, b transposed": batch_matmul(2, 19, 23, 29, transpose_b=True),
    "3x3": conv2d(1, 8, (14, 14), 16, (3, 3), 1, 1),
    "3x3 stride 2": conv2d(1, 8, (29, 29), 16, (3, 3), 2),
    "3x5, odd": conv2d(2, 7, (11, 13), 5, (3, 5)),
    "7x7 stride 2, 3 channels": conv2d(1, 3, (24, 24), 8, (7, 7), 2, 3),
    "dilated": conv2d(1, 8, (16, 16), 8, (3, 3), 1, 2, 2),
    "1x1": conv2d(2, 24, (7, 7), 40, (1, 1)),
    "1x1 stride 2": conv2d(2, 16, (14, 14), 24, (1, 1), 2),
    "groups": conv2d(1, 8, (10, 10), 16, (3, 3), 1, 1, 1, 4),
    "nhwc": conv2d_nhwc(1, 16, (9, 9), 16, (3, 3), 1),
    "depthwise": depthwise(2, 5, (15, 15), 3, 1, 1),
    "depthwise stride 2": depthwise(1, 7, (21, 21), 5, 2, 2),
    "1-d": conv1d(2, 16, 50, 24, 5, 2, 2),
    "3-d": conv3d(1, 4, (6, 8, 10), 8, 3, 1),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_kernels_have_no_race_no_stray_access_and_the_right_values(name):
    result = verified(OPERATORS[name])
    assert result.ok, str(result)
    assert result.errors


@pytest.mark.parametrize("device", [A100, H200, MI50], ids=lambda d: d.name)
@pytest.mark.parametrize("name", ["primes", "3x3 stride 2", "depthwise", "half to float"])
def test_other_devices_have_other_tiles_and_the_same_values(name, device):
    assert verified(OPERATORS[name], device).ok


@settings(max_examples=6, deadline=None)
@given(m=st.integers(2, 33), n=st.integers(2, 33), k=st.integers(2, 20), transpose_b=st.booleans())
def test_any_product_is_right(m, n, k, transpose_b):
    result = verified(matmul(m, n, k, transpose_b=transpose_b))
    assert result.ok, str(result)


@settings(max_examples=6, deadline=None)
@given(st.data())
def test_any_tile_of_a_program_is_right(data):
    """Tiles that no construction would choose: sizes that divide nothing, steps that leave a rest."""
    operator = matmul(19, 23, 13)
    anchor = anchor_of(operator.func)
    upper = {name: data.draw(st.sampled_from([1, 2, 3, 4, 8])) for name in ("i", "j")}
    lower = {name: size * data.draw(st.integers(1, 5)) for name, size in upper.items()}
    lower["k"] = data.draw(st.integers(1, 13))
    kernel = emit(anchor, with_tiles(best_program(anchor), upper, lower))
    result = verified(operator, func=function(anchor, kernel))
    assert result.ok, str(result)


def test_any_window_is_right():
    for stride, dilation, pad in [(1, 1, 0), (2, 1, 1), (3, 1, 2), (1, 3, 3), (2, 2, 1)]:
        result = verified(conv2d(1, 3, (9, 11), 4, (3, 3), stride, pad, dilation))
        assert result.ok, f"stride {stride}, dilation {dilation}, padding {pad}: {result}"


# --- fusion --------------------------------------------------------------------------------------------------------
def _with_epilogue() -> Operator:
    """relu(conv + bias) + residual."""
    x, w = te.placeholder((1, 8, 12, 12), "float32", "X"), te.placeholder((16, 8, 3, 3), "float32", "W")
    bias = te.placeholder((1, 16, 1, 1), "float32", "bias")
    other = te.placeholder((1, 16, 12, 12), "float32", "residual")
    y = topi.add(topi.nn.relu(topi.add(topi.nn.conv2d_nchw(x, w, 1, 1, 1), bias)), other)

    def reference(a: Any, b: Any, c: Any, d: Any) -> Any:
        return np.maximum(convolved(a, b, 1, 1) + c, 0) + d

    return Operator(func=te.create_prim_func([x, w, bias, other, y]), reference=reference)


def _with_gelu(m: int, n: int, k: int) -> Operator:
    """gelu(A @ B + bias) + residual by the error function; stock TVM has no vector form of it."""
    a, b = te.placeholder((m, k), "float32", "A"), te.placeholder((k, n), "float32", "B")
    bias, other = te.placeholder((n,), "float32", "bias"), te.placeholder((m, n), "float32", "residual")
    x = topi.add(topi.nn.matmul(a, b), bias)
    half = te.compute((m, n), lambda i, j: x[i, j] * 0.5 * (1.0 + tirx.erf(x[i, j] * 0.7071067811865476)), "gelu")

    def reference(a: Any, b: Any, c: Any, d: Any) -> Any:
        y = a @ b + c
        return y * 0.5 * (1.0 + np.vectorize(math.erf)(y * math.sqrt(0.5))) + d

    return Operator(func=te.create_prim_func([a, b, bias, other, topi.add(half, other)]), reference=reference)


@pytest.mark.parametrize("shape", [(128, 256, 32), (61, 67, 53)], ids=str)
def test_functions_without_vector_form_do_not_break_the_vectors_around_them(shape):
    operator = _with_gelu(*shape)
    anchor = anchor_of(operator.func)
    assert anchor.epilogue
    func = function(anchor, emit(anchor, best_program(anchor)))
    result = verified(operator, func=func)
    assert result.ok, str(result)
    if shape[1] % 4 == 0:
        assert result.counters.sector_efficiency(store=True) == 1.0
        widths = {access.width_bytes for access in result.counters.select(scope="global", store=True)}
        assert widths <= {8, 16}


def test_epilogues_are_computed_on_the_accumulators():
    operator = _with_epilogue()
    anchor = anchor_of(operator.func)
    assert len(anchor.epilogue) == 1
    kernel = emit(anchor, best_program(anchor))
    assert len(kernel.statements) == 1
    result = verified(operator, func=function(anchor, kernel))
    assert result.ok, str(result)


def test_the_padding_is_computed_on_the_way_to_shared_memory():
    anchor = anchor_of(OPERATORS["3x3"].func)
    assert [computation.target.name for computation in anchor.prologue] == ["pad_temp"]
    func = function(anchor, emit(anchor, best_program(anchor)))
    assert "pad_temp[" not in func.script()


def test_half_precision_is_accumulated_in_single():
    operator = matmul(8, 8, 2048, "float16")
    result = verified(operator)
    assert result.errors[0].error < 2e-3  # float16 alone would be off by some percent after so many additions


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


def _source(func: Any, arch: str = "sm_80") -> str:
    target = tvm.target.Target({"kind": "cuda", "arch": arch})
    return str(tvm.compile(tvm.IRModule({"main": func}), target=target).mod.imports[0].inspect_source())


def test_copies_operands_and_stores_are_16_byte_vectors():
    source = _source(_divisible()[0])
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


# --- other rungs of the ladder -------------------------------------------------------------------------------------
@pytest.mark.skipif(opencl_cpu.why_not() is not None, reason=f"{opencl_cpu.why_not()}")
@pytest.mark.parametrize("name", ["primes", "a single row", "3x3 stride 2", "groups", "depthwise", "batch"])
def test_opencl_runs_the_same_kernels(name):
    operator = OPERATORS[name]
    func, _ = kernel_of(operator.func, device_db.lookup("opencl"))
    arrays = random_inputs(operator.func)
    (found,) = opencl_cpu.run_opencl(func, arrays)
    expected = operator.reference(*(array.astype(np.float64) for array in arrays))
    assert np.linalg.norm(found - expected) < 1e-5 * np.linalg.norm(expected)


@needs_nvcc
@pytest.mark.parametrize("name", ["square", "3x3 stride 2", "depthwise", "half"])
def test_ptxas_needs_no_more_registers_than_the_device_gives_and_spills_nothing(name, tmp_path):
    func, kernel = kernel_of(OPERATORS[name].func, A100)
    path = tmp_path / "kernel.cu"
    path.write_text(_source(func), encoding="utf-8")
    command = [
        str(find_nvcc().path),
        "-arch=sm_80",
        "-cubin",
        "-Xptxas",
        "-v",
        "-o",
        str(tmp_path / "out.cubin"),
        str(path),
    ]
    report = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stderr
    spilled = re.findall(r"(\d+) bytes spill", report)
    registers = int(re.findall(r"Used (\d+) registers", report)[0])
    assert spilled
    assert set(spilled) == {"0"}
    assert registers <= 65536 // kernel.threads


# --- the paper's operators -----------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize("device", [V100, A100, H200], ids=lambda d: d.name)
def test_the_papers_operators_emit_within_the_device(device):
    workload = Path(__file__).resolve().parents[4] / "benchmarks" / "workloads" / "roller_ops.csv"
    refused = []
    for name, func in _paper_operators(workload):
        anchor = anchor_of(func)
        for program in construct(anchor.expr, device, k=10, rules=VECTOR_RULES).programs:
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

    from tvm_ext.bench.roller_models import same_padding

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
