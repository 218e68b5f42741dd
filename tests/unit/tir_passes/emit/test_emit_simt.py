"""SIMT kernels: their values and parallel meaning in the interpreter, on the CPU by OpenCL and by nvcc."""

from __future__ import annotations

import math
import re
import subprocess
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import te, tirx, topi

from tests.support import opencl_cpu
from tests.support.pipelining.check import cuda_source
from tests.unit.compilers import needs_nvcc
from tests.unit.tir_passes.emit.simt_operators import (
    A100,
    H200,
    MI50,
    OPERATORS,
    Operator,
    anchor_of,
    best_program,
    conv2d,
    convolved,
    emit,
    function,
    kernel_of,
    matmul,
    random_inputs,
    verified,
    with_tiles,
)
from tvm_ext.devices import device_db
from tvm_ext.toolchains.cuda_toolchain import find_nvcc


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("name", OPERATORS)
def test_kernels_have_no_race_no_stray_access_and_the_right_values(name):
    result = verified(OPERATORS[name])
    assert result.ok, str(result)
    assert result.errors


@pytest.mark.sampled
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


def test_a_last_step_behind_its_loop_has_tiles_of_its_own():
    """In dynamic shared memory, too: tiles that the loop's steps shared with it could not be loaded ahead."""
    operator = matmul(256, 256, 160)
    anchor = anchor_of(operator.func)
    program = with_tiles(best_program(anchor, A100), {"i": 8, "j": 8}, {"i": 128, "j": 128, "k": 64})
    kernel = emit(anchor, program, A100)
    assert kernel.shared_bytes > 48 * 1024
    func = function(anchor, kernel)
    assert func.script().count("_shared_rest = ") == 2
    assert verified(operator, A100, func).ok


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


# --- other rungs of the ladder -------------------------------------------------------------------------------------
@pytest.mark.sampled(every=3)
@pytest.mark.skipif(opencl_cpu.why_not() is not None, reason=f"{opencl_cpu.why_not()}")
@pytest.mark.parametrize("name", ["primes", "a single row", "3x3 stride 2", "groups", "depthwise", "batch"])
def test_opencl_runs_the_same_kernels(name):
    operator = OPERATORS[name]
    func, _ = kernel_of(operator.func, device_db.lookup("opencl"))
    arrays = random_inputs(operator.func)
    (found,) = opencl_cpu.run_opencl(func, arrays)
    expected = operator.reference(*(array.astype(np.float64) for array in arrays))
    assert np.linalg.norm(found - expected) < 1e-5 * np.linalg.norm(expected)


@pytest.mark.sampled(every=2)
@needs_nvcc
@pytest.mark.parametrize("name", ["square", "3x3 stride 2", "depthwise", "half"])
def test_ptxas_needs_no_more_registers_than_the_device_gives_and_spills_nothing(name, tmp_path):
    func, kernel = kernel_of(OPERATORS[name].func, A100)
    path = tmp_path / "kernel.cu"
    path.write_text(cuda_source(func, "sm_80"), encoding="utf-8")
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
