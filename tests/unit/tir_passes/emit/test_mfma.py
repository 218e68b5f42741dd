"""Products on AMD's matrix cores: the instruction's layout, values in the interpreter, machine code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tvm
from onnx import TensorProto, helper, numpy_helper

from tests.support.pipelining.schedules import stock_intrinsics
from tests.support.product_chains import chain, function_of
from tests.unit.kernels import relative_error
from tests.unit.tir_passes.emit.tensor_core_operators import (
    Conv,
    cast_matmul,
    conv2d,
    emitted,
    fused_matmul,
    interpret,
    matmul,
    parts_of,
    random_inputs,
)
from tvm_ext import relay
from tvm_ext._tvm import tirx, tvm_ffi
from tvm_ext.analysis.gemm_form import split_of
from tvm_ext.devices import device_db
from tvm_ext.errors import IllegalRewrite
from tvm_ext.ir.build_ir import index, load, sequence, store
from tvm_ext.ir.matrix_units.mfma import INSTRUCTIONS, WORDS, MatrixInstruction
from tvm_ext.ir.simt_ir import gpu_buffer, launch
from tvm_ext.options import BuildOptions
from tvm_ext.records.choice import CHOICE
from tvm_ext.records.tuning import GpuTile
from tvm_ext.tir_passes.construct_kernels import construct_kernel
from tvm_ext.tir_passes.emit.mma_tiles.emit import supports_mma
from tvm_ext.tir_passes.roller.construct_mma import construct_mma, matrix_program
from tvm_ext.toolchains import rocm_toolchain
from tvm_ext.verify.build_check import check_kernel

MI210, MI300X = "amd-mi210", "amd-mi300x"
ROUNDING = {"float16": 2e-3, "bfloat16": 8e-3, "float32": 1e-5, "int32": 0.0}


def _cdna(side: int, run: int, name: str, lane: int, element: int) -> tuple[int, int]:
    """The CDNA guides' place of a lane's element, of ``run`` of each factor: (i, k) of A, (k, j) of B, (i, j) of C."""
    line, group = lane % side, lane // side
    along = group * run + element
    quads = element // 4 * (256 // side) + 4 * group + element % 4
    return {"A": (line, along), "B": (along, line), "C": (quads, line)}[name]


@pytest.mark.parametrize("instruction", INSTRUCTIONS, ids=lambda item: item.name)
def test_the_interpreter_multiplies_by_the_guides_layout(instruction: MatrixInstruction) -> None:
    generator = np.random.default_rng(0)
    side, depth, run = instruction.side, instruction.depth, instruction.elements
    dtype = {"int8": np.int8, "float16": np.float16, WORDS: ml_dtypes.bfloat16}[instruction.dtype]
    total = np.int32 if dtype is np.int8 else np.float32
    shapes = {"A": ((side, depth), dtype, run), "B": ((depth, side), dtype, run), "C": ((side, side), total, 0)}
    matrices = {name: generator.integers(-8, 8, shape).astype(kind) for name, (shape, kind, _) in shapes.items()}
    counts = {name: count or side * side // 64 for name, (*_, count) in shapes.items()}

    def lanes(name: str, matrix: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        places = [_cdna(side, run, name, *at) for at in np.ndindex(64, counts[name])]
        assert len(set(places)) == matrix.size  # every element once
        return np.array([matrix[place] for place in places])

    held = {name: lanes(name, matrix) for name, matrix in matrices.items()}
    given = {name: x.view(np.int16) if x.dtype == ml_dtypes.bfloat16 else x for name, x in held.items()}
    params = [tirx.decl_buffer([index(x.size)], str(x.dtype), name) for name, x in given.items()]
    out = tirx.decl_buffer([index(side * side)], np.dtype(total).name, "D")
    registers = [gpu_buffer([counts[name]], str(x.dtype), f"{name}_lane", "local") for name, x in given.items()]

    def body(_: Any, thread: Any) -> Any:
        def all_of(count: int, start: Any = index(0)) -> Any:  # noqa: B008
            return tirx.Ramp(start, index(1), count)

        sizes = list(counts.values())
        factors = [load(buffer, [all_of(size)]) for buffer, size in zip(registers, sizes, strict=True)]
        if dtype is np.int8:
            factors[:2] = [tirx.reinterpret(f"int{8 * run}", factor) for factor in factors[:2]]
        zero, name = tirx.const(0, "int32"), instruction.name
        product = tirx.call_llvm_pure_intrin(f"{out.ty.dtype}x{sizes[2]}", name, *factors, zero, zero, zero)
        filled = [
            store(to, load(given, [all_of(size, thread * index(size))]), [all_of(size)])
            for to, given, size in zip(registers, params, sizes, strict=True)
        ]
        stored = store(out, product, [all_of(sizes[2], thread * index(sizes[2]))])
        return sequence(*(tirx.AllocBuffer(buffer, {}) for buffer in registers), *filled, stored)

    made = tirx.PrimFunc([*params, out], launch(1, 64, body))
    made = made.with_attrs({"global_symbol": "main", "s_tir": True, "tirx.noalias": True})
    report = interpret(made, given, MI210)
    wanted = matrices["A"].astype("float64") @ matrices["B"].astype("float64") + matrices["C"]
    np.testing.assert_array_equal(report.outputs["D"], lanes("C", wanted.astype(total)))
    assert (report.counters.mma_count, report.counters.flops) == (1, 2 * side**2 * depth)


def test_the_guides_layout_is_stock_tvms() -> None:
    """Stock TVM's maps say which lane holds which element of a 16 x 16."""
    with stock_intrinsics("rocm") as stock:
        for name in "ABC":
            where = getattr(stock, f"shared_16x16_to_local_64x4_layout_{name}")
            for lane, element in np.ndindex(64, 4):
                assert tuple(map(int, where(*_cdna(16, 4, name, lane, element)))) == (lane, element)


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(
    ("operator", "device"),
    [
        (matmul(64, 48, 96, tb=True), MI300X),
        (matmul(70, 50, 90, ta=True, out="float32"), MI210),
        (matmul(33, 47, 65, dtype="bfloat16"), MI210),
        (matmul(40, 24, 64, batch=3, tb=True, dtype="bfloat16"), MI300X),
        (fused_matmul(48, 80, 64), MI300X),
        (cast_matmul(32, 32, 48), MI210),
        (conv2d(Conv()), MI210),
        (conv2d(Conv(c=24, f=40, stride=2, layout="NCHW OIHW"), "bfloat16"), MI300X),
        (matmul(64, 48, 96, tb=True, dtype="int8", out="int32"), MI210),
        (matmul(70, 50, 90, dtype="int8", out="int32"), MI300X),
        (matmul(64, 96, 128, batch=2, ta=True, dtype="int8", out="int32"), MI300X),
    ],
)  # fmt: skip
def test_values(operator: tuple[Any, Any], device: str) -> None:
    func, reference = operator
    made, kernel = emitted(func, device)
    assert kernel.threads % 64 == 0 and kernel.threads <= 256 and "mfma" in kernel.notes[0]
    inputs = random_inputs(func)
    report = interpret(made, inputs, device)
    output = list(func.params)[-1]
    wanted = reference(*(array.astype("float64") for array in inputs.values()))
    assert report.written[output.name].all()
    assert relative_error(report.outputs[output.name], wanted) <= ROUNDING[str(output.ty.dtype)]
    assert report.counters.mma_count > 0


@pytest.mark.parametrize("rows", [16, 32])
@pytest.mark.parametrize("dtype", ["float16", "int8"])
def test_fragments_contiguous_along_the_reduction_meet_no_bank_twice(dtype: str, rows: int) -> None:
    func, reference = matmul(64, 64, 128, tb=True, dtype=dtype, out="int32" if dtype == "int8" else "float32")
    tile = GpuTile(matrix=True, inner=(rows, 32), block=(2 * rows, 64, 64))
    program = matrix_program(tile, parts_of(func).expr, device_db.lookup(MI300X))
    made, kernel = emitted(func, MI300X, program)
    assert f"mfma {rows}x{rows}x" in kernel.notes[0]
    inputs = random_inputs(func)
    report = interpret(made, inputs, MI300X)
    assert relative_error(report.outputs["C"], reference(*(x.astype("float64") for x in inputs.values()))) < 1e-5
    shared = [item for item in report.counters.accesses if item.scope == "shared"]
    assert shared and all(item.wavefronts == item.least_wavefronts for item in shared)


def test_roller_chooses_the_instruction_by_its_model() -> None:
    """Both multiply as fast; 32 x 32 holds half as much of the factors at a time, and pads 16 rows to 32."""
    spec, steps = device_db.lookup(MI300X), []
    for rows in (4096, 16):
        func, _ = matmul(rows, 4096, 4096)
        programs = construct_mma(parts_of(func).expr, spec).programs
        steps.append([split_of(program).step for program in programs])
    assert 16 in steps[0] and steps[1][0] == 32


def test_what_has_no_matrix_core_or_no_instruction_here_is_left_to_vector_units() -> None:
    expr = parts_of(matmul(64, 64, 64)[0]).expr
    assert "no tensor cores" in str(supports_mma(expr, device_db.lookup("amd-mi50")))
    doubles = parts_of(matmul(64, 64, 64, dtype="float64", out="float64")[0]).expr
    assert "tensor cores do not multiply float64" in str(supports_mma(doubles, device_db.lookup(MI210)))


def test_factors_in_bfloat16_that_are_computed_are_refused() -> None:
    a, b = (tvm.te.placeholder((32, 32), "bfloat16", name) for name in "AB")
    doubled = tvm.te.compute((32, 32), lambda i, j: a[i, j] + a[i, j], "doubled")
    k = tvm.te.reduce_axis((0, 32), "k")
    product = tvm.te.compute((32, 32), lambda i, j: tvm.te.sum(doubled[i, k] * b[k, j], axis=k), "C")
    with pytest.raises(IllegalRewrite, match="in bfloat16 is computed while it is copied"):
        emitted(tvm.te.create_prim_func([a, b, product]), MI210)


@pytest.fixture
def unlinked() -> Iterator[None]:
    """Code stays an object file: what is looked at here needs no linker."""
    rocm_toolchain.enable_rocm()
    name = "tvm_callback_rocm_link"
    tvm_ffi.register_global_func(name, lambda content: bytearray(bytes(content)), override=True)
    yield
    tvm_ffi.register_global_func(name, rocm_toolchain.link, override=True)


@pytest.mark.usefixtures("unlinked")
@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(
    ("device", "dtype", "instruction"),
    [
        (MI210, "float16", "v_mfma_f32_16x16x16f16"),
        (MI210, "float16", "v_mfma_f32_32x32x8f16"),
        (MI210, "bfloat16", "v_mfma_f32_16x16x16bf16_1k"),
        (MI210, "bfloat16", "v_mfma_f32_32x32x8bf16_1k"),
        (MI210, "int8", "v_mfma_i32_16x16x16i8"),
        (MI210, "int8", "v_mfma_i32_32x32x8i8"),
        (MI300X, "float16", "v_mfma_f32_16x16x16_f16"),
        (MI300X, "float16", "v_mfma_f32_32x32x8_f16"),
        (MI300X, "bfloat16", "v_mfma_f32_16x16x16_bf16"),
        (MI300X, "bfloat16", "v_mfma_f32_32x32x8_bf16"),
        (MI300X, "int8", "v_mfma_i32_16x16x32_i8"),
        (MI300X, "int8", "v_mfma_i32_32x32x16_i8"),
    ],
)
def test_machine_code(device: str, dtype: str, instruction: str) -> None:
    """The instruction of the device, once for each fragment of a step, fed by reads of 16 bytes; nothing spills."""
    func, _ = matmul(128, 128, 256, dtype=dtype, tb=True, out="int32" if dtype == "int8" else "")
    spec, rows = device_db.lookup(device), 32 if "32x32" in instruction else 16
    tile = GpuTile(matrix=True, inner=(rows, 64), block=(2 * rows, 128, 128))
    made, _ = emitted(func, device, matrix_program(tile, parts_of(func).expr, spec))
    target = tvm.target.Target(dict(spec.target))
    library = tvm.compile(tvm.IRModule({"main": made}), target=target)
    text = str(library.mod.imports[0].inspect_source("asm"))
    assert set(re.findall(r"\bv_mfma\w+", text)) == {instruction}
    assert "ds_read_b128" in text and "ds_read_u" not in text
    assert re.search(r"vgpr_spill_count: +0\b", text)


@pytest.mark.usefixtures("unlinked")
@pytest.mark.parametrize("device", [MI210, MI300X])
def test_a_chain_is_one_kernel_without_a_spill(device: str) -> None:
    func = function_of(chain(64, 128, 64, 32))
    spec, target = device_db.device_for_target(device)
    with target:
        made = construct_kernel(func, "chain", spec, BuildOptions(enable_persistent_fusion=True))
        checked = check_kernel("chain", made, func, spec, target)
    assert "product0 + product1 in one kernel on matrix units" in str(made.attrs[CHOICE])
    assert (checked.launches, checked.problem) == (1, "")
    library = tvm.compile(tvm.IRModule({"main": made}), target=tvm.target.Target(dict(spec.target)))
    assert re.search(r"vgpr_spill_count: +0\b", str(library.mod.imports[0].inspect_source("asm")))


@pytest.mark.parametrize("kind", ["uint8", "int8"])
@pytest.mark.parametrize("operator", ["MatMulInteger", "ConvInteger"])
def test_a_build_multiplies_bytes_by_mfma(operator: str, kind: str) -> None:
    conv = operator == "ConvInteger"
    size, filters = ([1, 32, 8, 8], (32, 32, 3, 3)) if conv else ([64, 64], (64, 32))
    weights = np.random.default_rng(0).integers(-128, 128, filters).astype("int8")
    held = [numpy_helper.from_array(weights, "w"), numpy_helper.from_array(np.array(7, kind), "zero")]
    x = helper.make_tensor_value_info("x", TensorProto.UINT8 if kind == "uint8" else TensorProto.INT8, size)
    y = helper.make_tensor_value_info("y", TensorProto.INT32, None)
    node = helper.make_node(operator, ["x", "w", "zero"], ["y"], **({"pads": [1, 1, 1, 1]} if conv else {}))
    graph = helper.make_graph([node], "g", [x], [y], held)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    module, params = relay.frontend.from_onnx(model)
    operators = relay.operators(module, MI300X, params)
    (name,) = (name for name in operators if operator[:4].lower() in name)
    spec, target = device_db.device_for_target(MI300X)
    with target:
        made = construct_kernel(operators[name], "main", spec, BuildOptions())
        checked = check_kernel(name, made, operators[name], spec, target)
    assert "mfma 16x16x32" in str(made.attrs[CHOICE]) and checked.problem == "" and checked.error == 0


@pytest.mark.usefixtures("unlinked")
def test_a_build_loads_ahead_and_its_kernels_pass_the_interpreter() -> None:
    """Loads ahead send a kernel through stock TVM's passes twice, which took no vectors of several widths."""
    sizes, half = {"x": [8, 32, 14, 14], "y": [8, 64, 14, 14]}, TensorProto.FLOAT16
    weights = helper.make_tensor("w", half, [64, 32, 3, 3], np.ones((64, 32, 3, 3), "float16").tobytes(), raw=True)
    x, y = (helper.make_tensor_value_info(name, half, size) for name, size in sizes.items())
    node = helper.make_node("Conv", ["x", "w"], ["y"], pads=[1, 1, 1, 1])
    graph = helper.make_graph([node], "g", [x], [y], [weights])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    module, params = relay.frontend.from_onnx(model)
    text = str(relay.build(module, MI300X, params=params, verify=True).report)
    assert re.search(r"mfma \d+x\d+x\d+ in 4 warps", " ".join(text.split())) and "gfx942" in text
    assert re.search(r"loaded\s+ahead", text)
