"""Tensor-core kernels: their structure, and their numbers in the SIMT interpreter against float64."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.support.pipelining.check import cuda_source
from tests.unit.compilers import needs_nvcc
from tests.unit.kernels import relative_error
from tests.unit.tir_passes.emit.tensor_core_operators import (
    Conv,
    cast_matmul,
    conv2d,
    emitted,
    fused_matmul,
    gelu_matmul,
    interpret,
    matmul,
    parts_of,
    programs_of,
    random_inputs,
)
from tvm_ext.devices import device_db
from tvm_ext.errors import IllegalRewrite
from tvm_ext.records.rprogram import RProgram
from tvm_ext.tir_passes.emit.mma_tiles.emit import emit_mma_tile, supports_mma
from tvm_ext.toolchains.cuda_toolchain import find_nvcc

AMPERE, VOLTA, TURING = "nvidia-a100", "nvidia-v100", "nvidia-t4"
ROUNDING = {"float16": 2e-3, "bfloat16": 8e-3, "float32": 1e-5, "int32": 0.0}


def with_tiles(program: RProgram, warp: tuple[int, ...], block: tuple[int, ...], blocks: int) -> RProgram:
    tiles = dict(program.tiles)
    sizes = (("L0", replace(tiles["L0"], shape=warp)), ("L1", replace(tiles["L1"], shape=block)))
    return replace(program, tiles=sizes, partition_count=blocks)


def check(operator: tuple[Any, Any], device: str, program: RProgram | None = None) -> Any:
    """Emit, lower, interpret, compare; returns the interpreter's counters."""
    func, reference = operator
    made, _ = emitted(func, device, program)
    inputs = random_inputs(func)
    report = interpret(made, inputs, device)
    output = list(func.params)[-1]
    wanted = reference(*(array.astype("float64") for array in inputs.values()))
    assert report.written[output.name].all()
    assert relative_error(report.outputs[output.name], wanted) <= ROUNDING[str(output.ty.dtype)]
    return report.counters


# ---- numbers --------------------------------------------------------------------------------------------------------


@pytest.mark.sampled
@pytest.mark.parametrize("device", [AMPERE, VOLTA])
@pytest.mark.parametrize(("ta", "tb"), [(False, False), (False, True), (True, False), (True, True)])
def test_every_transposition_of_a_matmul(device: str, ta: bool, tb: bool) -> None:
    check(matmul(96, 160, 128, ta=ta, tb=tb), device)


@pytest.mark.sampled
@pytest.mark.parametrize("device", [AMPERE, VOLTA])
@pytest.mark.parametrize("shape", [(127, 61, 37), (17, 16, 2), (50, 30, 70), (33, 100, 64)], ids=str)
def test_shapes_that_no_tile_divides(device: str, shape: tuple[int, int, int]) -> None:
    check(matmul(*shape), device)


@pytest.mark.parametrize("device", [AMPERE, VOLTA])
def test_batched_matmul(device: str) -> None:
    check(matmul(40, 60, 48, batch=3, tb=True), device)


@pytest.mark.parametrize("device", [AMPERE, VOLTA])
def test_float32_result(device: str) -> None:
    check(matmul(64, 80, 96, out="float32"), device)


def test_bfloat16() -> None:
    check(matmul(64, 48, 80, dtype="bfloat16", tb=True), AMPERE)


@pytest.mark.sampled
@pytest.mark.parametrize("device", [AMPERE, TURING])
@pytest.mark.parametrize(("ta", "tb"), [(False, True), (False, False), (True, False)])
def test_int8_is_exact(device: str, ta: bool, tb: bool) -> None:
    check(matmul(50, 96, 160, dtype="int8", out="int32", ta=ta, tb=tb), device)


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("device", [AMPERE, VOLTA])
@pytest.mark.parametrize(
    "shape",
    [
        Conv(),
        Conv(layout="NHWC HWIO", h=9, w=7),
        Conv(stride=2, h=9),
        Conv(dilation=2, pad=2),
        Conv(r=1, s=1, pad=0),
        Conv(r=1, s=1, pad=0, stride=2),
        Conv(c=3, f=24, r=7, s=7, stride=2, pad=3, h=16, w=14, n=1),
        Conv(layout="NCHW OIHW"),
        Conv(layout="NCHW OIHW", r=1, s=1, pad=0, h=7, w=7),
    ],
    ids=lambda c: f"{c.layout}-{c.c}x{c.r}x{c.s}-s{c.stride}-d{c.dilation}",
)
def test_convolutions_with_padding_bias_and_relu(device: str, shape: Conv) -> None:
    check(conv2d(shape), device)


@pytest.mark.sampled
@pytest.mark.parametrize("device", [AMPERE, VOLTA])
@pytest.mark.parametrize("columns", [64, 63], ids=["vectors", "scalars"])
def test_epilogue_runs_on_the_accumulators(device: str, columns: int) -> None:
    operator = fused_matmul(40, columns, 96)
    _, kernel = emitted(operator[0], device)
    assert len(kernel.statements) == 1
    check(operator, device)


@pytest.mark.parametrize("device", [AMPERE, VOLTA])
def test_a_cast_is_fused_into_the_copy(device: str) -> None:
    check(cast_matmul(48, 64, 40), device)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("device", [AMPERE, VOLTA])
def test_every_program_computes_the_same(device: str) -> None:
    operator = matmul(200, 264, 96)
    for program in programs_of(operator[0], device, k=10)[1::3]:
        check(operator, device, program)


@pytest.mark.parametrize("device", [AMPERE, VOLTA])
def test_split_k_adds_partial_sums_in_a_second_kernel(device: str) -> None:
    operator = fused_matmul(64, 96, 1024)
    base = programs_of(operator[0], device)[0]
    program = with_tiles(base, (16, 32, 16), (32, 64, 32), 2 * 2 * 8)
    _, kernel = emitted(operator[0], device, program)
    assert [type(s).__name__ for s in kernel.statements] == ["AllocBuffer", "For", "For"]
    assert "reduction split among 8 blocks" in kernel.notes
    check(operator, device, program)


def test_split_k_with_shares_that_do_not_divide() -> None:
    operator = matmul(32, 48, 1000)  # 32 steps of 32 (the last one cut) in 5 shares of 7: the last share has 4
    program = with_tiles(programs_of(operator[0], AMPERE)[0], (16, 16, 16), (32, 48, 32), 5)
    check(operator, AMPERE, program)


@pytest.mark.parametrize("device", [AMPERE, VOLTA])
def test_split_k_of_a_batch(device: str) -> None:
    operator = matmul(32, 48, 256, batch=3, tb=True)
    program = with_tiles(programs_of(operator[0], device)[0], (1, 16, 16, 16), (1, 32, 48, 32), 3 * 2)
    _, kernel = emitted(operator[0], device, program)
    assert kernel.blocks == 6
    check(operator, device, program)


@settings(max_examples=10, deadline=None)
@given(
    shape=st.tuples(st.integers(2, 140), st.integers(2, 140), st.integers(2, 140)),
    transposed=st.tuples(st.booleans(), st.booleans()),
    choice=st.integers(0, 9),
    device=st.sampled_from([AMPERE, VOLTA]),
)
def test_any_product_by_any_program(
    shape: tuple[int, int, int], transposed: tuple[bool, bool], choice: int, device: str
) -> None:
    operator = matmul(*shape, ta=transposed[0], tb=transposed[1])
    assume(supports_mma(parts_of(operator[0]).expr, device_db.lookup(device)) is None)
    programs = programs_of(operator[0], device)
    check(operator, device, programs[choice % len(programs)])


def test_tiles_beyond_48_kib_are_dynamic_shared_memory() -> None:
    operator = matmul(128, 256, 128)
    program = with_tiles(programs_of(operator[0], AMPERE)[0], (64, 64, 16), (128, 256, 128), 1)
    made, kernel = emitted(operator[0], AMPERE, program)
    assert kernel.shared_bytes == (128 + 256) * 128 * 2
    assert "extern __shared__" in cuda_source(made, "sm_80")
    check(operator, AMPERE, program)


# ---- structure ------------------------------------------------------------------------------------------------------


def test_aligned_kernel_is_free_of_conflicts_and_predicates() -> None:
    operator = matmul(256, 384, 256)
    made, _ = emitted(operator[0], AMPERE)
    counters = check(operator, AMPERE)
    assert counters.bank_conflicts == 0
    assert counters.sector_efficiency() == 1.0
    loop = cuda_source(made, "sm_80").split("k_outer = 0")[1].split("condval")[0]  # until lanes exchange halves
    assert "ldmatrix" in loop
    assert "if (" not in loop
    assert " ? " not in loop


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("shape", [(256, 256, 16), (256, 256, 32), (256, 256, 64), (192, 80, 96)], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_no_tile_has_bank_conflicts(shape: tuple[int, int, int], transposed: bool) -> None:
    operator = matmul(*shape, ta=transposed, tb=transposed)
    for program in programs_of(operator[0], AMPERE, k=4):
        assert check(operator, AMPERE, program).bank_conflicts == 0


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("columns", [80, 96, 112, 160])
@pytest.mark.parametrize("transposed", [False, True])
def test_padded_tiles_of_any_width_have_no_bank_conflicts(columns: int, transposed: bool) -> None:
    """Rows of 10, 12 or 14 chunks end between two wavefronts of a copy: on V100 they are padded, not swizzled."""
    operator = matmul(256, columns, 64, tb=transposed)
    for program in programs_of(operator[0], VOLTA, k=3):
        assert check(operator, VOLTA, program).bank_conflicts == 0


@pytest.mark.sampled
@pytest.mark.parametrize("device", [AMPERE, VOLTA])
@pytest.mark.parametrize("wide", [False, True])
def test_functions_without_vector_form_are_computed_lane_by_lane_and_stored_by_vectors(device: str, wide: bool) -> None:
    counters = check(gelu_matmul(128, 96, 64, "float32" if wide else "float16"), device)
    assert counters.sector_efficiency(store=True) == 1.0
    assert counters.sector_efficiency(store=False) > 0.9  # a bias of halves is read by 16 bytes where floats are stored
    assert counters.bank_conflicts == 0


def test_global_memory_is_copied_by_sixteen_bytes() -> None:
    made, _ = emitted(matmul(256, 256, 256)[0], AMPERE)
    source = cuda_source(made, "sm_80")
    assert len(re.findall(r"\*\(uint4\*\)\(\w_shared_ptr \+ .*\) = \*\(uint4\*\)\(\w_ptr", source)) >= 2
    assert "half2" not in source.split("k_outer")[1].split("ldmatrix")[0]


def test_ptxas_is_told_how_many_blocks_are_planned_where_they_are_many() -> None:
    """Else it spills registers of small tiles to fit in more. Of large ones it makes as many as it sees fit."""
    small, kernel = emitted(matmul(1024, 64, 4096, out="float32")[0], "nvidia-h200")
    bounds = re.findall(r"__launch_bounds__\((\d+), (\d+)\) main_kernel\(", cuda_source(small, "sm_90"))
    assert bounds
    threads, blocks = map(int, bounds[0])
    assert threads == kernel.threads
    assert blocks >= 3
    registers = device_db.lookup("nvidia-h200").registers_per_unit
    assert registers is not None
    assert registers // (threads * blocks) > kernel.register_count
    large, _ = emitted(matmul(4096, 4096, 512)[0], "nvidia-h200")
    assert re.search(r"__launch_bounds__\(\d+\) main_kernel\(", cuda_source(large, "sm_90"))


def test_the_loop_over_the_reduction_of_wmma_is_left_a_loop() -> None:
    source = cuda_source(emitted(matmul(256, 256, 256)[0], VOLTA)[0], "sm_70")
    assert re.search(r"#pragma unroll 1\n\s*for \(int k_outer", source)


def test_barriers_surround_the_copies_only() -> None:
    made, _ = emitted(matmul(256, 256, 256)[0], AMPERE)
    assert cuda_source(made, "sm_80").count("__syncthreads();") == 2


def test_unaligned_rows_are_copied_one_by_one_and_said_so() -> None:
    _, kernel = emitted(matmul(64, 64, 37)[0], AMPERE)
    assert "A copied 1 elements at a time" in kernel.notes
    _, kernel = emitted(matmul(64, 64, 36)[0], AMPERE)
    assert not any(note.startswith("A") for note in kernel.notes)


def test_weights_are_read_along_their_memory_whatever_their_axes() -> None:
    """W[f, c, r, s] of 9 taps: (c, r, s) is one run of 288 halves, copied 8 at a time."""
    _, kernel = emitted(conv2d(Conv(layout="NCHW OIHW"))[0], AMPERE)
    assert not any(note.startswith("A") for note in kernel.notes)


def test_volta_uses_wmma_and_ampere_mma_sync() -> None:
    func, _ = matmul(128, 128, 128)
    assert "wmma::mma_sync" in cuda_source(emitted(func, VOLTA)[0], "sm_70")
    ampere = cuda_source(emitted(func, AMPERE)[0], "sm_80")
    assert "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32" in ampere
    assert "wmma" not in ampere.split("main_kernel", 1)[1]


# ---- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("operator", "device", "reason"),
    [
        (matmul(64, 64, 64, dtype="float32"), AMPERE, "do not multiply float32"),
        (matmul(64, 64, 64), "nvidia-k80", "no tensor cores"),
        (matmul(64, 64, 64), "amd-mi50", "no tensor cores"),
        (matmul(64, 64, 64, dtype="bfloat16"), TURING, "no tensor cores for bfloat16"),
        (matmul(64, 64, 64, dtype="int8", out="int32"), VOLTA, "no tensor cores for int8"),
        (matmul(64, 64, 64, dtype="int8"), AMPERE, "accumulated in int32"),
        (matmul(1, 64, 64), AMPERE, "single row"),
        (matmul(2, 3, 5), AMPERE, "padding to fragments"),
    ],
)
def test_why_not(operator: tuple[Any, Any], device: str, reason: str) -> None:
    refusal = supports_mma(parts_of(operator[0]).expr, device_db.lookup(device))
    assert refusal is not None
    assert reason in refusal


@pytest.mark.parametrize(
    ("warp", "block", "reason"),
    [
        ((24, 16, 16), (48, 32, 16), "not whole fragments"),
        ((16, 16, 16), (32, 32, 8), "not whole fragments"),
        ((32, 32, 16), (48, 32, 16), "not whole warp tiles"),
        ((16, 16, 16), (128, 128, 16), "2048 threads exceed"),
        ((64, 64, 16), (256, 256, 256), "262144 bytes exceed"),
    ],
)
def test_programs_that_do_not_fit_are_refused(warp: tuple[int, ...], block: tuple[int, ...], reason: str) -> None:
    func, _ = matmul(512, 512, 512)
    program = with_tiles(programs_of(func, AMPERE)[0], warp, block, 1)
    with pytest.raises(IllegalRewrite, match=reason):
        emitted(func, AMPERE, program)


def test_what_is_no_product_is_refused() -> None:
    parts = parts_of(matmul(64, 64, 64, dtype="float16")[0])
    program = programs_of(matmul(64, 64, 64)[0], AMPERE)[0]
    twisted = replace(parts.anchor, value=parts.anchor.value.a + parts.anchor.value.b)
    with pytest.raises(IllegalRewrite, match="multiplies something else"):
        emit_mma_tile(twisted, parts.expr, (), (), program, device_db.lookup(AMPERE), parts.params)


# ---- the CUDA compiler ----------------------------------------------------------------------------------------------


@pytest.mark.sampled(every=5)
@needs_nvcc
@pytest.mark.parametrize(
    ("operator", "device", "arch"),
    [
        (matmul(1024, 1024, 1024), AMPERE, "sm_80"),
        (matmul(4096, 4096, 512, tb=True), "nvidia-h200", "sm_90"),
        (conv2d(Conv(n=8, h=28, w=28, c=128, f=128)), AMPERE, "sm_80"),
        (matmul(512, 512, 512, dtype="int8", out="int32", tb=True), AMPERE, "sm_80"),
        (matmul(512, 512, 512, dtype="bfloat16"), AMPERE, "sm_80"),
        (matmul(1024, 1024, 1024), TURING, "sm_75"),
        (matmul(50176, 512, 256, out="float32"), VOLTA, "sm_75"),
        (gelu_matmul(1024, 1024, 1024), AMPERE, "sm_80"),
        (matmul(1024, 64, 4096, out="float32"), "nvidia-h200", "sm_90"),
    ],
    ids=["matmul", "hopper", "conv", "int8", "bfloat16", "wmma", "eight steps of wmma", "gelu", "small tiles"],
)
def test_compiles_without_spills_within_the_plan(
    operator: tuple[Any, Any], device: str, arch: str, tmp_path: Path
) -> None:
    made, kernel = emitted(operator[0], device)
    (tmp_path / "kernel.cu").write_text(cuda_source(made, arch), encoding="utf-8")
    command = [str(find_nvcc().path), f"-arch={arch}", "-cubin", "-Xptxas", "-v", "-o", "kernel.cubin", "kernel.cu"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "0 bytes spill stores, 0 bytes spill loads" in done.stderr
    registers = max(int(count) for count in re.findall(r"Used (\d+) registers", done.stderr))
    assert registers <= kernel.register_count + 32
    assert registers <= 255
